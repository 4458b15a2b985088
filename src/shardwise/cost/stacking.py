"""Stacked problems: problems of one shape, estimated as one problem whose numbers are columns.

An estimate takes about as long for one row as for some hundreds. The shape of a problem is everything that
selects formulas: operators, tiers, kernels, software features. Among problems of one shape, every number in
which they differ becomes a column (`ProblemShapes.stacked`).
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
    "recomputes", "warm_band", "cold_band", "peak_errors", "zero_stages",
})  # fmt: skip
"""Fields of records that no estimate reads; `Problem.patterns` has the pattern of layers."""

_MACHINE: Final = ("matmul_flop_per_s", "other_flop_per_s", "memory_bytes_per_s", "host_link_bytes_per_s")
_JOB: Final = ("seq_len", "global_batch_size", "expert_imbalance")
"""Numbers of a problem and of its job that estimates read."""

_WORDS: Final = (bool, str, type(None))
_NUMBERS: Final = (int, float, np.ndarray)
Figure = int | float | NDArray[Any]
"""A number of a record: of one problem, or a column with one value per row."""

Record = object
"""A value that contains numbers: a dataclass, or a tuple or mapping of records; or a number or a word."""


def _records(problem: Problem) -> tuple[Record, ...]:
    """The records in which problems of one shape may differ."""
    return problem.model, problem.efficiency, problem.profile, problem.tiers


@dataclass(frozen=True, slots=True)
class _RecordShape:
    """A record with its shape, by number in `ProblemShapes`, and its numbers in the order of `_read`."""

    record: Record
    shape: int
    numbers: tuple[Figure, ...]

    @property
    def has_columns(self) -> bool:
        """Whether some of its numbers are columns already."""
        return any(isinstance(number, np.ndarray) for number in self.numbers)


@dataclass(frozen=True, slots=True)
class ProblemShapes:
    """The shapes of problems; a record that several of them share is read once."""

    _read: dict[int, _RecordShape] = field(default_factory=dict)
    _known: dict[Hashable, int] = field(default_factory=dict)

    def of(self, problem: Problem) -> Hashable:
        """The shape of a problem; problems of equal shape can be stacked."""
        records = (self._shape_of(record).shape for record in _records(problem))
        return (*records, problem.recipe, problem.optimizer, problem.backend)

    def stacked(self, problems: Sequence[Problem], counts: Sequence[int]) -> Problem:
        """The problem of tables with `counts[i]` rows of `problems[i]`, in their order.

        The problems must have one shape. Fields that no estimate reads are those of the first.
        """
        rows = _Rows(counts, np.repeat(np.arange(len(problems)), counts))
        first = problems[0]
        samples: dict[str, Any] = {
            "mean_sample_len": rows.column([each.job.attention_len for each in problems])
        }
        model, efficiency, profile, tiers = (
            self._stacked_record(records, rows) for records in zip(*map(_records, problems), strict=True)
        )
        return replace(
            first,
            model=model,
            device=replace(first.device, efficiency=efficiency),
            cluster=replace(first.cluster, tiers=tiers),
            job=replace(
                first.job,
                profile=profile,
                **samples,
                **rows.columns([each.job for each in problems], _JOB),
            ),
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
        """One record for these, one per problem; its numbers are columns where they differ."""
        first = records[0]
        if all(record is first for record in records) and not self._shape_of(first).has_columns:
            return first
        numbers = zip(*(self._shape_of(record).numbers for record in records), strict=True)
        return _with(first, map(rows.column, numbers))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Number of rows of each problem, and the problem of each row."""

    counts: Sequence[int]
    problem: NDArray[np.intp]

    def column(self, numbers: Sequence[Figure]) -> Figure:
        """The number of each row, from one number (or column) per problem; no column if all are equal."""
        if any(isinstance(number, np.ndarray) for number in numbers):
            filled = map(np.broadcast_to, numbers, self.counts)
            return np.concatenate(list(filled))
        alike = numbers.count(numbers[0]) == len(numbers)
        return numbers[0] if alike else np.array(numbers)[self.problem]

    def columns(self, records: Iterable[Any], names: Iterable[str]) -> dict[str, Any]:
        """`column` for these numbers of one record per problem."""
        whole = list(records)
        return {name: self.column([getattr(record, name) for record in whole]) for name in names}


def _read(record: Record, shape: list[Hashable], numbers: list[Figure]) -> None:
    """Appends everything of a record except its numbers to `shape`, and the numbers to `numbers`."""
    if isinstance(record, _WORDS):
        shape.append(record)
    elif isinstance(record, _NUMBERS):
        # A count of zero means that there is none, which selects other formulas.
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
    """The same record with these numbers, in the order in which `_read` meets them."""
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
    """The fields of a record that estimates read."""
    kind: Any = type(record)
    return _names_of(kind)


@cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind) if each.init and each.name not in UNUSED_FIELDS)
