"""Step times of strategies by the max-plus evaluator: `step_times_s`, `step_figures`, `pipeline_figures`.

Nodes may differ (`step_figures_over`, `worst_durations`). Then a stage takes as long as on its slowest node,
and a send as long as its slower end needs. Collectives of all pipelines run at the rate of the slowest of
them, and overlap with each pipeline's own passes. The cost model estimates every kind of node as if all nodes
were of it. Identical pipelines are evaluated once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    GridCostTable,
    Problem,
    ProblemShapes,
    StageEnds,
    StageTimes,
    costs_of_all_stages,
    distinct_rows,
    host_bytes,
    rank_bytes,
    stage_times,
    step_end,
)
from shardwise.schedule import stage_ranks
from shardwise.sim import Durations, makespan_s
from shardwise.strategy import SCHEDULES, Strategy, StrategyTable, node_slots

Floats = NDArray[np.float64]

STAGES_AT_A_TIME = 1 << 16
"""Stages times rows that are estimated together, so that their columns take a few dozen MiB."""


def microbatches_of(problem: Problem, table: Any) -> Any:
    """Micro-batches per replica and step."""
    return problem.job.global_batch_size // (table.dp * table.micro_batch_size)


def durations_of(times: StageTimes, pp: int, vpp: int, rows: Any) -> Durations:
    """The durations of the `rows` of a table with one schedule, as input of the evaluators."""
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
    """Seconds per step of every row; `grids` are costs that are known already."""
    return np.concatenate([_step_times_s(problem, *part) for part in _parts(table, grids)])


def _parts(
    table: StrategyTable, grids: GridCostTable | None
) -> Iterator[tuple[StrategyTable, GridCostTable | None]]:
    """The table in parts that are estimated together."""
    size = max(STAGES_AT_A_TIME // int((table.pp * table.vpp).max()), 1)
    for start in range(0, len(table), size):
        rows = slice(start, start + size)
        yield table.take(rows), None if grids is None else grids.take(rows)


def _step_times_s(problem: Problem, table: StrategyTable, grids: GridCostTable | None) -> Floats:
    costs = costs_of_all_stages(problem, table, grids)
    timed = _Timed(table, microbatches_of(problem, table), stage_times(problem, table, costs))
    return np.asarray(_makespans_s([timed])[0] + step_end(problem, table, costs).total_s)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Step time in seconds and peak bytes on the tightest rank of every row; shape (rows,)."""

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
    """Step times and memory peaks of every row, from one estimate; `grids` are costs that are known
    already."""
    return _evaluated([_estimate(problem, table, grids)])[0]


@dataclass(frozen=True, slots=True)
class _Timed:
    """Rows with their micro-batches and stage times."""

    table: StrategyTable
    microbatches: Any
    times: StageTimes


@dataclass(frozen=True, slots=True)
class _Estimate:
    """All figures except the pipeline makespan, which follows from `timed`: seconds from the end of the
    pipelines to the end of the step, and the three memory peaks."""

    timed: _Timed
    end_s: Floats
    peaks: tuple[Floats, Floats, Floats]


def _estimate(problem: Problem, table: StrategyTable, grids: GridCostTable | None) -> _Estimate:
    costs = costs_of_all_stages(problem, table, grids)
    memory = rank_bytes(problem, table, costs)
    return _Estimate(
        timed=_Timed(table, microbatches_of(problem, table), stage_times(problem, table, costs)),
        end_s=step_end(problem, table, costs).total_s,
        peaks=(memory.allocated.max(axis=0), memory.reserved.max(axis=0), memory.device.max(axis=0)),
    )


def peaks_of_rank(problem: Problem, strategy: Strategy, rank: int) -> tuple[float, ...]:
    """Peak bytes on pipeline rank `rank` of a strategy: in tensors, reserved, and all bytes on the device."""
    table = StrategyTable.of([strategy])
    costs = costs_of_all_stages(problem, table)
    memory = rank_bytes(problem, table, costs)
    own = costs.partition.moments.rank[:, 0] == rank
    return tuple(float(each[own, 0].max()) for each in (memory.allocated, memory.reserved, memory.device))


def _evaluated(several: Sequence[_Estimate]) -> list[StepFigures]:
    pipeline_makespan_s = _makespans_s([one.timed for one in several])
    return [
        StepFigures(pipelines_s + one.end_s, *one.peaks)
        for one, pipelines_s in zip(several, pipeline_makespan_s, strict=True)
    ]


