"""Why a plan is what it is: its question asked again, and questions beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose

from shardwise.errors import Infeasible
from shardwise.plan import Answer, Plan, Result, Value
from shardwise.search.answer import goal_of, plan, search
from shardwise.search.clock import SearchClock
from shardwise.search.drive import Progress
from shardwise.search.pinned import Axis, Binding, axes_of, binding_of
from shardwise.search.question import Question
from shardwise.search.targets import searched_limits
from shardwise.search.tree import LedgerEntry, ledger_entries, ledger_totals
from shardwise.search.whatif import changed_question
from shardwise.strategy import FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What became of all candidates, and what every change of one field of `best` would cost.

    `unexplored` candidates were left out where the search was ended early, `is_interrupted` where the user
    ended it. `agrees` says whether the search
    found the plan's best again.
    """

    best: Result
    entries: tuple[LedgerEntry, ...]
    totals: Mapping[str, int]
    unexplored: int
    is_interrupted: bool
    agrees: bool
    axes: tuple[Axis, ...]
    binding: Binding


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComparison:
    """Two answers side by side: the plan's, and that of another question."""

    before: Result
    after: Result
    question: Question
    answer: Answer

    @property
    def fields(self) -> dict[str, tuple[Value, Value]]:
        """Fields of the strategy that differ: what they were, what they are."""
        pairs = {
            name: (getattr(self.before.strategy, name), getattr(self.after.strategy, name)) for name in FIELDS
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Seconds that each part takes more; they sum to the difference of the step times."""
        return _more(self.before.breakdown, self.after.breakdown)

    @property
    def memory_bytes(self) -> dict[str, float]:
        """Bytes that each part takes more, each on its own tightest rank; they sum to the difference."""
        return _more(self.before.memory, self.after.memory)


def _more(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after.get(name, 0.0) - before.get(name, 0.0) for name in dict.fromkeys((*before, *after))}


def question_of(plan: Plan, *, workers: int = 1, budget_s: float | None = None) -> Question:
    """The question that a plan answers, on the devices that it uses."""
    proof = plan.certificate
    return Question(
        model=plan.model,
        cluster=plan.cluster,
        job=plan.job,
        space=proof.space,
        fixed=proof.fixed,
        axes=proof.axes,
        objective="memory" if plan.objective == "memory" else "time",
        top=len(plan.runners_up),
        workers=workers,
        budget_s=budget_s,
        limits=() if plan.target is None else searched_limits(plan.target, plan.model, plan.job),
    )


def explained(
    of: Plan, *, workers: int = 1, budget_s: float | None = None, progress: Progress | None = None
) -> Explanation:
    """The tree of the plan's candidates, and what pinned its best strategy."""
    question = question_of(of, workers=workers, budget_s=budget_s)
    problem = question.problem()
    with SearchClock(budget_s).handling_interrupts() as clock:
        outcome = search(question, problem, goal_of(question), clock=clock, progress=progress)
    axes = axes_of(question, problem, of.best)
    return Explanation(
        best=of.best,
        entries=ledger_entries(outcome.ledger),
        totals=ledger_totals(outcome.ledger),
        unexplored=outcome.unexplored,
        is_interrupted=outcome.is_interrupted,
        agrees=bool(outcome.found) and isclose(outcome.found[0].time_s, of.best.step_time_s, rel_tol=1e-9),
        axes=axes,
        binding=binding_of(problem, of.best, axes),
    )


def why_not(
    of: Plan,
    pinned: Mapping[str, Value],
    *,
    workers: int = 1,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> PlanComparison:
    """The best with some fields pinned beside the plan's. What is pinned wins over what the plan's question
    fixed. Raises Infeasible, with reason counts, where nothing with these values fits."""
    requested = question_of(of, workers=workers, budget_s=budget_s)
    axes = {name: values for name, values in requested.axes.items() if name not in pinned}
    return _compared(of, replace(requested, fixed={**requested.fixed, **pinned}, axes=axes, top=0), progress)


def what_if(
    of: Plan,
    changes: str,
    *,
    workers: int = 1,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> PlanComparison:
    """The best on a changed cluster or for a changed job beside the plan's: see `changed_question`."""
    requested = replace(question_of(of, workers=workers, budget_s=budget_s), top=0)
    return _compared(of, changed_question(requested, changes), progress)


def _compared(of: Plan, question: Question, progress: Progress | None) -> PlanComparison:
    try:
        answer = plan(question, progress=progress)
    except Infeasible as error:
        raise Infeasible(error.message, reasons=error.reasons) from None
    used = question if answer.cluster is None else replace(question, cluster=answer.cluster)
    return PlanComparison(before=of.best, after=answer.best, question=used, answer=answer)
