"""`OperatorKind`, the record that defines an operator kind, and helpers to read and refuse operators."""

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
    """An attribute of a kind. A `dim` is the name of one dim, `dims` are names separated by spaces, a
    `number` is any finite one."""

    name: str
    type: Literal["integer", "number", "flag", "text", "dim", "dims"]
    meaning: str
    choices: tuple[str, ...] = ()
    low: int = 0
    required: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorKind:
    """An operator kind: its tensors, its work and its sharding rules.

    `operands` describes inputs, parameters and output for the documentation. `inputs` and `parameters` are
    the fewest and the most of them. `check` raises the ConfigError of `refuse` where tensors do not match.
    `splits` returns all rules except replication. `work` and `saved` are as in `work_of` and `saved_of`.
    """

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
    """The error at an operator, with its name, located at `key` of it."""
    return ConfigError(
        f"{op.kind} operator {short_repr(op.name)} {message}", key=key or None, found=found, allowed=allowed
    )


def integer_of(op: OpNode, name: str, default: int) -> int:
    """An integer among the attributes."""
    return int(op.attributes.get(name, default))


def text_of(op: OpNode, name: str, default: str) -> str:
    """A text among the attributes."""
    return str(op.attributes.get(name, default))


def dims_of(op: OpNode, name: str, default: Sequence[str]) -> tuple[str, ...]:
    """Dims that an attribute names."""
    return tuple(str(op.attributes[name]).split()) if name in op.attributes else tuple(default)


def without(dims: Sequence[str], left_out: Sequence[str]) -> tuple[str, ...]:
    """`dims` in order, without those in `left_out`."""
    return tuple(dim for dim in dims if dim not in left_out)


def dims_text(dims: Sequence[str]) -> str:
    """Dims as text for messages."""
    return ", ".join(dims) or "none"


def no_work(op: OpNode) -> tuple[KernelWork, ...]:
    """The work of an operator that only changes the view of its input."""
    return ()


def input_saved(op: OpNode) -> SavedTensors:
    """The saved tensors of an operator whose backward pass needs its first input."""
    return SavedTensors(inputs=(0,))


def nothing_saved(op: OpNode) -> SavedTensors:
    """The saved tensors of an operator whose backward pass needs only the gradient."""
    return SavedTensors()
