"""Errors on runs that nothing was fitted to: `python -m benchmarks.left_out [--write]`.

Each source, each kind of software and each device is left out in turn, all numbers are fitted anew to the
other runs, and the runs that were left out are predicted: their times, the order of plans of one workload,
and what one, two or three measured steps of the left-out machine change. `--write` writes these figures to
`accuracy/data/left_out.json`, which `shardwise validate` and docs/accuracy.md show, and the best measured
runs to `cluster/data/best_runs.json`. Takes two CPU minutes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from benchmarks.accuracy import shipped_fit
from numpy.typing import NDArray

from shardwise.accuracy import StepSample
from shardwise.accuracy.calibration.few_steps import (
    linearised_steps,
    posterior,
    strength_of,
)
from shardwise.accuracy.cross_validation import Floats, Mask, is_warm, sources_of
from shardwise.accuracy.fit import (
    Fit,
    Linear,
    MeasuredRun,
    Numbers,
    chosen_strategies,
    fitted,
    gauss_newton_step,
    predicted_log_s,
    problems_with,
    source_weights,
    with_log_changes,
)
from shardwise.accuracy.left_out import LEFT_OUT, CurvePoint, LeftOutGroup
from shardwise.accuracy.validate import LEAST_PLANS, ModelSizes, job_of, kendall_tau, regret
from shardwise.cluster import find_device
from shardwise.cluster.best_runs import BEST_RUNS, BestRun
from shardwise.model import model_flop_per_token
from shardwise.strategy import kind_of_profile

STEPS = 2
"""Gauss-Newton steps of a fit without a group, after the step on the derivatives of the whole fit; two more
change no error by more than 0.3 points."""

DRAWS = 40
"""Draws of measured steps from each machine."""

MOST_MEASURED = 3
"""Most measured steps of the learning curve."""

GROUPINGS: Mapping[str, Callable[[MeasuredRun], str]] = {
    "source": lambda run: run.case.row.group,
    "software": lambda run: kind_of_profile(run.case.problem.profile.name),
    "device": lambda run: run.case.problem.device.name,
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Runs that were left out, with the strategies that they are assumed to have run, and the numbers that
    are fitted to all others. `log_error` (runs,) is the logarithm of predicted over measured time."""

    runs: tuple[MeasuredRun, ...]
    numbers: Numbers
    log_error: Floats


