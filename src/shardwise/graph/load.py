"""From what a user writes for a graph to the graph: a file, or `graph:NAME` of a shipped one."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

from shardwise.errors import ConfigError
from shardwise.graph.file import graph_of_file
from shardwise.graph.record import OpGraph
from shardwise.inputs import nearest, printable

FOLDER: Final = Path(__file__).parent / "catalogue"
GRAPH_PREFIX: Final = "graph:"
"""What stands before the name of a shipped graph."""
GRAPH_FILES: Final = (".yaml", ".yml", ".json")
"""How the names of graph files end, in any case."""


def load_graph(text: str) -> OpGraph:
    """The graph that `text` stands for: `graph:NAME`, in any case, is a shipped one, else it is the path of
    a YAML or JSON file. Raises ConfigError with the file, the key and the operator."""
    if text.casefold().startswith(GRAPH_PREFIX):
        return _shipped(text[len(GRAPH_PREFIX) :].casefold(), text)
    if not os.path.exists(text) and not _looks_like_path(text):
        guess = nearest(text, graph_names())
        hint = f" (did you mean {GRAPH_PREFIX}{guess}?)" if guess else ""
        raise ConfigError(
            f"is neither a file nor a known graph{hint}",
            key="GRAPH",
            found=printable(text) or "nothing",
            allowed="a YAML or JSON file of operators, or a name that `shardwise graphs` lists",
        )
    return graph_of_file(text)


def shipped_graphs() -> dict[str, OpGraph]:
    """All shipped graphs by name, without the prefix `graph:`."""
    return {name: _read(name) for name in graph_names()}


def graph_names() -> tuple[str, ...]:
    """The names of the shipped graphs, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def _read(name: str) -> OpGraph:
    return graph_of_file(str(FOLDER / f"{name}.yaml"))


def _shipped(name: str, text: str) -> OpGraph:
    names = graph_names()
    if name not in names:
        guess = nearest(name, names)
        hint = f" (did you mean {GRAPH_PREFIX}{guess}?)" if guess else ""
        raise ConfigError(
            f"is no shipped graph{hint}",
            key="GRAPH",
            found=printable(text),
            allowed=", ".join(f"{GRAPH_PREFIX}{known}" for known in names),
        )
    return _read(name)


def _looks_like_path(text: str) -> bool:
    return "/" in text or os.sep in text or text.lower().endswith(GRAPH_FILES)
