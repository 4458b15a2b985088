"""Peak memory against measurements: `python -m benchmarks.memory [--write | --page]`.

It leaves out each source, each kind of software and each device in turn, fits the numbers of what is outside
of tensors to the other rows, and predicts those left out. It prints errors, the worst rows, the bands of
memory, the fitted numbers, and how many reports of runs that fit or not are right. `--write` writes the bands
to `strategy/data/peak_errors.json`; `--page`, after it, writes the tables of docs/accuracy.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from statistics import fmean, variance

import numpy as np
from benchmarks.memory_rows import (
    ALLOCATED,
    DEVICE,
    OWN,
    RESERVED,
    OutcomeRow,
    PeakRow,
    outcome_rows,
    peak_rows,
    skipped_peaks,
    unsaid,
)
from benchmarks.recipes import table

from shardwise.strategy.peak_errors import ALL_SOFTWARE, PeakErrors

DATA = Path(__file__).parents[1] / "src" / "shardwise" / "strategy" / "data" / "peak_errors.json"

LEAST_SOURCES = 4
"""Fewest sources of a kind of software for a band of its own; with fewer, the variance between sources is
hardly determined."""

TOO_SMALL = 0.10
"""Share by which a prediction is called too small."""

WORST = 10
"""Rows that are listed as the worst."""

MARGIN = 0.05
"""Default share of the memory of a device that stays free."""

GIB = 2.0**30


# What is outside of tensors


@dataclass(frozen=True, slots=True)
class Outside:
    """Numbers for the bytes outside of tensors: `ratio` is reserved over allocated bytes, less one; the
    others are bytes."""

    ratio: float
    communicator: float
    context: float


KNOWN = Outside(0.04, 1e8, 7e8)
"""The shipped numbers, which documents say: 3 to 6 %, about 0.1 GB, 0.5 to 1 GB."""

KNOWN_TO = Outside(0.015, 0.5e8, 2.5e8)
"""How well the documents determine them, as standard deviations."""

NOISE = 0.1
"""Standard deviation of the logarithm of a measured peak for the fit."""


def fitted(rows: Sequence[PeakRow], rounds: int = 8) -> Outside:
    """The numbers that fit the rows best (Gauss-Newton on logarithms, each source with the weight of one
    row), as far as the rows determine them more than the documents do."""
    used = [row for row in rows if row.kind != ALLOCATED]
    values = np.array([KNOWN.ratio, KNOWN.communicator, KNOWN.context])
    if not used:
        return KNOWN
    counts = {row.source: sum(other.source == row.source for other in used) for row in used}
    weights = np.array([1.0 / (NOISE * sqrt(counts[row.source])) for row in used])
    prior = np.array([KNOWN.ratio, KNOWN.communicator, KNOWN.context])
    spread = np.array([KNOWN_TO.ratio, KNOWN_TO.communicator, KNOWN_TO.context])
    of_device = np.array([row.kind == DEVICE for row in used], dtype=float)
    allocated = np.array([row.allocated for row in used])
    slopes = np.stack([allocated, of_device * [row.opened for row in used], of_device], axis=1)
    measured = np.log([row.measured for row in used])
    for _ in range(rounds):
        predicted = allocated + slopes @ values
        rates = np.concatenate([weights[:, None] * slopes / predicted[:, None], np.diag(1.0 / spread)])
        wrong = np.concatenate([weights * (measured - np.log(predicted)), (prior - values) / spread])
        values = np.maximum(values + np.linalg.lstsq(rates, wrong, rcond=None)[0], 0.0)
    return Outside(*(float(value) for value in values))


def with_outside(row: PeakRow, outside: Outside) -> PeakRow:
    """The row predicted with other numbers."""
    return replace(row, ratio=outside.ratio, communicator=outside.communicator, context=outside.context)


# Left-out groups


def left_out(rows: Sequence[PeakRow], group: Callable[[PeakRow], str]) -> list[PeakRow]:
    """All rows, each predicted with numbers fitted to the rows of other groups."""
    found = []
    for row, outside in zip(rows, _outsides(rows, group), strict=True):
        found.append(row if row.source == OWN else with_outside(row, outside))
    return found


def _outsides(rows: Sequence[PeakRow], group: Callable[[PeakRow], str]) -> list[Outside]:
    names = [group(row) for row in rows]
    by_name = {
        name: fitted([row for row, other in zip(rows, names, strict=True) if other != name])
        for name in dict.fromkeys(names)
    }
    return [by_name[name] for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakSummary:
    """Errors of predicted over measured peaks, less one: their number, mean size, mean, and the share of rows
    that are predicted more than TOO_SMALL too small."""

    rows: int
    sources: int
    error: float
    bias: float
    too_small: float


def summary(rows: Sequence[PeakRow]) -> PeakSummary:
    errors = [row.predicted / row.measured - 1.0 for row in rows]
    return PeakSummary(
        rows=len(rows),
        sources=len({row.source for row in rows}),
        error=fmean(map(abs, errors)),
        bias=fmean(errors),
        too_small=fmean(error < -TOO_SMALL for error in errors),
    )


# Bands


def by_source(rows: Iterable[PeakRow]) -> dict[str, list[float]]:
    """The log ratios of each source."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.source, []).append(row.log_ratio)
    return found


