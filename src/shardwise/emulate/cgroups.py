"""Devices as shares of a core: a control group for each, which the kernel lets run so long in each period.

Ticks on every core, so that the kernel sees in time when a device has used up its share of it.
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

QUOTA_US = 1_000
"""What a device may run in each period: the least that the kernel takes. The less, the less is left to a rank
that has waited, which finds the quota of a whole period and owes nothing of the last."""

_LONGEST_US = 1_000_000
"""The kernel takes no longer period."""

_PATIENCE_S = 10.0
_PAUSE_S = 0.005
"""Between two looks: a process that was ended takes a moment to be gone."""

_FOLDER = "shardwise-{pid}"


class CpuShares:
    """A control group per rank. `build` makes them, `close` ends all that is in them and deletes them."""

    def __init__(self, ranks: int, pid: int, *, root: Path | None = None) -> None:
        self._root = root if root is not None else _cpu_root()
        self._is_v2 = (self._root / "cgroup.controllers").exists()
        self._folder = self._root / _FOLDER.format(pid=pid)
        self._ranks = ranks

    def build(self) -> None:
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
                "cannot be made: the kernel lacks shares of processors (CONFIG_CFS_BANDWIDTH), or this user "
                "may not use them",
                key=str(self._folder), found=why,
            ) from None  # fmt: skip

    def _of(self, rank: int) -> Path:
        return self._folder / f"d{rank}"

    def members(self, rank: int) -> Path:
        """The file that takes the ids of the rank's processes."""
        return self._of(rank) / "cgroup.procs"

    def set(self, rank: int, share: float) -> None:
        """Let the rank run `share` of a core from now on."""
        period = min(round(QUOTA_US / share), _LONGEST_US)
        if self._is_v2:
            (self._of(rank) / "cpu.max").write_text(f"{QUOTA_US} {period}")
            return
        (self._of(rank) / "cpu.cfs_period_us").write_text(str(period))
        (self._of(rank) / "cpu.cfs_quota_us").write_text(str(QUOTA_US))

    def close(self) -> None:
        """End every process in the groups, whoever started it, until they can be deleted."""
        _delete([*(self._of(rank) for rank in range(self._ranks)), self._folder])


def _delete(folders: Sequence[Path]) -> None:
    """End every process in these groups, the inner ones first, until they can be deleted: one that is ending
    still holds its group for a while."""
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
    """Where the control groups of processors are mounted; ConfigError where they are not."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(where)
        if kind == "cgroup2":
            controllers = Path(where) / "cgroup.controllers"
            if controllers.exists() and "cpu" in controllers.read_text().split():
                return Path(where)
    raise ConfigError(
        "are not there: the kernel lacks the control group of processors", key="CPU shares",
        allowed="a mounted cgroup with the cpu controller",
    )  # fmt: skip


def remove_leftover_shares() -> None:
    """Delete the groups of emulations whose process is gone."""
    for folder in _cpu_root().glob(_FOLDER.format(pid="*")):
        if not Path(f"/proc/{folder.name.rpartition('-')[2]}").exists():
            _delete([*folder.glob("d*"), folder])


INTERVAL_S = 5e-4
"""Between two ticks on a core: half of what a device may run in a period. They take 2 to 3 % of it."""

_MOST_PER_S = 32_000
"""Ticks on all cores together that one interpreter gives: beyond 16 cores they come less often."""


class Ticks:
    """A thread for each core that wakes up every so often and goes back to sleep.

    The kernel looks at a quota when it takes the core from a process, and otherwise with its own tick, every
    4 ms by most kernels (`account_cfs_rq_runtime` in kernel/sched/fair.c). A device that may run for 1 ms at
    a time runs for up to 4 then, pays for it later, and is now early, now late where others wait for it. A
    thread of a class above all devices takes their core for an instant.
    """

    def __init__(self) -> None:
        self._is_over = False
        self._threads: list[threading.Thread] = []

    def begin(self, talk: Callable[[str], None]) -> None:
        """Start them, once nothing is forked any more with code of its own. Where the kernel refuses such
        threads there are none, and `talk` says so."""
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
                "shares of cores are kept only by the kernel's own tick, so that waiting ranks are early or "
                f"late by milliseconds: real-time threads are refused ({refused[0]})"
            )

    def _tick(self, core: int, interval_s: float, begun: threading.Barrier, refused: list[str]) -> None:
        try:
            os.sched_setaffinity(0, {core})  # of this thread, as the next
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
        except OSError as error:
            refused.append((error.strerror or str(error)).lower())
            return
        finally:
            begun.wait()
        while not self._is_over:
            time.sleep(interval_s)

    def close(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()
