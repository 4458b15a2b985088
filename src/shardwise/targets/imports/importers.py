"""Kinds of configuration files by the name of their target: a new one is an `Importer` in IMPORTERS."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from shardwise.errors import ConfigError
from shardwise.inputs import printable, read_text
from shardwise.plans import Plan
from shardwise.targets import deepspeed, fsdp2, megatron_fsdp, transformers
from shardwise.targets.imports.accelerate_import import is_accelerate, read_accelerate
from shardwise.targets.imports.deepspeed_import import is_deepspeed, read_deepspeed
from shardwise.targets.imports.imported import ImportedRun, Supplied
from shardwise.targets.imports.megatron_lm_import import (
    is_megatron_fsdp,
    is_megatron_lm,
    read_megatron_fsdp,
    read_megatron_lm,
)
from shardwise.targets.imports.torchtitan_import import is_torchtitan, read_torchtitan
from shardwise.targets.imports.trainer_import import is_trainer, read_trainer, read_with_trainer
from shardwise.targets.imports.transformers_import import is_transformers, read_transformers
from shardwise.targets.megatron_lm import strategy_settings
from shardwise.targets.megatron_lm_model import TARGET as MEGATRON_LM
from shardwise.targets.torchtitan import titan_settings
from shardwise.targets.torchtitan_model import TORCHTITAN

MAX_LOG_BYTES = 1 << 25
"""Largest file that is read: logs are long."""


class ReadRun(Protocol):
    """Reads the text of a file as a run on a number of devices. ConfigError for what cannot be used."""

    def __call__(self, text: str, *, devices: int, supplied: Supplied) -> ImportedRun: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Importer:
    """How the files of one target are read. `is_own` recognises the text of a file. `settings` are the flags
    or keys of a plan's strategy with their values, whether the target supports them or not."""

    files: str
    is_own: Callable[[str], bool]
    read: ReadRun
    settings: Callable[[Plan], Mapping[str, str]]


IMPORTERS: Mapping[str, Importer] = {
    megatron_fsdp.TARGET: Importer(
        files="the same with --use-megatron-fsdp",
        is_own=is_megatron_fsdp,
        read=read_megatron_fsdp,
        settings=megatron_fsdp.fsdp_settings,
    ),
    MEGATRON_LM: Importer(
        files="the arguments block of a Megatron-LM log, its flags, or a recipe of Megatron-Bridge",
        is_own=is_megatron_lm,
        read=read_megatron_lm,
        settings=strategy_settings,
    ),
    TORCHTITAN: Importer(
        files="a JSON or TOML of TorchTitan",
        is_own=is_torchtitan,
        read=read_torchtitan,
        settings=titan_settings,
    ),
    deepspeed.TARGET: Importer(
        files="a JSON of DeepSpeed",
        is_own=is_deepspeed,
        read=read_deepspeed,
        settings=deepspeed.zero_settings,
    ),
    fsdp2.TARGET: Importer(
        files="a YAML of Accelerate",
        is_own=is_accelerate,
        read=read_accelerate,
        settings=fsdp2.accelerate_settings,
    ),
    transformers.TARGET: Importer(
        files="a DistributedConfig of Transformers in Python",
        is_own=is_transformers,
        read=read_transformers,
        settings=transformers.transformers_settings,
    ),
}


def imported_run(path: str, *, devices: int, supplied: Supplied, trainer: str | None = None) -> ImportedRun:
    """The run that the file at `path` describes, on `devices`, with arguments of the Hugging Face Trainer in
    the file `trainer`. Raises ConfigError, with file and key, where it is of no known kind or cannot be
    used."""
    text = read_text(path, max_bytes=MAX_LOG_BYTES)
    own = replace(supplied, folder=os.path.dirname(path))
    try:
        if is_trainer(text) and trainer is None:
            return read_trainer(text, devices=devices, supplied=own)
        importer = _importer(path, text)
        if trainer is None:
            return importer.read(text, devices=devices, supplied=own)
        arguments = read_text(trainer, max_bytes=MAX_LOG_BYTES)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    try:
        return read_with_trainer(text, importer.read, arguments=arguments, devices=devices, supplied=own)
    except ConfigError as error:
        raise error.within(file=f"{printable(path)} with {printable(trainer)}") from None


def is_configuration(text: str) -> bool:
    """Whether the text of a file is of a kind that `imported_run` reads."""
    return is_trainer(text) or any(one.is_own(text) for one in IMPORTERS.values())


def _importer(path: str, text: str) -> Importer:
    importer = next((one for one in IMPORTERS.values() if one.is_own(text)), None)
    if importer is None:
        raise ConfigError(
            "is no configuration of known software", file=printable(path),
            allowed="; ".join((*(one.files for one in IMPORTERS.values()), "arguments of the Trainer")),
        )  # fmt: skip
    return importer
