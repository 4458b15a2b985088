"""Records of an operator graph (`OpGraph`, `Block`, `OpNode`), independent of any framework.

An operator is an iteration space over named dims, as in an einsum. Each of its tensors (inputs, parameters,
output) lists the dims that it has, outermost first. Splitting the work along a dim splits the tensors that
have it. The operator's kind (`KINDS`) says which dims may be split.

`KernelWork` and `SavedTensors` describe the work of an operator and its saved tensors. `block_labels` are the
names of blocks in traces. `skip_tensors_of` finds skip tensors: tensors that blocks other than the next read,
such as an encoder's output in every decoder layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Literal

from shardwise.graph.sizes import SizeGrowth

# Graphs


@dataclass(frozen=True, slots=True)
class Operand:
    """An activation that an operator reads.

    `source` is the operator, graph input or entry that makes it. `dims` are its dims in the reader; their
    sizes are those of the producer's output, position by position.
    """

    source: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trained tensor and its dims. Operators that name the same parameter share it.

    Each repetition of a block has its own. A number in braces in the name counts them, starting from that
    number (`layers.{0}.q.weight`).
    """

    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One operator.

    `dims` are the sizes of all dims of its iteration space, for the whole batch, before any split. `output`
    are the dims of its result. `flop` and `moved_bytes` replace the kind's values for the forward pass of the
    whole batch, where given. `attributes` are those of the kind (`window`, `causal`, ...). `whole` are dims
    that must not be split although the kind allows it.
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
    """Operators in a fixed topological order, repeated `repeat` times in a row.

    A block reads the result of the previous block, or of its previous repetition, under the name `entry`; the
    first block has none. Its result is that of its last operator. It may be recomputed as a whole in the
    backward pass. Later blocks may read its other tensors as skip tensors if `repeat` is 1
    (`skip_tensors_of`). `repeat` above 1 needs an entry with the shape of the result.
    """

    name: str
    operators: tuple[OpNode, ...]
    entry: str | None = None
    repeat: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class OpGraph:
    """A network: inputs (data without gradient, by name and shape) and blocks in order; the last operator is
    the loss.

    All sizes are those of the whole batch of one optimizer step. `growth` has the dims that grow with the
    batch or the sequence length; a name has one growth in all operators. `source` says where the structure is
    from.
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
        """Number of operators, repetitions counted."""
        return sum(len(block.operators) * block.repeat for block in self.blocks)


# Work and saved tensors


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor that memory-bound work reads or writes: its dims, and how often forward and backward.

    `element_bytes` is None for a tensor in the dtype of the activations.
    """

    dims: tuple[str, ...]
    forward: float = 1.0
    backward: float = 1.0
    element_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """The work of one kernel on one rank; sizes are those of its dims there (`local_sizes`).

    `matmul`: `batch` products of [m, k] x [k, n], each extent the product of its dims, 2 batch m n k flop; in
    training the same again for each operand with a gradient. `attention`: fused or unfused attention of `m`
    queries and `n` keys over `batch` (batch and heads), with keys of width `k` and values of width `v`;
    `causal` halves it, `window` limits the keys of each query. `memory`: the `moved` tensors.

    `serial` dims have steps that cannot run in parallel (time steps of a recurrent layer): the work is that
    of one step, one kernel each. `splits_sums` says that the kernel of a weight's gradient divides its sum
    among otherwise idle processors (convolutions, whose weights are small and sums long).
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
    """The tensors that the backward pass of an operator reads again.

    `inputs` are saved inputs, `output` says whether the output is saved. `own` are further tensors such as
    masks and statistics: dims, and bytes per element (None for the dtype of the activations).
    """

    inputs: tuple[int, ...] = ()
    output: bool = False
    own: tuple[tuple[tuple[str, ...], float | None], ...] = ()


# Labels


def block_labels(graph: OpGraph) -> tuple[str, ...]:
    """Names of all blocks in order, repetitions counted; `layers[3]` for a repetition."""
    return tuple(
        block.name if block.repeat == 1 else f"{block.name}[{count}]"
        for block in graph.blocks
        for count in range(block.repeat)
    )


def operator_label(block_label: str, operator: str) -> str:
    """The name of an operator of a repetition: `layers[3]/attend`."""
    return f"{block_label}/{operator}"


# Skip tensors


@dataclass(frozen=True, slots=True)
class SkipTensors:
    """The skip tensors of a graph, by block.

    `skip_outputs` are tensors of a block (its entry or results of its operators) that later blocks read;
    `skip_inputs` are those that a block reads of earlier ones.
    """

    skip_outputs: tuple[tuple[str, ...], ...]
    skip_inputs: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All skip tensors."""
        return tuple(name for names in self.skip_outputs for name in names)


def possible_skip_outputs(block: Block) -> tuple[str, ...]:
    """The tensors of `block` that later blocks may read: all but graph inputs, none if the block is
    repeated."""
    if block.repeat > 1:
        return ()
    entry = () if block.entry is None else (block.entry,)
    return (*entry, *(op.name for op in block.operators))


def skip_tensors_of(graph: OpGraph) -> SkipTensors:
    """The skip tensors of `graph`. Entries with the same name in several blocks cannot be skip tensors."""
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
    """The blocks, repetitions counted, before which no stage boundary may be: a skip tensor crosses there."""
    skips = skip_tensors_of(graph)
    ends = tuple(accumulate(block.repeat for block in graph.blocks))
    joined: set[int] = set()
    for home, names in enumerate(skips.skip_outputs):
        for name in names:
            last = max(place for place, skip_inputs in enumerate(skips.skip_inputs) if name in skip_inputs)
            joined.update(range(ends[home], ends[last]))
    return frozenset(joined)


def tensor_shapes(graph: OpGraph) -> tuple[Mapping[str, tuple[int, ...]], ...]:
    """For each block, the shapes of all its activations: entry, skip inputs, and results of its operators."""
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
