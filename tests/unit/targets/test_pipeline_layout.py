"""The layout string lists every stage: it is expanded here by the rules of Megatron-LM's own docstring."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.targets.megatron_lm import layout_text


def unrolled(layout: str) -> list[str]:
    """The stages: `(ab)*3` is `ababab`, `t*3` is `ttt`, stages end at `|`, commas have no meaning."""
    text = layout.replace(",", "")
    text = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    text = re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    return text.split("|")


def counts_of(layout: str) -> list[int]:
    stages = unrolled(layout)
    assert stages[0].startswith("E") and stages[-1].endswith("L")
    assert "".join(stages).count("E") == "".join(stages).count("L") == 1
    return [stage.count("t") for stage in stages]


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ([2, 3, 3, 2], "Ett|(ttt|)*2ttL"),
        ([1, *[1] * 13, *[2] * 33, 0], "Et|(t|)*13(tt|)*33L"),  # 1 + 13 + 2 x 33 = 80 layers, 48 stages
        ([10, 20, 20, 11], "Et*10|(t*20|)*2t*11L"),
        ([0, 0, 0, 4], "E|(|)*2t*4L"),
        ([0, *[1] * 126, 0], "E|(t|)*126L"),  # Llama 3.1 405B, 16 x 8 stages
        ([5], "Et*5L"),
    ],
)
def test_layouts_by_hand(counts: list[int], text: str) -> None:
    assert layout_text(counts) == text
    assert counts_of(text) == counts


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40))
def test_every_layout_unrolls_to_its_stages(counts: list[int]) -> None:
    assert counts_of(layout_text(counts)) == counts


def test_a_layout_that_lost_a_stage_is_caught() -> None:
    counts = [1, 2, 2, 2, 1]
    broken = layout_text(counts).replace("*3", "*2")
    assert counts_of(broken) != counts
