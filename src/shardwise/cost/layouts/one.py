"""The cost of one layout of an operator graph, or of one stage of it, with its parts by purpose and operator.

`estimate_layout` takes a whole graph, `estimate_stage` the blocks of one stage. The costs are the terms of
`block_terms`, which are those of the search, with each variable fixed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.layouts.block import BlockContext, Structure, Term, block_terms
from shardwise.cost.layouts.chain import fixed_costs, next_saves_entry, shared_parameters, structures_of
from shardwise.cost.layouts.context import CostContext, When, cost_context_of
from shardwise.cost.training import WHOLE_BATCH, StepCounts, Training
from shardwise.errors import InternalError
from shardwise.graph import BlockLayout, GraphLayout, OpGraph

# Estimates

Place = tuple[int, str] | None
"""A block of the graph, repetitions counted, and an operator of it; None for costs of no operator."""


@dataclass(frozen=True, slots=True)
class Charge:
    """Seconds that an operator spends on one purpose, per pass of a micro-batch or once per step."""

    place: Place
    what: str
    when: When
    seconds: float


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """Step time in seconds and bytes of a rank, as the driver counts them, with their parts.

    `seconds` and `nbytes` are parts that sum to `time_s` and `memory_bytes`. `memory_bytes` are all saved
    tensors plus the largest temporaries, as in the frontier search; at most `at_once_bytes` of them exist at
    one moment.

    A micro-batch takes `forward_s` and `backward_s`; `end_s` is the rest of the step after the last of them.
    `charges` are the same by operator, in the order of operators: those of each pass sum to it, those of the
    step to `end_s`. `hidden_s` of gradient synchronisation overlap with the last backward pass.
    """

    time_s: float
    memory_bytes: float
    at_once_bytes: float
    seconds: Mapping[str, float]
    nbytes: Mapping[str, float]
    forward_s: float
    backward_s: float
    end_s: float
    charges: tuple[Charge, ...]
    hidden_s: float


def estimate_layout(
    graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh, layout: GraphLayout
) -> LayoutEstimate:
    """Costs of a layout of `graph` on `mesh` (docs/concepts/pareto-search.md)."""
    blocks = sum(block.repeat for block in graph.blocks)
    return estimate_stage(graph, cluster, training, mesh, layout, first=0, end=blocks, counts=WHOLE_BATCH)


def estimate_stage(
    graph: OpGraph,
    cluster: Cluster,
    training: Training,
    mesh: Mesh,
    layout: GraphLayout,
    *,
    first: int,
    end: int,
    counts: StepCounts,
) -> LayoutEstimate:
    """Costs of `layout`, a layout of the blocks in [first, end) of `graph` on `mesh`, repetitions counted.

    Sizes are those of a micro-batch. InternalError where blocks have different placements for one tensor.
    """
    context = cost_context_of(cluster, mesh, training, counts)
    structures = structures_of(graph, training)
    homes = [home for home, block in enumerate(graph.blocks) for _ in range(block.repeat)]
    _check_borders([structures[home] for home in homes[first:end]], layout)
    ledger = _Ledger(counts)
    known: dict[tuple[int, bool, int], _BlockSums] = {}
    for place, block_layout in zip(range(first, end), layout.blocks, strict=True):
        # Another stage saves a copy of its own.
        home, is_last = homes[place], place + 1 == end < len(homes)
        key = home, is_last, id(block_layout)  # equal repetitions share one record
        if key not in known:
            block_context = BlockContext(
                next_saves_entry=next_saves_entry(structures, home) and not is_last,
                shared=shared_parameters(graph, home),
            )
            known[key] = _block_sums(context, structures[home], block_context, block_layout)
        ledger.add(place, known[key])
    return ledger.estimate(context)


def _check_borders(structures: list[Structure], layout: GraphLayout) -> None:
    """InternalError where an entry or a skip tensor has other placements than its producer left it in."""
    made: dict[str, Any] = {}
    result: Any = None
    for structure, own in zip(structures, layout.blocks, strict=True):
        block = structure.block
        for tensor in structure.tensors:
            before = result if tensor.is_entry else made.get(tensor.name) if tensor.is_skip_input else None
            if before is not None and own.tensors[tensor.name] != before:
                raise InternalError(
                    f"block {block.name} has another placement for {tensor.name} than its producer"
                )
        made |= {name: own.tensors[name] for name in structure.skip_outputs}
        result = own.tensors.get(block.operators[-1].name)


# Sums over a block


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Bytes of a tensor that exists since the operator of this `order`, or of temporaries at that moment;
    recomputed ones exist within their `block` only."""

    order: int
    block: int
    nbytes: float
    is_recomputed: bool = False


