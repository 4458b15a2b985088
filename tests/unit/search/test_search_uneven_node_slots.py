"""Costs of gradient reduction by the number of the pipeline's stages that share a node."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.cost import NodeSlot, single_stage
from shardwise.model import Model, load_model
from shardwise.search import UnevenSpace, default_job, evaluate
from shardwise.search.hetero import lower_bounds, pipeline_search, predict_record, result
from shardwise.search.hetero.branch_and_bound import UnevenPipeline, UnevenPlan
from shardwise.search.hetero.lower_bounds import StageTable, layout_figures
from shardwise.search.hetero.pipeline_search import best_pipeline, pipeline_s
from shardwise.search.hetero.result import uneven_record
from shardwise.search.hetero.space import StageKind, UnevenSubproblem
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions, node_slots_of_pool
from shardwise.search.hetero.subproblem import subproblem_search
from shardwise.strategy import complete, even_ends, layer_counts

BATCH = 32

CASES = [
    # cluster, tp, pp, pipelines; stages of a pipeline per node
    ("2x4xA100-80G", 1, 4, 2),  # 4: replicas are on other nodes
    ("2x4xA100-80G", 1, 2, 4),  # 2: two replicas in a node
    ("2x4xA100-80G", 2, 2, 2),  # 2, which fill the node
    ("2x4xA100-80G", 1, 1, 8),  # 1: a node full of replicas
    ("4x4xA100-80G", 1, 8, 2),  # 4 and 4
    ("4x4xA100-80G", 2, 4, 2),  # 2 and 2
    ("4x8xA100-80G", 1, 4, 8),  # 4, two replicas in a node
    ("1x8xA100-80G", 1, 4, 2),  # 4, all replicas in the node
]

SPREAD = [
    # The same with spread stages: each stage of a pipeline on another node, which is full of its replicas.
    ("2x4xA100-80G", 1, 2, 4),
    ("2x4xA100-80G", 2, 2, 2),
    ("4x4xA100-80G", 1, 4, 4),
    ("4x8xA100-80G", 1, 4, 8),
    ("4x8xA100-80G", 2, 2, 8),
    ("4x8xA100-80G", 1, 2, 16),
    ("8x4xA100-80G", 2, 4, 4),
]


def model_of(*, is_tied: bool) -> Model:
    return replace(load_model("gpt2"), tied_embeddings=is_tied)


def filled(
    on: str, tp: int, pp: int, pipelines: int, link: str, model: Model, stages_per_node: int | None = None
) -> tuple[UnevenPlan, float]:
    """Identical pipelines that fill the nodes with up to this many stages per node, and the time of the
    uniform strategy with the same stages; for spread stages, of one whose replicas are next to each other.
    """
    cluster = load_cluster(on, inter_node=link)
    job = default_job(model, cluster, seq_len=1024, global_batch_size=BATCH)
    order = "tp-cp-pp-dp" if stages_per_node is None else "tp-cp-dp-pp"
    fields = {"tp": tp, "pp": pp, "dp": pipelines, "optim_shard": pipelines, "axis_order": order}
    strategy = complete(
        {**fields, "micro_batch_size": 1}, devices=cluster.devices, layers=model.layers, experts=None,
        global_batch_size=BATCH,
    )  # fmt: skip
    subproblem = UnevenSubproblem(pools=(0,), micro_batch_size=1, least=pipelines, most=pipelines)
    space = UnevenSpace(model, cluster, job)
    options = StageCostModel(space).options(subproblem)
    kinds = (
        options.stages[0].kinds.index(StageKind(tp, 1, stages_per_node or space.stages_per_node(0, tp))),
    )
    layers = layer_counts(model.layers, pp, *(int(end) for end in even_ends(model.layers, pp)))
    stages, share = tuple((0, count) for count in layers), BATCH // pipelines
    found_s = pipeline_s(options, kinds, stages, share)
    one = UnevenPipeline(kinds=kinds, stages=stages, microbatches=share, time_s=found_s)
    plan = UnevenPlan(subproblem=subproblem, pipelines=(one,) * pipelines, time_s=found_s)
    return plan, evaluate(model, cluster, job, strategy).step_time_s


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("link", ["1Gb/s", "100Gb/s"])
@pytest.mark.parametrize(("on", "tp", "pp", "pipelines"), CASES)
def test_identical_pipelines_cost_as_the_uniform_strategy(
    on: str, tp: int, pp: int, pipelines: int, link: str, is_tied: bool
) -> None:
    plan, expected_s = filled(on, tp, pp, pipelines, link, model_of(is_tied=is_tied))
    assert plan.time_s == pytest.approx(expected_s, rel=1e-12)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("link", ["1Gb/s", "100Gb/s"])
@pytest.mark.parametrize(("on", "tp", "pp", "pipelines"), SPREAD)
def test_spread_stages_cost_as_uniform_ones_with_adjacent_replicas(
    on: str, tp: int, pp: int, pipelines: int, link: str, is_tied: bool
) -> None:
    plan, expected_s = filled(on, tp, pp, pipelines, link, model_of(is_tied=is_tied), 1)
    laid, _ = filled(on, tp, pp, pipelines, link, model_of(is_tied=is_tied))
    assert plan.time_s == pytest.approx(expected_s, rel=1e-12)
    assert laid.time_s != pytest.approx(expected_s, rel=1e-6)


@pytest.mark.parametrize("name", ["_sizes", "_tied_s"])
def test_stages_costed_as_if_alone_in_their_node_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants place each replica next to the others of its stage, or the ends of the model on different
    nodes.
    """
    sound = getattr(single_stage, name)

    def apart(*given: Any) -> Any:
        return sound(*given[:-1], 1 if name == "_sizes" else replace(given[-1], is_whole=False))

    monkeypatch.setattr(single_stage, name, apart)
    wrong = []
    for case in CASES:
        plan, expected_s = filled(*case, "1Gb/s", model_of(is_tied=True))
        wrong.append(plan.time_s != pytest.approx(expected_s, rel=1e-6))
    # The two are equally far apart only if a node has one stage of a pipeline, or the pool has one node.
    assert wrong == {"_sizes": [True] * 3 + [False] + [True] * 3 + [False]}.get(name, wrong) and any(wrong)


