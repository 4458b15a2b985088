"""Overhead of a step under a plan over the same layout written by hand (`benchmarks.hand_written`).

Two processes of this machine train the same small Llama both ways, alternately, from the same parameters. The
losses must be equal. Nothing else should run at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import distributed

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import model_from_config
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, parallelize, reference_module
from shardwise.runtime.data import Synthetic
from shardwise.runtime.initialization import initialise
from shardwise.runtime.workers import Report
from shardwise.strategy import Job, complete, parse_fields

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 2048, "max_position_embeddings": 256,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
SEQ_LEN, BATCH, RANKS = 256, 8, 2
LR = 1e-4
"""Learning rate. At ten times this rate, rounding alone makes losses differ by 1e-4."""

LAYOUTS = {
    "ddp": "dp=2,zero_stage=0,micro_batch_size=4",
    "fsdp2": "dp=2,zero_stage=3,micro_batch_size=4",
    "tensor": "tp=2,sequence_parallel=true,micro_batch_size=8",
    "pipeline": "pp=2,schedule=1f1b,micro_batch_size=2",
}
"""Plans by the name of the hand-written layout that they are compared with."""

WARM_UP, REPEATS = 3, 30
TOLERANCE = 1e-4
"""Largest relative difference of the losses of a step."""


def plan_of(text: str) -> Plan:
    model = model_from_config(CONFIG, name="small")
    strategy = complete(
        {"dp": 1, **parse_fields(text)}, devices=RANKS, layers=model.layers, experts=None,
        global_batch_size=BATCH,
    )  # fmt: skip
    job = Job(seq_len=SEQ_LEN, global_batch_size=BATCH, dtype="fp32", optimizer="adamw")
    return search.plan_of_strategy(model, load_cluster(f"1x{RANKS}xcpu"), job, strategy)


def steps_of(report: Report, name: str) -> tuple[list[float], list[float]]:
    """On every rank: seconds of the steps under the plan, and of the hand-written steps."""
    from benchmarks import hand_written

    plan = plan_of(LAYOUTS[name])
    whole = reference_module(plan.model)
    initialise(whole, seed=0, layers=plan.model.layers)
    by_hand = hand_written.Llama(CONFIG, SEQ_LEN)
    by_hand.load_state_dict(whole.state_dict())
    divide: Any = getattr(hand_written, name)
    if name == "pipeline":
        divide = partial(divide, microbatches=plan.microbatches)
    other = divide(by_hand, LR)
    job = parallelize(whole, plan, lr=LR)
    batches = Synthetic(vocab=plan.model.vocab, global_batch_size=BATCH, seq_len=SEQ_LEN, seed=0)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(WARM_UP + REPEATS):
        batch = batches.batch(step)
        variants: list[tuple[list[float], Callable[[], float]]] = [
            (times[0], lambda batch=batch: job.step(batch).loss),  # type: ignore[misc]
            (times[1], lambda batch=batch: other(batch)),  # type: ignore[misc]
        ]
        losses = {}
        for own, variant in variants if step % 2 else reversed(variants):
            distributed.barrier()
            start_s = time.perf_counter()
            losses[id(own)] = variant()
            own.append(_slowest_s(time.perf_counter() - start_s))
        ours, theirs = (losses[id(own)] for own in times)
        if abs(ours - theirs) > TOLERANCE * theirs:
            raise ValueError(f"step {step} of {name}: loss {ours} under the plan, {theirs} by hand")
    return times[0][WARM_UP:], times[1][WARM_UP:]


def _slowest_s(seconds: float) -> float:
    largest = torch.tensor(seconds)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return float(largest)


def figures(name: str) -> dict[str, float]:
    """Median seconds of both, and the median relative overhead of pairs of steps.

    The two steps of a pair follow each other, so the speed of the machine hardly changes between them."""
    with WorkerPool(RANKS) as team:
        ours, theirs = team.run(RANKS, steps_of, name)[0]
    return {
        "plan_s": median(ours),
        "by_hand_s": median(theirs),
        "overhead": median(own / other for own, other in zip(ours, theirs, strict=True)) - 1.0,
    }
