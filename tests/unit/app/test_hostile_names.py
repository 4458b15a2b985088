"""Hostile names of models, clusters, devices, nodes, graphs and traces: on pages and pictures they end no
element, in the terminal they are on one line, and those that are not printable are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from tests.hostile import (
    CLUSTER,
    COMMANDS,
    JOB,
    MODEL,
    NAME,
    NODES,
    SEQUENCES,
    answer,
    page_data,
    write_inputs,
)

from shardwise.app.cli.main import main
from shardwise.app.plot import ReplayPlot, TokenCurve, write_replay_plot

SIGNS = ["\n", "\t", "\u2028", "\u2029", "\x85", "\x1b[31m", "\u202e"]
"""Line breaks and control characters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        write_inputs(path)
    return path


@pytest.mark.parametrize("page", [name for name in COMMANDS if not name.startswith("graph ")])
def test_a_name_ends_no_element_of_a_page(folder: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    monkeypatch.chdir(folder)
    said = answer(*COMMANDS[page])
    assert all(line.isprintable() for line in said.split("\n"))
    assert NAME in json.dumps(page_data(Path("page.html").read_text("utf-8"))).replace('\\"', '"')


@pytest.mark.slow
def test_a_name_ends_no_element_of_a_page_of_a_graph(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for page in ("graph frontier", "graph report", "graph simulate"):
        said = answer(*COMMANDS[page])
        assert all(line.isprintable() for line in said.split("\n"))
        assert NAME in json.dumps(page_data(Path("page.html").read_text("utf-8"))).replace('\\"', '"')


def test_a_name_ends_no_element_of_a_replay(tmp_path: Path) -> None:
    curve = TokenCurve(name="adaptive", figures=NAME, times_s=(0.0, 9.0), tokens=(0.0, 5.0), changes_s={})
    plot = ReplayPlot(
        title=NAME, subtitle=NAME, curves=(curve,), times_s=(0.0,), nodes=(2,), end_s=9.0,
        policies=((NAME,),), decisions=((NAME,),),
    )  # fmt: skip
    write_replay_plot(str(tmp_path / "a.html"), plot)
    assert page_data((tmp_path / "a.html").read_text("utf-8"))["title"] == NAME
    for subtitle in (NAME, *(f"a{sign}b" for sign in SIGNS)):
        write_replay_plot(str(tmp_path / "a.svg"), replace(plot, subtitle=subtitle))
        ElementTree.fromstring((tmp_path / "a.svg").read_text("utf-8"))


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("place", ["model", "cluster", "class", "node"])
def test_a_name_that_is_not_printable_is_refused_or_shown_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, sign: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"a{sign}b"
    (node,) = NODES
    changed = {
        "model": (MODEL | {"name": name}, CLUSTER),
        "cluster": (MODEL, CLUSTER | {"name": name}),
        "class": (MODEL, CLUSTER | {"classes": {name: {"device": "T4"}}, "nodes": [node | {"device": name}]}),
        "node": (MODEL, CLUSTER | {"nodes": [node | {"name": name}]}),
    }[place]
    for path, content in zip(("m.yaml", "c.yaml"), changed, strict=True):
        Path(path).write_text(yaml.safe_dump(content))
    code = main(["evaluate", "m.yaml", *JOB, *SEQUENCES, "--strategy", "dp=4"])
    said = capsys.readouterr()
    assert code in (0, 2)
    assert all(line.isprintable() for line in f"{said.out}{said.err}".split("\n"))
    assert code == 0 or (said.out == "" and said.err.count("\n") == 1)
