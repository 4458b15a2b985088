"""The part of a cluster that a plan uses: the fastest of all parts, on uniform and on mixed clusters."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from shardwise.cluster import Cluster, Parts, Selection, load_cluster
from shardwise.errors import Infeasible
from shardwise.model import load_model
from shardwise.search import Fastest, Question, cluster_parts, default_job, is_mixed, plan, plan_mixed_cluster
from shardwise.search.answer import search
from shardwise.search.bnb import solver
from shardwise.search.clock import SearchClock
from shardwise.search.cluster_parts import DegreeBounds, DeviceWork, device_counts, listed_parts
from shardwise.search.hetero.subproblem import SubproblemSearch
from shardwise.search.targets import degrees_of


def _question(cluster: Cluster | str, model: str = "gpt2", batch: int = 16, space: str = "core") -> Question:
    trained, on = load_model(model), load_cluster(cluster) if isinstance(cluster, str) else cluster
    job = default_job(trained, on, seq_len=512, global_batch_size=batch)
    return Question(model=trained, cluster=on, job=job, space=space, top=1)


def _every_part(cluster: Cluster) -> Iterator[Selection]:
    """All parts, by the definition of docs/reference/space.md, without pruning or bounds."""
    parts = Parts(cluster)
    for nodes in product(*(range(pool.nodes + 1) for pool in parts.pools)):
        if any(nodes):
            yield Selection(nodes=nodes)
    for place in range(len(parts.pools)):
        yield from parts.within_a_node(place)


def _alone(question: Question) -> dict[Selection, float]:
    """The best step time of each part, searched separately on all of its devices."""
    parts, found = Parts(question.cluster), {}
    for part in _every_part(question.cluster):
        requested = replace(question, cluster=parts.cluster_of(part), use_all=True, top=0)
        try:
            found[part] = plan(requested).best.step_time_s
        except Infeasible:
            continue
    return found


def _with_a_slow_node(shorthand: str, speed: float, inter_node: str | None = None) -> Cluster:
    cluster = load_cluster(shorthand, inter_node=inter_node)
    *others, last = cluster.nodes
    return replace(cluster, nodes=(*others, replace(last, speed=speed)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "model"),
    [
        ("3x2xV100-32G", "gpt2"),
        ("1x7xA100-80G", "gpt2"),
        ("1x2xA100-80G+1x2xV100-32G", "gpt2"),
        ("1x1xH100-SXM+2x2xA100-80G+1x1xT4", "gpt2"),
        ("3x4xV100-32G", "opt-350m"),
        (_with_a_slow_node("4x1xA100-80G", 0.9, "25Gb/s"), "opt-350m"),
    ],
)
def test_the_answer_is_the_fastest_part_searched_on_its_own(cluster: str | Cluster, model: str) -> None:
    question = _question(cluster, model)
    answer, alone = plan(question), _alone(question)
    assert answer.best.step_time_s == pytest.approx(min(alone.values()), rel=1e-12)
    assert answer.is_proven
    whole = Parts(question.cluster).whole
    assert answer.all_devices_step_time_s == pytest.approx(alone[whole], rel=1e-12)
    assert answer.cluster is not None
    assert answer.cluster.devices + answer.idle.devices == question.cluster.devices
    for part in answer.parts:
        assert part.step_time_s is None or part.step_time_s >= answer.best.step_time_s
    if answer.mixed is not None:
        singles = [time_s for part, time_s in alone.items() if len(part.pools) == 1]
        assert answer.mixed.fastest_class_step_time_s == pytest.approx(min(singles), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "space"), [("opt-350m", "default"), ("qwen3-30b-a3b", "core")])
def test_the_quick_bound_is_no_larger_than_the_best_of_a_part(space: str, model: str) -> None:
    """It is finite exactly where degrees are legal, so where something may fit at all."""
    question = _question("2x3xH200+1x1xH100-SXM", model, batch=12, space=space)
    parts = Parts(question.cluster)
    bounded = {one.part: one.least_s for one in listed_parts(question, parts).parts}
    alone = _alone(question)
    assert alone and alone.keys() <= bounded.keys()
    for part, time_s in alone.items():
        assert 0.0 < bounded[part] <= time_s


def test_the_listing_of_parts_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 pools of one node with 2 devices: a part for each device count of each pool (2 * 3), and one of each
    of the 4 sets of two or three pools. Where 3 pools are many, there are single pools and the set of all."""
    question = _question("1x2xH200+1x2xH100-SXM+1x2xA100-80G", "opt-350m", batch=12)
    parts, over = Parts(question.cluster), SearchClock(-1.0)
    assert len(listed_parts(question, parts).parts) == 10
    assert len(listed_parts(question, parts, over).parts) == 10  # few pools: all are listed
    monkeypatch.setattr(cluster_parts, "MOST_COMBINED_POOLS", 1)
    assert len(listed_parts(question, parts).parts) == 7
    listed = listed_parts(question, parts, over)
    assert (len(listed.parts), listed.unconsidered) == (2, 8)
    over.interrupt()
    assert (listed_parts(question, parts, over).parts, listed_parts(question, parts, over).unconsidered) == (
        [],
        10,
    )


