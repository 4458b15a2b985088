"""One way to lay an operator along one mesh axis, and what its ranks then tell each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.graph.placement import Placement

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "neighbours"]
"""`all_reduce`: every rank gives and gets the whole tensor. `all_gather`: every rank gives its part and gets
the whole tensor. `reduce_scatter`: every rank gives the whole tensor and gets its part of the sum.
`neighbours`: every rank gives the tensor to the rank before it and to the one behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCall:
    """Communication inside an operator, among the ranks of the axis that its rule lays.

    The tensor exchanged has `copies` elements for each element of `dims` on a rank; dims that the rule
    divides are not among them, so that what an all-gather puts together counts in full. It is exchanged
    `forward_calls` times in the forward pass and `backward_calls` times in the backward pass.
    `element_bytes` is None for a tensor in the type of the activations.
    """

    collective: Collective
    dims: tuple[str, ...]
    copies: float = 1.0
    forward_calls: int = 1
    backward_calls: int = 1
    element_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """One way to lay an operator along one mesh axis of n ranks.

    `split` is the dim whose iterations are divided among the ranks, in at most `units` contiguous parts; None
    where every rank does all of them. One placement for each input, each parameter, and the output.
    `collectives` are what the ranks tell each other inside the operator.
    """

    name: str
    split: str | None
    inputs: tuple[Placement, ...]
    parameters: tuple[Placement, ...]
    output: Placement
    units: int = 1
    collectives: tuple[CollectiveCall, ...] = ()
