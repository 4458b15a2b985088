"""What the cost model charges for the layout of an operator graph: the collectives that it prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from shardwise.cost import Training
from shardwise.cost.one_layout import kernels, parameters, price, price_layout
from shardwise.cost.one_layout.kernels import Seconds, size
from shardwise.cost.one_layout.rank import Rank
from shardwise.plan import GraphPlan

Times = Counter[tuple[str, int]]
"""How often a step has a collective of a kind and of so many bytes."""

PRICED = {"ring_s": "pass", "all_reduce_s": "all_reduce", "all_to_all_s": "all_to_all"}


def charged(plan: GraphPlan) -> Times:
    """Every collective that is priced for the plan between more than one rank, each as often as the step has
    it, on a backend that has all of them.

    Parameters of a block share one price as long as all of them; here each is told with its own bytes.
    """
    found: Times = Counter()
    with ExitStack() as stack:
        for method, kind in PRICED.items():
            stack.enter_context(patch.object(Rank, method, _noting(getattr(Rank, method), kind, found)))
        stack.enter_context(patch.object(parameters, "_moved_s", _alone))
        stack.enter_context(patch.object(price, "exchange_s", _told(found)))
        training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
        price_layout(plan.graph, plan.cluster, training, plan.mesh, plan.layout)
    return found


def _noting(priced: Callable[..., float], kind: str, found: Times) -> Callable[..., float]:
    def noted(rank: Rank, nbytes: float, sizes: list[int]) -> float:
        if max(sizes) > 1 and nbytes > 0.0:
            found[kind, round(nbytes)] += 1
        return priced(rank, nbytes, sizes)

    return noted


def _alone(rank: Rank, use: Any, element_bytes: float, start: Any, end: Any) -> float:
    return rank.bring_s(use.shape, element_bytes, start, end)


def _told(found: Times) -> Callable[..., Seconds]:
    """Exchanges inside an operator, each as often as its rule says."""

    def told(rank: Rank, rules: Any, sizes: dict[str, int]) -> Seconds:
        before = Counter(found)
        seconds = kernels.exchange_s(rank, rules, sizes)
        for rule in {rule.name: rule for rule in rules if rule.exchanges}.values():
            for exchange in rule.exchanges:
                nbytes = exchange.copies * size(sizes, exchange.dims)
                nbytes *= exchange.element_bytes or rank.activation_bytes
                kind = {"all_reduce": "all_reduce", "reduce_scatter": "all_reduce", "all_gather": "pass"}.get(
                    exchange.collective, "halo"
                )
                calls = round(exchange.forward_calls + exchange.backward_calls)
                before[kind, round(nbytes)] += calls
        found.clear()
        found.update(before)
        return seconds

    return told
