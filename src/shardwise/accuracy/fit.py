"""Fits the numbers of devices and software to measured step times.

The fit minimises the absolute errors of the logarithm of step times (a Huber loss), by Gauss-Newton steps on
iteratively reweighted least squares. So an outlier (a slow node, thrashing memory) counts no more than any
other run. All numbers are positive, and a step multiplies them by factors. `bounded_least_squares` keeps them
in their ranges. The derivatives of a run come from one evaluation of a strategy table. Its rows are the same
strategy, each with one number changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.accuracy.case import Case
from shardwise.accuracy.predict import chosen_row
from shardwise.cluster import Device, efficiency_numbers, numbers_of_device, with_efficiency
from shardwise.cost import Problem, bind
from shardwise.numbers import Number
from shardwise.search import step_figures_of
from shardwise.strategy import Profile, StrategyTable, numbers_of_profile, profile_numbers, profile_of

Floats = NDArray[np.float64]

# Bounded least squares
SLACK = 1e-12
"""Smallest multiplier that frees a number from its bound, as a share of the largest right-hand side; it
absorbs rounding errors."""


def bounded_least_squares(matrix: Floats, right: Floats, low: Floats, high: Floats) -> Floats:
    """The x between `low` and `high` that minimises x'Mx / 2 - r'x; all vectors have shape (n,).

    `matrix` M (n, n) is positive definite, such as the matrix of normal equations; `right` is r. This is the
    active-set method of bounded-variable least squares (BVLS; Stark and Parker 1995). A number that would
    leave its range becomes active at its bound, and the free numbers are solved for again. The active number
    with the largest positive multiplier becomes free. Every solve lowers the objective, so no active set
    repeats.
    """
    found: Floats = np.clip(0.0, low, high)
    active = low >= high
    slack = SLACK * max(float(np.abs(right).max(initial=0.0)), 1e-300)
    while True:
        active = _solve_free(matrix, right, low, high, found, active)
        downhill = right - matrix @ found
        inward = np.where(found <= low, downhill, -downhill)
        multipliers = np.where(active & (low < high), inward, -np.inf)
        if not len(multipliers) or multipliers.max() <= slack:
            return found
        active[int(multipliers.argmax())] = False


def _solve_free(
    matrix: Floats, right: Floats, low: Floats, high: Floats, found: Floats, active: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Moves `found` to the minimum over the free numbers and returns the new active set.

    Numbers that meet a bound on the way become active."""
    active = active.copy()
    while not active.all():
        free = np.flatnonzero(~active)
        known = right[free] - matrix[np.ix_(free, np.flatnonzero(active))] @ found[active]
        solution = np.linalg.solve(matrix[np.ix_(free, free)], known)
        direction = solution - found[free]
        bound = np.where(direction > 0.0, high[free], low[free])
        violating = (solution < low[free]) | (solution > high[free])
        if not violating.any():
            found[free] = solution
            break
        shares = np.full(len(free), np.inf)
        shares[violating] = (bound[violating] - found[free][violating]) / direction[violating]
        first = int(shares.argmin())
        found[free] = np.clip(found[free] + shares[first] * direction, low[free], high[free])
        found[free[first]] = bound[first]
        active[free[first]] = True
    return active


# Numbers, platforms and linearised predictions
DERIVATIVE_STEP = 0.02
"""Change of the logarithm of a number for its finite difference."""

MAX_LOG_CHANGE = 0.4
"""Trust region: largest change of the logarithm of a number in one step."""

SMALLEST_RESIDUAL = 0.01
"""Threshold of the Huber loss: smaller log errors count as squares, larger ones by their absolute value."""

REWEIGHTINGS = 25
"""Reweighted least-squares iterations per Gauss-Newton step, on the same derivatives."""

