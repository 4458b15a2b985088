"""What the processes that a launcher started tell each other beside their process group: before there is one,
and when one of them ends it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch import distributed
from torch.distributed.rendezvous import rendezvous

from shardwise.errors import ConfigError

RENDEZVOUS_S = 120.0
"""How long the first one waits for the last: they are started together, and import PyTorch first."""

AGREEMENT_S = 1800.0
"""How long it may take, once all have met, to look through what they are given (checkpoints are hashed)."""

GRACE_S = 5.0
"""How long others wait for rank 0 to have said what is wrong: a launcher ends all when one ends."""

ELECTION_S = 1.0
"""How long survivors of a lost rank wait for each other's names."""

_FIELDS = ("message", "file", "key", "found", "allowed")


class Rendezvous:
    """All `ranks` processes at the store of the launcher, or else of rank 0. ConfigError where not all of
    them come in time."""

    def __init__(self, rank: int, ranks: int, *, timeout_s: float = RENDEZVOUS_S) -> None:
        self.rank, self.ranks = rank, ranks
        self._rounds = 0
        try:
            store, _, _ = next(rendezvous("env://", rank, ranks, timeout=timedelta(seconds=timeout_s)))
            self._store = distributed.PrefixStore("shardwise", store)
            self._store.set(f"here/{rank}", "")
            if rank == 0:
                self._store.wait([f"here/{other}" for other in range(ranks)])
                self._store.set("all", "")
            self._store.wait(["all"])
            self._store.set_timeout(timedelta(seconds=AGREEMENT_S))
        except (RuntimeError, ValueError) as error:
            raise rendezvous_error(error) from None

    def agree_on_error(self, refusal: ConfigError | None) -> ConfigError | None:
        """What is wrong on this rank or any other; None where nothing is, on any of them. All ranks call it,
        in the same order, and hear the same."""
        self._rounds += 1
        name = f"round{self._rounds}"
        try:
            self._store.set(f"{name}/{self.rank}", _written(self.rank, refusal))
            if self.rank == 0:
                reports = [_read(self._store.get(f"{name}/{rank}")) for rank in range(self.ranks)]
                self._store.set(f"{name}/all", _written(self.rank, _first_error(reports)))
            found = _read(self._store.get(f"{name}/all"))
        except RuntimeError as error:
            raise rendezvous_error(error) from None
        return None if found is None else found[1]

    def report_error(self, refusal: ConfigError) -> None:
        """Leave word of what is wrong on this rank alone, for rank 0 to find."""
        try:
            self._store.set("posted", _written(self.rank, refusal))
        except RuntimeError:  # the store has ended with rank 0, who would have said it
            return

    def reported_error(self) -> ConfigError | None:
        """What another rank has posted."""
        try:
            if not self._store.check(["posted"]):
                return None
            found = _read(self._store.get("posted"))
        except RuntimeError:
            return None
        return None if found is None else _located(*found)

    def is_reporter(self) -> bool:
        """Whether this rank is the lowest of those that live, which speaks for all, now that one is lost.

        Where the store has ended with rank 0, that is taken to be rank 1.
        """
        try:
            self._store.set(f"lives/{self.rank}", "")
            if self.rank == 0:
                return True
            time.sleep(ELECTION_S)
            return not any(self._store.check([f"lives/{rank}"]) for rank in range(self.rank))
        except RuntimeError:
            return self.rank <= 1

    def end(self, *, is_reporter: bool) -> None:
        """Wait until the one that speaks has spoken, and until the others know, GRACE_S at most."""
        try:
            if is_reporter:
                self._store.set("said", "")
                time.sleep(2.0 * ELECTION_S if self.ranks > 1 else 0.0)
            else:
                self._store.wait(["said"], timedelta(seconds=GRACE_S))
        except RuntimeError:  # the store has ended, or nobody spoke in time
            return


def rendezvous_error(error: Exception) -> ConfigError:
    """What to say where processes do not find each other as MASTER_ADDR and MASTER_PORT say."""
    host, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"processes cannot meet there: {why}", key="MASTER_PORT", found=f"{host}:{port}",
        allowed="a free port that all of them reach, and as many processes as WORLD_SIZE says",
    )  # fmt: skip


_RankError = tuple[str, ConfigError]
"""Which rank says it, on which host; and what."""


def _written(rank: int, refusal: ConfigError | None) -> str:
    if refusal is None:
        return ""
    who = f"rank {rank} on {socket.gethostname()}"
    return json.dumps([who, {field: getattr(refusal, field) for field in _FIELDS}])


def _read(text: bytes) -> _RankError | None:
    if not text:
        return None
    who, fields = json.loads(text)
    return who, ConfigError(**fields)


def _first_error(reports: Sequence[_RankError | None]) -> ConfigError | None:
    """Of all that the ranks say the first; with the rank's name where it is not rank 0, which speaks."""
    refusals = [one for one in reports if one is not None]
    if not refusals:
        return None
    who, first = refusals[0]
    return first if reports[0] is not None else _located(who, first)


def _located(who: str, refusal: ConfigError) -> ConfigError:
    return ConfigError(str(refusal), key=who)
