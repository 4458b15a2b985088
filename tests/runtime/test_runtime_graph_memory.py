"""Memory of graph plans: what a rank allocates equals the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.property.layout_instances import chain, op
from tests.runtime.graph_memory_tracker import allocated_bytes
from tests.runtime.graph_plans import (
    by_rules,
    estimated,
    in_stages,
    plan_with,
    with_blocks,
    without_recomputation,
)
from tests.runtime.test_runtime_graph_plan_is_followed import steps_of
from tests.runtime.test_runtime_memory import with_memory
from tests.sampling import sample_of
from torch import Tensor, nn
from torch.nn import functional

from shardwise.cost import Training
from shardwise.cost.layouts import block as block_costs
from shardwise.graph import (
    REPLICATE,
    REPLICATE_SHARD_STATES,
    Block,
    OpGraph,
    Placement,
    load_graph,
    scaled,
    shard,
)
from shardwise.graph.sizes import SizeGrowth
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool
from shardwise.runtime.graphs import interpreter, kernels, kernels_elementwise
from shardwise.runtime.graphs.interpreter import Interpreter, _SectionRun
from shardwise.runtime.graphs.parameters import ShardedParameter
from shardwise.runtime.graphs.redistribute import TensorSpec
from shardwise.runtime.graphs.sharded_operator import Dims, ShardedOperator, aligned
from shardwise.runtime.workers import Report
from shardwise.search import GraphCurves

BATCH, WIDTH, RANKS = 2048, 256, 8


def deep(batch: int) -> OpGraph:
    """Four repetitions of a norm and a linear layer, each with a weight of 256 KiB."""
    graph = chain(batch, WIDTH, WIDTH, 16)
    return replace(graph, blocks=tuple(replace(b, repeat=4 if b.repeat > 1 else 1) for b in graph.blocks))


def stored_as(word: Placement, graph: OpGraph, ranks: int = RANKS) -> Plan:
    """A plan with a sharded batch, no recomputation, and all parameters stored as `word`."""
    plan = without_recomputation(
        plan_with(graph, (ranks,), by_rules(graph, (ranks,), lambda op: ("split b",)))
    )
    blocks = tuple(replace(b, stored=dict.fromkeys(b.stored, (word,))) for b in plan.operators.blocks)
    return with_blocks(plan, blocks)


def predicted_bytes(plan: Plan) -> float:
    """The predicted bytes of all tensors together, without the context and fragmentation."""
    parts = estimated(plan).memory
    return sum(nbytes for part, nbytes in parts.items() if part not in ("context", "fragmentation"))


def at_once_bytes(plan: Plan) -> float:
    """The predicted bytes of the tensors that exist at the same moment."""
    price = estimated(plan)
    context, more = (price.memory[part] for part in ("context", "fragmentation"))
    return (price.best.peak_memory.allocated - context) / (1.0 + more / predicted_bytes(plan))


@pytest.mark.parametrize("word", [REPLICATE, REPLICATE_SHARD_STATES, shard(0)])
def test_no_more_is_allocated_than_is_predicted(word: Placement) -> None:
    """Includes messages of several tensors, which are copies. (Of two gathered weights that are predicted,
    the current and the next, one exists.)"""
    plan = stored_as(word, deep(BATCH))
    assert (0.85 if word == shard(0) else 0.95) * predicted_bytes(plan) < allocated_bytes(plan)
    assert allocated_bytes(plan) < predicted_bytes(plan)


SHIPPED = {
    "graph:mlp": 1024, "graph:vgg16": 64, "graph:resnet50": 64, "graph:transformer-big": 64,
    "graph:lstm-2x2048": 64, "graph:gpt2-1.5b": 16,
}  # fmt: skip
"""The batch size for each graph."""

QUICK = ("graph:mlp", "graph:vgg16", "graph:gpt2-1.5b")
"""Graphs that are run without `--full`, with at most two repetitions of each block."""


def shallow(graph: OpGraph) -> OpGraph:
    """At most two repetitions of each block."""
    return replace(graph, blocks=tuple(replace(b, repeat=min(b.repeat, 2)) for b in graph.blocks))


def ends(graph: OpGraph) -> list[Plan]:
    """The fastest and the smallest plan of the frontier on processes of one machine with enough memory."""
    cluster = with_memory(RANKS)
    curve = GraphCurves(graph, cluster, Training(dtype="fp32"), 0.05).curve(cluster, epsilon=0.05)
    ranks = curve.meshes[0].ranks
    return [
        replace(plan_with(graph, ranks, point.layout), cluster=cluster)
        for point in (curve.points[0], curve.points[-1])
    ]


@cache
def bytes_of_ends(name: str, is_whole: bool) -> list[tuple[int, float, float]]:
    """For both extreme points: allocated bytes, the predicted bytes at one moment, and the predicted sum."""
    graph = scaled(load_graph(name), SHIPPED[name])
    plans = ends(graph if is_whole else shallow(graph))
    return [(allocated_bytes(plan), at_once_bytes(plan), predicted_bytes(plan)) for plan in plans]


@pytest.mark.parametrize("name", sample_of(list(SHIPPED), QUICK))
def test_points_of_shipped_graphs_allocate_as_predicted(name: str, full: bool) -> None:
    """At both ends of each frontier, allocated bytes are within a tenth of the prediction for one moment, and
    at most a tenth above the predicted sum."""
    for allocated, at_once, predicted in bytes_of_ends(name, is_whole=full):
        assert allocated == pytest.approx(at_once, rel=0.1)
        assert allocated < 1.1 * predicted


def test_saved_activations_are_gone_when_early_layers_need_most(full: bool) -> None:
    """vgg16 without recomputation: its parts peak at different moments, so that a tenth of their sum is never
    used."""
    (allocated, _, predicted), _ = bytes_of_ends("graph:vgg16", is_whole=full)
    assert allocated < 0.9 * predicted


def small_gpt(batch: int = 64) -> Plan:
    """Two layers, in which weights are a small part."""
    return stored_as(shard(0), shallow(scaled(load_graph("graph:gpt2-1.5b"), batch)))


def test_a_table_that_is_read_first_and_last_is_gathered_while_all_activations_are_saved() -> None:
    """A sharded table of 50,257 x 1,600, for the embedding and for the logits of one sequence a rank. The
    mutant counts the gathered table at the embedding only, where no activations are saved."""
    plan = small_gpt(RANKS)
    profile = replace(plan.job.profile, shard_overlap=0.0)  # none is gathered before it is needed
    plan = replace(plan, job=replace(plan.job, profile=profile))
    reported = at_once_bytes(plan)
    assert allocated_bytes(plan) == pytest.approx(reported, rel=0.1)
    with patch.object(block_costs, "copied_bytes", lambda context, moved: 0.0):
        assert at_once_bytes(plan) < 0.9 * reported


def _all_until_the_end(run: _SectionRun, source: str, spec: Any) -> Tensor:
    run.left[source] += 1
    return READ(run, source, spec)


READ, GIVEN = _SectionRun._read, Interpreter.read_input


def test_copies_that_are_not_predicted_are_not_made() -> None:
    """On a rank: an activation of 8 x 1,024 tokens, 1,600 wide, in each of two layers, and 50,257 logits of
    each token."""
    plan = small_gpt()
    least = allocated_bytes(plan)
    assert least < 1.05 * predicted_bytes(plan)
    copied = patch.object(kernels, "_as_4d", lambda each: each.reshape(-1, 1, *each.shape[-2:]))
    with copied:
        assert allocated_bytes(plan) - least > 0.9 * 2 * (4 * 8 * 1024 * 1600)
    with patch.object(kernels_elementwise._TargetLogLikelihood, "apply", _entropy):
        assert allocated_bytes(plan) - least > 0.9 * (4 * 8 * 1024 * 50257)


def _entropy(rows: Tensor, at: Tensor) -> Tensor:
    """PyTorch's cross entropy, whose gradient has memory of its own."""
    return functional.cross_entropy(rows.flatten(0, -2), at.flatten(), reduction="none").view(at.shape)


