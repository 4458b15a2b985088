"""The price of one layout: a walk over all operators of all blocks, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.one_layout.kernels import Seconds, compute_s, exchange_s, size, wanted
from shardwise.cost.one_layout.ledger import Ledger
from shardwise.cost.one_layout.parameters import Use, store, use_alone, use_shared
from shardwise.cost.one_layout.rank import Placements, Rank, gradient_held, rank_of, value_held
from shardwise.cost.training import Training
from shardwise.errors import InternalError
from shardwise.graph import (
    Block,
    BlockLayout,
    GraphLayout,
    Kept,
    OpGraph,
    OpNode,
    Rule,
    kept_of,
    local_sizes,
    work_of,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayoutPrice:
    """Step time and bytes of the driver's count on a rank; `seconds` and `nbytes` tell what they are for and
    sum up to them."""

    time_s: float
    memory_bytes: float
    seconds: Mapping[str, float]
    nbytes: Mapping[str, float]


def price_layout(
    graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh, layout: GraphLayout
) -> LayoutPrice:
    """What a layout of `graph` on `mesh` costs (docs/tracking.md)."""
    rank = rank_of(cluster, training, mesh)
    ledger = Ledger()
    walk = _Walk(rank, graph, ledger)
    blocks = [block for block in graph.blocks for _ in range(block.repeat)]
    for place, (block, lies) in enumerate(zip(blocks, layout.blocks, strict=True)):
        walk.block(block, lies, _reader_of_result(blocks, place))
    return _total(rank, ledger)


def _reader_of_result(blocks: list[Block], place: int) -> Block | None:
    """The block that reads a block's result: of repetitions, each of them says it is the block itself."""
    if blocks[place].repeat > 1:
        return blocks[place]
    return blocks[place + 1] if place + 1 < len(blocks) else None


def _total(rank: Rank, ledger: Ledger) -> LayoutPrice:
    """The whole step, with the host's part of it and the bytes that belong to no tensor."""
    efficiency = rank.machine.efficiency
    ledger.spend("host", rank.profile.host_step_s)
    ledger.spend("norm", 2.0 * log2(rank.mesh.devices) * rank.machine.tiers[-1].latency_s)
    time_s = ledger.step_s()
    seconds = dict(ledger.seconds)
    seconds["gradients"] = seconds.get("gradients", 0.0) + time_s - sum(ledger.seconds.values())
    nbytes = {**ledger.held, "temporaries": ledger.most_bytes}
    nbytes["fragmentation"] = sum(nbytes.values()) * efficiency.fragmentation_ratio
    communicators = 1 + sum(axis.size > 1 for axis in rank.mesh.axes)
    nbytes["context"] = efficiency.context_bytes + communicators * efficiency.communicator_bytes
    return LayoutPrice(time_s, sum(nbytes.values()), seconds, nbytes)


@dataclass(slots=True)
class _At:
    """A tensor as it lies somewhere: where it is held in full sight of the readers, whether it has a
    gradient, and whether what holds it keeps it for the backward pass."""

    shape: tuple[int, ...]
    placements: Placements
    has_gradient: bool
    is_kept: bool


class _Walk:
    """Block by block; what is known of the tensor between them."""

    def __init__(self, rank: Rank, graph: OpGraph, ledger: Ledger) -> None:
        self.rank, self.graph, self.ledger = rank, graph, ledger
        self.readers = Counter(
            parameter.name for block in graph.blocks for op in block.operators for parameter in op.parameters
        )
        self.result: _At | None = None
        self.met: set[str] = set()

    def block(self, block: Block, lies: BlockLayout, following: Block | None) -> None:
        """One repetition of a block."""
        one = _OneBlock(self, block, lies)
        if block.entry is not None:
            one.enter(self.result)
        for op in block.operators:
            one.operator(op)
        self.result = one.leave(following)
        self.ledger.end_block()


