"""What a kind of operator says of itself, and how it reads and refuses operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ConfigError
from shardwise.graph.record import KernelWork, OpNode, SavedTensors
from shardwise.graph.rules import ShardingRule
from shardwise.inputs import short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribute:
    """A setting that a kind reads. A `dim` is the name of one dim, `dims` are names of dims with spaces
    between them, a `number` is any finite one."""

    name: str
    type: Literal["integer", "number", "flag", "text", "dim", "dims"]
    meaning: str
    choices: tuple[str, ...] = ()
    low: int = 0
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorKind:
    """A kind of operator: what its tensors are and how its work is laid out.

    `operands` says for the documentation which inputs and parameters it reads, and what it makes of them.
    `inputs` and `parameters` are the fewest and the most it takes. `check` raises ConfigError by `refuse`
    where its tensors do not fit together; `splits` are its rules but for replication. `work` and `saved` as
    in `work_of` and `saved_of`."""

    name: str
    summary: str
    operands: str
    inputs: tuple[int, int]
    parameters: tuple[int, int] = (0, 0)
    attributes: tuple[Attribute, ...] = ()
    check: Callable[[OpNode], None]
    splits: Callable[[OpNode], tuple[ShardingRule, ...]]
    work: Callable[[OpNode], tuple[KernelWork, ...]]
    saved: Callable[[OpNode], SavedTensors]


def refuse(op: OpNode, message: str, *, key: str = "", found: str | None = None, allowed: str) -> ConfigError:
    """An error at an operator, by its name, located at `key` of it."""
    return ConfigError(
        f"{op.kind} operator {short_repr(op.name)} {message}", key=key or None, found=found, allowed=allowed
    )


def integer_of(op: OpNode, name: str, default: int) -> int:
    """A whole number among the attributes."""
    return int(op.attributes.get(name, default))


def text_of(op: OpNode, name: str, default: str) -> str:
    """A word among the attributes."""
    return str(op.attributes.get(name, default))


def dims_of(op: OpNode, name: str, default: Sequence[str]) -> tuple[str, ...]:
    """Dims named by an attribute."""
    return tuple(str(op.attributes[name]).split()) if name in op.attributes else tuple(default)


def without(dims: Sequence[str], left_out: Sequence[str]) -> tuple[str, ...]:
    """`dims` in their order but for those left out."""
    return tuple(dim for dim in dims if dim not in left_out)


def dims_text(dims: Sequence[str]) -> str:
    """Dims as a message shows them."""
    return ", ".join(dims) or "none"


def no_work(op: OpNode) -> tuple[KernelWork, ...]:
    """The work of an operator that only looks at its input in another way."""
    return ()


def nothing_saved(op: OpNode) -> SavedTensors:
    """What is kept of an operator whose backward needs its gradient alone."""
    return SavedTensors()
