"""Whole parameters and gradients of PyTorch's pipeline stages, compared with the cost model."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.targets.folders import environment_with

ELEMENTS = 4 * 64 * 64
"""Weights of the stage of `fsdp_stage`; a quarter of them is a rank's shard."""


@pytest.mark.parametrize(
    ("zero_stage", "dtype", "whole"),
    [(2, "float32", 4), (3, "float32", 4), (2, "bfloat16", 2), (3, "bfloat16", 2)],
)
def test_a_stage_is_whole_until_its_gradients_are_reduced(zero_stage: int, dtype: str, whole: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets.fsdp_stage", str(zero_stage), dtype],
        capture_output=True, text=True, check=False, env=environment_with(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, *before, last = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert first[1:] == (0, 0)  # no gradients before the first backward pass
    # `whole_in_pipelines`: parameters of 2 B and gradients in the dtype of the reduction, as if neither were
    # sharded.
    assert before == 3 * [(2 * ELEMENTS, whole * ELEMENTS, 0)]
    # Then gradients are reduced to a rank's quarter, in fp32 whatever was sent (`accumulates_in_fp32`), and
    # parameters are sharded again.
    assert last == (0, 0, 4 * ELEMENTS // 4)