class _OneBlock:
    """One repetition in the making: `at` are the tensors that lie somewhere, by name."""

    def __init__(self, walk: _Walk, block: Block, lies: BlockLayout) -> None:
        self.walk, self.block, self.lies = walk, block, lies
        self.rank, self.ledger = walk.rank, walk.ledger
        self.is_again = lies.mode == "recomputed"
        self.kept: dict[str, Kept] = {op.name: kept_of(op) for op in block.operators}
        self.at: dict[str, _At] = {}
        self.again = self._made_again()
        self.met: set[str] = set()
        weights = {
            parameter.name: op.elements(parameter.dims)
            for op in block.operators
            for parameter in op.parameters
        }
        self.elements = sum(weights.values())

    def _reads(self, name: str) -> list[tuple[OpNode, int]]:
        return [
            (op, slot)
            for op in self.block.operators
            for slot, operand in enumerate(op.inputs)
            if operand.source == name
        ]

    def _keepers(self, name: str) -> bool:
        """Whether the backward pass of some reader reads the tensor."""
        return any(slot in self.kept[op.name].inputs for op, slot in self._reads(name))

    def _made_again(self) -> set[str]:
        """Operators whose forward pass a recomputation does once more."""
        if not self.is_again:
            return set()
        if not self.rank.profile.recompute_stops_early:
            return {op.name for op in self.block.operators}
        found: set[str] = set()
        for op in reversed(self.block.operators):
            own = self.kept[op.name]
            if (
                own.output
                or own.own
                or self._keepers(op.name)
                or any(reader.name in found for reader, _ in self._reads(op.name))
            ):
                found.add(op.name)
        return found

    def hold(self, what: str, nbytes: float) -> None:
        """Bytes kept for the backward pass, or made again before it."""
        if self.is_again:
            self.ledger.again_bytes += nbytes
        else:
            self.ledger.held[what] += nbytes

    def enter(self, result: _At | None) -> None:
        """Take the entry over as it lies after the block before."""
        name = self.block.entry
        if result is None or name is None or self.lies.tensors[name] != result.placements:
            raise InternalError(f"block {self.block.name} does not begin where the one before it ends")
        # Repetitions are alike: where a block trains, each of them has a gradient for its entry.
        trains = self.block.repeat > 1 and any(op.parameters for op in self.block.operators)
        self.at[name] = _At(result.shape, result.placements, result.has_gradient or trains, is_kept=True)
        if self.is_again or self._keepers(name):
            nbytes = self.rank.elements(result.shape, value_held(result.placements))
            self.ledger.held["activations"] += nbytes * self.rank.activation_bytes

    def leave(self, following: Block | None) -> _At | None:
        """Bring the result to where the next block reads it."""
        last = self.block.operators[-1]
        if following is None:
            return None
        made = self.at[last.name]
        keeps = {op.name: kept_of(op) for op in following.operators}
        is_kept = any(
            slot in keeps[op.name].inputs
            for op in following.operators
            for slot, operand in enumerate(op.inputs)
            if operand.source == following.entry
        )
        return self._settle(last, made, is_kept=is_kept)

    def _settle(self, op: OpNode, made: _At, *, is_kept: bool) -> _At:
        """From the operator that makes a tensor to where it lies for all of its readers."""
        placements = self.lies.tensors[op.name]
        there_s, back_s = self._between(made, placements)
        self.ledger.spend("conversions", there_s + back_s)
        reads = self._reads(op.name)
        if self.is_again and any(
            reader.name in self.again or slot in self.kept[reader.name].inputs for reader, slot in reads
        ):
            self.ledger.spend("recomputation", there_s)
        is_same = value_held(placements) == value_held(made.placements)
        if made.is_kept and not (is_same and is_kept):
            self.hold("activations", self._nbytes(made.shape, made.placements))
        return _At(made.shape, placements, made.has_gradient, is_kept)

    def _nbytes(self, shape: tuple[int, ...], placements: Placements) -> float:
        return self.rank.elements(shape, value_held(placements)) * self.rank.activation_bytes

    def _between(self, lies: _At, placements: Placements) -> tuple[float, float]:
        """Seconds from how a tensor lies to `placements`, and of its gradient back; both copies are needed
        in that moment where they differ."""
        rank, element = self.rank, self.rank.activation_bytes
        ways = [(value_held(lies.placements), value_held(placements))]
        if lies.has_gradient:
            ways.append((gradient_held(placements), gradient_held(lies.placements)))
        seconds = []
        for start, end in ways:
            seconds.append(rank.bring_s(lies.shape, element, start, end))
            if start != end:
                copies = rank.elements(lies.shape, start) + rank.elements(lies.shape, end)
                self.ledger.need(copies * element)
        return seconds[0], seconds[1] if lies.has_gradient else 0.0

    def operator(self, op: OpNode) -> None:
        """One operator: what it reads, computes, keeps, and hands on."""
        rules = self.lies.rules[op.name]
        sizes = local_sizes(op, rules, self.rank.mesh.ranks)
        data = [operand.source in self.walk.graph.inputs for operand in op.inputs]
        gradients = [
            not given and self.at[operand.source].has_gradient
            for given, operand in zip(data, op.inputs, strict=True)
        ]
        seconds = compute_s(self.rank, op, sizes, gradients)
        told = exchange_s(self.rank, rules, sizes)
        if not any(wanted(op, gradients)):
            told = Seconds(told.forward_s, 0.0)
        self._compute(op, seconds, told)
        placed = [tuple(rule.inputs[slot] for rule in rules) for slot in range(len(op.inputs))]
        for slot, operand in enumerate(op.inputs):
            if not data[slot]:
                self._read(op, slot, self.at[operand.source], placed[slot], seconds)
        output = tuple(rule.output for rule in rules)
        working = self._nbytes(op.shape(op.output), output) + sum(
            self._nbytes(op.shape(operand.dims), placements)
            for operand, placements, given in zip(op.inputs, placed, data, strict=True)
            if not given
        )
        self.ledger.need(working)
        self._keep_own(op, sizes, placed, data)
        self._parameters(op, rules, seconds, working)
        self._hand_on(op, output, any(gradients) or bool(op.parameters))

    def _compute(self, op: OpNode, seconds: Seconds, told: Seconds) -> None:
        self.ledger.spend("forward", seconds.forward_s)
        self.ledger.compute_backward("backward", seconds.backward_s)
        self.ledger.spend("exchanges", told.forward_s + told.backward_s)
        if op.name in self.again:
            self.ledger.compute_backward("recomputation", seconds.forward_s)
            self.ledger.spend("recomputation", told.forward_s)

    def _read(self, op: OpNode, slot: int, lies: _At, placements: Placements, seconds: Seconds) -> None:
        """Bring a tensor to one of its readers, which may keep it as it reads it."""
        there_s, back_s = self._between(lies, placements)
        is_attention = any(work.kind == "attention" for work in work_of(op))
        profile = self.rank.profile
        overlap = profile.context_overlap if is_attention else profile.tensor_overlap
        back_overlap = overlap + (0.0 if is_attention else profile.tensor_backward_overlap)
        part = 1.0 / len(op.inputs)
        there_hidden_s = min(overlap * there_s, part * seconds.forward_s)
        back_hidden_s = min(back_overlap * back_s, part * seconds.backward_s)
        slower = self.rank.slowdown - 2.0
        self.ledger.spend("conversions", there_s + slower * there_hidden_s)
        self.ledger.spend("conversions", back_s + slower * back_hidden_s)
        self.ledger.busy_s += back_hidden_s
        keeps = slot in self.kept[op.name].inputs
        if self.is_again and (op.name in self.again or keeps):
            self.ledger.spend("recomputation", there_s + slower * there_hidden_s)
            self.ledger.busy_s += there_hidden_s
        is_same = value_held(lies.placements) == value_held(placements)
        source = op.inputs[slot].source
        lies_with_maker = source not in self.lies.tensors
        if keeps and not is_same:
            self.hold("activations", self._nbytes(lies.shape, placements))
        if lies_with_maker and (lies.is_kept or (keeps and is_same)):
            self.hold("activations", self._nbytes(lies.shape, lies.placements))

    def _keep_own(
        self, op: OpNode, sizes: dict[str, int], placed: list[Placements], data: list[bool]
    ) -> None:
        """Statistics and masks, scores of unfused attention, and data that the backward pass reads."""
        kept = self.kept[op.name]
        nbytes = sum(
            size(sizes, dims) * (element_bytes or self.rank.activation_bytes)
            for dims, element_bytes in kept.own
        )
        if self.rank.fused_attention is None:
            # Two 16-bit tensors and a mask for each score (docs/cost-model.md).
            nbytes += 5.0 * sum(
                size(sizes, (*work.batch, *work.m, *work.n))
                for work in work_of(op)
                if work.kind == "attention"
            )
        for slot, operand in enumerate(op.inputs):
            if data[slot] and slot in kept.inputs:
                nbytes += self._nbytes(op.shape(operand.dims), placed[slot])
        self.hold("activations", nbytes)

    def _hand_on(self, op: OpNode, output: Placements, has_gradient: bool) -> None:
        """Where the result lies for its readers: with its maker for one, in a place of its own for several.
        What nobody reads later is the loss, or waits for the next block."""
        made = _At(op.shape(op.output), output, has_gradient, self.kept[op.name].output)
        self.at[op.name] = made
        if len(self._reads(op.name)) > 1:
            is_kept = self._keepers(op.name)
            self.at[op.name] = self._settle(op, made, is_kept=is_kept)
            if is_kept:
                self.hold("activations", self._nbytes(made.shape, self.lies.tensors[op.name]))

    def _parameters(self, op: OpNode, rules: tuple[Rule, ...], seconds: Seconds, working: float) -> None:
        elements = [op.elements(parameter.dims) for parameter in op.parameters]
        for slot, parameter in enumerate(op.parameters):
            use = Use(
                shape=op.shape(parameter.dims),
                stored=self.lies.stored[parameter.name],
                used=tuple(rule.parameters[slot] for rule in rules),
                share=elements[slot] / sum(elements),
                bucket=elements[slot] / self.elements,
                forward_s=seconds.forward_s,
                backward_s=seconds.backward_s,
                working_bytes=working,
            )
            readers = self.walk.readers[parameter.name]
            if readers == 1:
                store(self.rank, self.ledger, use)
                use_alone(self.rank, self.ledger, use)
                continue
            is_first = parameter.name not in (self.walk.met if self.block.repeat == 1 else self.met)
            self.walk.met.add(parameter.name)
            self.met.add(parameter.name)
            if is_first:
                store(self.rank, self.ledger, use)
            shared = self.lies.used[parameter.name]
            use_shared(self.rank, self.ledger, use, shared, readers=readers if is_first else 0)
