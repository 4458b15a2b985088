"""What is asked for, beside the model and the cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.strategy.profile import MEGATRON_2024, Profile

Optimizer = Literal["adamw", "adafactor", "sgd", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job: batch, numbers and margins.

    `dtype` is a plain dtype (`fp32`, `fp16`, `bf16`) or a recipe (`fp8`, `fp8-current`, `fp8-block`, `mxfp8`,
    `nvfp4`). `memory_margin` is the fraction of the capacity that stays free. `expert_imbalance` is the load
    of the busiest expert rank over the mean. `profile` is the software that runs it.
    """

    seq_len: int
    global_batch_size: int
    dtype: str
    optimizer: Optimizer = "adamw"
    memory_margin: float = 0.05
    expert_imbalance: float = 1.1
    seed: int = 0
    profile: Profile = MEGATRON_2024