SHRINKAGE = 0.003
"""Weight of the penalty that draws numbers of one field to their mean, relative to the weight of a run."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """All numbers of predictions: those of devices, and those of software."""

    devices: tuple[Number, ...]
    software: tuple[Number, ...]

    @staticmethod
    def shipped() -> Numbers:
        """The numbers that the package ships."""
        return Numbers(efficiency_numbers(), profile_numbers())

    @property
    def all(self) -> tuple[Number, ...]:
        return (*self.devices, *self.software)

    def with_values(self, values: Mapping[str, Any]) -> Numbers:
        """The numbers with other values by name (`devices ...`, `software ...`). A value may be a column."""
        return Numbers(
            tuple(replace(n, value=values.get(f"devices {n.name}", n.value)) for n in self.devices),
            tuple(replace(n, value=values.get(f"software {n.name}", n.value)) for n in self.software),
        )

    def from_scratch(self) -> Numbers:
        """These numbers with every fitted number at its initial value."""
        return self.with_values({name: initial_value(name) for name in self.fitted()})

    def fitted(self) -> dict[str, float]:
        """The values that are fitted, by name."""
        return {f"devices {n.name}": n.value for n in self.devices if n.is_fitted} | {
            f"software {n.name}": n.value for n in self.software if n.is_fitted
        }


@dataclass(frozen=True, slots=True)
class Platform:
    """A kind of device with its software, which share the numbers that predictions depend on."""

    device: Device
    profile: Profile

    def under(self, numbers: Numbers) -> Platform:
        """This platform with other numbers."""
        profile = profile_of(self.profile.name, numbers.software)
        if self.profile == self.profile.without_overlap():
            profile = profile.without_overlap()
        return Platform(with_efficiency(self.device, numbers.devices), profile)

    def problem(self, case: Case, *, is_columnar: bool = False) -> Problem:
        """The problem of a case on this platform."""
        cluster = replace(case.problem.cluster, classes={self.device.name: self.device})
        job = replace(case.problem.job, profile=self.profile)
        return bind(case.problem.model, cluster, job, is_columnar=is_columnar)


def platforms_of(cases: Iterable[Case]) -> list[tuple[Platform, list[int]]]:
    """Every platform of the cases, with the indices of its cases."""
    platforms: dict[Hashable, tuple[Platform, list[int]]] = {}
    for place, case in enumerate(cases):
        platform = Platform(case.problem.device, case.problem.profile)
        key = (id(platform.device), platform.profile)
        platforms.setdefault(key, (platform, []))[1].append(place)
    return list(platforms.values())


def problem_with(case: Case, numbers: Numbers) -> Problem:
    """The problem of a case with other numbers."""
    return Platform(case.problem.device, case.problem.profile).under(numbers).problem(case)


def problems_with(cases: Sequence[Case], numbers: Numbers) -> list[Problem]:
    """The problems of all cases with other numbers; cases on one platform share its device and profile."""
    found: dict[int, Problem] = {}
    for platform, places in platforms_of(cases):
        changed = platform.under(numbers)
        found |= {place: changed.problem(cases[place]) for place in places}
    return [found[place] for place in range(len(cases))]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A case with its measured time and the row of the strategy that it is assumed to have run."""

    case: Case
    strategy: int
    measured_s: float

    def table(self, rows: int) -> StrategyTable:
        """A table that repeats the strategy `rows` times."""
        return self.case.strategies.take(np.full(rows, self.strategy))


def names_of(platform: Platform, numbers: Numbers) -> list[str]:
    """The names of the fitted numbers that predictions on a platform may depend on."""
    devices = numbers_of_device(platform.device, numbers.devices)
    software = numbers_of_profile(platform.profile.name, numbers.software)
    return [f"devices {n.name}" for n in devices if n.is_fitted] + [
        f"software {n.name}" for n in software if n.is_fitted
    ]


def chosen_strategy(case: Case, numbers: Numbers) -> int:
    """The row of the strategy that the case is assumed to have run, chosen with these numbers."""
    return chosen_strategies([case], numbers)[0]


def chosen_strategies(cases: Sequence[Case], numbers: Numbers) -> list[int]:
    """`chosen_strategy` of every case."""
    firsts, which = _distinct((id(case.problem), id(case.strategies)) for case in cases)
    chosen = [0] * len(firsts)
    several = [place for place, first in enumerate(firsts) if len(cases[first].strategies) > 1]
    for start in range(0, len(several), RUNS_AT_A_TIME):
        places = several[start : start + RUNS_AT_A_TIME]
        part = [cases[firsts[place]] for place in places]
        problems = problems_with(part, numbers)
        figures = step_figures_of(problems, [case.strategies for case in part])
        for place, case, problem, of_case in zip(places, part, problems, figures, strict=True):
            chosen[place] = chosen_row(problem, of_case, slice(0, len(case.strategies)))
    return [chosen[place] for place in which]


