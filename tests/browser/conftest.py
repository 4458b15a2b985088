"""Pages in Debian's Chromium, driven by Playwright. Without either of them the tests here are skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass
class Opened:
    """A page of a browser with all that it requested, and all errors and warnings of its console."""

    page: Any
    requests: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all tests of a browser, which takes seconds to start."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("browser"))
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    missing = [] if CHROMIUM.exists() else [str(CHROMIUM)]
    missing += [
        name for name in ("playwright", "axe_playwright_python") if not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield own
        own.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens a file in a new page; `width`, `height` and `scheme` are those of its window."""
    pages = []

    def opened(path: Path, *, width: int = 1200, height: int = 900, scheme: str = "light") -> Opened:
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        pages.append(page)
        found = Opened(page)
        page.on("request", lambda request: found.requests.append(request.url))
        page.on("pageerror", lambda error: found.problems.append(str(error)))
        page.on(
            "console",
            lambda said: found.problems.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.goto(path.as_uri())
        page.wait_for_selector("footer")
        return found

    yield opened
    for page in pages:
        page.close()


@pytest.fixture(scope="session")
def pipeline_plan() -> sw.Plan:
    """An interleaved pipeline of 4 ranks with 2 chunks each, 8 micro-batches: 4 x 2 x 8 x 2 = 128 actions."""
    return sw.evaluate(
        "llama-3.1-8b", cluster="2x8xH100-SXM", seq_len=4096, global_batch_size=16,
        strategy="tp=2,pp=4,vpp=2,dp=2,schedule=interleaved_1f1b,zero_stage=1,micro_batch_size=1",
    )  # fmt: skip


@pytest.fixture(scope="session")
def report_path(pipeline_plan: sw.Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    pipeline_plan.report(path)
    return path
