"""The processes that `calibrate` measures on: those that a launcher started, or its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"

Work = Callable[..., Any]
"""Called as `work(report, *arguments)` in a process group, as a team's is."""


class Ranks(Protocol):
    """As many processes as a cluster has devices. `rank` is that of this process, `speeds` how fast the
    device of each is beside one of speed 1."""

    @property
    def rank(self) -> int: ...

    @property
    def speeds(self) -> Sequence[float]: ...

    def apart(self, work: Work, *arguments: object) -> list[Any]:
        """What `work` returns on every rank, each in a group of its own, all at a time."""

    def together(self, work: Work, *arguments: object) -> Any:
        """What `work` returns on rank 0, all ranks in one group."""


def processes_here() -> int:
    """As many as were started, or one for each core."""
    started = os.environ["WORLD_SIZE"] if TORCHRUN_VARIABLE in os.environ else os.cpu_count()
    return int(started or 1)


@contextlib.contextmanager
def ranks_of(cluster: Cluster) -> Iterator[Ranks]:
    """Those that torchrun (or `emulate`) started, of which this process is one; else processes of this
    machine, started for each piece of work. ConfigError where other numbers were started than there are
    devices."""
    if TORCHRUN_VARIABLE not in os.environ:
        yield _Own(speeds=(1.0,) * cluster.devices)
        return
    from shardwise.measure import launched_group

    if int(os.environ["WORLD_SIZE"]) != cluster.devices:
        raise ConfigError(
            "has another number of devices than processes were started", key="--cluster",
            found=str(cluster.devices), allowed=os.environ["WORLD_SIZE"],
        )  # fmt: skip
    with launched_group() as rank:
        yield _Launched(rank=rank, speeds=[node.speed for node in cluster.nodes for _ in range(node.devices)])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Own:
    speeds: Sequence[float]
    rank: int = 0

    def apart(self, work: Work, *arguments: object) -> list[Any]:
        count = len(self.speeds)
        with ThreadPoolExecutor(count) as pool:
            started = [pool.submit(_alone, work, *arguments) for _ in range(count)]
            return [each.result() for each in started]

    def together(self, work: Work, *arguments: object) -> Any:
        from shardwise.runtime import Team

        with Team(len(self.speeds)) as team:
            return team.run(len(self.speeds), work, *arguments)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    speeds: Sequence[float]
    rank: int

    def apart(self, work: Work, *arguments: object) -> list[Any]:
        from shardwise.measure import from_all_ranks

        return from_all_ranks(_alone(work, *arguments))

    def together(self, work: Work, *arguments: object) -> Any:
        return work(None, *arguments)


def _alone(work: Work, *arguments: object) -> Any:
    """What `work` returns in a process of its own, started for it."""
    from shardwise.runtime import Team

    with Team(1) as team:
        return team.run(1, work, *arguments)[0]
