"""Baseline layouts, which need no search: their names and their costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.reference.one_layout.rank import rank_of

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost import Training, estimate_layout
from shardwise.graph import (
    REPLICATE,
    GraphLayout,
    OpGraph,
    data_parallel,
    graph_names,
    layout_from_record,
    layout_record,
    load_graph,
    megatron,
    scaled,
)

TRANSFORMERS = ("transformer-big", "gpt2-1.5b", "llama-3.1-8b")
MESHES = ((8,), (2, 8), (2, 2, 4))


def graph_of(name: str) -> OpGraph:
    return load_graph(f"graph:{name}")


def words(layout: GraphLayout | None, name: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Rules and placements of the tensors of a block's first repetition."""
    assert layout is not None
    block = next(block for block in layout_record(layout)["blocks"] if block["name"] == name)
    return block["operators"], block["tensors"]


@pytest.mark.parametrize("name", graph_names())
@pytest.mark.parametrize("ranks", MESHES, ids=str)
def test_baselines_are_layouts_of_every_shipped_graph(name: str, ranks: tuple[int, ...]) -> None:
    graph = graph_of(name)
    for baseline in (data_parallel, megatron):
        layout = baseline(graph, ranks)
        assert (layout is not None) == (baseline is data_parallel or name in TRANSFORMERS)
        if layout is not None:  # a reader refuses invalid layouts
            assert layout_from_record(layout_record(layout), graph, ranks) == layout


@pytest.mark.parametrize("name", graph_names())
def test_data_parallelism_divides_the_batch_alone(name: str) -> None:
    graph = graph_of(name)
    layout = data_parallel(graph, (2, 8))
    assert layout is not None
    for block, block_name in zip(graph.blocks, dict.fromkeys(b.name for b in layout.blocks), strict=True):
        operators, tensors = words(layout, block_name)
        for op in block.operators:
            follows = [dim for dim in op.dims if graph.growth.get(dim) and graph.growth[dim].batch]
            expected = {f"split {dim}" for dim in follows} or {"replicate, gradients summed"}
            assert set(operators[op.name]) <= expected
        assert all(placements == ["S(0)", "S(0)"] for placements in tensors.values())
    assert {each for block in layout.blocks for stored in block.stored.values() for each in stored} == {
        REPLICATE
    }
    assert {block.mode for block in layout.blocks} == {"kept"}


def test_megatron_splits_heads_width_and_words_of_llama_within_a_node() -> None:
    layout = megatron(graph_of("llama-3.1-8b"), (2, 8))
    inner = {name: rules[1] for name, rules in words(layout, "layer")[0].items()}
    columns = {"q": "split a", "k": "split g", "v": "split g", "gate": "split f", "up": "split f"}
    rows = {"o": "split a", "down": "split f"}
    between = {"q_rotary": "split a", "k_rotary": "split g", "attention": "split a", "activation": "split f"}
    others = dict.fromkeys(("input_norm", "attention_add", "post_norm", "mlp_add"), "replicate")
    assert inner == {**columns, **rows, **between, **others}
    assert {rules[0] for rules in words(layout, "layer")[0].values()} == {"split b"}
    assert words(layout, "embedding")[0] == {"embed": ["split b", "split v"]}
    assert words(layout, "head")[0]["logits"] == ["split b", "split v"]
    assert words(layout, "head")[0]["loss"] == ["split b", "split v"]
    # The gradient of a tensor that several column-parallel operators read is reduced once, for all of them.
    assert words(layout, "layer")[1]["input_norm"] == ["S(0)", "R+"]


def test_megatron_has_four_all_reduces_a_layer() -> None:
    """Of the results of attention and of the MLP forward, of their shared inputs backward."""
    graph = scaled(graph_of("llama-3.1-8b"), 16, 512)
    more = replace(graph, blocks=(graph.blocks[0], replace(graph.blocks[1], repeat=33), graph.blocks[2]))
    cluster = load_cluster("1x8xH100-SXM")
    training = Training(dtype="bf16")
    # Without overlap, every second is exposed.
    bare = replace(training.profile, tensor_overlap=0.0, tensor_backward_overlap=0.0, context_overlap=0.0)
    training = replace(training, profile=bare)
    mesh = mesh_of(cluster, (8,))
    seconds = []
    for scaled_graph in (graph, more):
        layout = megatron(scaled_graph, (8,))
        assert layout is not None
        seconds.append(estimate_layout(scaled_graph, cluster, training, mesh, layout).seconds["conversions"])
    # 16 x 512 tokens of 4,096 numbers of two bytes
    each_s = rank_of(cluster, training, mesh).all_reduce_s(16 * 512 * 4096 * 2.0, [8])
    assert seconds[1] - seconds[0] == pytest.approx(4.0 * each_s, rel=1e-9)


def test_an_impossible_baseline_is_none() -> None:
    llama = graph_of("llama-3.1-8b")
    assert data_parallel(scaled(llama, 4), (8,)) is None  # 4 samples for 8 ranks
    assert megatron(scaled(llama, 4), (8, 2)) is None
    assert megatron(scaled(llama, 4), (4, 2)) is not None
    assert megatron(llama, (16,)) is None  # 8 heads of keys
    fixed = replace(llama, growth={})  # the graph has no label for the batch dim
    assert data_parallel(fixed, (8,)) is None


def test_a_width_that_other_blocks_read_is_not_split() -> None:
    """Without its second half, an MLP cut after its activation has no row-parallel layer; attention is split
    as before.
    """
    llama = graph_of("llama-3.1-8b")
    layer = llama.blocks[1]
    names = [op.name for op in layer.operators]
    first = replace(layer, name="first", repeat=1, operators=layer.operators[: names.index("post_norm") + 1])
    wide = [op for op in layer.operators if op.name in ("gate", "up", "activation")]
    renamed = [
        replace(op, inputs=tuple(replace(o, source="w") if o.source == "post_norm" else o for o in op.inputs))
        for op in wide
    ]
    second = replace(layer, name="second", entry="w", repeat=1, operators=tuple(renamed))
    graph = replace(llama, blocks=(llama.blocks[0], first, second))
    layout = megatron(graph, (8,))
    assert words(layout, "first")[0]["o"] == ["split a"]
    assert words(layout, "second")[0] == {name: ["replicate"] for name in ("gate", "up", "activation")}
