"""The clusters that shardwise ships by name: files of the form of a user's, each figure with its source."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("data") / "clusters"


def cluster_names() -> tuple[str, ...]:
    """The names of all shipped clusters (docs/concepts/mixed-clusters.md)."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def named_cluster_file(name: str) -> Path | None:
    """The file of the cluster that is shipped under `name`; None where there is none."""
    path = _FOLDER / f"{name}.yaml"
    return path if name in cluster_names() else None
