"""What is trained, operator by operator: records of a graph, independent of any framework.

An operator is an iteration space over named dims, as in an einsum: each of its tensors (inputs, parameters,
output) lists the dims that it has, outermost first. Splitting the work along a dim splits the tensors that
have it. Which dims may be split is the operator kind's to say (`KINDS`).

What an operator computes and what it keeps, in terms of its dims.

What blocks and operators are called where repetitions are told apart: in traces, and beside them.

Tensors that blocks read of blocks further back: skip connections, and what an encoder hands to every layer
of a decoder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Literal

from shardwise.graph.sizes import SizeGrowth


@dataclass(frozen=True, slots=True)
class Operand:
    """An activation that an operator reads: the name of the operator (or graph input) that makes it, or of an
    entry, and the dims it has here. Its sizes are those of the maker's output, position by position."""

    source: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained tensor and its dims. Two operators that name the same parameter share it.

    In a repeated block each repetition has its own; a number in braces in the name counts them from there
    (`layers.{0}.q.weight`).
    """

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One operator.

    `dims` are the sizes of all indices of its iteration space, over the whole batch, before any split.
    `output` are the dims of its one result. `flop` and `moved_bytes` replace what the kind says of the
    forward pass, over the whole batch, where the file gives them. `attributes` are the kind's own (`window`,
    `causal`, `halo`, ...), `whole` the dims that must not be split though the kind would allow it.
    """

    name: str
    kind: str
    dims: Mapping[str, int] = field(hash=False)
    inputs: tuple[Operand, ...]
    output: tuple[str, ...]
    parameters: tuple[Parameter, ...] = ()
    attributes: Mapping[str, int | float | bool | str] = field(default_factory=dict, hash=False)
    whole: tuple[str, ...] = ()
    flop: float | None = None
    moved_bytes: float | None = None

    def shape(self, dims: tuple[str, ...]) -> tuple[int, ...]:
        """Sizes of a tensor with these dims."""
        return tuple(self.dims[dim] for dim in dims)

    @property
    def tensors(self) -> tuple[tuple[str, ...], ...]:
        """The dims of each of its tensors: inputs, parameters, output."""
        inputs = (operand.dims for operand in self.inputs)
        parameters = (parameter.dims for parameter in self.parameters)
        return (*inputs, *parameters, self.output)

    def elements(self, dims: tuple[str, ...]) -> int:
        """Elements of a tensor with these dims."""
        return prod(self.shape(dims))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Operators that belong together, in a fixed topological order, `repeat` times in a row.

    A block with `entry` reads under that name what the one before it ends with, and may be repeated: each
    repetition reads what the one before it made. A block without `entry` is the first. Each ends with one
    tensor, that of its last operator, and may be recomputed as a whole in the backward pass. What else it has
    only blocks behind it read, by name, and of a block that is there once (`skip_tensors_of`). `repeat` above
    1 needs an entry of the same shape as the result."""

    name: str
    operators: tuple[OpNode, ...]
    entry: str | None = None
    repeat: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """A network: its inputs (data without gradient: name and shape), its blocks in order; the last operator
    is the loss. All sizes are those of one optimizer step's whole batch.

    `growth` says of the dims that follow the batch or the sequence length how they do; a name follows the
    same in every operator. `source` says where the structure is from.
    """

    name: str
    inputs: Mapping[str, tuple[int, ...]] = field(hash=False)
    blocks: tuple[Block, ...]
    batch: int
    seq_len: int | None = None
    growth: Mapping[str, SizeGrowth] = field(default_factory=dict, hash=False)
    source: str = ""

    @property
    def operators(self) -> int:
        """Operators, repetitions counted."""
        return sum(len(block.operators) * block.repeat for block in self.blocks)


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor that memory-bound work reads or writes: its dims, how often forward and backward.

    `element_bytes` is None for a tensor in the type of the activations.
    """

    dims: tuple[str, ...]
    forward: float = 1.0
    backward: float = 1.0
    element_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """One kernel's work on one rank: sizes are those of its dims there (`local_sizes`).

    `matmul`: `batch` products of [m, k] x [k, n], each extent the product of its dims, 2 batch m n k flop; in
    training the same again for each operand that needs a gradient. `attention`: fused or unfused attention
    over `batch` (batch and heads) of `m` queries and `n` keys, `k` wide, with values of `v`; `causal` halves
    it, `window` limits each query to so many keys. `memory`: `moved` tensors. `serial` are the dims whose
    steps cannot run side by side (the time of a recurrent layer): the work is that of one step,
    a kernel each. `splits_sums` tells that the kernel of a weight's gradient divides its sum among processors
    that would stand idle (convolutions, whose weights are small and sums long).
    """

    kind: Literal["matmul", "attention", "memory"]
    batch: tuple[str, ...] = ()
    m: tuple[str, ...] = ()
    n: tuple[str, ...] = ()
    k: tuple[str, ...] = ()
    v: tuple[str, ...] = ()
    moved: tuple[Moved, ...] = ()
    serial: tuple[str, ...] = ()
    splits_sums: bool = False
    causal: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensors:
    """What the backward pass of an operator reads again: which inputs, whether its output, and further
    tensors of its own (dims and bytes per element, None for the type of the activations: masks,
    statistics)."""

    inputs: tuple[int, ...] = ()
    output: bool = False
    own: tuple[tuple[tuple[str, ...], float | None], ...] = ()


