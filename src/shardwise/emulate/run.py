"""Runs a command on every device of an emulated cluster and always cleans up.

`run_emulation` starts the ranks in their namespaces and control groups. `changes_of` turns an event trace
into changes of link bandwidth and device speed during the run. `deferred_signals` records termination
signals, which are then handled between two actions.
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
from shardwise.interrupts import note_termination

# Changes during a run


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedChange:
    """A change at `time_s` seconds: bandwidth `value` (bytes/s) of `link`, or speed `value` of each of
    `ranks`."""

    time_s: float
    value: float
    link: str | None = None
    ranks: tuple[int, ...] = ()


def changes_of(trace: EventTrace, cluster: Cluster) -> list[EmulatedChange]:
    """The changes of a trace, in order. ConfigError for a trace of another cluster or events that cannot be
    emulated."""
    if trace.nodes != len(cluster.nodes) or trace.absent:
        raise ConfigError(
            "is for another cluster", key="--events",
            found=f"{trace.nodes} nodes, {len(trace.absent)} absent",
            allowed=f"{len(cluster.nodes)} nodes, none absent",
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
    """Changes of the affected devices, each to the product of its own speed and its node's."""
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
        "cannot be emulated", key="--events", found=type(event).__name__,
        allowed="bandwidth of a link, speed of a device or node",
    )  # fmt: skip


# Signals

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end an emulation."""


class DeferredSignals:
    """Whether a signal has arrived. It can be waited for like a file (`fileno`), which becomes readable
    then."""

    def __init__(self, reader: int) -> None:
        self._reader = reader
        self.has_come = False

    def fileno(self) -> int:
        return self._reader

    def check(self) -> None:
        """KeyboardInterrupt if a signal has arrived."""
        if self.has_come:
            raise KeyboardInterrupt


@contextlib.contextmanager
def deferred_signals() -> Iterator[DeferredSignals]:
    """Record SIGINT, SIGTERM and SIGHUP within this context instead of interrupting, so that cleaning up is
    never interrupted. Ignored signals stay ignored. A signal that was not checked raises KeyboardInterrupt at
    the end."""
    reader, writer = os.pipe()
    noted = DeferredSignals(reader)

    def note(number: int, frame: object) -> None:
        if not noted.has_come:
            note_termination(number)
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


# The run

PORT = "29500"
"""Port of the rendezvous, torchrun's default."""

GRACE_S = 5.0
"""Seconds that the other ranks may take to exit after one has failed."""

MOST_CORES = 0.8
"""Share of the machine's cores that all devices get together by default; the rest is for the system."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """What to run: `command` once per device of `cluster`. A device of speed 1 gets `cpu_share` of a core; by
    default, as much as the machine allows. `events` change links and devices during the run."""

    cluster: Cluster
    command: tuple[str, ...]
    cpu_share: float | None = None
    events: EventTrace | None = None

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of a core of each device."""
        speeds = [node.speed for node in self.cluster.nodes for _ in range(node.devices)]
        most = min(1.0 / max(speeds), MOST_CORES * (os.cpu_count() or 1) / sum(speeds))
        nominal = self.cpu_share if self.cpu_share is not None else most
        return tuple(nominal * speed for speed in speeds)


def run_emulation(emulation: Emulation, talk: Callable[[str], None]) -> int:
    """Run the emulation; returns the exit code: 0 if all ranks return 0, else that of the first rank that
    failed.

    For a rank that a signal ended, it is 128 plus the signal. Needs root. ConfigError if this machine cannot
    emulate the cluster.
    """
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
            talk(f"latency is not emulated: the links do not have the cluster's {latency_s:g} s")
        for rank in range(emulation.cluster.devices):
            signals.check()
            started.append(_start(emulation, rank, network, shares))
        ticks.begin(talk)
        return _watched(started, changes, emulation, network, shares, signals)


def _start(
    emulation: Emulation, rank: int, network: EmulatedNetwork, shares: CpuShares
) -> subprocess.Popen[bytes]:
    """Start the command as one rank, in its node's namespace and its own control group."""
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
    """Node of a rank, and its local rank there."""
    local = rank
    for number, node in enumerate(cluster.nodes):
        if local < node.devices:
            return number, local
        local -= node.devices
    raise ConfigError("is not a rank of the cluster", found=str(rank))


def _variables(
    cluster: Cluster, rank: int, node: int, local: int, network: EmulatedNetwork
) -> Mapping[str, str]:
    """Environment variables that torchrun would set, so that its programs run unchanged; one thread each."""
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
    """Apply changes when they are due, until all ranks have ended, or GRACE_S seconds after one has failed.
    KeyboardInterrupt if a signal came."""
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
    """Kill the process groups of the ranks."""
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in started:
        process.wait()
