"""Kinds of configuration files by the name of their target: a new one is an `Importer` in IMPORTERS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from shardwise.errors import ConfigError
from shardwise.inputs import printable, read_text
from shardwise.plans import Plan
from shardwise.targets import deepspeed, fsdp2, megatron_fsdp
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
        files="the arguments block of a Megatron-LM log, or its flags",
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
}


def imported_run(path: str, *, devices: int, supplied: Supplied) -> ImportedRun:
    """The run that the file at `path` describes, on `devices`. Raises ConfigError, with file and key, where
    it is of no known kind or cannot be used."""
    text = read_text(path, max_bytes=MAX_LOG_BYTES)
    importer = next((one for one in IMPORTERS.values() if one.is_own(text)), None)
    if importer is None:
        raise ConfigError(
            "is no configuration of known software", file=printable(path),
            allowed="; ".join(one.files for one in IMPORTERS.values()),
        )  # fmt: skip
    try:
        return importer.read(text, devices=devices, supplied=supplied)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
