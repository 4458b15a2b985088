"""Objectives, parts of the cluster, the frontier, budgets and interrupts, on a space that can be
enumerated.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest
from tests.property.search_space_reference import SpaceTwin, first_reason

from shardwise.cluster import Cluster, load_cluster, part_of, part_sizes
from shardwise.cost import peaks_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import model_from_config
from shardwise.plans import Answer
from shardwise.search import Fastest, Question, infeasibility, plan
from shardwise.search.bnb import solver
from shardwise.search.bnb.branch import SubtreeSearch
from shardwise.search.bnb.incumbent import Tradeoff
from shardwise.search.step_times import step_times_s
from shardwise.strategy import Job, StrategyTable
from shardwise_verify import count_space

LAYERS, BATCH = 4, 6
MODEL = model_from_config(
    {
        "layers": LAYERS,
        "hidden": 3072,
        "ffn": 12288,
        "heads": 12,
        "kv_heads": 6,
        "vocab": 50_257,
        "seq_len": 4096,
    }
)
CLUSTER = load_cluster("2x3xA100-40G")
JOB = Job(seq_len=1536, global_batch_size=BATCH, dtype="bf16")
QUESTION = Question(model=MODEL, cluster=CLUSTER, job=JOB, space="core", use_all=True, top=1)

Point = tuple[float, float]
"""Seconds and bytes."""


@cache
def fitting(devices: int, memory_bytes: int | None = None) -> tuple[Point, ...]:
    """Time and bytes of every legal candidate that fits on a part of the cluster, enumerated one by one."""
    requested = replace(QUESTION, cluster=part_of(cluster_with(memory_bytes), devices))
    problem = requested.problem()
    twin = SpaceTwin(core=True, devices=devices, layers=LAYERS, moe=False, batch=BATCH)
    legal = [s for s in twin.candidates() if first_reason(s, problem.limits) is None]
    table = StrategyTable.of(legal)
    times_s, nbytes = step_times_s(problem, table), peaks_of(problem, table).device_bytes
    fits = nbytes <= problem.usable_bytes
    return tuple(zip(times_s[fits].tolist(), nbytes[fits].tolist(), strict=True))


def cluster_with(memory_bytes: int | None) -> Cluster:
    classes = {
        name: device if memory_bytes is None else replace(device, memory_bytes=memory_bytes)
        for name, device in CLUSTER.classes.items()
    }
    return replace(CLUSTER, classes=classes)


def points_of(answer: Answer) -> list[Point]:
    assert answer.frontier is not None
    return [(point.step_time_s, point.device_bytes) for point in answer.frontier.points]


def test_the_frontier_is_that_of_all_candidates() -> None:
    """Sorted by time, a candidate is on the frontier if it takes fewer bytes than all before it."""
    expected, least = [], inf
    for time_s, nbytes in sorted(fitting(6)):
        if nbytes < least:
            least = nbytes
            expected.append((time_s, nbytes))
    answer = plan(replace(QUESTION, frontier=True))
    found = points_of(answer)
    assert len(found) > 3
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-12)
    assert found[0][0] == pytest.approx(answer.best.step_time_s, rel=1e-12)
    assert answer.frontier is not None and answer.frontier.certificate.unexplored == 0


def test_the_least_memory_and_of_equals_the_fastest() -> None:
    answer = plan(replace(QUESTION, objective="memory"))
    time_s, nbytes = min(fitting(6), key=lambda point: (point[1], point[0]))
    assert answer.best.peak_memory.device == pytest.approx(nbytes, rel=1e-12)
    assert answer.best.step_time_s == pytest.approx(time_s, rel=1e-12)
    assert (answer.objective, answer.runners_up, answer.is_proven) == ("memory", (), True)


@pytest.mark.parametrize("memory_gib", [40, 12, 9, 6])
def test_the_fewest_devices_on_which_something_fits(memory_gib: int) -> None:
    memory = memory_gib * 2**30
    cluster = cluster_with(memory)
    expected = next((n for n in part_sizes(CLUSTER) if fitting(n, memory)), None)
    requested = replace(QUESTION, cluster=cluster, objective="devices", use_all=False)
    if expected is None:
        with pytest.raises(Infeasible):
            plan(requested)
        return
    answer = plan(requested)
    assert answer.cluster is not None and answer.cluster.devices == expected
    assert answer.best.step_time_s == pytest.approx(min(fitting(expected, memory))[0], rel=1e-12)
    assert [part.devices for part in answer.parts] == [n for n in part_sizes(CLUSTER) if n <= expected]
    assert answer.idle.devices == 6 - expected


def test_the_memory_sizes_of_that_test_need_different_parts() -> None:
    found = {next((n for n in part_sizes(CLUSTER) if fitting(n, g * 2**30)), None) for g in (40, 12, 9, 6)}
    assert len(found) >= 3


def test_the_least_cost_counts_whole_nodes() -> None:
    """A part of the first node costs the node; both nodes cost twice that."""
    answer = plan(replace(QUESTION, objective="cost", use_all=False))
    costs = {n: min(fitting(n))[0] * (1 if n <= 3 else 2) for n in part_sizes(CLUSTER) if fitting(n)}
    expected = min(costs, key=lambda n: (costs[n], n))
    assert answer.cluster is not None and answer.cluster.devices == expected
    assert answer.best.step_time_s == pytest.approx(min(fitting(expected))[0], rel=1e-12)
    assert len(answer.runners_up) == 1 and answer.idle.devices == 6 - expected
    chosen = next(part for part in answer.parts if part.devices == expected)
    price = CLUSTER.nodes[0].price_usd_per_hour
    assert price is not None and chosen.usd_per_step == pytest.approx(
        price / 3600 * costs[expected], rel=1e-12
    )


def test_idle_devices_are_allowed_where_that_is_faster() -> None:
    """With a network 1,000 times slower than the default, three devices of a node beat six."""
    slow = tuple(replace(t, bytes_per_s=t.bytes_per_s / (1e3 if t.is_network else 1)) for t in CLUSTER.tiers)
    requested = replace(QUESTION, cluster=replace(CLUSTER, tiers=slow))
    whole, idle = plan(requested), plan(replace(requested, use_all=False))
    assert idle.cluster is not None and idle.cluster.devices == 3
    assert idle.best.step_time_s == pytest.approx(min(fitting(3))[0], rel=1e-12)
    assert idle.best.step_time_s < whole.best.step_time_s
    assert idle.all_devices_step_time_s == pytest.approx(whole.best.step_time_s, rel=1e-12)
    assert (idle.idle.devices, idle.idle.nodes, idle.idle.ranks) == (3, 1, "3-5")
    assert (whole.idle.devices, whole.all_devices_step_time_s) == (0, whole.best.step_time_s)


def test_cost_needs_prices_and_says_where() -> None:
    free = replace(CLUSTER, nodes=tuple(replace(node, price_usd_per_hour=None) for node in CLUSTER.nodes))
    with pytest.raises(ConfigError, match="price of every node") as caught:
        plan(replace(QUESTION, cluster=free, objective="cost", use_all=False))
    assert "price:" in (caught.value.allowed or "")
    with pytest.raises(ConfigError, match="use_all"):
        plan(replace(QUESTION, objective="cost"))


def count_of(question: Question) -> int:
    return count_space(
        model_layers=LAYERS, experts=None, devices=6, global_batch_size=BATCH, space=question.space, fixed={},
        axes=question.axes,
    ).count  # fmt: skip


@pytest.mark.slow
def test_requested_axes_restrict_the_search() -> None:
    requested = replace(
        QUESTION, space="default", axes={"tp": (1, 3), "offload": ("none",), "schedule": ("gpipe", "1f1b")}
    )
    for answer in (plan(requested), plan(replace(requested, exhaustive=True))):
        assert answer.certificate.enumerated == count_of(requested)
        assert answer.certificate.axes == requested.axes
        for result in (answer.best, *answer.runners_up):
            assert result.strategy.tp in (1, 3) and result.strategy.offload == "none"
    narrow = plan(replace(requested, axes={"tp": (answer.best.strategy.tp,)}))
    assert narrow.best.step_time_s <= answer.best.step_time_s


@pytest.fixture
def heeded() -> Iterator[None]:
    """Interrupts raise, however this process was started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupting(_: str) -> None:
    signal.raise_signal(signal.SIGINT)