def test_a_loss_of_divided_classes_has_its_logits_twice_and_no_more() -> None:
    """2,048 rows of 1,024 classes on each of 8 ranks: the logits, and their exponentials in place. The mutant
    copies these once more."""
    graph = chain(BATCH, 64, 64, 1024 * RANKS)
    layout = by_rules(graph, (RANKS,), lambda op: ("split v", "split b"))
    plan = without_recomputation(plan_with(graph, (RANKS,), layout))
    least = allocated_bytes(plan)
    assert least == pytest.approx(at_once_bytes(plan), rel=0.1)
    with patch.object(Tensor, "exp_", Tensor.exp):
        assert allocated_bytes(plan) - least > 0.9 * (4 * BATCH * 1024)


def test_tensors_without_further_readers_are_freed() -> None:
    """Recomputed outputs of linear layers are freed, as their ReLU saves nothing of them."""
    plan = layers_again(4096)
    least = allocated_bytes(plan)
    with patch.object(_SectionRun, "_read", _all_until_the_end):
        assert allocated_bytes(plan) > 1.2 * least


def _composed(
    work: ShardedOperator,
    value: Tensor,
    parameters: Sequence[Tensor],
    over: Dims,
    moments: Sequence[int] = (1, 2),
) -> Tensor:
    """A norm of several operators, each of which saves the inputs of its own backward pass."""
    at = [work.op.output.index(dim) for dim in over]
    sums = torch.stack((value.sum(at, keepdim=True), value.square().sum(at, keepdim=True)))
    mean, square = (work.summed(sums, over, gradients="summed") / work.op.elements(over)).unbind()
    normed = (value - mean) * (square - mean * mean + 1e-5).rsqrt()
    return normed * aligned(parameters[0], work.op.parameters[0].dims, work.op.output)


