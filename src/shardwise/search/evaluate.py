"""Step times by the max-plus evaluator, and the full price of one strategy."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    GridCostTable,
    Problem,
    ProblemShapes,
    StageTimes,
    costs_of_all_stages,
    distinct_rows,
    host_bytes,
    rank_bytes,
    stage_times,
    step_end,
)
from shardwise.sim import Durations, makespan_s
from shardwise.strategy import SCHEDULES, Strategy, StrategyTable

Floats = NDArray[np.float64]

STAGES_AT_A_TIME = 1 << 16
"""Stages times rows priced together: their columns stay within a few dozen MiB."""


def microbatches_of(problem: Problem, table: Any) -> Any:
    """Microbatches per replica and step."""
    return problem.job.global_batch_size // (table.dp * table.micro_batch_size)


def durations_of(times: StageTimes, pp: int, vpp: int, rows: Any) -> Durations:
    """The durations of the `rows` of one schedule table, for the evaluators."""
    stages = pp * vpp

    def batch(values: Any) -> Floats:
        return np.ascontiguousarray(np.asarray(values[:stages, rows], dtype=np.float64).T)

    hops_s = batch(times.hop_s)[:, :-1]
    return Durations(
        forward_s=batch(times.forward_s),
        backward_s=batch(times.backward_s),
        backward_input_s=batch(times.backward_input_s),
        backward_weight_s=batch(times.backward_weight_s),
        gather_s=batch(times.gather_s),
        reduce_s=batch(times.reduce_s),
        hop_forward_s=hops_s,
        hop_backward_s=hops_s,
    )


def step_times_s(problem: Problem, table: StrategyTable, grids: GridCostTable | None = None) -> Floats:
    """Seconds per step of every row; `grids` are prices that are known already."""
    return np.concatenate([_step_times_s(problem, *part) for part in _parts(table, grids)])


def _parts(
    table: StrategyTable, grids: GridCostTable | None
) -> Iterator[tuple[StrategyTable, GridCostTable | None]]:
    """The table in parts that are priced together."""
    size = max(STAGES_AT_A_TIME // int((table.pp * table.vpp).max()), 1)
    for start in range(0, len(table), size):
        rows = slice(start, start + size)
        yield table.take(rows), None if grids is None else grids.take(rows)


def _step_times_s(problem: Problem, table: StrategyTable, grids: GridCostTable | None) -> Floats:
    price = costs_of_all_stages(problem, table, grids)
    timed = _Timed(table, microbatches_of(problem, table), stage_times(problem, table, price))
    return np.asarray(_makespans_s([timed])[0] + step_end(problem, table, price).total_s)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Of every row of a table: seconds per step, and bytes on the rank that holds most; shape (rows,)."""

    step_time_s: Floats
    allocated_bytes: Floats
    reserved_bytes: Floats
    device_bytes: Floats

    def taken(self, rows: Any) -> StepFigures:
        """The figures of these rows."""
        return StepFigures(
            self.step_time_s[rows],
            self.allocated_bytes[rows],
            self.reserved_bytes[rows],
            self.device_bytes[rows],
        )


def step_figures(problem: Problem, table: StrategyTable, grids: GridCostTable | None = None) -> StepFigures:
    """Step times and peaks of memory of every row, from one price; `grids` are prices that are known
    already."""
    return _evaluated([_estimate(problem, table, grids)])[0]


@dataclass(frozen=True, slots=True)
class _Timed:
    """Rows with their microbatches and stage times."""

    table: StrategyTable
    microbatches: Any
    times: StageTimes


@dataclass(frozen=True, slots=True)
class _Estimate:
    """All that figures are made of but the time that pipelines take, which is told by `timed`: seconds from
    their end to that of the step, and the three peaks of memory."""

    timed: _Timed
    end_s: Floats
    peaks: tuple[Floats, Floats, Floats]


def _estimate(problem: Problem, table: StrategyTable, grids: GridCostTable | None) -> _Estimate:
    price = costs_of_all_stages(problem, table, grids)
    memory = rank_bytes(problem, table, price)
    return _Estimate(
        timed=_Timed(table, microbatches_of(problem, table), stage_times(problem, table, price)),
        end_s=step_end(problem, table, price).total_s,
        peaks=(memory.allocated.max(axis=0), memory.reserved.max(axis=0), memory.device.max(axis=0)),
    )


def _evaluated(several: Sequence[_Estimate]) -> list[StepFigures]:
    pipeline_makespan_s = _makespans_s([one.timed for one in several])
    return [
        StepFigures(pipelines_s + one.end_s, *one.peaks)
        for one, pipelines_s in zip(several, pipeline_makespan_s, strict=True)
    ]


def step_figures_of(problems: Sequence[Problem], tables: Sequence[StrategyTable]) -> list[StepFigures]:
    """The figures of each problem's table. Problems of one shape are priced together, and rows with the same
    schedule are evaluated together, of whatever problem they are."""
    shapes = ProblemShapes()
    groups = _grouped_by_shape([shapes.of(problem) for problem in problems], tables)
    estimates = []
    for members in groups:
        together = [tables[member] for member in members]
        problem = shapes.stacked([problems[member] for member in members], [len(one) for one in together])
        estimates.append(_estimate(problem, StrategyTable.joined(together), None))
    found: dict[int, StepFigures] = {}
    for members, figures in zip(groups, _evaluated(estimates), strict=True):
        ends = np.cumsum([len(tables[member]) for member in members]).tolist()
        for member, end in zip(members, ends, strict=True):
            found[member] = figures.taken(slice(end - len(tables[member]), end))
    return [found[member] for member in range(len(problems))]