@dataclass(slots=True)
class _BlockSums:
    """Costs of one repetition of a block: seconds by operator, purpose and pass, bytes by purpose. The
    `order` of bytes counts from the operator before the block's first."""

    operators: int
    spent: defaultdict[tuple[str, str, When], float] = field(default_factory=lambda: defaultdict(float))
    held: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    saved: list[_Bytes] = field(default_factory=list)
    needs: list[_Bytes] = field(default_factory=list)
    computed_s: float = 0.0
    busy_s: float = 0.0
    summed_s: float = 0.0
    late_s: float = 0.0
    recomputed_bytes: float = 0.0
    peak_bytes: float = 0.0


def _block_sums(
    context: CostContext, structure: Structure, block_context: BlockContext, layout: BlockLayout
) -> _BlockSums:
    """The terms of a block in the order of its operators, and their sums."""
    sums = _BlockSums(len(structure.operators))
    terms = block_terms(context, structure, block_context, layout)
    for term in sorted(terms, key=lambda each: each.at):
        _add(sums, term, structure.operators[max(term.at, 0)].name)
    return sums


def _add(sums: _BlockSums, term: Term, operator: str) -> None:
    columns = term.columns
    for what, when, seconds in columns.spent:
        sums.spent[operator, what, when] += _number(seconds)
    for what, nbytes in columns.held:
        sums.held[what] += _number(nbytes)
    for each in columns.saved:
        if nbytes := _number(each.nbytes):
            sums.saved.append(_Bytes(each.since + 1, 0, nbytes, each.is_recomputed))
    sums.computed_s += _number(columns.computed_s)
    sums.busy_s += _number(columns.busy_s)
    sums.summed_s += _number(columns.summed_s)
    sums.late_s += _number(columns.late_s)
    sums.recomputed_bytes += _number(columns.recomputed_bytes)
    sums.peak_bytes = max(sums.peak_bytes, _number(columns.peak_bytes))
    moment = max(_number(columns.peak_bytes), _number(term.copies_bytes))
    if moment:
        sums.needs.append(_Bytes(term.at + 1, 0, moment))


def _number(value: Any) -> float:
    """The number in columns of one element."""
    number: float = np.asarray(value, dtype=np.float64).item()
    return number


# Sums over a stage


