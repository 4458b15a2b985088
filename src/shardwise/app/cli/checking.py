"""The command `check`: prints the verdict of the independent checker and what the planner computes again."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise import api
from shardwise.app.cli.activity import progress
from shardwise.app.cli.output import Line, Output, columns
from shardwise.app.cli.words import wrapped_text
from shardwise.questions import CheckedPlan
from shardwise_verify import PROOF_BUDGET_S, check_lines, lines_of

DISAGREES = 4
"""Exit code where a check fails."""

LONGEST_NAME = 24
"""Most columns of the name of a check; the value of one with a longer name starts on the next line."""

HEADING = "computed again by the planner"


def checked(path: str, *, is_json: bool, proof_budget_s: float = PROOF_BUDGET_S) -> Output:
    """The verdict on the plan file at `path`. ConfigError for a file that is no plan or was altered."""
    with progress() as show:
        found = api.check(path, proof_budget=proof_budget_s, progress=show)
    code = DISAGREES if found.failed else 0
    if is_json:
        return Output(document=found.to_dict(), notes=_notes(found), code=code)
    lines = list(lines_of(found.verdict))
    again = list(check_lines(found.computed_again))
    width = min(max(len(name) for _, name, _ in (*lines, *again)), LONGEST_NAME)
    printed = [part for line in lines for part in _parts(*line, width)]
    if again:
        printed += [(("", ""),), ((f"{HEADING} (no independent check)", "title"),)]
        printed += [part for line in again for part in _parts(*line, width)]
    return Output(lines=printed, notes=_notes(found), code=code)


_STYLES = {"ok": "good", "open": "warn", "wrong": "bad", "note": "label"}


def _parts(word: str, name: str, text: str, width: int) -> Iterator[Line]:
    """A check with its name in `width` columns; a value that is found as expected is shown once."""
    found, _, expected = text.rpartition("; expected ")
    indent = len(word.ljust(5)) + 2 + width + 2
    texts = wrapped_text(found if found == expected else text, columns() - indent)
    if len(name) > width:
        texts = ["", *texts]
    for place, part in enumerate(texts):
        head = (f"{'' if place else word:<5}", _STYLES[word])
        yield head, (f"  {'' if place else name:<{width}}  ", "label"), (part, "")


def _notes(found: CheckedPlan) -> list[str]:
    undecided = [check.name for check in found.checks if check.is_open]
    if not found.failed:
        return [f"shardwise: not proven: {name}" for name in undecided]
    wrong = ", ".join(check.name for check in found.failed)
    return [f"shardwise: {len(found.failed)} of {len(found.checks)} checks fail: {wrong}"]
