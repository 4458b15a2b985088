"""Any number of workers finds and counts the same; a worker that dies ends the search; after a budget,
unexplored candidates are counted.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.property.search_instances import Instance

from shardwise.cluster import load_cluster
from shardwise.errors import InternalError
from shardwise.model import model_from_config
from shardwise.search import BranchAndBound, Fastest, Question, worker_pool
from shardwise.search.bnb import branch, roots, solver
from shardwise.search.bnb.branch import SubtreeSearch
from shardwise.search.bnb.incumbent import Goal, Smallest, Tradeoff
from shardwise.search.bnb.solver import SearchResult
from shardwise.search.clock import SearchClock, WorkLimit
from shardwise.search.worker_pool import SearchWorkers
from shardwise.strategy import Job

PLAIN = {
    "layers": 5, "hidden": 768, "ffn": 3072, "heads": 12, "kv_heads": 6, "vocab": 50_257, "seq_len": 4096,
}  # fmt: skip
ROUTED = {**PLAIN, "layers": 4, "experts": 6, "top_k": 2, "expert_ffn": 768}


def case_of(dimensions: dict[str, int], cluster: str, **changes: Any) -> Instance:
    question = Question(
        model=model_from_config(dimensions, name="small"),
        cluster=load_cluster(cluster),
        job=Job(seq_len=1536, global_batch_size=12, dtype="bf16"),
        **changes,
    )
    return Instance(seed=0, question=question)


CASES = (
    case_of(PLAIN, "2x3xA100-40G", fixed={"offload": "none"}),
    case_of(ROUTED, "2x2xA100-40G", fixed={"recompute": "none"}, axes={"schedule": ("1f1b", "zb_v")}),
    case_of(PLAIN, "2x4xL4", axes={"pp": (1, 2), "recompute": ("none", "full"), "offload": ("none", "both")}),
)
"""Spaces with dozens of grids or more."""

GOALS: tuple[Callable[[], Goal], ...] = (lambda: Fastest(3), Smallest, Tradeoff)


@pytest.fixture
def small_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds and batches so small that there are several, after the primal heuristics of a large space."""
    monkeypatch.setattr(solver, "SMALL_SPACE", 0)
    monkeypatch.setattr(solver, "SMALL_SPACE_WITH_MEMORY", 0)
    monkeypatch.setattr(solver, "FIRST_ROUND", 64)
    monkeypatch.setattr(solver, "LARGEST_ROUND", 256)
    monkeypatch.setattr(roots, "ONE_BATCH_NODES", 16)
    monkeypatch.setattr(roots, "ONE_BATCH_HEURISTIC_NODES", 16)
    monkeypatch.setattr(roots, "DEGREES_PER_BATCH", 2)


def searched(case: Instance, goal: Goal, **options: Any) -> SearchResult:
    return BranchAndBound(case.question.problem(), case.space, goal, **options).run()


def children() -> set[multiprocessing.process.BaseProcess]:
    """Child processes of this process that still run; other tests may keep theirs."""
    return set(multiprocessing.active_children())


def without_clock(outcome: SearchResult) -> tuple[Any, ...]:
    """The whole outcome without its measured times."""
    found = [(f.time_s, f.device_bytes, f.table[0]) for f in outcome.found]
    return found, outcome.ledger.by_degrees, outcome.unexplored, outcome.lower_bound_s


