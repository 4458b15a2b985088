"""Small plan files of every kind that the planner writes, and single changes to them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from tests.property.plan_mutants import WORDS, with_hash

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.inputs import read_mapping
from shardwise.questions import CheckedPlan, checked_plan

MODELS: dict[str, dict[str, Any]] = {
    "dense.json": {
        "name": "small", "layers": 4, "hidden": 256, "ffn": 1024, "heads": 4, "vocab": 1000, "seq_len": 256,
    },
    "routed.json": {
        "name": "routed", "layers": 3, "hidden": 256, "ffn": 1024, "heads": 4, "vocab": 1000, "seq_len": 256,
        "experts": 4, "top_k": 2, "expert_ffn": 256, "tied": False,
    },
}  # fmt: skip

JOB = ("--seq-len", "128", "--global-batch-size", "8")
CORE = (*JOB, "--space", "core", "--top", "2")
TRACE = ("--policy", "worst", "--events")
UNEVEN = (
    "opt-350m", "--cluster", "1x2xA100-40G+1x2xV100-16G", "--seq-len", "2048", "--global-batch-size", "64",
)  # fmt: skip
LINKS = str(Path(__file__).parents[2] / "examples" / "clusters" / "links.yaml")
GRAPH = ("frontier", "graph:mlp", "--cluster", "1x4xV100-32G", "--global-batch-size", "64")

KINDS: dict[str, tuple[str, ...]] = {
    "uniform": ("plan", "dense.json", "--cluster", "2x2xA100-40G", *CORE),
    "memory": ("plan", "routed.json", "--cluster", "1x4xMI300X", *CORE, "--objective", "memory"),
    "devices": ("plan", "dense.json", "--cluster", "2x2xA100-40G", *CORE, "--objective", "devices"),
    "mixed": ("plan", "dense.json", "--cluster", "1x2xA100-40G+1x2xV100-16G", *CORE),
    "links": ("plan", "dense.json", "--cluster", LINKS, *CORE, "--fix", "pp=1"),
    "for a trace": ("plan", "dense.json", "--cluster", "3x2xT4", *JOB, *TRACE, "lost n1"),
    "uneven": ("plan", *UNEVEN),
    "on two pools": (
        "plan", "llama-2-7b", "--cluster", "1x2xA100-80G+1x4xA10G", "--seq-len", "1024",
        "--global-batch-size", "16", "--stage-dp", "2", "--mixed-pool-stages", "2",
    ),
    "uneven for a trace": ("plan", *UNEVEN, *TRACE, "slow n1 0.9"),
    "graph": GRAPH,
    "staged graph": (*GRAPH, "--stages", "2"),
}  # fmt: skip
"""Commands that write a plan, without the options for the file."""


def document_of(name: str, folder: Path) -> dict[str, Any]:
    """The plan file of a kind as plain values."""
    for file, config in MODELS.items():
        (folder / file).write_text(json.dumps(config))
    command = [str(folder / word) if word in MODELS else word for word in KINDS[name]]
    is_graph = command[0] == "frontier"
    saved = folder / ("points" if is_graph else "plan.yaml")
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert main([*command, "--save", str(saved)]) == 0, name
    path = sorted(saved.glob("*.yaml"))[0] if is_graph else saved
    return dict(read_mapping(str(path), max_bytes=8 << 20, max_nodes=10**6))


Place = tuple[str | int, ...]

ADDED = "another"
"""A key that no plan file has."""


def places(value: Any, path: Place = ()) -> Iterator[Place]:
    """The path of every value, lists and mappings included; for a long list, of its first two items."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            yield from places(item, (*path, index))


def with_change(document: dict[str, Any], place: Place, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The document with one value changed, and with the hash of its content."""
    changed = copy.deepcopy(document)
    parent: Any = changed
    for step in place[:-1]:
        parent = parent[step]
    parent[place[-1]] = change(parent[place[-1]])
    return with_hash(changed)


def other(place: Place) -> Callable[[Any], Any]:
    """Another value of the same type with another meaning."""

    def change(value: Any) -> Any:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return value + 1
        if isinstance(value, float):
            return value * (1.0 + 1e-6) if abs(value) > 1e-9 else 1.0
        if isinstance(value, str):
            words = [word for word in WORDS.get(str(place[-1]), ()) if word != value]
            return words[0] if words else f"{value}x"
        if isinstance(value, dict):
            return {**value, ADDED: 0}
        if isinstance(value, list):
            return [*value, value[-1]] if value else [0]
        return 1.0

    return change


def verdict_of(document: dict[str, Any], folder: Path, proof_budget_s: float = 600.0) -> CheckedPlan | None:
    """What `check` says of a document as a file; None where it is refused as bad input."""
    path = folder / "changed.json"
    path.write_text(json.dumps(document))
    try:
        return checked_plan(str(path), proof_budget_s)
    except ConfigError:
        return None
