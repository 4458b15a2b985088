"""The public exceptions: ConfigError, Infeasible and InternalError. Any other exception that escapes is a
bug."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ShardwiseError(Exception):
    """Base class of the public exceptions; catch it to catch all three."""


class ConfigError(ShardwiseError):
    """An input that cannot be used. Its text is one line: where, what was found, and what is allowed.

    `file` and `key` locate it (`key` is a dotted path such as `nodes[0].device`); either is None where the
    input has no such place. `found` and `allowed` are short texts, ready to print.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        key: str | None = None,
        found: str | None = None,
        allowed: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.key = key
        self.found = found
        self.allowed = allowed

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.key) if part)
        text = f"{where}: {self.message}" if where else self.message
        if self.found is not None:
            text += f"; found {self.found}"
        if self.allowed is not None:
            text += f"; allowed: {self.allowed}"
        return text

    def within(self, *, file: str | None = None, key: str | None = None) -> ConfigError:
        """The same error, located in `file`, with `key` put in front of its own key."""
        if key and self.key:
            path = key + self.key if self.key.startswith("[") else f"{key}.{self.key}"
        else:
            path = key or self.key or ""
        return ConfigError(
            self.message, file=self.file or file, key=path or None, found=self.found, allowed=self.allowed
        )


class Infeasible(ShardwiseError):
    """No strategy of the search space is legal and fits in memory.

    `reasons` counts the rejected candidates by reason code. `relaxations` are one-line changes of the
    question with which a plan fits, cheapest first. `point` is the nearest answer as plain values, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        reasons: Mapping[str, int],
        relaxations: Sequence[str] = (),
        point: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reasons = dict(reasons)
        self.relaxations = tuple(relaxations)
        self.point = point


class InternalError(ShardwiseError):
    """An invariant of shardwise is broken: a bug. `seed` and `plan_hash` help to reproduce it."""

    def __init__(self, message: str, *, seed: int | None = None, plan_hash: str | None = None) -> None:
        super().__init__(message)
        self.seed = seed
        self.plan_hash = plan_hash