def _grouped_by_shape(shapes: Sequence[Hashable], tables: Sequence[StrategyTable]) -> list[list[int]]:
    """The places of tables whose problems are of one shape, as many as are priced together."""
    groups: list[list[int]] = []
    begun: dict[Hashable, tuple[list[int], int, int]] = {}
    for place, (shape, table) in enumerate(zip(shapes, tables, strict=True)):
        stages = int((table.pp * table.vpp).max())
        group, most, rows = begun.get(shape, ([], 0, 0))
        most, rows = max(most, stages), rows + len(table)
        if not group or most * rows > STAGES_AT_A_TIME:
            group, most, rows = [], stages, len(table)
            groups.append(group)
        group.append(place)
        begun[shape] = group, most, rows
    return groups


def pipeline_makespan_s(problem: Problem, table: StrategyTable, grids: GridCostTable | None = None) -> Floats:
    """Seconds from the first forward of every row to its last backward, with nothing gathered before and
    reduced after them: no more than any strategy takes that differs in `optim_shard` alone."""
    return np.concatenate([_bare_makespan_s(problem, *part) for part in _parts(table, grids)])


def _bare_makespan_s(problem: Problem, table: StrategyTable, grids: GridCostTable | None) -> Floats:
    price = costs_of_all_stages(problem, table, grids)
    times = stage_times(problem, table, price)
    nothing = 0.0 * times.gather_s
    alone = replace(times, gather_s=nothing, reduce_s=nothing)
    return _makespans_s([_Timed(table, microbatches_of(problem, table), alone)])[0]


def _makespans_s(several: Sequence[_Timed]) -> list[Floats]:
    """Seconds of the pipelines of every row; those of one schedule table are evaluated together."""
    pipeline_makespan_s = [np.empty(len(one.table)) for one in several]
    waiting: dict[tuple[int, int, int], list[tuple[int, Any]]] = {}
    for place, one in enumerate(several):
        columns = [one.table.schedule, one.table.pp, one.table.vpp]
        firsts, member = distinct_rows(columns)
        for group, first in enumerate(firsts):
            schedule, pp, vpp = (int(column[first]) for column in columns)
            waiting.setdefault((schedule, pp, vpp), []).append((place, np.flatnonzero(member == group)))
    for (schedule, pp, vpp), parts in waiting.items():
        evaluated_s = makespan_s(
            SCHEDULES[schedule],
            pp=pp,
            microbatches=np.concatenate([several[place].microbatches[rows] for place, rows in parts]),
            vpp=vpp,
            durations=Durations.joined(
                [durations_of(several[place].times, pp, vpp, rows) for place, rows in parts]
            ),
        )
        ends = np.cumsum([len(rows) for _, rows in parts])[:-1]
        for (place, rows), part_s in zip(parts, np.split(evaluated_s, ends), strict=True):
            pipeline_makespan_s[place][rows] = part_s
    return pipeline_makespan_s


def step_durations(problem: Problem, strategy: Strategy) -> Durations:
    """The durations (batch of one) of one strategy's actions."""
    table = StrategyTable.of([strategy])
    price = costs_of_all_stages(problem, table)
    times = stage_times(problem, table, price)
    return durations_of(times, strategy.pp, strategy.vpp, np.arange(1))


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Of one strategy: the durations (batch of one) of what one of its pipelines does, the seconds from its
    end to that of the step, and bytes on the tightest rank and, per device, on the host."""

    durations: Durations
    end_s: float
    device_bytes: float
    host_bytes: float


def pipeline_figures(problem: Problem, table: StrategyTable) -> list[PipelineFigures]:
    """The figures of every row of a table of legal strategies, priced together."""
    price = costs_of_all_stages(problem, table)
    times = stage_times(problem, table, price)
    device_bytes = rank_bytes(problem, table, price).device.max(axis=0)
    on_host = host_bytes(table, price)
    end_s = step_end(problem, table, price).total_s
    return [
        PipelineFigures(
            durations=durations_of(
                times,
                int(table.pp[row]),
                int(table.vpp[row]),
                np.array([row]),
            ),
            end_s=float(end_s[row]),
            device_bytes=float(device_bytes[row]),
            host_bytes=float(on_host[row]),
        )
        for row in range(len(table))
    ]


def spare_microbatches(problem: Problem, strategy: Strategy) -> tuple[int, ...]:
    """How many more microbatches than its schedule has in flight each stage of a strategy could hold in the
    memory that is left there; none of a strategy that puts activations off to the host."""
    table = StrategyTable.of([strategy])
    price = costs_of_all_stages(problem, table)
    if strategy.offload in ("activations", "both"):
        return (0,) * strategy.pp * strategy.vpp
    left = problem.usable_bytes - rank_bytes(problem, table, price).device[:, 0]
    each = price.activation_costs.stage_bytes[:, 0] * (1.0 + problem.efficiency.fragmentation_ratio)
    return tuple(int(number) for number in np.maximum(left // each, 0.0))


def stage_activation_bytes(problem: Problem, strategy: Strategy) -> tuple[float, ...]:
    """Bytes that one microbatch of a strategy keeps on each stage; on the host where activations are
    offloaded."""
    price = costs_of_all_stages(problem, StrategyTable.of([strategy]))
    return tuple(float(nbytes) for nbytes in price.activation_costs.stage_bytes[:, 0])
