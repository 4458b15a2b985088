"""What `explain` answers: the tree of candidates and what pinned the best, or another question beside the
plan's."""

from __future__ import annotations

from shardwise import search
from shardwise.app.cli import differences, documents, tree
from shardwise.app.cli.output import INTERRUPTED, Output, progress
from shardwise.errors import ConfigError
from shardwise.plan import read_plan
from shardwise.strategy import parse_fields


def explained(
    path: str,
    *,
    why_not: str | None,
    what_if: str | None,
    workers: int,
    budget_s: float | None,
    is_json: bool,
) -> Output:
    """The answer of `explain` about the plan file at `path`.

    Raises ConfigError for a file that is no plan and for changes that cannot be made, Infeasible where
    nothing with what is pinned or changed fits.
    """
    if why_not is not None and what_if is not None:
        raise ConfigError("stands beside --what-if", key="--why-not", allowed="one of the two")
    pinned = None if why_not is None else parse_fields(why_not, key="--why-not")
    if pinned == {}:
        raise ConfigError("names no field", key="--why-not", found=repr(why_not), allowed="name=value,...")
    plan = read_plan(path)
    with progress() as show:
        if pinned is not None:
            comparison = search.why_not(plan, pinned, workers=workers, budget_s=budget_s, progress=show)
        elif what_if is not None:
            comparison = search.what_if(plan, what_if, workers=workers, budget_s=budget_s, progress=show)
        else:
            explanation = search.explained(plan, workers=workers, budget_s=budget_s, progress=show)
            notes, code = _explain_exit_status(explanation.is_interrupted)
            if is_json:
                return Output(document=documents.explanation(plan, explanation), notes=notes, code=code)
            if not explanation.agrees and not explanation.unexplored:
                notes.append("shardwise: the search finds another best than the plan's now")
            return Output(lines=tree.explanation_lines(plan, explanation), notes=notes, code=code)
    notes, code = _explain_exit_status(comparison.answer.is_interrupted)
    kind, requested = ("why_not", why_not) if pinned is not None else ("what_if", what_if)
    if is_json:
        document = documents.comparison(plan, comparison, kind=kind, requested=str(requested))
        return Output(document=document, notes=notes, code=code)
    lines = differences.comparison_lines(plan, comparison, kind=kind, requested=str(requested))
    return Output(lines=lines, notes=notes, code=code)


def _explain_exit_status(is_interrupted: bool) -> tuple[list[str], int]:
    """What is said of how the search ended, and the exit code."""
    if is_interrupted:
        return ["shardwise: interrupted; this is what was found so far"], INTERRUPTED
    return [], 0
