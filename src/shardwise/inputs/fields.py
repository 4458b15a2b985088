"""`Fields`: a mapping that is read key by key, with types, ranges and no unknown keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeGuard

from shardwise.errors import ConfigError
from shardwise.inputs.messages import MAX_NODES, join_key, listed, nearest, printable, short_repr, unknown
from shardwise.units import examples_of, parse_quantity

MAX_NAME: Final = 200
"""Maximum number of characters of a name that the user chose."""


class _Required:
    """The type of REQUIRED."""


REQUIRED: Final = _Required()
"""Default of a required field."""


class Fields:
    """Reads one mapping key by key; every error names the file and the dotted key path.

    A key that is absent or null takes the default; without a default it is an error. `finish()` rejects the
    keys that were not read, so a misspelt key never becomes a default.

        fields = Fields(read_mapping(path), file=path)
        layers = fields.integer("layers", low=1, high=10_000)
        for node in fields.mappings("nodes"):
            ...
        fields.finish()
    """

    def __init__(self, mapping: Mapping[str, object], *, file: str | None = None, key: str = "") -> None:
        self.file = printable(file) if file else None
        self.key = key
        self._mapping = mapping
        self._read: dict[str, None] = {}

    def has(self, name: str) -> bool:
        """Whether `name` has a value other than null; the key then counts as read."""
        self._read[name] = None
        return self._mapping.get(name) is not None

    def error(
        self, name: str, message: str, *, found: str | None = None, allowed: str | None = None
    ) -> ConfigError:
        """A ConfigError located at key `name` of this mapping, or at the mapping itself where `name` is
        empty."""
        key = join_key(self.key, name) if name else self.key
        return ConfigError(message, file=self.file, key=key or None, found=found, allowed=allowed)

    def unknown(
        self,
        name: str,
        value: object,
        known: Iterable[str],
        message: str = "is not one of the choices",
        *,
        allowed: str | None = None,
    ) -> ConfigError:
        """The error of `inputs.unknown` for the value at key `name`, which is none of `known`."""
        key = join_key(self.key, name)
        return unknown(message, value, known, file=self.file, key=key, allowed=allowed)

    def any(self, name: str, *, default: object = REQUIRED, allowed: str | None = None) -> Any:
        """The value of `name`, of any type; `default` where it is absent or null."""
        if self.has(name):
            return self._mapping[name]
        if isinstance(default, _Required):
            # A misspelt key is still unread; the cutoff keeps `heads` from matching `kv_heads`.
            misspelt = nearest(name, self.unread, cutoff=0.8)
            found = printable(misspelt) if misspelt else None
            raise self.error(name, "is missing", found=found, allowed=allowed)
        return default

    def integer(
        self, name: str, *, low: float = 0, high: float = 1e15, default: int | _Required = REQUIRED
    ) -> int:
        """A whole number from `low` to `high`; `1e6` is one, true is not."""
        allowed = f"a whole number from {_bound(low)} to {_bound(high)}"
        value = self.any(name, default=default, allowed=allowed)
        if not _is_number(value) or value % 1 or not low <= value <= high:
            raise self.error(name, "is not a whole number in range", found=short_repr(value), allowed=allowed)
        return int(value)

    def number(
        self, name: str, *, low: float = 0.0, high: float = 1e30, default: float | _Required = REQUIRED
    ) -> float:
        """A number from `low` to `high`, both included."""
        allowed = f"a number from {_bound(low)} to {_bound(high)}"
        value = self.any(name, default=default, allowed=allowed)
        if not _is_number(value) or not low <= value <= high:
            raise self.error(name, "is not a number in range", found=short_repr(value), allowed=allowed)
        return float(value)

    def quantity(
        self, name: str, *, unit: str, low: float, high: float, default: float | _Required = REQUIRED
    ) -> float:
        """A quantity in `unit` (see units.UNITS): text such as `200Gb/s`, or a bare number in that unit."""
        allowed = f"{examples_of(unit)}, from {_bound(low)} to {_bound(high)} {unit}"
        value = self.any(name, default=default, allowed=allowed)
        if isinstance(value, str):
            try:
                value = parse_quantity(value, unit)
            except ConfigError as error:
                raise self.error(name, error.message, found=error.found, allowed=allowed) from None
        if not _is_number(value) or not low <= value <= high:
            raise self.error(
                name,
                "is not a number in range",
                found=short_repr(self._mapping.get(name, value)),
                allowed=allowed,
            )
        return float(value)

    def text(self, name: str, *, default: str | _Required = REQUIRED, max_length: int = MAX_NAME) -> str:
        """Printable text on one line, not empty."""
        allowed = _text_allowed(max_length)
        value = self.any(name, default=default, allowed=allowed)
        if not (isinstance(value, str) and _is_text(value, max_length)) and value is not default:
            raise self.error(name, "is not a short text", found=short_repr(value), allowed=allowed)
        return str(value)

    def choice(self, name: str, choices: Iterable[str], *, default: str | _Required = REQUIRED) -> str:
        """One of the texts `choices`."""
        known = tuple(choices)
        value = self.any(name, default=default, allowed=listed(known))
        if not (isinstance(value, str) and value in known) and value is not default:
            raise self.unknown(name, value, known)
        return str(value)

    def boolean(self, name: str, *, default: bool | _Required = REQUIRED) -> bool:
        """true or false."""
        value = self.any(name, default=default, allowed="true or false")
        if not isinstance(value, bool):
            raise self.error(name, "is not true or false", found=short_repr(value), allowed="true or false")
        return value

    def mapping(self, name: str, *, default: Mapping[str, object] | _Required = REQUIRED) -> Fields:
        """The fields of the mapping at `name`."""
        value = self.any(name, default=default, allowed="a mapping")
        if not isinstance(value, Mapping):
            raise self.error(name, "is not a mapping", found=short_repr(value), allowed="a mapping")
        return Fields(value, file=self.file, key=join_key(self.key, name))

    def sequence(
        self,
        name: str,
        *,
        low: int = 0,
        high: int = MAX_NODES,
        default: Sequence[object] | _Required = REQUIRED,
    ) -> list[object]:
        """A list of `low` to `high` values of any type."""
        allowed = f"a list of {low} to {high}"
        value = self.any(name, default=default, allowed=allowed)
        if not isinstance(value, list | tuple) or not low <= len(value) <= high:
            problem = "has the wrong length" if isinstance(value, list | tuple) else "is not a list"
            raise self.error(name, problem, found=short_repr(value), allowed=allowed)
        return list(value)

    def mappings(
        self,
        name: str,
        *,
        low: int = 0,
        high: int = MAX_NODES,
        default: Sequence[object] | _Required = REQUIRED,
    ) -> list[Fields]:
        """A list of `low` to `high` mappings, each as Fields located at `name[index]`."""
        found: list[Fields] = []
        for index, item in enumerate(self.sequence(name, low=low, high=high, default=default)):
            key = f"{join_key(self.key, name)}[{index}]"
            if not isinstance(item, Mapping):
                raise ConfigError(
                    "is not a mapping", file=self.file, key=key, found=short_repr(item), allowed="a mapping"
                )
            found.append(Fields(item, file=self.file, key=key))
        return found

    def items(self) -> Iterator[tuple[str, Fields]]:
        """Every key with its mapping, for mappings whose keys are names that the user chose."""
        for name in self.chosen_names():
            yield name, self.mapping(name)

    def chosen_names(self) -> tuple[str, ...]:
        """All keys, for mappings whose keys are names that the user chose.

        Each is a short printable text, because messages print it on one line.
        """
        for name in self._mapping:
            if not _is_text(name, MAX_NAME):
                raise ConfigError(
                    "has a name that is not a short text",
                    file=self.file,
                    key=self.key or None,
                    found=short_repr(name),
                    allowed=_text_allowed(MAX_NAME),
                )
        return tuple(self._mapping)

    @property
    def names(self) -> tuple[str, ...]:
        """All keys, in the order of the file."""
        return tuple(self._mapping)

    @property
    def unread(self) -> tuple[str, ...]:
        """The keys that were not read yet, in the order of the file."""
        return tuple(name for name in self._mapping if name not in self._read)

    def finish(self, *, allowed: Iterable[str] = ()) -> None:
        """Reject the first unread key, with a suggestion; `allowed` are further known keys."""
        known = tuple(dict.fromkeys((*self._read, *allowed)))
        for name in self.unread:
            if name not in known:
                key = join_key(self.key, name)  # also for an empty name
                raise unknown("is not a known key", name, known, file=self.file, key=key, found=None)


def _is_text(text: str, max_length: int) -> bool:
    return 0 < len(text) <= max_length and text.isprintable()


def _text_allowed(max_length: int) -> str:
    return f"text of 1 to {max_length} printable characters"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bound(value: float) -> str:
    return f"{value:g}" if abs(value) >= 1e7 or value != int(value) else str(int(value))