def block_labels(graph: OpGraph) -> tuple[str, ...]:
    """All blocks in order, repetitions counted: by name, of several repetitions with the number of each,
    `layers[3]`."""
    return tuple(
        block.name if block.repeat == 1 else f"{block.name}[{count}]"
        for block in graph.blocks
        for count in range(block.repeat)
    )


def operator_label(block_label: str, operator: str) -> str:
    """An operator of a repetition: `layers[3]/attend`."""
    return f"{block_label}/{operator}"


@dataclass(frozen=True, slots=True)
class SkipTensors:
    """By the place of a block among the graph's: names of the tensors that it lends to blocks behind it, its
    entry or what its operators make, and of those that it borrows from blocks before it."""

    skip_outputs: tuple[tuple[str, ...], ...]
    skip_inputs: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors that are lent."""
        return tuple(name for names in self.skip_outputs for name in names)


def possible_skip_outputs(block: Block) -> tuple[str, ...]:
    """The tensors that later blocks may read of `block`: of one that is there once all but graph inputs."""
    if block.repeat > 1:
        return ()
    entry = () if block.entry is None else (block.entry,)
    return (*entry, *(op.name for op in block.operators))


def skip_tensors_of(graph: OpGraph) -> SkipTensors:
    """Who lends what to whom; a name that several blocks have for their entries is none that others read."""
    entries = Counter(block.entry for block in graph.blocks)
    taken: list[set[str]] = [set() for _ in graph.blocks]
    skip_inputs: list[tuple[str, ...]] = []
    homes: dict[str, int] = {}
    for place, block in enumerate(graph.blocks):
        own = {block.entry, *(op.name for op in block.operators)}
        reads = dict.fromkeys(operand.source for op in block.operators for operand in op.inputs)
        skip_inputs.append(tuple(name for name in reads if name in homes and name not in own))
        for name in skip_inputs[-1]:
            taken[homes[name]].add(name)
        homes |= {name: place for name in possible_skip_outputs(block) if entries[name] < 2}
    skip_outputs = (
        tuple(name for name in possible_skip_outputs(block) if name in names)
        for block, names in zip(graph.blocks, taken, strict=True)
    )
    return SkipTensors(tuple(skip_outputs), tuple(skip_inputs))


def blocks_joined_by_skips(graph: OpGraph) -> frozenset[int]:
    """The blocks, repetitions counted, that no cut may lie before: one that lends a tensor is in front of
    them, and one that borrows it is among them or behind."""
    skips = skip_tensors_of(graph)
    ends = tuple(accumulate(block.repeat for block in graph.blocks))
    joined: set[int] = set()
    for home, names in enumerate(skips.skip_outputs):
        for name in names:
            last = max(place for place, skip_inputs in enumerate(skips.skip_inputs) if name in skip_inputs)
            joined.update(range(ends[home], ends[last]))
    return frozenset(joined)


def tensor_shapes(graph: OpGraph) -> tuple[Mapping[str, tuple[int, ...]], ...]:
    """By the place of a block the shapes of all activations that it has: its entry, what it borrows and what
    its operators make."""
    skips = skip_tensors_of(graph)
    found: list[dict[str, tuple[int, ...]]] = []
    there: dict[str, tuple[int, ...]] = {}
    for block, skip_outputs, skip_inputs in zip(
        graph.blocks, skips.skip_outputs, skips.skip_inputs, strict=True
    ):
        shapes = {name: there[name] for name in skip_inputs}
        if block.entry is not None:
            shapes[block.entry] = found[-1][graph.blocks[len(found) - 1].operators[-1].name]
        shapes |= {op.name: op.shape(op.output) for op in block.operators}
        there |= {name: shapes[name] for name in skip_outputs}
        found.append(shapes)
    return tuple(found)
