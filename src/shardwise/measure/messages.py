"""What links between ranks carry at this moment, in a fraction of a second."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import distributed

Pair = tuple[int, int]
"""A rank that sends and one that receives."""

FIRST_BYTES = 1 << 18
MAX_BYTES = 1 << 25
ENOUGH_S = 0.05
"""A message that takes this long is believed; shorter ones are doubled, so that what a link lets through in a
burst does not count."""


def message_rates(rounds: Iterable[Sequence[Pair]]) -> dict[Pair, float]:
    """Bytes per second from rank to rank, the disjoint pairs of a round at a time.

    Every rank of the default process group calls this with the same rounds; all get the same numbers.
    """
    rates: dict[Pair, float] = {}
    for pairs in rounds:
        _sent(pairs, 4)  # connects
        left, nbytes = list(pairs), FIRST_BYTES
        while left and nbytes <= MAX_BYTES:
            spent_s = _sent(left, nbytes)
            rates |= {pair: nbytes / spent_s[pair] for pair in left}
            left = [pair for pair in left if spent_s[pair] < ENOUGH_S]
            nbytes *= 2
    return rates


def _sent(pairs: Sequence[Pair], nbytes: int) -> dict[Pair, float]:
    """Seconds of one message of each pair, from a barrier to the later of its two ends."""
    rank = distributed.get_rank()
    message = torch.zeros(nbytes // 4)
    distributed.barrier()
    start_s = time.perf_counter()
    for source, target in pairs:
        if rank == source:
            distributed.send(message, target)
        elif rank == target:
            distributed.recv(message, source)
    own = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
    every = own.new_empty(distributed.get_world_size())
    distributed.all_gather_single(every, own)
    return {(source, target): float(max(every[source], every[target])) for source, target in pairs}
