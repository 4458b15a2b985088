"""From a `Question` to an `Answer`: search, evaluate the strategies found, certify the lower bound.

`plan` is the entry point. `evaluate` and `plan_of_strategy` predict one given strategy without a search.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from math import inf

import numpy as np

from shardwise.cluster import Cluster, Parts, Selection, pools_of
from shardwise.cost import Problem, bind, peaks_of
from shardwise.errors import Infeasible
from shardwise.model import Model
from shardwise.pareto import non_dominated
from shardwise.plans import (
    Answer,
    Certificate,
    FrontierPoint,
    MixedFigures,
    Plan,
    Result,
    StrategyFrontier,
    idle_in,
    plan_of,
)
from shardwise.schedule import Schedule, generate
from shardwise.search import step_times
from shardwise.search.bnb.incumbent import Fastest, Goal, Smallest, Tradeoff
from shardwise.search.bnb.ledger import CandidateLedger
from shardwise.search.bnb.solver import BranchAndBound, Progress, SearchResult
from shardwise.search.clock import SearchClock
from shardwise.search.cluster_parts import Searched, best_part, on_all_devices, why_not_mixed
from shardwise.search.infeasibility import OutOfTime, infeasible, legal_reason
from shardwise.search.question import Question
from shardwise.search.result import result_of
from shardwise.search.space import Degrees
from shardwise.sim import Durations
from shardwise.strategy import HOST_MEMORY, MEMORY, Job, Strategy, StrategyTable
from shardwise.units import format_seconds

LEAST_NAMED_SHARE = 0.02
"""Share of the required memory from which an error message names a component."""


def plan(question: Question, *, progress: Progress | None = None, clock: SearchClock | None = None) -> Answer:
    """The best strategy in the question's space, on the part of the cluster with the best objective value;
    with runners-up on that part and the certificate.

    A search that is ended by its budget or by the user returns the incumbent. Raises Infeasible if no legal
    candidate fits, with reason counts and relaxations that do fit (within a budget, those found in time), or
    if nothing was found in time. Raises KeyboardInterrupt if the user interrupts before an incumbent exists.
    A given `clock` replaces the budget.
    """
    question.problem()
    clock = clock or SearchClock(question.budget_s)
    with clock.handling_interrupts():
        return answered(question, searched(question, clock, progress), clock, progress)


def searched(question: Question, clock: SearchClock, progress: Progress | None) -> Searched:
    """Searches the parts of the cluster that the question allows. If a part after the first one is best, its
    runners-up are still to be searched."""
    if question.uses_parts:
        return best_part(question, clock, partial(_search_for, clock=clock, progress=progress))
    outcome = search(question, question.problem(), goal_of(question), clock=clock, progress=progress)
    return on_all_devices(question, outcome)


def _search_for(
    question: Question,
    goal: Goal,
    degrees: Sequence[Degrees] | None,
    *,
    clock: SearchClock,
    progress: Progress | None,
) -> SearchResult:
    return search(question, question.problem(), goal, degrees=degrees, clock=clock, progress=progress)


def answered(question: Question, found: Searched, clock: SearchClock, progress: Progress | None) -> Answer:
    """The answer to a question whose search has an incumbent: runners-up, the step time on all devices, and
    the frontier if it is requested, as far as time allows. Raises Infeasible if nothing was found."""
    used, outcome = found.question, found.outcome
    if not outcome.found:
        raise _nothing_found(question, found, clock)
    problem = used.problem()
    if not found.is_complete:
        best = outcome.found[0].table[0]
        outcome = search(
            used, problem, Fastest(used.top + 1), warm_start=[best], clock=clock, progress=progress
        )
    # Evaluate again: a truncated search may hold an incumbent's time with its slack added.
    results = [result_of(problem, one.table[0]) for one in outcome.found]
    frontier = None
    if used.frontier and not clock.is_interrupted:
        frontier = frontier_of(used, [search(used, problem, Tradeoff(), clock=clock, progress=progress)])
    return Answer(
        best=results[0],
        runners_up=tuple(results[1:]),
        certificate=certificate_of(used, outcome, results[0].step_time_s),
        objective=used.objective,
        cluster=used.cluster,
        parts=found.parts,
        pruned_parts=found.pruned,
        unexplored_parts=found.unexplored,
        idle=idle_in(question.cluster, used_ranks(question.cluster, found.part)),
        all_devices_step_time_s=all_devices_s(question, found, clock, progress),
        frontier=frontier,
        mixed=figures_of(question, found),
        is_interrupted=clock.is_interrupted,
    )


def all_devices_s(
    question: Question, found: Searched, clock: SearchClock, progress: Progress | None
) -> float | None:
    """Step time in seconds of the fastest strategy on all devices; None if nothing fits on all of them, or if
    no time is left to find it."""
    whole = found.whole
    if whole is None and not clock.is_over:
        whole = search(question, question.problem(), Fastest(1), clock=clock, progress=progress)
    return whole.found[0].time_s if whole is not None and whole.found else None


def figures_of(question: Question, found: Searched) -> MixedFigures | None:
    """The step times that a plan on a cluster of several pools is compared with; None on other clusters and
    for other objectives than time."""
    pools = pools_of(question.cluster)
    if len(pools) == 1 or question.objective != "time":
        return None
    outcome = found.outcome
    used = found.part.pools
    return MixedFigures(
        uniform_step_time_s=outcome.found[0].time_s if outcome.found else None,
        fastest_class_step_time_s=found.best_pool_s,
        fastest_class=found.best_pool,
        idle=tuple(pool.name for place, pool in enumerate(pools) if place not in used),
        why_uniform=why_not_mixed(question.cluster),
    )


def used_ranks(cluster: Cluster, part: Selection) -> tuple[int, ...]:
    """Ranks, in the whole cluster, of a part's devices."""
    return ranks_of_nodes(cluster, Parts(cluster).places_of(part))[: part.devices]


