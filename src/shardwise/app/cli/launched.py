"""Where a process belongs that torchrun or another launcher started, as its variables say.

Signals that ask a process to end, as one that the user's keyboard sends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set in processes that torchrun started."""

COMMAND_VARIABLE = "SHARDWISE_LAUNCH"
"""Set by `launch`: the command that started the launcher, up to the options of train."""

REFUSED = 2

_MAX_RANKS = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """One of `ranks` processes."""

    rank: int
    ranks: int


def launched_rank_of(environment: Mapping[str, str]) -> LaunchedRank:
    """The place that torchrun's variables give. ConfigError where one is missing or makes no sense."""
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
        f"is not set, though {TORCHRUN_VARIABLE} says that torchrun started this process", key=name,
        allowed=f"{allowed}, as torchrun sets it",
    )  # fmt: skip


@contextlib.contextmanager
def report_on_rank_0() -> Iterator[None]:
    """What is wrong with options that all processes of a launcher have alike, rank 0 says alone: the others
    end with the same code."""
    try:
        yield
    except ConfigError:
        if TORCHRUN_VARIABLE in os.environ and launched_rank_of(os.environ).rank:
            raise SystemExit(REFUSED) from None
        raise


TERMINATION_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is done under this as Ctrl-C does, so that nothing is left behind; those
    that follow the first are ignored while it ends. One that is ignored already (`nohup`) stays so, and so do
    all from the last words (`ignore_termination`) on."""
    if threading.current_thread() is not threading.main_thread():  # the only one that may set handlers
        yield
        return
    taken = [number for number in TERMINATION_SIGNALS if signal.getsignal(number) == signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        for each in taken:
            signal.signal(each, _ignore)
        raise KeyboardInterrupt

    for number in taken:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) in (interrupt, _ignore):
                signal.signal(number, signal.SIG_DFL)


def _ignore(number: int, frame: object) -> None:
    """Nothing more: the process is ending."""


def ignore_termination() -> None:
    """Let the process say its last words, and end as it means to: who sends these signals ends it by force
    after a while."""
    if threading.current_thread() is threading.main_thread():
        for number in TERMINATION_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
