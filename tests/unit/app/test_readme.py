"""README.md's examples print what it says, but for how long an answer took.

`python -m tests.unit.app.test_readme` writes what they print into the page.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardwise.app.cli.main import main

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "README.md"
EXAMPLE = re.compile(r"^    shardwise ([^\n]+)\n\n```text\n(.*?)```\n", re.MULTILINE | re.DOTALL)
TOOK = re.compile(r"found in .*$", re.MULTILINE)


@contextlib.contextmanager
def outside_the_examples() -> Iterator[None]:
    """In a folder of its own, where the examples are and what commands write stays."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        with contextlib.chdir(folder):
            yield


def printed(words: str) -> str:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert main(shlex.split(words)) == 0, words
    out.seek(0)
    return out.read().lstrip("\n")


def first_sections(text: str, count: int) -> str:
    """So many sections of an answer, which blank lines divide: the page leaves out what comes behind."""
    return "\n\n".join(text.rstrip("\n").split("\n\n")[:count]) + "\n"


def rerun(words: str, shown: str) -> str:
    """As much as is `shown` of what the example prints today."""
    return first_sections(printed(words), len(shown.rstrip("\n").split("\n\n")))


def examples() -> list[tuple[str, str]]:
    return EXAMPLE.findall(PAGE.read_text("utf-8"))


def saved() -> None:
    """The plan that the second example reads, as the page says."""
    printed(f"{examples()[0][0]} --save plan.yaml")


def test_examples_print_what_the_page_says(full: bool) -> None:
    """With `--full` the frontier too, which takes a quarter of a minute."""
    with outside_the_examples():
        saved()
        for words, shown in examples()[: None if full else 4]:
            assert TOOK.sub("", rerun(words, shown)) == TOOK.sub("", shown), words


def test_every_block_is_an_example() -> None:
    assert len(examples()) == PAGE.read_text("utf-8").count("```text") == 5


if __name__ == "__main__":
    with outside_the_examples():
        saved()
        updated = EXAMPLE.sub(
            lambda match: f"    shardwise {match[1]}\n\n```text\n{rerun(match[1], match[2])}```\n",
            PAGE.read_text("utf-8"),
        )
    PAGE.write_text(updated, "utf-8")
