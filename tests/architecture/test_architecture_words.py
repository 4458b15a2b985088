"""No identifier and no prose has a retired word, and no two public classes share a name."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.architecture.sources import ROOT, module_of
from tests.architecture.test_architecture_bans import MODULES
from tests.architecture.words import RETIRED, public_classes, retired_names, retired_phrases


@pytest.mark.slow
def test_no_identifier_has_a_retired_word() -> None:
    assert [name for module in MODULES for name in retired_names(module)] == []


@pytest.mark.parametrize("word", sorted(RETIRED))
def test_a_retired_word_is_noticed(word: str) -> None:
    for source in (
        f"def {word}_of(x):\n    return x",
        f"class Lower{word.capitalize()}:\n    pass",
        f"x.{word}_s = 1",
        f"f({word}=1)",
        f"def f(most_{word}):\n    pass",
    ):
        assert retired_names(module_of("shardwise.cost.twin", source))
    assert retired_names(module_of(f"shardwise.cost.{word}", ""))
    assert not retired_names(module_of("shardwise.cost.twin", f"x = '{word}'  # {word}"))


PAGES_OF_WORDS = ("docs/reference/glossary.md", "docs/decisions/001-modules-by-subject.md")
"""Pages that name retired words: the glossary, and the table of former modules."""


def test_no_prose_has_a_retired_word() -> None:
    found = [
        phrase
        for pattern in ("*.md", "docs/**/*.md", "src/**/*.py", "tests/**/*.py", "benchmarks/*.py")
        for path in sorted(ROOT.glob(pattern))
        for name in [path.relative_to(ROOT).as_posix()]
        if name not in PAGES_OF_WORDS and not name.startswith("tests/architecture/")
        for phrase in retired_phrases(name, path.read_text("utf-8"), is_page=path.suffix == ".md")
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('x = 1  # what became of a braid\n"""Told by the\nerrand."""\n', 4),
        ('x = "fates"\nhubs = 1  # `lent` by the Hugging Face Hub over PCIe lanes, tolderance\n', 0),
    ],
)
def test_a_retired_word_in_prose_is_noticed(source: str, count: int) -> None:
    assert len(retired_phrases("twin", source, is_page=False)) == count
    page = 'The customary `told`.\n```json\n{"fates": 1}\n```\n```text\n cut by the bound\n```\n'
    assert len(retired_phrases("twin", page, is_page=True)) == 2


@pytest.mark.slow
def test_no_two_public_classes_share_a_name() -> None:
    counts = Counter(name for module in MODULES for name in public_classes(module))
    assert [name for name, count in counts.items() if count > 1] == []
    twin = module_of(
        "shardwise.cost.twin", "class Stage:\n    class Inner:\n        pass\n\nclass _Own:\n    pass"
    )
    assert public_classes(twin) == ["Stage"] and counts["Stage"] == 1
