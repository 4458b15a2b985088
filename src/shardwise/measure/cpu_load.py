"""CPU load of other programs during a measurement (Linux), as cores used by others."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_USER, _NICE, _SYSTEM, _STEAL = 0, 1, 2, 7
"""Fields of /proc/stat: busy times, and time that a hypervisor gave to others. Interrupts are left out, since
messages of the measuring processes cause them too."""

_PARENT, _TIMES = 1, slice(11, 15)
"""Fields of /proc/PID/stat after the name: parent; busy times, its own and of children that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSeconds:
    """Busy seconds on a `machine` at time `now_s` of its clock: of each core that this process may use, and
    of this process with its descendants (`own_s`)."""

    machine: str
    now_s: float
    busy_s: Mapping[str, float]
    own_s: float

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> CoreSeconds:
        """From the values of `dataclasses.asdict`."""
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoresUsed:
    """Mean number of cores that other programs used, of the `of` cores of a machine."""

    cores: float
    of: int

    @property
    def share(self) -> float:
        return self.cores / self.of


def core_seconds(proc: Path = Path("/proc")) -> CoreSeconds | None:
    """Current values; None if the system does not report them."""
    try:
        return CoreSeconds(
            machine=(proc / "sys/kernel/random/boot_id").read_text().strip(),
            now_s=time.monotonic(),
            busy_s=_busy_s((proc / "stat").read_text(), os.sched_getaffinity(0)),
            own_s=_tree_s(proc, os.getpid()),
        )
    except (OSError, ValueError, IndexError, AttributeError):  # files are missing or differ, or not Linux
        return None


def cores_used_by_others(start: Sequence[CoreSeconds], end: Sequence[CoreSeconds]) -> CoresUsed:
    """Cores used by programs other than the measuring processes (at least one) between `start` and `end`. Of
    several machines, the one with the largest share counts."""
    found = []
    for machine in {each.machine for each in end}:
        pairs = [pair for pair in zip(start, end, strict=True) if pair[1].machine == machine]
        cores = {core: seconds for _, last in pairs for core, seconds in last.busy_s.items()}
        first = {core: seconds for before, _ in pairs for core, seconds in before.busy_s.items()}
        busy_s = sum(seconds - first.get(core, seconds) for core, seconds in cores.items())
        own_s = sum(last.own_s - before.own_s for before, last in pairs)
        passed_s = max(last.now_s - before.now_s for before, last in pairs)
        found.append(CoresUsed(cores=max(busy_s - own_s, 0.0) / passed_s, of=len(cores)))
    return max(found, key=lambda each: each.share)


def _busy_s(stat: str, cores: Collection[int]) -> dict[str, float]:
    """Busy seconds of each of `cores` in the text of /proc/stat."""
    found = {}
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in cores:
            ticks = [int(fields[place]) for place in (_USER, _NICE, _SYSTEM, _STEAL)]
            found[name[3:]] = sum(ticks) / _TICKS_PER_S
    if not found:
        raise ValueError(stat)
    return found


def _tree_s(proc: Path, root: int) -> float:
    """Busy seconds of process `root` and all its descendants."""
    parents, ticks = {}, {}
    for folder in proc.glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        parents[int(folder.name)] = int(fields[_PARENT])
        ticks[int(folder.name)] = sum(map(int, fields[_TIMES]))
    own = {root}
    while descendants := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= descendants
    return sum(ticks[pid] for pid in own) / _TICKS_PER_S