RUNS_AT_A_TIME = 1_000
"""Most runs that are evaluated together: about a hundred strategies each with its costs, some 100 kB."""


def _distinct(keys: Iterable[Hashable]) -> tuple[list[int], list[int]]:
    """The place of the first of each equal keys, and for every key which of those it equals."""
    firsts: list[int] = []
    known: dict[Hashable, int] = {}
    which = []
    for place, key in enumerate(keys):
        if key not in known:
            known[key] = len(firsts)
            firsts.append(place)
        which.append(known[key])
    return firsts, which


def _run_key(run: MeasuredRun) -> Hashable:
    """Equal for runs that have the same prediction."""
    return id(run.case.problem), id(run.case.strategies), run.strategy


@dataclass(frozen=True, slots=True)
class Linear:
    """Logarithms of the step times of runs, (runs,), and their derivatives by the logarithms of the named
    numbers, (runs, names)."""

    names: tuple[str, ...]
    log_s: Floats
    slopes: Floats


def linearised(runs: Sequence[MeasuredRun], numbers: Numbers) -> Linear:
    """The predictions of all runs and their derivatives by each fitted number."""
    firsts, which = _distinct(map(_run_key, runs))
    distinct = [runs[first] for first in firsts]
    parts = [
        _linearised(distinct[start : start + RUNS_AT_A_TIME], numbers)
        for start in range(0, len(distinct), RUNS_AT_A_TIME)
    ]
    log_s, slopes = (np.concatenate([getattr(part, name) for part in parts]) for name in ("log_s", "slopes"))
    return Linear(tuple(numbers.fitted()), log_s[which], slopes[which])


def _linearised(runs: Sequence[MeasuredRun], numbers: Numbers) -> Linear:
    names = tuple(numbers.fitted())
    at = {name: index for index, name in enumerate(names)}
    log_s, slopes = np.empty(len(runs)), np.zeros((len(runs), len(names)))
    values = numbers.fitted()
    requests: dict[int, tuple[Problem, StrategyTable, list[str]]] = {}
    for platform, places in platforms_of(run.case for run in runs):
        own = names_of(platform, numbers)
        columns = {}
        for place, name in enumerate(own):
            column = np.full(len(own) + 1, values[name])
            column[place + 1] *= np.exp(DERIVATIVE_STEP)
            columns[name] = column
        changed = platform.under(numbers.with_values(columns))
        for row in places:
            run = runs[row]
            requests[row] = changed.problem(run.case, is_columnar=True), run.table(len(own) + 1), own
    problems, tables, owns = zip(*(requests[row] for row in range(len(runs))), strict=True)
    for row, (figures, own) in enumerate(zip(step_figures_of(problems, tables), owns, strict=True)):
        logs = np.log(figures.step_time_s)
        log_s[row] = logs[0]
        slopes[row, [at[name] for name in own]] = (logs[1:] - logs[0]) / DERIVATIVE_STEP
    return Linear(names, log_s, slopes)


def predicted_log_s(runs: Sequence[MeasuredRun], numbers: Numbers) -> Floats:
    """Logarithms of the predicted step times of all runs."""
    firsts, which = _distinct(map(_run_key, runs))
    times_s: list[float] = []
    for start in range(0, len(firsts), RUNS_AT_A_TIME):
        part = [runs[first] for first in firsts[start : start + RUNS_AT_A_TIME]]
        problems = problems_with([run.case for run in part], numbers)
        found = step_figures_of(problems, [run.table(1) for run in part])
        times_s += [float(figures.step_time_s[0]) for figures in found]
    log_s: Floats = np.log(times_s)[which]
    return log_s


