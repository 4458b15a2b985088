"""A pool of worker processes on this machine that run tasks as ranks of a process group.

`WorkerPool` starts, watches and always ends them. `RankLost` reports a rank that ended or failed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed

from shardwise.errors import ConfigError
from shardwise.interrupts import end_with_parent, without_interrupts
from shardwise.runtime.devices import backends
from shardwise.runtime.private import forget_meshes

HOST = "127.0.0.1"

GRACE_S = 5.0
"""Seconds that a process may take to exit after it closed its connection."""

CHECK_S = 5.0
"""Seconds without a message after which the workers' states are looked at."""

STOPPED_CHECKS = 6
"""Number of checks in a row after which a stopped process counts as lost: 30 s with `CHECK_S`."""

MAX_PENDING_CONNECTIONS = 1024
"""Connections that the store's socket keeps pending: all ranks of this machine may connect at once."""

MAX_TEMPDIR_BYTES = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""Longest path of the temporary folder in bytes. The socket of multiprocessing's fork server, in a folder of
its own there, must fit into the 108 bytes of unix(7), with the terminating zero."""

Report = Callable[[Any], None]
"""Receives the reports of a rank while it works."""

RankTask = Callable[..., Any]
"""Called on every rank as `work(report, *arguments)`, within a process group of all ranks."""


class RankLost(Exception):
    """A rank ended or failed before its task was done; `rank` is None if it is unknown which.

    `was_ended` says that a signal ended it, so that a restart may help.
    """

    def __init__(self, rank: int | None, reason: str, *, details: str = "", was_ended: bool = False) -> None:
        super().__init__(f"{'another rank' if rank is None else f'rank {rank}'} {reason}")
        self.rank = rank
        self.details = details
        self.was_ended = was_ended


class WorkerPool:
    """Up to `size` worker processes, which share the cores of this machine evenly.

    They start when first needed and live until `close`. `run` gives a task to the first ones. If a worker
    fails or dies, all workers are ended.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._store = _loopback_store()
        self._workers: list[tuple[Any, Connection]] = []
        self._runs = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers, by rank."""
        return tuple(process.pid for process, _ in self._workers)

    def run(self, ranks: int, work: RankTask, *arguments: Any, report: Report | None = None) -> list[Any]:
        """Run `work` on `ranks` ranks and return the result of each. `report` gets the reports of rank 0.

        Raises ConfigError if a rank did, and RankLost if one failed otherwise. Then the pool is closed.
        """
        self._start(ranks)
        self._runs += 1
        try:
            for rank in range(ranks):
                self._send_task(rank, (work, arguments, ranks, self._runs))
            return self._collect(ranks, report)
        except BaseException:
            self.close()
            raise

    def _start(self, ranks: int) -> None:
        context = _context()
        resource_tracker.ensure_running()  # starting it later would unblock interrupts
        threads = threads_per_process(self._size)
        while len(self._workers) < ranks:
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(len(self._workers), self._store.port, threads, child_end), daemon=True
            )
            with without_interrupts():  # also while the fork server starts the process
                process.start()
                child_end.close()
                self._workers.append((process, parent_end))

    def _send_task(self, rank: int, work: tuple[RankTask, Any, int, int]) -> None:
        try:
            self._workers[rank][1].send(work)
        except OSError:  # it is gone: its earlier messages do not matter
            raise self._ended(rank, self._received_end(rank)) from None

    def _collect(self, ranks: int, report: Report | None) -> list[Any]:
        results: dict[int, Any] = {}
        stopped: Counter[int] = Counter()
        while len(results) < ranks:
            waiting = {self._workers[rank][1]: rank for rank in range(ranks) if rank not in results}
            ready = [waiting[connection] for connection in wait(list(waiting), timeout=CHECK_S)]  # type: ignore[index]
            if not ready:
                stopped = self._stopped(waiting.values(), stopped)
                continue
            messages = {rank: self._received(rank) for rank in ready}
            # Peers of a dead rank fail too. Of simultaneous messages, the death is the cause.
            for rank in sorted(ready, key=lambda rank: messages[rank][0] != "lost"):
                kind, value = messages[rank]
                if kind == "report" and report is not None:
                    report(value)
                elif kind == "result":
                    results[rank] = value
                elif kind == "refused":
                    raise ConfigError(**value)
                elif kind == "failed":
                    raise self._lost_peer(ranks) or RankLost(rank, f"failed: {value[0]}", details=value[1])
                elif kind == "lost":
                    raise self._ended(rank, value)
        return [results[rank] for rank in range(ranks)]

    def _stopped(self, ranks: Iterable[int], before: Counter[int]) -> Counter[int]:
        """The number of checks in a row, this one included, in which each of `ranks` was stopped. RankLost
        once that is too often. (Ctrl-Z stops this process too, which then does not count.)"""
        found = Counter({rank: before[rank] + 1 for rank in ranks if is_stopped(self._workers[rank][0].pid)})
        for rank, checks in found.items():
            if checks >= STOPPED_CHECKS:
                raise RankLost(rank, f"was stopped for {checks * CHECK_S:.0f} s", was_ended=True)
        return found

    def _received(self, rank: int) -> tuple[str, Any]:
        """The next message of a worker, or `lost` with its exit code if it is gone."""
        process, connection = self._workers[rank]
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            process.join(timeout=GRACE_S)
            return "lost", process.exitcode
        return kind, value

    def _lost_peer(self, ranks: int) -> RankLost | None:
        """The loss of a dead rank that may have made another fail; None if all live."""
        processes = {self._workers[rank][0].sentinel: rank for rank in range(ranks)}
        ended_ranks = [processes[sentinel] for sentinel in wait(list(processes), timeout=GRACE_S / 10)]
        return self._ended(ended_ranks[0], self._received_end(ended_ranks[0])) if ended_ranks else None

    def _ended(self, rank: int, code: int | None) -> RankLost:
        """The loss of a worker that ended with this exit code."""
        if code is not None and code < 0:
            return RankLost(rank, f"was ended by signal {-code}", was_ended=True)
        return RankLost(rank, f"ended with code {code}")

    def _received_end(self, rank: int) -> int | None:
        """The exit code of a worker that is gone, after its remaining messages."""
        kind = ""
        value: Any = ""
        while kind != "lost":
            kind, value = self._received(rank)
        code: int | None = value
        return code

    def close(self) -> None:
        """Kill every worker, whatever it does."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers.clear()