@pytest.mark.parametrize("most", [1, 8])
def test_the_children_of_a_batch_are_bounded(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At depth 5 they are splits, which divide: of one node a part at a time. Everywhere the answer and the
    number of candidates are those of the search without a bound."""
    case = case_of(PLAIN, "1x4xA100-40G", fixed={"offload": "none", "recompute": "none"})
    free = searched(case, Fastest(3))
    lengths: list[int] = []
    descend = SubtreeSearch._descend

    def noted(self: SubtreeSearch, nodes: Any, depth: int) -> None:
        if depth == 5:
            lengths.append(len(nodes))
        descend(self, nodes, depth)

    monkeypatch.setattr(SubtreeSearch, "_descend", noted)
    searched(case, Fastest(3))
    assert max(lengths) > 8
    lengths.clear()
    monkeypatch.setattr(branch, "MOST_CHILDREN", most)
    monkeypatch.setattr(branch, "FEW_PAIRS", 1)
    monkeypatch.setattr(branch, "PAIRS_PER_BATCH", 4)
    bounded = searched(case, Fastest(3))
    assert 1 <= max(lengths) <= most
    assert [(one.time_s, one.table[0]) for one in bounded.found] == [
        (one.time_s, one.table[0]) for one in free.found
    ]
    assert bounded.ledger.total == free.ledger.total and bounded.unexplored == 0


@pytest.mark.slow
@pytest.mark.usefixtures("small_rounds")
@pytest.mark.parametrize("goal", GOALS, ids=("fastest", "smallest", "tradeoff"))
def test_the_number_of_workers_does_not_change_the_answer(
    goal: Callable[[], Goal], monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    before = children()
    rounds: list[int] = []
    results = SearchWorkers.results

    def counted(self: Any, tasks: Any) -> Any:
        rounds.append(len(tasks))
        return results(self, tasks)

    monkeypatch.setattr(SearchWorkers, "results", counted)
    cases = CASES if full and isinstance(goal(), Fastest) else CASES[1:2]
    for case in cases:
        alone = without_clock(searched(case, goal()))
        assert alone[0]
        for workers in (2, 4):
            assert without_clock(searched(case, goal(), workers=workers)) == alone
    assert max(rounds) >= roots.LISTING_BATCHES
    assert sum(batches > 1 for batches in rounds) > 6 * len(cases)
    assert not children() - before


@pytest.mark.slow
def test_the_size_of_rounds_changes_no_answer(small_rounds: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    small = searched(case, Fastest(3))
    monkeypatch.undo()
    large = searched(case, Fastest(3))
    assert [f.time_s for f in small.found] == pytest.approx([f.time_s for f in large.found], rel=1e-12)
    assert small.ledger.total == large.ledger.total == case.count


@pytest.mark.usefixtures("small_rounds")
def test_a_worker_that_dies_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    parent, run = os.getpid(), SubtreeSearch.run

    def dying(self: Any) -> None:
        if os.getpid() != parent:
            os._exit(3)
        run(self)

    monkeypatch.setattr(SubtreeSearch, "run", dying)
    with pytest.raises(InternalError, match=r"exit code 3 .*nothing is proven"):
        searched(CASES[0], Fastest(1), workers=2)
    assert not children() - before


ORPHANS = r"""
import os, signal, sys
from shardwise.search.worker_pool import SearchWorkers

if int(sys.argv[1]) != signal.SIGKILL:
    signal.signal(int(sys.argv[1]), signal.SIG_DFL)  # nohup ignores SIGHUP in all that it starts
with SearchWorkers(2, lambda _: (os.write(1, b"at work\n"), signal.pause())) as workers:
    workers.results([1, 2])
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_workers_end_with_their_parent(ending: signal.Signals) -> None:
    """The workers hold the standard output of their parent: it ends when the last of them has ended."""
    words = [sys.executable, "-c", ORPHANS, str(int(ending))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            assert [parent.stdout.readline() for _ in range(2)] == ["at work\n"] * 2
            parent.send_signal(ending)
            rest, _ = parent.communicate(timeout=60)
            assert rest == "" and parent.returncode == -ending
        finally:
            parent.kill()


def test_a_worker_that_has_just_started_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt from the keyboard reaches all processes at once, also those that do not ignore it yet."""
    serve = worker_pool._serve

    def interrupted(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        serve(*arguments)

    monkeypatch.setattr(worker_pool, "_serve", interrupted)
    with SearchWorkers[int, int](2, abs) as found:
        assert found.results([-1, -2, -3]) == [1, 2, 3]


def test_an_interrupt_while_workers_start_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def starting(process: multiprocessing.process.BaseProcess) -> None:
        signal.raise_signal(signal.SIGINT)
        start(process)

    start = multiprocessing.process.BaseProcess.start
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", starting)
    before = children()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), SearchWorkers[int, int](2, abs) as found:
            found.results([-1, -2])
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not children() - before


@pytest.mark.usefixtures("small_rounds")
def test_an_exception_of_a_worker_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    parent, run = os.getpid(), SubtreeSearch.run

    def failing(self: Any) -> None:
        if os.getpid() != parent:
            raise InternalError("no such thing")
        run(self)

    monkeypatch.setattr(SubtreeSearch, "run", failing)
    with pytest.raises(InternalError, match="no such thing"):
        searched(CASES[0], Fastest(1), workers=2)
    assert not children() - before


@pytest.mark.slow
@pytest.mark.usefixtures("small_rounds")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_spent_budget_leaves_unexplored_candidates(workers: int) -> None:
    case = CASES[0]
    best_s = searched(case, Fastest(1)).found[0].time_s
    outcome = searched(case, Fastest(1), workers=workers, clock=SearchClock(1e-9))
    assert outcome.unexplored > 0
    assert outcome.lower_bound_s <= best_s
    assert outcome.ledger.total + outcome.unexplored == case.count


@pytest.mark.slow
@pytest.mark.usefixtures("small_rounds")
def test_a_budget_that_ends_between_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the search stands still for a number of polls; then the budget is over."""
    case, checks = CASES[0], 0
    best_s = searched(case, Fastest(1)).found[0].time_s
    last = 10**9

    def now_s() -> float:
        nonlocal checks
        checks += 1
        return 0.0 if checks < last else 9.0

    monkeypatch.setattr(time, "perf_counter", now_s)
    assert searched(case, Fastest(1), clock=SearchClock(1.0)).unexplored == 0
    whole, ends = checks, set()
    for share in (0.2, 0.4, 0.6, 0.8, 0.85, 0.9, 0.95, 0.98):
        checks, last = 0, int(share * whole)
        outcome = searched(case, Fastest(1), clock=SearchClock(1.0))
        ends.add(outcome.unexplored)
        # The very last poll comes when nothing is left.
        assert outcome.unexplored > 0 or share > 0.9
        assert outcome.lower_bound_s <= best_s * (1.0 + 1e-12)
        assert outcome.ledger.total + outcome.unexplored == case.count
    assert len(ends) > 1


class InterruptedClock(SearchClock):
    """A clock that is interrupted at its n-th poll."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.checks, self._last = 0, last

    @property
    def is_over(self) -> bool:
        self.checks += 1
        if self.checks >= self._last:
            self.interrupt()
        return super().is_over


@pytest.mark.slow
@pytest.mark.usefixtures("small_rounds")
def test_an_interrupt_at_any_time_leaves_unexplored_candidates(full: bool) -> None:
    """Also during the primal heuristics: the incumbent is the best so far, and the rest has a bound."""
    case, clock = CASES[0], InterruptedClock(10**9)
    best_s = searched(case, Fastest(1), clock=clock).found[0].time_s
    ends, heuristic_only = set(), 0
    for last in range(1, clock.checks, max(clock.checks // (40 if full else 20), 1)):
        outcome = searched(case, Fastest(1), clock=InterruptedClock(last))
        assert outcome.is_interrupted
        assert outcome.ledger.total + outcome.unexplored == case.count
        assert outcome.lower_bound_s <= best_s * (1.0 + 1e-12)
        assert all(found.time_s >= best_s for found in outcome.found)
        ends.add(outcome.unexplored)
        heuristic_only += bool(outcome.found) and outcome.ledger.simulated == 0
    assert len(ends) > 5
    assert heuristic_only > 5


@pytest.mark.slow
@pytest.mark.usefixtures("small_rounds")
def test_workers_see_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stop where they are and return their incumbents."""
    case, clock = CASES[0], SearchClock()
    parent, offer, best_s = os.getpid(), Fastest.offer, searched(case, Fastest(1)).found[0].time_s
    before = children()

    def interrupting(self: Fastest, *incumbents: Any) -> None:
        offer(self, *incumbents)
        if os.getpid() != parent and self.incumbents:
            clock.interrupt()

    monkeypatch.setattr(Fastest, "offer", interrupting)
    outcome = searched(case, Fastest(1), workers=2, clock=clock)
    assert outcome.is_interrupted and outcome.unexplored > 0
    assert outcome.found[0].time_s >= best_s >= outcome.lower_bound_s * (1.0 - 1e-12)
    assert outcome.ledger.total + outcome.unexplored == case.count
    assert not children() - before


@pytest.mark.slow
def test_a_work_limit_ends_a_search_at_the_same_place_each_time() -> None:
    """A search that needs less work runs to its end."""
    case, clock = CASES[0], InterruptedClock(10**9)
    whole = searched(case, Fastest(1), clock=clock)
    first, again = (searched(case, Fastest(1), clock=WorkLimit(clock.checks // 2)) for _ in range(2))
    assert first.unexplored == again.unexplored > 0 and not first.is_interrupted
    assert first.ledger.total + first.unexplored == case.count
    assert [one.time_s for one in first.found] == [one.time_s for one in again.found]
    enough = searched(case, Fastest(1), clock=WorkLimit(clock.checks + 1))
    assert enough.unexplored == 0 and enough.found[0].time_s == whole.found[0].time_s
