"""The parts of a step agree with the timeline of the event engine, the breakdown and the checker."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checker_records import figures_of
from tests.property.cost_samples import CASES, Case, problem_of, sampled
from tests.property.plan_kinds import document_of
from tests.property.test_cost_breakdown import rows_of_every_schedule

from shardwise.cost import Problem, costs_of_all_stages, traffic_of
from shardwise.plans import StepParts, read_plan
from shardwise.schedule import generate
from shardwise.search import step_parts, step_parts_of
from shardwise.search.result import result_of
from shardwise.search.step_parts import uniform_parts
from shardwise.search.step_times import step_durations
from shardwise.sim import COMPUTE, DATA_PARALLEL, RankTimes, Timeline, rank_times, simulate, task_graph
from shardwise.strategy import Strategy, StrategyTable
from shardwise_verify.estimate import estimate_strategy, family_costs
from shardwise_verify.strategy_rows import families, rows_of
from shardwise_verify.times import times_of_row

Intervals = list[tuple[float, float]]

TOLERANCE = 1e-9


class Covered:
    """Seconds of a rank by what covers them, cut at every start and finish: an oracle without unions."""

    def __init__(self, *kinds: Intervals) -> None:
        cuts = sorted({cut for one in kinds for interval in one for cut in interval})
        self.alone = [0.0] * len(kinds)
        for start, finish in pairwise(cuts):
            middle = (start + finish) / 2.0
            for place, one in enumerate(kinds):
                if any(first < middle < last for first, last in one):
                    self.alone[place] += finish - start
                    break


def intervals_of(
    problem: Problem, strategy: Strategy, timeline: Timeline, rank: int
) -> tuple[Intervals, Intervals, Intervals]:
    """(Actions before their sends, gathers and reductions, messages) of a rank in the engine's timeline."""
    costs = costs_of_all_stages(problem, StrategyTable.of([strategy]))
    partition, stages = costs.partition, strategy.pp * strategy.vpp
    durations = step_durations(problem, strategy)
    graph, stage_rank = timeline.graph, partition.places.rank[:, 0]
    actions, once, messages = Intervals(), Intervals(), Intervals()
    for task, name in enumerate(graph.names):
        start, finish = float(timeline.start_s[task]), float(timeline.finish_s[task])
        if graph.streams[task] == DATA_PARALLEL and graph.ranks[task] == rank:
            once.append((start, finish))
        if graph.streams[task] != COMPUTE:
            continue
        kind = next(letter for letter in name if letter.isalpha())
        stage = int(name.partition(kind)[0])
        blocks_s, to = 0.0, stage
        if kind == "F":
            blocks_s, to = float(partition.blocked_on_s[stage, 0]), stage + 1
        elif kind in "BI":
            blocks_s, to = float(partition.blocked_back_s[stage, 0]), stage - 1
        if graph.ranks[task] == rank:
            actions.append((start, finish - blocks_s))
        if to != stage and 0 <= to < stages and stage_rank[to] != stage_rank[stage]:
            hops_s = durations.hop_forward_s if kind == "F" else durations.hop_backward_s
            if rank in (stage_rank[stage], stage_rank[to]):
                messages.append((finish - blocks_s, finish + float(hops_s[0, min(stage, to)])))
    return actions, once, messages


def check_timeline(problem: Problem, strategy: Strategy, parts: StepParts) -> None:
    """What the rank does in the timeline, and what it waits."""
    microbatches = problem.job.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    schedule = generate(strategy.schedule, pp=strategy.pp, microbatches=microbatches, vpp=strategy.vpp)
    timeline = simulate(task_graph(schedule, step_durations(problem, strategy)))
    actions, once, messages = intervals_of(problem, strategy, timeline, parts.stage)
    covered = Covered(actions, once, messages)
    one, step_s = parts.communication, parts.step_time_s
    assert parts.bubble_s == pytest.approx(timeline.makespan_s - sum(covered.alone), abs=TOLERANCE * step_s)
    assert one["pipeline"].exposed_s == pytest.approx(covered.alone[2], abs=TOLERANCE * step_s)
    assert one["pipeline"].total_s == pytest.approx(sum(b - a for a, b in messages), abs=TOLERANCE * step_s)


def check_parts(problem: Problem, strategy: Strategy) -> None:
    parts, result = uniform_parts(problem, strategy), result_of(problem, strategy)
    one, step_s, rows = parts.communication, result.step_time_s, result.breakdown
    combined_s = parts.computation_s + parts.communication_s - parts.overlap_s + parts.idle_s
    assert combined_s == pytest.approx(step_s, rel=1e-12) and parts.step_time_s == combined_s
    for seconds in (parts.computation_s, parts.slowdown_s, parts.bubble_s, parts.host_s):
        assert seconds >= 0.0
    for each in one.values():
        assert each.total_s >= 0.0 and (each.hidden_s == 0.0 or each.total_s > 0.0)
        assert each.hidden_s >= 0.0 and each.exposed_s >= 0.0
    check_timeline(problem, strategy, parts)
    # What the breakdown has of each mechanism is exposed, or slows computation down.
    for name in ("tensor", "context", "expert"):
        row_s = rows[f"{name}_communication"]
        assert row_s <= one[name].exposed_s + parts.slowdown_s + TOLERANCE * step_s
        assert (row_s > 0.0) <= (one[name].total_s > 0.0)
    assert one["tied_weights"].total_s == rows["tied_weights"]
    assert parts.host_s >= rows["host_step"] + rows["host_waits"]
    if strategy.recompute == "none":
        named = [rows[f"{name}_communication"] for name in ("tensor", "context", "expert", "shard")]
        layered = one["tensor"].exposed_s + one["context"].exposed_s + one["expert"].exposed_s
        assert layered <= sum(named[:3]) + TOLERANCE * step_s
        work_s = sum(
            rows[name] for name in ("matmul", "attention", "memory_bound", "optimizer", "gradient_norm")
        )
        on_host_s = one["offload"].exposed_s if strategy.offload in ("optimizer", "both") else 0.0
        assert parts.computation_s - parts.slowdown_s <= work_s + TOLERANCE * step_s
        assert (
            parts.computation_s - parts.slowdown_s
            >= work_s - on_host_s - one["gradient_norm"].total_s - TOLERANCE * step_s
        )


