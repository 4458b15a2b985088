"""The full prediction of one strategy as a `Result`: layout, step time, breakdown, memory and utilisation."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise.cluster import Cluster, Efficiency
from shardwise.cost import (
    MEMORY_PARTS,
    PhaseTimes,
    Problem,
    TableCosts,
    bind,
    costs_of_all_stages,
    has_fused_attention,
    rank_bytes,
    stage_times,
    step_end,
)
from shardwise.model import Model, model_flop_per_token
from shardwise.plans import Layout, PeakMemory, Pipeline, Result, Stage, as_ranges
from shardwise.schedule import KINDS, ActionKind, generate
from shardwise.search.step_times import microbatches_of, step_times_s
from shardwise.strategy import (
    SCHEDULES,
    Job,
    Profile,
    Strategy,
    StrategyTable,
    axis_strides,
    layer_counts,
    stages_of_rank,
)
from shardwise.ties import first_largest

EVALUATOR = "max-plus"


def band_of(profile: Profile, efficiency: Efficiency) -> tuple[float, float]:
    """Factors of the step time that enclose the central 80 % of measured runs from a source that was not
    fitted: narrow if runs of such devices were fitted, wide otherwise."""
    return profile.band(is_calibrated=efficiency.is_calibrated)


def result_of(problem: Problem, strategy: Strategy, step_time_s: float | None = None) -> Result:
    """The result of one legal strategy; `step_time_s` if it is already known."""
    table = StrategyTable.of([strategy])
    time_s = float(step_times_s(problem, table)[0]) if step_time_s is None else step_time_s
    costs = costs_of_all_stages(problem, table)
    memory = rank_bytes(problem, table, costs)
    ranks = costs.partition.moments.rank[:, 0]
    place = first_largest(memory.device[:, 0])
    tokens = problem.job.global_batch_size * problem.job.seq_len
    devices = problem.cluster.devices
    per_device = tokens / time_s / devices
    low, high = band_of(problem.profile, problem.efficiency)
    peak = PeakMemory(
        allocated=float(memory.allocated[place, 0]),
        reserved=float(memory.reserved[place, 0]),
        device=float(memory.device[place, 0]),
        capacity=problem.capacity_bytes,
    )
    errors = problem.profile.peak_errors
    return Result(
        fields=strategy,
        layout=layout_of(problem, strategy, time_s),
        step_time_s=time_s,
        band_s=(time_s * low, time_s * high),
        tokens_per_s_per_device=per_device,
        mfu=_utilisation(problem, per_device, is_causal=True),
        mfu_full_attention=_utilisation(problem, per_device, is_causal=False),
        peak_memory=peak,
        memory_band_bytes=errors.band_bytes(peak.device),
        fits_probability=errors.fits_probability(peak.device, peak.capacity),
        breakdown=_breakdown(problem, table, costs, time_s),
        memory={name: float(getattr(memory, name)[place, 0]) for name in MEMORY_PARTS},
        tightest_rank=_first_rank(table, int(ranks[place])),
        evaluator=EVALUATOR,
    )


def masks_samples(cluster: Cluster, job: Job) -> bool:
    """Whether attention computes whole sequences and masks packed samples: on a device without a fused kernel
    of the software."""
    return job.is_packed and not has_fused_attention(cluster, job.profile)


def memory_by_stage(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> list[dict[str, float]]:
    """Bytes on a rank of each pipeline stage at its peak: the parts of memory, and `device`, their sum."""
    problem, table = bind(model, cluster, job), StrategyTable.of([strategy])
    costs = costs_of_all_stages(problem, table)
    memory = rank_bytes(problem, table, costs)
    ranks, device = costs.partition.moments.rank[:, 0], memory.device[:, 0]
    found = []
    for rank in range(strategy.pp):
        of_rank = np.flatnonzero(ranks == rank)
        peak = of_rank[first_largest(device[of_rank])]
        parts = {name: float(getattr(memory, name)[peak, 0]) for name in MEMORY_PARTS}
        found.append({**parts, "device": float(device[peak])})
    return found


def _utilisation(problem: Problem, tokens_per_s_per_device: float, *, is_causal: bool) -> float:
    """Model FLOP per second over the dense peak of the matmul dtype (docs/reference/formats.md, MFU)."""
    flop = model_flop_per_token(problem.model, problem.job.attention_len, causal_half=is_causal)
    peak = problem.device.peak_flop_per_s[problem.recipe.matmul]
    return flop * tokens_per_s_per_device / peak


def _breakdown(problem: Problem, table: StrategyTable, costs: TableCosts, time_s: float) -> dict[str, float]:
    """Seconds of each part of the step on the busiest pipeline rank; they sum to the step time."""
    m = int(microbatches_of(problem, table)[0])
    places, grid = costs.partition.places, costs.partitions.grid
    times, end = stage_times(problem, table, costs), step_end(problem, table, costs)
    ranks = places.rank[:, 0]
    is_split = bool(costs.partition.is_split[0])
    backward_s = times.backward_input_s + times.backward_weight_s if is_split else times.backward_s
    per_place_s = (times.forward_s + backward_s)[:, 0]
    busiest = int(first_largest(np.bincount(ranks, weights=per_place_s)))
    mine = np.flatnonzero(ranks == busiest)
    work = PhaseTimes()
    for p in mine:
        blocks = [(kind, places.layers[k, p, 0]) for k, kind in enumerate(grid.kinds)]
        blocks += [(grid.embedding, places.has_embedding[p, 0]), (grid.head, places.has_head[p, 0])]
        for block, count in blocks:
            for phase in (block.forward, block.backward_input, block.backward_weight):
                work += phase.scaled(count)

    def total(values: Any) -> float:
        return float(np.sum(np.asarray(values)[mine, 0]))

    def part(value: Any) -> float:
        return m * float(np.asarray(value).ravel()[0])

    busy_s = m * float(per_place_s[mine].sum())
    busy_s -= _whole_backwards(table, m, places.stage[mine, 0]) * problem.profile.host_action_s
    seconds = {
        "matmul": part(work.matmul_s),
        "attention": part(work.attention_s),
        "memory_bound": part(work.memory_bound_s),
        "host_waits": part(work.host_s),
        "recompute": m * total(times.recompute_s),
        "tensor_communication": part(work.tensor_s),
        "context_communication": part(work.context_s),
        "expert_communication": part(work.expert_s),
        "shard_communication": m * total(times.shard_s),
        "offload": m * total(times.offload_s),
        "host_actions": 0.0,
        "gradient_norm": float(end.norm_s[0]),
        "tied_weights": float(end.tied_s[0]),
        "optimizer": float(end.optimizer_s[0]),
        "host_step": float(end.host_s[0]),
    }
    named_s = sum(list(seconds.values())[:10])
    seconds["host_actions"] = busy_s - named_s
    first = int(np.argmax(places.has_embedding[:, 0]))
    outside_s = time_s - busy_s - float(end.total_s[0])
    seconds["parameter_gathering"] = min(float(times.gather_s[first, 0]), max(outside_s, 0.0))
    outside_s -= seconds["parameter_gathering"]
    seconds["gradient_reduction"] = min(float(times.reduce_s[first, 0]), max(outside_s, 0.0))
    seconds["pipeline_bubble"] = outside_s - seconds["gradient_reduction"]
    return seconds


def _whole_backwards(table: StrategyTable, microbatches: int, stages: Any) -> int:
    """Number of backwards of these stages that dualpipe_v runs as one action instead of two."""
    if SCHEDULES[int(table.schedule[0])] != "dualpipe_v":
        return 0
    pp = int(table.pp[0])
    enough = 4 * pp
    if microbatches <= enough:
        return _whole_in_table(pp, microbatches, stages)
    # Once warm-up and cool-down are counted, every further micro-batch adds the same actions to each rank.
    each = _whole_in_table(pp, enough, stages) - _whole_in_table(pp, enough - 1, stages)
    return _whole_in_table(pp, enough, stages) + (microbatches - enough) * each


def _whole_in_table(pp: int, microbatches: int, stages: Any) -> int:
    """Backwards of these stages that are one action, counted in the schedule table of dualpipe_v."""
    schedule = generate("dualpipe_v", pp=pp, microbatches=microbatches, vpp=2)
    stage, kind = schedule.columns.stage, schedule.columns.kind
    return int(np.count_nonzero((kind == KINDS.index(ActionKind.BACKWARD)) & np.isin(stage, stages)))


def layout_of(problem: Problem, strategy: Strategy, makespan_s: float) -> Layout:
    """The single pipeline of a uniform strategy, with its stages by pipeline rank; a step of it takes
    `makespan_s` seconds."""
    s = strategy
    counts = layer_counts(problem.model.layers, s.pp * s.vpp, s.first_stage_layers, s.last_stage_layers)
    table = StrategyTable.of([s])
    classes = [node.device_class for node in problem.cluster.nodes for _ in range(node.devices)]
    stages = []
    for rank in range(s.pp):
        members = ranks_of_stage(table, rank)
        own_stages = stages_of_rank(int(table.schedule[0]), s.pp, s.vpp, rank)
        stages.append(
            Stage(
                devices=len(members),
                ranks=as_ranges(members),
                device_class=classes[members[0]],
                tp=s.tp,
                cp=s.cp,
                dp=s.dp,
                layers=tuple(counts[stage] for stage in own_stages),
                share=1.0,
                recompute=s.recompute,
            )
        )
    batch = problem.job.global_batch_size
    pipeline = Pipeline(
        stages=tuple(stages),
        micro_batch_size=s.micro_batch_size,
        microbatches=batch // (s.dp * s.micro_batch_size),
        rows=batch,
        makespan_s=makespan_s,
    )
    return Layout(schedule=s.schedule, pipelines=(pipeline,))


def ranks_of_stage(table: StrategyTable, rank: int) -> list[int]:
    """Global ranks of pipeline rank `rank` of a one-row table, ascending."""
    strides = axis_strides(table)
    ranks = np.zeros(1, dtype=np.int64) + rank * np.asarray(strides["pp"]).ravel()[0]
    for axis in ("tp", "cp", "dp"):
        steps = np.arange(int(getattr(table, axis)[0])) * np.asarray(strides[axis]).ravel()[0]
        ranks = (ranks[:, None] + steps[None, :]).ravel()
    return [int(r) for r in np.sort(ranks)]


def _first_rank(table: StrategyTable, rank: int) -> int:
    return ranks_of_stage(table, rank)[0]
