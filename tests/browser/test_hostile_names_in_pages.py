"""Hostile names on every page: they are shown as text, nothing of them runs, and nothing is requested."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.browser.conftest import Open
from tests.hostile import COMMANDS, NAME, answer, page_data, write_inputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all commands, and the plans of the graph."""
    path = tmp_path_factory.mktemp("hostile")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        write_inputs(path)
    return path


@pytest.mark.parametrize("page", COMMANDS)
def test_a_hostile_name_is_shown_as_text(
    open_page: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    monkeypatch.chdir(folder)
    if page.startswith("graph ") and not Path("plans").exists():
        answer(*COMMANDS["graph frontier"])
    answer(*COMMANDS[page])
    path = folder / "page.html"
    page_data(path.read_text("utf-8"))
    opened = open_page(path)
    opened.page.on("dialog", lambda dialog: opened.problems.append(f"a dialog: {dialog.message}"))
    assert NAME in opened.page.locator("body").inner_text()
    assert opened.page.locator("img").count() == 0 and opened.page.locator("script").count() == 2
    assert opened.requests == [path.as_uri()] and opened.problems == []
