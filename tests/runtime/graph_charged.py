"""What the cost model charges for the layout of an operator graph: the collectives that it prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from shardwise.cost import Training, Turns, price_stage
from shardwise.cost.one_layout import kernels, parameters, price, price_layout
from shardwise.cost.one_layout.kernels import Seconds, size
from shardwise.cost.one_layout.pipeline import messages_of
from shardwise.cost.one_layout.rank import Rank, rank_of
from shardwise.graph import StagedLayout, scaled
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
    with _noted(found):
        training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
        price_layout(plan.graph, plan.cluster, training, plan.mesh, plan.layout)
    return found


@contextmanager
def _noted(found: Times) -> Iterator[None]:
    """Inside, collectives that are priced are counted in `found`."""
    with ExitStack() as stack:
        for method, kind in PRICED.items():
            stack.enter_context(patch.object(Rank, method, _noting(getattr(Rank, method), kind, found)))
        stack.enter_context(patch.object(parameters, "_moved_s", _alone))
        stack.enter_context(patch.object(price, "exchange_s", _told(found)))
        yield


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


def charged_in_stages(plan: GraphPlan) -> list[Times]:
    """The same of a rank of each stage of a plan with stages, what is sent to others among it: everything
    that happens in a pass for each micro-batch, and once what the price has at the end of the step.

    A gathered parameter is charged in both passes; here it is told once for each micro-batch, as above.
    """
    layout = plan.layout
    if not isinstance(layout, StagedLayout):
        raise AssertionError("a plan in stages")
    training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
    of_one = scaled(plan.graph, plan.graph.batch // layout.microbatches)
    messages = messages_of(of_one, rank_of(plan.cluster, training, plan.mesh), layout)
    blocks = [block for block in of_one.blocks for _ in range(block.repeat)]
    found = []
    for stage, (first, end) in enumerate(layout.spans):
        notes = _Notes()
        with notes.taken():
            price_stage(
                of_one, plan.cluster, training, plan.mesh, layout.stages[stage], first=first, end=end,
                turns=Turns(microbatches=layout.microbatches, stages=len(layout.spans)),
            )  # fmt: skip
        sent = [message.nbytes for message in messages[stage : stage + 1]]
        if any(op.parameters for block in blocks[:first] for op in block.operators):
            sent.append(messages[stage - 1].nbytes)
        for nbytes in sent:
            notes.passes["send", round(nbytes)] += 1
        many = {key: times * layout.microbatches for key, times in notes.passes.items()}
        found.append(Counter(many) + notes.once)
    return found


class _Notes:
    """What is priced of a stage: in the `passes` of a micro-batch, and `once` in the step."""

    def __init__(self) -> None:
        self.passes: Times = Counter()
        self.once: Times = Counter()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, prices are noted."""
        now: Times = Counter()
        with _noted(now), ExitStack() as stack:
            for name in ("_update_s", "_gradient_s"):
                own = self._apart(getattr(parameters, name), now)
                stack.enter_context(patch.object(parameters, name, own))
            yield
        self.passes += now

    def _apart(self, priced: Callable[..., float], now: Times) -> Callable[..., float]:
        """Notes under `once` what is done at the end of the step: gathering what others updated, and sums of
        gradients, but for those of parameters that are gathered for one reader."""

        def noted(rank: Rank, use: Any, *used: Any) -> float:
            before = Counter(now)
            gathered_s = parameters._gather_s(rank, use, use.used) if used else 0.0
            now.clear()
            seconds = priced(rank, use, *used)
            is_alone = bool(used) and used[0] is use.used
            if not (is_alone and gathered_s > 0.0):
                self.once += now
                now.clear()
            now.update(before)
            return seconds

        return noted
