"""A space file: the restrictions of the named space, and its errors with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.search import SpaceChoice, read_space


def put(folder: Path, text: str) -> str:
    path = folder / "space.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_names_a_base_and_values(tmp_path: Path) -> None:
    text = "base: core\naxes:\n  schedule: [1f1b, gpipe]\n  tp: [1, 2]\n  sequence_parallel: [true]\n"
    path = put(tmp_path, text + "  recompute: [none, full]\n  recompute_layers: [0, 4]\n")
    assert read_space(path) == SpaceChoice(
        base="core",
        axes={
            "tp": (1, 2),
            "schedule": ("1f1b", "gpipe"),
            "sequence_parallel": (True,),
            "recompute": ("none", "full"),
            "recompute_layers": (0, 4),
        },
        file=path,
    )


def test_json_is_read_too_and_the_base_is_default(tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    path.write_text('{"axes": {"offload": ["none"]}}')
    found = read_space(str(path))
    assert (found.base, found.axes) == ("default", {"offload": ("none",)})


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("base: small\naxes: {tp: [1]}", "base", "not one of the choices"),
        ("axes: {tpp: [1]}", "axes.tpp", "did you mean tp?"),
        ("axes: {tp: []}", "axes.tp", "wrong length"),
        ("axes: {tp: 4}", "axes.tp", "not a list"),
        ("axes: {tp: [1, two]}", "axes.tp[1]", "not a value of"),
        ("axes: {tp: [0]}", "axes.tp[0]", "not a value of"),
        ("axes: {tp: [true]}", "axes.tp[0]", "not a value of"),
        ("axes: {tp: [1.5]}", "axes.tp[0]", "not a value of"),
        ("axes: {tp: [2, 2]}", "axes.tp[1]", "given twice"),
        ("axes: {schedule: [2f2b]}", "axes.schedule[0]", "not a value of"),
        ("axes: {sequence_parallel: [1]}", "axes.sequence_parallel[0]", "not a value of"),
        ("axes: {axis_order: [dp-tp]}", "axes.axis_order[0]", "not a value of"),
        ("axes: {zero_stage: [1]}", "axes.zero_stage", "stands for several fields"),
        ("axis: {tp: [1]}", "axis", "not a known key"),
        ("axes: [1]", "axes", "not a mapping"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, text: str, key: str, message: str) -> None:
    path = put(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_space(path)
    assert (caught.value.file, caught.value.key) == (path, key)
    assert message in caught.value.message
