"""Uniform strategies on a mixed cluster: the best over all unions of its pools."""

from __future__ import annotations

import pytest

from shardwise.cluster import load_cluster
from shardwise.errors import Infeasible
from shardwise.model import load_model
from shardwise.search import Question, default_job, is_mixed, plan, plan_mixed


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


def test_clusters_of_one_pool_or_of_given_links_are_not_mixed() -> None:
    assert not is_mixed(load_cluster("4x8xH100-SXM"))
    assert not is_mixed(load_cluster("examples/clusters/links.yaml"))
    assert is_mixed(load_cluster("examples/clusters/mixed.yaml"))
