"""Checks the arguments of a question: their types and ranges. Each error names the option of the command
line, `--seq-len`; `errors.naming_arguments` turns it into the name of the argument of a function."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from numbers import Integral, Real
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr, unknown
from shardwise.plans import Value
from shardwise.strategy import ALIASES, FIELDS, is_value, option_values, parse_fields
from shardwise.units import format_seconds, parse_quantity

MAX_COUNT = 10_000_000
MIXED_POOL_STAGES = "--mixed-pool-stages"

Progress = Callable[[str], None]
"""Takes a line of text that says how far a search is."""


def text(option: str, value: object) -> str:
    """`value` if it is a text, or the path that it stands for."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        raise _wrong_type(option, "is not a text", value, "a text")
    return value


def optional_text(option: str, value: object) -> str | None:
    """`value` if it is a text or None."""
    return None if value is None else text(option, value)


def flag(option: str, value: object) -> bool:
    """`value` if it is true or false."""
    if not isinstance(value, bool):
        raise _wrong_type(option, "is not true or false", value, "true or false")
    return value


def count(option: str, value: object, *, low: int = 1, high: int = MAX_COUNT) -> int:
    """`value` if it is a whole number from `low` to `high`."""
    found = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None
    if found is None or not low <= found <= high:
        raise _wrong_type(option, "is not a whole number in range", value, f"{low} to {high}")
    return found


def number(option: str, value: object, *, low: float, high: float) -> float:
    """`value` if it is a number from `low` to `high`."""
    found = float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    if found is None or not low <= found <= high:
        raise _wrong_type(option, "is not a number in range", value, f"{low:g} to {high:g}")
    return found


def quantity(option: str, value: object, unit: str, *, allowed: str) -> float:
    """`value` in `unit` (`s` or `B`): a positive number, or text with a unit such as `10s` or `40GiB`."""
    if isinstance(value, str):
        try:
            found = parse_quantity(value, unit)
        except ConfigError as error:
            raise ConfigError(error.message, key=option, found=short_repr(value), allowed=allowed) from None
    elif isinstance(value, Real) and not isinstance(value, bool):
        found = float(value)
    else:
        raise _wrong_type(option, "is not a number or a text", value, allowed)
    if not (isfinite(found) and found > 0.0):
        raise _wrong_type(option, "is not a positive number", value, allowed)
    return found


