"""Samples that are packed into a sequence: attention is computed within each of them, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import (
    SOFTWARE,
    brick_model,
    bytes_of,
    cluster,
    operator_model,
    problem,
    table,
    with_efficiency,
    with_software,
)

from shardwise.cluster import AttentionCurve, load_cluster
from shardwise.cost import Problem, ProblemShapes, bind
from shardwise.cost.operators import operator_times
from shardwise.errors import ConfigError
from shardwise.model import load_model
from shardwise.operators import Attention, Extent
from shardwise.search import default_job, masks_samples
from shardwise.search.result import result_of
from shardwise.search.step_times import step_times_s
from shardwise.strategy import StrategyTable, complete

MODEL, NODE = load_model("llama-3.1-8b"), load_cluster("1x8xH100-SXM")
CORE = Attention(name="a", heads=Extent(4, "heads"), kv_heads=Extent(2, "kv_heads"), qk_dim=3, v_dim=5)


def given(sample: int | None, core: Attention = CORE, *, seq_len: int = 8, **efficiency: Any) -> Problem:
    on = cluster(of=with_efficiency(**efficiency))
    return problem(operator_model((core,)), on, seq_len=seq_len, mean_sample_len=sample)


def forward_s(p: Problem, core: Attention = CORE, text: str = "tp=1") -> float:
    return float(np.broadcast_to(operator_times(p, table(p, text), core, None).forward_s, 1)[0])


@pytest.mark.parametrize(
    ("sample", "window", "causal", "keys"),
    [
        (8, None, True, 4.0),
        (4, None, True, 2.0),
        (4, None, False, 4.0),  # the whole sample, not the whole sequence
        (4, 3, True, 1.875),  # 3 - 9 / 8
        (4, 6, True, 2.0),  # a window wider than the sample has no effect
    ],
)
def test_keys_of_a_query_are_those_of_its_sample(
    sample: int, window: int | None, causal: bool, keys: float
) -> None:
    # 2 * 8 queries * keys * 4 heads * (3 + 5) flop at 1000 flop/s.
    core = replace(CORE, window=window, causal=causal)
    assert forward_s(given(sample, core), core) == pytest.approx(0.512 * keys, rel=1e-14)


def test_the_kernel_has_the_rate_of_the_sample() -> None:
    curve = AttentionCurve(forward_fraction=1.0, backward_fraction=1.0, seq_half=8.0)
    # 0.512 * 4 at 8 / (8 + 8) of the peak; 0.512 * 2 at 4 / (4 + 8) of it: 4.096 and 3.072 s.
    times = [forward_s(given(sample, attention={"flash-2": curve})) for sample in (None, 4)]
    assert times == pytest.approx([4.096, 3.072], rel=1e-14)


def test_a_windowed_kernel_keeps_its_rate() -> None:
    # Its blocks are limited by the window in either case: half of the peak, 8 / (8 + 8), for 1.875 keys of
    # samples of 4, and for one key of samples of 2.
    curve = AttentionCurve(forward_fraction=1.0, backward_fraction=1.0, seq_half=8.0)
    core = replace(CORE, window=3)
    times = [forward_s(given(sample, core, attention={"flash-2": curve}), core) for sample in (4, 2)]
    assert times == pytest.approx([1.92, 1.024], rel=1e-14)


def test_context_parallelism_splits_the_queries() -> None:
    assert forward_s(given(4), text="cp=2") == pytest.approx(0.512, rel=1e-14)  # half of 1.024


def test_unfused_attention_computes_the_whole_sequence() -> None:
    whole, packed = (with_software(given(sample), attention=()) for sample in (None, 2))
    assert forward_s(packed) == forward_s(whole)
    assert bytes_of(packed, "tp=1").activations == pytest.approx(bytes_of(whole, "tp=1").activations)
    assert masks_samples(packed.cluster, packed.job) and not masks_samples(whole.cluster, whole.job)
    assert not masks_samples(given(2).cluster, given(2).job)


def test_memory_is_that_of_the_sequence() -> None:
    whole, packed = (bytes_of(given(sample), "tp=2") for sample in (None, 2))
    np.testing.assert_array_equal(packed.device, whole.device)


def test_a_ring_sends_keys_and_values_of_the_whole_sequence() -> None:
    """A step with a ring of two ranks becomes shorter by the attention that is not computed, and by nothing
    of the messages: software without overlap."""
    exposed = replace(SOFTWARE, context_overlap=0.0, data_overlap=0.0, state_overlap=0.0)
    whole, packed = (
        bind(p.model, p.cluster, replace(p.job, profile=exposed)) for p in (given(None), given(4))
    )
    rows = table(whole, "cp=2,cp_kind=ring,dp=4,micro_batch_size=1")
    # Two layers, two micro-batches; 2 keys less for each of 4 queries: 0.512 s forward, 2.5 times that back.
    shorter = step_times_s(whole, rows) - step_times_s(packed, rows)
    assert shorter == pytest.approx(4 * 3.5 * 0.512, rel=1e-12)


def test_stacked_problems_keep_their_samples() -> None:
    problems = [given(None), given(4), given(2), given(None, seq_len=16)]
    tables = [table(p, "dp=8", "tp=2") for p in problems]
    both = ProblemShapes().stacked(problems, [2] * len(problems))
    joined = StrategyTable.joined(tables)
    apart = np.concatenate([step_times_s(p, rows) for p, rows in zip(problems, tables, strict=True)])
    np.testing.assert_array_equal(step_times_s(both, joined), apart)


def test_utilisation_counts_the_attention_of_samples() -> None:
    """Llama 3.1 8B: 6 flop for each of 7,504,924,672 parameters without the embedding, and 3 * 2 * 32 layers
    * 32 heads * 256 * keys for attention: 1,024 keys in samples of 2,048, all 2,048 counting in full."""
    job = default_job(MODEL, NODE, seq_len=8192, global_batch_size=64, mean_sample_len=2048)
    strategy = complete(
        {"dp": 8, "micro_batch_size": 1}, devices=8, layers=32, experts=None, global_batch_size=64
    )
    found = result_of(bind(MODEL, NODE, job), strategy)
    rate = found.tokens_per_s_per_device
    assert rate is not None and found.mfu is not None and found.mfu_full_attention is not None
    peak = NODE.classes["H100-SXM"].peak_flop_per_s["bf16"]
    attention = 3 * 2 * 32 * 32 * 256 * 1024
    flop = found.mfu * peak / rate, found.mfu_full_attention * peak / rate
    assert flop[0] == pytest.approx(6 * 7_504_924_672 + attention, rel=1e-12)
    assert flop[1] == pytest.approx(6 * 7_504_924_672 + 2 * attention, rel=1e-12)


def test_samples_are_no_longer_than_sequences() -> None:
    model = brick_model()
    with pytest.raises(ConfigError, match="mean_sample_len"):
        default_job(model, cluster(), seq_len=8, global_batch_size=8, mean_sample_len=9)
    job = given(6).job
    assert job.is_packed and job.with_seq_len(4).attention_len == 4 and not job.with_seq_len(4).is_packed
    assert given(8).job.is_packed is False
