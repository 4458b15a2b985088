"""Published runs of models with state-space layers, which nothing was fitted to."""

from __future__ import annotations

import pytest

import shardwise as sw


@pytest.mark.slow
def test_nemotron_h_on_gb200() -> None:
    """NVIDIA's DGX Cloud benchmarks (nemotron-h/README.md): 56B in FP8 with current scaling on 128 GB200, tp
    4, micro-batch size 2, 384 sequences of 8,192 tokens: 5.310 s a step. It needs all of the memory."""
    found = sw.evaluate(
        "nemotron-h-56b", strategy="tp=4,micro_batch_size=2,optim_shard=32,sequence_parallel=true",
        cluster="32x4xGB200", seq_len=8192, global_batch_size=384, dtype="fp8-current", target="any",
        software="megatron-lm-0.19",
        memory_margin=0.001,
    )  # fmt: skip
    assert found.step_time_s == pytest.approx(5.310, rel=0.05)
    low, high = found.best.band_s
    assert low < 5.310 < high
