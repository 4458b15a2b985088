"""The price of one layout: a walk over all operators of all blocks, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import log2

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.one_layout.kernels import (
    PassSeconds,
    collective_s,
    compute_s,
    operands_with_gradients,
    size,
)
from shardwise.cost.one_layout.ledger import Charge, StepLedger
from shardwise.cost.one_layout.parameters import ParameterUse, store, use_alone, use_shared
from shardwise.cost.one_layout.rank import Placements, Rank, gradient_shards, rank_of, value_shards
from shardwise.cost.training import Training
from shardwise.cost.turns import WHOLE_BATCH, StepCounts
from shardwise.errors import InternalError
from shardwise.graph import (
    Block,
    BlockLayout,
    GraphLayout,
    OpGraph,
    OpNode,
    SavedTensors,
    ShardingRule,
    local_sizes,
    saved_of,
    skip_tensors_of,
    tensor_shapes,
    work_of,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
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


def estimate_layout(
    graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh, layout: GraphLayout
) -> LayoutEstimate:
    """What a layout of `graph` on `mesh` costs (docs/concepts/pareto-search.md)."""
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
    """What `layout` of the blocks from `first` to before `end` of `graph`, repetitions counted, costs on
    `mesh`, where sizes are those of a micro-batch."""
    rank = rank_of(cluster, training, mesh)
    ledger = StepLedger(counts)
    walk = _Walk(rank, graph, ledger)
    blocks = [block for block in graph.blocks for _ in range(block.repeat)]
    if first:
        shapes = tensor_shapes(graph)[walk.homes[first]]
        walk.result = _stage_entry(blocks[:first], blocks[first], layout.blocks[0], shapes)
    for place, block_layout in zip(range(first, end), layout.blocks, strict=True):
        walk.block(
            place, blocks[place], block_layout, _reader_of_result(blocks, place, end, walk.skips.names)
        )
    return _total(rank, ledger)


@dataclass(frozen=True, slots=True)
class _Reader:
    """What becomes of a block's result: whether another block reads it, and keeps it for its backward
    pass."""

    is_there: bool
    saves: bool


def _reader_of_result(blocks: list[Block], place: int, end: int, skip_outputs: Collection[str]) -> _Reader:
    """Of repetitions, each says that the block itself reads its result; another stage keeps a copy of its
    own. An entry that is lent is held."""
    if place + 1 == end:
        return _Reader(is_there=end < len(blocks), saves=False)
    following = blocks[place] if blocks[place].repeat > 1 else blocks[place + 1]
    saved = {op.name: saved_of(op) for op in following.operators}
    saves = any(
        slot in saved[op.name].inputs
        for op in following.operators
        for slot, operand in enumerate(op.inputs)
        if operand.source == following.entry
    )
    return _Reader(is_there=True, saves=saves or following.entry in skip_outputs)


def _stage_entry(
    before: list[Block], block: Block, block_layout: BlockLayout, shapes: Mapping[str, tuple[int, ...]]
) -> _Tensor:
    """The entry of the first block of a stage, as the stage before it hands it over."""
    name = block.entry
    if name is None:
        raise InternalError(f"block {block.name} reads nothing of the stage before it")
    trains = any(op.parameters for each in before for op in each.operators)
    return _Tensor(shapes[name], block_layout.tensors[name], trains, is_saved=False, since=0)


def _total(rank: Rank, ledger: StepLedger) -> LayoutEstimate:
    """The whole step, with the host's part of it and the bytes that belong to no tensor."""
    efficiency, stages = rank.machine.efficiency, ledger.counts.stages
    ledger.at = None
    ledger.spend("host", rank.profile.host_step_s, "step")
    joined = 2.0 * log2(stages * rank.mesh.devices)
    ledger.spend("norm", joined * rank.machine.tiers[-1].latency_s, "step")
    if stages > 1:
        ledger.spend("sends", ledger.counts.sent_forward_s, "forward")
        ledger.spend("sends", ledger.counts.sent_backward_s, "backward")
        ledger.resident["buffers"] += ledger.counts.buffer_bytes
    exposed_s = ledger.exposed_s()
    ledger.seconds["gradients"] += exposed_s
    seconds = dict(ledger.seconds)
    nbytes = {**ledger.resident, "temporaries": ledger.most_bytes}
    nbytes["fragmentation"] = sum(nbytes.values()) * efficiency.fragmentation_ratio
    communicators = 1 + sum(size > 1 for size in (*rank.mesh.ranks, stages))
    at_once_bytes = ledger.at_once_bytes() * (1.0 + efficiency.fragmentation_ratio)
    nbytes["context"] = efficiency.context_bytes + communicators * efficiency.communicator_bytes
    return LayoutEstimate(
        time_s=sum(seconds.values()),
        memory_bytes=sum(nbytes.values()),
        at_once_bytes=at_once_bytes + nbytes["context"],
        seconds=seconds,
        nbytes=nbytes,
        forward_s=ledger.passes["forward"],
        backward_s=ledger.passes["backward"],
        end_s=ledger.passes["step"] + exposed_s,
        charges=(*ledger.charges(), Charge(None, "gradients", "step", exposed_s)),
        hidden_s=ledger.summed_s - exposed_s,
    )


