"""How an operator graph is trained: number formats, optimizer, software.

How often the parts of a step happen where a batch goes through a stage of a pipeline in micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.strategy import MEGATRON_2024, Optimizer, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a Job says beside the sizes of a batch, which a graph has itself."""

    dtype: str
    optimizer: Optimizer = "adamw"
    profile: Profile = MEGATRON_2024


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """A step of one of `stages` stages: so many forward and backward passes, one for each of `microbatches`,
    of which at most `in_flight` are between the two; and `steps` times what is done once: optimizer, joining
    of the norm, gradients of parameters that wait whole.

    In each forward and backward pass, what is sent to other stages holds a rank up for `sent_forward_s` and
    `sent_backward_s`; messages wait in `buffer_bytes`. With other numbers than a step has, the same sums tell
    its parts: `steps` 0 leaves the passes, and with `extra_forwards` there are so many forward passes beside
    those of the micro-batches (fewer where it is negative).
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
"""The whole batch at once, on all devices."""
