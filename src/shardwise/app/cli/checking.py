"""What `check` answers: a line for each thing that must hold of a plan file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby

from shardwise.app.cli.graph_checking import check_graph_file
from shardwise.app.cli.output import Line, Output
from shardwise.app.cli.uneven_checking import check_uneven_file
from shardwise.check import PROOF_BUDGET_S, Check, Verdict, check_file
from shardwise.plan import is_graph_plan, is_uneven_plan

VERSION = 1
DISAGREES = 4
"""Exit code where some check does not hold."""

_SHOWN = 180
"""Characters of a found or expected value in the terminal; JSON has all of them."""


def checked(path: str, *, is_json: bool, proof_budget_s: float = PROOF_BUDGET_S) -> Output:
    """The verdict on the plan file at `path`. ConfigError for a file that is no plan or was altered."""
    verdict = verdict_on(path, proof_budget_s)
    code = 0 if verdict.ok else DISAGREES
    if is_json:
        return Output(document=_document(verdict), notes=_talk(verdict), code=code)
    width = max(len(check.name) for check in verdict.checks)
    lines = [_line(check, width) for check in verdict.checks]
    return Output(lines=[*lines, *_not_judged_lines(verdict, width)], notes=_talk(verdict), code=code)


def verdict_on(path: str, proof_budget_s: float) -> Verdict:
    """By what the file says that it is."""
    if is_graph_plan(path):
        return check_graph_file(path)
    if is_uneven_plan(path):
        return check_uneven_file(path)
    return check_file(path, proof_budget_s=proof_budget_s)


def _line(check: Check, width: int) -> Line:
    word, style = ("ok   ", "good") if check.ok else ("open ", "warn") if check.is_open else ("wrong", "bad")
    name = (f"  {check.name:<{width}}  ", "label")
    return (word, style), name, (f"{_short(check.found)}; expected {_short(check.expected)}", "")


def _not_judged_lines(verdict: Verdict, width: int) -> Iterator[Line]:
    """A line for each reason: the keys of the file that are not judged for it."""
    for why, keys in groupby(verdict.unchecked, key=lambda one: one.why):
        listed = ", ".join(one.key for one in keys)
        yield ("note ", "label"), (f"  {'not judged':<{width}}  ", "label"), (f"{listed}: {why}", "")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _talk(verdict: Verdict) -> list[str]:
    wrong = [check.name for check in verdict.checks if not check.ok and not check.is_open]
    undecided = [check.name for check in verdict.checks if check.is_open]
    if not wrong:
        return [f"shardwise: not proven: {name}" for name in undecided]
    return [f"shardwise: {len(wrong)} of {len(verdict.checks)} checks do not hold: {', '.join(wrong)}"]


def _document(verdict: Verdict) -> dict[str, object]:
    return {
        "schema": "shardwise.check",
        "version": VERSION,
        "plan_hash": verdict.plan_hash,
        "ok": verdict.ok,
        "checks": [asdict(check) for check in verdict.checks],
        "not_judged": [asdict(one) for one in verdict.unchecked],
    }
