"""Limits of accuracy on the published rows: `python -m benchmarks.accuracy_limits` prints them.

It prints four things. Errors of warm left-out sources, also with one factor fitted per source. The share of
simulated studies in which a correct band covers 70 to 90 % of each source. The time per micro-batch that each
layout takes beyond the prediction. The ranking of plans by corrections that are fitted to each workload, an
upper limit since they know the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement

import numpy as np
from benchmarks.accuracy import shipped_fit
from numpy.typing import NDArray

from shardwise.accuracy.cross_validation import is_warm, linear_errors, sources_of
from shardwise.accuracy.fit import Fit, MeasuredRun, bounded_least_squares
from shardwise.accuracy.validate import LEAST_PLANS, kendall_tau, regret
from shardwise.search.result import result_of

Floats = NDArray[np.float64]

SMALL = 0.01
"""Threshold of the Huber loss: smaller relative errors count as squares, larger ones by absolute value."""

FAR = 0.08
"""A row with a larger relative error is far off."""

ROUNDS, HILL_CLIMBS = 50, 3_000
STUDIES = 20_000


def workloads(runs: Sequence[MeasuredRun]) -> Mapping[str, NDArray[np.intp]]:
    """The runs of each workload with at least LEAST_PLANS plans, by a label."""
    found: dict[tuple[object, ...], list[int]] = {}
    for place, run in enumerate(runs):
        row = run.case.row
        key = (
            row.group, row.source, row.model_name, row.gpu, row.gpus, row.seq_len, row.global_batch,
            row.dtype, row.framework,
        )  # fmt: skip
        found.setdefault(key, []).append(place)
    return {
        f"{key[0]} {key[2]} on {key[4]}, batch {key[6]}, {str(key[8]).split()[0]}": np.array(rows)
        for key, rows in found.items()
        if len(rows) >= LEAST_PLANS
    }


def strategy_of(run: MeasuredRun) -> tuple[int, int, int, int]:
    """tp, pp, micro-batch size, number of micro-batches."""
    table = run.table(1)
    tp, pp, size = int(table.tp[0]), int(table.pp[0]), int(table.micro_batch_size[0])
    return tp, pp, size, run.case.problem.job.global_batch_size // int(table.dp[0]) // size


def smooth_terms(runs: Sequence[MeasuredRun]) -> Floats:
    """1, the logarithms of tp, pp and micro-batch size, and their pairwise products: (rows, 10)."""
    logs = np.log2([strategy_of(run)[:3] for run in runs])
    products = [logs[:, a] * logs[:, b] for a, b in combinations_with_replacement(range(3), 2)]
    return np.column_stack([np.ones(len(runs)), logs, *products])


def indicator_columns(runs: Sequence[MeasuredRun]) -> Floats:
    """A column for every value of tp, of pp and of the micro-batch size."""
    values = np.array([strategy_of(run)[:3] for run in runs])
    return np.column_stack(
        [values[:, axis] == level for axis in range(3) for level in np.unique(values[:, axis])]
    )


def parts_of(runs: Sequence[MeasuredRun]) -> Floats:
    """The parts of each predicted step time in seconds: (rows, parts)."""
    of_each = [result_of(run.case.problem, run.table(1)[0]).breakdown for run in runs]
    return np.array([list(parts.values()) for parts in of_each])


def closest(columns: Floats, target: Floats, low: float, high: float, start: float) -> Floats:
    """The coefficients between `low` and `high` with the least absolute errors, by reweighted least
    squares."""
    count, weights = columns.shape[1], np.ones(len(target))
    ridge = 1e-4 * np.eye(count)
    found = np.full(count, start)
    for _ in range(ROUNDS):
        matrix = columns.T @ (weights[:, None] * columns) + ridge
        right = columns.T @ (weights * (target - columns @ np.full(count, start)))
        found = start + bounded_least_squares(
            matrix, right, np.full(count, low - start), np.full(count, high - start)
        )
        weights = 1.0 / np.maximum(np.abs(columns @ found - target), SMALL)
    return found


def tau_of(measured: Floats, predicted: Floats) -> float:
    return kendall_tau(measured.tolist(), predicted.tolist()) or 0.0


def hill_climbed(base: Floats, columns: Floats, start: Floats, measured: Floats) -> Floats:
    """Predictions with coefficients that hill climbing improves by Kendall's tau."""
    rng, found = np.random.default_rng(0), start
    best = tau_of(measured, base + columns @ found)
    for step in range(HILL_CLIMBS):
        tried = found + rng.normal(0.0, 0.05 * 0.999**step + 0.002, len(found))
        tau = tau_of(measured, base + columns @ tried)
        if tau >= best:
            best, found = tau, tried
    return np.exp(base + columns @ found)


def corrections(fit: Fit, rows: NDArray[np.intp]) -> Iterator[tuple[str, Floats]]:
    """Predictions of one workload: uncorrected, and with corrections fitted to its measured times."""
    runs = [fit.runs[row] for row in rows]
    measured = np.array([run.measured_s for run in runs])
    now = np.exp(fit.linear.log_s[rows])
    yield "as predicted", now
    parts = parts_of(runs) / measured[:, None]
    factors = closest(parts, np.ones(len(runs)), 0.0, 10.0, 1.0)
    yield "a factor for each part of the step", parts @ factors * measured
    target = np.log(measured / now)
    for name, columns in (
        ("ten smooth terms", smooth_terms(runs)),
        ("a factor for each value", indicator_columns(runs)),
    ):
        start = closest(columns.astype(np.float64), target, -3.0, 3.0, 0.0)
        yield name, now * np.exp(columns @ start)
        if name == "ten smooth terms":
            yield "the same, fitted to the ranking", hill_climbed(np.log(now), columns, start, measured)
    far = np.abs(now / measured - 1.0) > FAR
    yield f"all within {FAR:.0%} exactly, others as predicted", np.where(far, now, measured)


