"""What an operator computes and what it keeps, in terms of its dims."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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
