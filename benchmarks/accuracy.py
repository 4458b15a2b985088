"""The figures of docs/accuracy.md: `python -m benchmarks.accuracy [FOLDER]` prints them and draws the plot.

It prints the errors of every mechanism switched off, and those of every source fitted and left out. With a
FOLDER it draws predicted over measured times per source into it, with matplotlib. `exactly [SOURCE ...]`
prints the errors of sources left out by fits from scratch instead; a fit takes a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.accuracy import SHIPPED, read_rows
from shardwise.accuracy.case import Case, cases_of, trains_adapters
from shardwise.accuracy.cross_validation import (
    Floats,
    Mask,
    Spread,
    is_warm,
    linear_errors,
    sources_of,
    spread_of,
)
from shardwise.accuracy.fit import (
    Fit,
    MeasuredRun,
    Numbers,
    chosen_strategies,
    chosen_strategy,
    fitted,
    linearised,
    predicted_log_s,
)
from shardwise.accuracy.measured import measured_of
from shardwise.cluster import AttentionCurve, Efficiency
from shardwise.cost import Problem, bind
from shardwise.errors import ConfigError
from shardwise.search.step_times import step_times_s
from shardwise.strategy import Profile

CHANGE_SHARE = 0.01
"""A row depends on a mechanism if its prediction changes by more than this share without it."""

FUSED = AttentionCurve(forward_fraction=0.41, backward_fraction=0.28, seq_half=512.0)
"""Curve of attention if old software and devices had FlashAttention-2."""


def shipped_fit() -> Fit:
    """The shipped numbers as a fit of all rows, with its derivatives."""
    rows, _ = read_rows(str(SHIPPED))
    cases, _ = cases_of(rows)
    numbers = Numbers.shipped()
    runs = []
    for case in cases:
        if case.mixed is not None or trains_adapters(case.row):
            continue  # neither runs on unequal devices nor of adapters alone are fitted
        try:
            measured_s = measured_of(case.row, case.problem).step_time_s
        except ConfigError:
            continue
        if measured_s is not None:
            runs.append(
                MeasuredRun(case=case, strategy=chosen_strategy(case, numbers), measured_s=measured_s)
            )
    return Fit(numbers=numbers, runs=tuple(runs), linear=linearised(runs, numbers))


def with_profile(problem: Problem, **changes: Any) -> Problem:
    """The problem with changes of its software profile."""
    job = replace(problem.job, profile=replace(problem.profile, **changes))
    return bind(problem.model, problem.cluster, job)


def with_efficiency(problem: Problem, change: Callable[[Efficiency], Efficiency]) -> Problem:
    """The problem on devices with another efficiency."""
    classes = {
        name: replace(device, efficiency=change(device.efficiency))
        for name, device in problem.cluster.classes.items()
    }
    return bind(problem.model, replace(problem.cluster, classes=classes), problem.job)


def without_unfused(problem: Problem) -> Problem:
    """The problem with fused attention on all devices."""
    fused = with_profile(problem, attention=("flash-2", "flash-3"))
    return with_efficiency(fused, lambda e: replace(e, attention={"flash-2": FUSED, **e.attention}))


def as_switched(problem: Problem) -> Problem:
    """The problem with a switch in every node."""
    tiers = tuple(replace(tier, part_shares=()) for tier in problem.cluster.tiers)
    return bind(problem.model, replace(problem.cluster, tiers=tiers), problem.job)


def late(profile: Profile, name: str) -> float:
    """The overlap of a profile, at least 1 as in later software."""
    overlap: float = getattr(profile, name)
    return max(overlap, 1.0)


OFF: Mapping[str, Callable[[Problem], Problem]] = {
    "unfused attention": without_unfused,
    "waiting for the host": lambda p: with_profile(p, dispatch_s=0.0, expert_dispatch_s=0.0),
    "tensor communication during weight gradients": lambda p: with_profile(p, tensor_backward_overlap=0.0),
    "rings through parts of nodes": lambda p: with_efficiency(
        p, lambda e: replace(e, scale_out=replace(e.scale_out, partial_fraction=1.0))
    ),
    "links between devices": as_switched,
    "crowded networks": lambda p: with_efficiency(
        p, lambda e: replace(e, scale_out=replace(e.scale_out, crowding=0.0))
    ),
    "start-up seconds": lambda p: with_efficiency(
        p,
        lambda e: replace(
            e, scale_up=replace(e.scale_up, startup_s=0.0), scale_out=replace(e.scale_out, startup_s=0.0)
        ),
    ),
    "blocking messages": lambda p: with_profile(p, pipeline_overlap=late(p.profile, "pipeline_overlap")),
    "no overlap in early software": lambda p: with_profile(
        p,
        data_overlap=late(p.profile, "data_overlap"),
        state_overlap=late(p.profile, "state_overlap"),
    ),
    "recomputation that stops early": lambda p: with_profile(p, recompute_stops_early=False),
    "casts of 8- and 4-bit matmuls": lambda p: replace(p, recipe=replace(p.recipe, cast_bytes=0.0)),
    "matmuls of a dtype and their own peak": lambda p: with_efficiency(
        p, lambda e: replace(e, matmul=replace(e.matmul, fp8_fraction=1.0, fp4_fraction=1.0))
    ),
    "passes of memory-bound operators": lambda p: with_profile(p, pointwise_passes=1.0),
}
"""Mechanisms of the step time that numbers can switch off, each with the changed problem."""


def times_s(runs: Sequence[MeasuredRun], change: Callable[[Problem], Problem]) -> Any:
    """Predicted seconds per step of runs with changed problems."""
    found = []
    for run in runs:
        case: Case = run.case
        found.append(step_times_s(change(case.problem), run.table(1))[0])
    return np.array(found)


def mean_error(predicted: Any, measured: Any) -> float:
    return float(np.abs(predicted / measured - 1.0).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A source predicted by numbers that are fitted to the other sources. Arrays have shape (rows,).

    `log_error` is the logarithm of predicted over measured time. `is_warm` is true for rows whose device and
    software remained in the fit through other sources.
    """

    source: str
    rows: NDArray[np.intp]
    log_error: Floats
    is_warm: Mask