def test_a_norm_across_ranks_saves_its_input_alone() -> None:
    graph = deep(BATCH)
    split = {"layer_norm": ("split f",)}
    layout = by_rules(graph, (RANKS,), lambda op: split.get(op.kind, ("split b",)))
    plan = without_recomputation(plan_with(graph, (RANKS,), layout))
    least = allocated_bytes(plan)
    with patch.object(kernels_elementwise, "_normed", _composed):
        assert allocated_bytes(plan) > 1.1 * least


def test_a_share_of_a_weight_is_no_copy() -> None:
    """With sharded optimizer states: neither the updated shard nor its gradient is a copy."""

    def copied(param: ShardedParameter, *arguments: Any) -> None:
        init(param, *arguments)
        param.owned = nn.Parameter(param.owned.detach().clone())

    init = ShardedParameter.__init__
    plan = stored_as(REPLICATE_SHARD_STATES, deep(BATCH // 8))
    weights = sum(
        op.elements(own.dims) * block.repeat
        for block in plan.graph.blocks
        for op in block.operators
        for own in op.parameters
    )
    least = allocated_bytes(plan)
    with patch.object(ShardedParameter, "__init__", copied):
        assert allocated_bytes(plan) - least == pytest.approx(4 * weights / RANKS, rel=0.05)


def test_gathered_parameters_do_not_wait_for_their_gradients() -> None:
    """In stages with two micro-batches in flight; the mutant keeps the gathered parameters."""
    whole = deep(BATCH)
    plan = in_stages(replace(stored_as(shard(0), deep(BATCH // 4)), network=whole), (3,), 4)
    assert allocated_bytes(plan) < predicted_bytes(plan)
    with patch.object(interpreter, "rematerialize", lambda made: nullcontext()):
        assert allocated_bytes(plan) > 1.1 * predicted_bytes(plan)


def test_parameters_gathered_for_recomputation_do_not_wait_for_their_gradients() -> None:
    """Otherwise all weights of the block would be there at the same time."""
    plan = layers_again(64)
    least = allocated_bytes(plan)
    assert least < 1.1 * predicted_bytes(plan)
    with patch.object(interpreter, "rematerialize", lambda made: nullcontext()):
        assert allocated_bytes(plan) > 1.3 * least


def all_gathers(report: Report, plan: Plan, broken: bool) -> int:
    """The number of all-gathers of a step."""
    mutant: Any = (
        patch.object(interpreter, "rematerialize", lambda made: nullcontext()) if broken else nullcontext()
    )
    with mutant:
        (found,) = steps_of(report, [plan])
    return sum(times for (kind, _), times in found.items() if "gather" in kind)


def test_a_device_holds_only_the_part_of_the_batch_that_it_reads() -> None:
    """16,384 rows of 256 numbers: each of 8 ranks holds an eighth; the mutant holds all rows."""
    rows, width = 16384, 256
    plan = stored_as(REPLICATE, chain(rows, width, 16, 16))
    least = allocated_bytes(plan)
    assert least == pytest.approx(at_once_bytes(plan), rel=0.1)

    def read_input(interpreter: Interpreter, whole: Tensor, spec: TensorSpec) -> Tensor:
        return GIVEN(interpreter, interpreter.placed(whole), spec)

    with patch.object(Interpreter, "read_input", read_input):
        assert allocated_bytes(plan) - least > 0.5 * (4 * rows * width)


def test_recomputation_gathers_parameters_again_as_predicted(team: WorkerPool) -> None:
    """Six weights are gathered in the forward pass, in its recomputation and in the backward pass; there the
    first needs none, as its input is data: 17 all-gathers. The cost model counts three passes, or two without
    recomputation. The mutant keeps the weights gathered for recomputation and has 12."""
    plan = layers_again(64, ranks=2)
    head = replace(plan.operators.blocks[1], stored={"w_down": (REPLICATE,)})
    profile = replace(plan.job.profile, shard_overlap=0.0)
    plan = with_blocks(
        replace(plan, job=replace(plan.job, profile=profile)), (plan.operators.blocks[0], head)
    )
    assert set(team.run(2, all_gathers, plan, False)) == {17}
    assert set(team.run(2, all_gathers, plan, True)) == {12}
    again_s, stored_s = (estimated(each).breakdown["gathers"] for each in (plan, without_recomputation(plan)))
    assert again_s == pytest.approx(1.5 * stored_s, rel=1e-9) and stored_s > 0.0


def layers_again(batch: int, ranks: int = RANKS) -> Plan:
    """Six layers, each with a ReLU, in one recomputed block; weights are sharded."""
    sizes = {"b": batch, "v": 16, **dict.fromkeys("cdefghi", WIDTH)}
    layers = []
    for at, (read, made) in enumerate(pairwise("cdefghi")):
        source = f"relu{at - 1}" if at else "x"
        weight = (f"w{at}", read + made)
        layers += [
            op(f"layer{at}", "linear", sizes, [(source, f"b{read}")], f"b{made}", [weight]),
            op(f"relu{at}", "elementwise", sizes, [(f"layer{at}", f"b{made}")], f"b{made}", function="relu"),
        ]
    head = (
        op("down", "linear", sizes, [("relu5", "bi")], "bv", [("w_down", "iv")]),
        op("loss", "cross_entropy", sizes, [("down", "bv"), ("target", "b")], ""),
    )
    graph = OpGraph(
        name="layers",
        inputs={"x": (batch, WIDTH), "target": (batch,)},
        blocks=(
            Block(name="layers", operators=tuple(layers)),
            Block(name="head", operators=head, entry="relu5"),
        ),
        batch=batch,
        growth={"b": SizeGrowth(batch=1)},
    )
    plan = stored_as(shard(0), graph, ranks)
    first, *others = plan.operators.blocks
    return with_blocks(plan, (replace(first, mode="recomputed"), *others))
