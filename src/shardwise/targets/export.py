"""Exports by the name of their target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan import Plan
from shardwise.targets.child import ReaderRequest
from shardwise.targets.megatron_lm import Flag, megatron_lm_flags
from shardwise.targets.megatron_lm_files import megatron_lm_files

EXPORTS = ("megatron-lm-0.19",)
"""Targets that plans are exported to, the newest version of each first."""

FOR_READING = ("--no-rope-fusion",)
"""Flags that are added for reading alone: this kernel comes with Transformer Engine, which a machine that
only reads flags may lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in the words of a target: flags with their values, and files by their names."""

    target: str
    flags: tuple[Flag, ...]
    files: Mapping[str, str]


def export_of(name: str) -> str | None:
    """The target of this name; of a name without a version the newest. None for an unknown name."""
    if name in EXPORTS:
        return name
    return next((target for target in EXPORTS if target.rpartition("-")[0] == name), None)


def exported(plan: Plan, target: str) -> Exported:
    """`plan` in the words of `target`, one of EXPORTS. ConfigError, by the key of the plan file, for what has
    no word there."""
    flags = megatron_lm_flags(plan)
    return Exported(target=target, flags=flags, files=megatron_lm_files(plan, target, flags))


def reader_request(plan: Plan, flags: tuple[Flag, ...]) -> ReaderRequest:
    """The request by which the target reads the flags of `plan` back."""
    words = tuple(word for flag in flags for word in flag)
    return ReaderRequest(flags=words + FOR_READING, world_size=plan.cluster.devices)
