"""Exports by the name of their target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plans import Plan
from shardwise.strategy import newest_target
from shardwise.targets.megatron_lm import Flag, megatron_lm_files, megatron_lm_flags
from shardwise.targets.megatron_lm_read_back import ReaderRequest

EXPORTS = ("megatron-lm-0.19",)
"""Targets that plans can be exported to."""

FOR_READING = ("--no-rope-fusion",)
"""Flags that are added only for reading back. The fused RoPE kernel needs Transformer Engine, which a
machine that only reads flags may lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An exported plan: flags with their values, and files by name."""

    target: str
    flags: tuple[Flag, ...]
    files: Mapping[str, str]


def export_of(name: str) -> str | None:
    """The export target of this name; the newest version where the name has none; None where there is no
    export to it."""
    target = newest_target(name)
    return target if target in EXPORTS else None


def exported(plan: Plan, target: str) -> Exported:
    """`plan` as flags and files of `target`, one of EXPORTS. Raises ConfigError, with the key of the plan
    file, for a value that cannot be exported."""
    flags = megatron_lm_flags(plan)
    return Exported(target=target, flags=flags, files=megatron_lm_files(plan, target, flags))


def reader_request(plan: Plan, flags: tuple[Flag, ...]) -> ReaderRequest:
    """The request for the target to read the flags of `plan` back."""
    words = tuple(word for flag in flags for word in flag)
    return ReaderRequest(flags=words + FOR_READING, world_size=plan.cluster.devices)
