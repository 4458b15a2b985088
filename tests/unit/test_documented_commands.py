"""The parser accepts every `shardwise` command in README.md and docs/. Commands on pages for users are run
and print the output of the page, except where that depends on the speed of the machine.

`python -m tests.documented` writes their present output into the pages.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.documented.pages import ROOT, as_shown, commands, inline_commands, pages
from tests.documented.parsing import check
from tests.documented.running import comparable, is_run, outputs, runs

RUN = [page for page in pages() if is_run(page) and page.name != "README.md"]
"""README.md has its own test."""


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages(), ids=name)
def test_commands_are_parsed(page: Path) -> None:
    failures = []
    for inside, is_partial in ((commands(page), False), (inline_commands(page), True)):
        for command in inside:
            try:
                check(command.words, is_partial=is_partial or command.has_placeholder)
            except Exception as error:  # noqa: BLE001 - all failures of a page are listed
                failures.append(f"{command}\n  {getattr(error, 'message', error)}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("page", RUN, ids=name)
def test_commands_print_what_the_page_says(page: Path) -> None:
    for command, now in outputs(page):
        assert command.shown is not None
        assert comparable(now) == comparable(command.shown), command


def test_there_are_commands() -> None:
    found = [command for page in pages() for command in commands(page)]
    assert len(found) > 60 and sum(command.shown is not None for command in found) > 10
    assert {"README.md", "docs/get-started.md"} <= {name(command.page) for command in found if command.shown}


@pytest.mark.parametrize(
    "line",
    [
        "plam gpt2",
        "plan gpt2 --cluster 8xT4 --seq-len 8 --global-batch-size 8 --savee p.yaml",
        "plan gpt2 --cluster 8xT4",
        "events make diurnal",
        "launch p.yaml --with torchrun -- --stepss 3",
    ],
)
def test_wrong_commands_are_refused(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|no command|missing"):
        check(line.split(), is_partial=False)


def test_sections_and_lines_may_be_left_out() -> None:
    printed = "a 1\n\nb 2\nb 3\nb 4\n\nc 5\nc 6\n\nd 7\nd 8\n"
    for shown in (
        "a 1\n",
        "a 1\n\nb 2\n…\n",
        "a 1\n…\nd 7\nd 8\n",
        "…\nb 2\nb 3\n\n…\n\nc 5\n…\n",
        "…\n\nc 5\nc 6\n\nd 7\nd 8\n",
        "a 1\n\nb 2\nb 3\nb 4\n",
    ):
        assert as_shown(printed, shown) == shown
        assert as_shown(printed, re.sub("[0-9]", "0", shown)) == shown
    assert as_shown(printed, "a 1\n\nc 5\n") == "a 1\n\nb 2\nb 3\nb 4\n"
    assert as_shown(printed, "…\nc 5\n") == "…\nc 5\nc 6\n"
    with pytest.raises(AssertionError):
        as_shown(printed, "a 1\n…\ne 9\n")


def test_what_is_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n    shardwise models\n    shardwise plan MODEL --cluster C\n    sudo shardwise models\n"
        "    shardwise models | head\n    shardwise calibrate --out c.yaml\n    shardwise check c.yaml # it\n"
    )
    assert [runs(command, {"c.yaml"}) for command in commands(page)] == [
        True,
        False,
        False,
        False,
        False,
        False,
    ]
    assert commands(page)[-1].words == ["check", "c.yaml"]