@dataclass(slots=True)
class _Tensor:
    """A tensor as it lies somewhere: where it is held in full sight of the readers, whether it has a
    gradient, whether what holds it keeps it for the backward pass, and since which operator it is there. What
    `is_skip_output` to blocks further on is held to the end, whoever reads it."""

    shape: tuple[int, ...]
    placements: Placements
    has_gradient: bool
    is_saved: bool
    since: int
    is_skip_output: bool = False


class _Walk:
    """Block by block; what is known of the tensor between them."""

    def __init__(self, rank: Rank, graph: OpGraph, ledger: StepLedger) -> None:
        self.rank, self.graph, self.ledger = rank, graph, ledger
        self.readers = Counter(
            parameter.name for block in graph.blocks for op in block.operators for parameter in op.parameters
        )
        self.skips = skip_tensors_of(graph)
        self.homes = [home for home, block in enumerate(graph.blocks) for _ in range(block.repeat)]
        self.skip_outputs: dict[str, _Tensor] = {}
        self.result: _Tensor | None = None
        self.seen: set[str] = set()

    def block(self, place: int, block: Block, block_layout: BlockLayout, reader: _Reader) -> None:
        """One repetition of a block, which has this place among all."""
        home = self.homes[place]
        one = _BlockWalk(self, block, block_layout, self.skips.skip_outputs[home])
        if block.entry is not None:
            one.enter(self.result)
        one.read_skips({name: self.skip_outputs[name] for name in self.skips.skip_inputs[home]})
        for op in block.operators:
            self.ledger.at = (place, op.name)
            self.ledger.order += 1
            one.operator(op)
        self.result = one.leave(reader)
        self.skip_outputs |= {name: one.at[name] for name in one.skip_outputs}
        self.ledger.end_block()