WIDE = replace(QUESTION, space="default", top=0)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded")
def test_an_interrupt_after_a_find_answers_with_the_best_so_far() -> None:
    answer = plan(WIDE, progress=interrupting)
    assert answer.is_interrupted
    certificate = answer.certificate
    assert certificate.enumerated + certificate.unexplored == count_of(WIDE)
    best_s = plan(WIDE).best.step_time_s
    assert certificate.lower_bound_s <= best_s * (1 + 1e-12) <= answer.best.step_time_s * (1 + 2e-12)
    assert certificate.gap == pytest.approx(1 - certificate.lower_bound_s / certificate.best_s)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("requested", [WIDE, replace(WIDE, use_all=False)], ids=["all", "parts"])
def test_an_interrupt_in_the_heuristic_answers_with_the_best_so_far(
    requested: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes with the first incumbent: the space itself has not been searched at all."""
    offer = Fastest.offer

    def interrupting(self: Fastest, *incumbents: Any) -> None:
        offer(self, *incumbents)
        if self.incumbents:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Fastest, "offer", interrupting)
    answer = plan(requested)
    assert answer.is_interrupted and not answer.is_proven
    assert answer.certificate.simulated == 0 and answer.certificate.unexplored > 0
    assert 0.0 < answer.certificate.gap < 1.0
    assert [part.is_complete for part in answer.parts] == [False] * len(answer.parts)
    best_s = plan(requested).best.step_time_s
    assert answer.certificate.lower_bound_s <= best_s <= answer.best.step_time_s * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("heeded")
def test_an_interrupt_of_the_frontier_keeps_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = Tradeoff.offer

    def interrupting(self: Tradeoff, *incumbents: Any) -> None:
        offer(self, *incumbents)
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Tradeoff, "offer", interrupting)
    answer = plan(replace(WIDE, frontier=True))
    assert answer.is_interrupted and answer.is_proven
    assert answer.best.step_time_s == plan(WIDE).best.step_time_s
    assert answer.frontier is not None and answer.frontier.certificate.unexplored > 0


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("requested", [WIDE, replace(WIDE, use_all=False)], ids=["all", "parts"])
def test_an_interrupt_before_a_find_stays_one(requested: Question, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SubtreeSearch.run

    def interrupting(self: SubtreeSearch) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        run(self)

    monkeypatch.setattr(SubtreeSearch, "run", interrupting)
    with pytest.raises(KeyboardInterrupt):
        plan(requested)


@pytest.mark.usefixtures("heeded")
def test_an_interrupt_while_relaxations_are_sought_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = replace(QUESTION, cluster=cluster_with(2**30))

    def interrupted(*_: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return _relaxations(*_)

    _relaxations = infeasibility._relaxations
    monkeypatch.setattr(infeasibility, "_relaxations", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plan(requested)


@pytest.mark.slow
def test_the_smallest_budget_finds_something() -> None:
    """The primal heuristic continues until it has found a strategy, at least on the first part."""
    for requested in (replace(WIDE, budget_s=1e-9), replace(WIDE, budget_s=1e-9, use_all=False)):
        answer = plan(requested)
        assert not answer.is_proven
        assert answer.best.peak_memory.device <= answer.best.peak_memory.capacity
    certificate = plan(replace(WIDE, budget_s=1e-9)).certificate
    assert certificate.unexplored > 0 and 0.0 < certificate.gap < 1.0
    assert certificate.lower_bound_s <= plan(WIDE).best.step_time_s


def test_few_candidates_are_searched_within_the_smallest_budget() -> None:
    """There is no primal heuristic, so the search itself continues until it has found a strategy."""
    answer = plan(replace(QUESTION, budget_s=1e-9))
    assert answer.best.step_time_s == plan(QUESTION).best.step_time_s


def test_a_budget_too_small_for_a_hard_question_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that the primal heuristic tries fits. (Nothing else fits either; a small space would report
    that at once.)
    """
    monkeypatch.setattr(solver, "SMALL_SPACE", 0)
    tight = replace(WIDE, cluster=cluster_with(2**30), budget_s=1e-9)
    with pytest.raises(
        Infeasible, match=r"within the budget of 1 ns; .* candidates are unexplored"
    ) as caught:
        plan(tight)
    assert caught.value.reasons == {} and caught.value.relaxations == ()
    with pytest.raises(Infeasible, match=r"4 of 4 parts of the cluster are unexplored"):
        plan(replace(tight, use_all=False))


@pytest.mark.slow
def test_a_budget_that_is_large_enough_changes_nothing() -> None:
    bounded, free = plan(replace(WIDE, budget_s=1e3)), plan(WIDE)
    assert bounded.best == free.best
    assert bounded.is_proven and bounded.certificate.unexplored == 0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"workers": 0}, "workers"),
        ({"budget_s": 0.0}, "budget"),
        ({"budget_s": float("nan")}, "budget"),
        ({"objective": "tme"}, "objective"),
        ({"axes": {"tpp": (1,)}}, "axes.tpp"),
        ({"axes": {"tp": ("x",)}}, "axes.tp"),
    ],
)
def test_contradicting_questions_are_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(replace(QUESTION, **changes))  # type: ignore[arg-type]
    assert caught.value.key == key
