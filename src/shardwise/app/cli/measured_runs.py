"""The commands `fit` and `validate`, which read CSV files of measured runs.

`fitted_file` fits the numbers of devices and software to the runs. `validated` shows prediction errors per
group or per row, and the skipped rows with reasons.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from shardwise.accuracy import (
    GROUPINGS,
    LEAST_RUNS,
    LEVELS,
    SHIPPED,
    Errors,
    Fault,
    Group,
    JudgedRow,
    LeftOutErrors,
    Skipped,
    Validation,
    fit_document,
    fit_rows,
    left_out_errors,
    read_rows,
    skipped_by_reason,
    validate,
)
from shardwise.app.cli.activity import progress
from shardwise.app.cli.calibrating import CPU, calibrated
from shardwise.app.cli.output import LABEL, WIDTH, Line, Output, row
from shardwise.app.cli.request import choice
from shardwise.app.cli.tables import table
from shardwise.app.cli.words import GIB, counted, percent, seconds, shortened
from shardwise.errors import ConfigError
from shardwise.inputs import printable, read_mapping
from shardwise.plans import check_output_path, write_file
from shardwise.strategy import read_calibration, strategy_text


def fitted_file(path: str, out: str, *, budget_s: float | None, is_json: bool) -> Output:
    """The answer of `fit`: fits the rows at `path` and writes the numbers to `out`, those of the package for
    LEAST_RUNS rows or more, else a calibration. A fit makes no further step after `budget_s` seconds.
    ConfigError where nothing can be fitted; nothing is written then."""
    until_s = math.inf if budget_s is None else time.monotonic() + budget_s
    check_output_path("--out", out, inputs=(path,))
    rows, unread = read_rows(path)
    if len(rows) < LEAST_RUNS:
        found = calibrated(out=out, devices=CPU, cluster=None, links=False, sources=(path,), threads=None)
        return replace(found, lines=(), document=dict(read_mapping(out))) if is_json else found
    try:
        with progress() as show:
            fit = fit_rows(rows, has_time=lambda: time.monotonic() < until_s, progress=show)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    document: dict[str, Any] = fit_document(fit)
    write_file(out, (json.dumps(document, indent=1) + "\n").encode())
    notes = [
        f"wrote {printable(out)}: {counted(document['fitted_numbers'], 'number')} from "
        f"{counted(document['runs'], 'run')}, {len(unread) + len(fit.faults)} rows skipped"
    ]
    if fit.fit.is_cut:
        notes.append("shardwise: the fit ended at --budget; with more time its errors may be smaller")
    if is_json:
        return Output(document=document, notes=notes)
    return Output(lines=_lines(document), notes=notes)


def _lines(document: Mapping[str, Any]) -> list[Line]:
    cells = [
        (f" {name}", f"{figures['runs']}", percent(figures["mape"], 1), percent(figures["bias"], 1))
        for name, figures in document["sources"].items()
    ]
    bands = [
        ((f" band, {name}: {low:g} to {high:g} of the predicted time", "dim"),)
        for name, (low, high) in document["bands"].items()
    ]
    return [*table((" source", "runs", "mean error", "bias"), cells, left=1), *bands]


# validate

VERSION = 1

_LINES = 5
"""Most runs of line numbers that are listed per reason."""


def validated(
    path: str | None, *, by: str, level: str, is_json: bool, calibration: str | None = None
) -> Output:
    """The answer of `validate` for the rows at `path`; None stands for the published runs. `calibration` is
    the path of a calibration. ConfigError for unknown options, and for a file without a readable row."""
    choice("--by", by, GROUPINGS)
    choice("--level", level, LEVELS)
    known = None if calibration is None else read_calibration(calibration)
    with progress() as show:
        file = str(SHIPPED) if path is None else path
        found = validate(file, by=by, level=level, calibration=known, progress=show)
    name = "the published rows" if path is None else printable(path)
    if is_json:
        shipped = path is None and calibration is None
        return Output(
            document=_document(found, name) | {"left_out": _left_out_document() if shipped else None}
        )
    lines = _row_lines(found) if by == "row" else _group_lines(found)
    lines = [*_head(found, name), *lines, *_workload_lines(found), *_memory_lines(found)]
    if path is None and calibration is None:
        lines = [*lines, *_left_out_lines(left_out_errors())]
    return Output(lines=[*lines, *_skipped_lines(found.faults)])


def _head(found: Validation, name: str) -> list[Line]:
    of_level = "" if found.level == "all" else f" of level {found.level}"
    used, skipped = len(found.judged), len(found.faults)
    return [
        ((f" {name}{of_level}", "title"),),
        ((f" {counted(used, 'row')} used, {skipped:,} skipped", "dim"),),
        (("─" * WIDTH, "dim"),),
    ]


_HEADER = ("rows", "skipped", "mean", "median", "bias", "worst", "tau", "regret", "memory", "in band")


def _group_lines(found: Validation) -> list[Line]:
    """One line per group, and one for all rows."""
    rows = [(group.name, *_cells(group)) for group in (*found.groups, found.overall)]
    *lines, last = table(
        (f" {found.by}", *_HEADER), [(f" {shortened(name, 18)}", *cells) for name, *cells in rows], left=1
    )
    return [*lines, tuple((text, "value") for text, _ in last)]


_MEMORY_HEADER = ("peaks", "mean", "median", "bias", "worst", "over 10 % too small", "in band")


def _memory_lines(found: Validation) -> list[Line]:
    """Errors of peak memory: one line per group that has measured peaks, and one for all rows."""
    groups = [] if found.by == "row" else [group for group in found.groups if group.memory is not None]
    rows = [
        (f" {shortened(group.name, 18)}", *_memory_cells(group.memory, group.memory_band_coverage))
        for group in (*groups, found.overall)
        if group.memory is not None
    ]
    if not rows:
        return []
    *lines, last = table((" peak memory", *_MEMORY_HEADER), rows, left=1)
    return [(), *lines, tuple((text, "value") for text, _ in last)]


def _memory_cells(memory: Errors, coverage: float | None) -> tuple[str, ...]:
    sizes = (memory.mape, memory.median, memory.bias, memory.worst)
    return f"{memory.n:,}", *map(_percent, sizes), _percent(memory.too_small, 0), _percent(coverage, 0)


def _cells(group: Group) -> tuple[str, ...]:
    time, memory = group.time, group.memory
    return (
        f"{0 if time is None else time.n:,}",
        f"{group.skipped:,}",
        *(_percent(None if time is None else value) for value in _sizes(group)),
        "-" if group.kendall_tau is None else f"{group.kendall_tau:.2f}",
        _percent(group.regret),
        _percent(None if memory is None else memory.mape),
        _percent(group.band_coverage, digits=0),
    )


def _sizes(group: Group) -> tuple[float | None, ...]:
    time = group.time
    return (None,) * 4 if time is None else (time.mape, time.median, time.bias, time.worst)


def _percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else percent(value, digits)


def _row_lines(found: Validation) -> list[Line]:
    """One line per row in the order of the file; skipped rows with their reason."""
    header = (" row", "model", "devices", "measured", "predicted", "error", "GiB", "predicted", "error")
    head, *lines = table(header, [_row_cells(one) for one in found.judged], left=3)
    placed: list[tuple[int, Line]] = [
        (one.row.line, line) for one, line in zip(found.judged, lines, strict=True)
    ]
    for fault in found.faults:
        text = shortened(f" {fault.id}  skipped: {fault.text}", WIDTH)
        placed.append((fault.line, ((text, "dim"),)))
    ordered = [line for _, line in sorted(placed, key=lambda item: item[0])]
    overall = table(("", *_HEADER), [(" overall", *_cells(found.overall))], left=1)
    return [head, *ordered, (), *overall]


def _row_cells(one: JudgedRow) -> tuple[str, ...]:
    row = one.row
    has_memory = one.measured_bytes is not None
    return (
        f" {shortened(row.id, 16)}",
        shortened(row.model_name, 20),
        shortened(f"{row.gpus} {one.device}", 16),
        "-" if one.measured_s is None else seconds(one.measured_s),
        seconds(one.predicted_s),
        _signed(one.error),
        "-" if one.measured_bytes is None else f"{one.measured_bytes / GIB:.1f}",
        f"{one.predicted_bytes / GIB:.1f}" if has_memory else "-",
        _signed(one.memory_error),
    )


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:+.1f} %"


def _workload_lines(found: Validation) -> list[Line]:
    """The workload with the largest regret, where there are workloads."""
    if not found.workloads:
        return []
    worst = max(found.workloads, key=lambda workload: workload.regret)
    what = f"{worst.model} on {worst.devices} {worst.device}, {counted(len(worst.rows), 'plan')}"
    text = f"{counted(len(found.workloads), 'workload')}; worst regret {percent(worst.regret)}: {what}"
    return [(), ((f" {text}", "dim"),)]


def _left_out_lines(found: LeftOutErrors) -> Iterator[Line]:
    """Errors of groups that were left out of the fit, and after measured steps of the same machine."""
    header = (" left out", "rows", "fitted", "left out", "one constant", "tau", "regret")
    rows = [
        (
            f" {shortened(f'{group.kind} {group.name}', 24)}",
            f"{group.rows:,}",
            *(percent(value, 1) for value in (group.fitted, group.error, group.with_constant)),
            "-" if group.tau is None else f"{group.tau:.2f}",
            _percent(group.worst_regret),
        )
        for group in found.groups
    ]
    yield ()
    yield from table(header, rows, left=1)
    yield ()
    points = [
        (f" {point.kind}", f"{point.steps}", percent(point.before, 1), percent(point.after, 1))
        for point in found.curve
    ]
    yield from table((" measured steps of", "steps", "error before", "after"), points, left=1)


def _left_out_document() -> dict[str, object]:
    found = left_out_errors()
    return {
        "groups": [asdict(group) for group in found.groups],
        "curve": [asdict(point) for point in found.curve],
    }


def _skipped_lines(faults: Sequence[Fault]) -> list[Line]:
    """Reasons for skipped rows with their line numbers, the most frequent first."""
    lines: list[Line] = [()] if faults else []
    for skipped in skipped_by_reason(faults):
        found = f"; found {skipped.found}" if skipped.found else ""
        text = shortened(f"{skipped.reason}{found}", WIDTH - LABEL)
        lines.append(row(f"skipped {len(skipped.lines):,}", (text, "")))
        lines.append(row("", (f"{_noun(skipped.lines)} {_runs(skipped.lines)}", "dim")))
    return lines


def _noun(lines: Sequence[int]) -> str:
    return "line" if len(lines) == 1 else "lines"


def _runs(lines: Sequence[int]) -> str:
    """The first runs of line numbers: `2-44, 50`."""
    runs: list[list[int]] = []
    for line in lines:
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        else:
            runs.append([line, line])
    texts = [f"{first}" if first == last else f"{first}-{last}" for first, last in runs[:_LINES]]
    return ", ".join(texts) + (", …" if len(runs) > _LINES else "")


def _document(found: Validation, name: str) -> dict[str, object]:
    rows = [(one.row.line, _row_document(one)) for one in found.judged]
    rows += [(fault.line, _fault_document(fault)) for fault in found.faults]
    return {
        "schema": "shardwise.validation",
        "version": VERSION,
        "rows_of": name,
        "by": found.by,
        "level": found.level,
        "overall": _group_document(found.overall),
        "groups": [_group_document(group) for group in found.groups],
        "workloads": [
            {**asdict(workload), "rows": list(workload.rows), "n": len(workload.rows)}
            for workload in found.workloads
        ],
        "skipped": [_skipped_document(skipped) for skipped in skipped_by_reason(found.faults)],
        "rows": [row for _, row in sorted(rows, key=lambda item: item[0])],
    }


def _group_document(group: Group) -> dict[str, object]:
    time, memory = group.time, group.memory
    return {
        "name": group.name,
        "n": 0 if time is None else time.n,
        "skipped": group.skipped,
        "mape": None if time is None else time.mape,
        "median": None if time is None else time.median,
        "bias": None if time is None else time.bias,
        "worst": None if time is None else time.worst,
        "workloads": group.workloads,
        "kendall_tau": group.kendall_tau,
        "regret": group.regret,
        "memory_n": 0 if memory is None else memory.n,
        "memory_mape": None if memory is None else memory.mape,
        "memory_median": None if memory is None else memory.median,
        "memory_bias": None if memory is None else memory.bias,
        "memory_worst": None if memory is None else memory.worst,
        "memory_too_small": None if memory is None else memory.too_small,
        "band_coverage": group.band_coverage,
        "memory_band_coverage": group.memory_band_coverage,
    }


def _skipped_document(skipped: Skipped) -> dict[str, object]:
    return {"n": len(skipped.lines), **asdict(skipped), "lines": list(skipped.lines)}


def _row_document(one: JudgedRow) -> dict[str, object]:
    low, high = one.band
    has_memory = one.measured_bytes is not None
    return {
        "id": one.row.id,
        "line": one.row.line,
        "device": one.device,
        "strategy": strategy_text(one.strategy),
        "measured_s": one.measured_s,
        "predicted_s": one.predicted_s,
        "band_s": [one.predicted_s * low, one.predicted_s * high],
        "error": one.error,
        "measured_gib": None if one.measured_bytes is None else one.measured_bytes / GIB,
        "predicted_gib": one.predicted_bytes / GIB,
        "memory_band_gib": [end / GIB for end in one.memory_band_bytes],
        "memory_kind": one.memory_kind,
        "memory_error": one.memory_error if has_memory else None,
        "assumed": list(one.assumed),
        "skipped": None,
    }


def _fault_document(fault: Fault) -> dict[str, object]:
    """A skipped row: the keys of a used row with null values, and the reason."""
    nothing = ("device", "strategy", "measured_s", "predicted_s", "band_s", "error", "measured_gib",
               "predicted_gib", "memory_band_gib", "memory_kind", "memory_error")  # fmt: skip
    return {
        "id": fault.id,
        "line": fault.line,
        **dict.fromkeys(nothing),
        "assumed": [],
        "skipped": fault.text,
    }
