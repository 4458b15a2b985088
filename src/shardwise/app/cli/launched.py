"""Processes that torchrun or another launcher started: their rank from environment variables.

`launched_rank_of` reads RANK and WORLD_SIZE; `report_on_rank_0` leaves common errors to rank 0.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set in processes that torchrun started."""

COMMAND_VARIABLE = "SHARDWISE_LAUNCH"
"""Set by `launch`: the command that started the launcher, without the options of train."""

REFUSED = 2
"""Exit code for bad input."""

_MAX_RANKS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """One of `ranks` processes."""

    rank: int
    ranks: int


def launched_rank_of(environment: Mapping[str, str]) -> LaunchedRank:
    """The rank in torchrun's variables. ConfigError where one is missing or out of range."""
    ranks = _number(environment, "WORLD_SIZE", low=1, high=_MAX_RANKS)
    launched_rank = LaunchedRank(rank=_number(environment, "RANK", low=0, high=ranks - 1), ranks=ranks)
    _number(environment, "MASTER_PORT", low=1, high=65_535)
    if "LOCAL_RANK" in environment:
        _number(environment, "LOCAL_RANK", low=0, high=_MAX_RANKS)
    if not environment.get("MASTER_ADDR"):
        raise _not_set("MASTER_ADDR", "the host of rank 0")
    return launched_rank


def _number(environment: Mapping[str, str], name: str, *, low: int, high: int) -> int:
    allowed = f"{low} to {high}" if high < _MAX_RANKS else f"{low} or more"
    text = environment.get(name)
    if text is None:
        raise _not_set(name, allowed)
    if re.fullmatch(r"[0-9]{1,9}", text) is None or not low <= int(text) <= high:
        raise ConfigError(
            "is not a number in range",
            key=name,
            found=short_repr(text),
            allowed=f"{allowed}, as torchrun sets it",
        )
    return int(text)


def _not_set(name: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"is not set, although torchrun started this process ({TORCHRUN_VARIABLE} is set)", key=name,
        allowed=f"{allowed}, as torchrun sets it",
    )  # fmt: skip


@contextlib.contextmanager
def report_on_rank_0() -> Iterator[None]:
    """Errors in options, which all launched processes share, are reported by rank 0 only; the others exit
    with the same code."""
    try:
        yield
    except ConfigError:
        if TORCHRUN_VARIABLE in os.environ and launched_rank_of(os.environ).rank:
            raise SystemExit(REFUSED) from None
        raise
