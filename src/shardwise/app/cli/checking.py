"""The command `check`: prints the verdict of the independent checker and what the planner computes again."""

from __future__ import annotations

from shardwise import api
from shardwise.app.cli.activity import progress
from shardwise.app.cli.output import Line, Output
from shardwise.questions import CheckedPlan
from shardwise_verify import PROOF_BUDGET_S, check_lines, lines_of

DISAGREES = 4
"""Exit code where a check fails."""

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
    width = max(len(name) for _, name, _ in (*lines, *again))
    printed = [_line(*line, width) for line in lines]
    if again:
        printed += [(("", ""),), ((f"{HEADING} (no independent check)", "title"),)]
        printed += [_line(*line, width) for line in again]
    return Output(lines=printed, notes=_notes(found), code=code)


_STYLES = {"ok": "good", "open": "warn", "wrong": "bad", "note": "label"}


def _line(word: str, name: str, text: str, width: int) -> Line:
    return (f"{word:<5}", _STYLES[word]), (f"  {name:<{width}}  ", "label"), (text, "")


def _notes(found: CheckedPlan) -> list[str]:
    undecided = [check.name for check in found.checks if check.is_open]
    if not found.failed:
        return [f"shardwise: not proven: {name}" for name in undecided]
    wrong = ", ".join(check.name for check in found.failed)
    return [f"shardwise: {len(found.failed)} of {len(found.checks)} checks fail: {wrong}"]
