"""Step times in the logs of training software."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from statistics import median
from typing import Final

_NUMBER = r"([0-9][0-9,]*(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"

PATTERNS: Final[Mapping[str, str]] = {
    "seconds": rf"\biter time \(s\):\s*{_NUMBER}",
    "milliseconds": rf"\belapsed time per iteration \(ms\):\s*{_NUMBER}",
    "samples": rf"\bCurrSamplesPerSec={_NUMBER}",
    "tokens": rf"tps:\s*{_NUMBER}",
}
"""Figures of a step: seconds (pipelines of DeepSpeed), milliseconds (Megatron-LM), samples a second
(DeepSpeed), tokens a second and device (TorchTitan)."""


def has_steps(text: str) -> bool:
    """Whether the text is a log with step times."""
    return any(re.search(pattern, text) for pattern in PATTERNS.values())


def logged_step_s(text: str, *, devices: int, seq_len: int, global_batch_size: int) -> float | None:
    """The median seconds of a step in a log of such a job; None where it has no step.

    The first quarter of the steps is warm-up and does not count."""
    seconds: Mapping[str, Callable[[float], float]] = {
        "seconds": lambda value: value,
        "milliseconds": lambda value: value / 1e3,
        "samples": lambda value: global_batch_size / value,
        "tokens": lambda value: global_batch_size * seq_len / devices / value,
    }
    for name, pattern in PATTERNS.items():
        values = [float(found.replace(",", "")) for found in re.findall(pattern, text)]
        steps = [seconds[name](value) for value in values if value > 0.0]
        if steps:
            return median(steps[len(steps) // 4 :])
    return None