def left_out(fit: Fit, source: str, *, rounds: int = 2, steps: int = 10) -> LeftOut:
    """Predicts the rows of `source` with numbers fitted to the other sources.

    The fit starts from scratch, so that its initial values hold nothing of the source. The strategies of the
    rows are chosen again with the new numbers.
    """
    out = sources_of(fit.runs) == source
    remaining = [run for run, is_out in zip(fit.runs, out, strict=True) if not is_out]
    numbers = fitted(
        [run.case for run in remaining],
        [run.measured_s for run in remaining],
        fit.numbers.from_scratch(),
        rounds=rounds,
        steps=steps,
    ).numbers
    excluded_runs = [run for run, is_out in zip(fit.runs, out, strict=True) if is_out]
    chosen = chosen_strategies([run.case for run in excluded_runs], numbers)
    excluded_runs = [
        replace(run, strategy=strategy) for run, strategy in zip(excluded_runs, chosen, strict=True)
    ]
    return LeftOut(
        source=source,
        rows=np.flatnonzero(out),
        log_error=predicted_log_s(excluded_runs, numbers) - np.log([run.measured_s for run in excluded_runs]),
        is_warm=is_warm(fit.runs, {source})[out],
    )


def nested_spreads(fit: Fit, source: str) -> dict[bool, Spread]:
    """The warm (True) and cold (False) spreads that a fit without `source` would report for it.

    They come from the errors of each other source, with that source and `source` both left out."""
    others = [name for name in dict.fromkeys(sources_of(fit.runs)) if name != source]
    names = sources_of(fit.runs)
    errors: dict[bool, dict[str, Floats]] = {True: {}, False: {}}
    for other in others:
        found = linear_errors(fit, {source, other})
        warm = is_warm(fit.runs, {source, other})
        for kind in (True, False):
            rows = (names == other) & (warm == kind)
            if rows.any():
                errors[kind][other] = found[rows]
    return {kind: spread_of(parts) for kind, parts in errors.items() if parts}


