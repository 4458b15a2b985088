"""Plots as files: content and location, without resources from elsewhere."""

from __future__ import annotations

import itertools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Annotation

from shardwise.app.plot import Dot, Mark, Plot, PlotLine, check_plot_file, draw, write_plot
from shardwise.app.plot.draw import DPI, HEIGHT_IN, STYLE, WIDTH_IN, box_of, leader_of, render
from shardwise.errors import ConfigError

GIB = 2.0**30
HOSTILE = "</script><script>alert(1)</script><!-- & \u2028 ' \" $title"


def dot(time_s: float, gib: float, *lines: str) -> Dot:
    return Dot(time_s=time_s, memory_bytes=gib * GIB, lines=lines or ("tp 8", "micro-batch 1"))


def line(name: str, scale: float, count: int = 40) -> PlotLine:
    times = np.sort(np.random.default_rng(len(name)).uniform(0.0, 1.0, count))
    dots = tuple(dot(scale * 3.0**x, 60.0 * 0.1**x) for x in times.tolist())
    return PlotLine(name=name, dots=dots, knee=count // 3)


PLOT = Plot(
    title="a model on 8 devices",
    subtitle="time against memory",
    lines=(line("4 devices", 2.0), line("8 devices", 1.0)),
    marks=(
        Mark(name="data parallel", dot=dot(1.3, 55.0)),
        Mark(name="time optimum", dot=dot(1.25, 57.0)),
        Mark(name="Megatron's layout", dot=dot(1.28, 50.0)),
        Mark(name="memory optimum", dot=dot(5.9, 6.1)),
    ),
    limit_bytes=52 * GIB,
)


def labels_of(plot: Plot) -> tuple[list[Any], Any]:
    figure = render(plot).figure
    canvas: Any = FigureCanvasAgg(figure)
    with matplotlib.rc_context(STYLE):
        canvas.draw()
    return [text for text in figure.axes[0].texts if isinstance(text, Annotation)], canvas.get_renderer()


def test_axes_are_logarithmic_and_have_units() -> None:
    (axes,) = render(PLOT).figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert "step time" in axes.get_xlabel() and "memory" in axes.get_ylabel()
    assert {label.get_text().split()[-1] for label in axes.get_xticklabels()} == {"s"}
    assert {label.get_text().split()[-1] for label in axes.get_yticklabels()} == {"GiB"}


def test_labels_overlap_neither_each_other_nor_the_edge() -> None:
    labels, renderer = labels_of(PLOT)
    assert sorted(label.get_text() for label in labels) == sorted(
        [*(mark.name for mark in PLOT.marks), "limit 52 GiB"]
    )
    boxes = [box_of(label, renderer) for label in labels]
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place])
        assert box.x0 >= 0 and box.x1 <= WIDTH_IN * DPI and box.y0 >= 0 and box.y1 <= HEIGHT_IN * DPI
    # The mutant: with one offset for all labels, some do overlap.
    for label in labels:
        label.set_position((11, 11))
    label_boxes = [box_of(label, renderer) for label in labels]
    assert any(box.overlaps(other) for place, box in enumerate(label_boxes) for other in label_boxes[:place])


def crossed(plot: Plot) -> int:
    """Number of labels that a leader of another label crosses."""
    labels, renderer = labels_of(plot)
    boxes = [box_of(label, renderer) for label in labels]
    leads = [leader_of(label.axes, label.xy, box) for label, box in zip(labels, boxes, strict=True)]
    pairs = itertools.permutations(range(len(labels)), 2)
    return sum(leads[one].intersects_bbox(boxes[other]) for one, other in pairs)


@pytest.mark.slow
def test_no_line_to_a_label_passes_under_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """For random marks close to each other; the mutant ignores leaders, and some cross labels."""
    plots = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        dots = [dot(*place) for place in zip(rng.uniform(1, 1.6, 4), rng.uniform(40, 62, 4), strict=True)]
        marks = tuple(Mark(name=f"mark {one}", dot=each) for one, each in enumerate(dots))
        plots.append(replace(PLOT, marks=marks, limit_bytes=None))
    assert [crossed(plot) for plot in plots] == [0] * len(plots)
    monkeypatch.setattr(
        draw._OccupiedArea,
        "overlap_count",
        lambda occupied, box, _: sum(map(box.overlaps, (*occupied.boxes, *occupied.labels))),
    )
    assert sum(crossed(plot) for plot in plots) > 0


