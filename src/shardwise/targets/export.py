"""Exports by the name of their target: a new one is an `Exporter` in EXPORTERS."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shardwise.errors import ConfigError
from shardwise.launch import Program
from shardwise.model import Model
from shardwise.plans import Plan
from shardwise.strategy import newest_target, target_of, version_of
from shardwise.targets import (
    deepspeed,
    fsdp2,
    hugging_face,
    megatron_fsdp,
    megatron_lm,
    torchtitan,
    transformers,
)
from shardwise.targets.megatron_lm_model import TARGET, check_model
from shardwise.targets.megatron_lm_read_back import read_files_back
from shardwise.targets.read_back import ReadBack
from shardwise.targets.torchtitan_model import TORCHTITAN, check_titan_model
from shardwise.targets.torchtitan_read_back import read_titan_files_back

Files = Mapping[str, str]
"""The texts of files, by name."""


class ReadBackOf(Protocol):
    """Has the software of the target read the files of a plan, in a child process with this environment
    (None: that of this process). ConfigError where the software is not installed."""

    def __call__(
        self, plan: Plan, files: Files, *, environment: Mapping[str, str] | None = None
    ) -> ReadBack: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """How plans are written for one target: `files` raises ConfigError, with the key of the plan file, for
    what the target cannot say, and `check_model` the same for a model and its sequence length. `reader` is
    what `read_back` reads the files with, in words.

    `program` is what starts a plan, from the folder with its files and the training script: `script` unless
    another is given, None where the target takes none. `script_note` says where that comes from."""

    files: Callable[[Plan], Files]
    check_model: Callable[[Model, int], None]
    read_back: ReadBackOf
    reader: str
    program: Callable[[Plan, str, str], Program]
    script: str | None
    script_note: str = ""


_MEGATRON_SCRIPT = "is in the repository of Megatron-LM: start this there, or name it by --script"

_OWN_SCRIPT = "is a placeholder for your training script: name it by --script"


EXPORTERS: Mapping[str, Exporter] = {
    TARGET: Exporter(
        files=megatron_lm.megatron_lm_files,
        check_model=check_model,
        read_back=read_files_back,
        reader="Megatron-LM's own parser",
        program=megatron_lm.program,
        script=megatron_lm.PRETRAINING,
        script_note=_MEGATRON_SCRIPT,
    ),
    TORCHTITAN: Exporter(
        files=torchtitan.torchtitan_files,
        check_model=check_titan_model,
        read_back=read_titan_files_back,
        reader="TorchTitan itself",
        program=torchtitan.program,
        script=None,
    ),
    fsdp2.TARGET: Exporter(
        files=fsdp2.fsdp2_files,
        check_model=hugging_face.check_model,
        read_back=fsdp2.read_files_back,
        reader="Accelerate's own launcher",
        program=fsdp2.program,
        script=hugging_face.TRAINING,
        script_note=_OWN_SCRIPT,
    ),
    deepspeed.TARGET: Exporter(
        files=deepspeed.deepspeed_files,
        check_model=hugging_face.check_model,
        read_back=deepspeed.read_files_back,
        reader="DeepSpeed's own configuration",
        program=deepspeed.program,
        script=hugging_face.TRAINING,
        script_note=_OWN_SCRIPT,
    ),
    megatron_fsdp.TARGET: Exporter(
        files=megatron_fsdp.megatron_fsdp_files,
        check_model=check_model,
        read_back=megatron_fsdp.read_files_back,
        reader="Megatron-LM's own parser",
        program=megatron_lm.program,
        script=megatron_lm.PRETRAINING,
        script_note=_MEGATRON_SCRIPT,
    ),
    transformers.TARGET: Exporter(
        files=transformers.transformers_files,
        check_model=hugging_face.check_model,
        read_back=transformers.read_files_back,
        reader="Transformers' own classes",
        program=transformers.program,
        script=hugging_face.TRAINING,
        script_note=_OWN_SCRIPT,
    ),
}


def export_of(name: str) -> str | None:
    """The export target of this name; the newest version where the name has none; None where there is no
    export to it."""
    target = newest_target(name)
    return target if target in EXPORTERS else None


def refuse_older(name: str, target: str, files: Files) -> None:
    """Raise ConfigError for an older version of the software than the target's, with the flags and keys in
    `files` that newer versions brought."""
    newer = [
        f"{flag} came with {since}"
        for flag, since in target_of(target).since.items()
        if version_of(since) > version_of(name) and any(_has(text, flag) for text in files.values())
    ]
    found = "; ".join(newer) or "no flag or key of this plan is newer than that"
    raise ConfigError(
        f"is older than the files that export writes ({found})", key="--to", found=name, allowed=target
    )


def _has(text: str, flag: str) -> bool:
    """Whether a text has a flag, or the last part of a key."""
    return re.search(rf"(?<![\w-]){re.escape(flag.rpartition('.')[2])}(?![\w-])", text) is not None
