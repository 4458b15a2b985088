"""A pipeline schedule as data: per rank an ordered row of actions, stored as integer columns.

`Action` is one forward, backward, input-gradient or weight-gradient step of a micro-batch on a stage.
`Schedule` is the table of one pipeline; `Table` is the protocol that a re-routed schedule also follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class ActionKind(StrEnum):
    """What an action does, in PyTorch's letters: forward, full backward, input gradient, weight gradient."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


KINDS: tuple[ActionKind, ...] = tuple(ActionKind)
"""Kinds in the order of their codes in `Columns.kind`: F is 0, B is 1, I is 2, W is 3."""

CODE_OF_KIND: dict[str, int] = {kind: code for code, kind in enumerate(KINDS)}
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = range(4)


class Action(NamedTuple):
    """One action of one micro-batch on one stage; prints as `2F0` and parses back."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


_action_of_triple = partial(tuple.__new__, Action)


class Columns(NamedTuple):
    """All actions of all ranks, rank after rank; rank r has rows `offsets[r]` to `offsets[r + 1]`.

    `stage`, `kind` (codes, see `KINDS`) and `microbatch` are read-only int64 arrays of shape (actions,);
    `offsets` has shape (ranks + 1,).
    """

    stage: Ints
    kind: Ints
    microbatch: Ints
    offsets: Ints


def rows_of(columns: Columns) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank, in order."""
    stage, kind, microbatch, offsets = columns
    kinds = [KINDS[code] for code in kind.tolist()]
    actions = list(map(_action_of_triple, zip(stage.tolist(), kinds, microbatch.tolist(), strict=True)))
    return tuple(tuple(actions[start:stop]) for start, stop in pairwise(offsets.tolist()))


def columns_of(rows: Sequence[Sequence[Action]]) -> Columns:
    """Rows of actions as columns."""
    triples = [(stage, CODE_OF_KIND[kind], mb) for stage, kind, mb in chain.from_iterable(rows)]
    table = np.array(triples, dtype=np.int64).reshape(-1, 3)
    offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
    return Columns(table[:, 0], table[:, 1], table[:, 2], offsets)


class Table(Protocol):
    """A table that can be validated, dry-run and timed: rows of actions, and the rank that runs each stage
    of each micro-batch."""

    @property
    def microbatches(self) -> int: ...

    @property
    def stages(self) -> int: ...

    @property
    def pp(self) -> int: ...

    @property
    def columns(self) -> Columns: ...

    @property
    def ranks(self) -> tuple[tuple[Action, ...], ...]: ...

    def rank_for(self, stage: Ints | int, microbatch: Ints | int) -> Ints:
        """The rank that runs `stage` of `microbatch`; numbers or columns in range."""

    def ranks_for(self, stage: int) -> Sequence[int]:
        """All ranks that run `stage` for any micro-batch."""


class Schedule:
    """The order of the actions of every pipeline rank. Immutable; equal when all four parts are equal.

    `ranks[r]` are the actions of pipeline rank r, in order. `stage_rank[s]` is the rank of stage s; stage s
    sends to stage s + 1. A stage's forward of a micro-batch needs the forward of the stage before; its B (or
    I) needs that of the stage after; its W needs its own I. `columns` is the same table as arrays; it is what
    is stored, and `ranks` is made from it on first use.
    """

    name: str
    microbatches: int
    stage_rank: tuple[int, ...]
    columns: Columns

    def __init__(
        self, *, name: str, microbatches: int, stage_rank: Sequence[int], ranks: Sequence[Sequence[Action]]
    ) -> None:
        self._set(name, microbatches, stage_rank, columns_of(ranks))

    @classmethod
    def from_columns(
        cls, *, name: str, microbatches: int, stage_rank: Sequence[int], columns: Columns
    ) -> Schedule:
        """The schedule with these `columns`, which become read-only."""
        schedule = cls.__new__(cls)
        schedule._set(name, microbatches, stage_rank, columns)
        return schedule

    def _set(self, name: str, microbatches: int, stage_rank: Sequence[int], columns: Columns) -> None:
        for column in columns:
            column.setflags(write=False)
        parts = (("name", name), ("microbatches", microbatches), ("stage_rank", tuple(stage_rank)))
        self.__dict__.update(parts, columns=columns)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a schedule is immutable: cannot set {name}")

    @cached_property
    def ranks(self) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank, in order."""
        return rows_of(self.columns)

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return len(self.columns.offsets) - 1

    @property
    def stages(self) -> int:
        """Number of stages (chunks over all ranks)."""
        return len(self.stage_rank)

    def rank_for(self, stage: Ints | int, microbatch: Ints | int) -> Ints:
        """The rank of `stage`, for every micro-batch."""
        return np.asarray(self.stage_rank, dtype=np.int64)[stage]

    def ranks_for(self, stage: int) -> Sequence[int]:
        """The one rank of `stage`."""
        return (self.stage_rank[stage],)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return (
            (self.name, self.microbatches, self.stage_rank)
            == (other.name, other.microbatches, other.stage_rank)
        ) and all(np.array_equal(a, b) for a, b in zip(self.columns, other.columns, strict=True))

    def __hash__(self) -> int:
        actions = tuple(column.tobytes() for column in self.columns)
        return hash((self.name, self.microbatches, self.stage_rank, actions))

    def __repr__(self) -> str:
        actions = len(self.columns.stage)
        return f"Schedule({self.name}, pp={self.pp}, stages={self.stages}, m={self.microbatches}, {actions=})"