@pytest.mark.parametrize(
    ("cluster", "batch"),
    [
        ("1x2xH200+1x2xH100-SXM+1x2xA100-80G", 12),
        ("5x1xH100-SXM", 5),
        ("3x8xH100-SXM+5x4xA100-80G", 64),
        ("2x3xH200+7x1xH100-SXM+1x5xA100-80G", 24),
    ],
)
@pytest.mark.parametrize("most", [cluster_parts.MOST_COUNTS, 4])
def test_device_counts_are_those_of_the_listed_parts(
    cluster: str, batch: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `most` 4 several sets of pools have too many counts: their pools are used completely."""
    monkeypatch.setattr(cluster_parts, "MOST_COUNTS", most)
    question = _question(cluster, "opt-350m", batch=batch)
    parts = Parts(question.cluster)
    listed = sorted({one.devices for one in listed_parts(question, parts).parts})
    assert device_counts(question, parts) == listed
    assert listed


def test_degrees_on_many_pools_are_found_without_a_list_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four pools of 60 nodes with 8 devices have 61^4 - 1 = 13,845,840 parts; every multiple of 8 up to 1,920
    is a device count of some, and the largest degree is that of all devices."""
    cluster = load_cluster("60x8xH200+60x8xH100-SXM+60x8xA100-80G+60x8xV100-32G")
    monkeypatch.setattr(cluster_parts, "MOST_COUNTS", 1 << 24)
    monkeypatch.setattr(DegreeBounds, "work", None)  # the bounds of parts are not needed
    question = _question(cluster, "llama-3.1-8b", batch=1920)
    counts = device_counts(question, Parts(cluster))
    legal = DegreeBounds(question.candidates(), question.problem().limits, 1920).legal_counts()
    assert counts == [count for count in range(1, 1921) if legal[count] and (count < 8 or count % 8 == 0)]
    assert max(degrees_of(question)) == 1920


@pytest.mark.slow
def test_a_bound_that_is_too_high_would_lose_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant doubles the bound, which prunes the best part."""
    question = _question("3x4xV100-32G", "opt-350m")
    best_s = plan(question).best.step_time_s
    least_s = DeviceWork.least_s
    monkeypatch.setattr(DeviceWork, "least_s", lambda self, *of: 20.0 * least_s(self, *of))
    assert plan(replace(question, use_all=True)).best.step_time_s == plan(question).best.step_time_s > best_s


def test_the_upper_bound_never_rises_and_solutions_are_below_it() -> None:
    """`found` is empty if the upper bound is the optimum, and contains it if the bound is above."""
    question = _question("1x4xA100-80G")
    best_s = plan(replace(question, use_all=True)).best.step_time_s
    for below_s, is_found in ((best_s, False), (best_s * 0.5, False), (best_s * (1 + 1e-9), True)):
        for budget_s in (None, 1e-9):
            goal = Fastest(3, below_s=below_s)
            outcome = search(question, question.problem(), goal, clock=SearchClock(budget_s))
            assert goal.threshold_s <= below_s
            assert all(found.time_s < below_s for found in outcome.found)
            if budget_s is None:
                assert bool(outcome.found) == is_found and outcome.unexplored == 0


EXAMPLES = (
    # Arguments of `plan`, and the fastest part.
    ("opt-350m", "3x4xV100-32G", "100Gb/s", 512, 16, "3x4xV100-32G"),
    ("gpt2-xl", "28x1xV100-16G", "10Gb/s", 1024, 128, "26x1xV100-16G"),
)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "nodes", "network", "seq", "batch", "fastest"), EXAMPLES)
def test_no_slower_part_than_one_found_is_the_answer(
    model: str, nodes: str, network: str, seq: int, batch: int, fastest: str
) -> None:
    """The answer is that of the fastest part as a cluster of its own, all of whose devices work."""
    trained, cluster = load_model(model), load_cluster(nodes, inter_node=network)
    job = default_job(trained, cluster, seq_len=seq, global_batch_size=batch)
    answer = plan(Question(model=trained, cluster=cluster, job=job))
    part = load_cluster(fastest, inter_node=network)
    alone = plan(Question(model=trained, cluster=part, job=job, use_all=True))
    assert answer.best.step_time_s == pytest.approx(alone.best.step_time_s, rel=1e-9) and answer.is_proven
    assert answer.cluster is not None and answer.cluster.devices == part.devices


@pytest.mark.slow
def test_a_slower_node_makes_no_cluster_faster() -> None:
    """opt-350m, 512 x 32, three A100 with one device each: with one of them at half speed, the same question
    once had an answer 8 % faster, on two of them.
    """
    trained = load_model("opt-350m")
    times_s = []
    for speed in (1.0, 0.5):
        cluster = _with_a_slow_node("3x1xA100-80G", speed, "10Gb/s")
        job = default_job(trained, cluster, seq_len=512, global_batch_size=32)
        times_s.append(plan(Question(model=trained, cluster=cluster, job=job)).best.step_time_s)
    assert times_s[0] <= times_s[1]


@pytest.mark.slow
def test_use_all_exhaustive_and_memory_use_all_devices() -> None:
    question = _question("3x4xV100-32G", "opt-350m")
    idle = plan(_question("1x2xH100-SXM+1x2xT4"))
    assert idle.idle.devices == 2 and idle.idle.ranks == "2-3" and idle.idle.nodes == 1
    for change in ({"use_all": True}, {"exhaustive": True}, {"objective": "memory"}):
        answer = plan(replace(question, **change))
        assert answer.idle.devices == 0 and answer.best.strategy.dp * answer.best.strategy.tp > 0
        assert answer.cluster is question.cluster


def test_fixed_degrees_that_need_all_devices_use_them() -> None:
    question = replace(_question("1x2xH100-SXM+1x2xT4"), fixed={"tp": 2, "dp": 2, "pp": 1})
    answer = plan(question)
    assert answer.cluster is question.cluster and answer.idle.devices == 0


@pytest.mark.slow
def test_a_pool_that_is_fastest_prunes_those_with_more_arithmetic() -> None:
    """96 V100 have 1.2e16 FLOP/s and 32 A100 have 0.998e16, but the A100 are faster."""
    question = _question("8x4xA100-40G+24x4xV100-16G", "opt-350m", batch=1024)
    answer = plan(replace(question, job=replace(question.job, seq_len=2048)))
    assert answer.mixed is not None and answer.mixed.fastest_class == "A100-40G"
    assert answer.mixed.idle == ("V100-16G",) and answer.is_proven


@pytest.mark.slow
def test_slow_devices_are_left_idle_where_all_would_wait_for_them() -> None:
    answer = plan(_question("1x2xH100-SXM+1x2xT4"))
    assert answer.mixed is not None and answer.mixed.idle == ("T4",)
    assert answer.cluster is not None and answer.cluster.devices == 2
    whole = plan(replace(_question("1x2xH100-SXM+1x2xT4"), use_all=True))
    assert answer.best.step_time_s < whole.best.step_time_s


@pytest.mark.slow
def test_a_model_that_fits_on_no_single_pool_uses_several() -> None:
    answer = plan(_question("1x4xA100-40G+1x4xL40S", model="llama-2-13b"))
    assert answer.mixed is not None
    assert answer.mixed.idle == () and answer.mixed.fastest_class is None
    assert answer.mixed.fastest_class_step_time_s is None


@pytest.mark.slow
def test_a_model_that_fits_nowhere_is_infeasible_on_the_whole_cluster() -> None:
    with pytest.raises(Infeasible) as caught:
        plan(_question("1x2xT4+1x2xRTX2080Ti", model="llama-2-70b"))
    assert caught.value.reasons


def test_parts_that_are_too_many_leave_the_answer_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_parts, "MOST_COMBINED_POOLS", 1)
    answer = plan(_question("1x1xH100-SXM+1x1xA100-80G+1x1xA100-40G"))
    # Three pools have seven sets; four are considered: the three single pools and all.
    assert answer.unexplored_parts == 3 and not answer.is_proven


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """For a given n, the n-th solution offered to a search for the fastest comes with an interrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    offer, offers = Fastest.offer, 0

    def at(last: int) -> None:
        def offered(self: Fastest, *incumbents: Any) -> None:
            nonlocal offers
            offer(self, *incumbents)
            offers += 1
            if offers == last:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Fastest, "offer", offered)

    yield at
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize("last", [2, 4])
def test_an_interrupt_answers_with_the_best_union_so_far(
    last: int, interrupting: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In searches that run primal heuristics first, as large spaces do."""
    monkeypatch.setattr(solver, "SMALL_SPACE", 0)
    question = _question("1x2xH100-SXM+1x2xA100-80G+1x2xT4")
    best_s = plan(question).best.step_time_s
    interrupting(last)
    answer = plan(question)
    assert answer.is_interrupted and not answer.is_proven
    assert answer.best.step_time_s >= best_s
    assert answer.unexplored_parts > 0 or not answer.parts[-1].is_complete


@pytest.mark.slow
def test_an_interrupt_while_uneven_plans_are_sought_keeps_the_best(
    monkeypatch: pytest.MonkeyPatch, interrupting: Callable[[int], None]
) -> None:
    """It comes with the first subproblem of uneven plans."""
    question = _question("1x2xA100-40G+1x2xV100-16G", "opt-350m", batch=64)
    question = replace(question, space="default", job=replace(question.job, seq_len=2048))
    whole = plan_mixed_cluster(question)
    assert not whole.best.is_uniform and not whole.is_interrupted
    within = SubproblemSearch.within

    def interrupted(self: SubproblemSearch, time_s: float) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return within(self, time_s)

    monkeypatch.setattr(SubproblemSearch, "within", interrupted)
    answer = plan_mixed_cluster(question)
    assert answer.is_interrupted
    assert answer.best.step_time_s >= whole.best.step_time_s
    if not answer.best.is_uniform:
        assert answer.certificate.lower_bound_s <= whole.best.step_time_s
        assert answer.certificate.unexplored > 0


def test_clusters_of_one_pool_or_of_given_links_are_not_mixed() -> None:
    assert not is_mixed(load_cluster("4x8xH100-SXM"))
    assert not is_mixed(load_cluster("examples/clusters/links.yaml"))
    assert is_mixed(load_cluster("examples/clusters/mixed.yaml"))
