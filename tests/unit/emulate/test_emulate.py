"""Emulated clusters: what the ranks see, that changes arrive, and that nothing remains, however a run ends.

The tests need root and a kernel with the necessary features. Where one is missing, they check that the error
is one line.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.sampling import sample_of

from shardwise.cluster import EventTrace, LinkChange, NodeLost, Slowdown, load_cluster
from shardwise.emulate import Emulation, cgroups, network
from shardwise.emulate.cgroups import CpuShares, Ticks
from shardwise.emulate.run import EmulatedChange, changes_of
from shardwise.errors import ConfigError

pytestmark = pytest.mark.xdist_group("emulate")

CLUSTER = """
name: two hosts
nodes:
- {device: cpu, devices: 2, nics: {count: 1, bandwidth: 160Mb/s}}
- {device: cpu, devices: 1, speed: 0.5, nics: {count: 1, bandwidth: 80Mb/s}}
"""

COMMAND = (sys.executable, "-m", "shardwise", "emulate")


def namespaces() -> set[str]:
    folder = Path("/var/run/netns")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def groups() -> set[str]:
    return {str(path) for path in Path("/sys/fs/cgroup").glob("**/shardwise-*")}


def remaining_of(pid: int) -> set[str]:
    """Namespaces and control groups named after a process. Other processes may be emulating at the same time,
    and be killed.
    """
    return {name for name in namespaces() | groups() if re.search(rf"(?:sw|shardwise-){pid}(?!\d)", name)}


class Emulate:
    """`shardwise emulate` as a user runs it; records its processes."""

    def __init__(self) -> None:
        self.pids: list[int] = []

    def started(self, *words: str, is_interruptible: bool = False) -> subprocess.Popen[str]:
        def interruptible() -> None:  # shells ignore it in background processes
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        # Processes inside ask for their own links by name.
        place = dict(os.environ, PATH=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))
        process = subprocess.Popen(
            [*COMMAND, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=place,
            preexec_fn=interruptible if is_interruptible else None,
        )
        self.pids.append(process.pid)
        return process

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        with self.started(*words) as process:
            out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def emulate() -> Iterator[Emulate]:
    """Afterwards no namespace and no control group of the started processes may remain."""
    emulate = Emulate()
    yield emulate
    assert {name for pid in emulate.pids for name in remaining_of(pid)} == set()


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """The file of a cluster."""
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return str(path)


LACKING = ("needs root", "lacks", "not installed")


def is_possible(ran: subprocess.CompletedProcess[str]) -> bool:
    """Whether this machine can emulate; if not, the error is one line that names the missing feature."""
    if ran.returncode != 2:
        return True
    assert ran.stderr.startswith("shardwise: error: ") and ran.stderr.count("\n") == 1
    assert any(word in ran.stderr for word in LACKING)
    return False


REPORT = """
import json, os, subprocess, sys
def said(*words): return subprocess.run(words, capture_output=True, text=True, check=True).stdout
lines = [line.strip().split(":") for line in open("/proc/self/cgroup")]
line = next(where for _, kind, where in lines if kind == "cpu" or "/shardwise-" in where)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
report = {name: os.environ[name] for name in names}
report["shaped"] = said("tc", "qdisc", "show", "dev", "eth0")
report["packet_bytes"] = int(open("/sys/class/net/eth0/mtu").read())
report["group"] = line.rpartition("/")[2]
with open(sys.argv[1] + os.environ["RANK"], "w") as file:
    json.dump(report, file)
