"""Estimate of one layout in plain scalars, operator by operator through all blocks.

`estimate_layout` walks a whole graph, `estimate_stage` the blocks of one stage. The walk adds seconds and
bytes to a `StepLedger`; `store`, `use_alone` and `use_shared` add those of parameters. The result is a
`LayoutEstimate` with `Charge`s per operator.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import log2
from typing import Literal

from tests.reference.one_layout.rank import (
    LocalShard,
    PassSeconds,
    Placements,
    Rank,
    collective_s,
    compute_s,
    gradient_shards,
    operands_with_gradients,
    owned_shards,
    rank_of,
    size,
    value_shards,
)

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.training import WHOLE_BATCH, StepCounts, Training
from shardwise.errors import InternalError
from shardwise.graph import (  # fmt: skip
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
)

# Ledger of a step

When = Literal["forward", "backward", "step"]
"""The pass of a micro-batch in which seconds are spent, or once per step."""

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
class _Bytes:
    """Bytes that are allocated when the operator of this `order` runs.

    They are saved from then until the backward pass returns there, or recomputed in the `block`
    (`is_recomputed`), or temporaries of the operator.
    """

    order: int
    block: int
    nbytes: float
    is_recomputed: bool = False


@dataclass(slots=True)
class StepLedger:
    """Seconds and bytes of a step while they are summed.

    `seconds` are per step and purpose, `passes` per micro-batch and pass; `spent` are the entries of `passes`
    one by one, with the operator that was `at` work. Of a micro-batch's backward computation `computed_s`,
    `busy_s` overlap with communication other than gradient synchronisation. Gradient synchronisation takes
    `summed_s`, of which `hideable_s` may overlap.

    `resident` are bytes by purpose. `recomputed_bytes` and `peak_bytes` are those of the current block,
    `most_bytes` the largest sum of both over the blocks. `order` numbers the operators that ran so far,
    `block` the blocks. `saved_tensors` and `needs` give the most bytes at one moment.
    """

    counts: StepCounts
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    passes: defaultdict[When, float] = field(default_factory=lambda: defaultdict(float))
    at: Place = None
    spent: defaultdict[tuple[Place, str, When], float] = field(default_factory=lambda: defaultdict(float))
    resident: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    computed_s: float = 0.0
    busy_s: float = 0.0
    summed_s: float = 0.0
    hideable_s: float = 0.0
    recomputed_bytes: float = 0.0
    peak_bytes: float = 0.0
    most_bytes: float = 0.0
    order: int = 0
    block: int = 0
    saved_tensors: list[_Bytes] = field(default_factory=list)
    needs: list[_Bytes] = field(default_factory=list)

    def spend(self, what: str, seconds: float, when: When) -> None:
        """Add seconds without overlap: per micro-batch, or per step."""
        self.seconds[what] += seconds * (1 if when == "step" else self.counts.microbatches)
        self.passes[when] += seconds
        self.spent[self.at, what, when] += seconds

    def compute_backward(self, what: str, seconds: float) -> None:
        """Add seconds of backward computation that gradient synchronisation may overlap with."""
        self.spend(what, seconds, "backward")
        self.computed_s += seconds

    def charges(self) -> tuple[Charge, ...]:
        """All seconds so far except gradient synchronisation, in the order in which they were added."""
        return tuple(Charge(*key, seconds) for key, seconds in self.spent.items())

    def sum_gradient(self, seconds: float, overlap: float) -> None:
        """Add seconds of gradient synchronisation, of which the share `overlap` can overlap."""
        self.summed_s += seconds
        self.hideable_s += overlap * seconds

    def save(self, nbytes: float, since: int) -> None:
        """Add bytes of activations saved since the operator of that order."""
        self.resident["activations"] += nbytes * self.counts.in_flight
        self.saved_tensors.append(_Bytes(since, self.block, nbytes))

    def save_recomputed(self, nbytes: float, since: int) -> None:
        """Add bytes of activations that recomputation makes, for the current block only."""
        self.recomputed_bytes += nbytes
        self.saved_tensors.append(_Bytes(since, self.block, nbytes, is_recomputed=True))

    def need(self, nbytes: float) -> None:
        """Add bytes of temporaries that the block needs at one moment."""
        self.peak_bytes = max(self.peak_bytes, nbytes)
        self.need_now(nbytes)

    def need_now(self, nbytes: float) -> None:
        """Add temporaries of this moment that count at another moment too."""
        self.needs.append(_Bytes(self.order, self.block, nbytes))

    def end_block(self) -> None:
        """End the current block: recomputed tensors and temporaries start again at 0."""
        self.most_bytes = max(self.most_bytes, self.recomputed_bytes + self.peak_bytes)
        self.recomputed_bytes = self.peak_bytes = 0.0
        self.block += 1

    def at_once_bytes(self) -> float:
        """The most bytes of tensors at one moment, while an operator runs in either pass.

        It counts the tensors that this operator and those before it save for this micro-batch, and all saved
        tensors of the others.
        """
        saved, recomputed = (
            sorted(
                (each for each in self.saved_tensors if each.is_recomputed == is_recomputed),
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

    def exposed_s(self) -> float:
        """Exposed seconds of gradient synchronisation after overlap with the last micro-batch."""
        return self.summed_s - min(self.hideable_s, self.computed_s - self.busy_s)


# Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterUse:
    """A parameter at one of its readers.

    `stored` and `used` are its placements. Its traffic overlaps with the `share` of the reader's computation
    (`forward_s`, `backward_s`); `working_bytes` are the reader's temporaries. Parameters of a block are
    batched: this one takes the share `bucket` of a message for all of them.
    """

    shape: tuple[int, ...]
    stored: Placements
    used: Placements
    share: float
    bucket: float
    forward_s: float
    backward_s: float
    working_bytes: float


def store(rank: Rank, ledger: StepLedger, use: ParameterUse) -> None:
    """Add the bytes of weights, gradients and optimizer states, and the optimizer update of the
    rank's share.
    """
    recipe, optimizer = rank.machine.recipe, rank.machine.optimizer
    whole = rank.elements(use.shape, value_shards(use.stored))
    owned = rank.elements(use.shape, owned_shards(use.stored))
    ledger.resident["parameters"] += whole * recipe.weight_bytes
    ledger.resident["gradients"] += whole * recipe.gradient_bytes
    ledger.resident["optimizer"] += owned * (recipe.master_bytes + optimizer.state_bytes)
    # Gradients read; master copy (or the weight itself) and states read and written; weight written. The norm
    # reads gradients twice and writes them.
    copied = (
        2.0 * recipe.master_bytes + recipe.weight_bytes if recipe.master_bytes else 2.0 * recipe.weight_bytes
    )
    moved_bytes = 4.0 * recipe.gradient_bytes + copied + 2.0 * optimizer.state_bytes
    ledger.spend("optimizer", owned * moved_bytes / rank.stream_bytes_per_s, "step")
    if optimizer.work_flop_per_hidden and len(use.shape) > 1:
        peak = rank.machine.matmul_flop_per_s * rank.machine.efficiency.matmul.peak_fraction
        work_flop = owned * optimizer.work_flop_per_hidden * min(use.shape)
        ledger.spend("optimizer", work_flop / peak, "step")


def _whole_bytes(rank: Rank, use: ParameterUse, used: Placements, is_gathered: bool) -> float:
    """Bytes of copies in addition to storage: gathered weights, and a gradient larger than the stored one.

    Gathered are the weights of this use, and of the next where gathers overlap with computation.
    """
    recipe = rank.machine.recipe
    weights = 0 if not is_gathered else 1 if rank.profile.shard_overlap == 0.0 else 2
    in_use = _in_use(rank, use, used)
    is_more = in_use != rank.elements(use.shape, value_shards(use.stored))
    return (weights * recipe.weight_bytes + (recipe.gradient_bytes if is_more else 0.0)) * in_use


def _in_use(rank: Rank, use: ParameterUse, used: Placements) -> float:
    return rank.elements(use.shape, value_shards(used))


def _moved_s(
    rank: Rank,
    use: ParameterUse,
    element_bytes: float,
    start: tuple[LocalShard, ...],
    end: tuple[LocalShard, ...],
) -> float:
    """Seconds of this parameter's part of the block's message."""
    return use.bucket * rank.redistribute_s(use.shape, element_bytes / use.bucket, start, end)


def _gather_s(rank: Rank, use: ParameterUse, used: Placements) -> float:
    weight_bytes = rank.machine.recipe.weight_bytes
    return _moved_s(rank, use, weight_bytes, value_shards(use.stored), value_shards(used))


def _after_backward(use: ParameterUse, used: Placements) -> tuple[LocalShard, ...]:
    """Local shards of a gathered parameter's gradient after a backward pass.

    Along axes that shard the parameter it is reduced to shards; along the others it stays as its reader makes
    it.
    """
    pairs = zip(value_shards(use.stored), gradient_shards(used), strict=True)
    return tuple(own if isinstance(own, int) else left for own, left in pairs)


def _reduce_scatter_s(rank: Rank, use: ParameterUse, used: Placements) -> float:
    gradient_bytes = rank.machine.recipe.gradient_bytes
    return _moved_s(rank, use, gradient_bytes, gradient_shards(used), _after_backward(use, used))


def _summed_s(rank: Rank, use: ParameterUse, left: tuple[LocalShard, ...]) -> float:
    """Seconds of reducing the rest of a gradient (`left`) after the last pass to the elements that a rank
    updates.
    """
    return _moved_s(rank, use, rank.machine.recipe.gradient_bytes, left, owned_shards(use.stored))


def _update_s(rank: Rank, use: ParameterUse) -> float:
    """Seconds of gathering the weights that other ranks updated."""
    weight_bytes = rank.machine.recipe.weight_bytes
    return _moved_s(rank, use, weight_bytes, owned_shards(use.stored), value_shards(use.stored))


def _overlapped_s(rank: Rank, seconds: float, computed_s: float, overlap: float) -> tuple[float, float]:
    hidden_s = min(overlap * seconds, computed_s)
    return seconds + (rank.slowdown - 2.0) * hidden_s, hidden_s


def use_alone(rank: Rank, ledger: StepLedger, use: ParameterUse, *, is_recomputed: bool) -> None:
    """Add the traffic of a parameter with one reader.

    Its weights are gathered during the forward pass and half of the backward pass; gradients of sharded
    weights are reduced during the other half. All other gradients are reduced once per step and overlap with
    any backward computation. If the reader `is_recomputed`, weights are gathered once more.
    """
    gather_s = _gather_s(rank, use, use.used)
    shard_overlap, data_overlap = rank.profile.shard_overlap, rank.profile.data_overlap
    forward_s, half_s = use.share * use.forward_s, use.share * use.backward_s / 2.0
    there_s, _ = _overlapped_s(rank, gather_s, forward_s, shard_overlap)
    back_s, busy_s = _overlapped_s(rank, gather_s, half_s, shard_overlap)
    update_s = _update_s(rank, use)
    update_s -= min(rank.profile.state_overlap * update_s, forward_s)
    ledger.spend("gathers", there_s, "forward")
    ledger.spend("gathers", back_s, "backward")
    ledger.spend("gathers", update_s, "step")
    ledger.busy_s += busy_s
    left = gradient_shards(use.used)
    if gather_s > 0.0:
        left = _after_backward(use, use.used)
        reduce_scatter_s, busy_s = _overlapped_s(
            rank, _reduce_scatter_s(rank, use, use.used), half_s, shard_overlap
        )
        ledger.spend("gradients", reduce_scatter_s, "backward")
        ledger.busy_s += busy_s
    ledger.sum_gradient(_summed_s(rank, use, left), data_overlap)
    if is_recomputed:
        recompute_s, busy_s = _overlapped_s(rank, gather_s, forward_s, shard_overlap)
        ledger.spend("gathers", recompute_s, "backward")
        ledger.busy_s += busy_s
    ledger.need(use.working_bytes + _whole_bytes(rank, use, use.used, gather_s > 0.0))


def use_shared(
    rank: Rank, ledger: StepLedger, use: ParameterUse, shared: Placements, *, readers: int
) -> None:
    """Add the traffic of one of several readers of a parameter, whose placement for all of them is `shared`.

    `readers` is their number at the first of them, which is charged the gathers and the gradient reduction of
    all; it is 0 at the others.
    """
    recipe = rank.machine.recipe
    gather_s = _gather_s(rank, use, shared)
    whole_bytes = _whole_bytes(rank, use, shared, gather_s > 0.0)
    ledger.need_now(whole_bytes)
    if readers:
        ledger.spend("gathers", readers * gather_s, "forward")
        ledger.spend("gathers", readers * gather_s, "backward")
        ledger.spend("gathers", _update_s(rank, use), "step")
        left, overlap = gradient_shards(shared), rank.profile.data_overlap
        if gather_s > 0.0:
            left, overlap = _after_backward(use, shared), rank.profile.shard_overlap
            ledger.sum_gradient(_reduce_scatter_s(rank, use, shared), overlap)
        ledger.sum_gradient(_summed_s(rank, use, left), overlap)
        ledger.need(whole_bytes)
        if value_shards(use.stored) != value_shards(shared):  # accumulated separately until the last reader
            ledger.resident["gradients"] += recipe.gradient_bytes * _in_use(rank, use, shared)
    start, end = value_shards(shared), value_shards(use.used)
    there_s = rank.redistribute_s(use.shape, recipe.weight_bytes, start, end)
    back_s = rank.redistribute_s(
        use.shape, recipe.gradient_bytes, gradient_shards(use.used), gradient_shards(shared)
    )
    ledger.spend("gathers", there_s, "forward")
    ledger.spend("gathers", there_s + back_s, "backward")
    if start != end:
        copy = rank.elements(use.shape, end) * (recipe.weight_bytes + recipe.gradient_bytes)
        ledger.need(use.working_bytes + copy)


# Walk over the operators


@dataclass(frozen=True, slots=True)
class LayoutEstimate:
    """Step time in seconds and bytes of a rank, as the driver counts them, with their parts.

    `seconds` and `nbytes` are parts that sum to `time_s` and `memory_bytes`. `memory_bytes` are all saved
    tensors plus the largest temporaries, as in the frontier search; at most `at_once_bytes` of them exist at
    one moment.

    A micro-batch takes `forward_s` and `backward_s`; `end_s` is the rest of the step after the last of them.
    `charges` are the same by operator, in the order of the walk: those of each pass sum to it, those of the
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

    Sizes are those of a micro-batch.
    """
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
    """Whether another block reads a block's result, and saves it for its backward pass."""

    is_there: bool
    saves: bool