def test_marks_in_one_place_share_a_label() -> None:
    one = dot(1.0, 20.0)
    plot = Plot(
        title="t", subtitle="s", lines=PLOT.lines, marks=(Mark(name="a", dot=one), Mark(name="b", dot=one))
    )
    labels, _ = labels_of(plot)
    assert [label.get_text() for label in labels] == ["a · b"]


def test_a_line_is_a_step_function_that_claims_no_more_than_its_points() -> None:
    """Between two points, no plan has the memory of the slower one and less than its time."""
    (axes,) = render(PLOT).figure.axes
    steps: Any = next(path for path in axes.get_lines() if path.get_drawstyle() == "steps-post")
    dots = PLOT.lines[0].dots
    assert np.array_equal(steps.get_data(), [[d.time_s for d in dots], [d.memory_bytes for d in dots]])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_the_same_plot_gives_the_same_bytes(tmp_path: Path, suffix: str) -> None:
    seen = set()
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{suffix}"
        write_plot(str(path), PLOT)
        seen.add(path.read_bytes())
    assert len(seen) == 1


@pytest.mark.slow
def test_a_png_has_its_size_and_is_not_blank(tmp_path: Path) -> None:
    path = tmp_path / "plot.PNG"
    write_plot(str(path), PLOT)
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[:2] == (HEIGHT_IN * DPI, WIDTH_IN * DPI)
    # Ink on white: between one and thirty of a hundred pixels.
    assert 0.01 < float((pixels[..., :3].min(axis=2) < 0.9).mean()) < 0.3


def test_an_svg_is_well_formed_and_fetches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    write_plot(str(path), PLOT)
    root = ElementTree.fromstring(path.read_text("utf-8"))
    assert root.tag.endswith("svg")
    assert_fetches_nothing(path.read_text("utf-8"))


def assert_fetches_nothing(text: str) -> None:
    """References are to ids within the file; addresses are names of namespaces and metadata only."""
    for value in re.findall(r"""(?:href|src)\s*=\s*["']([^"']*)""", text):
        assert value.startswith("#"), value
    for value in re.findall(r"url\(([^)]*)\)", text):
        assert value.startswith("#"), value
    assert not re.search(r"<(?:link|img|iframe|image|script\s+[^>]*src)|@import|fetch\(|XMLHttp", text)


def page_of(path: Path, plot: Plot) -> tuple[str, Any]:
    """The page of a plot, and the document in it, as a browser reads it."""
    write_plot(str(path), plot)
    text = path.read_text("utf-8")
    assert_fetches_nothing(text)
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert len(found) == 1 and text.count("<script") == 2
    return text, json.loads(found[0])


def test_a_page_has_each_dot(tmp_path: Path) -> None:
    _, document = page_of(tmp_path / "plot.html", PLOT)
    shown = [(line["name"], dot) for line in document["lines"] for dot in line["dots"]]
    shown += [(mark["name"], mark["dot"]) for mark in document["marks"]]
    assert [(name, dot["step_time_s"], dot["device_bytes"], tuple(dot["lines"])) for name, dot in shown] == [
        (name, dot.time_s, dot.memory_bytes, dot.lines) for name, dot in PLOT.dots()
    ]
    assert [line["knee"] for line in document["lines"]] == [line.knee for line in PLOT.lines]
    assert document["limit_bytes"] == 52 * GIB and document["schema"] == "shardwise.frontier-page"


