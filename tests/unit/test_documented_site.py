"""Links in README.md and docs/ lead to existing files; on the site, links out of docs/ become text."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tests.documented.pages import ROOT, pages

LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")


def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    lines = [line for line in page.read_text("utf-8").split("\n") if not line.startswith("    ")]
    targets = LINK.findall("\n".join(lines))
    assert not [target for target in targets if not (page.parent / target).exists()]


def test_links_that_leave_the_site() -> None:
    replaced = hooks().outside_links_replaced
    inside = "[a](../how-to/train.md#x) ![b](c.svg) [d](#e) [f](https://example.org)"
    assert replaced(inside, "concepts/p.md", None) == inside
    outside = "see [`Makefile`](../../Makefile#L3)."
    assert replaced(outside, "concepts/p.md", None) == "see `Makefile`."
    address = "https://example.org/r/"
    assert replaced(outside, "concepts/p.md", address) == (
        "see [`Makefile`](https://example.org/r/blob/main/Makefile#L3)."
    )


def test_patterns_of_the_navigation() -> None:
    """Each page once: where it is named, otherwise in the first pattern that matches it; index
    pages first.
    """
    nav = [
        "index.md",
        {"How": ["how-to/train.md", "how-to/*.md"]},
        {"None": "none/*.md"},
        {"Deep": [{"In": "decisions/*.md"}]},
    ]
    config = hooks().on_config(SimpleNamespace(nav=nav))
    assert config.nav[0] == "index.md" and [next(iter(each)) for each in config.nav[1:]] == ["How", "Deep"]
    how = config.nav[1]["How"]
    assert how[:2] == ["how-to/train.md", "how-to/index.md"] and len(how) == len(set(how))
    assert set(how) == {f"how-to/{path.name}" for path in (ROOT / "docs" / "how-to").glob("*.md")}
    assert "decisions/001-modules-by-subject.md" in config.nav[2]["Deep"][0]["In"]