class LeavingOut:
    """Fits without some runs; groups with the same runs share one."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.measured = np.log([run.measured_s for run in fit.runs])
        self._found: dict[bytes, LeftOut] = {}

    def without(self, out: Mask) -> LeftOut:
        """The fit without the runs in `out` (runs,)."""
        key = out.tobytes()
        if key not in self._found:
            self._found[key] = self._without(out)
        return self._found[key]

    def _without(self, out: Mask) -> LeftOut:
        fit = self.fit
        remaining = [run for run, is_out in zip(fit.runs, out, strict=True) if not is_out]
        linear = Linear(fit.linear.names, fit.linear.log_s[~out], fit.linear.slopes[~out])
        step = gauss_newton_step(
            linear, self.measured[~out], source_weights(remaining), fit.numbers, largest=np.inf
        )
        numbers = fitted(
            [run.case for run in remaining],
            [run.measured_s for run in remaining],
            with_log_changes(fit.numbers, linear.names, step),
            rounds=1,
            steps=STEPS,
        ).numbers
        runs = [run for run, is_out in zip(fit.runs, out, strict=True) if is_out]
        chosen = chosen_strategies([run.case for run in runs], numbers)
        runs = [replace(run, strategy=strategy) for run, strategy in zip(runs, chosen, strict=True)]
        return LeftOut(tuple(runs), numbers, predicted_log_s(runs, numbers) - self.measured[out])


def mean_error(logs: Floats) -> float:
    return float(np.abs(np.expm1(logs)).mean())


def groups_of(leaving: LeavingOut) -> Iterator[LeftOutGroup]:
    """Every source, kind of software and device, left out."""
    runs = leaving.fit.runs
    in_sample = leaving.fit.linear.log_s - leaving.measured
    for kind, name_of in GROUPINGS.items():
        names = np.array([name_of(run) for run in runs])
        for name in dict.fromkeys(names.tolist()):
            out = names == name
            found = leaving.without(out)
            orders = list(orders_of(found))
            print(f"{kind} {name}: {mean_error(found.log_error):.1%}", file=sys.stderr, flush=True)
            yield LeftOutGroup(
                kind=kind,
                name=name,
                rows=int(out.sum()),
                warm=float(is_warm_without(runs, out)[out].mean()),
                fitted=mean_error(in_sample[out]),
                error=mean_error(found.log_error),
                bias=float(np.expm1(found.log_error).mean()),
                with_constant=mean_error(found.log_error - np.median(found.log_error)),
                workloads=len(orders),
                tau=float(np.mean([tau for tau, _ in orders])) if orders else None,
                mean_regret=float(np.mean([loss for _, loss in orders])) if orders else None,
                worst_regret=max((loss for _, loss in orders), default=None),
            )


def is_warm_without(runs: Sequence[MeasuredRun], out: Mask) -> Mask:
    """Whether the other runs have the device and the software of each run, shape (runs,)."""
    marked = [
        replace(run, case=replace(run.case, row=replace(run.case.row, id=f"{'out' if is_out else 'in'}-1")))
        for run, is_out in zip(runs, out, strict=True)
    ]
    return is_warm(marked, {"out"})


def orders_of(found: LeftOut) -> Iterator[tuple[float, float]]:
    """Kendall's tau and the regret of each workload with enough plans."""
    groups: dict[Any, list[int]] = {}
    sizes = ModelSizes()
    for place, run in enumerate(found.runs):
        job = job_of(run.case.row, sizes.number_of(run.case.problem.model))
        groups.setdefault(job, []).append(place)
    measured = np.array([run.measured_s for run in found.runs])
    predicted = measured * np.exp(found.log_error)
    for rows in groups.values():
        tau = kendall_tau(measured[rows].tolist(), predicted[rows].tolist())
        if len(rows) >= LEAST_PLANS and tau is not None:
            yield tau, regret(measured[rows].tolist(), predicted[rows].tolist())


# Measured steps of the machine that was left out


@dataclass(frozen=True, slots=True)
class Machine:
    """The runs of one source on one kind of device with one software: the logarithms of measured over
    predicted time (runs,), their derivatives (runs, 4), and the workload of each run."""

    source: str
    excess: Floats
    slopes: Floats
    workloads: NDArray[np.int64]


def machines_of(leaving: LeavingOut) -> Iterator[Machine]:
    """The machines of all sources, each predicted without its source."""
    sources = sources_of(leaving.fit.runs)
    for source in dict.fromkeys(sources.tolist()):
        found = leaving.without(sources == source)
        problems = problems_with([run.case for run in found.runs], found.numbers)
        samples = [
            StepSample(
                problem=problem, strategy=run.case.strategies[run.strategy], seconds=run.measured_s,
                name=run.case.row.id,
            )
            for run, problem in zip(found.runs, problems, strict=True)
        ]  # fmt: skip
        log_s, slopes = linearised_steps(samples, np.zeros(4))
        excess = np.log([sample.seconds for sample in samples]) - log_s
        keys = [(each.problem.device.name, each.problem.profile.name) for each in samples]
        for key in dict.fromkeys(keys):
            rows = [place for place, one in enumerate(keys) if one == key]
            kinds = {workload: n for n, workload in enumerate({samples[row].workload: 0 for row in rows})}
            own = np.array([kinds[samples[row].workload] for row in rows])
            yield Machine(source, excess[rows], slopes[rows], own)


