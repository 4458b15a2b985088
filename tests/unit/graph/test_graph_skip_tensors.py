"""Skip tensors: blocks that read tensors of earlier blocks, which block makes and reads them, and which
tensors cannot be skip tensors.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.property.layout_instances import skips, skips_after_the_first
from tests.unit.graph.texts import SMALL

from shardwise.cost.layouts.chain import entry_shapes
from shardwise.errors import ConfigError
from shardwise.graph import (
    REPLICATE_SUM_GRAD,
    blocks_joined_by_skips,
    check_graph,
    data_parallel,
    graph_text,
    layout_from_record,
    layout_record,
    load_graph,
    loss_weight,
    megatron,
    parse_graph,
    shard,
    skip_tensors_of,
    staged_from_record,
    tensor_shapes,
)
from shardwise.inputs import parse_mapping

SKIPS = skips(8, 6, 12, 5)
FIRST, SECOND, MIDDLE, LAST = range(4)


def test_entries_results_and_inner_tensors_are_skip_outputs() -> None:
    found = skip_tensors_of(SKIPS)
    assert found.skip_outputs == (("up",), ("n", "bend"), (), ())
    assert found.skip_inputs == ((), (), ("bend", "n"), ("up",))
    assert found.names == ("up", "n", "bend")
    check_graph(SKIPS)


def test_a_block_has_the_shapes_of_all_its_tensors() -> None:
    shapes = tensor_shapes(SKIPS)
    assert shapes[MIDDLE] == dict.fromkeys(("bend", "n", "m", "mix", "gate", "add"), (8, 12))
    assert shapes[LAST] == {"up": (8, 12), "z": (8, 12), "join": (8, 12), "down": (8, 5), "loss": ()}
    assert entry_shapes(SKIPS) == (None, (8, 12), (8, 12), (8, 12), (8, 12))


def test_a_graph_with_skip_tensors_is_written_and_read_again() -> None:
    assert parse_graph(parse_mapping(graph_text(SKIPS))) == SKIPS


def test_no_stage_boundary_separates_producer_and_reader_of_a_skip_tensor() -> None:
    """The last of first, second, middle[0], middle[1], last reads a tensor of the first."""
    assert blocks_joined_by_skips(SKIPS) == {1, 2, 3, 4}
    graph = skips_after_the_first(8, 6, 12, 5)
    check_graph(graph)
    assert blocks_joined_by_skips(graph) == {2, 3}  # the second may begin a stage, and so may the last


BAD: dict[str, tuple[int, int, str, str]] = {
    "a later tensor": (FIRST, 1, "join", "of operator 'relu' is in block 'last'; found 'join'"),
    "a recomputed tensor": (LAST, 0, "mix", "of operator 'join' is in block 'middle'; found 'mix'"),
    "a repeated entry": (LAST, 0, "m", "of operator 'join' is in block 'middle'; found 'm'"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_skip_tensor_is_refused(case: str) -> None:
    place, number, source, message = BAD[case]
    document: dict[str, Any] = parse_mapping(graph_text(SKIPS))
    document["blocks"][place]["operators"][number]["inputs"][0]["from"] = source
    with pytest.raises(ConfigError) as caught:
        parse_graph(document)
    assert message in str(caught.value)
    assert caught.value.key is not None and caught.value.key.startswith(
        f"blocks[{place}].operators[{number}]"
    )


def test_an_entry_name_of_two_blocks_is_no_skip_tensor() -> None:
    document: dict[str, Any] = parse_mapping(graph_text(SKIPS))
    document["blocks"][LAST]["entry"] = "n"
    document["blocks"][LAST]["operators"][0]["inputs"][0]["from"] = "n"
    with pytest.raises(ConfigError, match="of operator 'add' is in block 'second'; found 'n'"):
        parse_graph(document)


def test_a_skip_tensor_scales_like_its_producer() -> None:
    document = copy.deepcopy(SMALL)
    head = document["blocks"][2]["operators"]
    head.insert(0, {
        "name": "join", "kind": "elementwise", "attributes": {"function": "add"},
        "inputs": [{"from": "y", "dims": ["b", "s", "h"]}, {"from": "embed", "dims": ["b", "s", "h"]}],
        "output": ["b", "s", "h"],
    })  # fmt: skip
    head[1]["inputs"][0]["from"] = "join"
    assert skip_tensors_of(parse_graph(document)).skip_inputs == ((), (), ("embed",))
    document["sizes"]["four"] = 4  # its length does not grow with the sequence
    head[0]["inputs"][1]["dims"] = ["b", "four", "h"]
    head[0]["kind"], head[0]["attributes"] = "einsum", {}
    with pytest.raises(ConfigError, match="does not grow as that dim of 'embed'; found four"):
        parse_graph(document)


def test_a_skip_tensor_has_one_placement() -> None:
    layout = data_parallel(SKIPS, (2,))
    assert layout is not None
    record: dict[str, Any] = layout_record(layout)
    assert [block.get("tensors", {}).get("up") for block in record["blocks"]] == [
        ["S(0)"], None, None, ["S(0)"],
    ]  # fmt: skip
    assert layout_from_record(record, SKIPS, (2,)) == layout
    record["blocks"][-1]["tensors"]["up"] = ["R"]
    with pytest.raises(
        ConfigError, match=r"last has up in other placements than first; found R; allowed: S\(0\)"
    ):
        layout_from_record(record, SKIPS, (2,))


def test_a_skip_tensor_missing_from_a_layout_is_refused() -> None:
    layout = data_parallel(SKIPS, (2,))
    assert layout is not None
    record: dict[str, Any] = layout_record(layout)
    del record["blocks"][-1]["tensors"]["up"]
    with pytest.raises(ConfigError, match="up"):
        layout_from_record(record, SKIPS, (2,))


def test_stages_do_not_separate_producer_and_reader_of_a_skip_tensor() -> None:
    layout = data_parallel(SKIPS, (2,))
    assert layout is not None
    blocks = layout_record(layout)["blocks"]
    stages = [{"blocks": blocks[:1]}, {"blocks": blocks[1:]}]
    record = {"schedule": "1f1b", "microbatches": 1, "stages": stages}
    with pytest.raises(ConfigError) as caught:
        staged_from_record(record, SKIPS, (2,), ["1f1b"])
    assert "cut through skip tensors; found second" in str(caught.value)


def test_baselines_place_skip_tensors_for_all_readers() -> None:
    layout = data_parallel(SKIPS, (2, 2))
    assert layout is not None
    split = (shard(0), shard(0))
    assert layout.blocks[SECOND].tensors == {"n": split, "bend": split}
    assert layout.blocks[MIDDLE].tensors == dict.fromkeys(("bend", "n", "m", "add"), split)
    big = megatron(load_graph("graph:transformer-big"), (2, 8))
    assert big is not None
    memory = [block.tensors["memory"] for block in big.blocks if "memory" in block.tensors]
    # The batch is divided, and the columns of every cross attention need the whole width of the skip tensor.
    assert memory == [(shard(0), REPLICATE_SUM_GRAD)] * 7


def test_a_micro_batch_has_its_part_of_a_skip_tensor() -> None:
    assert loss_weight(SKIPS, 2) == 0.5
