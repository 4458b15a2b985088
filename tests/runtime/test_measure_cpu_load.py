"""CPU time that other programs take during a measurement, from a folder like /proc."""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardwise.app.cli.calibrating import _warnings
from shardwise.measure import CoreSeconds, core_seconds, cores_used_by_others

TICKS = os.sysconf("SC_CLK_TCK")


def process(proc: Path, pid: int, parent: int, *ticks: int) -> None:
    """`ticks`: user and kernel time of the process, then both of its finished children."""
    (proc / str(pid)).mkdir(parents=True)
    before = f"{pid} (a (name) of 2 words) S {parent} 1 1 0 -1 4194304 100 0 0 0"
    (proc / str(pid) / "stat").write_text(f"{before} {' '.join(map(str, ticks))} 20 0 1 0\n")


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three cores, of which this process may use two; it has a child and a grandchild."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text("a-machine\n")
    (tmp_path / "stat").write_text(
        "cpu  1 1 1 1 1 1 1 1 0 0\n"
        "cpu0 100 20 3 5000 600 70 80 9 0 0\n"
        "cpu1 1000 0 0 0 0 0 0 0 0 0\n"
        "cpu2 200 0 0 0 0 0 0 0 0 0\n"
        "intr 12345\n"
    )
    here = os.getpid()
    process(tmp_path, 1, 0, 900, 900, 900, 900)
    process(tmp_path, here, 1, 10, 1, 4, 2)
    process(tmp_path, here + 1, here, 30, 3, 0, 0)
    process(tmp_path, here + 2, here + 1, 50, 5, 0, 0)
    process(tmp_path, here + 3, 1, 700, 0, 0, 0)
    return tmp_path


def test_cores_and_descendants_are_counted(proc: Path) -> None:
    found = core_seconds(proc)
    assert found is not None and found.machine == "a-machine"
    assert found.busy_s == {"0": (100 + 20 + 3 + 9) / TICKS, "2": 200 / TICKS}  # neither idle nor interrupts
    assert found.own_s == (10 + 1 + 4 + 2 + 30 + 3 + 50 + 5) / TICKS
    assert CoreSeconds.of_values(asdict(found)) == found


@pytest.mark.parametrize("text", ["", "cpu0 1 2\n", "cpu1 1 1 1 1 1 1 1 1\n", "cpu0 a b c d e f g h\n"])
def test_a_system_without_load_figures_reports_none(proc: Path, text: str) -> None:
    (proc / "stat").write_text(text)
    assert core_seconds(proc) is None
    assert core_seconds(proc / "nowhere") is None


def at(now_s: float, busy: tuple[float, float], own_s: float, *, machine: str = "a") -> CoreSeconds:
    cores = {str(core): seconds for core, seconds in enumerate(busy)}
    return CoreSeconds(machine=machine, now_s=now_s, busy_s=cores, own_s=own_s)


def test_other_load_is_the_busy_time_beyond_our_processes() -> None:
    """In 10 s the two cores are busy for 9 and 8 s. Two ranks account for 5 and 4 s of this; the other 8 of
    20 s are others'."""
    start = [at(100.0, (50.0, 60.0), 1.0), at(100.5, (50.0, 60.0), 2.0)]
    end = [at(110.0, (59.0, 68.0), 6.0), at(110.5, (59.0, 68.0), 6.0)]
    taken = cores_used_by_others(start, end)
    assert taken.cores == pytest.approx(0.8) and taken.of == 2
    quiet = [at(0.0, (0.0, 0.0), 0.0, machine="b"), *start]
    also = cores_used_by_others(quiet, [at(10.0, (3.0, 3.0), 6.0, machine="b"), *end])
    assert also == taken  # the busier of two machines counts


def test_each_rank_reports_its_own_cores() -> None:
    """Two ranks, each pinned to a core: 9 + 8 - 5 - 4 in 10 s, as if each had reported both cores."""
    ranks = [at(0.0, (0.0, 0.0), 0.0), at(0.0, (0.0, 0.0), 0.0)]
    ends = [at(10.0, (9.0, 8.0), 5.0), at(10.0, (9.0, 8.0), 4.0)]
    pinned = [
        [replace(each, busy_s={core: each.busy_s[core]}) for each, core in zip(of, "01", strict=True)]
        for of in (ranks, ends)
    ]
    assert cores_used_by_others(*pinned) == cores_used_by_others(ranks, ends)


def test_a_core_that_is_allowed_later_counts_from_then_on() -> None:
    ranks, ends = [at(0.0, (0.0, 0.0), 0.0)], [at(10.0, (9.0, 8.0), 5.0)]
    first = [replace(each, busy_s={"0": 0.0}) for each in ranks]
    assert cores_used_by_others(first, ends).cores == pytest.approx(0.4)  # 9 - 5 in 10 s


def test_a_busy_machine_is_reported() -> None:
    def message(cores: float) -> str:
        lines = _warnings({"other programs": {"cores": cores, "of": 4}})
        return "".join(text for line in lines for text, _ in line)

    assert "other programs used 0.5 of 4 cores" in message(0.5)
    assert message(0.4) == "" and not list(_warnings({}))