def test_further_lines_of_dots_are_there_once(tmp_path: Path) -> None:
    dots = (replace(dot(1.0, 2.0), more=("a", "b")), replace(dot(2.0, 1.0), more=("b", "c")))
    plot = Plot(title="t", subtitle="s", lines=(PlotLine(name="one", dots=dots, knee=None),))
    _, document = page_of(tmp_path / "plot.html", plot)
    assert document["texts"] == ["a", "b", "c"]
    assert [one["more"] for one in document["lines"][0]["dots"]] == [[0, 1], [1, 2]]


def test_no_name_breaks_out_of_its_element(tmp_path: Path) -> None:
    plot = Plot(
        title=HOSTILE,
        subtitle=HOSTILE,
        lines=(PlotLine(name=HOSTILE, dots=(dot(1.0, 2.0, HOSTILE), dot(2.0, 1.0, "b")), knee=None),),
        marks=(Mark(name="mark", dot=dot(1.0, 2.0, HOSTILE)),),
    )
    text, document = page_of(tmp_path / "plot.html", plot)
    assert "alert(1)</script>" not in text and "<!--" not in text
    assert document["title"] == document["lines"][0]["name"] == HOSTILE
    assert document["lines"][0]["dots"][0]["lines"] == [HOSTILE]
    write_plot(str(tmp_path / "plot.svg"), plot)
    ElementTree.fromstring((tmp_path / "plot.svg").read_text("utf-8"))


def test_a_page_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shardwise.app.plot.file.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # every import of it fails
    check_plot_file("plot.html", key="--plot")
    page_of(tmp_path / "plot.html", PLOT)


@pytest.mark.parametrize("gib", [0.8245, 12.0, 1234.567])
def test_all_labels_are_within_the_figure(gib: float) -> None:
    """Labels of an axis that spans a few thousandths have many digits; the axes leave space for them."""
    narrow = PlotLine(
        name="1 device", dots=tuple(dot(0.1 + 0.01 * n, gib * (1.0 - 0.003 * n)) for n in range(4)), knee=None
    )
    figure = render(Plot(title="t", subtitle="s", lines=(narrow,))).figure
    (axes,) = figure.axes
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    box = axes.get_tightbbox(renderer)
    assert box is not None and box.x0 > 0.0 and box.x1 < figure.bbox.width
    assert max(len(label.get_text()) for label in axes.get_yticklabels()) > len("16 GiB")


@pytest.mark.parametrize("count", [1, 2])
def test_few_points_are_drawn(tmp_path: Path, count: int) -> None:
    few = PlotLine(name="1 device", dots=(dot(0.1, 3.0), dot(0.1000001, 2.9999))[:count], knee=None)
    write_plot(str(tmp_path / "plot.png"), Plot(title="t", subtitle="s", lines=(few,)))


@pytest.mark.parametrize("name", ["plot", "plot.pdf", "plot.png.gz", "", ".png"])
def test_other_suffixes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--plot.*suffix.*\.png, \.svg, \.html"):
        check_plot_file(name, key="--plot")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.app.plot.file.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib.*pip install 'shardwise\[plot\]'"):
        check_plot_file("plot.png", key="--plot")


def test_letters_that_the_font_lacks_are_escaped_in_pictures_only(tmp_path: Path) -> None:
    """Formerly matplotlib warned of each missing glyph and drew boxes; warnings are errors in tests."""
    name = "\u6a21\u578b \U0001f600 \u202eab \u00e9 \u03b1"
    plot = replace(
        PLOT, title=name, subtitle=name, lines=(replace(PLOT.lines[0], name=name), PLOT.lines[1]),
        marks=(Mark(name=name, dot=PLOT.marks[0].dot),),
    )  # fmt: skip
    shown = r"\u6a21\u578b " + "\U0001f600 " + r"\u202eab " + "\u00e9 \u03b1"  # the font has a face
    (axes,) = render(plot).figure.axes
    assert {text.get_text() for text in axes.figure.texts} == {shown}
    legend = axes.get_legend()
    assert legend is not None and shown in {text.get_text() for text in legend.get_texts()}
    for suffix in ("png", "svg", "html"):
        write_plot(str(tmp_path / f"p.{suffix}"), plot)
    assert "\u6a21\u578b" in (tmp_path / "p.html").read_text("utf-8")
