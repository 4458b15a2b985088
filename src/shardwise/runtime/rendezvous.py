"""Rendezvous of launched processes in a key-value store: before their process group exists, and after a rank
was lost.

Ranks agree on one error that rank 0 reports (`agree_on_error`). When a rank is lost, the lowest surviving
rank is the reporter (`is_reporter`).
"""

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
"""Seconds that the first process waits for the last. They start together, but import PyTorch first."""

AGREEMENT_S = 1800.0
"""Seconds that all may take to check their inputs after the rendezvous; checkpoints are hashed."""

GRACE_S = 5.0
"""Seconds that ranks wait for the reporter before they exit, since a launcher ends all when one exits."""

ELECTION_S = 1.0
"""Seconds in which the survivors of a lost rank register for the election of the reporter."""

_FIELDS = ("message", "file", "key", "found", "allowed")
"""Fields of a ConfigError that ranks exchange."""


class Rendezvous:
    """All `ranks` processes of a run, in the store of the launcher, or else of rank 0. ConfigError if they
    are not complete after `timeout_s` seconds."""

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
        """The error of this rank or of any other; None if there is none. All ranks must call it in the same
        order; all get the same error."""
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
        """Post an error that only this rank has, for rank 0 to report."""
        try:
            self._store.set("posted", _written(self.rank, refusal))
        except RuntimeError:  # the store has ended with rank 0, which would report the error
            return

    def reported_error(self) -> ConfigError | None:
        """The error that another rank has posted, if any."""
        try:
            if not self._store.check(["posted"]):
                return None
            found = _read(self._store.get("posted"))
        except RuntimeError:
            return None
        return None if found is None else _located(*found)

    def is_reporter(self) -> bool:
        """Whether this rank is the lowest survivor, which reports the loss of a rank.

        If the store ended with rank 0, rank 1 is assumed to be the lowest.
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
        """Wait until the reporter has reported and the others know, for at most GRACE_S seconds."""
        try:
            if is_reporter:
                self._store.set("said", "")
                time.sleep(2.0 * ELECTION_S if self.ranks > 1 else 0.0)
            else:
                self._store.wait(["said"], timedelta(seconds=GRACE_S))
        except RuntimeError:  # the store has ended, or the reporter was late
            return


def rendezvous_error(error: Exception) -> ConfigError:
    """The error for a rendezvous that failed at MASTER_ADDR and MASTER_PORT."""
    host, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    why = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"rendezvous of the processes failed: {why}", key="MASTER_PORT", found=f"{host}:{port}",
        allowed="a free port that all processes can reach, and WORLD_SIZE processes",
    )  # fmt: skip


_RankError = tuple[str, ConfigError]
"""The rank and host that report an error, as text, and the error."""


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
    """The first of the ranks' errors, with the rank's name unless rank 0 has an error."""
    refusals = [one for one in reports if one is not None]
    if not refusals:
        return None
    who, first = refusals[0]
    return first if reports[0] is not None else _located(who, first)


def _located(who: str, refusal: ConfigError) -> ConfigError:
    return ConfigError(str(refusal), key=who)
