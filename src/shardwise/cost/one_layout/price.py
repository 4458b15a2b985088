"""The price of one layout: a walk over all operators of all blocks, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import log2

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.one_layout.kernels import Seconds, compute_s, exchange_s, size, wanted
from shardwise.cost.one_layout.ledger import Charge, Ledger
from shardwise.cost.one_layout.parameters import Use, store, use_alone, use_shared
from shardwise.cost.one_layout.rank import Placements, Rank, gradient_held, rank_of, value_held
from shardwise.cost.training import Training
from shardwise.cost.turns import WHOLE_BATCH, Turns
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
    loans_of,
    local_sizes,
    tensor_shapes,
    work_of,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayoutPrice:
    """Step time and bytes of the driver's count on a rank; `seconds` and `nbytes` tell what they are for and
    sum up to them. `memory_bytes` are all that is kept and the largest temporaries, as frontiers are tracked;
    `at_once_bytes` of them are there at one moment at most, as operators work one after the other.

    Of the seconds a micro-batch takes `forward_s` and `backward_s`; `end_s` are what is left of the step
    after the last of them. `charges` say the same operator by operator, in the order of the walk: those of
    each pass sum to it, those of the step to `end_s`. For `hidden_s` gradients are summed beside the last
    backward pass, which costs nothing.
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


def price_layout(
    graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh, layout: GraphLayout
) -> LayoutPrice:
    """What a layout of `graph` on `mesh` costs (docs/tracking.md)."""
    blocks = sum(block.repeat for block in graph.blocks)
    return price_stage(graph, cluster, training, mesh, layout, first=0, end=blocks, turns=WHOLE_BATCH)


def price_stage(
    graph: OpGraph,
    cluster: Cluster,
    training: Training,
    mesh: Mesh,
    layout: GraphLayout,
    *,
    first: int,
    end: int,
    turns: Turns,
) -> LayoutPrice:
    """What `layout` of the blocks from `first` to before `end` of `graph`, repetitions counted, costs on
    `mesh`, where sizes are those of a micro-batch."""
    rank = rank_of(cluster, training, mesh)
    ledger = Ledger(turns)
    walk = _Walk(rank, graph, ledger)
    blocks = [block for block in graph.blocks for _ in range(block.repeat)]
    if first:
        shapes = tensor_shapes(graph)[walk.homes[first]]
        walk.result = _handed_over(blocks[:first], blocks[first], layout.blocks[0], shapes)
    for place, lies in zip(range(first, end), layout.blocks, strict=True):
        walk.block(place, blocks[place], lies, _reader_of_result(blocks, place, end, walk.loans.names))
    return _total(rank, ledger)


@dataclass(frozen=True, slots=True)
class _Reader:
    """What becomes of a block's result: whether another block reads it, and keeps it for its backward
    pass."""

    is_there: bool
    keeps: bool


def _reader_of_result(blocks: list[Block], place: int, end: int, lent: Collection[str]) -> _Reader:
    """Of repetitions, each says that the block itself reads its result; another stage keeps a copy of its
    own. An entry that is lent is held."""
    if place + 1 == end:
        return _Reader(is_there=end < len(blocks), keeps=False)
    following = blocks[place] if blocks[place].repeat > 1 else blocks[place + 1]
    kept = {op.name: kept_of(op) for op in following.operators}
    keeps = any(
        slot in kept[op.name].inputs
        for op in following.operators
        for slot, operand in enumerate(op.inputs)
        if operand.source == following.entry
    )
    return _Reader(is_there=True, keeps=keeps or following.entry in lent)


def _handed_over(
    before: list[Block], block: Block, lies: BlockLayout, shapes: Mapping[str, tuple[int, ...]]
) -> _At:
    """The entry of the first block of a stage, as the stage before it hands it over."""
    name = block.entry
    if name is None:
        raise InternalError(f"block {block.name} reads nothing of the stage before it")
    trains = any(op.parameters for each in before for op in each.operators)
    return _At(shapes[name], lies.tensors[name], trains, is_kept=False, since=0)