def errors_of(kind: str, ratios: Mapping[str, Sequence[float]]) -> PeakErrors:
    """The errors of an unseen source: the mean over sources, and a variance that is the sum of that between
    sources (with that of their mean) and the mean within one. Each source counts once."""
    means = [fmean(values) for values in ratios.values()]
    within = fmean(fmean((value - fmean(values)) ** 2 for value in values) for values in ratios.values())
    between = variance(means) * (1.0 + 1.0 / len(means)) if len(means) > 1 else 0.0
    return PeakErrors(
        kind=kind,
        bias=fmean(means),
        spread=sqrt(between + within),
        sources=len(means),
        rows=sum(map(len, ratios.values())),
    )


def bands(rows: Sequence[PeakRow]) -> dict[str, PeakErrors]:
    """The errors of all software, and of each kind with at least LEAST_SOURCES sources; the rows are
    predicted without their source."""
    rows = [row for row in rows if row.is_of_need]
    found = {ALL_SOFTWARE: errors_of(ALL_SOFTWARE, by_source(rows))}
    for kind in sorted({row.software_kind for row in rows} - {ALL_SOFTWARE}):
        ratios = by_source(row for row in rows if row.software_kind == kind)
        if len(ratios) >= LEAST_SOURCES:
            found[kind] = errors_of(kind, ratios)
    return found


def covered(rows: Sequence[PeakRow]) -> tuple[float, float]:
    """Shares of rows inside the band, and at most at its upper end, of bands made without their source; each
    source counts once."""
    inside, below = [], []
    rows = [row for row in rows if row.is_of_need]
    for source in dict.fromkeys(row.source for row in rows):
        others, own = _divided(rows, lambda row, name=source: row.source == name)  # type: ignore[misc]
        made = bands(others)
        ends = [
            (row.measured, made.get(row.software_kind, made[ALL_SOFTWARE]).band_bytes(row.predicted))
            for row in own
        ]
        inside.append(fmean(low <= measured <= high for measured, (low, high) in ends))
        below.append(fmean(measured <= high for measured, (_, high) in ends))
    return fmean(inside), fmean(below)


def _divided(
    rows: Sequence[PeakRow], holds: Callable[[PeakRow], bool]
) -> tuple[list[PeakRow], list[PeakRow]]:
    return [row for row in rows if not holds(row)], [row for row in rows if holds(row)]


def written(made: Mapping[str, PeakErrors], software: Mapping[str, str]) -> str:
    """The data file of the bands."""
    figures = {
        kind: {
            "bias": round(one.bias, 4),
            "spread": round(one.spread, 4),
            "sources": one.sources,
            "rows": one.rows,
        }
        for kind, one in made.items()
    }
    kinds = ",\n  ".join(f"{json.dumps(kind)}: {json.dumps(one)}" for kind, one in figures.items())
    provenance = (
        "python -m benchmarks.memory --write: log(measured / predicted) of peaks, each source left out in "
        f"turn; a kind of software with fewer than {LEAST_SOURCES} sources shares the errors of all software"
    )
    return (
        '{\n "provenance": ' + json.dumps(provenance) + ',\n "software": ' + json.dumps(dict(software))
        + ',\n "kinds": {\n  ' + kinds + "\n }\n}\n"
    )  # fmt: skip


