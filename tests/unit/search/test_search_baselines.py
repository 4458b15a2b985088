"""Uniform strategies on a mixed cluster: the best over all unions of its pools."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from shardwise.cluster import load_cluster
from shardwise.errors import Infeasible
from shardwise.model import load_model
from shardwise.plan import UnevenAnswer
from shardwise.search import (
    Fastest,
    Question,
    default_job,
    drive,
    is_mixed,
    plan,
    plan_mixed,
    plan_pools,
)
from shardwise.search.uneven.proving import Search


def _question(cluster: str, model: str = "gpt2", batch: int = 16) -> Question:
    trained, on = load_model(model), load_cluster(cluster)
    job = default_job(trained, on, seq_len=512, global_batch_size=batch)
    return Question(model=trained, cluster=on, job=job, space="core", top=1)


@pytest.mark.parametrize("cluster", ["1x2xA100-80G+1x2xV100-32G", "1x2xH100-SXM+1x2xA100-80G+1x2xT4"])
def test_the_answer_is_the_best_union_searched_on_its_own(cluster: str) -> None:
    question = _question(cluster)
    answer = plan_mixed(question)
    parts = cluster.split("+")
    job = {"job": question.job, "model": question.model, "space": "core"}
    alone = []
    for mask in range(1, 1 << len(parts)):
        union = "+".join(part for place, part in enumerate(parts) if mask >> place & 1)
        alone.append(plan(Question(cluster=load_cluster(union), **job)).best.step_time_s)  # type: ignore[arg-type]
    assert answer.best.step_time_s == pytest.approx(min(alone), rel=1e-12)
    assert answer.mixed is not None
    assert answer.mixed.uniform_step_time_s == answer.best.step_time_s
    singles = [alone[(1 << place) - 1] for place in range(len(parts))]
    assert answer.mixed.fastest_class_step_time_s == pytest.approx(min(singles), rel=1e-12)
    assert len(answer.parts) == len(alone) and answer.is_proven


def test_the_pool_that_is_fastest_cuts_those_with_more_arithmetic() -> None:
    """96 V100 have 1.2e16 FLOP/s and 32 A100 have 0.998e16, but the A100 are faster: they come first, and
    nothing of the V100 has to be found."""
    question = _question("8x4xA100-40G+24x4xV100-16G", "opt-350m", batch=1024)
    answer = plan_mixed(replace(question, job=replace(question.job, seq_len=2048)))
    a100, v100, both = answer.parts
    assert answer.mixed is not None and answer.mixed.fastest_class == "A100-40G"
    assert a100.step_time_s == pytest.approx(answer.best.step_time_s, rel=1e-12)
    assert v100.step_time_s is None and v100.is_complete and both.is_complete


def test_slow_devices_are_left_idle_where_all_would_wait_for_them() -> None:
    answer = plan_mixed(_question("1x2xH100-SXM+1x2xT4"))
    assert answer.mixed is not None and answer.mixed.idle == ("T4",)
    assert answer.cluster is not None and answer.cluster.devices == 2
    whole = plan(_question("1x2xH100-SXM+1x2xT4"))
    assert answer.best.step_time_s < whole.best.step_time_s


def test_what_fits_on_no_pool_alone_uses_several() -> None:
    answer = plan_mixed(_question("1x4xA100-40G+1x4xL40S", model="llama-2-13b"))
    assert answer.mixed is not None
    assert answer.mixed.idle == () and answer.mixed.fastest_class is None
    assert answer.mixed.fastest_class_step_time_s is None


def test_what_fits_nowhere_is_infeasible_on_the_whole_cluster() -> None:
    with pytest.raises(Infeasible) as caught:
        plan_mixed(_question("1x2xT4+1x2xRTX2080Ti", model="llama-2-70b"))
    assert caught.value.reasons


@pytest.fixture
def interrupting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Given n: the nth offer of finds to a search for the fastest comes with an interrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    offer, offers = Fastest.offer, 0

    def at(last: int) -> None:
        def offered(self: Fastest, *finds: Any) -> None:
            nonlocal offers
            offer(self, *finds)
            offers += 1
            if offers == last:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Fastest, "offer", offered)

    yield at
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("last", [2, 5, 7])
def test_an_interrupt_answers_with_the_best_union_so_far(
    last: int, interrupting: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In searches that look first, as those of large spaces do."""
    monkeypatch.setattr(drive, "FEW", 0)
    question = _question("1x2xH100-SXM+1x2xA100-80G+1x2xT4")
    best_s = plan_mixed(question).best.step_time_s
    interrupting(last)
    answer = plan_mixed(question)
    assert answer.is_interrupted and not answer.is_proven
    assert answer.best.step_time_s >= best_s
    assert len(answer.parts) == 7 and not answer.parts[-1].is_complete


def test_an_interrupt_while_uneven_plans_are_sought_keeps_the_best(
    monkeypatch: pytest.MonkeyPatch, interrupting: Callable[[int], None]
) -> None:
    """It comes with the first look at a block of uneven plans."""
    question = _question("1x2xA100-40G+1x2xV100-16G", "opt-350m", batch=64)
    question = replace(question, space="default", job=replace(question.job, seq_len=2048))
    whole = plan_pools(question)
    assert isinstance(whole, UnevenAnswer) and not whole.is_interrupted
    within = Search.within

    def interrupted(self: Search, time_s: float) -> Any:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        return within(self, time_s)

    monkeypatch.setattr(Search, "within", interrupted)
    answer = plan_pools(question)
    assert answer.is_interrupted
    assert answer.best.step_time_s >= whole.best.step_time_s
    if isinstance(answer, UnevenAnswer):
        assert answer.certificate.lower_bound_s <= whole.best.step_time_s
        assert answer.certificate.unexplored > 0


def test_clusters_of_one_pool_or_of_given_links_are_not_mixed() -> None:
    assert not is_mixed(load_cluster("4x8xH100-SXM"))
    assert not is_mixed(load_cluster("examples/clusters/links.yaml"))
    assert is_mixed(load_cluster("examples/clusters/mixed.yaml"))
