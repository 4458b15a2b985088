"""Processes of this machine that work together: started, given work, watched, and always ended."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed

from shardwise.errors import ConfigError
from shardwise.interrupts import without_interrupts
from shardwise.runtime.devices import backends
from shardwise.runtime.private import forget_meshes

HOST = "127.0.0.1"

GRACE_S = 5.0
"""How long a process that closed its end may take to be gone."""

MAX_TEMPDIR_BYTES = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
"""How long the name of the folder of temporary files may be for a fork server's socket, which multiprocessing
lays in a folder of its own there, to have a name that Linux takes (unix(7): 108 bytes, the zero included)."""

Report = Callable[[Any], None]
"""Takes what a rank has to say while it works."""

RankTask = Callable[..., Any]
"""Called on every rank as `work(report, *arguments)`, with a process group of all ranks."""


class RankLost(Exception):
    """A rank (or one of which nothing is known but that it was there: None) ended, or failed, before its work
    was done; `was_ended` where a signal ended it, which need not happen again."""

    def __init__(self, rank: int | None, reason: str, *, details: str = "", was_ended: bool = False) -> None:
        super().__init__(f"{'another rank' if rank is None else f'rank {rank}'} {reason}")
        self.rank = rank
        self.details = details
        self.was_ended = was_ended


class WorkerPool:
    """Up to `size` worker processes, each with one thread of its own for every core it can count on.

    They are started when first needed and live until `close`; `run` gives the first of them work. A worker
    that fails, dies or disagrees ends the whole team.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._workers: list[tuple[Any, Connection]] = []
        self._runs = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process, _ in self._workers)

    def run(self, ranks: int, work: RankTask, *arguments: Any, report: Report | None = None) -> list[Any]:
        """What `work` returns on each of `ranks` ranks. `report` gets what rank 0 reports meanwhile.

        Raises ConfigError where a rank did, RankLost where one failed otherwise; then the team is closed.
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
        resource_tracker.ensure_running()  # its start ends what keeps interrupts away
        threads = threads_per_process(self._size)
        while len(self._workers) < ranks:
            parent_end, child_end = context.Pipe()
            process = context.Process(
                target=_serve, args=(len(self._workers), self._store.port, threads, child_end), daemon=True
            )
            with without_interrupts():  # also in processes on the way to it, which last as long
                process.start()
                child_end.close()
                self._workers.append((process, parent_end))

    def _send_task(self, rank: int, work: tuple[RankTask, Any, int, int]) -> None:
        try:
            self._workers[rank][1].send(work)
        except OSError:  # it is gone: what it said before is of no interest
            raise self._ended(rank, self._received_end(rank)) from None

    def _collect(self, ranks: int, report: Report | None) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < ranks:
            waiting = {self._workers[rank][1]: rank for rank in range(ranks) if rank not in results}
            ready = [waiting[connection] for connection in wait(list(waiting))]  # type: ignore[index]
            messages = {rank: self._received(rank) for rank in ready}
            # Peers of a dead rank fail too: of what comes together, the death is the reason.
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

    def _received(self, rank: int) -> tuple[str, Any]:
        """What a worker said, or that it is gone (`lost`, with its exit code)."""
        process, connection = self._workers[rank]
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            process.join(timeout=GRACE_S)
            return "lost", process.exitcode
        return kind, value

    def _lost_peer(self, ranks: int) -> RankLost | None:
        """The rank whose death may be why another failed; None where all live."""
        processes = {self._workers[rank][0].sentinel: rank for rank in range(ranks)}
        ended_ranks = [processes[sentinel] for sentinel in wait(list(processes), timeout=GRACE_S / 10)]
        return self._ended(ended_ranks[0], self._received_end(ended_ranks[0])) if ended_ranks else None

    def _ended(self, rank: int, code: int | None) -> RankLost:
        """The loss of a worker that has this exit code."""
        if code is not None and code < 0:
            return RankLost(rank, f"was ended by signal {-code}", was_ended=True)
        return RankLost(rank, f"ended with code {code}")

    def _received_end(self, rank: int) -> int | None:
        """The exit code of a worker that is gone, behind what it said before."""
        kind = ""
        value: Any = ""
        while kind != "lost":
            kind, value = self._received(rank)
        code: int | None = value
        return code

    def close(self) -> None:
        """End every worker, at once and whatever it does."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
            process.close()
        self._workers.clear()


def threads_per_process(processes: int) -> int:
    """How many each of so many processes of this machine computes with: the cores are divided."""
    return max(1, (os.cpu_count() or 1) // processes)


def _context() -> Any:
    """How workers are started: where it is safe, and its socket can have a name, as copies of one process
    that has imported what they need, which takes seconds (PyTorch alone two)."""
    if sys.platform != "linux" or len(os.fsencode(tempfile.gettempdir())) > MAX_TEMPDIR_BYTES:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shardwise.runtime"])
    return context


def _serve(rank: int, port: int, threads: int, connection: Connection) -> None:
    """A worker's life: work as it comes, until the other end is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # errors are told in one line
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    gc.freeze()  # what is imported stays: to look through it after every piece of work takes 0.2 s
    with contextlib.suppress(EOFError, ConnectionResetError, KeyboardInterrupt):
        while True:
            work, arguments, ranks, run = connection.recv()
            _work(rank, port, connection, work, arguments, ranks, run)


def _work(
    rank: int, port: int, connection: Connection, work: RankTask, arguments: Any, ranks: int, run: int
) -> None:
    """Do one piece of work and say how it ended; what went wrong is said before the others can notice."""

    def report(messages: Any) -> None:
        if rank == 0:
            connection.send(("report", messages))

    with process_group(rank, ranks, port, name=f"run{run}"):
        try:
            outcome = "result", work(report, *arguments)
        except ConfigError as error:
            fields = ("message", "file", "key", "found", "allowed")
            outcome = "refused", {field: getattr(error, field) for field in fields}
        except Exception as error:  # noqa: BLE001 - what it is, is said by the parent
            first = (str(error).strip().splitlines() or [""])[0]
            outcome = "failed", (f"{type(error).__name__}: {first}", traceback.format_exc())
        connection.send(outcome)


@contextlib.contextmanager
def process_group(rank: int, ranks: int, port: int, *, name: str) -> Iterator[None]:
    """The default process group of `ranks` ranks that meet at the store behind `port`."""
    if not distributed.is_gloo_available():
        raise ConfigError("has no gloo, by which ranks talk", key="torch", found=torch.__version__)
    store = distributed.TCPStore(HOST, port, is_master=False)
    distributed.init_process_group(
        backends(), store=distributed.PrefixStore(name, store), rank=rank, world_size=ranks
    )
    try:
        distributed.barrier()  # a rank that is done and gone would fail those that are still on their way
        yield
    finally:
        distributed.destroy_process_group()
        forget_meshes()


def leave_group() -> None:
    """Leave the default process group, where there is one: a process that ends with its threads running may
    be aborted at its very end, which a launcher takes for a failure."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
        forget_meshes()


@contextlib.contextmanager
def peer_failures() -> Iterator[None]:
    """RankLost where a collective of this process fails because a peer is gone: of gloo's errors nothing but
    the text tells that, and NCCL's are of a kind of their own."""
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, distributed.DistBackendError) or "gloo" in str(error)):
            raise
        raise RankLost(None, "is gone", details=traceback.format_exc()) from None


def _end_with_parent() -> None:
    """Whoever started this process is gone: nobody will end it, so it ends itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
