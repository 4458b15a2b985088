"""docs/reference/formats.md on input files: its examples can be read, and its tables have every key."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from shardwise.cluster import file, load_cluster
from shardwise.errors import ConfigError
from shardwise.model import dimensions, load_model

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "formats.md").read_text()

VALUES = {
    "name": "mine", "gated": "true", "bias": "false", "qkv_bias": "true", "norm": "rmsnorm",
    "positions": "rope", "tied": "false", "dropout": "0.1",
    "expert_capacity_factor": "1.25", "top_k": "2", "dense_layers": "1",
}  # fmt: skip
"""Values of the keys of dimensions; 64 for all others."""


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def example(title: str) -> str:
    found = re.search(r"```yaml\n(.*?)```", section(title), re.DOTALL)
    assert found is not None
    return found[1]


def documented(title: str) -> list[str]:
    """The keys in the first column of a table, without the object that they belong to."""
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    return [key for row in rows for key in re.findall(r"`(?:\w+\[\]\.)?(\w+)`", row.split("|")[1])]


def keys_read(*functions: object) -> set[str]:
    """The keys that these functions read from a file's fields."""
    source = "".join(map(inspect.getsource, functions))  # type: ignore[arg-type]
    return set(re.findall(r'(?:fields|part)\.\w+\(\s*"(\w+)"', source))


def test_the_examples_are_read(tmp_path: Path) -> None:
    model, cluster = tmp_path / "m.yaml", tmp_path / "c.yaml"
    model.write_text(example("A model in plain dimensions"))
    cluster.write_text(example("A cluster file"))
    assert load_model(str(model)).name == "small-moe"
    assert load_cluster(str(cluster)).devices == 2 * 8 + 4 * 8


def test_every_key_of_dimensions_is_documented_and_read(tmp_path: Path) -> None:
    keys = documented("A model in plain dimensions")
    # Configs read the factor too, elsewhere; the name is read where a model is built.
    assert keys_read(dimensions) | {"name", "expert_capacity_factor"} == set(keys)
    path = tmp_path / "m.yaml"
    lines = [f"{key}: {VALUES.get(key, '64')}" for key in keys]
    path.write_text("\n".join(lines) + "\n")
    load_model(str(path))
    path.write_text("\n".join([*lines, "n_experts: 8"]) + "\n")
    with pytest.raises(ConfigError, match="n_experts"):
        load_model(str(path))


def test_every_key_of_a_cluster_file_is_documented() -> None:
    """Keys of the file, its nodes and its tiers; those of links are in one line of text."""
    within_links = {"from", "to", "one_way"}
    assert keys_read(file) - within_links == set(documented("A cluster file"))