def _loopback_store() -> distributed.TCPStore:
    """A key-value store at a free port of HOST alone.

    By itself a TCPStore listens on all interfaces: its host name says only where clients connect.
    """
    with socket.create_server((HOST, 0), backlog=MAX_PENDING_CONNECTIONS) as server:
        port = server.getsockname()[1]
        return distributed.TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, SIGTSTP). False where the system does not say so."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == b"T"


def threads_per_process(processes: int) -> int:
    """Compute threads of each of `processes` processes on this machine: the cores are divided evenly."""
    return max(1, (os.cpu_count() or 1) // processes)


def _context() -> Any:
    """How workers start: from a fork server that has imported their modules, which saves seconds (two for
    PyTorch). Where that is unsafe, or its socket's path too long, they are spawned."""
    if sys.platform != "linux" or len(os.fsencode(tempfile.gettempdir())) > MAX_TEMPDIR_BYTES:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardwise.runtime"])
    return context


def _serve(rank: int, port: int, threads: int, connection: Connection) -> None:
    """Main loop of a worker: run tasks until the pool closes the connection."""
    end_with_parent()
    torch.set_num_threads(threads)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # errors are reported in one line
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    gc.freeze()  # imported objects stay: scanning them after every task takes 0.2 s
    with contextlib.suppress(EOFError, ConnectionResetError, KeyboardInterrupt):
        while True:
            work, arguments, ranks, run = connection.recv()
            _work(rank, port, connection, work, arguments, ranks, run)


def _work(
    rank: int, port: int, connection: Connection, work: RankTask, arguments: Any, ranks: int, run: int
) -> None:
    """Run one task and send its outcome. An error is sent before the other ranks can notice it."""

    def report(messages: Any) -> None:
        if rank == 0:
            connection.send(("report", messages))

    with process_group(rank, ranks, port, name=f"run{run}"):
        try:
            outcome = "result", work(report, *arguments)
        except ConfigError as error:
            fields = ("message", "file", "key", "found", "allowed")
            outcome = "refused", {field: getattr(error, field) for field in fields}
        except Exception as error:  # noqa: BLE001 - reported by the parent
            first = (str(error).strip().splitlines() or [""])[0]
            outcome = "failed", (f"{type(error).__name__}: {first}", traceback.format_exc())
        connection.send(outcome)


@contextlib.contextmanager
def process_group(rank: int, ranks: int, port: int, *, name: str) -> Iterator[None]:
    """The default process group of `ranks` ranks, with the store at `port`."""
    if not distributed.is_gloo_available():
        raise ConfigError("has no gloo, which ranks communicate with", key="torch", found=torch.__version__)
    store = distributed.TCPStore(HOST, port, is_master=False)
    distributed.init_process_group(
        backends(), store=distributed.PrefixStore(name, store), rank=rank, world_size=ranks
    )
    try:
        distributed.barrier()  # a rank that finishes early would fail those that still connect
        yield
    finally:
        distributed.destroy_process_group()
        forget_meshes()


def leave_group() -> None:
    """Destroy the default process group, if there is one. A process that exits with the threads of a group
    may abort, which a launcher takes for a failure."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
        forget_meshes()


@contextlib.contextmanager
def peer_failures() -> Iterator[None]:
    """RankLost if a collective fails because a peer is gone. Gloo's errors are recognised by their text;
    NCCL's have their own class."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistBackendError) or "gloo" in str(error)):
            raise
        raise RankLost(None, "is gone", details=traceback.format_exc()) from None