# Tables

GROUPS: Mapping[str, Callable[[PeakRow], str]] = {
    "source": lambda row: row.source,
    "software": lambda row: row.software_kind,
    "device": lambda row: row.device,
}
"""What is left out together."""


def kind_table(rows: Sequence[PeakRow]) -> str:
    """Errors by what the peaks count and by whether formulas knew them; sources count once."""
    lines = []
    for kind in (ALLOCATED, RESERVED, DEVICE):
        for name, is_informed in (("known to formulas", True), ("unknown", False)):
            own = [row for row in rows if row.kind == kind and row.is_informed == is_informed]
            if own:
                sources = [summary([row for row in own if row.source == source]) for source in by_source(own)]
                lines.append((kind, name, len(sources), len(own), *_once(sources)[1:]))
    return table(("peaks", "rows are", "sources", "rows", "error", "bias", "too small"), lines)


def group_table(rows: Sequence[PeakRow], name: str) -> str:
    """Errors of each group that is left out, and of all rows together."""
    group = GROUPS[name]
    predicted = left_out(rows, group)
    parts = {key: [row for row in predicted if group(row) == key] for key in dict.fromkeys(map(group, rows))}
    lines = [
        (key, *_cells(own), _text(row.software for row in own), _text(row.device for row in own))
        for key, own in parts.items()
    ]
    lines.append((f"all {len(parts)}", *_cells(predicted), "", ""))
    lines.append(("each once", *_once([summary(own) for own in parts.values()]), "", ""))
    heads = (name, "rows", "error", "bias", "too small", "profiles", "devices")
    return table(heads, lines)


def _cells(rows: Sequence[PeakRow]) -> tuple[str, ...]:
    found = summary(rows)
    return f"{found.rows}", f"{found.error:.1%}", f"{found.bias:+.1%}", f"{found.too_small:.0%}"


def _once(parts: Sequence[PeakSummary]) -> tuple[str, ...]:
    """The means over groups, each of which counts once."""
    error, bias, too_small = (
        fmean(getattr(part, name) for part in parts) for name in ("error", "bias", "too_small")
    )
    return "", f"{error:.1%}", f"{bias:+.1%}", f"{too_small:.0%}"


