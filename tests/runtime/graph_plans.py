"""Plans of operator graphs for tests: from frontiers, sampled, and by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

import numpy as np
from tests.property.test_layouts_one import random_solution

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost import Training
from shardwise.cost.layouts.chain import layout_chain
from shardwise.graph import (
    BlockLayout,
    GraphLayout,
    OpGraph,
    OpNode,
    ShardingRule,
    StagedLayout,
    allows,
    rules_of,
    scaled,
)
from shardwise.graph.baselines import layout_from_rules
from shardwise.plans import Layout, PeakMemory, Pipeline, Plan, Result, Stage
from shardwise.search import GraphCurves, StagedCurves, graph_result
from shardwise.strategy import PROFILES, Job, Optimizer

RulePreference = Callable[[OpNode], Sequence[str]]
"""Names of rules for an operator, most preferred first; the first that the operator has and that is legal is
taken."""


def plan_with(
    graph: OpGraph,
    ranks: Sequence[int],
    layout: GraphLayout,
    *,
    optimizer: Optimizer = "adamw",
    dtype: str = "fp32",
) -> Plan:
    """A plan of `layout` on that many processes; its predictions do not matter."""
    job = Job(
        seq_len=graph.seq_len or 1, global_batch_size=graph.batch, dtype=dtype, optimizer=optimizer,
        memory_margin=0.05, profile=PROFILES["megatron-2024"],
    )  # fmt: skip
    cluster = load_cluster(f"1x{int(np.prod(ranks))}xcpu")
    return Plan(network=graph, cluster=cluster, job=job, best=_result(graph, layout), epsilon=0.0)


def _result(graph: OpGraph, layout: GraphLayout) -> Result:
    """`layout` without predictions, on the first ranks."""
    microbatches = layout.microbatches if isinstance(layout, StagedLayout) else 1
    layouts = layout.stages if isinstance(layout, StagedLayout) else (layout,)
    devices = int(np.prod(layout.ranks))
    stages = tuple(
        Stage(
            devices=devices, ranks=f"{place * devices}-{(place + 1) * devices - 1}", device_class="cpu", tp=1,
            dp=1, layers=(len(own.blocks),), share=1.0, operators=own,
        )
        for place, own in enumerate(layouts)
    )  # fmt: skip
    pipeline = Pipeline(
        stages=stages, micro_batch_size=graph.batch // microbatches, microbatches=microbatches,
        rows=graph.batch, makespan_s=1.0,
    )  # fmt: skip
    return Result(
        fields=None, layout=Layout(pipelines=(pipeline,)), step_time_s=1.0, band_s=(1.0, 1.0),
        tokens_per_s_per_device=None, mfu=None, mfu_full_attention=None,
        peak_memory=PeakMemory(allocated=1.0, reserved=1.0, device=1.0, capacity=1.0),
        memory_band_bytes=(0.0, 0.0), fits_probability=1.0,
        breakdown={"forward": 1.0}, memory={"parameters": 1.0}, tightest_rank=0, evaluator="none",
    )  # fmt: skip


def estimated(plan: Plan) -> Plan:
    """`plan` with the predictions for its layout."""
    training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
    return replace(plan, best=graph_result(plan.graph, plan.cluster, training, plan.operators))


def alone(graph: OpGraph, *, optimizer: Optimizer = "adamw", dtype: str = "fp32") -> Plan:
    """The whole graph on one process."""
    layout = by_rules(graph, (1,), lambda op: ("replicate",))
    return plan_with(graph, (1,), layout, optimizer=optimizer, dtype=dtype)


def by_rules(graph: OpGraph, ranks: Sequence[int], *required: RulePreference) -> GraphLayout:
    """The layout in which each operator has, along each axis, the first requested rule that is legal."""
    found = []
    for block in graph.blocks:
        rules: dict[str, tuple[ShardingRule, ...]] = {}
        for op in block.operators:
            along = [
                [rule for name in (*want(op), "replicate") for rule in rules_of(op) if rule.name == name]
                for want in required
            ]
            rules[op.name] = next(each for each in product(*along) if allows(op, each, ranks))
        found.append(rules)
    return layout_from_rules(graph, tuple(ranks), found)


def sampled(graph: OpGraph, ranks: Sequence[int], seeds: Sequence[int]) -> Iterator[Plan]:
    """Layouts with any rule of each operator, any placement of each tensor, any storage of each parameter."""
    devices = int(np.prod(ranks))
    cluster = load_cluster(f"1x{devices}xcpu")
    mesh = mesh_of(cluster, tuple(ranks))
    laid = layout_chain(graph, cluster, Training(dtype="fp32"), mesh)
    for seed in seeds:
        random = np.random.default_rng(seed)
        yield plan_with(graph, ranks, laid.layout(random_solution(random, laid.chain)))


def on_frontier(graph: OpGraph, devices: int, count: int) -> list[Plan]:
    """Plans of `count` points of the frontier on processes of this machine, its extreme points among them."""
    cluster = load_cluster(f"1x{devices}xcpu")
    curve = GraphCurves(graph, cluster, Training(dtype="fp32"), 0.05).curve(cluster, epsilon=0.01)
    places = sorted({round(at * (len(curve.points) - 1) / max(count - 1, 1)) for at in range(count)})
    return [plan_with(graph, curve.meshes[0].ranks, curve.points[place].layout) for place in places]


def in_stages(plan: Plan, cuts: Sequence[int], microbatches: int) -> Plan:
    """The layout of `plan`, made for one micro-batch, cut before the blocks `cuts` into stages on equal
    meshes."""
    layout = StagedLayout(
        ranks=plan.mesh.ranks, blocks=plan.operators.blocks, cuts=tuple(cuts), microbatches=microbatches,
        schedule="1f1b",
    )  # fmt: skip
    cluster = load_cluster(f"1x{plan.mesh.devices * len(layout.spans)}xcpu")
    job = replace(plan.job, global_batch_size=plan.graph.batch)
    return replace(plan, cluster=cluster, job=job, best=_result(plan.graph, layout))


def staged_by_rules(
    graph: OpGraph, ranks: Sequence[int], cuts: Sequence[int], microbatches: int, *required: RulePreference
) -> Plan:
    """A staged layout; each operator has the first requested rule that is legal along each axis."""
    layout = by_rules(scaled(graph, graph.batch // microbatches), ranks, *required)
    return in_stages(plan_with(graph, ranks, layout), cuts, microbatches)


def sampled_in_stages(
    graph: OpGraph, ranks: Sequence[int], cuts: Sequence[int], microbatches: int, seeds: Sequence[int]
) -> Iterator[Plan]:
    """Staged layouts of a micro-batch, sampled as in `sampled`: tensors cross cuts in any legal placement."""
    for plan in sampled(scaled(graph, graph.batch // microbatches), ranks, seeds):
        yield in_stages(replace(plan, network=graph), cuts, microbatches)


def on_staged_frontier(
    graph: OpGraph, devices: int, stages: int, microbatches: int, count: int
) -> list[Plan]:
    """Plans of `count` points of the staged frontier, its extreme points among them."""
    cluster = load_cluster(f"1x{devices}xcpu")
    curves = StagedCurves(graph, cluster, Training(dtype="fp32"), 0.05, stages, (microbatches,))
    curve = curves.curve(cluster, epsilon=0.2)
    places = sorted({round(at * (len(curve.points) - 1) / max(count - 1, 1)) for at in range(count)})
    found = []
    for place in places:
        layout = curve.points[place].layout
        if not isinstance(layout, StagedLayout):
            raise AssertionError("a point in stages")
        plan = plan_with(graph, layout.ranks, layout)
        found.append(in_stages(plan, layout.cuts, layout.microbatches))
    return found


def without_recomputation(plan: Plan) -> Plan:
    """The plan with no block recomputed: the trace does not list recomputation separately."""
    return with_blocks(plan, [replace(block, mode="kept") for block in plan.operators.blocks])


def with_blocks(plan: Plan, blocks: Sequence[BlockLayout]) -> Plan:
    """The plan with other layouts of its blocks, without predictions."""
    (pipeline,) = plan.best.layout.pipelines
    left = iter(blocks)
    stages = []
    for stage in pipeline.stages:
        assert stage.operators is not None
        own = tuple(islice(left, len(stage.operators.blocks)))
        stages.append(replace(stage, operators=replace(stage.operators, blocks=own)))
    layout = replace(plan.best.layout, pipelines=(replace(pipeline, stages=tuple(stages)),))
    return replace(plan, best=replace(plan.best, layout=layout))
