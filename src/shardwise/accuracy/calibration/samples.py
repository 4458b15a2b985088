"""One measured time each: of a matmul, a pass through memory, attention, a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSample:
    """[m, k] x [k, n] in `seconds`."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """A kernel that reads and writes `nbytes` in all, and computes next to nothing, in `seconds`."""

    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSample:
    """Fused causal attention of `seq_len` queries on as many keys, forward or backward, in `seconds`.

    `work_flop` is that of the forward pass, causal counted half, in both.
    """

    seq_len: int
    work_flop: float
    is_backward: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """A collective of `ranks` ranks in `seconds`.

    `nbytes` is the whole tensor: what each rank has of an all-reduce, its output of an all-gather, its input
    of a reduce-scatter and of an all-to-all; what is sent of a message. `inner` neighbours of the group share
    their ways out through the tier that it crosses (the ranks of a node; 1 within a tier). `share` is what
    the links inside the group are of all that a device has, `alone` what one device that sends alone reaches
    over what each does while all send. `reduces_in_switch` says whether the switch can add up.
    """

    kind: Collective
    ranks: int
    nbytes: float
    seconds: float
    inner: int = 1
    share: float = 1.0
    alone: float = 1.0
    reduces_in_switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """Seconds of an all-reduce alone, of computation alone, and of the computation with the all-reduce begun
    before it and waited for behind it."""

    communication_s: float
    computation_s: float
    both_s: float
