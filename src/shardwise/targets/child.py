"""Starts the child process in which Megatron-LM reads flags (`megatron_lm_reader`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import ConfigError, InternalError

READER = "shardwise.targets.megatron_lm_reader"

FIRST_REPLY_S, EACH_REPLY_S = 600, 30
"""How long the child process may take until it is given up, with its imports and per request; generous, since
imports take half a minute on a busy machine."""

INSTALL = "pip install megatron-core==0.19.* numpy packaging einops, on Python 3.12 with PyTorch for a GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderRequest:
    """Flags that Megatron-LM is to read as those of a run on `world_size` devices."""

    flags: tuple[str, ...]
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What Megatron-LM understood: its arguments after validation, the fields of its TransformerConfig, the
    names of layers by pipeline rank and chunk where a layout was given, the numbers of decoder layers by
    pipeline rank and chunk, and the vocabulary with its padding. Where it refused the flags `error` is a line
    and all else is empty."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: tuple[tuple[tuple[str, ...], ...], ...] | None = None
    layers: tuple[tuple[int, ...], ...] = ()
    padded_vocab_size: int | None = None
    error: str | None = None


def read_by_megatron_lm(
    requests: Sequence[ReaderRequest], *, environment: Mapping[str, str] | None = None
) -> list[Reading]:
    """What Megatron-LM understands by each request, read in one child process with this `environment` (None:
    that of this process). Raises ConfigError where Megatron-LM cannot be imported."""
    lines = [json.dumps({"flags": request.flags, "world_size": request.world_size}) for request in requests]
    if not lines:
        return []
    done = _run("\n".join(lines) + "\n", environment, FIRST_REPLY_S + EACH_REPLY_S * len(lines))
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    missing = next((reply["error"] for reply in replies if reply.get("is_missing")), None)
    if missing is not None:
        raise _missing(f"Megatron-LM cannot be imported ({missing})")
    if done.returncode or len(replies) != len(lines):
        last = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise InternalError(
            f"the reader of Megatron-LM's flags answered {len(replies)} of {len(lines)} requests: {last}"
        )
    return [_reading(reply) for reply in replies]


def _run(
    text: str, environment: Mapping[str, str] | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [sys.executable, "-m", READER], input=text, capture_output=True, encoding="utf-8",
            errors="replace", timeout=timeout_s, env=dict(os.environ if environment is None else environment),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"Megatron-LM read no answer from the flags in {timeout_s:g} s", key="--validate"
        ) from None


def _missing(message: str) -> ConfigError:
    return ConfigError(message, key="--validate", allowed=INSTALL)


def _reading(reply: Mapping[str, Any]) -> Reading:
    if "error" in reply:
        return Reading(error=reply["error"])
    layout = reply["layout"]
    return Reading(
        arguments=reply["arguments"],
        config=reply["config"],
        layout=None if layout is None else tuple(tuple(map(tuple, rank)) for rank in layout),
        layers=tuple(map(tuple, reply["layers"])),
        padded_vocab_size=reply["padded_vocab_size"],
    )
