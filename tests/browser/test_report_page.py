"""The report of a plan in a browser: it needs nothing but its file, and every part is there to be read."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.browser.conftest import Open

import shardwise as sw

PARTS = [
    "The recommended plan", "Where the time goes", "Where the memory goes", "The pipeline",
    "Layout on the cluster", "Time against memory", "Targets", "What is proven", "Assumptions", "Next",
]  # fmt: skip

PIPELINE = "#the-pipeline canvas"
LAYOUT = "#layout-on-the-cluster canvas"


def serious(page: Any) -> list[str]:
    """The serious findings of axe-core."""
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
        for one in violations
        if one["impact"] in ("serious", "critical")
    ]


def test_it_requests_nothing_but_its_file(open_page: Open, report_path: Path) -> None:
    opened = open_page(report_path)
    assert opened.requests == [report_path.as_uri()]
    assert opened.problems == []
    assert [part.text_content() for part in opened.page.locator("h2").all()] == PARTS


def test_figures_are_those_of_the_plan(open_page: Open, report_path: Path, pipeline_plan: sw.Plan) -> None:
    page = open_page(report_path).page
    assert page.locator(".headline").text_content() == "tp 2 · pp 4 · dp 2"
    step_s = pipeline_plan.step_time_s
    shown = page.locator(".fact .value").all_text_contents()
    assert shown[0] == (f"{step_s:.3f} s" if step_s >= 1.0 else f"{float(f'{step_s * 1e3:.4g}'):g} ms")
    gib = pipeline_plan.best.peak_memory.device / 2**30
    assert shown[1].startswith(f"{gib:.1f} of ")
    # A bar for each of the 4 stages, and the amounts are those of `memory_by_stage`.
    amounts = page.locator("#where-the-memory-goes .bars .amount").all_text_contents()
    assert [text.split(" ")[0] for text in amounts] == [
        f"{stage['device'] / 2**30:.1f}" for stage in sw.memory_by_stage(pipeline_plan)
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_finding_of_accessibility(open_page: Open, report_path: Path, scheme: str) -> None:
    page = open_page(report_path, scheme=scheme).page
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert serious(page) == []


def test_dark_is_dark_and_the_switch_changes_it(open_page: Open, report_path: Path) -> None:
    page = open_page(report_path, scheme="dark").page

    def brightness() -> int:
        text = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in text[4:-1].split(","))

    assert brightness() < 150  # of 3 x 255
    page.select_option("#theme", "light")
    assert brightness() > 700
    page.select_option("#theme", "auto")
    assert brightness() < 150
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("html[data-theme=light]")
    assert brightness() > 700


@pytest.mark.parametrize("width", [360, 768, 1200])
def test_nothing_is_wider_than_the_window(open_page: Open, report_path: Path, width: int) -> None:
    page = open_page(report_path, width=width, height=740).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hovering_an_action_shows_its_times(
    open_page: Open, report_path: Path, pipeline_plan: sw.Plan
) -> None:
    page = open_page(report_path).page
    canvas = page.locator(PIPELINE)
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    # The first action of rank 0 follows its gather of 0.5 ms of 640 ms, at the right of the names of rows,
    # which are 64 pixels wide.
    page.mouse.move(box["x"] + 64 + 5, box["y"] + 5)
    lines = page.locator("#the-pipeline .tip").inner_text().split("\n")
    assert lines[:3] == ["forward of micro-batch 0", "stage 0, chunk 1 of 2", "rank 0: devices 0-3"]
    length, start, stop = (float(text) for text in re.findall(r"([\d.]+) ms", lines[3]))
    assert 0.0 < start < 1.0 and stop - start == pytest.approx(length, rel=1e-3)
    assert lines[4] == "on the critical path"
    assert page.locator("#the-pipeline .tip").is_visible()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    assert not page.locator("#the-pipeline .tip").is_visible()


def test_the_pipeline_is_used_by_keyboard(open_page: Open, report_path: Path, pipeline_plan: sw.Plan) -> None:
    """Arrow keys follow the table of the schedule, plus and minus zoom; the status says what is selected."""
    page = open_page(report_path).page
    page.focus(PIPELINE)
    status = page.locator("#the-pipeline .status")
    kinds = {"F": "forward", "B": "backward"}
    for action in pipeline_plan.schedules[0].ranks[0][:6]:
        page.keyboard.press("ArrowRight")
        said = status.text_content()
        assert said.startswith(
            f"{kinds[action.kind]} of micro-batch {action.microbatch}; stage {action.stage},"
        )
    page.keyboard.press("ArrowDown")
    assert "; rank 1: devices " in status.text_content()
    page.keyboard.press("End")
    last = pipeline_plan.schedules[0].ranks[1][-1]
    assert f"of micro-batch {last.microbatch}; stage {last.stage}," in status.text_content()

    def span() -> float:
        page.wait_for_timeout(50)
        return float(
            page.evaluate(f"(own => own.to - own.from)(document.querySelector('{PIPELINE}').dataset)")
        )

    whole = span()
    assert whole == pytest.approx(pipeline_plan.step_time_s)
    page.keyboard.press("+")
    assert span() == pytest.approx(whole / 2)
    page.keyboard.press("0")
    assert span() == pytest.approx(whole)
    page.click("#the-pipeline button[aria-label='zoom in']")
    assert span() == pytest.approx(whole / 2)


def test_only_visible_actions_are_drawn(open_page: Open, report_path: Path) -> None:
    page = open_page(report_path).page
    drawn = f"Number(document.querySelector('{PIPELINE}').dataset.drawn)"
    whole = page.evaluate(drawn)
    assert whole >= 128  # 4 ranks x 2 chunks x 8 micro-batches x 2 passes
    page.focus(PIPELINE)
    for _ in range(4):
        page.keyboard.press("+")
    page.wait_for_timeout(100)
    assert page.evaluate(drawn) < whole / 4


def test_ranks_are_shown_with_their_groups(open_page: Open, report_path: Path) -> None:
    """tp 2 x dp 2 x pp 4 in the order tp-cp-dp-pp: rank 5 = 1 + 2 x 0 + 4 x 1 is the second of its tensor
    group (4, 5), of the first replica, in stage 1, on node 0; its pipeline is 1, 5, 9, 13."""
    page = open_page(report_path).page
    page.focus(LAYOUT)
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    said = page.locator("#layout-on-the-cluster .status").text_content()
    assert "rank 5; node 0, device 5 (H100-SXM); stage 1 of 4;" in said
    assert "tensor parallel group 2: 2 ranks (4, 5)" in said
    assert "data parallel group 3: 2 ranks (5, 7)" in said
    assert "pipeline group 1: 4 ranks (1, 5, 9, 13)" in said
    page.click("#layout-on-the-cluster button:has-text('data parallel')")
    assert page.evaluate(f"document.querySelector('{LAYOUT}').dataset.group") == "dp"
    rows = [row.inner_text().split("\t") for row in page.locator("#layout-on-the-cluster tbody tr").all()]
    # Groups of tensor and data parallelism lie within nodes of 8, pipelines of stride 4 over both nodes.
    assert [(row[0], row[1], row[2], row[3]) for row in rows] == [
        ("tensor parallel", "2", "8", "NVLink 4"), ("data parallel", "2", "8", "NVLink 4"),
        ("pipeline", "4", "4", "InfiniBand"),
    ]  # fmt: skip


def test_a_point_of_the_frontier_shows_its_command(open_page: Open, tmp_path: Path) -> None:
    plan = sw.evaluate(
        "llama-3.1-8b", cluster="1x2xH100-SXM", seq_len=4096, global_batch_size=4,
        strategy="tp=2,recompute=full",
    )  # fmt: skip
    plan.report(tmp_path / "f.html", frontier=True)
    opened = open_page(tmp_path / "f.html")
    page = opened.page
    point = page.locator("#time-against-memory svg .point").first
    point.click()
    assert (
        page.locator("#time-against-memory code")
        .text_content()
        .startswith("shardwise explain plan.yaml --why-not tp=")
    )
    first = page.locator("#time-against-memory [role=status]").text_content()
    page.keyboard.press("Tab")
    page.focus("#time-against-memory svg")
    page.keyboard.press("ArrowRight")
    assert page.locator("#time-against-memory [role=status]").text_content() != first
    assert opened.problems == [] and serious(page) == []


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def test_a_name_of_markup_is_shown_as_text(open_page: Open, pipeline_plan: sw.Plan, tmp_path: Path) -> None:
    plan = replace(pipeline_plan, network=replace(pipeline_plan.model, name=HOSTILE, notes=(HOSTILE,)))
    plan.report(tmp_path / "h.html")
    opened = open_page(tmp_path / "h.html")
    assert opened.page.locator("h1").text_content() == f"{HOSTILE} on {plan.cluster.name}"
    assert opened.page.locator("img").count() == 0 and opened.problems == []
    assert opened.requests == [(tmp_path / "h.html").as_uri()]
    # A script that came in another way would not run either.
    opened.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))"
    )
    assert opened.page.evaluate("window.ran") is None


def test_all_is_printed_in_light_colours(open_page: Open, report_path: Path) -> None:
    page = open_page(report_path, scheme="dark").page
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    page.emulate_media(media="print")
    assert not page.locator("#theme").is_visible() and page.locator(PIPELINE).is_visible()
    assert len(page.pdf()) > 20_000
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