def _reader_of_result(blocks: list[Block], place: int, end: int, skip_outputs: Collection[str]) -> _Reader:
    """The reader of a block's result.

    For repetitions it is the block itself. Another stage saves a copy of its own. An entry that is a skip
    output is saved.
    """
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
    """The entry of a stage's first block, in the placement in which the stage before sends it."""
    name = block.entry
    if name is None:
        raise InternalError(f"block {block.name} has no entry tensor from the stage before it")
    trains = any(op.parameters for each in before for op in each.operators)
    return _Tensor(shapes[name], block_layout.tensors[name], trains, is_saved=False, since=0)


def _total(rank: Rank, ledger: StepLedger) -> LayoutEstimate:
    """The estimate of the whole step, with the host's part and the bytes that belong to no tensor."""
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
    """A tensor in one placement.

    It has a gradient or not, is saved there for the backward pass or not, and exists since the operator of
    order `since`. A skip output is saved whatever its readers need.
    """

    shape: tuple[int, ...]
    placements: Placements
    has_gradient: bool
    is_saved: bool
    since: int
    is_skip_output: bool = False


class _Walk:
    """A walk over blocks, with the tensors between them."""

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
        """Walk one repetition of a block, which is number `place` of all."""
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
    """A walk over one repetition of a block; `at` has the current tensors by name."""

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
        """Operators whose forward pass is repeated by recomputation."""
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
        """Add bytes saved for the backward pass, or recomputed before it, since this operator or the one of
        `since`.
        """
        since = self.ledger.order if since is None else since
        if self.is_recomputed:
            self.ledger.save_recomputed(nbytes, since)
        else:
            self.ledger.save(nbytes, since)

    def enter(self, result: _Tensor | None) -> None:
        """Enter the block: its entry has the placement in which the block before leaves it."""
        name = self.block.entry
        if result is None or name is None or self.block_layout.tensors[name] != result.placements:
            raise InternalError(
                f"block {self.block.name} has another placement for its entry than the block before it"
            )
        # Repetitions are equal: where a block has parameters, the entry of each repetition has a gradient.
        trains = self.block.repeat > 1 and any(op.parameters for op in self.block.operators)
        has_gradient = result.has_gradient or trains
        self.at[name] = _Tensor(
            result.shape, result.placements, has_gradient, is_saved=True, since=result.since
        )
        is_counted = result.is_skip_output and self.block.repeat == 1
        if name in self.skip_outputs or ((self.is_recomputed or self._is_saved(name)) and not is_counted):
            self.ledger.save(self._nbytes(result.shape, result.placements), result.since)

    def read_skips(self, there: Mapping[str, _Tensor]) -> None:
        """Read the skip tensors of earlier blocks, in their placement for all readers."""
        for name, tensor in there.items():
            if self.block_layout.tensors[name] != tensor.placements:
                raise InternalError(
                    f"block {self.block.name} has another placement for {name} than its producer"
                )
            self.at[name] = tensor

    def leave(self, reader: _Reader) -> _Tensor | None:
        """Redistribute the result to the placement in which the next block reads it."""
        last = self.block.operators[-1]
        if not reader.is_there or last.name in self.skip_outputs:
            return self.at[last.name] if reader.is_there else None
        return self._redistribute_result(last, self.at[last.name], is_saved=reader.saves)

    def _redistribute_result(self, op: OpNode, made: _Tensor, *, is_saved: bool) -> _Tensor:
        """Redistribute a tensor from its producer's placement to that for all of its readers."""
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
        """Seconds of redistributing a tensor to `placements`, and its gradient back; adds their
        temporaries.
        """
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
        """Walk one operator: read, compute, save, produce."""
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
        """Redistribute a tensor to one of its readers, which may save it in its own placement."""
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
        """Save statistics and masks, scores of unfused attention, and graph inputs that are read later."""
        saved = self.saved[op.name]
        nbytes = sum(
            size(sizes, dims) * (element_bytes or self.rank.activation_bytes)
            for dims, element_bytes in saved.own
        )
        if self.rank.fused_attention is None:
            # The softmax saves its output; graphs have no dropout (docs/concepts/cost-model.md, section 8).
            # Modules of Transformers save it in fp32 and cast.
            element = self.rank.activation_bytes
            each = 4.0 + element * (element < 4.0) if self.rank.profile.eager_modules else element
            nbytes += each * sum(
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
        if is_first:  # graph inputs are never recomputed: they stay like an entry
            self.ledger.save(given, self.ledger.order)
        else:
            self.save_activation(given)

    def _produce(self, op: OpNode, output: Placements, has_gradient: bool) -> None:
        """Place the result for its readers: one reader reads it from its producer, several from a shared
        placement.

        A result without readers in the block is the loss, or is read by the next block.
        """
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
