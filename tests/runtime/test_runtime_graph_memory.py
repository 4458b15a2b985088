"""Memory of plans of operator graphs: what a rank allocates is what is charged."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
from tests.property.layout_instances import chain
from tests.runtime.graph_plans import by_rules, in_stages, plan_with, priced
from tests.runtime.graph_tracked import allocated_bytes
from tests.runtime.test_runtime_graph_obeyed import nothing_again

from shardwise.graph import STATES_SPLIT, WHOLE, OpGraph, Placement, shard
from shardwise.plan import GraphPlan
from shardwise.runtime.graphs import interpreter

BATCH, WIDTH, RANKS = 2048, 256, 8


def deep(batch: int) -> OpGraph:
    """Four repetitions of a norm and a linear layer, each with a weight of 256 KiB."""
    graph = chain(batch, WIDTH, WIDTH, 16)
    return replace(graph, blocks=tuple(replace(b, repeat=4 if b.repeat > 1 else 1) for b in graph.blocks))


def stored_as(word: Placement, graph: OpGraph) -> GraphPlan:
    """A divided batch, nothing recomputed, all parameters stored so."""
    plan = nothing_again(plan_with(graph, (RANKS,), by_rules(graph, (RANKS,), lambda op: ("split b",))))
    blocks = tuple(replace(b, stored=dict.fromkeys(b.stored, (word,))) for b in plan.layout.blocks)
    return replace(plan, layout=replace(plan.layout, blocks=blocks))


def charged_bytes(plan: GraphPlan) -> float:
    """What tensors take by the plan."""
    parts = priced(plan).nbytes
    return sum(nbytes for part, nbytes in parts.items() if part not in ("context", "fragmentation"))


@pytest.mark.parametrize("word", [WHOLE, STATES_SPLIT, shard(0)])
def test_no_more_is_allocated_than_is_charged(word: Placement) -> None:
    """Messages of several tensors, which are copies of them, included."""
    plan = stored_as(word, deep(BATCH))
    assert 0.75 * charged_bytes(plan) < allocated_bytes(plan) < charged_bytes(plan)


def test_gathered_parameters_do_not_wait_for_their_gradients() -> None:
    """In stages with two micro-batches in flight; the twin keeps them."""
    whole = deep(BATCH)
    plan = in_stages(replace(stored_as(shard(0), deep(BATCH // 4)), graph=whole), (3,), 4)
    assert allocated_bytes(plan) < charged_bytes(plan)
    with patch.object(interpreter, "given_back", lambda made: nullcontext()):
        assert allocated_bytes(plan) > 1.1 * charged_bytes(plan)
