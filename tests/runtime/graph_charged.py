"""What the cost model charges for the layout of an operator graph: the messages that it prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from shardwise.cost import StepCounts, Training
from shardwise.cost.one_layout import estimate_layout, estimate_stage
from shardwise.cost.one_layout import layout as parameters
from shardwise.cost.one_layout import layout as price
from shardwise.cost.one_layout import rank as kernels
from shardwise.cost.one_layout.layout import ParameterUse, Place, StepLedger
from shardwise.cost.one_layout.pipeline import messages_of
from shardwise.cost.one_layout.rank import PassSeconds, Rank, rank_of, size
from shardwise.graph import OpGraph, StagedLayout, scaled
from shardwise.plans import GraphPlan

Times = Counter[tuple[str, int]]
"""How often a step has a message of a kind and of so many bytes."""

ESTIMATED = {"all_gather_s": "pass", "all_reduce_s": "all_reduce", "all_to_all_s": "all_to_all"}

ONCE = {"_update_s": "update", "_summed_s": "sum", "_reduce_scatter_s": "sum"}
"""What is done once in the step: others' updates are gathered, and gradients are summed; but those of a
gathered parameter with one reader are scattered behind each pass."""


@dataclass(frozen=True, slots=True)
class Note:
    """A collective that is priced: whether it is a reduce-scatter (over gloo an all-reduce), along which
    axes, what it is for (None, in every pass of a micro-batch), in which block and of which parameter."""

    kind: str
    nbytes: int
    is_scattered: bool
    axes: tuple[int, ...]
    what: str | None
    block: int
    parameter: int


@dataclass(slots=True)
class Notes:
    """The collectives that are priced, in order. The `read_again` are operators whose backward pass reads
    their weight, which is gathered for it too."""

    read_again: frozenset[str] = frozenset()
    found: list[Note] = field(default_factory=list)
    is_scattered: bool = False
    axes: tuple[int, ...] = ()
    what: str | None = None
    block: int = 0
    parameter: int = 0
    once_now: tuple[str, ...] = ()
    at: Place = None
    slot: int = 0

    def note(self, kind: str, nbytes: float, times: int = 1) -> None:
        place = self.axes, self.what, self.block, self.parameter
        self.found += [Note(kind, round(nbytes), self.is_scattered, *place)] * times

    @property
    def passes(self) -> Times:
        """Messages of each micro-batch."""
        return Counter((note.kind, note.nbytes) for note in self.found if note.what is None)

    @property
    def once(self) -> Times:
        """Messages at the end of a step: parameters of a block whose gradients need the same travel together,
        and so do those that others updated. (Of a parameter that needs the same twice each time is one.)"""
        nbytes: Counter[tuple[object, ...]] = Counter()
        met: Counter[tuple[object, ...]] = Counter()
        for note in self.found:
            if note.what is not None:
                alike = (note.kind, note.is_scattered, note.axes, note.what, note.block)
                met[*alike, note.parameter] += 1
                nbytes[*alike, met[*alike, note.parameter]] += note.nbytes
        return Counter((str(kind), total) for (kind, *_), total in nbytes.items())

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, prices are noted. Each parameter is told with its own bytes, and not as its share of a
        message as long as all of a block."""
        with ExitStack() as stack:
            for method, kind in ESTIMATED.items():
                stack.enter_context(patch.object(Rank, method, self._noting(getattr(Rank, method), kind)))
            scattered = self._scattering(Rank.reduce_scatter_s)
            stack.enter_context(patch.object(Rank, "reduce_scatter_s", scattered))
            stack.enter_context(patch.object(Rank, "group", self._along(Rank.group)))
            for name, once in (("use_alone", ("_update_s", "_summed_s")), ("use_shared", tuple(ONCE))):
                stack.enter_context(patch.object(price, name, self._of_one(getattr(price, name), once)))
            for name in ONCE:
                apart = self._apart(getattr(parameters, name), name)
                stack.enter_context(patch.object(parameters, name, apart))
            gathered = self._gathering(parameters._gather_s)
            stack.enter_context(patch.object(parameters, "_gather_s", gathered))
            stack.enter_context(patch.object(parameters, "_moved_s", _by_itself))
            stack.enter_context(patch.object(price, "collective_s", self._noted_exchange))
            yield

    def _noting(self, estimated: Callable[..., float], kind: str) -> Callable[..., float]:
        def noted(rank: Rank, nbytes: float, sizes: list[int]) -> float:
            if max(sizes) > 1 and nbytes > 0.0:
                self.note(kind, nbytes)
            return estimated(rank, nbytes, sizes)

        return noted

    def _scattering(self, estimated: Callable[..., float]) -> Callable[..., float]:
        def noted(*arguments: Any) -> float:
            self.is_scattered = True
            seconds = estimated(*arguments)
            self.is_scattered = False
            return seconds

        return noted

    def _along(self, grouped: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def group(rank: Rank, axes: list[int]) -> list[int]:
            self.axes = tuple(axes)
            return grouped(rank, axes)

        return group

    def _of_one(self, estimated: Callable[..., None], once: tuple[str, ...]) -> Callable[..., None]:
        def noted(rank: Rank, ledger: StepLedger, *arguments: Any, **more: Any) -> None:
            self.once_now = once
            self.slot = self.slot + 1 if ledger.at == self.at else 0
            self.at = ledger.at
            self.block = ledger.at[0] if ledger.at else 0
            self.parameter += 1
            estimated(rank, ledger, *arguments, **more)

        return noted

    def _gathering(self, estimated: Callable[..., float]) -> Callable[..., float]:
        """Charged in both passes, and done in both where the backward pass reads what is gathered: a weight,
        but no bias behind it."""

        def noted(*arguments: Any) -> float:
            before = len(self.found)
            seconds = estimated(*arguments)
            if self.at is not None and self.at[1] in self.read_again and not self.slot:
                self.found += self.found[before:]
            return seconds

        return noted

    def _apart(self, estimated: Callable[..., float], name: str) -> Callable[..., float]:
        def noted(*arguments: Any) -> float:
            self.what = ONCE[name] if name in self.once_now else None
            seconds = estimated(*arguments)
            self.what = None
            return seconds

        return noted

    def _noted_exchange(self, rank: Rank, rules: Any, sizes: dict[str, int]) -> PassSeconds:
        """Exchanges inside an operator, each as often as its rule says."""
        before = list(self.found)
        seconds = kernels.collective_s(rank, rules, sizes)
        self.found = before
        for rule in {rule.name: rule for rule in rules if rule.collectives}.values():
            for call in rule.collectives:
                nbytes = call.copies * size(sizes, call.dims)
                nbytes *= call.element_bytes or rank.activation_bytes
                kind = {"all_reduce": "all_reduce", "reduce_scatter": "all_reduce", "all_gather": "pass"}.get(
                    call.collective, "halo"
                )
                self.note(kind, nbytes, round(call.forward_calls + call.backward_calls))
        return seconds


def _by_itself(rank: Rank, use: ParameterUse, element_bytes: float, start: Any, end: Any) -> float:
    return rank.redistribute_s(use.shape, element_bytes, start, end)


def _read_again(graph: OpGraph) -> frozenset[str]:
    """Products and norms of what has a gradient: that of data has none."""
    return frozenset(
        op.name
        for block in graph.blocks
        for op in block.operators
        if op.kind in ("linear", "layer_norm") and op.inputs[0].source not in graph.inputs
    )


def predicted(plan: GraphPlan) -> Times:
    """Every message that is priced for the plan between more than one rank, each as often as the step has it,
    on a backend that has all collectives."""
    notes = Notes(_read_again(plan.graph))
    with notes.taken():
        training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
        estimate_layout(plan.graph, plan.cluster, training, plan.mesh, plan.layout)
    return notes.passes + notes.once


def predicted_in_stages(plan: GraphPlan) -> list[Times]:
    """The same of a rank of each stage of a plan with stages, what is sent to others among it: everything
    that happens in a pass for each micro-batch, and once what the price has at the end of the step.

    A gathered parameter is told for each micro-batch, as above.
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
        notes = Notes(_read_again(plan.graph))
        with notes.taken():
            estimate_stage(
                of_one, plan.cluster, training, plan.mesh, layout.stages[stage], first=first, end=end,
                counts=StepCounts(microbatches=layout.microbatches, stages=len(layout.spans)),
            )  # fmt: skip
        sent = [message.nbytes for message in messages[stage : stage + 1]]
        if any(op.parameters for block in blocks[:first] for op in block.operators):
            sent.append(messages[stage - 1].nbytes)
        passes = notes.passes + Counter(("send", round(nbytes)) for nbytes in sent)
        found.append(_times(passes, layout.microbatches) + notes.once)
    return found


def _times(messages: Times, count: int) -> Times:
    return Counter({key: times * count for key, times in messages.items()})