class _BlockWalk:
    """One repetition in the making: `at` are the tensors that lie somewhere, by name."""

    def __init__(
        self, walk: _Walk, block: Block, block_layout: BlockLayout, skip_outputs: Collection[str]
    ) -> None:
        self.walk, self.block, self.block_layout, self.skip_outputs = walk, block, block_layout, skip_outputs
        self.rank, self.ledger = walk.rank, walk.ledger
        self.is_recomputed = block_layout.mode == "recomputed"
        self.saved: dict[str, SavedTensors] = {op.name: saved_of(op) for op in block.operators}
        self.at: dict[str, _Tensor] = {}
        self.recomputed = self._recomputed()
        self.seen: set[str] = set()
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

    def _is_saved(self, name: str) -> bool:
        """Whether the backward pass of some reader reads the tensor."""
        return any(slot in self.saved[op.name].inputs for op, slot in self._reads(name))

    def _recomputed(self) -> set[str]:
        """Operators whose forward pass a recomputation does once more."""
        if not self.is_recomputed:
            return set()
        if not self.rank.profile.recompute_stops_early:
            return {op.name for op in self.block.operators}
        found: set[str] = set()
        for op in reversed(self.block.operators):
            own = self.saved[op.name]
            if (
                own.output
                or own.own
                or self._is_saved(op.name)
                or any(reader.name in found for reader, _ in self._reads(op.name))
            ):
                found.add(op.name)
        return found

    def save_activation(self, nbytes: float, since: int | None = None) -> None:
        """Bytes kept for the backward pass, or made again before it: since the operator at work, or another
        one."""
        since = self.ledger.order if since is None else since
        if self.is_recomputed:
            self.ledger.save_recomputed(nbytes, since)
        else:
            self.ledger.save(nbytes, since)

    def enter(self, result: _Tensor | None) -> None:
        """Take the entry over as it lies after the block before."""
        name = self.block.entry
        if result is None or name is None or self.block_layout.tensors[name] != result.placements:
            raise InternalError(f"block {self.block.name} does not begin where the one before it ends")
        # Repetitions are alike: where a block trains, each of them has a gradient for its entry.
        trains = self.block.repeat > 1 and any(op.parameters for op in self.block.operators)
        has_gradient = result.has_gradient or trains
        self.at[name] = _Tensor(
            result.shape, result.placements, has_gradient, is_saved=True, since=result.since
        )
        is_counted = result.is_skip_output and self.block.repeat == 1
        if name in self.skip_outputs or ((self.is_recomputed or self._is_saved(name)) and not is_counted):
            self.ledger.save(self._nbytes(result.shape, result.placements), result.since)

    def read_skips(self, there: Mapping[str, _Tensor]) -> None:
        """Read what blocks further back lend, where it lies for all of its readers."""
        for name, tensor in there.items():
            if self.block_layout.tensors[name] != tensor.placements:
                raise InternalError(f"block {self.block.name} reads {name} where it does not lie")
            self.at[name] = tensor

    def leave(self, reader: _Reader) -> _Tensor | None:
        """Bring the result to where the next block reads it."""
        last = self.block.operators[-1]
        if not reader.is_there or last.name in self.skip_outputs:
            return self.at[last.name] if reader.is_there else None
        return self._redistribute_result(last, self.at[last.name], is_saved=reader.saves)

    def _redistribute_result(self, op: OpNode, made: _Tensor, *, is_saved: bool) -> _Tensor:
        """From the operator that makes a tensor to where it lies for all of its readers."""
        placements = self.block_layout.tensors[op.name]
        there_s, back_s = self._between(made, placements)
        self.ledger.spend("conversions", there_s, "forward")
        self.ledger.spend("conversions", back_s, "backward")
        reads = self._reads(op.name)
        if self.is_recomputed and any(
            reader.name in self.recomputed or slot in self.saved[reader.name].inputs for reader, slot in reads
        ):
            self.ledger.spend("recomputation", there_s, "backward")
        is_same = value_shards(placements) == value_shards(made.placements)
        if made.is_saved and not (is_same and is_saved):
            self.save_activation(self._nbytes(made.shape, made.placements))
        return _Tensor(made.shape, placements, made.has_gradient, is_saved, made.since)

    def _nbytes(self, shape: tuple[int, ...], placements: Placements) -> float:
        return self.rank.elements(shape, value_shards(placements)) * self.rank.activation_bytes

    def _between(self, tensor: _Tensor, placements: Placements) -> tuple[float, float]:
        """Seconds from how a tensor lies to `placements`, and of its gradient back, which need memory."""
        rank, element = self.rank, self.rank.activation_bytes
        ways = [(value_shards(tensor.placements), value_shards(placements))]
        if tensor.has_gradient:
            ways.append((gradient_shards(placements), gradient_shards(tensor.placements)))
        seconds = []
        for start, end in ways:
            seconds.append(rank.redistribute_s(tensor.shape, element, start, end))
            if start != end:
                self.ledger.need(rank.peak_elements(tensor.shape, start, end) * element)
        return seconds[0], seconds[1] if tensor.has_gradient else 0.0

    def operator(self, op: OpNode) -> None:
        """One operator: what it reads, computes, keeps, and hands on."""
        rules = self.block_layout.rules[op.name]
        sizes = local_sizes(op, rules, self.rank.mesh.ranks)
        data = [operand.source in self.walk.graph.inputs for operand in op.inputs]
        gradients = [
            not given and self.at[operand.source].has_gradient
            for given, operand in zip(data, op.inputs, strict=True)
        ]
        seconds = compute_s(self.rank, op, sizes, gradients)
        collectives = collective_s(self.rank, rules, sizes)
        if not any(operands_with_gradients(op, gradients)):
            collectives = PassSeconds(collectives.forward_s, 0.0)
        self._compute(op, seconds, collectives)
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
        self._save_own(op, sizes, placed, data)
        self._parameters(op, rules, seconds, working)
        self._produce(op, output, any(gradients) or bool(op.parameters))

    def _compute(self, op: OpNode, seconds: PassSeconds, collectives: PassSeconds) -> None:
        self.ledger.spend("forward", seconds.forward_s, "forward")
        self.ledger.compute_backward("backward", seconds.backward_s)
        self.ledger.spend("exchanges", collectives.forward_s, "forward")
        self.ledger.spend("exchanges", collectives.backward_s, "backward")
        if op.name in self.recomputed:
            self.ledger.compute_backward("recomputation", seconds.forward_s)
            self.ledger.spend("recomputation", collectives.forward_s, "backward")

    def _read(
        self, op: OpNode, slot: int, tensor: _Tensor, placements: Placements, seconds: PassSeconds
    ) -> None:
        """Bring a tensor to one of its readers, which may keep it as it reads it."""
        there_s, back_s = self._between(tensor, placements)
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
        saves = slot in self.saved[op.name].inputs
        if self.is_recomputed and (op.name in self.recomputed or saves):
            self.ledger.spend("recomputation", there_s + slower * there_hidden_s, "backward")
            self.ledger.busy_s += there_hidden_s
        is_same = value_shards(tensor.placements) == value_shards(placements)
        source = op.inputs[slot].source
        is_at_maker = source not in self.block_layout.tensors
        if saves and not is_same:
            self.save_activation(self._nbytes(tensor.shape, placements))
        if is_at_maker and (tensor.is_saved or (saves and is_same)):
            self.save_activation(self._nbytes(tensor.shape, tensor.placements), tensor.since)

    def _save_own(
        self, op: OpNode, sizes: dict[str, int], placed: list[Placements], data: list[bool]
    ) -> None:
        """Statistics and masks, scores of unfused attention, and data that is read later."""
        saved = self.saved[op.name]
        nbytes = sum(
            size(sizes, dims) * (element_bytes or self.rank.activation_bytes)
            for dims, element_bytes in saved.own
        )
        if self.rank.fused_attention is None:
            # Two 16-bit tensors and a mask for each score (docs/concepts/cost-model.md).
            nbytes += 5.0 * sum(
                size(sizes, (*work.batch, *work.m, *work.n))
                for work in work_of(op)
                if work.kind == "attention"
            )
        self.save_activation(nbytes)
        is_first = self.block.entry is None
        given = sum(
            self._nbytes(op.shape(operand.dims), placed[slot])
            for slot, operand in enumerate(op.inputs)
            if data[slot] and (slot in saved.inputs or (is_first and op.name in self.recomputed))
        )
        if is_first:  # nobody makes what it reads again: that waits as an entry does
            self.ledger.save(given, self.ledger.order)
        else:
            self.save_activation(given)

    def _produce(self, op: OpNode, output: Placements, has_gradient: bool) -> None:
        """Where the result lies for its readers: with its maker for one, in a place of its own for several.
        What nobody reads later is the loss, or waits for the next block."""
        made = _Tensor(
            op.shape(op.output), output, has_gradient, self.saved[op.name].output, self.ledger.order
        )
        self.at[op.name] = made
        if op.name in self.skip_outputs:
            self.at[op.name] = replace(
                self._redistribute_result(op, made, is_saved=True), is_skip_output=True
            )
            self.ledger.save(self._nbytes(made.shape, self.block_layout.tensors[op.name]), made.since)
        elif len(self._reads(op.name)) > 1:
            is_saved = self._is_saved(op.name)
            self.at[op.name] = self._redistribute_result(op, made, is_saved=is_saved)
            if is_saved:
                self.save_activation(self._nbytes(made.shape, self.block_layout.tensors[op.name]))

    def _parameters(
        self, op: OpNode, rules: tuple[ShardingRule, ...], seconds: PassSeconds, working: float
    ) -> None:
        elements = [op.elements(parameter.dims) for parameter in op.parameters]
        for slot, parameter in enumerate(op.parameters):
            use = ParameterUse(
                shape=op.shape(parameter.dims),
                stored=self.block_layout.stored[parameter.name],
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
                use_alone(self.rank, self.ledger, use, is_recomputed=op.name in self.recomputed)
                continue
            is_first = parameter.name not in (self.walk.seen if self.block.repeat == 1 else self.seen)
            self.walk.seen.add(parameter.name)
            self.seen.add(parameter.name)
            if is_first:
                store(self.rank, self.ledger, use)
            shared = self.block_layout.used[parameter.name]
            use_shared(self.rank, self.ledger, use, shared, readers=readers if is_first else 0)
