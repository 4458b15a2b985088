"""What a process that measures sets up: its threads, and the group that a launcher put it in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from shardwise.measure.clock import Clock


def torch_version() -> str:
    return str(torch.__version__)


def use_threads(threads: int) -> None:
    """Compute with so many threads in this process from now on."""
    torch.set_num_threads(threads)


@contextlib.contextmanager
def launched_group() -> Iterator[int]:
    """The process group (gloo) of all processes that a launcher started together; gives this one's rank."""
    distributed.init_process_group("gloo")
    try:
        yield distributed.get_rank()
    finally:
        distributed.destroy_process_group()


def group_clock(*, batches: int) -> Clock:
    """A clock whose batches all ranks of the default process group begin at once."""
    return Clock(batches=batches, ready=distributed.barrier)


def from_all_ranks(value: Any) -> list[Any]:
    """What each rank of the default process group has to say, by rank."""
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, value)
    return found
