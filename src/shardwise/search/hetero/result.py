"""The record of an uneven plan: the ranks of each stage, and all of its predicted figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import isclose

from shardwise.errors import InternalError
from shardwise.plans import Layout, PeakMemory, Pipeline, Result, Stage, StagePart
from shardwise.search.hetero.branch_and_bound import UnevenPipeline, UnevenPlan
from shardwise.search.hetero.record_costs import RecordCostModel, predicted_result
from shardwise.search.hetero.space import MixedPoolKind, StageKind, UnevenSpace, devices_by_pool
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions, group_sizes
from shardwise.strategy import RECOMPUTES
from shardwise.ties import TIE

UNEVEN_EVALUATOR = "max-plus, pipeline by pipeline"
UNEVEN_SCHEDULE = "1f1b"

PartIndex = tuple[int, int, int]
"""Indices of a pipeline of a plan, a stage of it, and a part of that: 0, or 1 for the second part of a
mixed-pool stage."""

_Group = tuple[tuple[int, int], ...]
"""Stages of a pipeline in order, by index and part."""


def uneven_result(space: UnevenSpace, plan: UnevenPlan) -> Result:
    """The record of the plan with all of its figures. Raises InternalError if it is predicted otherwise than
    the search did."""
    record = uneven_record(space, plan)
    prices = RecordCostModel(space.model, space.cluster, space.job)
    found = predicted_result(prices, record, space.job.global_batch_size)
    if found is None or not isclose(found.step_time_s, plan.time_s, rel_tol=TIE):
        again = "is none or does not fit" if found is None else f"takes {found.step_time_s!r} s"
        raise InternalError(f"a plan that takes {plan.time_s!r} s in the search {again} by its record")
    return replace(found, layout=record.layout, step_time_s=plan.time_s)


def uneven_record(space: UnevenSpace, plan: UnevenPlan) -> Result:
    """The plan on the devices of its cluster; of its figures only the times, the others are 0."""
    options = StageCostModel(space).options(plan.subproblem)
    ranks = _assigned_ranks(space, options, plan, _taken(options, plan))
    size, time_s = plan.subproblem.micro_batch_size, plan.time_s
    pipelines = tuple(
        Pipeline(
            stages=tuple(
                _stage(space, options, plan, ranks, place, index) for index in range(len(pipeline.stages))
            ),
            micro_batch_size=size,
            microbatches=pipeline.microbatches,
            rows=pipeline.microbatches * size,
            makespan_s=pipeline.time_s,
        )
        for place, pipeline in enumerate(plan.pipelines)
    )
    return Result(
        fields=None, layout=Layout(pipelines=pipelines), step_time_s=time_s, band_s=(time_s, time_s),
        tokens_per_s_per_device=0.0, mfu=0.0, mfu_full_attention=0.0, breakdown={}, memory={},
        peak_memory=PeakMemory(allocated=0.0, reserved=0.0, device=0.0, capacity=0.0), tightest_rank=0,
        memory_band_bytes=(0.0, 0.0), fits_probability=1.0,
        pools=tuple(space.pools[pool].name for pool in plan.subproblem.pools),
        is_alike=plan.subproblem.is_alike, evaluator=UNEVEN_EVALUATOR,
    )  # fmt: skip


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


def _stage(
    space: UnevenSpace,
    options: StageOptions,
    plan: UnevenPlan,
    ranks: Mapping[PartIndex, range],
    place: int,
    index: int,
) -> Stage:
    pipeline = plan.pipelines[place]
    site, layers = pipeline.stages[index]
    number = pipeline.kinds[site]
    recompute = options.stages[site].recompute[number, len(pipeline.stages) - index, int(index == 0), layers]
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
        share=pipeline.microbatches / options.microbatches,
        parts=parts,
        recompute=RECOMPUTES[int(recompute)],
    )


def _ranks_text(ranks: range) -> str:
    return f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else f"{ranks.start}"