def curve_of(machines: Sequence[Machine]) -> Iterator[CurvePoint]:
    """The error on other runs of a machine after some measured steps: those of the model that was measured,
    and those of other models. Each source counts once."""
    rng = np.random.default_rng(0)
    for steps in range(1, MOST_MEASURED + 1):
        for kind in ("same model", "other models"):
            before: dict[str, list[float]] = {}
            after: dict[str, list[float]] = {}
            for machine in machines:
                for picked, rest in draws_of(machine, steps, kind, rng):
                    before.setdefault(machine.source, []).append(mean_error(-machine.excess[rest]))
                    after.setdefault(machine.source, []).append(mean_error(corrected(machine, picked, rest)))
            yield CurvePoint(
                kind=kind,
                steps=steps,
                sources=len(after),
                before=float(np.mean([np.mean(one) for one in before.values()])),
                after=float(np.mean([np.mean(one) for one in after.values()])),
            )


def draws_of(
    machine: Machine, steps: int, kind: str, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Runs that are measured, and runs that are predicted with them."""
    everyone = np.arange(len(machine.excess))
    for _ in range(DRAWS):
        pool = everyone
        if kind == "same model":
            pool = np.flatnonzero(machine.workloads == rng.choice(machine.workloads))
        if len(pool) <= steps:
            continue
        picked = rng.choice(pool, steps, replace=False)
        rest = np.setdiff1d(pool, picked)
        if kind == "other models":
            rest = rest[~np.isin(machine.workloads[rest], machine.workloads[picked])]
        if len(rest):
            yield picked, rest


def corrected(machine: Machine, picked: NDArray[np.int64], rest: NDArray[np.int64]) -> Floats:
    """The logarithms of predicted over measured time of the `rest`, with factors from the `picked` runs."""
    kinds = list(dict.fromkeys(machine.workloads[picked].tolist()))
    shared = np.array([[float(own == kind) for kind in kinds] for own in machine.workloads.tolist()])
    excess, slopes = machine.excess[picked], machine.slopes[picked]
    strength, _ = strength_of(excess, slopes, shared[picked])
    found = posterior(excess, slopes, shared[picked], strength)
    logs: Floats = machine.slopes[rest] @ found.parts + shared[rest] @ found.workloads - machine.excess[rest]
    return logs


PROVENANCE = "python -m benchmarks.left_out --write"


def record_of(leaving: LeavingOut) -> dict[str, object]:
    """The content of the data file of left-out runs."""
    groups = [asdict(group) for group in groups_of(leaving)]
    points = [asdict(point) for point in curve_of(list(machines_of(leaving)))]
    return {"provenance": PROVENANCE, "groups": groups, "curve": points}


def best_runs_of(runs: Sequence[MeasuredRun]) -> Iterator[BestRun]:
    """The run with the best utilisation of each device and number format."""
    groups: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for run in runs:
        problem = run.case.problem
        tokens = problem.job.global_batch_size * problem.job.seq_len / problem.cluster.devices
        flop = tokens * model_flop_per_token(problem.model, problem.job.attention_len, causal_half=True)
        peak = find_device(problem.device.name).peak_flop_per_s[problem.recipe.matmul]
        key = (problem.device.name, problem.job.dtype)
        groups.setdefault(key, []).append((flop / run.measured_s / peak, run.case.row.id))
    for (device, dtype), found in groups.items():
        mfu, row = max(found)
        yield BestRun(device=device, dtype=dtype, mfu=mfu, row=row, runs=len(found))


def rounded(value: object) -> object:
    """Numbers with four decimal places, so that the file changes only where a figure does."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, dict) else value


def text_of(record: Any) -> str:
    """The data file: one line for each group and each point."""
    lists = [
        f' "{name}": [\n  ' + ",\n  ".join(json.dumps(one) for one in record[name]) + "\n ]"
        for name in record
        if name != "provenance"
    ]
    return '{\n "provenance": ' + json.dumps(record["provenance"]) + ",\n" + ",\n".join(lists) + "\n}\n"


def main(arguments: Sequence[str]) -> int:
    if unknown := [word for word in arguments if word != "--write"]:
        raise SystemExit(f"{unknown[0]}: no such option; [--write]")
    fit = shipped_fit()
    best: object = {"provenance": PROVENANCE, "runs": [asdict(run) for run in best_runs_of(fit.runs)]}
    records = {BEST_RUNS: best, LEFT_OUT: record_of(LeavingOut(fit))}
    for path, record in records.items():
        text = text_of(rounded(record))
        print(text)
        if arguments:
            path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
