"""What a process that measures sets up: its threads, and the group that a launcher put it in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import distributed

from shardwise.errors import ConfigError
from shardwise.measure.clock import BatchTimer


def torch_version() -> str:
    return str(torch.__version__)


def use_threads(threads: int) -> None:
    """Compute with so many threads in this process from now on."""
    torch.set_num_threads(threads)


def threads_in_use() -> int:
    """How many this process computes with."""
    return int(torch.get_num_threads())


@contextlib.contextmanager
def launched_group() -> Iterator[int]:
    """The process group (gloo) of all processes that a launcher started together; gives this one's rank.
    ConfigError where they cannot meet."""
    if not distributed.is_gloo_available():
        raise ConfigError("has no gloo, by which ranks talk", key="torch", found=torch.__version__)
    try:
        distributed.init_process_group("gloo")
    except distributed.DistNetworkError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        is_taken = "EADDRINUSE" in str(error)
        raise ConfigError(
            "is in use by another program" if is_taken else "is not reached by all ranks",
            key="MASTER_ADDR and MASTER_PORT", found=place, allowed="a free port of the first host",
        ) from None  # fmt: skip
    try:
        yield distributed.get_rank()
    finally:
        distributed.destroy_process_group()


def group_timer(*, batches: int) -> BatchTimer:
    """A clock whose batches all ranks of the default process group begin at once."""
    return BatchTimer(batches=batches, ready=distributed.barrier)
