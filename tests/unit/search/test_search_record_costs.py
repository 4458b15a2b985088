"""All figures of an uneven plan computed from its record equal those of the search."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster import load_cluster
from shardwise.errors import InternalError
from shardwise.model import load_model
from shardwise.plans import Layout, Pipeline
from shardwise.search import Question, RecordCostModel, UnevenSpace, best_uneven, predicted_result
from shardwise.search.hetero import predict_record, search_uneven
from shardwise.search.hetero.result import uneven_record, uneven_result
from shardwise.strategy import Job

JOB = Job(seq_len=1024, global_batch_size=16, dtype="fp16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "limits"),
    [
        ("gpt2", "1x4xA100-40G+1x4xV100-16G", (1, 1)),
        ("opt-350m", "1x2xT4+3x1xRTX3090", (1, 1)),
        ("llama-2-7b", "1x2xA100-80G+1x4xA10G", (2, 1)),
        ("gpt2-xl", "1x2xA100-80G+1x2xT4", (1, 4)),
    ],
)
def test_an_unchanged_plan_has_its_prediction_from_the_record(
    model: str, cluster: str, limits: tuple[int, int]
) -> None:
    stage_dp, mixed_stage_rows = limits
    question = Question(
        model=load_model(model),
        cluster=load_cluster(cluster),
        job=JOB,
        stage_dp=stage_dp,
        mixed_stage_rows=mixed_stage_rows,
    )
    found = best_uneven(question).result
    assert found is not None
    prices = RecordCostModel(question.model, question.cluster, JOB)
    again = predicted_result(prices, found, JOB.global_batch_size)
    assert again is not None and again.layout == found.layout and again.tightest_rank == found.tightest_rank
    for name in ("step_time_s", "tokens_per_s_per_device", "mfu", "mfu_full_attention"):
        assert getattr(again, name) == pytest.approx(getattr(found, name), rel=1e-9), name
    assert again.band_s == pytest.approx(found.band_s, rel=1e-9)
    assert again.pipeline_s == pytest.approx(found.pipeline_s, rel=1e-9)
    assert again.breakdown == pytest.approx(dict(found.breakdown), rel=1e-6, abs=1e-12)
    peaks = (again.peak_memory, found.peak_memory)
    for name in ("allocated", "reserved", "device", "capacity"):
        one, other = (getattr(peak, name) for peak in peaks)
        assert one == pytest.approx(other, rel=1e-9), name
    # Known costs are valid for another record too: with more micro-batches nothing is missing.
    pipelines = tuple(
        replace(one, microbatches=2 * one.microbatches, rows=2 * one.rows) for one in found.layout.pipelines
    )
    half = replace(found, layout=replace(found.layout, pipelines=pipelines))
    twice = predicted_result(prices, half, 2 * JOB.global_batch_size)
    assert twice is not None and twice.step_time_s > again.step_time_s
    assert predicted_result(prices, half, JOB.global_batch_size) is None


def test_a_stage_that_does_not_divide_its_node_is_refused() -> None:
    """Stages of two devices on a node of five are outside the space, and the error names that."""
    job = replace(JOB, dtype="fp16")
    model, four, five = load_model("gpt2"), load_cluster("1x4xT4+1x4xV100-16G"), "1x5xT4+1x5xV100-16G"
    found = best_uneven(Question(model=model, cluster=four, job=job)).result
    assert found is not None
    first = found.layout.pipelines[0].stages[0]
    stage = replace(first, devices=2, tp=2, ranks="0-1", layers=(model.layers,), recompute="none")
    size = found.micro_batch_size
    pipeline = Pipeline(
        stages=(stage,), micro_batch_size=size, microbatches=16 // size, rows=16, makespan_s=1.0
    )
    laid = replace(found, layout=Layout(pipelines=(pipeline,)), is_alike=False)
    faults = predict_record(model, load_cluster(five), job, laid).faults
    assert any("no stage has tp 2" in fault for fault in faults)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["1x2xT4+3x1xRTX3090", "1x2xA100-80G+1x2xT4"])
def test_a_plan_whose_record_is_predicted_otherwise_is_refused(cluster: str) -> None:
    """The answer's figures are those of the record; its time must be that of the search, to 1e-9."""
    space = UnevenSpace(load_model("gpt2"), load_cluster(cluster), JOB)
    plan = search_uneven(space).plan
    assert plan is not None
    record, found = uneven_record(space, plan), uneven_result(space, plan)
    assert found.layout == record.layout and found.step_time_s == record.step_time_s == plan.time_s
    assert found.peak_memory.device > 0.0
    assert sum(found.memory.values()) == pytest.approx(found.peak_memory.device)
    assert sum(found.breakdown.values()) == pytest.approx(plan.time_s)
    with pytest.raises(InternalError, match="by its record"):
        uneven_result(space, replace(plan, time_s=plan.time_s * (1.0 + 2e-9)))
    uneven_result(space, replace(plan, time_s=plan.time_s * (1.0 + 0.5e-9)))
