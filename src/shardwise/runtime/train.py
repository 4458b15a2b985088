"""The training loop of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.plan import Plan
from shardwise.runtime.data import Samples, Synthetic, TokenFile
from shardwise.runtime.initial import initialise
from shardwise.runtime.job import parallelize
from shardwise.runtime.modules import reference_module

SYNTHETIC = "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What `train` is asked for beside the plan. `data` is `synthetic` or the path of a token file."""

    steps: int
    data: str = SYNTHETIC
    lr: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as it went: `step` from 1, mean loss per token, seconds on the clock, and tokens so far."""

    step: int
    loss: float
    gradient_norm: float
    step_time_s: float
    tokens: int


def samples_of(plan: Plan, options: TrainOptions) -> Samples:
    """The batches that `options` name, for the plan's model and batch. ConfigError where there are none."""
    job, vocab = plan.job, plan.model.vocab
    if options.data == SYNTHETIC:
        return Synthetic(
            vocab=vocab, global_batch_size=job.global_batch_size, seq_len=job.seq_len, seed=options.seed
        )
    return TokenFile(
        options.data,
        vocab=vocab,
        global_batch_size=job.global_batch_size,
        seq_len=job.seq_len,
        seed=options.seed,
    )


def train(report: Callable[[StepRecord], None], plan: Plan, options: TrainOptions) -> None:
    """Train a fresh model under `plan` for `options.steps` steps; call it on every rank of the process group.

    `report` gets a record of every step, the same on every rank but for the clock.
    """
    samples = samples_of(plan, options)
    module = reference_module(plan.model)
    initialise(module, seed=options.seed, layers=plan.model.layers)
    job = parallelize(module, plan, lr=options.lr)
    for step in range(options.steps):
        batch = samples.batch(step)
        start_s = time.perf_counter()
        result = job.step(batch)
        report(
            StepRecord(
                step=step + 1,
                loss=result.loss,
                gradient_norm=result.gradient_norm,
                step_time_s=time.perf_counter() - start_s,
                tokens=(step + 1) * plan.job.global_batch_size * plan.job.seq_len,
            )
        )
