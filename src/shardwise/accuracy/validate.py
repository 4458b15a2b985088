"""Predictions held against measured rows: row by row, per group, and overall."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.accuracy.devices import device_named
from shardwise.accuracy.judge import JudgedRow, judged
from shardwise.accuracy.known import family_named
from shardwise.accuracy.metrics import Errors, errors_of, mean, share
from shardwise.accuracy.rows import LEVELS, Fault, Row, read_rows, source_of
from shardwise.accuracy.workloads import Workload, workloads_of
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr

GROUPINGS: Final = ("source", "gpu", "family", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """How good the predictions of some rows are.

    `time` and `memory` are None where no row gives that figure; `kendall_tau` is the mean and `regret` the
    worst over `workloads`, None where no workload has enough rows; `band_coverage` is the share of measured
    times within the predicted band.
    """

    name: str
    skipped: int
    time: Errors | None
    memory: Errors | None
    workloads: int
    kendall_tau: float | None
    regret: float | None
    band_coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All of it: `judged` and `faults` are the rows that were used and skipped, in the order of the file."""

    by: str
    level: str
    overall: Group
    groups: tuple[Group, ...]
    workloads: tuple[Workload, ...]
    judged: tuple[JudgedRow, ...]
    faults: tuple[Fault, ...]


def validate(path: str, *, by: str = "source", level: str = "all") -> Validation:
    """The validation of the rows in the file at `path`: those of `level` (one of LEVELS), grouped by one of
    GROUPINGS. ConfigError where nothing in the file can be read."""
    for key, found, allowed in (("by", by, GROUPINGS), ("level", level, LEVELS)):
        if found not in allowed:
            raise ConfigError(f"unknown {key}", key=key, found=short_repr(found), allowed=", ".join(allowed))
    rows, unread = read_rows(path)
    selected = [row for row in rows if level == "all" or row.is_complete == (level == "complete")]
    used, unusable = judged(selected)
    faults = sorted((*unread, *unusable), key=lambda fault: fault.line)
    workloads = workloads_of(used)
    groups = _grouped(used, faults, {row.line: row for row in selected}, by)
    return Validation(
        by=by,
        level=level,
        overall=_group("overall", used, faults, workloads),
        groups=tuple(_group(name, *members, workloads_of(members[0])) for name, members in groups.items()),
        workloads=workloads,
        judged=tuple(used),
        faults=tuple(faults),
    )


def _grouped(
    used: Sequence[JudgedRow], faults: Sequence[Fault], rows: Mapping[int, Row], by: str
) -> dict[str, tuple[list[JudgedRow], list[Fault]]]:
    """Rows that were used and skipped by the name of their group, in the order of the file."""
    names: dict[str, Callable[[Row], str]] = {
        "source": lambda row: row.group,
        "gpu": lambda row: _device_name(row.gpu),
        "family": lambda row: family_named(row.model_name),
        "row": lambda row: row.id,
    }
    name_of = names[by]
    lines: list[tuple[int, JudgedRow | Fault, str]] = [(one.row.line, one, name_of(one.row)) for one in used]
    for fault in faults:
        row = rows.get(fault.line)
        unread = source_of(fault.id) if by == "source" else fault.id if by == "row" else "not read"
        lines.append((fault.line, fault, unread if row is None else name_of(row)))
    groups: dict[str, tuple[list[JudgedRow], list[Fault]]] = {}
    for _, one, name in sorted(lines, key=lambda item: item[0]):
        predicted, skipped = groups.setdefault(name, ([], []))
        if isinstance(one, JudgedRow):
            predicted.append(one)
        else:
            skipped.append(one)
    return groups


def _device_name(text: str) -> str:
    try:
        return device_named(text)[0].name
    except ConfigError:
        return text or "not given"


def _group(
    name: str, used: Sequence[JudgedRow], faults: Sequence[Fault], workloads: Sequence[Workload]
) -> Group:
    taus = [workload.kendall_tau for workload in workloads if workload.kendall_tau is not None]
    return Group(
        name=name,
        skipped=len(faults),
        time=errors_of([one.error for one in used if one.error is not None]),
        memory=errors_of([one.memory_error for one in used if one.memory_error is not None]),
        workloads=len(workloads),
        kendall_tau=mean(taus) if taus else None,
        regret=max((workload.regret for workload in workloads), default=None),
        band_coverage=share([one.is_in_band for one in used if one.is_in_band is not None]),
    )
