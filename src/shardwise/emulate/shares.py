"""Devices as shares of a core: a control group for each, which the kernel lets run so long in each period."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Sequence
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
