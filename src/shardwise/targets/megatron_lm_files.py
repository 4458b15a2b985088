"""The files of an export to Megatron-LM: its flags one a line, and the same as a bash array."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from shardwise.cluster import Cluster
from shardwise.plan import Plan, plan_hash
from shardwise.targets.megatron_lm import Flag
from shardwise.units import format_bytes, format_seconds

WRITTEN_BY = "Written by shardwise export"
"""A comment of every file that `export` writes: files without it are not replaced."""

ARRAY = "megatron_lm_args"

_PORT = 29500


def megatron_lm_files(plan: Plan, target: str, flags: Sequence[Flag]) -> dict[str, str]:
    """The texts of the files, by their names."""
    head = [f"# {line}".rstrip() for line in _head(plan, target)]
    unknown = [f"# {' '.join(map(shlex.quote, flag))}" for flag in _unknown(plan)]
    own = [" ".join(map(shlex.quote, flag)) for flag in flags]
    start = [f"# {line}" for line in _start(plan.cluster)]
    lines = [*head, "#", *_UNKNOWN_NOTE, *unknown, "", *own]
    script = [
        "#!/usr/bin/env bash",
        *head,
        "",
        "# Devices before Blackwell need it where tensors or sequences are split.",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
        "",
        f"{ARRAY}=(",
        *(f"  {line}" for line in own),
        ")",
        "",
        *_UNKNOWN_NOTE,
        f"# {ARRAY}+=(",
        *(f"#   {line.removeprefix('# ')}" for line in unknown),
        "# )",
        "",
        *start,
    ]
    return {"megatron-lm.args": "\n".join(lines) + "\n", "megatron-lm.sh": "\n".join(script) + "\n"}


_UNKNOWN_NOTE = [
    "# The plan does not know these settings. The values are placeholders: set your own, and remove the #.",
    "# With another tokenizer keep --padded-vocab-size: it is the vocabulary of the plan.",
]


def _head(plan: Plan, target: str) -> Iterator[str]:
    best = plan.best
    low, high = best.band_s
    yield f"{WRITTEN_BY} for the target {target} (Megatron-LM 0.19)."
    yield f"Plan: {plan_hash(plan)}"
    band = f"{format_seconds(low)} to {format_seconds(high)}"
    yield f"Predicted step time: {best.step_time_s:.6g} s (band {band}; profile {plan.job.profile.name})."
    peak = best.peak_memory
    yield f"Predicted peak memory: {format_bytes(peak.device)} of {format_bytes(peak.capacity)} a device."
    yield "Predictions only: nothing of this file was run on hardware."


def _unknown(plan: Plan) -> Iterator[Flag]:
    """Settings of a run that no plan has."""
    yield "--train-iters", "100000"
    yield "--lr", "3e-4"
    yield "--min-lr", "3e-5"
    yield "--lr-decay-style", "cosine"
    yield "--lr-warmup-iters", "2000"
    yield "--weight-decay", "0.1"
    yield "--adam-beta2", "0.95"
    yield ("--mock-data",)
    if plan.model.experts is not None:
        found = plan.model.config.get("router_aux_loss_coef")
        yield "--moe-aux-loss-coeff", str(0.01 if found is None else found)


def _start(cluster: Cluster) -> Iterator[str]:
    """How torchrun starts the plan, on every node in the order of the plan."""
    counts = [node.devices for node in cluster.nodes]
    program = f'pretrain_gpt.py "${{{ARRAY}[@]}}"'
    if len(counts) == 1:
        yield f"torchrun --standalone --nproc-per-node {counts[0]} {program}"
        return
    yield f"On each of the {len(counts)} nodes, NODE_RANK from 0 in the order of the plan's cluster:"
    each = str(counts[0])
    if len(set(counts)) > 1:
        yield f"DEVICES is the number of devices of the node: {', '.join(map(str, counts))}."
        each = '"$DEVICES"'
    yield (
        f'torchrun --nnodes {len(counts)} --nproc-per-node {each} --node-rank "$NODE_RANK"'
        f' --master-addr "$MASTER_ADDR" --master-port {_PORT} {program}'
    )