def _total(rank: Rank, ledger: Ledger) -> LayoutPrice:
    """The whole step, with the host's part of it and the bytes that belong to no tensor."""
    efficiency, stages = rank.machine.efficiency, ledger.turns.stages
    ledger.at = None
    ledger.spend("host", rank.profile.host_step_s, "step")
    joined = 2.0 * log2(stages * rank.mesh.devices)
    ledger.spend("norm", joined * rank.machine.tiers[-1].latency_s, "step")
    if stages > 1:
        ledger.spend("sends", ledger.turns.sent_forward_s, "forward")
        ledger.spend("sends", ledger.turns.sent_backward_s, "backward")
        ledger.held["buffers"] += ledger.turns.buffer_bytes
    shown_s = ledger.shown_s()
    ledger.seconds["gradients"] += shown_s
    seconds = dict(ledger.seconds)
    nbytes = {**ledger.held, "temporaries": ledger.most_bytes}
    nbytes["fragmentation"] = sum(nbytes.values()) * efficiency.fragmentation_ratio
    communicators = 1 + sum(size > 1 for size in (*rank.mesh.ranks, stages))
    at_once_bytes = ledger.at_once_bytes() * (1.0 + efficiency.fragmentation_ratio)
    nbytes["context"] = efficiency.context_bytes + communicators * efficiency.communicator_bytes
    return LayoutPrice(
        time_s=sum(seconds.values()),
        memory_bytes=sum(nbytes.values()),
        at_once_bytes=at_once_bytes + nbytes["context"],
        seconds=seconds,
        nbytes=nbytes,
        forward_s=ledger.passes["forward"],
        backward_s=ledger.passes["backward"],
        end_s=ledger.passes["step"] + shown_s,
        charges=(*ledger.charges(), Charge(None, "gradients", "step", shown_s)),
        hidden_s=ledger.summed_s - shown_s,
    )


@dataclass(slots=True)
class _At:
    """A tensor as it lies somewhere: where it is held in full sight of the readers, whether it has a
    gradient, whether what holds it keeps it for the backward pass, and since which operator it is there. What
    `is_lent` to blocks further on is held to the end, whoever reads it."""

    shape: tuple[int, ...]
    placements: Placements
    has_gradient: bool
    is_kept: bool
    since: int
    is_lent: bool = False


class _Walk:
    """Block by block; what is known of the tensor between them."""

    def __init__(self, rank: Rank, graph: OpGraph, ledger: Ledger) -> None:
        self.rank, self.graph, self.ledger = rank, graph, ledger
        self.readers = Counter(
            parameter.name for block in graph.blocks for op in block.operators for parameter in op.parameters
        )
        self.loans = loans_of(graph)
        self.homes = [home for home, block in enumerate(graph.blocks) for _ in range(block.repeat)]
        self.lent: dict[str, _At] = {}
        self.result: _At | None = None
        self.met: set[str] = set()

    def block(self, place: int, block: Block, lies: BlockLayout, reader: _Reader) -> None:
        """One repetition of a block, which has this place among all."""
        home = self.homes[place]
        one = _OneBlock(self, block, lies, self.loans.lent[home])
        if block.entry is not None:
            one.enter(self.result)
        one.borrow({name: self.lent[name] for name in self.loans.borrowed[home]})
        for op in block.operators:
            self.ledger.at = (place, op.name)
            self.ledger.order += 1
            one.operator(op)
        self.result = one.leave(reader)
        self.lent |= {name: one.at[name] for name in one.lent}
        self.ledger.end_block()


