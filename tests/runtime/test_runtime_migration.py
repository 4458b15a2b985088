"""State that is migrated between plans in memory equals, bit by bit, a checkpoint loaded under the other
plan; the bytes between nodes are those that `replan` predicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runtime.equality import LR, MAX_NORM, batches, single_process, whole_module
from tests.runtime.jobs import uniform
from tests.runtime.plans import make_plan
from tests.sampling import sample_of

from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, migrate, parallelize
from shardwise.runtime.checkpoint import AsyncCheckpoint, load, resumable
from shardwise.runtime.gradients import local
from shardwise.runtime.private import process_groups
from shardwise.runtime.uniform import UniformTrainingJob
from shardwise.runtime.workers import Report

BEFORE, AFTER = 2, 2
"""Steps before and after the migration."""

MESSAGE_BYTES = 4096


def differing(one: UniformTrainingJob, other: UniformTrainingJob) -> list[str]:
    """Names of parameters and states that differ in any bit."""
    first, second = one.state(), other.state()
    return [name for name in {**first, **second} if not torch.equal(local(first[name]), local(second[name]))]


def migrated_run(
    report: Report, before: Plan, after: Plan, root: str, message_bytes: int
) -> tuple[list[str], list[float], bool]:
    """A run that migrates from one plan to the other: the names that differ from the checkpoint, all losses,
    and whether unused process groups are left."""
    job = uniform(parallelize(whole_module(before.model, 0), before, lr=LR, max_norm=MAX_NORM))
    losses = [job.step(batches(before, 0).batch(step)).loss for step in range(BEFORE)]
    AsyncCheckpoint(job, root, step=BEFORE, seed=0, data="synthetic").wait()
    earlier = process_groups()
    job, _ = migrate(job, after, message_bytes=message_bytes)
    left = bool(earlier & process_groups())
    other = uniform(parallelize(whole_module(after.model, 5), after, lr=LR, max_norm=MAX_NORM))
    load(other, resumable(after, root)[0])
    different = differing(job, other)
    losses += [job.step(batches(after, 0).batch(BEFORE + step)).loss for step in range(AFTER)]
    return different, losses, left


MIGRATIONS = [
    (
        "dp=2,ep=2,zero_stage=1,micro_batch_size=4,offload=optimizer",
        "tp=2,ep=1,micro_batch_size=4",
        "deepseek_v3",
        "adamw",
    ),
    ("tp=2,etp=2,ep=1,micro_batch_size=4", "pp=2,schedule=1f1b,micro_batch_size=4", "gpt_oss", "adamw"),
    ("dp=2,zero_stage=1", "pp=2,schedule=1f1b,micro_batch_size=2", "gpt", "adamw"),
    ("pp=2,schedule=1f1b,micro_batch_size=2", "dp=2,zero_stage=3,micro_batch_size=2", "llama", "sgd"),
    ("pp=2,schedule=zb_v,vpp=2,micro_batch_size=1", "dp=2,zero_stage=1", "gpt", "adamw"),
    (
        "dp=4,zero_stage=3,micro_batch_size=2",
        "tp=4,sequence_parallel=true,micro_batch_size=4",
        "llama",
        "adamw",
    ),
    ("tp=2,cp=2,micro_batch_size=4", "pp=4,schedule=1f1b,micro_batch_size=2", "llama", "adamw"),
    ("dp=2,zero_stage=1,offload=optimizer", "pp=2,schedule=1f1b,offload=both", "gpt", "adamw"),
]
MORE_MIGRATIONS = [
    (
        "tp=2,ep=1,micro_batch_size=4",
        "dp=2,ep=2,zero_stage=3,micro_batch_size=4,offload=both",
        "deepseek_v3",
        "sgd",
    ),
    (
        "dp=2,ep=2,zero_stage=1,micro_batch_size=4",
        "tp=2,ep=1,sequence_parallel=true,micro_batch_size=4",
        "deepseek_v3",
        "adamw",
    ),
    ("dp=2,zero_stage=0", "tp=2,micro_batch_size=4", "llama", "adamw"),
    (
        "pp=2,dp=2,schedule=1f1b,micro_batch_size=2",
        "tp=2,dp=2,zero_stage=3,micro_batch_size=4",
        "gpt",
        "adamw",
    ),
    (
        "tp=2,dp=2,zero_stage=2,micro_batch_size=4",
        "pp=2,tp=2,schedule=1f1b,micro_batch_size=4",
        "gpt",
        "adamw",
    ),
    ("dp=4,ep=2,zero_stage=3,micro_batch_size=2", "tp=4,etp=2,micro_batch_size=4", "mixtral", "adamw"),
    ("tp=2,micro_batch_size=4", "dp=2,zero_stage=3,micro_batch_size=4,offload=optimizer", "llama", "sgd"),
    (
        "pp=2,tp=2,ep=2,schedule=1f1b,micro_batch_size=4",
        "dp=4,ep=4,zero_stage=1,micro_batch_size=2",
        "qwen3_moe",
        "adamw",
    ),
]
"""Run with `--full` only: the migrations above have the same mechanisms."""


@pytest.mark.parametrize(
    ("before", "after", "model", "optimizer"), sample_of([*MIGRATIONS, *MORE_MIGRATIONS], MIGRATIONS)
)
def test_migration_preserves_the_state(
    team: WorkerPool, tmp_path: Path, before: str, after: str, model: str, optimizer: str
) -> None:
    """In many messages, several of which are in flight at a time."""
    first, second = (make_plan(text, model=model, optimizer=optimizer) for text in (before, after))
    whole = single_process(first, seed=0, steps=BEFORE + AFTER).losses
    requested = first, second, str(tmp_path), MESSAGE_BYTES
    for different, losses, left in team.run(second.cluster.devices, migrated_run, *requested):
        assert different == []
        assert losses == pytest.approx(whole, rel=2e-5)
        assert not left
