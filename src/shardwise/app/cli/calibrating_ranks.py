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
    from shardwise.runtime import Team

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
        """What `work` returns on every rank, each in a group of its own; all begin at once."""

    def together(self, work: Work, *arguments: object) -> list[Any]:
        """What `work` returns on every rank, all in one group."""


def processes_here() -> int:
    """As many as were started, or one for each core."""
    started = os.environ["WORLD_SIZE"] if TORCHRUN_VARIABLE in os.environ else os.cpu_count()
    return int(started or 1)


@contextlib.contextmanager
def ranks_of(cluster: Cluster) -> Iterator[Ranks]:
    """Those that torchrun (or `emulate`) started, of which this process is one; else processes of this
    machine, which end with this. ConfigError where other numbers were started than there are
    devices."""
    if TORCHRUN_VARIABLE not in os.environ:
        with contextlib.ExitStack() as teams:
            yield _Own(teams=teams, speeds=(1.0,) * cluster.devices)
        return
    from shardwise.measure import launched_group
    from shardwise.runtime import Team

    if int(os.environ["WORLD_SIZE"]) != cluster.devices:
        raise ConfigError(
            "has another number of devices than processes were started", key="--cluster",
            found=str(cluster.devices), allowed=os.environ["WORLD_SIZE"],
        )  # fmt: skip
    speeds = [node.speed for node in cluster.nodes for _ in range(node.devices)]
    with launched_group() as rank, Team(1) as alone:
        yield _Launched(alone=alone, rank=rank, speeds=speeds)


class _Own:
    """Processes that live until `teams` ends: one group of them all, and one of each alone."""

    rank = 0

    def __init__(self, *, teams: contextlib.ExitStack, speeds: Sequence[float]) -> None:
        from shardwise.runtime import Team

        self.speeds = speeds
        self._alone = [teams.enter_context(Team(1)) for _ in speeds]
        self._all = teams.enter_context(Team(len(speeds)))

    def apart(self, work: Work, *arguments: object) -> list[Any]:
        with ThreadPoolExecutor(len(self._alone)) as pool:
            started = [pool.submit(team.run, 1, work, *arguments) for team in self._alone]
            return [each.result()[0] for each in started]

    def together(self, work: Work, *arguments: object) -> list[Any]:
        return self._all.run(len(self.speeds), work, *arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """This process among those of a launcher, and one that it started, which is in no group with others."""

    alone: Team
    rank: int
    speeds: Sequence[float]

    def apart(self, work: Work, *arguments: object) -> list[Any]:
        return self._of_all(self.alone.run(1, work, *arguments)[0])

    def together(self, work: Work, *arguments: object) -> list[Any]:
        return self._of_all(work(None, *arguments))

    def _of_all(self, value: Any) -> list[Any]:
        """What each has to say, when all have: so none begins what follows before the others."""
        from shardwise.measure import from_all_ranks

        return from_all_ranks(value)
