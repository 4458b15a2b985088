"""How an operator graph is trained: number formats, optimizer, software."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.strategy import MEGATRON_2024, Optimizer, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a Job says beside the sizes of a batch, which a graph has itself."""

    dtype: str
    optimizer: Optimizer = "adamw"
    profile: Profile = MEGATRON_2024