def choice(option: str, value: object, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise unknown("is not one of the choices", value, choices, key=option)
    return value


def counts(option: str, value: object, *, allowed: str) -> tuple[int, ...]:
    """The whole numbers of a list such as `[1, 2, 4]`, ascending. Raises ConfigError for one given twice."""
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise _wrong_type(option, "is not a list of whole numbers", value, allowed)
    found = [count(option, one) for one in value]
    if not found or len(set(found)) < len(found):
        why = "names a number twice" if found else "is empty"
        raise ConfigError(why, key=option, found=", ".join(map(str, found)) or "[]", allowed=allowed)
    return tuple(sorted(found))


def names(option: str, value: object) -> tuple[str, ...]:
    """The texts of a list, or of `time,memory`."""
    if isinstance(value, str):
        return tuple(value.split(","))
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise _wrong_type(option, "is not a list of names", value, "a list of texts")
    return tuple(text(option, one) for one in value)


def fields(option: str, value: object) -> dict[str, Value]:
    """Fields of a strategy with their values: a mapping, or text such as `tp=8,zero_stage=1`."""
    if value is None:
        return {}
    if isinstance(value, str):
        return parse_fields(value, key=option)
    if not isinstance(value, Mapping):
        raise _wrong_type(option, "is not a mapping of fields", value, "fields such as {'tp': 8}")
    found: dict[str, Value] = {}
    for name, one in value.items():
        if name not in FIELDS and name not in ALIASES:
            raise unknown("is not a field of a strategy", name, (*FIELDS, *ALIASES), key=option)
        plain = int(one) if isinstance(one, Integral) and not isinstance(one, bool) else one
        if not isinstance(plain, int | str) or not is_value(name, plain):
            raise ConfigError("is not a value of this field", key=f"{option}.{name}", found=short_repr(one))
        found[name] = plain
    return found


MODULES = "recompute_modules"
"""The option of software that is a field of the strategy too."""


def fields_and_modules(option: str, value: object, options: object) -> dict[str, Value]:
    """Fields of a strategy, with the modules to recompute that the `options` of the software name."""
    found, pairs = fields(option, value), _pairs("--set", options)
    if MODULES not in pairs:
        return found
    named = pairs[MODULES]
    read = fields("--set", f"{MODULES}={named}" if isinstance(named, str) else {MODULES: named})
    if found.get(MODULES, read[MODULES]) != read[MODULES]:
        raise ConfigError(
            f"contradicts {option}", key=f"--set.{MODULES}", found=short_repr(named),
            allowed=f"{found[MODULES]}, or only one of both",
        )  # fmt: skip
    return found | read


def options_of_software(option: str, value: object) -> dict[str, str]:
    """Options of the software with their values: a mapping, or text such as `grad_reduce_dtype=bf16`. Without
    `recompute_modules`, which `fields_and_modules` reads."""
    known, pairs = option_values(), _pairs(option, value)
    found = {}
    for name, one in pairs.items():
        if name == MODULES:
            continue
        if name not in known:
            raise unknown("is not an option of any target", name, sorted((*known, MODULES)), key=option)
        if one in known[name] or not any("+" in value for value in known[name]):
            found[str(name)] = choice(f"{option}.{name}", one, known[name])
            continue
        # Of a set of names, which has many values, the names are listed.
        names = [value for value in known[name] if "+" not in value]
        raise ConfigError(
            "is no set of these names that the software takes", key=f"{option}.{name}", found=short_repr(one),
            allowed=f"{', '.join(names)}, joined by + in this order",
        )  # fmt: skip
    return found


def _pairs(option: str, value: object) -> Mapping[Any, Any]:
    """Options of the software, unchecked."""
    if isinstance(value, str):
        return dict(_pair(option, part.strip()) for part in value.split(",") if part.strip())
    if value is not None and not isinstance(value, Mapping):
        raise _wrong_type(
            option, "is not a mapping of options", value, "such as {'grad_reduce_dtype': 'bf16'}"
        )
    return value or {}


def _pair(option: str, part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not equals:
        raise ConfigError("is not NAME=VALUE", key=option, found=short_repr(part), allowed="NAME=VALUE,...")
    return name.strip(), value.strip()


def stage_dp(option: str, value: object) -> int:
    """`value` if it is a power of two up to 64."""
    found = count(option, value, low=1, high=64)
    if found & (found - 1):
        raise ConfigError("is not a power of two", key=option, found=str(found), allowed="1, 2, 4, ... 64")
    return found


def workers(value: object) -> int:
    """The number of processes: at most the number of cores."""
    return count("--workers", value, low=1, high=os.cpu_count() or 1)


def seconds(option: str, value: object, *, low: float, high: float) -> float:
    """Seconds from `low` to `high`: a number, or text such as `6h`."""
    allowed = f"{format_seconds(low)} to {format_seconds(high)}, in s, min, h or d"
    found = (
        0.0 if value in (0, "0s") and value is not False else quantity(option, value, "s", allowed=allowed)
    )
    if not low <= found <= high:
        raise _wrong_type(option, "is not a time in range", value, allowed)
    return found


def budget_s(value: object) -> float | None:
    """Seconds of a budget; None for no limit."""
    return None if value is None else quantity("--budget", value, "s", allowed="seconds, or a text as 10s")


def _wrong_type(option: str, why: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(why, key=option, found=short_repr(value), allowed=allowed)
