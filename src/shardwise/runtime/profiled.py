"""What a profile has of something that ran."""

from __future__ import annotations

from typing import NamedTuple


class ProfiledEvent(NamedTuple):
    """Something in a profile, in seconds on the machine's clock. `node` is the number of the node of
    autograd's graph that it computes, where it is a backward pass, else of the next one to be made; -1 where
    that is not told."""

    name: str
    start_s: float
    finish_s: float
    node: int = -1
    is_backward: bool = False
