"""Bytes of weights, gradients, optimizer states and buffers under DeepSpeed, compared with its engine's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from tests.targets.counted_sharding import RANKS
from tests.targets.folders import environment_with

from shardwise.cluster import load_cluster
from shardwise.cost import bind, costs_of_all_stages, rank_bytes
from shardwise.model import model_from_config
from shardwise.strategy import PROFILES, Job, StrategyTable, complete, parse_fields

pytestmark = pytest.mark.xdist_group("deepspeed")

WITHIN = 0.06

# (ZeRO stage, dtype of gradients, elements of a bucket, elements gathered ahead, vocabulary)
CASES = [
    (3, "bf16", 1_000_000, 2_000_000, 2048),
    (3, "bf16", 3_000_000, 6_000_000, 2048),
    (3, "bf16", 4_000_000, 3_000_000, 16384),  # the head alone is larger
    (3, "fp32", 3_000_000, 6_000_000, 2048),
    (2, "bf16", 1_000_000, 2_000_000, 2048),
    (2, "bf16", 5_000_000, 2_000_000, 2048),
    (2, "fp32", 5_000_000, 2_000_000, 2048),
    (1, "bf16", 3_000_000, 2_000_000, 2048),
]


@pytest.mark.parametrize(("stage", "gradients", "bucket", "live", "vocabulary"), CASES)
def test_bytes_are_those_of_the_engine(
    stage: int, gradients: str, bucket: int, live: int, vocabulary: int
) -> None:
    counted = counted_peaks(stage, gradients, bucket, live, vocabulary)
    peak = max(counted[name] for name in ("forward", "backward", "update"))
    ours = predicted(stage, gradients, bucket, live, vocabulary)
    assert abs(ours / peak - 1.0) < WITHIN, f"counted {counted}, ours {ours:.0f}"


def test_fp32_gradients_of_zero_1_are_whole_and_next_to_narrow_ones() -> None:
    """DeepSpeed's BF16_Optimizer: weights 2 B and states 12 / 8 B, gradients 4 B and 2 B.

    On a CPU it does not see its own gradients to reduce, so that there is no copy of a bucket.
    """
    counted = counted_peaks(1, "fp32", 1_000_000, 2_000_000, 2048)
    assert counted["forward"] / counted["weights"] == pytest.approx(2 + 12 / RANKS + 4 + 2, rel=0.01)
    ours = predicted(1, "fp32", 1_000_000, 2_000_000, 2048)
    assert abs((ours - 4.0 * 1_000_000) / counted["backward"] - 1.0) < WITHIN


def counted_peaks(stage: int, gradients: str, bucket: int, live: int, vocabulary: int) -> dict[str, int]:
    zero = {
        "stage": stage,
        "overlap_comm": True,
        "reduce_bucket_size": bucket,
        "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live,
        "stage3_prefetch_bucket_size": live // 20,  # as of the defaults
        "stage3_param_persistence_threshold": 1000,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.targets.counted_sharding"],
        input=json.dumps({"zero": zero, "gradients": gradients, "vocabulary": vocabulary}),
        capture_output=True, text=True, check=False, env=environment_with("deepspeed"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    counted: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counted


def predicted(stage: int, gradients: str, bucket: int, live: int, vocabulary: int) -> float:
    """The bytes in tensors of the cost model for the model of `counted_sharding`, without activations."""
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": vocabulary,
        "tie_word_embeddings": False, "max_position_embeddings": 2048,
    }  # fmt: skip
    profile = replace(
        PROFILES["deepspeed-0.19"],
        bucket_elements=float(bucket),
        gathered_elements=float(live),
        reduce_in_fp32=gradients == "fp32",
    )
    job = Job(seq_len=4, global_batch_size=2 * RANKS, dtype="bf16", profile=profile)
    problem = bind(model_from_config(config), load_cluster(f"1x{RANKS}xH100-SXM"), job)
    fields = parse_fields(f"dp={RANKS},zero_stage={stage},recompute=full")
    strategy = complete(
        fields, devices=RANKS, layers=12, experts=None, global_batch_size=job.global_batch_size
    )
    table = StrategyTable.of([strategy])
    return float(rank_bytes(problem, table, costs_of_all_stages(problem, table)).allocated[0, 0])
