"""No identifier has a retired word, and no two public classes share a name."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.architecture.sources import module_of
from tests.architecture.test_architecture_bans import MODULES
from tests.architecture.words import RETIRED, public_classes, retired_names


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


@pytest.mark.slow
def test_no_two_public_classes_share_a_name() -> None:
    counts = Counter(name for module in MODULES for name in public_classes(module))
    assert [name for name, count in counts.items() if count > 1] == []
    twin = module_of(
        "shardwise.cost.twin", "class Stage:\n    class Inner:\n        pass\n\nclass _Own:\n    pass"
    )
    assert public_classes(twin) == ["Stage"] and counts["Stage"] == 1
