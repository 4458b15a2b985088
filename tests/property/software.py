"""Training software for estimates of random strategies: one for each way in which software can differ, and
mixtures.

The figures are made up, so the tests do not depend on the profiles that shardwise ships.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from shardwise.cluster import Cluster
from shardwise.strategy import Job, Profile

PLAIN = Profile(
    name="plain",
    described="attention fused; hides all communication but that of tensor and expert parallelism",
    attention=("flash-3", "flash-2"),
    tensor_overlap=0.0,
    tensor_backward_overlap=0.0,
    context_overlap=0.9,
    expert_overlap=0.0,
    data_overlap=1.0,
    state_overlap=1.0,
    shard_overlap=0.9,
    pipeline_overlap=1.0,
    pointwise_passes=1.1,
    dispatch_s=5e-6,
    expert_dispatch_s=2e-5,
    host_action_s=2e-5,
    host_step_s=5e-3,
    reduce_in_fp32=True,
    zero_stages=(1,),
    recomputes=("none", "selective", "full"),
    recompute_stops_early=False,
    applies_dropout=True,
    sequence_parallel=True,
    buffers_all_microbatches=False,
    keeps_gathered_inputs=False,
    reduces_by_block=False,
    warm_band=(0.9, 1.1),
    cold_band=(0.7, 1.3),
    provenance={},
)

SOFTWARE: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        PLAIN,
        replace(PLAIN, name="unfused", attention=(), pointwise_passes=1.4),
        replace(PLAIN, name="blocking", pipeline_overlap=0.3, data_overlap=0.0, state_overlap=0.6),
        replace(PLAIN, name="no dropout", applies_dropout=False),
        replace(PLAIN, name="early stop", recompute_stops_early=True, dispatch_s=1e-4),
        replace(PLAIN, name="own dtype", reduce_in_fp32=False, tensor_backward_overlap=0.7),
        replace(
            PLAIN,
            name="modules on the host",
            offload_modules="qkv_linear+core_attn+attn_proj+mlp_norm+moe_act",
        ),
        replace(
            PLAIN,
            name="narrow reduction",
            reduce_in_fp32=False,
            accumulates_in_fp32=True,
            reduces_by_block=True,
            whole_in_pipelines=True,
        ),
        replace(PLAIN, name="slow host", dispatch_s=2e-4, expert_dispatch_s=3e-3, host_action_s=1e-3),
        replace(PLAIN, name="by block", keeps_gathered_inputs=True, reduces_by_block=True),
        replace(PLAIN, name="loss of Megatron-LM", loss="megatron"),
        replace(PLAIN, name="eager loss by block", loss="eager", reduces_by_block=True),
        replace(PLAIN, name="compiled loss", loss="compiled", keeps_low_precision_weights=True),
        replace(PLAIN, name="instances", shards_experts_by_instance=True),
        replace(PLAIN, name="adds gradients in memory", accumulated_bytes=10.0),
        replace(PLAIN, name="adds gradients in the product", fuses_accumulation=True),
        replace(PLAIN, name="whole stages", whole_in_pipelines=True, has_wide_frozen_weights=True),
        replace(PLAIN, name="eager modules", loss="fused", eager_modules=True),
        replace(PLAIN, name="buffers", buffers_all_microbatches=True, tensor_overlap=0.4, data_overlap=0.4),
        replace(
            PLAIN,
            name="everything",
            attention=(),
            tensor_overlap=0.3,
            tensor_backward_overlap=0.5,
            expert_overlap=0.6,
            data_overlap=0.5,
            state_overlap=0.3,
            pipeline_overlap=0.0,
            dispatch_s=8e-5,
            expert_dispatch_s=1e-3,
            reduce_in_fp32=False,
            recompute_stops_early=True,
            buffers_all_microbatches=True,
            keeps_gathered_inputs=True,
            reduces_by_block=True,
        ),
    )
}
"""By name."""

DTYPES: Mapping[str, tuple[str, ...]] = {
    "fp16": ("fp16",),
    "bf16": ("bf16",),
    "fp8": ("bf16", "fp8"),
    "fp8-block": ("bf16", "fp8"),
    "mxfp8": ("bf16", "fp8"),
    "nvfp4": ("bf16", "fp4"),
    "fp32": ("fp32",),
}
"""Recipes and the peaks that devices need for them."""


def random_software(rng: random.Random) -> Profile:
    """Software whose every figure is random, often at the ends of its range."""

    def share() -> float:
        return rng.choice((0.0, rng.random(), 1.0))

    def seconds(least: float, most: float) -> float:
        return float(rng.choice((0.0, 10.0 ** rng.uniform(least, most))))

    apart = random.Random(str(rng.getstate()))  # later additions are last, so that a seed keeps its meaning
    tensor = share()
    return Profile(
        name="drawn",
        described="at random",
        attention=rng.choice(((), ("flash-2",), ("flash-3", "flash-2"))),
        tensor_overlap=tensor,
        tensor_backward_overlap=(1.0 - tensor) * share(),
        context_overlap=share(),
        expert_overlap=share(),
        data_overlap=share(),
        shard_overlap=share(),
        pipeline_overlap=share(),
        pointwise_passes=rng.uniform(0.7, 1.5),
        dispatch_s=seconds(-6, -3),
        expert_dispatch_s=seconds(-5, -2),
        host_action_s=seconds(-6, -1),
        host_step_s=seconds(-6, -1),
        reduce_in_fp32=rng.random() < 0.5,
        zero_stages=(0, 1, 2, 3),
        recomputes=("none", "selective", "full"),
        recompute_stops_early=rng.random() < 0.5,
        sequence_parallel=True,
        buffers_all_microbatches=rng.random() < 0.3,
        keeps_gathered_inputs=apart.random() < 0.4,
        reduces_by_block=apart.random() < 0.4,
        state_overlap=apart.choice((0.0, apart.random(), 1.0)),
        applies_dropout=apart.random() < 0.7,
        warm_band=(0.9, 1.1),
        cold_band=(0.7, 1.3),
        provenance={},
    )


def with_random_software(job: Job, cluster: Cluster, seed: int) -> Job:
    """The job; for every other seed, with random software and a random dtype (that all devices have)."""
    rng = random.Random(f"software {seed}")
    if rng.random() < 0.5:
        return job
    devices = cluster.classes.values()
    dtypes = [
        name
        for name, peaks in DTYPES.items()
        if all(peak in device.peak_flop_per_s for peak in peaks for device in devices)
    ]
    return replace(job, profile=random_software(rng), dtype=rng.choice(dtypes))
