"""A plan made by hand for a real model on a real cluster."""

from __future__ import annotations

import pytest

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.plans import Answer, Certificate, Layout, PeakMemory, Pipeline, Plan, Result, Stage, plan_of
from shardwise.strategy import Job, complete


@pytest.fixture(scope="session")
def plan() -> Plan:
    """gpt2 (12 layers) on 16 A100: tp 2, pp 4, dp 2, interleaved with 3 layers per rank in chunks;
    batch 16.
    """
    model, cluster = load_model("gpt2"), load_cluster("2x8xA100-80G")
    job = Job(seq_len=1024, global_batch_size=16, dtype="bf16")
    fields = {"tp": 2, "pp": 4, "schedule": "interleaved_1f1b", "vpp": 3, "zero_stage": 1}
    strategy = complete(
        fields, devices=cluster.devices, layers=model.layers, experts=None, global_batch_size=16
    )
    stages = tuple(
        Stage(
            devices=4,
            ranks=f"{4 * index}-{4 * index + 3}",
            device_class=next(iter(cluster.classes)),
            tp=2,
            dp=2,
            layers=(1, 1, 1),
            share=1.0,
            recompute=strategy.recompute,
        )
        for index in range(4)
    )
    best = Result(
        fields=strategy,
        layout=Layout(
            schedule="interleaved_1f1b",
            pipelines=(
                Pipeline(stages=stages, micro_batch_size=1, microbatches=8, rows=16, makespan_s=0.1 + 0.2),
            ),
        ),
        step_time_s=0.1 + 0.2,
        band_s=(0.25, 1 / 3),
        tokens_per_s_per_device=16 * 1024 / 0.3 / 16,
        mfu=1e-05,
        mfu_full_attention=0.1,
        peak_memory=PeakMemory(allocated=1e9, reserved=1.1e9, device=3.5e9, capacity=85e9),
        memory_band_bytes=(3.25e9, 3.8e9),
        fits_probability=0.1 + 0.2,
        breakdown={"forward": 0.1, "backward": 0.2, "bubble": 4e-17},
        memory={"parameters": 1e9, "context": 2.5e9},
        tightest_rank=0,
        evaluator="max-plus",
    )
    certificate = Certificate(
        space="default",
        enumerated=10**12 + 6,
        rejected={"memory": 10**12},
        cut_by_bound=4,
        simulated=2,
        best_s=best.step_time_s,
        lower_bound_s=best.step_time_s,
        gap=0.0,
        search_s=0.01,
        search_cpu_s=0.02,
    )
    answer = Answer(best=best, runners_up=(best,), certificate=certificate)
    return plan_of(answer, model=model, cluster=cluster, job=job)
