"""README.md's examples print the output that it shows, except where that depends on the speed of the machine.

`python -m tests.documented README.md` writes their output into the page.
"""

from __future__ import annotations

from tests.documented.pages import ROOT, commands
from tests.documented.running import comparable, outputs

PAGE = ROOT / "README.md"


def test_examples_print_what_the_page_says() -> None:
    for command, now in outputs(PAGE):
        assert command.shown is not None
        assert comparable(now) == comparable(command.shown), command


def test_every_block_is_an_example() -> None:
    shown = [command for command in commands(PAGE) if command.shown is not None]
    assert len(shown) == PAGE.read_text("utf-8").count("```text") == 5


def test_it_is_one_page() -> None:
    assert PAGE.read_text("utf-8").count("\n") <= 125