def step_figures_of(problems: Sequence[Problem], tables: Sequence[StrategyTable]) -> list[StepFigures]:
    """The figures of each problem's table. Problems of one shape are estimated together, and rows with the
    same schedule are evaluated together across problems."""
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
    """The positions of tables whose problems have one shape, in groups that are estimated together."""
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
    """Seconds from the first forward of every row to its last backward, without parameter gathers before and
    gradient reductions after. A lower bound for all strategies that differ only in `optim_shard`."""
    return np.concatenate([_bare_makespan_s(problem, *part) for part in _parts(table, grids)])


def _bare_makespan_s(problem: Problem, table: StrategyTable, grids: GridCostTable | None) -> Floats:
    costs = costs_of_all_stages(problem, table, grids)
    times = stage_times(problem, table, costs)
    nothing = 0.0 * times.gather_s
    alone = replace(times, gather_s=nothing, reduce_s=nothing)
    return _makespans_s([_Timed(table, microbatches_of(problem, table), alone)])[0]


def _makespans_s(several: Sequence[_Timed]) -> list[Floats]:
    """Makespans of the pipelines of every row; rows with one schedule are evaluated together."""
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
    """The durations (batch of one) of a strategy's actions."""
    table = StrategyTable.of([strategy])
    costs = costs_of_all_stages(problem, table)
    times = stage_times(problem, table, costs)
    return durations_of(times, strategy.pp, strategy.vpp, np.arange(1))


@dataclass(frozen=True, slots=True)
class PipelineFigures:
    """Figures of one strategy: durations of one pipeline (batch of one), its gathering and reduction before
    any overlap by stage, seconds from its end to the end of the step, bytes on the tightest rank, and bytes
    per device on the host."""

    durations: Durations
    ends: StageEnds
    end_s: float
    device_bytes: float
    host_bytes: float


def pipeline_figures(problem: Problem, table: StrategyTable) -> list[PipelineFigures]:
    """The figures of every row of a table of legal strategies, estimated together."""
    costs = costs_of_all_stages(problem, table)
    times = stage_times(problem, table, costs)
    device_bytes = rank_bytes(problem, table, costs).device.max(axis=0)
    on_host = host_bytes(problem, table, costs)
    end_s = step_end(problem, table, costs).total_s
    return [
        PipelineFigures(
            durations=durations_of(
                times,
                int(table.pp[row]),
                int(table.vpp[row]),
                np.array([row]),
            ),
            ends=_ends_of(times.ends, int(table.pp[row] * table.vpp[row]), row),
            end_s=float(end_s[row]),
            device_bytes=float(device_bytes[row]),
            host_bytes=float(on_host[row]),
        )
        for row in range(len(table))
    ]


def _ends_of(ends: StageEnds, stages: int, row: int) -> StageEnds:
    """The ends of one row's stages, of shape (stages,)."""
    by_stage = {f.name: getattr(ends, f.name)[:stages, row] for f in fields(StageEnds) if f.name != "overlap"}
    return StageEnds(**by_stage, overlap=ends.overlap[row])


