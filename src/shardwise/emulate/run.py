"""Runs a command on every device of an emulated cluster, and leaves nothing behind, however it ends.

What an event trace changes while the command runs: bandwidths of links, shares of devices.

Signals that ask for the end, noted as they come and heeded where nothing is half done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.cluster import Cluster, EventTrace, LinkChange, Slowdown
from shardwise.emulate.cgroups import CpuShares, Ticks, remove_leftover_shares
from shardwise.emulate.network import EmulatedNetwork, check_system, remove_leftovers, tool_path
from shardwise.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedChange:
    """At `time_s` after the start, `link` gets `value` bytes per second, or each of `ranks` that speed."""

    time_s: float
    value: float
    link: str | None = None
    ranks: tuple[int, ...] = ()


def changes_of(trace: EventTrace, cluster: Cluster) -> list[EmulatedChange]:
    """The changes of a trace, in order. ConfigError for events that are not emulated."""
    if trace.nodes != len(cluster.nodes) or trace.absent:
        raise ConfigError(
            "is for another cluster", key="--events",
            found=f"{trace.nodes} nodes, {len(trace.absent)} absent",
            allowed=f"{len(cluster.nodes)}, none absent",
        )  # fmt: skip
    shares: dict[str, float] = {}
    found: list[EmulatedChange] = []
    for event in trace.events:
        if isinstance(event, Slowdown):
            shares[event.where] = event.speed
            found += _slowed(event, shares, cluster)
        else:
            found.append(_change(event))
    return found


def _slowed(event: Slowdown, shares: Mapping[str, float], cluster: Cluster) -> Iterator[EmulatedChange]:
    """The devices that are touched, each at the product of its own speed and its node's, as it is planned."""
    starts = [0, *accumulate(node.devices for node in cluster.nodes)]
    number = int(event.where[1:])
    node = number if event.where[0] == "n" else bisect_right(starts, number) - 1
    touched = range(starts[node], starts[node + 1]) if event.where[0] == "n" else (number,)
    by_speed: dict[float, list[int]] = {}
    for rank in touched:
        speed = shares.get(f"n{node}", 1.0) * shares.get(f"d{rank}", 1.0)
        by_speed.setdefault(speed, []).append(rank)
    for speed, ranks in by_speed.items():
        yield EmulatedChange(time_s=event.time_s, value=speed, ranks=tuple(ranks))


def _change(event: object) -> EmulatedChange:
    if isinstance(event, LinkChange) and event.link is not None and event.bytes_per_s is not None:
        return EmulatedChange(time_s=event.time_s, value=event.bytes_per_s, link=event.link)
    raise ConfigError(
        "is not emulated", key="--events", found=type(event).__name__,
        allowed="the bandwidth of a link, the speed of a device or node",
    )  # fmt: skip


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class DeferredSignals:
    """Whether a signal has come. It is waited for like a file (`fileno`), which can be read once one has."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self.has_come = False

    def fileno(self) -> int:
        return self._reader

    def check(self) -> None:
        """KeyboardInterrupt where one has come."""
        if self.has_come:
            raise KeyboardInterrupt


@contextlib.contextmanager
def deferred_signals() -> Iterator[DeferredSignals]:
    """Within this, SIGINT, SIGTERM and SIGHUP are noted and interrupt nothing: however many come, what takes
    down is not stopped on its way. Those that are ignored stay so. A first one that came when nothing was
    left to check is a KeyboardInterrupt at the end."""
    reader, writer = os.pipe()
    noted = DeferredSignals(reader)

    def note(number: int, frame: object) -> None:
        if not noted.has_come:
            noted.has_come = True
            os.write(writer, b"!")

    taken = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
    noted.check()


PORT = "29500"
GRACE_S = 5.0
"""How long the others may take to end by themselves once a rank has failed."""

MOST_CORES = 0.8
"""Share of the machine's cores that the devices get together where nothing else is asked for."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What is run: `command` once per device of `cluster`; a device of speed 1 gets `cpu_share` of a core.
    `events` change links and devices on the way."""

    cluster: Cluster
    command: tuple[str, ...]
    cpu_share: float | None = None
    events: EventTrace | None = None

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of a core of each device."""
        speeds = [node.speed for node in self.cluster.nodes for _ in range(node.devices)]
        most = min(1.0 / max(speeds), MOST_CORES * (os.cpu_count() or 1) / sum(speeds))
        nominal = self.cpu_share if self.cpu_share is not None else most
        return tuple(nominal * speed for speed in speeds)


