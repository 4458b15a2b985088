"""How an operator graph is trained (`Training`), and how often the parts of a step happen (`StepCounts`)."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.strategy import MEGATRON_2024, Optimizer, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The fields of a `Job` that an operator graph does not contain: dtype, optimizer, software profile."""

    dtype: str
    optimizer: Optimizer = "adamw"
    profile: Profile = MEGATRON_2024


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Step counts of one of `stages` pipeline stages.

    A step has one forward and one backward pass for each of `microbatches`; at most `in_flight` micro-batches
    are between the two. `steps` counts the work that happens once per step: the optimizer, the all-reduce of
    the gradient norm, the synchronisation of unsharded gradients.

    In each forward and backward pass, sends to other stages block a rank for `sent_forward_s` and
    `sent_backward_s` seconds. Their buffers have `buffer_bytes`. Other counts give parts of a step: `steps` 0
    leaves the passes, and `extra_forwards` adds forward passes to those of the micro-batches (or removes some
    where it is negative).
    """

    microbatches: int = 1
    steps: int = 1
    extra_forwards: int = 0
    in_flight: int = 1
    stages: int = 1
    sent_forward_s: float = 0.0
    sent_backward_s: float = 0.0
    buffer_bytes: float = 0.0


WHOLE_BATCH = StepCounts()
"""One micro-batch of the whole batch, on all devices."""
