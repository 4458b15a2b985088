"""The collectives that the cost model counts for a plan: the calls that its `CollectiveModel` gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from shardwise import search
from shardwise.cost.collectives import CollectiveModel
from shardwise.plans import Plan

PASS, SCATTER, ALL_REDUCE, ALL_TO_ALL, MESSAGE = "pass", "scatter", "all_reduce", "all_to_all", "message"

ESTIMATED = {
    "all_gather_s": PASS, "reduce_scatter_s": SCATTER, "all_reduce_s": ALL_REDUCE, "all_to_all_s": ALL_TO_ALL,
    "send_s": MESSAGE,
}  # fmt: skip

KINDS = {
    "all_gather": PASS, "reduce_scatter": SCATTER, "all_reduce": ALL_REDUCE, "all_to_all": ALL_TO_ALL,
    "send": MESSAGE,
}  # fmt: skip
"""The cost model's kind of each collective of the runtime."""


def predicted(plan: Plan) -> frozenset[tuple[str, float]]:
    """Kind and bytes of every collective between two or more ranks that is estimated for the plan's
    strategy."""
    seen: set[tuple[str, float]] = set()
    with ExitStack() as stack:
        for method, kind in ESTIMATED.items():
            stack.enter_context(
                patch.object(CollectiveModel, method, _noting(getattr(CollectiveModel, method), kind, seen))
            )
        search.evaluate(plan.model, plan.cluster, plan.job, plan.best.strategy)
    return frozenset(seen)


def _noting(estimated: Callable[..., Any], kind: str, seen: set[tuple[str, float]]) -> Callable[..., Any]:
    def noted(fabric: CollectiveModel, nbytes: Any, sizes: Any, *more: Any) -> Any:
        members = np.prod([np.max(size) for size in sizes]) if kind != MESSAGE else 2
        if members > 1:
            seen.update((kind, value) for value in _values(nbytes))
        return estimated(fabric, nbytes, sizes, *more)

    return noted


def _values(nbytes: Any) -> Iterator[float]:
    yield from (round(float(value), 3) for value in np.unique(np.asarray(nbytes)) if value > 0)