@pytest.mark.parametrize(
    ("on", "tp", "pp", "pipelines", "most"),
    [
        *((*case, None) for case in CASES),
        *((*case, 1) for case in SPREAD),
        ("4x8xA100-80G", 1, 8, 4, 2),
        ("4x8xA100-80G", 1, 8, 4, 4),
    ],
)
def test_replicas_are_placed_where_their_cost_assumes(
    on: str, tp: int, pp: int, pipelines: int, most: int | None
) -> None:
    """On the ranks of the plan, a node has as many replicas of a stage as its estimate assumes."""
    model = model_of(is_tied=False)
    plan, _ = filled(on, tp, pp, pipelines, "1Gb/s", model, most)
    cluster = load_cluster(on, inter_node="1Gb/s")
    space = UnevenSpace(model, cluster, default_job(model, cluster, seq_len=1024, global_batch_size=BATCH))
    options, node = StageCostModel(space).options(plan.subproblem), cluster.nodes[0].devices
    found = uneven_record(space, plan)
    for index in range(pp):
        firsts = [int(one.stages[index].ranks.partition("-")[0]) for one in found.layout.pipelines]
        node_slot = options.hops[0].node_slots[1, plan.pipelines[0].kinds[0], pp, pp - index]
        stages_per_node = options.stages[0].node_slots[int(node_slot)].stages_per_node
        assert stages_per_node == (most or stages_per_node)
        assert set(Counter(first // node for first in firsts).values()) == {node // (tp * stages_per_node)}
    again = predict_record(model, cluster, space.job, found)
    assert not again.faults
    assert again.pipeline_s == pytest.approx([plan.time_s] * pipelines, rel=1e-12)


def test_stages_that_are_spread_have_nodes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another pipeline of one stage, which would be on their nodes if pipelines were placed in order."""
    model, cluster = model_of(is_tied=False), load_cluster("3x2xA100-80G+1x2xT4", inter_node="10Gb/s")
    space = UnevenSpace(model, cluster, default_job(model, cluster, seq_len=128, global_batch_size=6))
    options = StageCostModel(space).options(
        UnevenSubproblem(pools=(0, 1), micro_batch_size=1, least=3, most=3)
    )
    alone, spread = (
        options.stages[0].kinds.index(StageKind(1, 1, stages_per_node)) for stages_per_node in (2, 1)
    )
    shapes = [((alone, 0), ((0, 12),)), *[((spread, 0), ((0, 6), (0, 6)))] * 2]
    pipelines = tuple(
        UnevenPipeline(
            kinds=kinds, stages=stages, microbatches=2, time_s=pipeline_s(options, kinds, stages, 2)
        )
        for kinds, stages in shapes
    )
    subproblem = UnevenSubproblem(pools=(0, 1), micro_batch_size=1, least=3, most=3)
    plan = UnevenPlan(subproblem=subproblem, pipelines=pipelines, time_s=max(one.time_s for one in pipelines))
    found = uneven_record(space, plan)
    ranks = [[stage.ranks for stage in one.stages] for one in found.layout.pipelines]
    assert ranks == [["4"], ["0", "2"], ["1", "3"]]
    again = predict_record(model, cluster, space.job, found)
    assert again.pipeline_s == pytest.approx([one.time_s for one in pipelines], rel=1e-12)
    monkeypatch.setattr(result, "_spread_shape", lambda *_: None)
    again = predict_record(model, cluster, space.job, uneven_record(space, plan))
    assert again.faults[0] == "pipeline 1 is spread over nodes that identical pipelines do not fill"


def test_spread_pipelines_form_sets_that_fill_their_nodes() -> None:
    """Four pipelines of two stages each fill two nodes of four; two sets of identical pipelines do ten
    micro-batches.
    """
    model, cluster = model_of(is_tied=False), load_cluster("4x4xA100-80G+2x4xT4", inter_node="10Gb/s")
    space = UnevenSpace(model, cluster, default_job(model, cluster, seq_len=128, global_batch_size=10))
    subproblem = UnevenSubproblem(pools=(0, 1), micro_batch_size=1, least=3, most=8, is_alike=True)
    options = StageCostModel(space).options(subproblem)
    searched = subproblem_search(options, subproblem, 100)
    kind = options.stages[0].kinds.index(StageKind(1, 1, 1))
    of_pool = searched.shapes.counts.tolist()
    (place,) = (
        at for at, one in enumerate(of_pool) if one == [2, 0] and searched.shapes.kinds[at, 0] == kind
    )
    assert searched.shapes.devices[place].tolist() == [8, 0] and searched.shapes.set_size[place] == 4
    done = np.zeros(len(of_pool), dtype=np.int64)
    for each, sets in ((1, None), (2, 2), (4, 1)):
        done[place] = each
        assert searched.chosen(done) == (None if sets is None else {place: sets})


def test_node_slots_are_those_that_stages_may_have() -> None:
    apart = (NodeSlot(1, 8), NodeSlot(2, 8), NodeSlot(4, 8))
    assert node_slots_of_pool(8, [2, 4], 8, False) == apart == node_slots_of_pool(8, [1], 7, False)
    assert node_slots_of_pool(8, [2], 8, True) == (*apart, NodeSlot(2, 8, True), NodeSlot(4, 8, True))
    assert node_slots_of_pool(6, [1], 8, False) == (NodeSlot(1, 6), NodeSlot(2, 6))


@pytest.fixture(scope="module")
def between_nodes() -> tuple[UnevenSpace, StageOptions]:
    """Two identical pipelines of llama-2-70b with 128 micro-batches each; their stages on RTX4090 gather and
    reduce for seconds.
    """
    model, cluster = load_model("llama-2-70b"), load_cluster("4x8xA100-80G+4x8xRTX4090")
    space = UnevenSpace(model, cluster, default_job(model, cluster, seq_len=4096, global_batch_size=256))
    subproblem = UnevenSubproblem(pools=(0, 1), micro_batch_size=1, least=2, most=2, is_alike=True)
    return space, StageCostModel(space).options(subproblem)


FAST_THEN_SLOW = ((0, 17),) * 4 + ((1, 6),) * 2


def test_gathers_before_the_first_loop_and_reductions_after_the_last_are_exposed(
    between_nodes: tuple[UnevenSpace, StageOptions],
) -> None:
    """The first stages, which are the slowest, wait for the all-gathers of the last stages, which reduce
    after them.
    """
    _, options = between_nodes
    kinds = (
        options.stages[0].kinds.index(StageKind(4, 1, 2)),
        options.stages[1].kinds.index(StageKind(8, 1, 1)),
    )
    pools, layers = (np.array([list(one)]) for one in zip(*FAST_THEN_SLOW, strict=True))
    figures = layout_figures(options, kinds, pools, layers)
    time_s = pipeline_s(options, kinds, FAST_THEN_SLOW, 128)
    assert figures.gather_s[0, 4:].min() > 2.0 and figures.reduce_s[0, 4:].min() > 4.0
    assert lower_bounds.lower_bound_s(figures, 128)[0] == pytest.approx(time_s, rel=1e-9)


def proven(options: StageOptions, within_s: float) -> bool:
    """Whether the search proves that pipelines of four stages of four devices on each pool cannot do 128
    micro-batches within the time, with the limit on partial pipelines of the search of a large cluster.
    """
    kinds = tuple(stages.kinds.index(StageKind(4, 1, 2)) for stages in options.stages)
    found = best_pipeline(options, StageTable(options), kinds, (4, 4), 128, within_s, 2048)
    return not found.is_truncated and found.bound_s > within_s


@pytest.mark.slow
def test_bounds_prune_pipelines_with_expensive_gradients(
    between_nodes: tuple[UnevenSpace, StageOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, options = between_nodes
    assert proven(options, 64.0)
    monkeypatch.setattr(lower_bounds, "completion_lower_bound_s", lambda *_: 0.0)
    monkeypatch.setattr(pipeline_search, "completion_lower_bound_s", lambda *_: 0.0)
    assert not proven(options, 64.0)
