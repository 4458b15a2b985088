"""The three errors a user can meet. Everything else that escapes is a bug."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class ShardwiseError(Exception):
    """Base of the public errors; catch this to catch all three."""


class ConfigError(ShardwiseError):
    """An input that cannot be used: one line says where, what was found, and what is allowed.

    `file` and `key` locate it (`key` is a dotted path such as `nodes[0].device`); either may be None where
    the input has no such place. `found` and `allowed` are short texts ready to print.
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
        """The same error, located in `file` and below `key` (which is put in front of the key it has)."""
        if key and self.key:
            path = key + self.key if self.key.startswith("[") else f"{key}.{self.key}"
        else:
            path = key or self.key or ""
        return ConfigError(
            self.message, file=self.file or file, key=path or None, found=self.found, allowed=self.allowed
        )


class Infeasible(ShardwiseError):
    """No strategy of the space is legal and fits.

    `reasons` counts the rejected candidates per reason code; `relaxations` are one-line changes that do fit,
    cheapest first. `point` is the answer that came closest, as plain values, where there is one.
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
    """An invariant of shardwise broke: a bug. Carries what is needed to reproduce it."""

    def __init__(self, message: str, *, seed: int | None = None, plan_hash: str | None = None) -> None:
        super().__init__(message)
        self.seed = seed
        self.plan_hash = plan_hash
