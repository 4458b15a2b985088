"""Mutated answers: a relation that accepts them checks nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tests.relations.commands import Answer, Commands, Saved, Words
from tests.relations.questions import Question
from tests.relations.relation import Relation

Change = Callable[[Answer], Answer]


class RecordedCommands(Commands):
    """Records the commands that a relation runs, and their answers."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self.answers: dict[str, Answer] = {}

    def answer(self, words: Words) -> Answer:
        answer = self._commands.answer(words)
        return self.answers.setdefault(answer.text, answer)

    def path_of(self, saved: Saved) -> str:
        return self._commands.path_of(saved)


class MutatedCommands(RecordedCommands):
    """Replaces the answer to one command by `changed`."""

    def __init__(self, commands: Commands, text: str, changed: Answer) -> None:
        super().__init__(commands)
        self._text, self._changed = text, changed

    def answer(self, words: Words) -> Answer:
        answer = super().answer(words)
        return self._changed if answer.text == self._text else answer


def catches_mutants(relation: Relation, question: Question, commands: Commands) -> bool:
    """Whether the relation holds for the true answers, and fails for some worse answer."""
    recorded = RecordedCommands(commands)
    relation.check(question, recorded)
    return any(
        _fails(relation, question, MutatedCommands(commands, text, changed))
        for text, changed in _mutated_answers(list(recorded.answers.values()))
    )


def _fails(relation: Relation, question: Question, commands: Commands) -> bool:
    try:
        relation.check(question, commands)
    except AssertionError:
        return True
    return False


def _mutated_answers(answers: list[Answer]) -> Iterator[tuple[str, Answer]]:
    """Each answer in turn, a thousandth slower than the slowest of all, and with each mutation of its
    kind."""
    slowest_s = max((_seconds(answer) for answer in answers if answer.fits), default=0.0)
    for answer in answers:
        if answer.fits:
            slower_s = 1.001 * slowest_s / max(1.0 - answer.gap, 0.001)
            yield answer.text, replace(answer, document=_with_time(answer.document, slower_s))
            for change in MUTATIONS:
                yield answer.text, change(answer)


def _seconds(answer: Answer) -> float:
    document = answer.document
    if "points" in document or "best" in document or "result" in document:
        return answer.step_time_s
    return float(document.get("step_time_s") or 0.0)


def _with_time(document: Mapping[str, Any], step_s: float) -> dict[str, Any]:
    """The answer's document with this step time."""
    changed = dict(document)
    for key in ("best", "result"):
        if isinstance(changed.get(key), Mapping):
            changed[key] = {**changed[key], "step_time_s": step_s}
    if changed.get("points"):
        changed["points"] = [{**changed["points"][0], "time_s": step_s}, *changed["points"][1:]]
    if "step_time_s" in changed:
        changed["step_time_s"] = step_s
    return changed


def _disagrees(answer: Answer) -> Answer:
    """`explain` finds another best plan."""
    return replace(answer, document={**answer.document, "agrees": False})


def _refuses(answer: Answer) -> Answer:
    """`check` rejects the plan."""
    return replace(answer, document={**answer.document, "ok": False}, code=4)


def _larger(answer: Answer) -> Answer:
    """The smallest point takes a thousandth more memory."""
    points = [dict(point) for point in answer.document.get("points", ())]
    for point in points[-1:]:
        point["memory_bytes"] *= 1.001
    return replace(answer, document={**answer.document, **({"points": points} if points else {})})


def _miscounted(answer: Answer) -> Answer:
    """`space` counts one more candidate."""
    count = answer.document.get("count")
    return replace(answer, document={**answer.document, **({} if count is None else {"count": count + 1})})


def _costlier(answer: Answer) -> Answer:
    """The best plan costs twice as much."""
    best = answer.document.get("best")
    if not isinstance(best, Mapping) or not best.get("usd_per_billion_tokens"):
        return answer
    costlier = {**best, "usd_per_billion_tokens": 2.0 * best["usd_per_billion_tokens"]}
    return replace(answer, document={**answer.document, "best": costlier})


def _wasteful(answer: Answer) -> Answer:
    """A smaller part than the chosen one fits, and a later one is slower."""
    parts = answer.document.get("parts")
    if not parts:
        return answer
    smaller = {**parts[0], "devices": 0, "step_time_s": 1.0}
    slower = {**parts[0], "step_time_s": 2.0 * answer.step_time_s}
    return replace(answer, document={**answer.document, "parts": [smaller, *parts, slower]})


def _idle(answer: Answer) -> Answer:
    """One more device is reported as idle."""
    idle = answer.document.get("idle")
    if not idle:
        return answer
    return replace(answer, document={**answer.document, "idle": {**idle, "devices": idle["devices"] + 1}})


def _proven(answer: Answer) -> Answer:
    """An answer without a proof is called proven."""
    return replace(answer, document={**answer.document, "is_proven": True})


def _unprofitable(answer: Answer) -> Answer:
    """A migration makes fewer steps than keeping the plan."""
    steps = answer.document.get("keep_steps")
    worse = {"decision": "move", "steps": 0.5 * steps} if steps else {}
    return replace(answer, document={**answer.document, **worse})


MUTATIONS: tuple[Change, ...] = (
    _disagrees, _refuses, _larger, _miscounted, _costlier, _wasteful, _idle, _proven, _unprofitable
)  # fmt: skip
"""Further mutations; each leaves answers of other kinds as they are."""