class _OneBlock:
    """One repetition in the making: `at` are the tensors that lie somewhere, by name."""

    def __init__(self, walk: _Walk, block: Block, lies: BlockLayout, lent: Collection[str]) -> None:
        self.walk, self.block, self.lies, self.lent = walk, block, lies, lent
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

    def hold(self, nbytes: float, since: int | None = None) -> None:
        """Bytes kept for the backward pass, or made again before it: since the operator at work, or another
        one."""
        since = self.ledger.order if since is None else since
        if self.is_again:
            self.ledger.make_again(nbytes, since)
        else:
            self.ledger.keep(nbytes, since)

    def enter(self, result: _At | None) -> None:
        """Take the entry over as it lies after the block before."""
        name = self.block.entry
        if result is None or name is None or self.lies.tensors[name] != result.placements:
            raise InternalError(f"block {self.block.name} does not begin where the one before it ends")
        # Repetitions are alike: where a block trains, each of them has a gradient for its entry.
        trains = self.block.repeat > 1 and any(op.parameters for op in self.block.operators)
        has_gradient = result.has_gradient or trains
        self.at[name] = _At(result.shape, result.placements, has_gradient, is_kept=True, since=result.since)
        is_counted = result.is_lent and self.block.repeat == 1
        if name in self.lent or ((self.is_again or self._keepers(name)) and not is_counted):
            self.ledger.keep(self._nbytes(result.shape, result.placements), result.since)

    def borrow(self, there: Mapping[str, _At]) -> None:
        """Read what blocks further back lend, where it lies for all of its readers."""
        for name, lies in there.items():
            if self.lies.tensors[name] != lies.placements:
                raise InternalError(f"block {self.block.name} reads {name} where it does not lie")
            self.at[name] = lies

    def leave(self, reader: _Reader) -> _At | None:
        """Bring the result to where the next block reads it."""
        last = self.block.operators[-1]
        if not reader.is_there or last.name in self.lent:
            return self.at[last.name] if reader.is_there else None
        return self._settle(last, self.at[last.name], is_kept=reader.keeps)

    def _settle(self, op: OpNode, made: _At, *, is_kept: bool) -> _At:
        """From the operator that makes a tensor to where it lies for all of its readers."""
        placements = self.lies.tensors[op.name]
        there_s, back_s = self._between(made, placements)
        self.ledger.spend("conversions", there_s, "forward")
        self.ledger.spend("conversions", back_s, "backward")
        reads = self._reads(op.name)
        if self.is_again and any(
            reader.name in self.again or slot in self.kept[reader.name].inputs for reader, slot in reads
        ):
            self.ledger.spend("recomputation", there_s, "backward")
        is_same = value_held(placements) == value_held(made.placements)
        if made.is_kept and not (is_same and is_kept):
            self.hold(self._nbytes(made.shape, made.placements))
        return _At(made.shape, placements, made.has_gradient, is_kept, made.since)

    def _nbytes(self, shape: tuple[int, ...], placements: Placements) -> float:
        return self.rank.elements(shape, value_held(placements)) * self.rank.activation_bytes

    def _between(self, lies: _At, placements: Placements) -> tuple[float, float]:
        """Seconds from how a tensor lies to `placements`, and of its gradient back, which need memory."""
        rank, element = self.rank, self.rank.activation_bytes
        ways = [(value_held(lies.placements), value_held(placements))]
        if lies.has_gradient:
            ways.append((gradient_held(placements), gradient_held(lies.placements)))
        seconds = []
        for start, end in ways:
            seconds.append(rank.bring_s(lies.shape, element, start, end))
            if start != end:
                self.ledger.need(rank.most_elements(lies.shape, start, end) * element)
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
        self.ledger.spend("forward", seconds.forward_s, "forward")
        self.ledger.compute_backward("backward", seconds.backward_s)
        self.ledger.spend("exchanges", told.forward_s, "forward")
        self.ledger.spend("exchanges", told.backward_s, "backward")
        if op.name in self.again:
            self.ledger.compute_backward("recomputation", seconds.forward_s)
            self.ledger.spend("recomputation", told.forward_s, "backward")

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
        self.ledger.spend("conversions", there_s + slower * there_hidden_s, "forward")
        self.ledger.spend("conversions", back_s + slower * back_hidden_s, "backward")
        self.ledger.busy_s += back_hidden_s
        keeps = slot in self.kept[op.name].inputs
        if self.is_again and (op.name in self.again or keeps):
            self.ledger.spend("recomputation", there_s + slower * there_hidden_s, "backward")
            self.ledger.busy_s += there_hidden_s
        is_same = value_held(lies.placements) == value_held(placements)
        source = op.inputs[slot].source
        lies_with_maker = source not in self.lies.tensors
        if keeps and not is_same:
            self.hold(self._nbytes(lies.shape, placements))
        if lies_with_maker and (lies.is_kept or (keeps and is_same)):
            self.hold(self._nbytes(lies.shape, lies.placements), lies.since)

    def _keep_own(
        self, op: OpNode, sizes: dict[str, int], placed: list[Placements], data: list[bool]
    ) -> None:
        """Statistics and masks, scores of unfused attention, and data that is read later."""
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
        self.hold(nbytes)
        is_first = self.block.entry is None
        given = sum(
            self._nbytes(op.shape(operand.dims), placed[slot])
            for slot, operand in enumerate(op.inputs)
            if data[slot] and (slot in kept.inputs or (is_first and op.name in self.again))
        )
        if is_first:  # nobody makes what it reads again: that waits as an entry does
            self.ledger.keep(given, self.ledger.order)
        else:
            self.hold(given)

    def _hand_on(self, op: OpNode, output: Placements, has_gradient: bool) -> None:
        """Where the result lies for its readers: with its maker for one, in a place of its own for several.
        What nobody reads later is the loss, or waits for the next block."""
        made = _At(op.shape(op.output), output, has_gradient, self.kept[op.name].output, self.ledger.order)
        self.at[op.name] = made
        if op.name in self.lent:
            self.at[op.name] = replace(self._settle(op, made, is_kept=True), is_lent=True)
            self.ledger.keep(self._nbytes(made.shape, self.lies.tensors[op.name]), made.since)
        elif len(self._reads(op.name)) > 1:
            is_kept = self._keepers(op.name)
            self.at[op.name] = self._settle(op, made, is_kept=is_kept)
            if is_kept:
                self.hold(self._nbytes(made.shape, self.lies.tensors[op.name]))

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
                use_alone(self.rank, self.ledger, use, is_again=op.name in self.again)
                continue
            is_first = parameter.name not in (self.walk.met if self.block.repeat == 1 else self.met)
            self.walk.met.add(parameter.name)
            self.met.add(parameter.name)
            if is_first:
                store(self.rank, self.ledger, use)
            shared = self.lies.used[parameter.name]
            use_shared(self.rank, self.ledger, use, shared, readers=readers if is_first else 0)
