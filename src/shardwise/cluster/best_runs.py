"""The best measured run of each device, and whether a prediction is above it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

BEST_RUNS: Final = Path(__file__).parent / "data" / "best_runs.json"
"""File of the best measured utilisation of each device and number format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRun:
    """The largest share of a device's dense peak that the model FLOP of a measured run has reached, with the
    visible half of attention (`mfu`), among `runs` runs; `row` is its id."""

    device: str
    dtype: str
    mfu: float
    row: str
    runs: int


@cache
def best_runs() -> dict[tuple[str, str], BestRun]:
    """The best run of each device and number format, which `python -m benchmarks.left_out --write` finds."""
    records = json.loads(BEST_RUNS.read_text("utf-8"))["runs"]
    return {(one["device"], one["dtype"]): BestRun(**one) for one in records}


LEAST_RUNS: Final = 10
"""Fewest measured runs of a device in a number format that say what it reaches."""

MARGIN: Final = 1.1
"""Factor on the best measured utilisation above which a prediction is called implausible: repeated runs
differ by 4 %, and the best of some dozens of runs is not the best possible."""


def implausible_mfu(mfu: float | None, classes: Iterable[str], dtype: str) -> str | None:
    """What a card says where `mfu` is more than MARGIN times that of the best measured run on the only device
    of these `classes` in this number format; None where it is not, or where fewer than LEAST_RUNS runs are
    known."""
    names = list(classes)
    best = best_runs().get((names[0], dtype)) if len(names) == 1 else None
    if best is None or best.runs < LEAST_RUNS or mfu is None or mfu <= MARGIN * best.mfu:
        return None
    reached = f"{best.mfu * 100:.1f} %"
    return f"far above the best of {best.runs} measured runs on {best.device}, {reached}: measure a step"
