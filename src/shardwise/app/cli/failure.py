"""What a user reads when there is no answer: one line that says where, what was found and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.errors import ConfigError, Infeasible, InternalError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error with its exit code. `kind` is one of usage, config, infeasible, internal, interrupted."""

    code: int
    kind: str
    message: str
    file: str | None = None
    key: str | None = None
    found: str | None = None
    allowed: str | None = None
    line: str | None = None
    """The whole error on one line; `message` where it is None."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    relaxations: tuple[str, ...] = ()
    point: Mapping[str, object] | None = None

    def lines(self) -> list[str]:
        """For stderr: the error on one line; below an infeasible answer, why candidates fell and what would
        fit."""
        head = "infeasible" if self.kind == "infeasible" else "error"
        lines = [f"shardwise: {head}: {one_line(self.line or self.message)}"]
        if self.reasons:
            counts = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
            lines.append("  rejected: " + ", ".join(f"{reason} {count:,}" for reason, count in counts))
        lines += [f"  would fit: {one_line(relaxation)}" for relaxation in self.relaxations]
        return lines

    def document(self) -> dict[str, object]:
        """The error as the JSON answer."""
        document: dict[str, object] = {
            "schema": "shardwise.error",
            "version": 1,
            "error": {
                "kind": self.kind,
                "message": self.message,
                "file": self.file,
                "key": self.key,
                "found": self.found,
                "allowed": self.allowed,
            },
        }
        if self.kind == "infeasible":
            document |= {"reasons": dict(self.reasons), "relaxations": list(self.relaxations)}
        if self.point is not None:
            document["point"] = self.point
        return document


def failure_of(error: Exception) -> Failure:
    """What to tell the user about `error`."""
    if isinstance(error, ConfigError):
        return Failure(
            code=2,
            kind="config",
            message=error.message,
            file=error.file,
            key=error.key,
            found=error.found,
            allowed=error.allowed,
            line=str(error),
        )
    if isinstance(error, Infeasible):
        return Failure(
            code=3,
            kind="infeasible",
            message=error.message,
            reasons=error.reasons,
            relaxations=error.relaxations,
            point=error.point,
        )
    if _is_usage_error(error):
        message = one_line(error.format_message())  # type: ignore[attr-defined]
        return Failure(code=2, kind="usage", message=message, line=f"{message.rstrip('.')}; see --help")
    return Failure(code=1, kind="internal", message=_internal_message(error))


def one_line(text: str) -> str:
    """`text` with white space folded and everything unprintable escaped."""
    folded = " ".join(text.split())
    return folded if folded.isprintable() else "".join(map(_printable, folded))


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _is_usage_error(error: Exception) -> bool:
    """Whether the parser refused the arguments (its exceptions moved between releases of typer)."""
    return callable(getattr(error, "format_message", None)) and getattr(error, "exit_code", None) == 2


def _internal_message(error: Exception) -> str:
    name = "" if isinstance(error, InternalError) else f"{type(error).__name__}: "
    text = f"{name}{error}".rstrip(": ")
    extras = [
        f"{label} {value}"
        for label in ("seed", "plan_hash")
        if (value := getattr(error, label, None)) is not None
    ]
    context = f" ({', '.join(extras)})" if extras else ""
    return f"this is a bug in shardwise: {text}{context}; SHARDWISE_DEBUG=1 shows where"
