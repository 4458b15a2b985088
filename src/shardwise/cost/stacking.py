"""Problems that differ in numbers alone, as one problem whose numbers are columns: one price tells all.

A price takes about as long for one row as for some hundreds. What decides which formulas are taken
(operators, tiers, kernels, what the software does) is the shape of a problem; of problems of one shape, every
number that they do not agree in becomes a column.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.problem import Patterns, Problem

UNUSED_FIELDS: Final = frozenset({
    "name", "family", "config", "described", "provenance", "is_calibrated", "max_seq_len", "pattern",
    "recomputes", "warm_band", "cold_band", "zero_stages",
})  # fmt: skip
"""Fields of records that no price reads; the pattern of layers is read in `Problem.patterns`."""

_MACHINE: Final = ("matmul_flop_per_s", "other_flop_per_s", "memory_bytes_per_s", "host_link_bytes_per_s")
_JOB: Final = ("seq_len", "global_batch_size", "expert_imbalance")
"""Numbers of a problem and of its job that prices read."""

_WORDS: Final = (bool, str, type(None))
_NUMBERS: Final = (int, float, np.ndarray)
Figure = int | float | NDArray[Any]
"""A number of a record: of one problem, so far, or one for each of its rows."""

Record = object
"""What holds numbers: a dataclass, or a tuple or mapping of such; a number or a word."""


def _records(problem: Problem) -> tuple[Record, ...]:
    """The records in which problems of one shape may differ."""
    return problem.model, problem.efficiency, problem.profile, problem.tiers


@dataclass(frozen=True, slots=True)
class _RecordShape:
    """A record's shape, by its number in `ProblemShapes`, and its numbers in the order in which they are
    met."""

    record: Record
    shape: int
    numbers: tuple[Figure, ...]

    @property
    def has_columns(self) -> bool:
        """Whether its numbers are those of several rows already."""
        return any(isinstance(number, np.ndarray) for number in self.numbers)


@dataclass(frozen=True, slots=True)
class ProblemShapes:
    """The shapes of problems; a record that several of them share is read once."""

    _read: dict[int, _RecordShape] = field(default_factory=dict)
    _known: dict[Hashable, int] = field(default_factory=dict)

    def of(self, problem: Problem) -> Hashable:
        """The shape of a problem, the same for all that can stand abreast."""
        records = (self._shape_of(record).shape for record in _records(problem))
        return (*records, problem.recipe, problem.optimizer, problem.backend)

    def stacked(self, problems: Sequence[Problem], counts: Sequence[int]) -> Problem:
        """The problem of tables that have so many rows of each of these, which are of one shape, in their
        order. What no price reads is that of the first."""
        rows = _Rows(counts, np.repeat(np.arange(len(problems)), counts))
        first = problems[0]
        model, efficiency, profile, tiers = (
            self._stacked_record(records, rows) for records in zip(*map(_records, problems), strict=True)
        )
        return replace(
            first,
            model=model,
            device=replace(first.device, efficiency=efficiency),
            cluster=replace(first.cluster, tiers=tiers),
            job=replace(first.job, profile=profile, **rows.columns([each.job for each in problems], _JOB)),
            patterns=Patterns.joined([each.patterns for each in problems], counts),
            is_columnar=True,
            **rows.columns(problems, _MACHINE),
        )

    def _shape_of(self, record: Record) -> _RecordShape:
        found = self._read.get(id(record))
        if found is None:
            shape: list[Hashable] = []
            numbers: list[Figure] = []
            _read(record, shape, numbers)
            number = self._known.setdefault(tuple(shape), len(self._known))
            found = self._read[id(record)] = _RecordShape(record, number, tuple(numbers))
        return found

    def _stacked_record(self, records: Sequence[Record], rows: _Rows) -> Any:
        """The record of these, one of each problem, whose numbers are columns where they differ."""
        first = records[0]
        if all(record is first for record in records) and not self._shape_of(first).has_columns:
            return first
        numbers = zip(*(self._shape_of(record).numbers for record in records), strict=True)
        return _with(first, map(rows.column, numbers))


@dataclass(frozen=True, slots=True)
class _Rows:
    """How many rows each problem has, and which problem each row is of."""

    counts: Sequence[int]
    problem: NDArray[np.intp]

    def column(self, numbers: Sequence[Figure]) -> Figure:
        """The number of each row, of one (or a column) per problem; the number where all are the same."""
        if any(isinstance(number, np.ndarray) for number in numbers):
            filled = map(np.broadcast_to, numbers, self.counts)
            return np.concatenate(list(filled))
        alike = numbers.count(numbers[0]) == len(numbers)
        return numbers[0] if alike else np.array(numbers)[self.problem]

    def columns(self, records: Iterable[Any], names: Iterable[str]) -> dict[str, Any]:
        """The same of these numbers of a record per problem."""
        whole = list(records)
        return {name: self.column([getattr(record, name) for record in whole]) for name in names}


def _read(record: Record, shape: list[Hashable], numbers: list[Figure]) -> None:
    """Appends what a record is apart from its numbers to `shape`, and these to `numbers`."""
    if isinstance(record, _WORDS):
        shape.append(record)
    elif isinstance(record, _NUMBERS):
        # A count of zero says that there is none of something.
        shape.append(type(record) is int and record == 0)
        numbers.append(record)
    elif isinstance(record, Mapping):
        shape.append(tuple(record))
        for each in record.values():
            _read(each, shape, numbers)
    elif isinstance(record, tuple):
        shape.append(len(record))
        for each in record:
            _read(each, shape, numbers)
    else:
        shape.append(type(record).__name__)
        for name in _names(record):
            _read(getattr(record, name), shape, numbers)


def _with(record: Any, numbers: Iterator[Figure]) -> Any:
    """The same record with these numbers, which come in the order in which `_read` meets them."""
    if isinstance(record, _WORDS):
        return record
    if isinstance(record, _NUMBERS):
        return next(numbers)
    if isinstance(record, Mapping):
        return {key: _with(each, numbers) for key, each in record.items()}
    if isinstance(record, tuple):
        return tuple([_with(each, numbers) for each in record])
    return replace(record, **{name: _with(getattr(record, name), numbers) for name in _names(record)})


def _names(record: Any) -> tuple[str, ...]:
    """The fields of a record that prices read."""
    kind: Any = type(record)
    return _names_of(kind)


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.init and each.name not in UNUSED_FIELDS)
