"""The collectives that the cost model counts for the layout of an operator graph, with their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any
from unittest.mock import patch

from tests.reference.one_layout import estimate_layout, estimate_stage
from tests.reference.one_layout import layout as parameters
from tests.reference.one_layout import layout as price
from tests.reference.one_layout import rank as kernels
from tests.reference.one_layout.layout import ParameterUse, Place, StepLedger
from tests.reference.one_layout.pipeline import messages_of
from tests.reference.one_layout.rank import PassSeconds, Rank, rank_of, size

from shardwise.cost import StepCounts, Training
from shardwise.graph import OpGraph, StagedLayout, scaled
from shardwise.plans import Plan

Times = Counter[tuple[str, int]]
"""How often a step has a collective of this kind and number of bytes."""

ESTIMATED = {"all_gather_s": "pass", "all_reduce_s": "all_reduce", "all_to_all_s": "all_to_all"}

ONCE = {"_update_s": "update", "_summed_s": "sum", "_reduce_scatter_s": "sum"}
"""Work that happens once per step: updated shares are gathered, gradients are summed. The exception is a
gathered parameter with one reader: its gradient is reduce-scattered in each backward pass."""


@dataclass(frozen=True, slots=True)
class Note:
    """An estimated collective: whether it is a reduce-scatter (an all-reduce over gloo), its mesh axes, its
    purpose (None: part of every micro-batch), its block and its parameter."""

    kind: str
    nbytes: int
    is_scattered: bool
    axes: tuple[int, ...]
    what: str | None
    block: int
    parameter: int


@dataclass(slots=True)
class Notes:
    """The estimated collectives in order. `read_again` names operators whose backward pass reads their
    weight, which is gathered for it too."""

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
        """Collectives of each micro-batch."""
        return Counter((note.kind, note.nbytes) for note in self.found if note.what is None)

    @property
    def once(self) -> Times:
        """Collectives at the end of a step. Parameters of a block whose gradients need the same collective
        share one, and so do updated shares. (If one parameter needs it twice, the second is separate.)"""
        nbytes: Counter[tuple[object, ...]] = Counter()
        met: Counter[tuple[object, ...]] = Counter()
        for note in self.found:
            if note.what is not None:
                alike = (note.kind, note.is_scattered, note.axes, note.what, note.block)
                met[*alike, note.parameter] += 1
                nbytes[*alike, met[*alike, note.parameter]] += note.nbytes
        return Counter((str(kind), total) for (kind, *_), total in nbytes.items())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, estimates are recorded. A parameter is recorded with its own bytes, not with its share of
        the message of its block."""
        with ExitStack() as stack:
            for method, kind in ESTIMATED.items():
                stack.enter_context(patch.object(Rank, method, self._noting(getattr(Rank, method), kind)))
            scattered = self._scattering(Rank.reduce_scatter_s)
            stack.enter_context(patch.object(Rank, "reduce_scatter_s", scattered))
            stack.enter_context(patch.object(Rank, "group", self._along(Rank.group)))
            for name, once in (("use_alone", ("_update_s", "_summed_s")), ("use_shared", tuple(ONCE))):
                stack.enter_context(
                    patch.object(price, name, self._of_one_parameter(getattr(price, name), once))
                )
            for name in ONCE:
                marked = self._once_per_step(getattr(parameters, name), name)
                stack.enter_context(patch.object(parameters, name, marked))
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

    def _of_one_parameter(self, estimated: Callable[..., None], once: tuple[str, ...]) -> Callable[..., None]:
        def noted(rank: Rank, ledger: StepLedger, *arguments: Any, **more: Any) -> None:
            self.once_now = once
            self.slot = self.slot + 1 if ledger.at == self.at else 0
            self.at = ledger.at
            self.block = ledger.at[0] if ledger.at else 0
            self.parameter += 1
            estimated(rank, ledger, *arguments, **more)

        return noted

    def _gathering(self, estimated: Callable[..., float]) -> Callable[..., float]:
        """Estimated for both passes; carried out in both where the backward pass reads the gathered tensor (a
        weight, but not the bias after it)."""

        def noted(*arguments: Any) -> float:
            before = len(self.found)
            seconds = estimated(*arguments)
            if self.at is not None and self.at[1] in self.read_again and not self.slot:
                self.found += self.found[before:]
            return seconds

        return noted

    def _once_per_step(self, estimated: Callable[..., float], name: str) -> Callable[..., float]:
        def noted(*arguments: Any) -> float:
            self.what = ONCE[name] if name in self.once_now else None
            seconds = estimated(*arguments)
            self.what = None
            return seconds

        return noted

    def _noted_exchange(self, rank: Rank, rules: Any, sizes: dict[str, int]) -> PassSeconds:
        """Collectives inside an operator, each as often as its rule says."""
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
    """Linear layers and norms whose input has a gradient; an input of the graph has none."""
    return frozenset(
        op.name
        for block in graph.blocks
        for op in block.operators
        if op.kind in ("linear", "layer_norm") and op.inputs[0].source not in graph.inputs
    )


def predicted(plan: Plan) -> Times:
    """Every estimated collective between two or more ranks, as often as a step has it, on a backend that has
    all collectives."""
    notes = Notes(_read_again(plan.graph))
    with notes.recording():
        training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
        estimate_layout(plan.graph, plan.cluster, training, plan.mesh, plan.operators)
    return notes.passes + notes.once


def predicted_in_stages(plan: Plan) -> list[Times]:
    """The same for a rank of each stage of a staged plan, with its messages to other stages: collectives of a
    pass count for each micro-batch, those at the end of the step count once.

    A gathered parameter counts for each micro-batch, as above.
    """
    (pipeline,) = plan.best.layout.pipelines
    blocks_of = [stage.operators.blocks for stage in pipeline.stages if stage.operators is not None]
    layout = StagedLayout(
        ranks=plan.mesh.ranks, blocks=tuple(chain.from_iterable(blocks_of)),
        cuts=tuple(accumulate(map(len, blocks_of[:-1]))), microbatches=pipeline.microbatches,
        schedule=plan.best.layout.schedule,
    )  # fmt: skip
    training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
    of_one = scaled(plan.graph, plan.graph.batch // layout.microbatches)
    messages = messages_of(of_one, rank_of(plan.cluster, training, plan.mesh), layout)
    blocks = [block for block in of_one.blocks for _ in range(block.repeat)]
    found = []
    for stage, (first, end) in enumerate(layout.spans):
        notes = Notes(_read_again(plan.graph))
        with notes.recording():
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
