"""Writes every number of docs/accuracy.md: `python -m benchmarks.accuracy_page [--fits]`.

The tables come from `shardwise validate` (shipped rows), from the figures of left-out runs in
`accuracy/data/left_out.json`, from `benchmarks.production` and from `benchmarks.memory`. With `--fits` the
figures of left-out runs, and the best measured runs, are computed anew first (two CPU minutes).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from math import expm1
from pathlib import Path
from statistics import fmean

from benchmarks import left_out, memory, production
from benchmarks.memory_rows import ALLOCATED, PeakRow, outcome_rows, peak_rows
from benchmarks.recipes import table

from shardwise.accuracy import SHIPPED, Validation, left_out_errors, validate
from shardwise.accuracy.left_out import LeftOutErrors, LeftOutGroup
from shardwise.cluster.best_runs import LEAST_RUNS, best_runs

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"

BLOCK = "<!-- benchmarks.accuracy_page: {} -->"
"""The line before a table of the page; an empty line ends the table."""


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:.{digits}%}"


def blocks() -> dict[str, str]:
    """The tables of the page by name."""
    found, fitted = left_out_errors(), validate(str(SHIPPED))
    return {
        "in short": short_table(found, fitted),
        "software and device": group_table(found, ("software", "device")),
        "source": group_table(found, ("source",)),
        "measured steps": curve_table(found),
        "production": production_table(),
        "fitted": fitted_table(fitted),
        "best runs": best_table(),
    }


def short_table(found: LeftOutErrors, fitted: Validation) -> str:
    """One line per prediction: for runs like the fitted ones, for others, and after measured steps."""
    sources = [group for group in found.groups if group.kind == "source"]
    held = memory.left_out(peak_rows(), memory.GROUPS["source"])
    taus = [group for group in sources if group.tau is not None]
    after = {(point.kind, point.steps): point.after for point in found.curve}
    rows = [
        (
            "step time, mean error of a source",
            percent(fmean(group.fitted for group in sources)),
            percent(fmean(group.error for group in sources)),
            percent(fmean(group.with_constant for group in sources)),
            percent(after["same model", 1]),
            percent(after["same model", 3]),
        ),
        (
            "order of the plans of a job, Kendall's tau",
            f"{fitted.overall.kendall_tau or 0.0:.2f}",
            f"{fmean(group.tau or 0.0 for group in taus):.2f}",
            "the same", "", "",
        ),
        (
            "time lost by the plan predicted fastest, worst job",
            percent(fitted.overall.regret),
            percent(max(group.worst_regret or 0.0 for group in taus)),
            "the same", "", "",
        ),
        ("peak memory (bytes in tensors), mean error", "", percent(memory_error(held)), "", "", ""),
    ]  # fmt: skip
    heads = ("prediction", "fitted runs", "left out", "left out, one constant", "one measured step of the"
             " model", "three")  # fmt: skip
    return table(heads, rows)


def memory_error(held: Sequence[PeakRow]) -> float:
    """The mean error of peaks in tensors that no formula knew; each source counts once."""
    own = [row for row in held if row.kind == ALLOCATED and not row.is_informed]
    return fmean(fmean(abs(expm1(-ratio)) for ratio in of) for of in memory.by_source(own).values())


def group_table(found: LeftOutErrors, kinds: Sequence[str]) -> str:
    rows = [
        row_of(group, name=f"{group.kind}: {group.name}" if len(kinds) > 1 else group.name)
        for group in found.groups
        if group.kind in kinds
    ]
    if len(kinds) == 1:
        own = [group for group in found.groups if group.kind in kinds]
        means = [percent(fmean(getattr(group, name) for group in own)) for name in COLUMNS]
        rows.append(("**mean of sources**", sum(group.rows for group in own), "", *means, "", "", ""))
    heads = ("left out", "rows", "kind", "fitted", "left out", "one constant", "bias", "tau", "regret")
    return table(heads, rows)


COLUMNS = ("fitted", "error", "with_constant")


def row_of(group: LeftOutGroup, name: str) -> tuple[object, ...]:
    kind = "warm" if group.warm == 1.0 else "cold" if group.warm == 0.0 else f"{group.warm:.0%} warm"
    return (
        name,
        group.rows,
        kind,
        *(percent(getattr(group, column)) for column in COLUMNS),
        f"{group.bias:+.1%}",
        "" if group.tau is None else f"{group.tau:.2f}",
        percent(group.worst_regret),
    )


def curve_table(found: LeftOutErrors) -> str:
    rows = [
        (point.kind, point.steps, point.sources, percent(point.before), percent(point.after))
        for point in sorted(found.curve, key=lambda point: (point.kind != "same model", point.steps))
    ]
    return table(("predicted", "measured steps", "sources", "before", "after"), rows)


def production_table() -> str:
    return table(production.HEADS, production.rows_of(production.outcomes_with_picks()))


def fitted_table(fitted: Validation) -> str:
    rows = []
    for group in (*fitted.groups, fitted.overall):
        time = group.time
        assert time is not None
        rows.append(
            (
                group.name, time.n, percent(time.mape), percent(time.median), f"{time.bias:+.1%}",
                percent(time.worst), "" if group.kendall_tau is None else f"{group.kendall_tau:.2f}",
                percent(group.regret), percent(group.band_coverage, 0),
            )
        )  # fmt: skip
    heads = ("source", "rows", "mean", "median", "bias", "worst", "tau", "regret", "in band")
    return table(heads, rows)


def best_table() -> str:
    known = sorted(best_runs().values(), key=lambda run: (run.device, run.dtype))
    rows: Iterator[tuple[object, ...]] = (
        (run.device, run.dtype, run.runs, percent(run.mfu), run.row)
        for run in known
        if run.runs >= LEAST_RUNS
    )
    return table(("device", "format", "runs", "best MFU", "row"), rows)


def rewritten(page: str, found: Mapping[str, str]) -> str:
    """The page with these tables. ValueError where it has no place for one."""
    lines = page.split("\n")
    for name, text in found.items():
        start = lines.index(BLOCK.format(name)) + 2
        end = lines.index("", start)
        lines[start:end] = text.split("\n")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    if unknown := [word for word in arguments if word != "--fits"]:
        raise SystemExit(f"{unknown[0]}: no such option; [--fits]")
    if arguments:
        left_out.main(["--write"])
        left_out_errors.cache_clear()
        best_runs.cache_clear()
    page = memory.rewritten(PAGE.read_text("utf-8"), memory.blocks_of(peak_rows(), list(outcome_rows())))
    PAGE.write_text(rewritten(page, blocks()), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