def _text(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def worst_table(rows: Sequence[PeakRow]) -> str:
    """The rows with the largest errors, one for each measured value."""
    ordered = sorted(rows, key=lambda row: -abs(row.log_ratio))
    lines = [
        (row.source, row.name, row.kind, f"{row.measured / GIB:.1f}", f"{row.predicted / GIB:.1f}",
         f"{row.predicted / row.measured - 1.0:+.0%}")
        for row in ordered[:WORST]
    ]  # fmt: skip
    return table(("source", "run", "kind", "measured GiB", "predicted GiB", "error"), lines)


def band_table(made: Mapping[str, PeakErrors]) -> str:
    lines = [
        (kind, one.sources, one.rows, f"{one.bias:+.3f}", f"{one.spread:.3f}",
         f"{one.band_bytes(1.0)[0]:.2f} to {one.band_bytes(1.0)[1]:.2f}",
         f"{1.0 - one.likely_bytes(1.0):.1%}", f"{one.fits_probability(1.0 - MARGIN, 1.0):.2f}")
        for kind, one in made.items()
    ]  # fmt: skip
    heads = ("software", "sources", "rows", "bias", "spread", "band", "margin of 0.9", f"at {MARGIN:.0%}")
    return table(heads, lines)


def source_table(rows: Sequence[PeakRow]) -> str:
    """How many sources and rows each kind of software has: of all peaks, and of those that a band is made
    from; and whose band it has."""
    made = bands(rows)
    lines = []
    for kind in sorted({row.software_kind for row in rows}):
        own = [row for row in rows if row.software_kind == kind]
        of_need = [row for row in own if row.is_of_need]
        lines.append(
            (kind, len(by_source(own)), len(own), len(by_source(of_need)), len(of_need),
             "its own" if kind in made else "that of all software")
        )  # fmt: skip
    heads = ("software", "sources", "rows", "sources for a band", "rows for a band", "band")
    return table(heads, lines)


def outcome_table(rows: Sequence[OutcomeRow]) -> str:
    """How many outcomes of each group are right."""
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        own = [row for row in rows if row.group == group]
        lines.append((group, *_counts(own)))
    return table(("runs", "fit", "do not fit", "right", ""), [*lines, ("all", *_counts(rows))])


def _counts(rows: Sequence[OutcomeRow]) -> tuple[object, ...]:
    fit, right = sum(row.fits for row in rows), sum(row.is_right for row in rows)
    return fit, len(rows) - fit, right, f"{right / len(rows):.0%}"


def wrong_lines(rows: Iterable[OutcomeRow]) -> list[str]:
    """One line for each wrong outcome."""
    return [
        f"- {row.name}: {'fits' if row.fits else 'does not fit'}; "
        + (row.illegal or f"{row.needed / GIB:.0f} of {row.capacity / GIB:.0f} GiB, {row.likely:.2f} likely")
        for row in rows
        if not row.is_right
    ]


# The page

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"

_BLOCK = "<!-- benchmarks.memory: {} -->"
"""The line before a table of the page; an empty line ends the table."""


def blocks_of(rows: Sequence[PeakRow], outcomes: Sequence[OutcomeRow]) -> dict[str, str]:
    """The tables of the page by name."""
    held = left_out(rows, GROUPS["source"])
    groups = [group_table(rows, name).split("\n") for name in GROUPS]
    head, rule = groups[0][:2]
    left = [
        head.replace("| source |", "| left out |"), rule,
        *(line.replace("| ", f"| {name}: ", 1) for name, lines in zip(GROUPS, groups, strict=True)
          for line in lines[2:-2]),
        *groups[0][-2:],
    ]  # fmt: skip
    return {
        "counted": kind_table(held),
        "left out": "\n".join(left),
        "bands": band_table(bands(held)),
        "sources": source_table(held),
        "outcomes": outcome_table([_in_page(row) for row in outcomes]),
    }


def _in_page(row: OutcomeRow) -> OutcomeRow:
    """The row in the group of the page: all reports and measured peaks together."""
    return row if row.group in ("production", "recipes") else replace(row, group="peaks and reports")


def rewritten(page: str, blocks: Mapping[str, str]) -> str:
    """The page with these tables. Raises ValueError where it has no place for one."""
    lines = page.split("\n")
    for name, text in blocks.items():
        start = lines.index(_BLOCK.format(name)) + 2
        end = lines.index("", start)
        lines[start:end] = text.split("\n")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if unknown := [word for word in arguments if word not in ("--write", "--page")]:
        raise SystemExit(f"{unknown[0]}: no such option; [--write | --page]")
    rows = peak_rows()
    if "--page" in arguments:
        blocks = blocks_of(rows, list(outcome_rows()))
        PAGE.write_text(rewritten(PAGE.read_text("utf-8"), blocks), "utf-8")
        return 0
    print(f"{len(rows)} measured peaks, {len(skipped_peaks())} rows of the measurements skipped")
    for name, reason in unsaid():
        print(f"not predicted: {name}: {reason}")
    for name in GROUPS:
        print(f"\nleft out by {name}\n\n{group_table(rows, name)}")
    held = left_out(rows, GROUPS["source"])
    print(f"\nby what is counted\n\n{kind_table(held)}")
    print(f"\nworst\n\n{worst_table(held)}")
    made = bands(held)
    inside, below = covered(held)
    print(f"\nbands\n\n{band_table(made)}\n\n{source_table(held)}")
    print(f"\nin bands made without the source: {inside:.0%}; at most at their upper end: {below:.0%}")
    found = fitted(rows)
    print(
        f"\noutside of tensors, fitted to {sum(row.kind != ALLOCATED for row in rows)} rows: ratio"
        f" {found.ratio:.3f} ({KNOWN.ratio:g}), communicator {found.communicator / 1e9:.2f} GB"
        f" ({KNOWN.communicator / 1e9:g}), context {found.context / 1e9:.2f} GB ({KNOWN.context / 1e9:g})"
    )
    outcomes = list(outcome_rows())
    print(f"\nfits or not\n\n{outcome_table(outcomes)}\n\nwrong\n")
    print("\n".join(wrong_lines(outcomes)))
    if "--write" in arguments:
        DATA.write_text(written(made, json.loads(DATA.read_text("utf-8"))["software"]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
