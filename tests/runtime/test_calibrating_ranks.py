"""Who measures: ranks that a launcher started, or processes started for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from shardwise.app.cli import calibrating
from shardwise.app.cli.calibrating_ranks import ranks_of
from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.measure import KernelTimes
from shardwise.runtime.team import HOST

pytestmark = pytest.mark.xdist_group("runtime")


def seen(report: Any, factor: int) -> tuple[int, int, int]:
    """The group that this is called in: a sum over it, its size; and the process."""
    total = torch.tensor(float(factor))
    distributed.all_reduce(total)
    return int(total), distributed.get_world_size(), os.getpid()


def test_without_a_launcher_processes_are_started() -> None:
    with ranks_of(load_cluster("1x2xcpu")) as ranks:
        apart = ranks.apart(seen, 5)
        assert [found[:2] for found in apart] == [(5, 1), (5, 1)]
        assert len({os.getpid(), *(pid for _, _, pid in apart)}) == 3
        assert ranks.together(seen, 5)[:2] == (10, 2)
        assert ranks.rank == 0 and list(ranks.speeds) == [1.0, 1.0]


LAUNCHED = """
from shardwise.app.cli.calibrating_ranks import ranks_of
from shardwise.cluster import load_cluster
from tests.runtime.test_calibrating_ranks import seen
if __name__ == "__main__":
    with ranks_of(load_cluster("1x2xcpu")) as ranks:
        apart = ranks.apart(seen, 5 + ranks.rank)
        print(ranks.rank, [found[:2] for found in apart], ranks.together(seen, 5)[:2])
"""


def test_ranks_of_a_launcher_measure_apart_and_together(tmp_path: Path) -> None:
    """Each in a process and group of its own, and all know what all found; then the two of them in one."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    with socket.create_server((HOST, 0)) as free:
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    environment = os.environ | common | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)], env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [each.communicate(timeout=120)[0] for each in ranks]
    assert [line.strip() for line in told] == [f"{rank} [(5, 1), (6, 1)] (10, 2)" for rank in range(2)]


def test_the_middle_one_of_the_devices_of_speed_one_counts() -> None:
    """Of 1, 2 and 3 s it is 2 s; among all five, with two of half the speed that take 8 and 9, 3 s."""
    nothing = KernelTimes(matmuls=(), passes=(), attentions=(), bf16_ratio=1.0)
    found = [
        calibrating._Times(kernels=nothing, steps_s=[seconds], pace_s=seconds)
        for seconds in (3.0, 9.0, 1.0, 8.0, 2.0)
    ]
    assert calibrating._typical(found, [1.0, 0.5, 1.0, 0.5, 1.0]).pace_s == 2.0
    with pytest.raises(ConfigError, match="no device of speed 1"):
        calibrating._typical(found, [0.5] * 5)
