"""Randomly damaged graph files are read or refused in one line; graphs that are read can be written, and
scaling follows its laws.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.test_inputs_fuzz import SCALARS, TREES, outcome
from tests.unit.graph.texts import SMALL

from shardwise.errors import ConfigError
from shardwise.graph import (
    check_graph,
    forward_flop,
    graph_text,
    parameter_count,
    parse_graph,
    scaled,
    shipped_graphs,
    step_flop,
)
from shardwise.inputs import parse_mapping

SHIPPED = shipped_graphs()
DOCUMENTS = [SMALL, *(parse_mapping(graph_text(graph)) for graph in SHIPPED.values())]
WORDS = st.sampled_from(
    ["x", "embed", "up", "layer", "tokens", "b", "s", "h", "batch", "seq_len", "batch*seq_len", "batch/3",
     "2*seq_len", "linear", "matmul", "attention", "elementwise", "add", "layers.{0}.up", "0*batch",
     "batch*batch*batch"]
)  # fmt: skip
VALUES = st.one_of(SCALARS, WORDS, st.lists(WORDS, max_size=4), TREES)


def _places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value within `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in ((*way, key), *_places(item, (*way, key)))]


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_mutated_file_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    document = deepcopy(data.draw(st.sampled_from(DOCUMENTS)))
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(_places(document)))
        place: Any = document
        for key in way:
            place = place[key]
        deed = data.draw(st.sampled_from(["replace", "remove", "repeat"]))
        if deed == "replace":
            place[last] = data.draw(VALUES)
        elif deed == "remove" or isinstance(place, dict):
            del place[last]
        else:
            place.insert(last, deepcopy(place[last]))
        if not _places(document):
            break
    graph = outcome(lambda: parse_graph(document))
    if not isinstance(graph, ConfigError):
        check_graph(graph)
        assert parse_graph(parse_mapping(graph_text(graph))) == graph
        assert parameter_count(graph) >= 0 and forward_flop(graph) <= step_flop(graph)


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SHIPPED)), st.integers(1, 10**6), st.integers(1, 10**5))
def test_scaling_back_gives_the_same_graph(name: str, batch: int, seq_len: int) -> None:
    """Any batch and length can be scaled to and back, which gives the same graph; so do text and back."""
    graph = SHIPPED[name]
    length = seq_len if graph.seq_len is not None else None
    other = scaled(graph, batch, length)
    check_graph(other)
    assert (other.batch, other.seq_len) == (batch, length)
    assert scaled(other, graph.batch, graph.seq_len) == graph
    assert parse_graph(parse_mapping(graph_text(other))) == other
    assert parameter_count(other) == parameter_count(graph)
