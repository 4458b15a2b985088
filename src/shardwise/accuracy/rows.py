"""Reads measured runs from the rows of a CSV file.

Reading is lenient: a row that is wrong becomes a `Fault` with its line, and the others are used.
`skipped_by_reason` groups faults. docs/reference/formats.md describes the columns.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from shardwise.errors import ConfigError
from shardwise.inputs import nearest, printable, read_bytes, short_repr, unknown

SHIPPED: Final = Path(__file__).parent / "data" / "measurements.csv"
"""File of the published rows that the package ships."""

MAX_BYTES: Final = 1 << 26
"""Largest file in bytes: 64 MiB, more than for settings, since tables may be large."""

MAX_ROW_LINES: Final = 100
"""Most lines that the quotes of one row may span; more means that a quote was not closed."""

LEVELS: Final = ("complete", "near", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured run as its source states it; a value that the source omits is None or an empty text.

    docs/reference/formats.md, section "Measured rows", describes the columns. `line` is the row's line in the
    file."""

    line: int
    id: str
    level: str
    source: str
    model_name: str
    arch: str
    gpu: str
    interconnect: str
    framework: str
    dtype: str
    zero_stage: str
    schedule: str
    stage_layers: str
    recompute: str
    attention: str
    grad_dtype: str
    optimizer: str
    tflops_convention: str
    notes: str
    year: int | None
    layers: int | None
    hidden: int | None
    ffn: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq_len: int | None
    experts: int | None
    topk: int | None
    gpus: int | None
    gpus_per_node: int | None
    tp: int | None
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    dp: int | None
    micro_batch: int | None
    global_batch: int | None
    step_time_s: float | None
    tokens_per_s_per_gpu: float | None
    tflops_per_gpu: float | None
    mfu_pct: float | None
    hfu_pct: float | None
    peak_mem_gib: float | None
    peak_rank: str

    @property
    def group(self) -> str:
        """The short name of the source: the id without its number."""
        return source_of(self.id)

    @property
    def is_complete(self) -> bool:
        """Whether the row determines a run: by `level` where it is given, else whether the micro-batch size,
        recompute and dtype are all given."""
        if self.level:
            return self.level.casefold() == "complete"
        return self.micro_batch is not None and bool(self.recompute) and bool(self.dtype)


