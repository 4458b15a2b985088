"""The processes that `calibrate` measures on: those that a launcher started, or its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from shardwise.runtime import WorkerPool

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"

RankTask = Callable[..., Any]
"""Called as `task(report, *arguments)` in a process group, as a team's is; returns what JSON holds."""


class Ranks(Protocol):
    """As many processes as a cluster has devices. `rank` is that of this process, `speeds` how fast the
    device of each is beside one of speed 1."""

    @property
    def rank(self) -> int: ...

    @property
    def speeds(self) -> Sequence[float]: ...

    def run_separately(self, task: RankTask, *arguments: object) -> list[Any]:
        """What `task` returns on every rank, each in a group of its own; all begin at once."""

    def run_in_group(self, task: RankTask, *arguments: object) -> list[Any]:
        """What `task` returns on every rank, all in one group."""

    def gathered(self, value: Any) -> list[Any]:
        """The `value` of this process, and of each that a launcher started beside it."""


def is_launched() -> bool:
    """Whether a launcher (or `emulate`) started this process, as one of several."""
    return TORCHRUN_VARIABLE in os.environ


def cluster_here(device: str) -> str:
    """A cluster of all processes that were started, on hosts of as many as this one's; or of one for each
    core."""
    if not is_launched():
        return f"1x{os.cpu_count() or 1}x{device}"
    ranks, local = _started("WORLD_SIZE"), _started_here()
    if ranks % local:
        raise ConfigError(
            "is needed where hosts have unequal numbers of processes", key="--cluster",
            found=f"{local} of {ranks} processes on this host", allowed="the cluster that was started",
        )  # fmt: skip
    return f"{ranks // local}x{local}x{device}"


def threads_here(processes: int) -> int:
    """How many threads each of so many processes trains with; where a launcher started this one, its own."""
    from shardwise.measure import threads_in_use
    from shardwise.runtime import threads_per_process

    return threads_in_use() if is_launched() else threads_per_process(processes)


def _started(variable: str) -> int:
    """A number that launchers set; ConfigError where it is not there."""
    text = os.environ.get(variable, "")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            "is not set as torchrun sets it", key=variable, found=repr(text), allowed="a number from 1 on"
        )
    return int(text)


def _started_here() -> int:
    """Processes of this host; all of them where the launcher does not say."""
    return _started("LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "WORLD_SIZE")


def _check_hosts(cluster: Cluster, local: Sequence[int]) -> None:
    """ConfigError where ranks, each on a host with so many, are not placed as the devices of `cluster`."""
    hosts: list[int] = []
    while sum(hosts) < len(local):
        hosts.append(local[sum(hosts)])
    nodes = [node.devices for node in cluster.nodes]
    if nodes != hosts:
        raise ConfigError(
            "has other nodes than processes were started on", key="--cluster",
            found=f"nodes of {', '.join(map(str, nodes))} devices",
            allowed=f"nodes of {', '.join(map(str, hosts))}",
        )  # fmt: skip


@contextlib.contextmanager
def ranks_of(cluster: Cluster) -> Iterator[Ranks]:
    """Those that torchrun (or `emulate`) started, of which this process is one; else processes of this
    machine, which end with this. ConfigError where other numbers were started than there are
    devices, or on other hosts; RankLost where a rank of a launcher is gone."""
    if not is_launched():
        with contextlib.ExitStack() as teams:
            yield _OwnProcesses(teams=teams, speeds=(1.0,) * cluster.devices)
        return
    from shardwise.measure import launched_group
    from shardwise.runtime import WorkerPool, all_gather_json, peer_failures

    if _started("WORLD_SIZE") != cluster.devices:
        raise ConfigError(
            "has another number of devices than processes were started", key="--cluster",
            found=str(cluster.devices), allowed=os.environ["WORLD_SIZE"],
        )  # fmt: skip
    speeds = [node.speed for node in cluster.nodes for _ in range(node.devices)]
    with peer_failures(), launched_group() as rank, WorkerPool(1) as own_pool:
        _check_hosts(cluster, all_gather_json(_started_here()))
        yield _LaunchedProcesses(own_pool=own_pool, rank=rank, speeds=speeds)


class _OwnProcesses:
    """Processes that live until `teams` ends: one group of them all, and one of each alone."""

    rank = 0

    def __init__(self, *, teams: contextlib.ExitStack, speeds: Sequence[float]) -> None:
        from shardwise.runtime import WorkerPool

        self.speeds = speeds
        self._single_pools = [teams.enter_context(WorkerPool(1)) for _ in speeds]
        self._all = teams.enter_context(WorkerPool(len(speeds)))

    def run_separately(self, task: RankTask, *arguments: object) -> list[Any]:
        with ThreadPoolExecutor(len(self._single_pools)) as pool:
            started = [pool.submit(team.run, 1, task, *arguments) for team in self._single_pools]
            return [each.result()[0] for each in started]

    def run_in_group(self, task: RankTask, *arguments: object) -> list[Any]:
        return self._all.run(len(self.speeds), task, *arguments)

    def gathered(self, value: Any) -> list[Any]:
        return [value]


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchedProcesses:
    """This process among those of a launcher, and one that it started, which is in no group with others."""

    own_pool: WorkerPool
    rank: int
    speeds: Sequence[float]

    def run_separately(self, task: RankTask, *arguments: object) -> list[Any]:
        return self.gathered(self.own_pool.run(1, task, *arguments)[0])

    def run_in_group(self, task: RankTask, *arguments: object) -> list[Any]:
        return self.gathered(task(None, *arguments))

    def gathered(self, value: Any) -> list[Any]:
        """When all have: so none begins what follows before the others."""
        from shardwise.runtime import all_gather_json

        return all_gather_json(value)
