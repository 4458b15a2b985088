"""Pages of other answers: two plans, a frontier, a replay; reports of uneven plans and of operator graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import Open, Opened
from tests.browser.test_report_page import serious

import shardwise as sw
from shardwise.app.cli.main import main
from shardwise.app.plot import (
    Dot,
    Mark,
    Plot,
    PlotLine,
    ReplayPlot,
    TokenCurve,
    write_plot,
    write_replay_plot,
)

GIB = 2.0**30


def sound(opened: Opened, path: Path) -> Any:
    """The page, which requested nothing else, has no error, no serious finding, and is as wide as a phone."""
    assert opened.requests == [path.as_uri()] and opened.problems == []
    assert serious(opened.page) == []
    opened.page.set_viewport_size({"width": 360, "height": 740})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    return opened.page


def test_two_plans_side_by_side(
    open_page: Open, pipeline_plan: sw.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = sw.evaluate(
        "llama-3.1-8b",
        cluster="2x8xH100-SXM",
        seq_len=4096,
        global_batch_size=16,
        strategy="dp=16,zero_stage=3",
    )
    pipeline_plan.save("a.yaml")
    other.save("b.yaml")
    assert main(["compare", "a.yaml", "b.yaml", "--out", "c.html"]) == 0
    page = sound(open_page(tmp_path / "c.html"), tmp_path / "c.html")
    row = page.locator("#what-differs tbody tr").first.inner_text().split("\t")
    first_s, second_s = pipeline_plan.step_time_s, other.step_time_s
    assert row[0] == "step time" and row[4].strip("+−").startswith(f"{abs(second_s / first_s - 1) * 100:.1f}")
    assert page.locator("#the-pipeline canvas").count() == 2
    fields = page.locator("#what-differs table").nth(1).inner_text()
    assert "tp\t2\t1" in fields and "param_shard\t1\t16" in fields


def test_the_timeline_of_an_uneven_plan(open_page: Open, tmp_path: Path) -> None:
    plan = sw.plan(
        "llama-2-7b", cluster="1x2xA100-80G+1x2xV100-32G", seq_len=2048, global_batch_size=8, target="any",
        dtype="fp16",
    )  # fmt: skip
    assert plan.best.fields is None
    plan.report(tmp_path / "u.html")
    page = sound(open_page(tmp_path / "u.html"), tmp_path / "u.html")
    assert page.locator(".headline").text_content().startswith("uneven: ")
    assert page.locator("#the-pipeline canvas").count() >= 1


def test_a_plan_of_an_operator_graph(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["frontier", "graph:lstm-2x2048", "--cluster", "1x4xV100-32G", "--global-batch-size", "512"]
    assert main([*argv, "--epsilon", "0.1", "--save", "plans", "--plot", "f.html"]) == 0
    path = sorted((tmp_path / "plans").glob("*.yaml"))[0]
    assert main(["report", str(path), "--out", "g.html"]) == 0
    page = sound(open_page(tmp_path / "g.html"), tmp_path / "g.html")
    assert page.locator("h1").text_content() == "graph:lstm-2x2048 on 1x4xV100-32G"
    assert main(["simulate", str(path), "--plot", "s.html"]) == 0
    assert sound(open_page(tmp_path / "s.html"), tmp_path / "s.html").locator("canvas").count() == 1
    frontier = sound(open_page(tmp_path / "f.html"), tmp_path / "f.html")
    frontier.focus("svg")
    frontier.keyboard.press("ArrowRight")
    assert frontier.locator("#time-against-memory pre").text_content() != ""


def test_points_are_where_their_values_say(open_page: Open, tmp_path: Path) -> None:
    """Both axes are logarithmic: the middle one of three points of a geometric sequence is in the middle."""
    dots = tuple(Dot(time_s=2.0**n, memory_bytes=GIB * 4.0 ** (3 - n), lines=(f"p{n}",)) for n in range(3))
    plot = Plot(
        title="t", subtitle="s", lines=(PlotLine(name="8 devices", dots=dots, knee=1),),
        marks=(Mark(name="Megatron", dot=Dot(time_s=3.0, memory_bytes=20 * GIB, lines=("tp 8",))),),
        limit_bytes=40 * GIB,
    )  # fmt: skip
    write_plot(str(tmp_path / "f.html"), plot)
    sound(open_page(tmp_path / "f.html"), tmp_path / "f.html")
    page = open_page(tmp_path / "f.html").page  # a page that was resized draws its points anew
    boxes = [point.bounding_box() for point in page.locator("svg .point").all()]
    places = [(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2) for box in boxes[:3]]
    for axis in (0, 1):
        assert places[1][axis] == pytest.approx((places[0][axis] + places[2][axis]) / 2, abs=1.0)
    page.mouse.move(*places[1])
    assert page.locator(".tip").inner_text().split("\n") == ["8 devices: 2.000 s, 16.0 GiB", "p1"]


def test_a_replay_shows_each_policy(open_page: Open, tmp_path: Path) -> None:
    """Tokens rise from 0 to 100 in 2 h with one policy, and to 60 with the other; at half time 50 and 30."""
    curves = tuple(
        TokenCurve(name=name, figures="goodput 90 %", times_s=(0.0, 7200.0), tokens=(0.0, most), changes_s={})
        for name, most in (("adaptive", 100.0), ("static", 60.0))
    )
    plot = ReplayPlot(
        title="a model on a cluster", subtitle="tokens over 2 h", curves=curves, times_s=(0.0, 3600.0),
        nodes=(8, 7), end_s=7200.0, policies=(("adaptive", "100", "100 %", "90 %", "0"),),
        decisions=(("0 s", "move", "8", "dp 8", "1 s", "0 s"),),
    )  # fmt: skip
    write_replay_plot(str(tmp_path / "r.html"), plot)
    page = sound(open_page(tmp_path / "r.html"), tmp_path / "r.html")
    page.focus("svg")
    for _ in range(26):  # the first key shows the start, each further one a fiftieth more
        page.keyboard.press("ArrowRight")
    assert page.locator(".status").text_content() == "1 h: 7 nodes; adaptive 50; static 30"