class _Ledger:
    """Seconds and bytes of a step while the blocks of a stage are added.

    `seconds` are per step and purpose, `passes` per micro-batch and pass. Of a micro-batch's backward
    computation `computed_s`, `busy_s` overlap with communication other than gradient synchronisation.
    Gradient synchronisation takes `summed_s`, of which `late_s` cannot overlap.
    """

    def __init__(self, counts: StepCounts) -> None:
        self.counts = counts
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.passes: defaultdict[When, float] = defaultdict(float)
        self.charges: list[Charge] = []
        self.resident: defaultdict[str, float] = defaultdict(float)
        self.computed_s = self.busy_s = self.summed_s = self.late_s = 0.0
        self.most_bytes = 0.0
        self.saved: list[_Bytes] = []
        self.needs: list[_Bytes] = []
        self._order = self._block = 0

    def spend(self, place: Place, what: str, when: When, seconds: float) -> None:
        """Add seconds of a pass of each micro-batch, or of the step."""
        self.seconds[what] += seconds * (1 if when == "step" else self.counts.microbatches)
        self.passes[when] += seconds
        self.charges.append(Charge(place, what, when, seconds))

    def add(self, place: int, sums: _BlockSums) -> None:
        """Add the next block, which is number `place` of the graph."""
        for (operator, what, when), seconds in sums.spent.items():
            self.spend((place, operator), what, when, seconds)
        for what, nbytes in sums.held.items():
            self.resident[what] += nbytes
        for added, own in ((self.saved, sums.saved), (self.needs, sums.needs)):
            added += [
                _Bytes(self._order + each.order, self._block, each.nbytes, each.is_recomputed) for each in own
            ]
        saved_bytes = sum(each.nbytes for each in sums.saved if not each.is_recomputed)
        self.resident["activations"] += saved_bytes * self.counts.in_flight
        self.most_bytes = max(self.most_bytes, sums.recomputed_bytes + sums.peak_bytes)
        self.computed_s += sums.computed_s
        self.busy_s += sums.busy_s
        self.summed_s += sums.summed_s
        self.late_s += sums.late_s
        self._order += sums.operators
        self._block += 1

    def estimate(self, context: CostContext) -> LayoutEstimate:
        """The estimate of the whole step, with the costs that no layout changes."""
        counts, fixed = self.counts, fixed_costs(context)
        self.spend(None, "host", "step", fixed.host_s)
        self.spend(None, "norm", "step", fixed.norm_s)
        if counts.stages > 1:
            self.spend(None, "sends", "forward", counts.sent_forward_s)
            self.spend(None, "sends", "backward", counts.sent_backward_s)
            self.resident["buffers"] += fixed.buffer_bytes
        # Gradients overlap with the backward computation of the last micro-batch.
        exposed_s = max(self.late_s, self.summed_s - self.computed_s + self.busy_s)
        self.spend(None, "gradients", "step", exposed_s)
        nbytes = {**self.resident, "temporaries": self.most_bytes}
        ratio = context.machine.efficiency.fragmentation_ratio
        nbytes["fragmentation"] = sum(nbytes.values()) * ratio
        nbytes["context"] = fixed.context_bytes
        return LayoutEstimate(
            time_s=sum(self.seconds.values()),
            memory_bytes=sum(nbytes.values()),
            at_once_bytes=self.at_once_bytes() * (1.0 + ratio) + fixed.context_bytes,
            seconds=dict(self.seconds),
            nbytes=nbytes,
            forward_s=self.passes["forward"],
            backward_s=self.passes["backward"],
            end_s=self.passes["step"],
            charges=tuple(self.charges),
            hidden_s=self.summed_s - exposed_s,
        )

    def at_once_bytes(self) -> float:
        """The most bytes of tensors at one moment, while an operator runs in either pass.

        It counts the tensors that this operator and those before it save for this micro-batch, and all saved
        tensors of the others.
        """
        saved, recomputed = (
            sorted(
                (each for each in self.saved if each.is_recomputed == is_recomputed),
                key=lambda each: each.order,
            )
            for is_recomputed in (False, True)
        )
        all_saved = sum(each.nbytes for each in saved)
        always = sum(self.resident.values()) - all_saved
        most, there, own = always + all_saved, 0.0, 0.0
        block = at = made = 0
        for need in sorted(self.needs, key=lambda each: each.order):
            while at < len(saved) and saved[at].order <= need.order:
                there += saved[at].nbytes
                at += 1
            if need.block != block:
                block, own = need.block, 0.0
            while made < len(recomputed) and recomputed[made].order <= need.order:
                own += recomputed[made].nbytes if recomputed[made].block == block else 0.0
                made += 1
            most = max(most, always + there + own + need.nbytes)
        return most
