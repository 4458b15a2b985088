"""Parallel search: `SearchWorkers` sends tasks to worker processes and returns results in the order of the
tasks.

A result depends on its task only, so the number of workers does not change the results.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from shardwise.errors import InternalError
from shardwise.interrupts import end_with_parent, leave_signals_to_parent, without_interrupts

Task = TypeVar("Task")
TaskResult = TypeVar("TaskResult")


class SearchWorkers(Generic[Task, TaskResult]):
    """`workers` processes that run tasks by `work`; with one worker, this process runs them.

    A context manager: leaving it ends the processes. `cpu_s` is their processor time in seconds.
    """

    def __init__(self, workers: int, work: Callable[[Task], TaskResult]) -> None:
        self._work, self._count = work, workers
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._worker_of: dict[int, int] = {}
        self.cpu_s = 0.0

    def __enter__(self) -> SearchWorkers[Task, TaskResult]:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _start(self) -> None:
        """Starts the processes at the first tasks: forks this process if the system supports it."""
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("fork" if "fork" in methods else "spawn")
        with without_interrupts():
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def results(self, tasks: Sequence[Task]) -> list[TaskResult]:
        """The result of each task. Raises InternalError if a process dies, and exceptions of `work`."""
        if self._count == 1 or len(tasks) == 1:
            return [self._work(task) for task in tasks]
        if not self._processes:
            self._start()
        results: dict[int, TaskResult] = {}
        waiting = list(enumerate(tasks))
        busy: dict[Connection, int] = {}
        while waiting or busy:
            for pipe in self._pipes:
                if waiting and pipe not in busy:
                    busy[pipe] = self._send(pipe, *waiting.pop(0))
            ready = multiprocessing.connection.wait(list(busy))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                results[busy.pop(pipe)] = self._receive(pipe)
        return [results[index] for index in range(len(tasks))]

    def results_at(self, affinities: Sequence[int], tasks: Sequence[Task]) -> list[TaskResult]:
        """Results of tasks that need the state which earlier tasks of the same affinity left. All tasks of
        one affinity, which is a number, run in one process, forked from this one. Without fork, this process
        runs all tasks."""
        if self._count == 1 or "fork" not in multiprocessing.get_all_start_methods():
            return [self._work(task) for task in tasks]
        if not self._processes:
            self._start()
        for affinity in affinities:
            self._worker_of.setdefault(affinity, len(self._worker_of) % self._count)
        pipes = [self._pipes[self._worker_of[affinity]] for affinity in affinities]
        results: dict[int, TaskResult] = {}
        waiting = list(range(len(tasks)))
        busy: dict[Connection, int] = {}
        while waiting or busy:
            for index in list(waiting):
                if pipes[index] not in busy:
                    waiting.remove(index)
                    busy[pipes[index]] = self._send(pipes[index], index, tasks[index])
            for pipe in multiprocessing.connection.wait(list(busy)):
                if isinstance(pipe, Connection):
                    results[busy.pop(pipe)] = self._receive(pipe)
        return [results[index] for index in range(len(tasks))]

    def _send(self, pipe: Connection, index: int, task: Task) -> int:
        try:
            pipe.send(task)
        except OSError:
            raise self._worker_died(pipe) from None
        return index

    def _receive(self, pipe: Connection) -> TaskResult:
        try:
            answer, error, cpu_s = pipe.recv()
        except (EOFError, OSError):
            raise self._worker_died(pipe) from None
        self.cpu_s += cpu_s
        if error is not None:
            raise error
        result: TaskResult = answer
        return result

    def _worker_died(self, pipe: Connection) -> InternalError:
        process = self._processes[self._pipes.index(pipe)]
        process.join(timeout=1.0)
        return InternalError(
            f"a worker ended with exit code {process.exitcode} before its answer; nothing is proven. "
            "It may have run out of memory: try fewer --workers"
        )


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    """Runs tasks until the pipe closes or the parent ends."""
    leave_signals_to_parent()
    end_with_parent()
    # Objects from before the fork are not scanned for garbage, so that their pages stay shared.
    gc.freeze()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        started_s = time.process_time()
        try:
            answer, error = work(task), None
        except Exception as caught:  # noqa: BLE001 - raised again in the parent process
            answer, error = None, caught
        pipe.send((answer, error, time.process_time() - started_s))
