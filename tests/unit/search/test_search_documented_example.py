"""The program of docs/concepts/exact-search.md runs unchanged and prints the output of the page.

`python -m tests.unit.search.test_search_documented_example` writes its output into the page.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "exact-search.md"
BLOCK = re.compile(r"```python\n(.*?)```\n```text\n(.*?)```\n", re.DOTALL)


def rerun(page: str) -> str:
    """The page with the present output of every block; all blocks share one namespace."""
    names: dict[str, Any] = {"__name__": "how_it_chooses"}

    def block(match: re.Match[str]) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(match[1], str(PAGE), "exec"), names)  # noqa: S102
        return f"```python\n{match[1]}```\n```text\n{printed.getvalue()}```\n"

    return BLOCK.sub(block, page)


@pytest.mark.slow
def test_the_examples_of_the_page_print_its_output() -> None:
    page = PAGE.read_text("utf-8")
    assert len(BLOCK.findall(page)) == page.count("```python")
    assert rerun(page) == page


if __name__ == "__main__":
    PAGE.write_text(rerun(PAGE.read_text("utf-8")), "utf-8")