def run_emulation(emulation: Emulation, talk: Callable[[str], None]) -> int:
    """The exit code of the command: 0 where it is that of all ranks, else that of the first that failed (128
    and the signal where one ended it). Root only. ConfigError where this machine cannot do it."""
    check_system()
    remove_leftovers()
    remove_leftover_shares()
    changes = changes_of(emulation.events, emulation.cluster) if emulation.events is not None else []
    network = EmulatedNetwork(emulation.cluster, os.getpid())
    shares = CpuShares(emulation.cluster.devices, os.getpid())
    ticks = Ticks()
    started: list[subprocess.Popen[bytes]] = []
    with deferred_signals() as signals, contextlib.ExitStack() as cleanup:
        cleanup.callback(network.close)
        cleanup.callback(shares.close)
        cleanup.callback(_end, started)
        cleanup.callback(ticks.close)
        network.build()
        shares.build()
        for rank, share in enumerate(emulation.shares):
            shares.set(rank, share)
        latency_s = max(tier.latency_s for tier in emulation.cluster.tiers)
        if latency_s >= 1e-3:
            talk(f"latency is not emulated: links have none of the {latency_s:g} s of the cluster")
        for rank in range(emulation.cluster.devices):
            signals.check()
            started.append(_start(emulation, rank, network, shares))
        ticks.begin(talk)
        return _watched(started, changes, emulation, network, shares, signals)


def _start(
    emulation: Emulation, rank: int, network: EmulatedNetwork, shares: CpuShares
) -> subprocess.Popen[bytes]:
    """The command as one rank, in the namespace of its node and in its own control group."""
    node, local = _place(emulation.cluster, rank)
    members = shares.members(rank)
    library = ctypes.CDLL(None)

    def enter() -> None:  # in the child, before the command
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        members.write_text(str(os.getpid()))

    try:
        return subprocess.Popen(
            [tool_path("ip"), "netns", "exec", network.namespace(node), *emulation.command],
            env={**os.environ, **_variables(emulation.cluster, rank, node, local, network)},
            preexec_fn=enter,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError("cannot be started", key="COMMAND", found=str(error)) from None


def _place(cluster: Cluster, rank: int) -> tuple[int, int]:
    """The node of a rank, and its number among the node's devices."""
    local = rank
    for number, node in enumerate(cluster.nodes):
        if local < node.devices:
            return number, local
        local -= node.devices
    raise ConfigError("is not a rank of the cluster", found=str(rank))


def _variables(
    cluster: Cluster, rank: int, node: int, local: int, network: EmulatedNetwork
) -> Mapping[str, str]:
    """What torchrun would set, so that programs for torchrun run as they are; and one thread each."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "GROUP_RANK": str(node),
        "WORLD_SIZE": str(cluster.devices),
        "LOCAL_WORLD_SIZE": str(cluster.nodes[node].devices),
        "MASTER_ADDR": network.address(0) if len(cluster.nodes) > 1 else "127.0.0.1",
        "MASTER_PORT": PORT,
        "TORCHELASTIC_RUN_ID": "shardwise-emulate",
        "GLOO_SOCKET_IFNAME": "eth0" if len(cluster.nodes) > 1 else "lo",
        "OMP_NUM_THREADS": "1",
    }


def _watched(
    started: Sequence[subprocess.Popen[bytes]],
    changes: Sequence[EmulatedChange],
    emulation: Emulation,
    network: EmulatedNetwork,
    shares: CpuShares,
    signals: DeferredSignals,
) -> int:
    """Carry out the changes as they are due, until all ranks have ended, or one has failed and the others had
    their grace. KeyboardInterrupt where a signal came."""
    start_s = time.monotonic()
    running = {os.pidfd_open(process.pid): process for process in started}
    due = list(changes)
    failed, deadline_s = 0, float("inf")
    try:
        while running and time.monotonic() < deadline_s:
            until_s = min(deadline_s, start_s + due[0].time_s if due else float("inf"))
            wait_s = None if until_s == float("inf") else max(0.0, until_s - time.monotonic())
            ready, _, _ = select.select([signals.fileno(), *running], [], [], wait_s)
            signals.check()
            for descriptor in ready:
                code = running.pop(descriptor).wait()
                os.close(descriptor)
                if code and not failed:
                    failed = code if code > 0 else 128 - code
                    deadline_s = time.monotonic() + GRACE_S
            while due and start_s + due[0].time_s <= time.monotonic():
                _carry_out(due.pop(0), emulation, network, shares)
    finally:
        for descriptor in running:
            os.close(descriptor)
    return failed


def _carry_out(
    change: EmulatedChange, emulation: Emulation, network: EmulatedNetwork, shares: CpuShares
) -> None:
    if change.link is not None:
        network.shape(change.link, change.value)
    for rank in change.ranks:
        shares.set(rank, emulation.shares[rank] * change.value)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes of the ranks, whatever they do; what they started besides ends with its group."""
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in started:
        process.wait()
