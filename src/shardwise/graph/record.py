"""What is trained, operator by operator: records of a graph, independent of any framework.

An operator is an iteration space over named dims, as in an einsum: each of its tensors (inputs, parameters,
output) lists the dims that it has, outermost first. Splitting the work along a dim splits the tensors that
have it. Which dims may be split is the operator kind's to say (`KINDS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

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
