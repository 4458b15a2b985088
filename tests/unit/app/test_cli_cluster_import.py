"""The command `cluster import`: its card, the file that it writes, its JSON answer, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.app.conftest import Run
from tests.unit.app.test_cli_commands import validated

TREE = "SwitchName=core Switches=a,b\nSwitchName=a Nodes=n[1-2]\nSwitchName=b Nodes=n[3-4]\n"
NODES = {
    "nodes": [{"name": f"n{number}", "gres": "gpu:h100:8", "state": ["IDLE"]} for number in range(1, 5)],
    "meta": {"plugin": {"data_parser": "data_parser/v0.0.42"}},
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    (tmp_path / "topology.conf").write_text(TREE)
    (tmp_path / "nodes.json").write_text(json.dumps(NODES))
    monkeypatch.chdir(tmp_path)
    return ("topology.conf", "nodes.json")


def test_the_card_names_files_defaults_and_the_cluster(run: Run, files: tuple[str, ...]) -> None:
    ran = run("cluster", "import", *files, "--out", "c.yaml")
    assert (ran.code, ran.err) == (0, "wrote c.yaml\n")
    assert all(len(line) <= 100 for line in ran.out.splitlines())
    for text in (
        "32 devices   4 × 8 H100-SXM", "leaf: 50 GB/s per device within 16 devices",
        "nodes.json: scontrol show nodes --json (v0.0.42)", "8 x 400Gb/s", "host memory of a node",
    ):  # fmt: skip
        assert text in ran.out
    planned = run("space", "llama-3.1-8b", "--cluster", "c.yaml", "--global-batch-size", "64")
    assert planned.code == 0 and "32 devices" in planned.out


def test_the_file_goes_to_stdout_without_out(run: Run, files: tuple[str, ...], tmp_path: Path) -> None:
    ran = run("cluster", "import", *files, "--name", "alps")
    assert ran.code == 0 and ran.out.startswith("name: alps\nnodes:\n")
    run("cluster", "import", *files, "--name", "alps", "--out", "c.yaml")
    assert (tmp_path / "c.yaml").read_text() == ran.out


def test_the_json_answer_has_its_schema(run: Run, files: tuple[str, ...]) -> None:
    ran = run("cluster", "import", *files, "--json")
    document = validated(ran.out, "cluster-import")
    assert document["devices"] == 32 and document["cluster"]["nodes"][0]["count"] == 4


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        (TREE[:52], (), "topology.conf: line 2: is not a hostlist"),
        ("", (), "topology.conf: is empty"),
        (TREE.replace("n[1-2]", "m1"), ("--device", "H1000"), "device: is not a known device"),
        ("<a>", (), "topology.conf: line 1: is not valid XML"),
    ],
    ids=["cut off", "empty", "device", "xml"],
)
def test_a_wrong_file_is_one_line_and_writes_nothing(
    run: Run, files: tuple[str, ...], tmp_path: Path, changed: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "topology.conf").write_text(changed)
    (tmp_path / "c.yaml").write_text("before")
    ran = run("cluster", "import", *files, "--out", "c.yaml", *options)
    assert ran.code == 2 and ran.err.startswith(f"shardwise: error: {message}")
    assert ran.err.count("\n") == 1
    assert (tmp_path / "c.yaml").read_text() == "before"


def test_files_that_are_missing_or_given_twice(run: Run, files: tuple[str, ...]) -> None:
    assert run("cluster", "import", "none.json").code == 2
    twice = run("cluster", "import", files[0], files[0])
    assert twice.code == 2 and "is given twice" in twice.err
    assert run("cluster", "import").code == 2
    over = run("cluster", "import", *files, "--out", files[0])
    assert over.code == 2 and "nodes.json" not in over.err
