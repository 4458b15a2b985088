"""Devices as CPU shares: a control group for each rank, with a quota of CPU time per period.

`Ticks` wakes a thread on every core often enough that the kernel enforces the quotas in time.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shardwise.errors import ConfigError

# Control groups

QUOTA_US = 1_000
"""CPU time of a device in each period, in microseconds: the smallest that the kernel accepts. A rank that has
waited starts with a full quota, so a small quota makes it less early."""

_LONGEST_US = 1_000_000
"""Longest period that the kernel accepts, in microseconds."""

_PATIENCE_S = 10.0
"""Seconds after which undeletable groups are left; the next emulation deletes them."""

_PAUSE_S = 0.005
"""Seconds between two attempts to delete a group: ended processes take a moment to disappear."""

_FOLDER = "shardwise-{pid}"


class CpuShares:
    """A control group per rank. `build` creates them; `close` ends all processes in them and deletes them."""

    def __init__(self, ranks: int, pid: int, *, root: Path | None = None) -> None:
        self._root = root if root is not None else _cpu_root()
        self._is_v2 = (self._root / "cgroup.controllers").exists()
        self._folder = self._root / _FOLDER.format(pid=pid)
        self._ranks = ranks

    def build(self) -> None:
        """Create the groups. ConfigError if the kernel or the user's rights do not allow it."""
        try:
            self._folder.mkdir()
            if self._is_v2:
                (self._root / "cgroup.subtree_control").write_text("+cpu")
                (self._folder / "cgroup.subtree_control").write_text("+cpu")
            for rank in range(self._ranks):
                self._of(rank).mkdir()
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ConfigError(
                "cannot be created: the kernel has no CPU quotas (CONFIG_CFS_BANDWIDTH), or this user may "
                "not use them",
                key=str(self._folder), found=why,
            ) from None  # fmt: skip

    def _of(self, rank: int) -> Path:
        return self._folder / f"d{rank}"

    def members(self, rank: int) -> Path:
        """The file to which the ids of the rank's processes are written."""
        return self._of(rank) / "cgroup.procs"

    def set(self, rank: int, share: float) -> None:
        """Limit the rank to `share` of a core."""
        period = min(round(QUOTA_US / share), _LONGEST_US)
        if self._is_v2:
            (self._of(rank) / "cpu.max").write_text(f"{QUOTA_US} {period}")
            return
        (self._of(rank) / "cpu.cfs_period_us").write_text(str(period))
        (self._of(rank) / "cpu.cfs_quota_us").write_text(str(QUOTA_US))

    def close(self) -> None:
        """End every process in the groups, whoever started it, and delete the groups."""
        _delete([*(self._of(rank) for rank in range(self._ranks)), self._folder])


def _delete(folders: Sequence[Path]) -> None:
    """End every process in these groups, inner groups first, and delete them. Retries, since a process that
    is ending still occupies its group."""
    until_s = time.monotonic() + _PATIENCE_S
    while any(folder.exists() for folder in folders) and time.monotonic() < until_s:
        for folder in folders:
            _end_members(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()
        select.select([], [], [], _PAUSE_S)


def _end_members(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)


def _cpu_root() -> Path:
    """Mount point of the cpu controller. ConfigError if it is not mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(where)
        if kind == "cgroup2":
            controllers = Path(where) / "cgroup.controllers"
            if controllers.exists() and "cpu" in controllers.read_text().split():
                return Path(where)
    raise ConfigError(
        "are not available: the kernel has no cpu controller for control groups", key="CPU shares",
        allowed="a mounted cgroup with the cpu controller",
    )  # fmt: skip


def remove_leftover_shares() -> None:
    """Delete the groups of emulations whose process has ended."""
    for folder in _cpu_root().glob(_FOLDER.format(pid="*")):
        if not Path(f"/proc/{folder.name.rpartition('-')[2]}").exists():
            _delete([*folder.glob("d*"), folder])


# Ticks

INTERVAL_S = 5e-4
"""Seconds between two ticks on a core: half of a device's quota. Ticks take 2 to 3 % of a core."""

_MOST_PER_S = 32_000
"""Most ticks per second on all cores together, which one interpreter runs. With more than 16 cores, each core
gets fewer ticks."""


class Ticks:
    """A thread on each core that wakes up periodically and sleeps again.

    The kernel checks a quota when it takes the core from a process, and otherwise at its own tick, often
    every 4 ms (`account_cfs_rq_runtime` in kernel/sched/fair.c). A device with a quota of 1 ms could then run
    for up to 4 ms and pause longer later. Other ranks would wait for it irregularly. A thread of a real-time
    class preempts the devices for an instant, which triggers the check.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def begin(self, talk: Callable[[str], None]) -> None:
        """Start the threads, after all ranks were forked. If the kernel refuses real-time threads, there are
        none, and `talk` gets a note."""
        cores = sorted(os.sched_getaffinity(0))
        interval_s = max(INTERVAL_S, len(cores) / _MOST_PER_S)
        begun = threading.Barrier(len(cores) + 1)
        refused: list[str] = []
        for core in cores:
            arguments = (core, interval_s, begun, refused)
            thread = threading.Thread(target=self._tick, args=arguments, name=f"tick {core}", daemon=True)
            thread.start()
            self._threads.append(thread)
        begun.wait()
        if refused:
            talk(
                "CPU shares are enforced only by the kernel's own tick, so that waiting ranks are early or "
                f"late by milliseconds: real-time threads are refused ({refused[0]})"
            )

    def _tick(self, core: int, interval_s: float, begun: threading.Barrier, refused: list[str]) -> None:
        try:
            os.sched_setaffinity(0, {core})  # of this thread, like the scheduler below
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
        except OSError as error:
            refused.append((error.strerror or str(error)).lower())
            return
        finally:
            begun.wait()
        while not self._is_over:
            time.sleep(interval_s)

    def close(self) -> None:
        """Stop the threads."""
        self._is_over = True
        for thread in self._threads:
            thread.join()
