"""The record of an uneven plan: the ranks of each stage, and all of its predicted figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardwise.cost import Problem
from shardwise.model import model_flop_per_token
from shardwise.plans import Layout, PeakMemory, Pipeline, Result, Stage, StagePart
from shardwise.search.hetero.branch_and_bound import UnevenPipeline, UnevenPlan
from shardwise.search.hetero.lower_bounds import layout_figures
from shardwise.search.hetero.record_costs import tightest_of, widest_band
from shardwise.search.hetero.space import MixedPoolKind, StageKind, UnevenSpace, devices_by_pool
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions, group_sizes
from shardwise.strategy import RECOMPUTES
from shardwise.ties import first_largest

UNEVEN_EVALUATOR = "max-plus, pipeline by pipeline"
UNEVEN_SCHEDULE = "1f1b"

PartIndex = tuple[int, int, int]
"""Indices of a pipeline of a plan, a stage of it, and a part of that: 0, or 1 for the second part of a
mixed-pool stage."""

_Group = tuple[tuple[int, int], ...]
"""Stages of a pipeline in order, by index and part."""


def uneven_result(space: UnevenSpace, plan: UnevenPlan) -> Result:
    """The record of the plan on the devices of its cluster."""
    pricing = StageCostModel(space)
    options = pricing.options(plan.subproblem)
    job, cluster = space.job, space.cluster
    taken = _taken(options, plan)
    ranks = _assigned_ranks(space, options, plan, taken)
    tokens_per_s = job.global_batch_size * job.seq_len / plan.time_s
    problems = {pool: pricing.single_pool_problem(pool) for pool in plan.subproblem.pools}
    tightest, peak = _peak(options, plan, problems, ranks)
    pools = tuple(space.pools[pool].name for pool in plan.subproblem.pools)
    low, high = widest_band(cluster, job.profile, pools)
    size = plan.subproblem.micro_batch_size
    return Result(
        fields=None,
        layout=Layout(
            pipelines=tuple(
                Pipeline(
                    stages=tuple(
                        _stage(space, options, plan, ranks, place, index)
                        for index in range(len(pipeline.stages))
                    ),
                    micro_batch_size=size,
                    microbatches=pipeline.microbatches,
                    rows=pipeline.microbatches * size,
                    makespan_s=pipeline.time_s,
                )
                for place, pipeline in enumerate(plan.pipelines)
            )
        ),
        step_time_s=plan.time_s,
        band_s=(plan.time_s * low, plan.time_s * high),
        tokens_per_s_per_device=tokens_per_s / cluster.devices,
        mfu=_utilisation(options, taken, problems, tokens_per_s, is_causal=True),
        mfu_full_attention=_utilisation(options, taken, problems, tokens_per_s, is_causal=False),
        peak_memory=peak,
        breakdown=_breakdown(options, plan),
        memory=peak.parts,
        tightest_rank=tightest,
        pools=pools,
        is_alike=plan.subproblem.is_alike,
        evaluator=UNEVEN_EVALUATOR,
    )


def _taken(options: StageOptions, plan: UnevenPlan) -> dict[PartIndex, tuple[int, int]]:
    """The pool (index in the plan's pools) and the devices of every part of a stage."""
    found = {}
    for place, pipeline in enumerate(plan.pipelines):
        for index, (site, _) in enumerate(pipeline.stages):
            sizes = devices_by_pool(options.stages[site].kinds[pipeline.kinds[site]])
            for part, of in enumerate(zip(options.sites[site], sizes, strict=True)):
                found[place, index, part] = of
    return found


def _assigned_ranks(
    space: UnevenSpace, options: StageOptions, plan: UnevenPlan, taken: Mapping[PartIndex, tuple[int, int]]
) -> dict[PartIndex, range]:
    """Ranks of every part of a stage.

    Groups of stages (see `stage_costs.group_sizes`) are assigned in order, each to the first node of its pool
    with enough free devices. Groups of spread stages are first, by pipeline shape and place, so that they
    fill nodes of their own. The others follow, the largest first, those at the same place of their pipelines
    one after the other.
    """
    first, nodes = 0, defaultdict(list)
    for node in space.cluster.nodes:
        pool = next(
            i for i, one in enumerate(space.pools) if replace(node, name="") == replace(one.node, name="")
        )
        nodes[pool].append([first, first + node.devices])
        first += node.devices
    found: dict[PartIndex, range] = {}
    stage_groups = [
        (place, group)
        for place, pipeline in enumerate(plan.pipelines)
        for group in _groups(options, pipeline)
    ]
    devices = {(place, group): sum(taken[place, *one][1] for one in group) for place, group in stage_groups}

    def order_key(one: tuple[int, _Group]) -> tuple[object, ...]:
        place, group = one
        shape = _spread_shape(options, plan.pipelines[place], group)
        return (True, -devices[one], group, place) if shape is None else (False, shape, group, place)

    for place, group in sorted(stage_groups, key=order_key):
        pool = options.pools[taken[place, *group[0]][0]]
        free_ranks = next(node for node in nodes[pool] if node[1] - node[0] >= devices[place, group])
        for one in group:
            _, size = taken[place, *one]
            found[place, *one] = range(free_ranks[0], free_ranks[0] + size)
            free_ranks[0] += size
    return found


def _groups(options: StageOptions, pipeline: UnevenPipeline) -> list[_Group]:
    """Stages of a pipeline that share a node; each part of a mixed-pool stage is by itself."""
    found: list[_Group] = []
    for site, pools in enumerate(options.sites):
        mine = [index for index, (on, _) in enumerate(pipeline.stages) if on == site]
        if len(pools) > 1:
            found += [((index, part),) for index in mine for part in range(len(pools))]
        elif mine:
            kind = options.stages[site].kinds[pipeline.kinds[site]]
            for many in group_sizes(len(mine), kind.stages_per_node if isinstance(kind, StageKind) else 1):
                found.append(tuple((index, 0) for index in mine[-many:]))
                mine = mine[:-many]
    return found


def _spread_shape(
    options: StageOptions, pipeline: UnevenPipeline, group: _Group
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The shape of the pipeline if the group is spread, else None."""
    sites = [site for site, _ in pipeline.stages]
    counts = tuple(sites.count(site) for site in range(len(options.sites)))
    site = sites[group[0][0]]
    spread = options.spread[site][pipeline.kinds[site]]
    is_spread = spread is not None and spread.has_effect(counts[site])
    return (pipeline.kinds, counts) if is_spread else None


def _entry(plan: UnevenPlan, place: int, index: int) -> tuple[int, tuple[int, int, int, int]]:
    """The site of a stage, and its index in the arrays of `SiteCosts`."""
    pipeline = plan.pipelines[place]
    site, layers = pipeline.stages[index]
    return site, (pipeline.kinds[site], len(pipeline.stages) - index, int(index == 0), layers)


def _stage(
    space: UnevenSpace,
    options: StageOptions,
    plan: UnevenPlan,
    ranks: Mapping[PartIndex, range],
    place: int,
    index: int,
) -> Stage:
    site, (number, _, _, layers) = _entry(plan, place, index)
    kind = options.stages[site].kinds[number]
    names = [space.pools[options.pools[pool]].name for pool in options.sites[site]]
    texts = [_ranks_text(ranks[place, index, part]) for part in range(len(names))]
    parts: tuple[StagePart, ...] = ()
    tp, dp = (kind.tp[0], 2) if isinstance(kind, MixedPoolKind) else (kind.tp, kind.dp)
    if isinstance(kind, MixedPoolKind):
        figures = zip(texts, names, kind.tp, kind.rows, strict=True)
        parts = tuple(
            StagePart(ranks=text, device_class=name, tp=of, rows=rows) for text, name, of, rows in figures
        )
    return Stage(
        devices=sum(devices_by_pool(kind)),
        ranks=",".join(texts),
        device_class=" + ".join(names),
        tp=tp,
        dp=dp,
        layers=(layers,),
        share=plan.pipelines[place].microbatches / options.microbatches,
        parts=parts,
        recompute=_recompute(options, plan, place, index),
    )


def _ranks_text(ranks: range) -> str:
    return f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else f"{ranks.start}"


def _recompute(options: StageOptions, plan: UnevenPlan, place: int, index: int) -> str:
    site, at = _entry(plan, place, index)
    return RECOMPUTES[int(options.stages[site].recompute[at])]


def _peak(
    options: StageOptions, plan: UnevenPlan, problems: Mapping[int, Problem], ranks: Mapping[PartIndex, range]
) -> tuple[int, PeakMemory]:
    """The first rank of the stage or part whose devices are fullest, and its peak memory."""
    found: list[tuple[int, PeakMemory]] = []
    for place, pipeline in enumerate(plan.pipelines):
        for index in range(len(pipeline.stages)):
            site, at = _entry(plan, place, index)
            part = int(options.stages[site].fullest[at])
            problem = problems[options.pools[options.sites[site][part]]]
            allocated = float(options.stages[site].allocated_bytes[at])
            peak = PeakMemory(
                allocated=allocated,
                reserved=allocated * (1.0 + problem.efficiency.fragmentation_ratio),
                device=float(options.stages[site].device_bytes[at]),
                capacity=problem.capacity_bytes,
            )
            found.append((ranks[place, index, part].start, peak))
    return tightest_of(found)


def _breakdown(options: StageOptions, plan: UnevenPlan) -> dict[str, float]:
    """Seconds of the slowest pipeline: work of its busiest stage, the rest of the pipeline with gradients,
    and the end of the step."""
    place = int(first_largest([pipeline.time_s for pipeline in plan.pipelines]))
    pipeline = plan.pipelines[place]
    entries = [_entry(plan, place, index) for index in range(len(pipeline.stages))]
    works = [float(options.stages[site].work_s[at]) for site, at in entries]
    pools, layers = (np.array([list(one)]) for one in zip(*pipeline.stages, strict=True))
    end_s = float(layout_figures(options, pipeline.kinds, pools, layers).end_s.max())
    busy_s = pipeline.microbatches * max(works)
    return {
        "busiest_stage": busy_s,
        "pipeline_and_gradients": pipeline.time_s - busy_s - end_s,
        "end_of_step": end_s,
    }


def _utilisation(
    options: StageOptions,
    taken: Mapping[PartIndex, tuple[int, int]],
    problems: Mapping[int, Problem],
    tokens_per_s: float,
    *,
    is_causal: bool,
) -> float:
    """Model FLOP per second over the dense peak rates of all devices used."""
    problem = next(iter(problems.values()))
    flop = model_flop_per_token(problem.model, problem.job.seq_len, causal_half=is_causal)
    peaks = 0.0
    for pool, size in taken.values():
        device = problems[options.pools[pool]].device
        peaks += size * device.peak_flop_per_s[problem.recipe.matmul]
    return flop * tokens_per_s / peaks
