"""Bytes per logit of the cost model, compared with those of each software's own loss."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from tests.targets.folders import environment_with
from tests.targets.megatron import environment
from tests.unit.cost.hand_made import problem, with_software

from shardwise.cost.layers import loss_bytes

WITHIN = 0.02

# (software, dtype): its loss in the cost model.
CASES = {
    ("transformers", "bfloat16"): "eager",
    ("transformers", "float32"): "eager",
    ("torchtitan", "bfloat16"): "eager",
    ("torchtitan compiled", "bfloat16"): "compiled",
    ("megatron-lm", "bfloat16"): "megatron",
    ("megatron-lm", "float32"): "megatron",
    # Its kernels are fused, not its tensors.
    ("megatron-lm fused", "bfloat16"): "megatron",
}
DTYPES = {"bfloat16": "bf16", "float32": "fp32"}


@pytest.mark.parametrize(("software", "dtype"), CASES)
def test_bytes_per_logit_are_those_of_the_software(software: str, dtype: str) -> None:
    counted = counted_bytes(software, dtype)
    ours = predicted_bytes(CASES[software, dtype], DTYPES[dtype])
    assert abs(ours / counted - 1.0) < WITHIN, f"{software}, {dtype}: counted {counted:.2f}, ours {ours:.2f}"
    other = "megatron" if CASES[software, dtype] == "eager" else "eager"
    assert abs(predicted_bytes(other, DTYPES[dtype]) / counted - 1.0) > WITHIN


def predicted_bytes(loss: str, dtype: str) -> float:
    software = with_software(problem(dtype=dtype), loss=loss)
    return float(loss_bytes(software, 4.0))


def counted_bytes(software: str, dtype: str) -> float:
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets.counted_losses", software, dtype],
        capture_output=True, text=True, check=False, env=_environment(software),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return float(done.stdout.splitlines()[-1])


def _environment(software: str) -> Mapping[str, Any]:
    return environment() if software.startswith("megatron") else environment_with("torchtitan")
