"""Times of collectives and messages between processes, alone, during computation and after it.

- `link_times`: each kind of collective alone, by bytes and number of ranks.
- `overlap_times`: an all-reduce during computation.
- `lockstep_s`: how long ranks wait for the slowest one.
- `message_rates`: current bandwidth of each link.
- `launched_group`, `use_threads`: set-up of a measuring process.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import distributed
from torch.nn import functional

from shardwise.accuracy import COLLECTIVES, Collective, LinkSample, OverlapSample
from shardwise.errors import ConfigError
from shardwise.measure.kernels import BatchTimer

# Collectives

LINK_SIZES = (2**12, 2**19, 2**21, 2**23, 2**25)
"""Bytes of the full tensor."""

OVERLAP_BYTES = 2**21
"""Bytes of the all-reduce whose overlap is measured."""

PRODUCT_SIDE = 512
"""Side of the square matrices that ranks multiply during a collective, or before it."""

LOCKSTEP_CALLS = 4
"""Matmuls before each collective, as many as in a part of a small layer."""

_BATCH_S = 0.1
"""Seconds of a batch of calls; longer than the milliseconds by which ranks leave a barrier apart."""

_MOST_CALLS = 50
"""Most calls in a batch; bounds the time of small sizes."""

_ENOUGH_S = 0.25
"""Seconds per call of one size above which larger sizes are not measured."""


def link_times(
    groups: Sequence[Sequence[int]],
    *,
    repeats: int,
    sizes: Sequence[int] = LINK_SIZES,
) -> list[LinkSample]:
    """Measure each kind of collective within disjoint `groups` of equal size, in all groups at once.

    Every rank of the default process group calls it with the same arguments; all return the same samples. A
    time is the median of `repeats`, each on the slowest rank.
    """
    ranks = len(groups[0])
    samples = []
    with _own_group(groups) as own:
        for kind in COLLECTIVES:
            if kind == "message" and ranks % 2:
                continue
            for nbytes in sizes:
                call = _call(kind, nbytes, ranks, own)
                seconds = _slowest_s(call, repeats)
                on = 2 if kind == "message" else ranks
                transferred = _elements(nbytes, ranks) * ranks * 4.0
                samples.append(LinkSample(kind=kind, ranks=on, nbytes=transferred, seconds=seconds))
                if seconds > _ENOUGH_S:
                    break
    return samples


@contextmanager
def _own_group(groups: Sequence[Sequence[int]]) -> Iterator[distributed.ProcessGroup | None]:
    """This rank's group among disjoint `groups`, or None. All ranks create and destroy the groups
    together."""
    rank = distributed.get_rank()
    made = [distributed.new_group(list(members)) for members in groups]
    yield next((group for group, members in zip(made, groups, strict=True) if rank in members), None)
    for group in made:
        if group is not distributed.GroupMember.NON_GROUP_MEMBER:
            distributed.destroy_process_group(group)


def overlap_times(groups: Sequence[Sequence[int]], *, repeats: int) -> list[OverlapSample]:
    """Measure how an all-reduce overlaps with matmuls that take as long, in all disjoint `groups` at once.
    Gradients are reduced in the same way during the backward pass.

    Every rank of the default process group calls it with the same groups; all return the same samples.
    """
    whole, x = torch.ones(OVERLAP_BYTES // 4), torch.ones(PRODUCT_SIDE, PRODUCT_SIDE)

    def computed(calls: int) -> None:
        for _ in range(calls):
            functional.linear(x, x)

    with _own_group(groups) as own:

        def summed(calls: int) -> None:
            work = None
            if own is not None:
                work = distributed.all_reduce(whole.fill_(1.0), group=own, async_op=True)
            computed(calls)
            if work is not None:
                work.wait()

        for _ in range(2):  # warm-up: the first collective sets up connections
            alone_s, one_s = _batch_s(lambda: summed(0), 1), _batch_s(lambda: computed(4), 1) / 4.0
        calls = max(1, round(alone_s / one_s))
        return [
            OverlapSample(
                communication_s=_batch_s(lambda: summed(0), 1),
                computation_s=_batch_s(lambda: computed(calls), 1),
                both_s=_batch_s(lambda: summed(calls), 1),
            )
            for _ in range(repeats)
        ]


def lockstep_s(groups: Sequence[Sequence[int]], *, repeats: int) -> float:
    """Seconds that the ranks of a group wait at a collective after equal matmuls, beyond the collective
    alone.

    The cause is jitter: the last rank is not always the same. The median of all disjoint `groups`. Every rank
    of the default process group calls it with the same groups; all return the same number.
    """
    x, one = torch.ones(PRODUCT_SIDE, PRODUCT_SIDE), torch.zeros(1)
    with _own_group(groups) as own:

        def waits_s(calls: int) -> float:
            """Mean seconds of a collective after `calls` matmuls."""
            spent_s = 0.0
            for _ in range(repeats if own is not None else 0):
                for _ in range(calls):
                    functional.linear(x, x)
                start_s = time.perf_counter()
                distributed.all_reduce(one, group=own)
                spent_s += time.perf_counter() - start_s
            return spent_s / repeats

        waits_s(0)  # the first one connects
        distributed.barrier()
        alone_s, after_compute_s = waits_s(0), waits_s(LOCKSTEP_CALLS)
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, torch.tensor([after_compute_s - alone_s], dtype=torch.float64))
        return lost_s([float(each) for each in found], groups)


def lost_s(waits_s: Sequence[float], groups: Sequence[Sequence[int]]) -> float:
    """Seconds that all ranks of a group wait, from each rank's own. A rank that is always last waits for
    nobody, and the others do not slow it down. The median of the groups, at least 0."""
    return max(median(min(waits_s[rank] for rank in members) for members in groups), 0.0)


def _elements(nbytes: int, ranks: int) -> int:
    """fp32 elements of a rank's shard of a tensor of about `nbytes` bytes."""
    return max(1, nbytes // 4 // ranks)


def _call(
    kind: Collective, nbytes: int, ranks: int, group: distributed.ProcessGroup | None
) -> Callable[[], object]:
    """A call of the collective on this rank, with tensors allocated in advance; does nothing outside a
    group."""
    if group is None:
        return lambda: None
    shard = torch.ones(_elements(nbytes, ranks))
    whole = torch.ones(_elements(nbytes, ranks) * ranks)
    other = torch.empty_like(whole)
    if kind == "all_reduce":
        return lambda: distributed.all_reduce(whole.fill_(1.0), group=group)
    if kind == "all_gather":
        return lambda: distributed.all_gather_single(other, shard, group=group)
    if kind == "reduce_scatter":
        return lambda: distributed.reduce_scatter_single(shard, whole, group=group)
    if kind == "all_to_all":
        return lambda: distributed.all_to_all_single(other, whole, group=group)
    place = distributed.get_rank(group)
    peer = distributed.get_global_rank(group, place ^ 1)
    if place % 2:
        return lambda: distributed.recv(other, peer, group=group)
    return lambda: distributed.send(whole, peer, group=group)


def _slowest_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of `call` on the slowest rank: the median of `repeats` batches. The first call connects and is
    not counted.

    Ranks that share cores leave a barrier milliseconds apart, so batches last longer than that.
    """
    call()
    once_s = _batch_s(call, 1)
    calls = max(1, min(_MOST_CALLS, round(_BATCH_S / once_s)))
    return median(_batch_s(call, calls) for _ in range(repeats if once_s < _ENOUGH_S else 1))


def _batch_s(call: Callable[[], object], calls: int) -> float:
    """Seconds per call of a batch of `calls` calls on the slowest rank; equal on all ranks."""
    distributed.barrier()
    start_s = time.perf_counter()
    for _ in range(calls):
        call()
    spent = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
    distributed.all_reduce(spent, op=distributed.ReduceOp.MAX)
    return float(spent) / calls


# Current bandwidth of links

Pair = tuple[int, int]
"""Sender and receiver of a message."""

FIRST_BYTES = 1 << 18
"""Size in bytes of the first message of each pair."""

MAX_BYTES = 1 << 25
"""Size in bytes above which messages are not doubled further."""

ENOUGH_S = 0.05
"""Seconds of a message from which on its rate counts. Shorter messages are doubled in size, so that the burst
allowance of a link does not count."""


def message_rates(rounds: Iterable[Sequence[Pair]]) -> dict[Pair, float]:
    """Bytes per second from rank to rank. The disjoint pairs of a round send at once.

    Every rank of the default process group calls it with the same rounds; all get the same numbers.
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
    """Seconds of one message of each pair, from a barrier until both ends are done."""
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


# Set-up of a measuring process


def torch_version() -> str:
    """Version of PyTorch."""
    return str(torch.__version__)


def use_threads(threads: int) -> None:
    """Set the number of compute threads of this process."""
    torch.set_num_threads(threads)


def threads_in_use() -> int:
    """Number of compute threads of this process."""
    return int(torch.get_num_threads())


@contextlib.contextmanager
def launched_group() -> Iterator[int]:
    """The gloo process group of all processes that a launcher started together; yields this process's rank.
    ConfigError if the rendezvous fails."""
    if not distributed.is_gloo_available():
        raise ConfigError("has no gloo, which ranks communicate with", key="torch", found=torch.__version__)
    try:
        distributed.init_process_group("gloo")
    except distributed.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        is_taken = "EADDRINUSE" in str(error)
        raise ConfigError(
            "is in use by another program" if is_taken else "cannot be reached by all ranks",
            key="MASTER_ADDR and MASTER_PORT", found=place, allowed="a free port of the first host",
        ) from None  # fmt: skip
    try:
        yield distributed.get_rank()
    finally:
        distributed.destroy_process_group()


def group_timer(*, batches: int) -> BatchTimer:
    """A batch timer whose batches start at the same time on all ranks of the default process group."""
    return BatchTimer(batches=batches, ready=distributed.barrier)