def print_orders(fit: Fit) -> None:
    found: dict[str, list[tuple[float, float]]] = {}
    for name, rows in workloads(fit.runs).items():
        measured = np.array([fit.runs[row].measured_s for row in rows])
        print(f"{name}: {len(rows)} plans")
        for correction, predicted in corrections(fit, rows):
            figures = tau_of(measured, predicted), regret(measured.tolist(), predicted.tolist())
            found.setdefault(correction, []).append(figures)
            error = float(np.abs(predicted / measured - 1.0).mean())
            print(
                f"  {correction:48} tau {figures[0]:.2f}   regret {figures[1]:5.1%}   error {error:5.1%}",
                flush=True,
            )
    for correction, of in found.items():
        taus, regrets = zip(*of, strict=True)
        print(
            f"mean of {len(of)}: {correction:48} tau {np.mean(taus):.2f}   worst regret {max(regrets):5.1%}"
        )


def print_extra(fit: Fit) -> None:
    """Prints seconds per micro-batch beyond the prediction, by layout and micro-batch size."""
    now = np.exp(fit.linear.log_s)
    for name, rows in workloads(fit.runs).items():
        layouts: dict[tuple[int, int], list[str]] = {}
        far: set[tuple[int, int]] = set()
        for row in rows:
            tp, pp, size, number = strategy_of(fit.runs[row])
            extra_s = fit.runs[row].measured_s - now[row]
            through = number + pp - 1
            layouts.setdefault((tp, pp), []).append(f"{size}: {extra_s / through * 1e3:+.0f} ms")
            if abs(now[row] / fit.runs[row].measured_s - 1.0) > FAR:
                far.add((tp, pp))
        for layout, texts in sorted(layouts.items()):
            mark = "far off" if layout in far else "near"
            print(f"{name}: tp {layout[0]} pp {layout[1]}: {mark:8} by micro-batch size {', '.join(texts)}")


def print_warm(fit: Fit) -> None:
    """Prints errors of sources whose device and software remain in the fit: fitted, left out, and left out
    with one factor per source."""
    names = sources_of(fit.runs)
    now = fit.linear.log_s - np.log([run.measured_s for run in fit.runs])
    means = []
    for source in dict.fromkeys(names.tolist()):
        mine = (names == source) & is_warm(fit.runs, {source})
        if mine.any():
            out = linear_errors(fit, {source})[mine]
            of = (now[mine], out, out - np.median(out))
            means.append([float(np.abs(np.expm1(errors)).mean()) for errors in of])
            print(
                f"{source:12} {int(mine.sum()):4} rows   fitted {means[-1][0]:6.1%}"
                f"   left out {means[-1][1]:6.1%}   with one factor per source {means[-1][2]:6.1%}",
                flush=True,
            )
    fitted, out, own = np.mean(means, axis=0)
    print(f"mean         fitted {fitted:.1%}   left out {out:.1%}   with one factor per source {own:.1%}")


def print_bands(fit: Fit) -> None:
    """Prints the coverage of a correct 80 % band in simulated studies.

    A study has as many sources and rows as the data, sampled from the spreads that were found."""
    names = sources_of(fit.runs)
    errors = {
        (source, kind): linear_errors(fit, {source})[
            (names == source) & (is_warm(fit.runs, {source}) == kind)
        ]
        for source in dict.fromkeys(names.tolist())
        for kind in (True, False)
    }
    parts = [part for part in errors.values() if len(part)]
    sizes = np.array([len(part) for part in parts])
    between = float(np.std([np.median(part) for part in parts], ddof=1))
    within = float(
        np.mean([np.median(np.abs(part - np.median(part))) * 1.4826 for part in parts if len(part) > 3])
    )
    half = 1.2816 * float(np.hypot(between, within))
    rng = np.random.default_rng(0)
    middles = rng.normal(0.0, between, (STUDIES, len(sizes)))
    inside = np.empty_like(middles)
    for place, size in enumerate(sizes):
        simulated = middles[:, place, None] + rng.normal(0.0, within, (STUDIES, size))
        inside[:, place] = (np.abs(simulated) <= half).mean(axis=1)
    lines = ((inside >= 0.7) & (inside <= 0.9)).sum(axis=1)
    overall = (inside * sizes).sum(axis=1) / sizes.sum()
    low, middle, high = np.quantile(overall, (0.05, 0.5, 0.95))
    print(f"spread between sources {between:.2f}, within {within:.2f}; rows {', '.join(map(str, sizes))}")
    most, every = int(np.quantile(lines, 0.95)), float((lines == len(sizes)).mean())
    print(
        f"of {len(sizes)} parts of sources, {lines.mean():.1f} on average have a coverage of 70 to 90 %, at"
        f" most {most} in 95 of 100 studies; all of them in {every:.2%}"
    )
    right = float(((overall >= 0.7) & (overall <= 0.9)).mean())
    print(
        f"coverage of all rows: {middle:.0%}, in 9 of 10 studies {low:.0%} to {high:.0%};"
        f" 70 to 90 % in {right:.0%}"
    )


def main() -> None:
    fit = shipped_fit()
    print_warm(fit)
    print_bands(fit)
    print_extra(fit)
    print_orders(fit)


if __name__ == "__main__":
    main()