"""


@pytest.mark.slow
def test_every_rank_has_its_place_its_link_and_its_share(
    emulate: Emulate, cluster: str, tmp_path: Path
) -> None:
    ran = emulate(cluster, "--", sys.executable, "-c", REPORT, f"{tmp_path}/report")
    if not is_possible(ran):
        return
    assert (ran.returncode, ran.stderr) == (0, "")
    reported = [json.loads((tmp_path / f"report{rank}").read_text()) for rank in range(3)]
    assert [(one["RANK"], one["GROUP_RANK"], one["LOCAL_RANK"],
    one["LOCAL_WORLD_SIZE"]) for one in reported] == [
        ("0", "0", "0", "2"), ("1", "0", "1", "2"), ("2", "1", "0", "1"),
    ]  # fmt: skip
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"]) for one in reported} == {("3", "10.77.0.1")}
    assert ["rate 160Mbit" in one["shaped"] for one in reported] == [True, True, False]
    assert "rate 80Mbit" in reported[2]["shaped"]
    assert {one["packet_bytes"] for one in reported} == {
        9000
    }  # with 1,500, ranks spend up to half a step on packets
    assert [one["group"] for one in reported] == ["d0", "d1", "d2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
        # One rank fails while the others would go on for a minute.
        ("import os, sys, time; sys.exit(5) if os.environ['RANK'] == '1' else time.sleep(60)", 5),
    ],
)
def test_a_rank_that_fails_ends_all_with_its_code(
    emulate: Emulate, cluster: str, program: str, code: int
) -> None:
    ran = emulate(cluster, "--", sys.executable, "-c", program)
    assert not is_possible(ran) or ran.returncode == code


def test_tools_are_found_outside_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(network, "_SYSTEM_FOLDERS", (str(tmp_path),))
    with pytest.raises(ConfigError, match="tc: is not installed"):
        network.tool_path("tc")
    (tmp_path / "tc").touch(mode=0o755)
    assert network.tool_path("tc") == str(tmp_path / "tc")


CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Exit codes by the signal that interrupted."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_removes_the_whole_emulation(
    emulate: Emulate, cluster: str, tmp_path: Path, number: int
) -> None:
    ended = interrupted(emulate, cluster, tmp_path / "ready", (number,), apart_s=0.0)
    if is_possible(ended):
        assert ended.returncode == CODES[number] and ended.stderr.startswith("shardwise: error: interrupted")


@pytest.mark.slow
@pytest.mark.parametrize("apart_s", sample_of([0.0, 0.005, 0.02], [0.005]))
@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT, signal.SIGHUP)])
def test_further_interrupts_do_not_stop_the_removal(
    emulate: Emulate, cluster: str, tmp_path: Path, numbers: tuple[int, ...], apart_s: float
) -> None:
    """The fixture checks what remains."""
    ended = interrupted(emulate, cluster, tmp_path / "ready", numbers, apart_s=apart_s)
    # The second may come when everything is removed, and end a process that is ending: by itself (-number).
    assert not is_possible(ended) or ended.returncode in (*(CODES[each] for each in numbers), -numbers[1])


def interrupted(
    emulate: Emulate, cluster: str, ready: Path, numbers: tuple[int, ...], *, apart_s: float
) -> subprocess.CompletedProcess[str]:
    """An emulation that gets these signals at this interval while its ranks run."""
    program = f"import os, time; os.mkfifo('{ready}') if os.environ['RANK'] == '0' else 0; time.sleep(60)"
    with emulate.started(cluster, "--", sys.executable, "-c", program, is_interruptible=True) as process:
        deadline_s = time.monotonic() + 100
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline_s:
            os.sched_yield()
        for number in numbers:
            process.send_signal(number)
            select.select([], [], [], apart_s)
        _, messages = process.communicate(timeout=600)
    return subprocess.CompletedProcess(process.args, process.returncode, "", messages)


@pytest.mark.slow
def test_remains_of_a_killed_emulation_are_removed_by_the_next(
    emulate: Emulate, cluster: str, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    program = f"import os, time; os.mkfifo('{ready}') if os.environ['RANK'] == '0' else 0; time.sleep(60)"
    with emulate.started(cluster, "--", sys.executable, "-c", program) as process:
        deadline_s = time.monotonic() + 100
        while not ready.exists() and process.poll() is None and time.monotonic() < deadline_s:
            os.sched_yield()
        process.kill()
    is_possible(emulate(cluster, "--", "true"))
    assert remaining_of(process.pid) == set()


def test_groups_of_a_killed_emulation_are_deleted_when_their_processes_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ending process keeps its group for a while: here for two attempts."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    inner = tmp_path / f"shardwise-{gone.pid}" / "d0"
    inner.mkdir(parents=True)
    is_busy = [inner, inner]
    rmdir = Path.rmdir

    def failing_rmdir(folder: Path) -> None:
        if folder in is_busy:
            is_busy.remove(folder)
            raise OSError(16, "Device or resource busy")
        rmdir(folder)

    monkeypatch.setattr(cgroups, "_cpu_root", lambda: tmp_path)
    monkeypatch.setattr(Path, "rmdir", failing_rmdir)
    cgroups.remove_leftover_shares()
    assert is_busy == [] and list(tmp_path.iterdir()) == []


STREAM = """
import os, socket, subprocess
if os.environ["RANK"] == "0":
    server = socket.create_server(("10.77.0.1", 7717))
    server.settimeout(60)
    stream, _ = server.accept()
    stream.settimeout(60)
    shown = ("tc", "qdisc", "show", "dev", "eth0")
    while "rate 48Mbit" not in subprocess.run(shown, capture_output=True, text=True, check=True).stdout:
        stream.sendall(bytes(2**22))
    stream.sendall(bytes(2**20))
