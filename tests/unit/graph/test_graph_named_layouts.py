"""Layouts as plain values: written ones are read back, and invalid ones are refused by key."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.property.layout_instances import llama

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, layout_from_record, layout_record


def graph() -> OpGraph:
    return llama(layers=3, batch=8, seq_len=16)


def record() -> dict[str, Any]:
    """Every operator replicated, except at the borders between blocks."""
    return {
        "blocks": [
            {
                "name": block.name,
                "count": block.repeat,
                "mode": "kept",
                "operators": {op.name: ["replicate", "split b"] for op in block.operators},
                "tensors": {
                    "embedding": {"embed": ["R", "S(0)"]},
                    "layers": {name: ["R", "S(0)"] for name in ("x", "norm1", "add1", "norm2", "add2")},
                    "head": {"y": ["R", "S(0)"]},
                }[block.name],
                "stored": {
                    parameter.name: ["S(0)", "R°"] for op in block.operators for parameter in op.parameters
                },
                "used": {},
            }
            for block in graph().blocks
        ]
    }


def test_a_layout_record_is_read_back() -> None:
    layout = layout_from_record(record(), graph(), (2, 4))
    assert len(layout.blocks) == 5
    assert layout.blocks[1] is layout.blocks[3]
    assert layout_record(layout) == record()


OPERATORS: dict[str, Any] = record()["blocks"][1]["operators"]
STORED: dict[str, Any] = record()["blocks"][1]["stored"]


def changed(**blocks: Any) -> dict[str, Any]:
    """The record with keys of the second block replaced."""
    found = copy.deepcopy(record())
    found["blocks"][1] |= blocks
    return found


BAD = {
    "an unknown rule": (changed(operators=OPERATORS | {"q": ["replicate", "diagonal"]}), "q"),
    "a rule that is no text": (changed(operators=OPERATORS | {"q": [[], {}]}), "q"),
    "a rule too few": (changed(operators=OPERATORS | {"q": ["replicate"]}), "q"),
    "too many parts": (
        changed(operators=OPERATORS | {"q_rot": ["split b", "split b"]}), "q_rot",
    ),
    "no such operator": (changed(operators=OPERATORS | {"qq": ["replicate"] * 2}), "qq"),
    "a dim that is not there": (changed(stored=STORED | {"w1": ["S(1)", "R"]}), "w1"),
    "a placement that is no text": (changed(tensors={"x": [1, 2]}), "x"),
    "a missing tensor": (changed(tensors={"x": ["R", "R"]}), "norm1"),
    "an unknown mode": (changed(mode="lost"), "mode"),
    "another block": (changed(name="layer"), "name"),
    "too many repetitions": (changed(count=4), "count"),
    "too few repetitions": (changed(count=2), "name"),
    "no repetitions": (changed(count=0), "count"),
    "blocks that are no list": ({"blocks": 3}, "blocks"),
    "blocks too few": ({"blocks": record()["blocks"][:2]}, "blocks"),
    "blocks too many": ({"blocks": [*record()["blocks"], record()["blocks"][2]]}, "count"),
    "an unknown key": (changed(colour="red"), "colour"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_an_invalid_layout_record_is_refused(case: str) -> None:
    bad, key = BAD[case]
    with pytest.raises(ConfigError) as caught:
        layout_from_record(bad, graph(), (2, 8) if case == "too many parts" else (2, 4))
    assert key in str(caught.value)
