"""A space of the user's own: a named space, and on some axes only some values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.errors import ConfigError
from shardwise.inputs import Fields, read_mapping, short_repr
from shardwise.plan import Value
from shardwise.strategy import ALIASES, FIELD_VALUES, FIELDS, is_value

BASES = ("default", "core")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceChoice:
    """The candidates of the space `base` whose fields have one of the values in `axes`. `file` says where
    that is written; None for a named space."""

    base: str = "default"
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    file: str | None = None


def read_space(path: str) -> SpaceChoice:
    """The space in the file at `path`: `base: default|core` and `axes: {tp: [1, 2, 4], offload: [none]}`.

    Raises ConfigError, located by file and key path, for an axis that is no field of a strategy, one without
    values, and values that the field cannot have in any space or that are given twice.
    """
    fields = Fields(read_mapping(path), file=path)
    base = fields.choice("base", BASES, default="default")
    listed = fields.mapping("axes", default={})
    for name in listed.names:
        if name in ALIASES:
            raise listed.error(
                name, "stands for several fields", allowed="param_shard, grad_shard, optim_shard"
            )
    axes = {name: _values(listed, name) for name in FIELDS if name in listed.names}
    listed.finish(allowed=FIELDS)
    fields.finish()
    return SpaceChoice(base=base, axes=axes, file=fields.file)


def _values(fields: Fields, name: str) -> tuple[Value, ...]:
    found: list[Value] = []
    for index, value in enumerate(fields.sequence(name, low=1)):
        key = f"{fields.key}.{name}[{index}]"
        if not isinstance(value, int | str) or not is_value(name, value):
            raise ConfigError(
                "is no value of this field",
                file=fields.file,
                key=key,
                found=short_repr(value),
                allowed=_allowed(name),
            )
        if value in found:
            raise ConfigError("is given twice", file=fields.file, key=key, found=short_repr(value))
        found.append(value)
    return tuple(found)


def _allowed(name: str) -> str:
    if name == "sequence_parallel":
        return "true, false"
    if name in FIELD_VALUES:
        return ", ".join(FIELD_VALUES[name])
    return f"whole numbers of at least {0 if name.endswith('_layers') else 1}"