def spare_microbatches(problem: Problem, strategy: Strategy) -> tuple[int, ...]:
    """For each stage of a strategy, how many micro-batches more than its schedule has in flight fit into the
    free memory; 0 if the strategy offloads activations to the host."""
    table = StrategyTable.of([strategy])
    costs = costs_of_all_stages(problem, table)
    if strategy.offload in ("activations", "both"):
        return (0,) * strategy.pp * strategy.vpp
    ranks, device = costs.partition.moments.rank[:, 0], rank_bytes(problem, table, costs).device[:, 0]
    needed = np.array([device[ranks == rank].max() for rank in costs.partition.places.rank[:, 0]])
    left = problem.usable_bytes - needed
    each = costs.activation_costs.stage_bytes[:, 0] * (1.0 + problem.efficiency.fragmentation_ratio)
    return tuple(int(number) for number in np.maximum(left // each, 0.0))


def stage_activation_bytes(problem: Problem, strategy: Strategy) -> tuple[float, ...]:
    """Bytes of saved activations of one micro-batch on each stage; they are on the host if activations are
    offloaded."""
    costs = costs_of_all_stages(problem, StrategyTable.of([strategy]))
    return tuple(float(nbytes) for nbytes in costs.activation_costs.stage_bytes[:, 0])


# Strategies on unlike nodes

Ints = NDArray[np.int64]


def worst_durations(
    strategy: Strategy,
    figures: Sequence[PipelineFigures],
    rows: Ints,
    joined: Sequence[PipelineFigures] | None = None,
) -> Durations:
    """Durations of pipelines on unlike nodes. `rows`, of shape (pipelines, pp, slots), gives the kind of each
    node as an index into `figures`.

    Gathers and reductions join all pipelines, so they run at the rate of the slowest of the `joined` ones
    (default: all figures). They overlap with the passes of each pipeline's own slowest node.
    """
    durations, ends = [one.durations for one in figures], [one.ends for one in figures]
    on_stage = rows[:, list(stage_ranks(strategy.schedule, strategy.pp, strategy.vpp)), :]
    stages = np.arange(on_stage.shape[1])

    def slowest(values: Any) -> Floats:
        picked: Floats = np.asarray(values)[on_stage, stages[None, :, None]].max(axis=2)
        return picked

    def phase(name: str) -> Floats:
        return slowest(np.concatenate([getattr(one, name) for one in durations]))

    def hops(name: str) -> Floats:
        values = np.concatenate([getattr(one, name) for one in durations])
        ends = np.concatenate([on_stage[:, :-1], on_stage[:, 1:]], axis=2)
        picked: Floats = values[ends, stages[None, :-1, None]].max(axis=2)
        return picked

    every = [one.ends for one in joined or figures]
    gather_s, reduce_s = StageEnds(
        gathering_s=np.max([one.gathering_s for one in every], axis=0),
        reduction_s=np.max([one.reduction_s for one in every], axis=0),
        forward_s=slowest([one.forward_s for one in ends]),
        backward_s=slowest([one.backward_s for one in ends]),
        layers=ends[0].layers,
        overlap=ends[0].overlap,
    ).exposed_s
    return Durations.of(
        stages=len(stages),
        batch=len(rows),
        forward_s=phase("forward_s"),
        backward_s=phase("backward_s"),
        backward_input_s=phase("backward_input_s"),
        backward_weight_s=phase("backward_weight_s"),
        gather_s=gather_s,
        reduce_s=reduce_s,
        hop_forward_s=hops("hop_forward_s"),
        hop_backward_s=hops("hop_backward_s"),
    )


def pipelines_s(strategy: Strategy, durations: Durations, kinds: Ints, microbatches: Ints) -> Floats:
    """Makespans in seconds of pipelines of these kinds with these numbers of micro-batches."""
    return makespan_s(
        strategy.schedule,
        pp=strategy.pp,
        microbatches=microbatches,
        vpp=strategy.vpp,
        durations=durations.rows(kinds),
    )


def step_figures_over(problems: Sequence[Problem], table: StrategyTable, nodes: Sequence[int]) -> StepFigures:
    """The figures of every row of a table on `nodes`, in the order of their ranks. Each node is an index into
    `problems`, where one problem has the same job on equally many nodes, all of that kind.

    Bytes are those of the kind with least memory.
    """
    pipelines = [pipeline_figures(problem, table) for problem in problems]
    devices = problems[0].cluster.devices // len(nodes)
    microbatches = microbatches_of(problems[0], table)
    placed = [
        _placed_durations(table[row], [kind[row] for kind in pipelines], nodes, devices)
        for row in range(len(table))
    ]
    ends_s = [max(pipelines[kind][row].end_s for kind in set(nodes)) for row in range(len(table))]
    step_time_s = _slowest_pipelines_s(table, placed, microbatches) + np.array(ends_s)
    tightest = min(problems, key=lambda problem: problem.usable_bytes)
    return replace(step_figures(tightest, table), step_time_s=step_time_s)


def _placed_durations(
    strategy: Strategy, figures: Sequence[PipelineFigures], nodes: Sequence[int], devices_per_node: int
) -> Durations:
    """The durations of the distinct pipelines of a strategy."""
    placed = np.array(nodes, dtype=np.int64)[node_slots(strategy, devices_per_node)]
    rows = np.unique(placed.reshape(strategy.dp, -1), axis=0).reshape(-1, *placed.shape[1:])
    return worst_durations(strategy, figures, rows)


def _slowest_pipelines_s(table: StrategyTable, placed: Sequence[Durations], microbatches: Ints) -> Floats:
    """Makespan of the slowest pipeline of every row; rows with the same schedule are evaluated together."""
    pipeline_makespan_s = np.empty(len(table))
    firsts, member = distinct_rows([table.schedule, table.pp, table.vpp])
    for group, first in enumerate(firsts):
        rows = np.flatnonzero(member == group).tolist()
        pipelines = [placed[row].batch for row in rows]
        each_s = pipelines_s(
            table[int(first)],
            Durations.joined([placed[row] for row in rows]),
            np.arange(sum(pipelines)),
            np.repeat(microbatches[rows], pipelines),
        )
        pipeline_makespan_s[rows] = np.maximum.reduceat(each_s, np.cumsum([0, *pipelines[:-1]]))
    return pipeline_makespan_s
