"""The picture of `make accuracy`: which rows are on which panel, and an output path that must be a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks import accuracy
from benchmarks.emulated_picture import draw, panels_of


def row(cluster: str, plan: str, epoch: int = 0) -> dict[str, Any]:
    return {
        "cluster": cluster, "epoch": epoch, "plan": plan, "predicted_s": 1.1, "measured_s": 1.0,
        "times_s": [0.9, 1.0, 1.2],
    }  # fmt: skip


def test_a_network_that_changes_has_a_panel_before_and_after() -> None:
    one = {"rows": [row("changing", "dp=2"), row("changing", "dp=2", epoch=1)]}
    other = {"rows": [row("two hosts", "pp=2"), row("two hosts", "tp=2")]}
    found = panels_of([one, other])
    assert {name: [each["plan"] for each in rows] for name, rows in found.items()} == {
        "changing": ["dp=2"], "changing, then": ["dp=2"], "two hosts": ["pp=2", "tp=2"],
    }  # fmt: skip


def test_the_picture_names_clusters_and_plans(tmp_path: Path) -> None:
    out = tmp_path / "clock.svg"
    draw(out, panels_of([{"rows": [row("two hosts", "dp=2,micro_batch_size=4,zero_stage=1")]}]))
    text = out.read_text()
    assert "<!-- two hosts -->" in text and "<!-- dp=2  mbs=4  zero=1 -->" in text


def test_an_unknown_option_is_not_taken_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="--help: no such option"):
        accuracy.main(["--help"])
    assert not list(tmp_path.iterdir())
