"""The command `frontier` with a subject that is no transformer: it does not depend on what a layout is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from shardwise.app.cli.frontier.command import FrontierOptions
from shardwise.app.cli.frontier.command import answered as shown
from shardwise.app.cli.output import Line, Output, plain_text
from shardwise.app.cli.request import LongRun
from shardwise.cluster import Cluster, load_cluster, part_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.plans import Idle, Plan, Reliability, RunLength
from shardwise.questions import runs_of_length
from shardwise.questions.frontiers import FrontierQuery, found_frontier
from shardwise.search import Curve, Point, Reference
from shardwise.search.bnb.solver import Progress

CLUSTER = load_cluster("1x4xV100-32G")

Layout = tuple[str, ...]
"""A placement for each of two operators."""

GIB = 2.0**30

PART_OF_32_GIB = replace(
    CLUSTER,
    classes={name: replace(device, memory_bytes=int(32 * GIB)) for name, device in CLUSTER.classes.items()},
)

POINTS = {
    # By hand: seconds and GiB, of 32 GiB. On two devices 2.1 s and 2 GiB are the knee: 5 % of the time free
    # 44 % of the memory. On four devices twice the time would free 6 %: no knee.
    1: [(8.0, 9.0)],
    2: [(2.0, 16.0), (2.1, 2.0), (16.0, 1.0)],
    4: [(1.0, 4.0), (2.0, 2.0)],
}


class Curves:
    """Curves by hand; records its questions."""

    cluster, sizes = CLUSTER, (1, 2, 3, 4)

    def __init__(self) -> None:
        self.query: list[tuple[int, float]] = []
        self.proven: float | None = None

    def parts(self, devices: int | None) -> tuple[Cluster, ...]:
        return (CLUSTER if devices is None else part_of(CLUSTER, devices),)

    def idle_of(self, part: Cluster) -> Idle:
        return Idle(devices=4 - part.devices)

    def require(self, sizes: Sequence[int] | None) -> None:
        assert set(sizes or ()) <= set(self.sizes)

    def curve(
        self, part: Cluster, *, epsilon: float = 0.0, progress: Progress | None = None
    ) -> Curve[Layout]:
        self.query.append((part.devices, epsilon))
        points = tuple(
            Point(time_s=time_s, memory_bytes=gib * GIB, cost_usd=None, part=part, layout=("S(0)", "R"))
            for time_s, gib in POINTS.get(part.devices, [])
        )
        own = epsilon if self.proven is None else self.proven
        return Curve(part=part, points=points, epsilon=own, search_s=0.5, search_cpu_s=0.25)

    def references(self, part: Cluster) -> tuple[Reference[Layout], ...]:
        if part.devices == 1:
            return ()
        point = Point(time_s=2.5, memory_bytes=20 * GIB, cost_usd=None, part=part, layout=("R", "R"))
        return (Reference(name="data parallel", point=point, fits=part.devices == 4),)

    def nothing_fits(self, curve: Curve[Layout]) -> Infeasible:
        return Infeasible(f"nothing fits on {curve.devices}", reasons={"memory": 7})

    def closest(self, curve: Curve[Layout]) -> Point[Layout] | None:
        return Point(time_s=9.0, memory_bytes=99 * GIB, cost_usd=None, part=curve.part, layout=("R", "R"))


class Graph:
    """A subject of two operators, and its source; plan files do not support its layouts."""

    name = "graph:two"
    priced_as: Sequence[str] = ()

    def __init__(self) -> None:
        self.curves = Curves()

    @property
    def source(self) -> Graph:
        return self

    def text(self, point: Point[Layout]) -> str:
        return " and ".join(point.layout)

    def host_memory(self, point: Point[Layout]) -> None:
        return None

    def heading(self) -> Iterator[Line]:
        yield (("graph:two", "title"),)

    def caption(self) -> tuple[str, Sequence[str]]:
        return "graph:two on 4 devices", ("batch 8",)

    def question(self) -> Mapping[str, object]:
        return {"graph": {"name": "two"}}

    def title(self, point: Point[Layout]) -> str:
        return "2 operators"

    def details(self, point: Point[Layout]) -> Sequence[str]:
        return [f"op{place}: {placement}" for place, placement in enumerate(point.layout)]

    def layout_lines(self, point: Point[Layout]) -> Sequence[str]:
        return [f"the whole of {point.layout}"]

    def difference(self, point: Point[Layout], other: Point[Layout]) -> str:
        return "all alike"

    def layout(self, point: Point[Layout]) -> Mapping[str, object]:
        return {"operators": list(point.layout)}

    def sizes(self) -> Mapping[str, object]:
        return {"operators": 2, "layouts_per_operator": [3, 4]}

    def certificate(self, curves: Sequence[Curve[Layout]]) -> Mapping[str, object]:
        return {"counts": [curve.devices for curve in curves]}

    def proof(self, curves: Sequence[Curve[Layout]]) -> Iterator[Line]:
        yield (("tracked", ""),)

    def plan(self, curve: Curve[Layout], place: int, *, epsilon: float) -> Plan:
        raise ConfigError("no plan holds this")


def answered(
    graph: Graph, given: FrontierQuery, given_options: FrontierOptions, *, inputs: Sequence[str]
) -> Output:
    """The output of the frontier that is found."""
    return shown(graph, found_frontier(graph, given), given_options, inputs=inputs)


def query(mode: str, *, limit_gib: float = inf, sizes: tuple[int, ...] | None = None) -> FrontierQuery:
    return FrontierQuery(
        mode=mode, limit_bytes=limit_gib * GIB, sizes=sizes, objectives=("time", "memory"), epsilon=0.25
    )


def options(**given: str) -> FrontierOptions:
    return FrontierOptions(
        mode="", memory_limit=None, devices=None, stages=None, microbatches=None, meshes="tiers",
        objectives="", epsilon="", space="", fix="", workers="",
        save=given.get("save"), plot=given.get("plot"), use_all=False, is_json="is_json" in given,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "limit_gib", "searched", "chosen"),
    [
        ("time", inf, [4], (1.0, 4)),
        ("time", 3.0, [4], (2.0, 4)),
        ("time", 2.0, [4], (2.0, 4)),  # just enough
        ("devices", inf, [1], (8.0, 1)),
        ("devices", 4.0, [1, 2], (2.1, 2)),
        ("profile", inf, [1, 2, 4], None),
    ],
)
def test_each_mode_requests_and_picks_its_points(
    mode: str, limit_gib: float, searched: list[int], chosen: tuple[float, int] | None
) -> None:
    graph = Graph()
    document = answered(graph, query(mode, limit_gib=limit_gib), options(is_json="yes"), inputs=()).document
    assert document is not None
    assert graph.curves.query == [(devices, 0.25) for devices in searched]
    assert document["certificate"] == {"counts": searched}
    assert (document["operators"], document["layouts_per_operator"]) == (2, [3, 4])
    pick = document["chosen"]
    if chosen is None:
        assert pick is None
    else:
        assert isinstance(pick, dict)
        assert (pick["time_s"], pick["devices"]) == chosen
        assert pick["layout"] == {"operators": ["S(0)", "R"]}
    assert document["search_cpu_s"] == 0.25 * len(searched)
    assert json.loads(json.dumps(document)) == document


def test_the_card_shows_the_same_as_the_document() -> None:
    text = plain_text(answered(Graph(), query("profile"), options(), inputs=()).lines)
    assert text.startswith("graph:two\n") and "tracked" in text
    assert "6 points of time and memory on 3 device counts" in text
    assert "within 25.00 % of the exact frontier (--epsilon)" in text
    rows = [line.split()[:6] for line in text.splitlines() if "2 operators" in line]
    assert rows == [
        ["1", "fastest", "8.000", "s", "9.0", "GiB"],
        ["2", "fastest", "2.000", "s", "16.0", "GiB"],
        ["knee", "2.100", "s", "2.0", "GiB", "4.200"],
        ["smallest", "16.000", "s", "1.0", "GiB", "32.00"],
        ["4", "fastest", "1.000", "s", "4.0", "GiB"],
        ["smallest", "2.000", "s", "2.0", "GiB", "8.000"],
        ["data", "parallel", "2.500", "s", "20.0", "GiB"],
    ]


LONG = LongRun(
    length=RunLength(steps=1_000_000),
    reliability=Reliability(
        device_mtbf_s=1e12, checkpoint_interval_s=1e6, checkpoint_stall_s=1e-3, jitter=0.0, restart_s=0.0
    ),
)


def test_the_whole_run_is_a_frontier_of_days_and_money() -> None:
    """1e6 steps of 8, 2 and 1 s on 1, 2 and 4 devices of one node, which costs the same in part: 92.6, 23.1
    and 11.6 days, and all devices are the cheapest too. Without a price device hours count: 2 devices take
    1,111, as 4 do, but for failures; the single device is beaten in both.
    """
    run_options = replace(options(is_json="yes"), run=LONG)
    document = answered(Graph(), query("profile"), run_options, inputs=()).document
    assert document is not None
    runs: Any = document["whole_run"]
    assert [run["run"]["days"] for run in runs] == pytest.approx([92.593, 23.148, 11.574], rel=1e-4)
    assert [run["run"]["devices"] for run in runs] == [1, 2, 4]
    assert [run["run"]["tokens"] for run in runs] == [None] * 3
    assert [run["is_on_frontier"] for run in runs] == [False, False, True]
    without = answered(Graph(), query("time"), options(is_json="yes"), inputs=()).document
    assert without is not None and "whole_run" not in without
    text = plain_text(answered(Graph(), query("profile"), replace(options(), run=LONG), inputs=()).lines)
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [(row[0], row[1]) for row in rows[:3]] == [("1", "92.6"), ("2", "23.1"), ("4", "11.6")]
    assert [row[-1] for row in rows[:2]] == ["beaten"] * 2 and rows[2][-3:] == ["best", "in", "both"]


def test_device_hours_stand_for_money_without_a_price() -> None:
    nodes = tuple(replace(node, price_usd_per_hour=None) for node in CLUSTER.nodes)
    found = found_frontier(Graph(), query("profile"))
    unpriced = replace(CLUSTER, nodes=nodes)
    curves = [
        replace(
            curve,
            points=tuple(replace(one, part=part_of(unpriced, curve.devices)) for one in curve.points),
        )
        for curve in found.curves
    ]
    runs = runs_of_length(
        curves, RunLength(steps=1000), Reliability(jitter=0.0), limit_bytes=inf, tokens_per_step=None
    )
    assert [run.is_on_frontier for run in runs] == [False, True, True]
    assert [run.run.usd for run in runs] == [None] * 3
    # Within a memory limit that only four devices meet with 2 s, and two with 2.1 s.
    limited = runs_of_length(
        curves, RunLength(steps=1000), Reliability(), limit_bytes=2 * GIB, tokens_per_step=None
    )
    assert [(run.run.devices, run.run.step_time_s) for run in limited] == [(2, 2.1), (4, 2.0)]


def test_runs_of_the_same_days_are_compared_by_their_steps() -> None:
    """10 days of 8, 2 and 1 s: 108,000, 432,000 and 864,000 steps for the same money."""
    found = found_frontier(Graph(), query("profile"))
    runs = runs_of_length(
        found.curves, RunLength(wall_s=864_002.0), LONG.reliability or Reliability(), limit_bytes=inf,
        tokens_per_step=1000.0,
    )  # fmt: skip
    assert [run.run.steps for run in runs] == [108_000, 432_000, 864_000]
    assert [run.is_on_frontier for run in runs] == [False, False, True]
    assert found.whole_runs(steps=5)[2].run.steps == 5
    with pytest.raises(ConfigError, match="is not known of samples"):
        found.whole_runs(tokens="1T")


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        # 32 GiB: 3/4 are 24, 1/2 are 16, 1/4 are 8, 1/8 are 4; 5 % are 1.6.
        ([(1.0, 30.0)], [("fastest", 1.0)]),
        ([(1.0, 30.0), (1.02, 29.0)], [("fastest", 1.0), ("smallest", 1.02)]),
        (
            [(1.0, 30.0), (1.5, 20.0), (1.6, 15.0), (1.7, 14.0), (9.0, 5.0), (10.0, 3.9), (11.0, 3.0)],
            # 3.9 is within 1.6 of the smallest, 14 is not the fastest within a half.
            [("fastest", 1.0), ("in 3/4", 1.5), ("in 1/2", 1.6), ("in 1/4", 9.0), ("smallest", 11.0)],
        ),
        ([(1.0, 30.0), (1.01, 15.0), (2.0, 14.0)], [("fastest", 1.0), ("knee", 1.01), ("smallest", 2.0)]),
    ],
)
def test_highlights_really_differ(
    figures: list[tuple[float, float]], expected: list[tuple[str, float]]
) -> None:
    points = tuple(
        Point(time_s=time_s, memory_bytes=gib * GIB, cost_usd=None, part=PART_OF_32_GIB, layout=())
        for time_s, gib in figures
    )
    curve = Curve(part=PART_OF_32_GIB, points=points, epsilon=0.0, search_s=0.0, search_cpu_s=0.0)
    assert [(name, point.time_s) for name, point in curve.highlights().items()] == expected


def test_a_device_count_on_which_nothing_fits_is_named() -> None:
    text = plain_text(answered(Graph(), query("profile", sizes=(3, 4)), options(), inputs=()).lines)
    assert "3  nothing fits" in text
    with pytest.raises(Infeasible, match="nothing fits on 3") as caught:
        answered(Graph(), query("profile", sizes=(3,)), options(), inputs=())
    # The smallest of all is included, as it is where a limit excludes all points.
    assert caught.value.reasons == {"memory": 7} and caught.value.point is not None
    assert caught.value.point["memory_bytes"] == 99 * GIB and caught.value.point["devices"] == 3


@pytest.mark.parametrize(
    ("proven", "allowed", "text_expected"),
    [
        (0.0, 0.25, "exact (--epsilon 25.00 %)"),
        (0.25, 0.25, "within 25.00 % of the exact frontier (--epsilon)"),
        (0.01, 0.25, "within 1.00 % of the exact frontier (--epsilon 25.00 %)"),
        (0.5, 0.25, "within 50.00 % of the exact frontier; not proven to --epsilon 25.00 %"),
    ],
)
def test_the_reported_epsilon_is_proven(proven: float, allowed: float, text_expected: str) -> None:
    graph = Graph()
    graph.curves.proven = proven
    text = plain_text(answered(graph, replace(query("time"), epsilon=allowed), options(), inputs=()).lines)
    assert text_expected in text


def page(path: Path) -> Any:
    """The document of an HTML page."""
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"), re.S
    )
    return json.loads(found)


def test_its_plot_has_a_line_per_count_and_its_layouts(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    answered(Graph(), query("profile"), options(plot=str(path)), inputs=())
    document = page(path)
    assert document["title"] == "graph:two on 4 devices"
    dots = [dot for line in document["lines"] for dot in line["dots"]]
    marks = [mark["dot"] for mark in document["marks"]]
    # Six points, both extremes of the last curve, and the references on as many devices.
    shown = [dot for dot in (*dots, *marks) if {"op0: S(0)", "op1: R"} <= set(dot["lines"])]
    assert len(dots) == 6 and len(shown) == 6 + 2


@pytest.mark.parametrize(
    ("mode", "limit_gib", "devices", "fits"),
    [
        ("time", inf, 4, True),
        ("devices", 4.0, 2, False),
        ("profile", inf, 4, True),
        ("devices", inf, 1, None),
    ],
)
def test_references_are_compared_with_the_pick(
    mode: str, limit_gib: float, devices: int, fits: bool | None, tmp_path: Path
) -> None:
    path = tmp_path / "plot.html"
    given = query(mode, limit_gib=limit_gib)
    document = answered(Graph(), given, options(is_json="yes", plot=str(path)), inputs=()).document
    assert document is not None
    marks = {mark["name"]: mark["dot"] for mark in page(path)["marks"]}
    lines = plain_text(answered(Graph(), given, options(), inputs=()).lines).splitlines()
    shown_lines = [line for line in lines if line.startswith("  data parallel")]
    if fits is None:  # on one device all layouts are equal
        assert document["references"] == [] and not shown_lines
        assert not any(name.startswith("data parallel") for name in marks)
        return
    figures = {"time_s": 2.5, "memory_bytes": 20 * GIB, "cost_usd": None, "devices": devices}
    name = CLUSTER.name if devices == 4 else f"{devices} devices of {CLUSTER.name}"
    where = {"part": name, "idle": {"devices": 4 - devices, "nodes": 0, "ranks": ""}}
    layout = {"operators": ["R", "R"]}
    assert document["references"] == [
        {"name": "data parallel", "fits": fits, **figures, **where, "layout": layout}
    ]
    assert len(shown_lines) == 1 and ("does not fit" in shown_lines[0]) is not fits
    assert ("data parallel (does not fit)" in marks) is not fits
    ends = [POINTS[devices][0], POINTS[devices][-1]]
    for name, (time_s, gib) in zip(("time optimum", "memory optimum"), ends, strict=True):
        assert (marks[name]["step_time_s"], marks[name]["device_bytes"]) == (time_s, gib * GIB)


@pytest.mark.slow
def test_the_full_layout_is_in_the_page_once(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    answered(Graph(), query("profile"), options(plot=str(path)), inputs=())
    texts = page(path)["texts"]
    assert texts == ["the whole of ('S(0)', 'R')", "the whole of ('R', 'R')"]


def test_points_that_no_plan_file_holds_have_no_name(tmp_path: Path) -> None:
    notes = answered(Graph(), query("time"), options(save=str(tmp_path)), inputs=()).notes
    assert notes == [f"wrote 0 plans for 2 points and frontier.json to {tmp_path}"]
    assert json.loads((tmp_path / "frontier.json").read_text())["plans"] == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["frontier.json"]
