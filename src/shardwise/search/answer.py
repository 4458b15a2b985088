"""From a question to an answer: search, price what was found, certify."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.cost import Problem, bind, peaks_of
from shardwise.errors import Infeasible
from shardwise.model import Model
from shardwise.plan import Answer, Certificate, Frontier, FrontierPoint, Result
from shardwise.schedule import Schedule, generate
from shardwise.search import evaluate as evaluation
from shardwise.search.drive import Outcome, Progress, Search
from shardwise.search.explain import result_of
from shardwise.search.goals import Fastest, Goal, Smallest, Tradeoff
from shardwise.search.parts import Clock, Searched, best_part
from shardwise.search.question import Question
from shardwise.search.relax import infeasible, legal_reason
from shardwise.sim import Durations
from shardwise.strategy import HOST_MEMORY, MEMORY, Job, Strategy, StrategyTable
from shardwise.units import format_seconds


def plan(question: Question, *, progress: Progress | None = None) -> Answer:
    """The best strategy of the question's space, runners-up, and the certificate.

    Ended early by its budget or the user, it answers with the best so far. Raises Infeasible where nothing
    legal fits, with reason counts and relaxations that do fit, or where nothing was found in time.
    """
    question.problem()
    clock = Clock(question.budget_s)
    searched = _searched(question, clock, progress)
    used, outcome = searched.question, searched.outcome
    problem = used.problem()
    if not outcome.found:
        raise _nothing(used, problem, outcome)
    # Priced again: a search that was ended early may remember a little more than a strategy takes.
    results = [result_of(problem, found.table[0]) for found in outcome.found]
    frontier, is_interrupted = None, outcome.is_interrupted or searched.is_interrupted
    if question.frontier and not is_interrupted:
        frontier, is_interrupted = _frontier(used, problem, clock, progress)
    return Answer(
        best=results[0],
        runners_up=tuple(results[1:]),
        certificate=certificate_of(used, outcome, results[0].step_time_s),
        objective=question.objective,
        cluster=used.cluster,
        parts=searched.parts,
        frontier=frontier,
        is_interrupted=is_interrupted,
    )


def _searched(question: Question, clock: Clock, progress: Progress | None) -> Searched:
    def search_for(asked: Question, goal: Goal) -> Outcome:
        return search(asked, asked.problem(), goal, budget_s=clock.left_s, progress=progress)

    if question.uses_parts:
        return best_part(question, clock, search_for)
    return Searched(question, search_for(question, goal_of(question)))


def goal_of(question: Question) -> Goal:
    """What the search on the cluster that is used looks for."""
    return Smallest() if question.objective == "memory" else Fastest(question.top + 1)


def search(
    question: Question,
    problem: Problem,
    goal: Goal,
    *,
    budget_s: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """One search of the question's space for `goal`, on all of its devices."""
    return Search(
        problem,
        question.candidates(),
        goal,
        exhaustive=question.exhaustive,
        workers=question.workers,
        budget_s=budget_s,
    ).run(progress)


def _nothing(question: Question, problem: Problem, outcome: Outcome) -> Infeasible:
    """The error of a search without an answer; an interrupt stays one."""
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    if outcome.unexplored:
        total = outcome.enumerated + outcome.unexplored
        return Infeasible(
            f"nothing that fits was found within the budget of {format_seconds(question.budget_s or 0.0)}; "
            f"{outcome.unexplored:,} of {total:,} candidates are unexplored",
            reasons={},
        )
    return infeasible(question, problem, outcome, lambda other, goal: search(other, other.problem(), goal))


def _frontier(
    question: Question, problem: Problem, clock: Clock, progress: Progress | None
) -> tuple[Frontier | None, bool]:
    """Time against memory, and whether the user ended the search; None where it had not begun."""
    try:
        outcome = search(question, problem, Tradeoff(), budget_s=clock.left_s, progress=progress)
    except KeyboardInterrupt:
        return None, True
    if not outcome.found:
        return None, outcome.is_interrupted
    points = frontier_points(problem, outcome)
    certificate = certificate_of(question, outcome, points[0].step_time_s)
    return Frontier(points=points, certificate=certificate), outcome.is_interrupted


def frontier_points(problem: Problem, outcome: Outcome) -> tuple[FrontierPoint, ...]:
    """What a search for a tradeoff found, fastest first."""
    table = StrategyTable.joined([found.table for found in outcome.found])
    times_s = evaluation.step_times_s(problem, table).tolist()
    return tuple(
        FrontierPoint(strategy=strategy, step_time_s=time_s, device_bytes=found.device_bytes)
        for strategy, time_s, found in zip(table, times_s, outcome.found, strict=True)
    )


def certificate_of(question: Question, outcome: Outcome, best_s: float) -> Certificate:
    """What is proven: every candidate is rejected, cut by a bound that is no lower than the best, or
    evaluated; none of those left unexplored takes less than the lower bound."""
    lower_s = min(outcome.lower_bound_s, best_s)
    return Certificate(
        space=question.space,
        fixed=question.fixed,
        axes=question.axes,
        enumerated=outcome.enumerated,
        unexplored=outcome.unexplored,
        rejected=outcome.ledger.rejected,
        cut_by_bound=outcome.ledger.cut,
        simulated=outcome.ledger.simulated,
        best_s=best_s,
        lower_bound_s=lower_s,
        gap=(best_s - lower_s) / best_s,
        search_s=outcome.search_s,
        search_cpu_s=outcome.search_cpu_s,
    )


def evaluate(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> Result:
    """The price of one strategy. Raises Infeasible, with the reason, where it is illegal or does not fit."""
    problem = bind(model, cluster, job)
    reason, text = legal_reason(problem, strategy)
    if reason is not None:
        raise Infeasible(f"{reason}: {text}", reasons={reason: 1})
    bounds = peaks_of(problem, StrategyTable.of([strategy]))
    needed, usable = float(bounds.device_bytes[0]), problem.usable_bytes
    result = result_of(problem, strategy)
    if needed > usable:
        largest = max(result.memory, key=lambda part: result.memory[part])
        raise Infeasible(
            f"rank {result.tightest_rank} needs {needed / 2**30:.2f} GiB and may use "
            f"{usable / 2**30:.2f} GiB: "
            f"{(needed - usable) / 2**30:.2f} GiB too much, most of it {largest} "
            f"({result.memory[largest] / 2**30:.2f} GiB)",
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


def step_time_s(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> float:
    """Seconds per step of one strategy, whether it fits or not. Raises Infeasible where it is illegal."""
    problem = bind(model, cluster, job)
    reason, text = legal_reason(problem, strategy)
    if reason is not None:
        raise Infeasible(f"{reason}: {text}", reasons={reason: 1})
    return float(evaluation.step_times_s(problem, StrategyTable.of([strategy]))[0])


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
    return schedule, evaluation.step_durations(problem, strategy)


def stage_activation_bytes(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> tuple[float, ...]:
    """Bytes that one microbatch keeps on each stage from its forward to its backward."""
    return evaluation.stage_activation_bytes(bind(model, cluster, job), strategy)