# The fit
@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted numbers, the runs with their assumed strategies, and the linearised predictions. `is_cut` says
    that there was no time for all steps."""

    numbers: Numbers
    runs: tuple[MeasuredRun, ...]
    linear: Linear
    is_cut: bool = False


def fitted(
    cases: Sequence[Case],
    measured_s: Sequence[float],
    start: Numbers,
    *,
    rounds: int = 2,
    steps: int = 10,
    has_time: Callable[[], bool] = lambda: True,
    progress: Callable[[str], None] | None = None,
) -> Fit:
    """Fits the numbers to measured step times, from `start`.

    Each round first chooses for every case the fastest predicted strategy that fits. It then makes at most
    `steps` Gauss-Newton steps. `has_time` is called before each round but the first and before each step: the
    fit ends where it returns False. `progress` is called with a text that says how far the fit is.
    """
    numbers, is_cut = start, False
    for number in range(rounds):
        if number and not has_time():
            is_cut = True
            break
        show = _shown(progress, f"round {number + 1} of {rounds}")
        show("strategies")
        chosen = chosen_strategies(cases, numbers)
        runs = tuple(
            MeasuredRun(case=case, strategy=strategy, measured_s=measured)
            for case, strategy, measured in zip(cases, chosen, measured_s, strict=True)
        )
        numbers, linear, is_cut = _gauss_newton(runs, numbers, steps, has_time, show)
    return Fit(numbers=numbers, runs=runs, linear=linear, is_cut=is_cut)


def _shown(progress: Callable[[str], None] | None, before: str) -> Callable[[str], None]:
    return (lambda _: None) if progress is None else (lambda text: progress(f"{before}, {text}"))


def _gauss_newton(
    runs: Sequence[MeasuredRun],
    numbers: Numbers,
    steps: int,
    has_time: Callable[[], bool],
    show: Callable[[str], None],
) -> tuple[Numbers, Linear, bool]:
    """Numbers and predictions after at most `steps` steps, or at convergence, and whether there was no time
    for more. The loss never increases."""
    target = np.log([run.measured_s for run in runs])
    weights = source_weights(runs)
    show("derivatives")
    accepted = numbers, linearised(runs, numbers)
    best, share = fit_loss(accepted[1], target, weights, numbers), 1.0
    for step in range(steps):
        if not has_time():
            return *accepted, True
        show(f"step {step + 1}")
        log_changes = share * gauss_newton_step(accepted[1], target, weights, accepted[0])
        changed = with_log_changes(accepted[0], accepted[1].names, log_changes)
        linear = linearised(runs, changed)
        cost = fit_loss(linear, target, weights, changed)
        if cost < best:
            best, accepted, share = cost, (changed, linear), min(2.0 * share, 1.0)
        else:
            share /= 2.0
        if np.abs(log_changes).max() < 0.01:
            break
    return *accepted, False


def fit_loss(linear: Linear, target: Floats, weights: Floats, numbers: Numbers) -> float:
    """The objective of a fit: the weighted Huber loss of the log errors plus the shrinkage penalty."""
    sizes = np.abs(linear.log_s - target)
    errors = np.where(
        sizes < SMALLEST_RESIDUAL, sizes**2 / 2.0, SMALLEST_RESIDUAL * (sizes - SMALLEST_RESIDUAL / 2.0)
    )
    curves, slopes = shrinkage_of(numbers, linear.names)
    return float(weights @ errors + SHRINKAGE / 2.0 * slopes @ np.linalg.solve(curves, slopes))


SOURCE_WEIGHTS: Mapping[str, float] = {"vtrain-sn": 0.4, "vtrain-mn": 3.0, "simumax": 0.4}
"""Extra weights of sources: low for single-node sweeps of tiny and of truncated models, high for the sweep of
layouts."""


def source_weights(runs: Sequence[MeasuredRun]) -> Floats:
    """Weights of the runs, (runs,): a source weighs the square root of its number of runs, so that large
    tables do not dominate."""
    counts = Counter(run.case.row.group for run in runs)
    groups = [run.case.row.group for run in runs]
    return np.array([SOURCE_WEIGHTS.get(group, 1.0) * counts[group] ** -0.5 for group in groups])


def gauss_newton_step(
    linear: Linear, target: Floats, weights: Floats, numbers: Numbers, *, largest: float = MAX_LOG_CHANGE
) -> Floats:
    """The log changes of the numbers, (names,), that minimise the loss of the linearised predictions.

    All changes stay within the trust region `largest` and keep every number within its range.
    """
    curves, slopes = shrinkage_of(numbers, linear.names)
    low, high = log_change_bounds(numbers, linear.names, largest)
    log_changes = np.zeros(len(slopes))
    for _ in range(REWEIGHTINGS):
        residual = linear.log_s + linear.slopes @ log_changes - target
        rows = weights * np.minimum(1.0, SMALLEST_RESIDUAL / np.maximum(np.abs(residual), 1e-12))
        weighed = linear.slopes.T * rows
        matrix = weighed @ linear.slopes + SHRINKAGE * curves
        right = weighed @ (target - linear.log_s) - SHRINKAGE * slopes
        log_changes = bounded_least_squares(matrix, right, low, high)
    return log_changes


def log_change_bounds(numbers: Numbers, names: Sequence[str], largest: float) -> tuple[Floats, Floats]:
    """Lower and upper bounds of the log change of each number: within its range, and at most `largest`."""
    values = numbers.fitted()
    spans = np.log([[end / values[name] for end in range_of(name)] for name in names])
    low, high = np.clip(spans, -largest, largest).T
    return low, high


def shrinkage_of(numbers: Numbers, names: Sequence[str]) -> tuple[Floats, Floats]:
    """Second derivatives (n, n) and gradient (n,) of the shrinkage penalty at these numbers.

    The penalty is half the sum of squared distances of the logarithms of the numbers of one field from their
    mean; the field's initial value counts as one of them. So a number that no run depends on becomes that
    mean, whatever its initial value.
    """
    values = numbers.fitted()
    fields = [field_of(name) for name in names]
    same_field = np.array([[one == other for other in fields] for one in fields], np.float64)
    curves = np.eye(len(names)) - same_field / (1.0 + same_field.sum(axis=1))
    away = np.log([values[name] / initial_value(name) for name in names])
    return curves, curves @ away


def field_of(name: str) -> str:
    """The field of a number: the last word of its name."""
    return name.rsplit(" ", 1)[-1]


def initial_value(name: str) -> float:
    """The initial value of a number, by its field."""
    field = field_of(name)
    return next(value for end, value in INITIAL_VALUES.items() if field.endswith(end))


INITIAL_VALUES: Mapping[str, float] = {
    "matmul.peak_fraction": 0.65, "matmul.k_half": 64.0, "fp4_fraction": 1.0,
    "grouped_matmul.fraction": 0.8, "tokens_half": 64.0, "forward_fraction": 0.45, "backward_fraction": 0.32,
    "scale_up.startup_s": 1e-5, "scale_out.startup_s": 4e-5, "launch_s": 5e-6, "pointwise_passes": 2.0,
    "expert_dispatch_s": 2e-3, "dispatch_s": 7e-5, "host_step_s": 5e-3, "tensor_overlap": 0.2, "overlap": 0.5,
}  # fmt: skip
"""Initial values of a fit by the end of a field's name; fractions of the device's rate, seconds, or plain
numbers."""


def with_log_changes(numbers: Numbers, names: Iterable[str], log_changes: Floats) -> Numbers:
    """The numbers, each multiplied by the exponential of its log change and clipped to its range."""
    now = numbers.fitted()
    return numbers.with_values(
        {
            name: clip_to_range(name, now[name] * float(np.exp(log_change)))
            for name, log_change in zip(names, log_changes, strict=True)
        }
    )


def clip_to_range(name: str, value: float) -> float:
    """The value, clipped to the range of the number `name`."""
    low, high = range_of(name)
    return min(max(value, low), high)


def range_of(name: str) -> tuple[float, float]:
    """The lower and upper bound of a number."""
    return next((span for word, span in RANGES.items() if name.endswith(word)), (1e-12, np.inf))


RANGES: Mapping[str, tuple[float, float]] = {
    "fp4_fraction": (0.2, 1.5), "grouped_matmul.fraction": (0.2, 1.0), "fraction": (0.05, 0.98),
    "overlap": (0.02, 1.0), "pointwise_passes": (0.5, 6.0),
}  # fmt: skip
"""Physical ranges by the end of a number's name: no kernel is faster than its device."""