else:
    while True:
        try:
            stream = socket.create_connection(("10.77.0.1", 7717), timeout=60)
            break
        except ConnectionRefusedError:
            os.sched_yield()
    while stream.recv(2**20):
        pass
"""


@pytest.mark.slow
def test_queued_packets_continue_when_a_link_becomes_slow(emulate: Emulate, tmp_path: Path) -> None:
    """Packets of 64 KiB waited in a bucket of 80 kB; in a bucket of 32 they would never leave."""
    hosts, events = tmp_path / "hosts.yaml", tmp_path / "events.jsonl"
    hosts.write_text(
        "name: two\nnodes:\n"
        "- {device: cpu, count: 2, devices: 1, nics: {count: 1, bandwidth: 640Mb/s}}\n"
    )  # fmt: skip
    dropped = {"time_s": 2.0, "kind": "link", "link": "n0>s0g0", "bytes_per_s": 6e6}
    head = {"schema": "shardwise.events", "version": 1, "nodes": 2}
    events.write_text("".join(json.dumps(line) + "\n" for line in (head, dropped)))
    ran = emulate("--events", str(events), str(hosts), "--", sys.executable, "-c", STREAM)
    assert not is_possible(ran) or (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_links_and_shares_change_during_a_run(emulate: Emulate, cluster: str, tmp_path: Path) -> None:
    """The command of rank 0 ends once it sees its link at the changed bandwidth."""
    events = tmp_path / "events.jsonl"
    events.write_text(
        '{"schema": "shardwise.events", "version": 1, "nodes": 2}\n'
        '{"time_s": 0.2, "kind": "link", "link": "n0>s1g0", "bytes_per_s": 5e6}\n'
        '{"time_s": 0.2, "kind": "slow", "where": "n0", "speed": 0.5}\n'
    )
    program = (
        "import os, subprocess, sys, time\n"
        "if os.environ['RANK'] != '0': sys.exit()\n"
        "until = time.monotonic() + 20\n"
        "while time.monotonic() < until:\n"
        "    said = subprocess.run(['tc', 'qdisc', 'show', 'dev', 'eth0'], capture_output=True, text=True)\n"
        "    if 'rate 40Mbit' in said.stdout: sys.exit()\n"
        "sys.exit(9)\n"
    )
    ran = emulate(cluster, "--events", str(events), "--", sys.executable, "-c", program)
    assert not is_possible(ran) or ran.returncode == 0


def test_shares_are_of_the_cores_and_follow_the_speeds(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CLUSTER)
    place = load_cluster(str(tmp_path / "c.yaml"))
    assert Emulation(cluster=place, command=("true",), cpu_share=0.4).shares == (0.4, 0.4, 0.2)
    # 80 % of the cores, divided by speeds that sum to 2.5; no device has more than a core.
    cores = os.cpu_count() or 1
    nominal = min(1.0, 0.8 * cores / 2.5)
    requested = Emulation(cluster=place, command=("true",))
    assert requested.shares == pytest.approx((nominal, nominal, nominal / 2))


@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize(
    ("share", "period"),
    [
        (0.4, 2_500),
        (0.3, 3_333),
        (0.0004, 1_000_000),  # 2,500,000 is too long for the kernel: 0.001 is the least share
    ],
)
def test_a_share_is_a_millisecond_of_each_period(
    tmp_path: Path, is_v2: bool, share: float, period: int
) -> None:
    if is_v2:
        (tmp_path / "cgroup.controllers").write_text("cpu memory")
    shares = CpuShares(2, 4711, root=tmp_path)
    shares.build()
    shares.set(1, share)
    group = tmp_path / "shardwise-4711" / "d1"
    if is_v2:
        assert (group / "cpu.max").read_text() == f"1000 {period}"
    else:
        assert (group / "cpu.cfs_period_us").read_text() == str(period)
        assert (group / "cpu.cfs_quota_us").read_text() == "1000"


def ticking() -> dict[int, tuple[int, set[int]]]:
    """Scheduling class and cores of this process's ticking threads, by the core in their name."""
    return {
        int(thread.name.split()[1]): (
            os.sched_getscheduler(thread.native_id), os.sched_getaffinity(thread.native_id)
        )
        for thread in threading.enumerate()
        if thread.name.startswith("tick ") and thread.native_id is not None
    }  # fmt: skip