def source_of(name: str) -> str:
    """The short name of a source: the id of a row without its number."""
    head, dash, tail = name.rpartition("-")
    return head if dash and tail.isdigit() else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The reason why a row could not be read or used; `found` is the offending value, where there is one."""

    line: int
    id: str
    reason: str
    found: str = ""

    @property
    def text(self) -> str:
        """The reason with its line and what was found."""
        return f"line {self.line}: {self.reason}" + (f"; found {self.found}" if self.found else "")


_COLUMNS: Final[Mapping[str, str]] = {f.name: str(f.type) for f in fields(Row) if f.name != "line"}
"""Columns that are read, with the type of their values."""


def read_rows(path: str) -> tuple[list[Row], list[Fault]]:
    """The rows of a CSV file with a header, and the faults of the rows that cannot be read.

    A missing column counts as blank in every row. A byte that is not UTF-8 becomes a replacement character.
    Raises ConfigError where the file cannot be read, has fewer than two of the columns, or has no readable
    row.
    """
    text = read_bytes(path, max_bytes=MAX_BYTES).decode("utf-8-sig", errors="replace")
    return parse_rows(text, file=printable(path))


def parse_rows(text: str, *, file: str | None = None) -> tuple[list[Row], list[Fault]]:
    """`read_rows` for the text of a file."""
    lines = [f"{line}\n" for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    header, used = _header(lines, file)
    rows: list[Row] = []
    faults: list[Fault] = []
    texts: dict[str, str] = {}
    for line, cells, problem in _records(lines, used, len(header)):
        record = dict(zip(header, cells, strict=False))
        name = printable(record.get("id", "")) or f"line-{line}"
        wrong = [(problem, "")] if problem else list(_faults(record))
        if wrong:
            faults.append(Fault(line=line, id=name, reason=wrong[0][0], found=wrong[0][1]))
        else:
            rows.append(_row(record, line, name, texts))
    if not rows:
        found = (
            f"{len(faults)} rows, all with faults, such as {faults[0].text}" if faults else "a header alone"
        )
        raise ConfigError("has no row that can be read", file=file, found=found)
    return rows, faults


def _header(lines: Sequence[str], file: str | None) -> tuple[list[str], int]:
    """The names of the columns, and the number of lines of the header."""
    reader = csv.reader(lines[:MAX_ROW_LINES])
    try:
        header = [name.strip().lstrip("\ufeff") for name in next(reader, [])]
    except csv.Error as error:
        raise ConfigError(f"is not a CSV file: line 1: {error}", file=file) from None
    present = [name for name in header if name in _COLUMNS]
    if len(set(present)) < 2:
        raise ConfigError(
            "has no columns of measured rows", file=file, found=short_repr(", ".join(header[:8])),
            allowed=", ".join(_COLUMNS),
        )  # fmt: skip
    repeated = sorted({name for name in present if present.count(name) > 1})
    if repeated:
        raise ConfigError("has a column twice", file=file, found=", ".join(repeated))
    absent = [name for name in _COLUMNS if name not in present]
    for name in header:
        if name not in _COLUMNS and nearest(name, absent, cutoff=0.8):
            raise unknown("is not a column of measured rows", name, absent, file=file, key="line 1")
    return header, reader.line_num


def _records(lines: Sequence[str], start: int, columns: int) -> Iterator[tuple[int, list[str], str]]:
    """Every row that is not blank: its first line, its cells, and its CSV error ("" where there is none).

    A row with unbalanced quotes ends with its first line, so that it does not consume the rows after it.
    """
    at = start
    while at < len(lines):
        line = at + 1
        reader = csv.reader(lines[at : at + MAX_ROW_LINES], strict=True)
        try:
            cells = [cell.strip() for cell in next(reader)]
            used, problem = reader.line_num, ""
        except csv.Error as error:
            cells, used, problem = lines[at].split(",")[:columns], 1, f"is not CSV: {error}"
        if not problem and any(cells) and len(cells) != columns:
            used, problem = 1, f"has {len(cells)} cells; the header has {columns}"
        if problem or any(cells):
            yield line, cells, problem
        at += used


def _faults(record: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The wrong numbers of a row: each reason with the value found."""
    for name, kind in _COLUMNS.items():
        text = record.get(name, "")
        if not text or kind == "str":
            continue
        number = _number(text)
        if number is None:
            yield f"{name} is not a number", short_repr(text)
        elif not 0.0 < number <= 1e15:
            yield f"{name} is not in range", f"{short_repr(text)}; allowed: more than 0, at most 1e15"
        elif kind.startswith("int") and number != int(number):
            yield f"{name} is not a whole number", short_repr(text)


def _number(text: str) -> float | None:
    """The finite number in a cell; None where it has none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _row(record: Mapping[str, str], line: int, name: str, texts: dict[str, str]) -> Row:
    """The row of a record; `texts` has every text once, since rows repeat most of theirs."""
    values: dict[str, Any] = {"line": line}
    for column, kind in _COLUMNS.items():
        text = record.get(column, "")
        if kind == "str":
            shown = text if text.isprintable() else printable(text)
            values[column] = texts.setdefault(shown, shown)
        elif not text:
            values[column] = None
        else:
            values[column] = int(float(text)) if kind.startswith("int") else float(text)
    return Row(**{**values, "id": name})


# Skipped rows
@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """Rows that were skipped for one reason: their lines, and the value found in the first of them."""

    reason: str
    found: str
    lines: tuple[int, ...]


def skipped_by_reason(faults: Sequence[Fault]) -> tuple[Skipped, ...]:
    """Faults grouped by reason, the most frequent reason first; equal counts keep the order of the file."""
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.reason, []).append(fault)
    found = [
        Skipped(reason=reason, found=group[0].found, lines=tuple(fault.line for fault in group))
        for reason, group in groups.items()
    ]
    return tuple(sorted(found, key=lambda skipped: -len(skipped.lines)))
