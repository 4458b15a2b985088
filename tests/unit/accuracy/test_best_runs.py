"""Predictions and plans are not far above what measured runs of their device have reached."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from benchmarks.left_out import best_runs_of, text_of
from tests.unit.accuracy.runs import measured_runs, some

import shardwise as sw
from shardwise.accuracy import SHIPPED, read_rows
from shardwise.accuracy.case import cases_of
from shardwise.accuracy.fit import Numbers
from shardwise.accuracy.predict import predictions_of
from shardwise.app.cli.card import figures
from shardwise.cluster.best_runs import BEST_RUNS, LEAST_RUNS, MARGIN, best_runs, implausible_mfu
from shardwise.model import model_flop_per_token
from shardwise.search.result import result_of


def test_the_best_run_by_hand() -> None:
    """A GPT of 1.7 billion parameters in the plainest row: FLOP of a step over its seconds, devices and peak.
    The faster of two runs counts."""
    runs = measured_runs(some(4, "korthi"), Numbers.shipped())
    case, seconds = runs[0].case, runs[0].measured_s
    tokens = (case.row.global_batch or 0) * (case.row.seq_len or 0)
    flop = tokens * model_flop_per_token(case.problem.model, case.row.seq_len or 0, causal_half=True)
    mfu = flop / (seconds * (case.row.gpus or 0) * 312e12)  # dense bf16 and fp16 of an A100
    (alone,) = best_runs_of(runs[:1])
    assert (alone.device, alone.runs) == ("A100-80G", 1) and alone.mfu == pytest.approx(mfu)
    (both,) = best_runs_of([runs[0], replace(runs[0], measured_s=seconds / 1.5)])
    assert both.runs == 2 and both.mfu == pytest.approx(1.5 * mfu)


def test_the_shipped_figures() -> None:
    text = BEST_RUNS.read_text("utf-8")
    assert text_of(json.loads(text)) == text
    assert sum(run.runs for run in best_runs().values()) == 831
    assert all(0.0 < run.mfu < 0.75 for run in best_runs().values())


def test_what_the_card_says() -> None:
    best = best_runs()["A100-80G", "bf16"]
    assert best.runs >= LEAST_RUNS
    limit = MARGIN * best.mfu
    assert implausible_mfu(limit * 0.999, ["A100-80G"], "bf16") is None
    text = implausible_mfu(limit * 1.001, ["A100-80G"], "bf16")
    assert text is not None and f"{best.runs} measured runs on A100-80G" in text
    # Without enough runs, of several kinds of devices, or without a figure, nothing is said.
    assert implausible_mfu(0.99, ["A40"], "bf16") is None
    assert implausible_mfu(0.99, ["A100-80G", "T4"], "bf16") is None
    assert implausible_mfu(None, ["A100-80G"], "bf16") is None
    plan = sw.evaluate(
        "gpt2-xl", cluster="1x1xA100-80G", global_batch_size=8, seq_len=1024, strategy="recompute=full"
    )
    for mfu, is_said in ((plan.best.mfu, False), (limit * 1.1, True)):
        lines = figures(replace(plan.best, mfu=mfu), plan.model, plan.cluster, plan.job)
        shown = "\n".join("".join(part for part, _ in line) for line in lines)
        assert ("far above the best of" in shown) == is_said


@pytest.mark.slow
def test_no_published_run_is_predicted_far_above_all_of_them() -> None:
    """But those of one machine (simumax), whose matmuls reach less than any other's: they are predicted a
    fifth too fast."""
    cases = [case for case in cases_of(read_rows(str(SHIPPED))[0])[0] if case.mixed is None]
    for prediction in predictions_of([case for case in cases if case.row.group != "simumax"]):
        problem = prediction.case.problem
        mfu = result_of(problem, prediction.strategy).mfu
        assert _over_best(mfu, problem.cluster.classes, problem.job.dtype) < 1.15, prediction.case.row.id


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "batch", "most"),
    [
        ("llama-3.1-8b", "1x8xA100-80G", 4096, 256, 1.1),
        ("llama-2-13b", "4x8xA100-80G", 4096, 512, 1.1),
        ("llama-3.1-70b", "8x8xH100-SXM", 8192, 256, 1.1),
        # No tensor parallelism, and cuDNN's attention; measured runs in 16 bits had FlashAttention-1.
        ("llama-3.1-8b", "4x8xH100-SXM", 8192, 256, 1.17),
    ],
)
def test_a_pick_is_not_far_above_what_was_ever_measured(
    model: str, cluster: str, seq_len: int, batch: int, most: float
) -> None:
    """Picks are the best of billions of strategies, of which few were measured. Where one is more than a
    tenth above these, the card says so."""
    plan = sw.plan(model, cluster=cluster, seq_len=seq_len, global_batch_size=batch, target="megatron-lm")
    over = _over_best(plan.best.mfu, plan.cluster.classes, plan.job.dtype)
    assert over < most
    text = implausible_mfu(plan.best.mfu, plan.cluster.classes, plan.job.dtype)
    assert (text is not None) == (over > MARGIN)


def _over_best(mfu: float | None, classes: Iterable[str], dtype: str) -> float:
    """The utilisation over that of the best measured run on the device; 0 where there are too few."""
    (name,) = classes
    best = best_runs().get((name, dtype))
    return 0.0 if best is None or best.runs < LEAST_RUNS or mfu is None else mfu / best.mfu