def ranks_of_nodes(cluster: Cluster, places: Iterable[int]) -> tuple[int, ...]:
    """Ranks of the devices of the nodes at these positions."""
    firsts = list(accumulate((node.devices for node in cluster.nodes), initial=0))
    return tuple(rank for place in places for rank in range(firsts[place], firsts[place + 1]))


def goal_of(question: Question) -> Goal:
    """The goal of the search on the chosen part of the cluster."""
    return Smallest() if question.objective == "memory" else Fastest(question.top + 1)


def search(
    question: Question,
    problem: Problem,
    goal: Goal,
    *,
    warm_start: Sequence[Strategy] = (),
    degrees: Sequence[Degrees] | None = None,
    clock: SearchClock | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Runs one branch-and-bound search of the question's space for `goal`, on all of its devices.
    `warm_start` and `degrees` are as in `BranchAndBound`."""
    return BranchAndBound(
        problem,
        question.candidates(),
        goal,
        exhaustive=question.exhaustive,
        workers=question.workers,
        clock=clock,
        warm_start=warm_start,
        degrees=degrees,
    ).run(progress)


def _nothing_found(question: Question, found: Searched, clock: SearchClock) -> Infeasible:
    """The error of a search without an answer. A user interrupt is raised as KeyboardInterrupt."""
    outcome = found.outcome
    if clock.is_interrupted:
        raise KeyboardInterrupt
    budget = format_seconds(question.budget_s or 0.0)
    unfinished = found.unexplored + sum(not part.is_complete for part in found.parts)
    if unfinished and question.uses_parts:
        parts = found.unexplored + len(found.parts)
        return Infeasible(
            f"nothing that fits was found within the budget of {budget}; {unfinished:,} of {parts:,} "
            "parts of the cluster are unexplored",
            reasons={},
        )
    if outcome.unexplored:
        total = outcome.enumerated + outcome.unexplored
        return Infeasible(
            f"nothing that fits was found within the budget of {budget}; "
            f"{outcome.unexplored:,} of {total:,} candidates are unexplored",
            reasons={},
        )
    # Relaxations are searched within the remaining budget.
    left = clock.with_budget(None) if question.budget_s is None else clock

    def whole(requested: Question, problem: Problem, goal: Goal) -> SearchResult:
        if left.is_over and not left.is_interrupted:
            raise OutOfTime
        found = search(requested, problem, goal, clock=left)
        if found.is_interrupted:
            raise KeyboardInterrupt
        return found

    return infeasible(question, question.problem(), outcome, whole)


def frontier_of(question: Question, outcomes: Sequence[SearchResult]) -> StrategyFrontier | None:
    """The Pareto frontier of step time and memory of searches for a trade-off in parts of the question's
    space; None if nothing was found in time."""
    problem = question.problem()
    points = [point for outcome in outcomes for point in frontier_points(problem, outcome)]
    if not points:
        return None
    if len(outcomes) > 1:
        figures = np.array([(point.step_time_s, point.device_bytes) for point in points])
        points = [points[place] for place in non_dominated(figures).tolist()]
    certificate = certificate_of(question, joined(outcomes), points[0].step_time_s)
    return StrategyFrontier(points=tuple(points), certificate=certificate)


def frontier_points(problem: Problem, outcome: SearchResult) -> tuple[FrontierPoint, ...]:
    """The points of a search for a trade-off, fastest first; none if it found nothing."""
    if not outcome.found:
        return ()
    table = StrategyTable.joined([found.table for found in outcome.found])
    times_s = step_times.step_times_s(problem, table).tolist()
    return tuple(
        FrontierPoint(strategy=strategy, step_time_s=time_s, device_bytes=found.device_bytes)
        for strategy, time_s, found in zip(table, times_s, outcome.found, strict=True)
    )


def joined(outcomes: Sequence[SearchResult]) -> SearchResult:
    """The outcome of searches of disjoint parts of a space: all that they found and counted. Without
    searches, nothing."""
    ledger = CandidateLedger()
    for one in outcomes:
        ledger.merge(one.ledger)
    return SearchResult(
        found=[found for one in outcomes for found in one.found],
        ledger=ledger,
        unexplored=sum(one.unexplored for one in outcomes),
        lower_bound_s=min((one.lower_bound_s for one in outcomes), default=inf),
        is_interrupted=any(one.is_interrupted for one in outcomes),
        search_s=sum(one.search_s for one in outcomes),
        search_cpu_s=sum(one.search_cpu_s for one in outcomes),
    )


def certificate_of(question: Question, outcome: SearchResult, best_s: float) -> Certificate:
    """The certificate: every candidate is rejected, pruned by a bound that is no lower than the best, or
    evaluated. No unexplored candidate takes less than the lower bound."""
    lower_s = min(outcome.lower_bound_s, best_s)
    return Certificate(
        space=question.space,
        fixed=question.fixed,
        axes=question.axes,
        empty_ends=question.has_empty_ends,
        own_set=question.has_own_set,
        enumerated=outcome.enumerated,
        unexplored=outcome.unexplored,
        rejected=outcome.ledger.rejected,
        cut_by_bound=outcome.ledger.pruned,
        simulated=outcome.ledger.simulated,
        best_s=best_s,
        lower_bound_s=lower_s,
        gap=(best_s - lower_s) / best_s,
        search_s=outcome.search_s,
        search_cpu_s=outcome.search_cpu_s,
        priced_as=question.cluster.priced_as,
    )


def evaluate(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> Result:
    """The predicted result of one strategy. Raises Infeasible, with the reason, if it is illegal or does not
    fit."""
    problem = bind(model, cluster, job)
    reason, text = legal_reason(problem, strategy)
    if reason is not None:
        raise Infeasible(f"{reason}: {text}", reasons={reason: 1})
    bounds = peaks_of(problem, StrategyTable.of([strategy]))
    needed, usable = float(bounds.device_bytes[0]), problem.usable_bytes
    result = result_of(problem, strategy)
    if needed > usable:
        parts = sorted(result.memory.items(), key=lambda part: -part[1])
        largest, *others = [
            f"{name} ({nbytes / 2**30:.2f} GiB)"
            for name, nbytes in parts
            if nbytes >= LEAST_NAMED_SHARE * needed
        ]
        raise Infeasible(
            f"rank {result.tightest_rank} needs {needed / 2**30:.2f} GiB and may use "
            f"{usable / 2**30:.2f} GiB: "
            f"{(needed - usable) / 2**30:.2f} GiB too much, most of it {largest}"
            + (f", then {', '.join(others)}" if others else ""),
            reasons={MEMORY: 1},
        )
    host, host_has = float(bounds.host_bytes[0]), problem.host_bytes_per_device
    if host > host_has:
        raise Infeasible(
            f"a rank offloads {host / 2**30:.2f} GiB and its host has {host_has / 2**30:.2f} GiB for it: "
            f"{(host - host_has) / 2**30:.2f} GiB too much",
            reasons={HOST_MEMORY: 1},
        )
    return result


def plan_of_strategy(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> Plan:
    """The plan of one given strategy, predicted without a search. Raises Infeasible as `evaluate` does."""
    best = evaluate(model, cluster, job, strategy)
    certificate = Certificate(
        space="default", enumerated=1, rejected={}, cut_by_bound=0, simulated=1, best_s=best.step_time_s,
        lower_bound_s=best.step_time_s, gap=0.0, search_s=0.0, search_cpu_s=0.0, priced_as=cluster.priced_as,
    )  # fmt: skip
    answer = Answer(best=best, runners_up=(), certificate=certificate)
    return plan_of(answer, model=model, cluster=cluster, job=job)


def step_time_s(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> float:
    """Step time in seconds of one strategy, whether it fits or not. Raises Infeasible if it is illegal."""
    problem = bind(model, cluster, job)
    reason, text = legal_reason(problem, strategy)
    if reason is not None:
        raise Infeasible(f"{reason}: {text}", reasons={reason: 1})
    return float(step_times.step_times_s(problem, StrategyTable.of([strategy]))[0])


def step_durations(
    model: Model, cluster: Cluster, job: Job, strategy: Strategy
) -> tuple[Schedule, Durations]:
    """The schedule table of a legal strategy and the durations of its actions (batch of one)."""
    problem = bind(model, cluster, job)
    schedule = generate(
        strategy.schedule,
        pp=strategy.pp,
        microbatches=job.global_batch_size // (strategy.dp * strategy.micro_batch_size),
        vpp=strategy.vpp,
    )
    return schedule, step_times.step_durations(problem, strategy)


def stage_activation_bytes(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> tuple[float, ...]:
    """Bytes of activations that one micro-batch saves on each stage for the backward pass."""
    return step_times.stage_activation_bytes(bind(model, cluster, job), strategy)
