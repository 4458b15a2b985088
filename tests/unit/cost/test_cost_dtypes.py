"""Number formats by their usual names."""

from __future__ import annotations

import pytest

from shardwise.cost import RECIPES, dtype_spelled
from shardwise.cost.recipe import SPELLINGS


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("bf16", "bf16"), ("torch.bfloat16", "bf16"), ("BFLOAT16", "bf16"), ("half", "fp16"),
        ("float32", "fp32"), ("fp8_current", "fp8-current"), ("FP8-Blockwise", "fp8-block"),
        ("mx_fp8", "mxfp8"), ("TF32", "tf32"), ("TensorFloat-32", "tf32"), ("bf16-mixed", "bf16"),
    ],
)  # fmt: skip
def test_usual_spellings(text: str, dtype: str) -> None:
    assert dtype_spelled(text) == dtype


@pytest.mark.parametrize("text", ["int8", "16-true", "fp6", "mxfp4", "bf", ""])
def test_other_formats_stay_as_they_are_and_are_refused_later(text: str) -> None:
    assert dtype_spelled(text) == text
    assert text not in RECIPES


def test_every_spelling_names_a_recipe() -> None:
    assert set(SPELLINGS.values()) <= set(RECIPES)
    assert not set(SPELLINGS) & set(RECIPES)