def test_every_core_has_a_thread_above_all_devices_until_the_end() -> None:
    messages: list[str] = []
    ticks = Ticks()
    ticks.begin(messages.append)
    try:
        found = ticking()
    finally:
        ticks.close()
    assert not ticking()
    if messages:  # no root, or no real-time share for such threads
        assert "real-time threads are refused" in messages[0] and len(messages) == 1
    else:
        cores = os.sched_getaffinity(0)
        assert found == {core: (os.SCHED_FIFO, {core}) for core in cores}


def test_where_such_threads_are_refused_it_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, policy: int, param: os.sched_param) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    messages: list[str] = []
    ticks = Ticks()
    ticks.begin(messages.append)
    ticks.close()
    assert len(messages) == 1 and messages[0].endswith("(operation not permitted)")
    assert not ticking()


def test_events_become_changes_of_links_and_ranks(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CLUSTER)
    place = load_cluster(str(tmp_path / "c.yaml"))
    trace = EventTrace(
        nodes=2,
        events=(
            LinkChange(time_s=1.0, link="n1>s1g0", bytes_per_s=1e6),
            Slowdown(time_s=2.0, where="n0", speed=0.5),
            Slowdown(time_s=3.0, where="d2", speed=0.25),
            # A device of a slow node is slower still, and stays slower while its node is slow.
            Slowdown(time_s=4.0, where="d1", speed=0.5),
            Slowdown(time_s=5.0, where="n0", speed=0.25),
        ),
    )
    assert changes_of(trace, place) == [
        EmulatedChange(time_s=1.0, value=1e6, link="n1>s1g0"),
        EmulatedChange(time_s=2.0, value=0.5, ranks=(0, 1)),
        EmulatedChange(time_s=3.0, value=0.25, ranks=(2,)),
        EmulatedChange(time_s=4.0, value=0.25, ranks=(1,)),
        EmulatedChange(time_s=5.0, value=0.25, ranks=(0,)),
        EmulatedChange(time_s=5.0, value=0.125, ranks=(1,)),
    ]
    for refused in (NodeLost(time_s=1.0, node="n0"), LinkChange(time_s=1.0, link="n1>s1g0", latency_s=1.0)):
        with pytest.raises(ConfigError, match="cannot be emulated"):
            changes_of(EventTrace(nodes=2, events=(refused,)), place)
    with pytest.raises(ConfigError, match="another cluster"):
        changes_of(EventTrace(nodes=3, events=()), place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("1x2xcpu",), "COMMAND"),
        (("1x2xcpu", "--", "/no/such/program"), "COMMAND: is not a program; found /no/such/program"),
        (("1x2xH100-SXM", "--", "true"), "CLUSTER"),
        (("1x65xcpu", "--", "true"), "CLUSTER"),
        (("1x2xcpu", "--cpu-share", "2", "--", "true"), "--cpu-share"),
        (("1x2xcpu", "--events", "missing.jsonl", "--", "true"), "missing.jsonl"),
    ],
)
def test_an_impossible_emulation_is_refused_in_one_line(
    emulate: Emulate, words: tuple[str, ...], named: str
) -> None:
    ran = emulate(*words)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.count("\n") == 1 and named in ran.stderr


def test_other_users_than_root_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.emulate.network import check_system

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"needs root|is not installed"):
        check_system()