def check_totals(problem: Problem, strategy: Strategy) -> None:
    """All seconds of a mechanism are what the checker estimates for software without any overlap."""
    job = replace(problem.job, profile=problem.profile.without_overlap())
    rows = estimate_strategy(figures_of(problem.model, problem.cluster, job), strategy).breakdown
    one = uniform_parts(problem, strategy).communication
    for name in ("tensor", "context", "expert"):
        assert one[name].total_s == pytest.approx(rows[f"{name}_communication"], rel=TOLERANCE), name
    if strategy.pp == 1:  # else the breakdown has the gathers and reductions of another stage
        sharded_s = one["parameter_gathering"].total_s + one["gradient_reduction"].total_s
        expected_s = sum(
            rows[name] for name in ("shard_communication", "parameter_gathering", "gradient_reduction")
        )
        assert sharded_s == pytest.approx(expected_s, rel=TOLERANCE, abs=TOLERANCE * rows["matmul"])


def check_once_per_step(problem: Problem, strategy: Strategy) -> None:
    """Gathers and reductions once per step of all stages of the rank are those of the checker, for software
    without any overlap. Nothing else is sharded."""
    job = replace(problem.job, profile=problem.profile.without_overlap())
    figures = figures_of(problem.model, problem.cluster, job)
    ((_, family),) = families(rows_of([strategy]), job.global_batch_size)
    times = times_of_row(family_costs(figures, family).times, 0)
    parts = uniform_parts(problem, strategy)
    own = [times[stage] for stage in family.stages_of(parts.stage)]
    one, step_s = parts.communication, parts.step_time_s
    gathering_s, reduction_s = (one[name].total_s for name in ("parameter_gathering", "gradient_reduction"))
    assert gathering_s == pytest.approx(sum(each.gather_s for each in own), abs=TOLERANCE * step_s)
    assert reduction_s == pytest.approx(sum(each.reduce_s for each in own), abs=TOLERANCE * step_s)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reductions_of_pipelines_agree_with_the_checker(case: Case, full: bool) -> None:
    problem = problem_of(case)
    table = sampled(problem, 600, seed=900 + CASES.index(case))
    rows = (table.pp > 1) & (table.param_shard == 1) & (table.grad_shard == 1) & (table.dp * table.cp > 1)
    found = np.flatnonzero(rows)[: 60 if full else 8]
    for row in found:
        check_once_per_step(problem, table[int(row)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_agree_with_the_timeline_of_the_engine(case: Case, full: bool) -> None:
    problem = problem_of(case)
    table = sampled(problem, 400, seed=700 + CASES.index(case))
    for row in rows_of_every_schedule(table.schedule, 20 if full else 2):
        check_parts(problem, table[row])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["for a trace", "links", "mixed", "staged graph"])
def test_plans_of_every_kind_have_parts_of_their_step(name: str, tmp_path: Path) -> None:
    document = document_of(name, tmp_path)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(document))
    plan = read_plan(str(path))
    assert step_parts_of(plan).step_time_s == pytest.approx(plan.step_time_s, rel=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_totals_agree_with_the_checker(case: Case, full: bool) -> None:
    problem = problem_of(case)
    table = sampled(problem, 400, seed=800 + CASES.index(case))
    # The same rank counts: without overlap, and without recomputation of communication.
    rows = [row for row in range(len(table)) if table[row].recompute == "none" and table[row].pp == 1]
    for row in rows[: 60 if full else 8]:
        check_totals(problem, table[row])


ROUTED = CASES[3]
"""Has context and expert parallelism."""


def check_routed() -> None:
    problem = problem_of(ROUTED)
    table = sampled(problem, 400, seed=803)
    rows = (table.cp > 1) & (table.ep > 1) & (table.pp == 1) & (table.recompute == 0)
    found = np.flatnonzero(rows)[:3]
    assert len(found)
    for row in found:
        check_totals(problem, table[int(row)])


@pytest.mark.parametrize("name", ["context", "expert"])
def test_a_mutant_with_half_of_a_mechanism_is_caught(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def broken(*given: Any) -> dict[str, Any]:
        found = traffic_of(*given)
        return {**found, name: 0.5 * found[name]}

    check_routed()
    monkeypatch.setattr(step_parts, "traffic_of", broken)
    with pytest.raises(AssertionError):
        check_routed()


def check_several(problem: Problem, table: StrategyTable) -> None:
    for row in [row for row in range(len(table)) if table[row].pp > 1][:4]:
        check_parts(problem, table[row])


def test_a_mutant_that_forgets_messages_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(CASES[0])
    table = sampled(problem, 400, seed=700)
    check_several(problem, table)

    def forgets(*given: Any) -> RankTimes:
        return replace(rank_times(*given), messages=np.zeros((0, 2)))

    monkeypatch.setattr(step_parts, "rank_times", forgets)
    with pytest.raises(AssertionError):
        check_several(problem, table)
