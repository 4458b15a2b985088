"""Tunable numbers of a model that come from no data sheet: each is listed once, with its scope and its
source.

A list of numbers is a data file. One number may apply to several names (`of`: devices, architectures,
software, or `*` for all), so the length of the list is the count of free parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InternalError

WILDCARD = "*"
FITTED = "fitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """`value` of `field` (a dotted path) for everything named in `of`.

    `source` is `fitted` where `shardwise fit` finds the value from measured runs. Otherwise it names a
    document or says that the value is assumed.
    """

    of: tuple[str, ...]
    field: str
    value: Any
    source: str

    @property
    def name(self) -> str:
        """Name of the number in tables and files: `ampere matmul.peak_fraction`."""
        return f"{','.join(self.of)} {self.field}"

    @property
    def is_fitted(self) -> bool:
        return self.source.startswith(FITTED)


def numbers_of(records: Iterable[Mapping[str, Any]]) -> tuple[Number, ...]:
    """The numbers listed in a data file."""
    return tuple(
        Number(of=tuple(r["of"]), field=r["field"], value=_value(r["field"], r["value"]), source=r["source"])
        for r in records
    )


def _value(field: str, value: float) -> float | int:
    """Numbers are floats, except tile sizes, which count elements."""
    return int(value) if field.rpartition(".")[2].startswith("tile_") else float(value)


def numbers_record(numbers: Iterable[Number]) -> list[dict[str, Any]]:
    """The inverse of `numbers_of`."""
    return [{"of": list(n.of), "field": n.field, "value": n.value, "source": n.source} for n in numbers]


def most_specific(numbers: Iterable[Number], names: Sequence[str]) -> dict[str, Number]:
    """For each field, the number that applies to something with these `names` (most general name first).

    Where several apply, the one for the most specific name wins. Raises InternalError where two numbers apply
    to the same name.
    """
    ranks = {name: rank for rank, name in enumerate((WILDCARD, *names))}
    found: dict[str, tuple[int, Number]] = {}
    for number in numbers:
        rank = max((ranks[name] for name in number.of if name in ranks), default=None)
        if rank is None:
            continue
        if number.field in found and found[number.field][0] == rank:
            raise InternalError(f"two numbers for {number.field} of {(WILDCARD, *names)[rank]}")
        if number.field not in found or found[number.field][0] < rank:
            found[number.field] = (rank, number)
    return {field: number for field, (_, number) in found.items()}


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted paths as nested mappings."""
    record: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        into = record
        for parent in parents:
            into = into.setdefault(parent, {})
        into[last] = value
    return record
