"""The command `frontier` with a subject that is no transformer: it does not depend on what a layout is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from shardwise.app.cli.frontier.command import FrontierOptions
from shardwise.app.cli.frontier.command import answered as shown
from shardwise.app.cli.output import Line, Output, plain_text
from shardwise.cluster import Cluster, load_cluster, part_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.plans import Idle, Plan
from shardwise.questions.frontiers import FrontierQuery, found_frontier
from shardwise.search import Curve, Point, Reference
from shardwise.search.bnb.solver import Progress

CLUSTER = load_cluster("1x4xV100-32G")

Layout = tuple[str, ...]
"""A placement for each of two operators."""

GIB = 2.0**30

POINTS = {
    # By hand: seconds and GiB. On two devices 3 s and 2 GiB are farthest below the chord, on four no point
    # is.
    1: [(8.0, 9.0)],
    2: [(2.0, 16.0), (3.0, 2.0), (16.0, 1.0)],
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
        ("devices", 4.0, [1, 2], (3.0, 2)),
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
        ["knee", "3.000", "s", "2.0", "GiB", "6.000"],
        ["smallest", "16.000", "s", "1.0", "GiB", "32.00"],
        ["4", "fastest", "1.000", "s", "4.0", "GiB"],
        ["smallest", "2.000", "s", "2.0", "GiB", "8.000"],
        ["data", "parallel", "2.500", "s", "20.0", "GiB"],
    ]


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


def test_its_plot_has_a_line_per_count_and_its_layouts(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    answered(Graph(), query("profile"), options(plot=str(path)), inputs=())
    text = path.read_text("utf-8")
    # Six points, both extremes of the last curve, and the references on as many devices.
    assert "graph:two on 4 devices" in text and text.count("op0: S(0) · op1: R") == 6 + 2


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
    page = path.read_text("utf-8")
    lines = plain_text(answered(Graph(), given, options(), inputs=()).lines).splitlines()
    shown_lines = [line for line in lines if line.startswith("  data parallel")]
    if fits is None:  # on one device all layouts are equal
        assert document["references"] == [] and not shown_lines and "data parallel" not in page
        return
    figures = {"time_s": 2.5, "memory_bytes": 20 * GIB, "cost_usd": None, "devices": devices}
    name = CLUSTER.name if devices == 4 else f"{devices} devices of {CLUSTER.name}"
    where = {"part": name, "idle": {"devices": 4 - devices, "nodes": 0, "ranks": ""}}
    layout = {"operators": ["R", "R"]}
    assert document["references"] == [
        {"name": "data parallel", "fits": fits, **figures, **where, "layout": layout}
    ]
    assert len(shown_lines) == 1 and ("does not fit" in shown_lines[0]) is not fits
    assert ("<td>data parallel (does not fit)</td>" in page) is not fits
    ends = [POINTS[devices][0], POINTS[devices][-1]]
    for name, (time_s, gib) in zip(("time optimum", "memory optimum"), ends, strict=True):
        assert f"<td>{name}</td><td>{time_s:g}</td><td>{gib:g}</td>" in page


@pytest.mark.slow
def test_the_full_layout_is_in_the_page_once(tmp_path: Path) -> None:
    path = tmp_path / "plot.html"
    answered(Graph(), query("profile"), options(plot=str(path)), inputs=())
    (texts,) = [
        json.loads(line.removeprefix("const wholes = ").removesuffix(";"))
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("const wholes")
    ]
    assert texts == ["the whole of ('S(0)', 'R')", "the whole of ('R', 'R')"]


def test_points_that_no_plan_file_holds_have_no_name(tmp_path: Path) -> None:
    notes = answered(Graph(), query("time"), options(save=str(tmp_path)), inputs=()).notes
    assert notes == [f"wrote 0 plans for 2 points and frontier.json to {tmp_path}"]
    assert json.loads((tmp_path / "frontier.json").read_text())["plans"] == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["frontier.json"]
