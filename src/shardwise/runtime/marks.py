"""Marks in profiles, of what runs of a graph. Where no profile is taken they cost next to nothing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.profiler import record_function

from shardwise.runtime.private import is_profiled

BLOCK, OPERATOR, TRAFFIC_MARK = "BLOCK:", "OP:", "TO:"
"""What names of marks begin with: the forward pass of a block or of an operator, whose name follows, and what
is done for tensors to be where they are read."""

OPERATOR_COLLECTIVES, CONVERSIONS, GATHERS, GRADIENTS = "exchanges", "conversions", "gathers", "gradients"
"""Kinds of traffic, as breakdowns of plans call them: what ranks tell each other inside an operator, from one
operator to the next, parameters on their way to readers, and gradients of parameters on their way back."""

_NOTHING = nullcontext()


def profiled_range(kind: str, name: str) -> AbstractContextManager[object]:
    """What runs inside is told in a profile as `name`; made where it is entered."""
    return record_function(kind + name) if is_profiled() else _NOTHING