def print_left_out(fit: Fit) -> None:
    """Prints fitted and left-out errors, warm and cold, and the coverage by bands of fits without the
    source."""
    names = sources_of(fit.runs)
    now = fit.linear.log_s - np.log([run.measured_s for run in fit.runs])
    means: dict[bool, list[float]] = {True: [], False: []}
    covered = total = 0
    for source in dict.fromkeys(names.tolist()):
        errors, warm = linear_errors(fit, {source}), is_warm(fit.runs, {source})
        bands = nested_spreads(fit, source)
        for kind in (True, False):
            rows = (names == source) & (warm == kind)
            if not rows.any():
                continue
            mine, fitted = np.expm1(errors[rows]), np.abs(np.expm1(now[rows])).mean()
            means[kind].append(float(np.abs(mine).mean()))
            band = bands.get(kind) or next(iter(bands.values()))
            inside = int((np.abs(errors[rows] - band.middle) <= band.half).sum())
            covered, total = covered + inside, total + len(mine)
            print(
                f"{source:12} {'warm' if kind else 'cold'}  {len(mine):4} rows   fitted {fitted:6.1%}"
                f"   left out {means[kind][-1]:6.1%}   bias {float(mine.mean()):+6.1%}"
                f"   in band {inside / len(mine):4.0%}",
                flush=True,
            )
    for kind, name in ((True, "warm"), (False, "cold")):
        print(f"mean over sources, {name}: {np.mean(means[kind]):.1%}")
    print(f"in bands of fits without the source: {covered / total:.0%} of {total} rows")


def print_left_out_exactly(fit: Fit, sources: Sequence[str]) -> None:
    """Prints the left-out errors of fits from scratch without each source."""
    for source in sources:
        out = left_out(fit, source)
        for kind in (True, False):
            mine = np.expm1(out.log_error[out.is_warm == kind])
            if len(mine):
                print(
                    f"{source:12} {'warm' if kind else 'cold'}  {len(mine):4} rows   left out exactly"
                    f" {float(np.abs(mine).mean()):6.1%}   bias {float(mine.mean()):+6.1%}",
                    flush=True,
                )


def print_mechanisms(fit: Fit) -> None:
    """Prints the errors of the rows that depend on each mechanism, without it and with it."""
    measured = np.array([run.measured_s for run in fit.runs])
    now = np.exp(fit.linear.log_s)
    for name, off in OFF.items():
        without = times_s(fit.runs, off)
        changed = np.abs(without / now - 1.0) > CHANGE_SHARE
        if changed.any():
            before = mean_error(without[changed], measured[changed])
            after = mean_error(now[changed], measured[changed])
            bias = float((without[changed] / measured[changed] - 1.0).mean())
            print(
                f"{name:46} {int(changed.sum()):4} rows   {before:6.1%} (bias {bias:+6.1%}) -> {after:6.1%}",
                flush=True,
            )


def draw(fit: Fit, folder: Path) -> None:
    """Draws predicted over measured times, one panel per source."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot, ticker

    matplotlib.rcParams.update({"svg.hashsalt": "shardwise", "svg.fonttype": "none"})
    measured = np.array([run.measured_s for run in fit.runs])
    ratio = np.exp(fit.linear.log_s) / measured
    names = sources_of(fit.runs)
    sources = list(dict.fromkeys(names.tolist()))
    figure, axes = pyplot.subplots(4, 3, figsize=(10, 11), sharey=True, constrained_layout=True)
    for axis, source in zip(axes.flat, sources, strict=False):
        mine = names == source
        axis.axhspan(0.9, 1.1, color="0.92", zorder=0)
        axis.axhline(1.0, color="0.4", linewidth=0.8)
        axis.scatter(measured[mine], ratio[mine], s=9, alpha=0.6, linewidths=0)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 3.0)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_yscale("log", base=2)
        axis.set_ylim(0.45, 2.0)
        axis.set_yticks([0.5, 0.7, 1.0, 1.4, 2.0], labels=["0.5", "0.7", "1", "1.4", "2"])
        error = mean_error(ratio[mine], np.ones(int(mine.sum())))
        axis.set_title(f"{source}: {int(mine.sum())} rows, {error:.1%}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("measured step time, s")
    for axis in axes[:, 0]:
        axis.set_ylabel("predicted / measured")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "accuracy.svg", metadata={"Date": None})
    figure.savefig(folder / "accuracy.png", dpi=110)


def main(arguments: Sequence[str]) -> None:
    if unknown := [word for word in arguments if word.startswith("-")]:
        raise SystemExit(f"{unknown[0]}: no such option; [FOLDER] or exactly [SOURCE ...]")
    fit = shipped_fit()
    if arguments[:1] == ["exactly"]:
        print_left_out_exactly(fit, arguments[1:] or list(dict.fromkeys(sources_of(fit.runs).tolist())))
        return
    if arguments:
        draw(fit, Path(arguments[0]))
    print_mechanisms(fit)
    print_left_out(fit)


if __name__ == "__main__":
    main(sys.argv[1:])
