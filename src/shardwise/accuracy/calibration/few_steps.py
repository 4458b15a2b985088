"""Fits a few numbers to one to twenty measured steps of any software, with the shipped numbers as a prior.

The numbers are the four factors of `TimeFactors`, and a factor for each workload (a model in a number format)
that was measured. Their logarithms are normal around 0, and so is the error of a step: the fit is the
posterior mean, which is a ridge regression on logarithms of times. The spreads below are those of sources
that are left out of the fit of the shipped numbers (`python -m benchmarks.calibration`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import Device
from shardwise.cost import Problem, bind
from shardwise.errors import ConfigError
from shardwise.model import parameters
from shardwise.search import step_figures_of
from shardwise.strategy import Profile, Strategy, StrategyTable, TimeFactors, WorkloadFactor

Floats = NDArray[np.float64]
Workload = tuple[int, str]
"""Parameters of a model, and its number format."""

PARTS: Final = ("kernels", "node_links", "network", "host")
"""The factors of `TimeFactors`, in the order of columns."""

COMMON_SPREAD: Final = 0.10
"""Standard deviation of the logarithm of a factor that all parts of a machine share."""

PART_SPREAD: Final = 0.15
"""Standard deviation of the logarithm of each part's own factor."""

WORKLOAD_SPREAD: Final = 0.15
"""Standard deviation of the logarithm of the factor of a workload."""

STEP_SPREAD: Final = 0.08
"""Standard deviation of the logarithm of a step around all of these: its plan, and noise."""

STRENGTHS: Final = (1.0, 0.25, 0.0)
"""Factors on the variances of the prior, of which the one with the least left-out error counts; 0 changes no
number."""

MOST_STEPS: Final = 20
"""Most measured steps of this fit; `shardwise fit` fits the numbers themselves to more."""

DIFFERENCE: Final = 0.02
"""Change of the logarithm of a factor for its derivative."""

ROUNDS, CONVERGED = 8, 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """A strategy that ran a problem, and the seconds of a typical step; `name` is that of its row or file."""

    problem: Problem
    strategy: Strategy
    seconds: float
    name: str

    @property
    def workload(self) -> Workload:
        """What the sample shares a factor with."""
        return parameters(self.problem.model), self.problem.job.dtype

    def on(self, device: Device, profile: Profile) -> StepSample:
        """The sample on another device, with other software."""
        problem = self.problem
        cluster = replace(problem.cluster, classes={name: device for name in problem.cluster.classes})
        job = replace(problem.job, profile=profile)
        return replace(self, problem=bind(problem.model, cluster, job))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """Factors that explain measured steps.

    Errors are means of absolute values of predicted over measured time, minus 1: `before` with the shipped
    numbers, `after` with the factors, `left_out` with factors from the other steps (None for one step).
    `residuals` has the error of each step with the factors."""

    factors: TimeFactors
    workloads: tuple[WorkloadFactor, ...]
    strength: float
    before: float
    after: float
    left_out: float | None
    residuals: Mapping[str, float]


def fit_steps(samples: Sequence[StepSample]) -> StepFit:
    """The factors that fit the `samples` of one kind of device and one software.

    With several steps each is left out once, and the prior is as strong as predicts it best: predictions of
    left-out steps are never worse than without the fit. Raises ConfigError for no step, for too many, and for
    several devices or software."""
    _require_one_machine(samples)
    measured = np.log([sample.seconds for sample in samples])
    log_s, slopes = linearised_steps(samples, np.zeros(len(PARTS)))
    shared = _shared(samples)
    strength, left_out = strength_of(measured - log_s, slopes, shared)
    found = posterior(measured - log_s, slopes, shared, strength)
    before = log_s - measured
    for _ in range(ROUNDS):
        log_s, slopes = linearised_steps(samples, found.parts)
        latest, found = found, posterior(measured - log_s + slopes @ found.parts, slopes, shared, strength)
        if np.abs(found.parts - latest.parts).max() < CONVERGED:
            break
    log_s, _ = linearised_steps(samples, found.parts)
    after = log_s + shared @ found.workloads - measured
    keys = list(dict.fromkeys(sample.workload for sample in samples))
    names = {sample.workload: sample.problem.model.name for sample in reversed(samples)}
    return StepFit(
        factors=_factors(found.parts),
        workloads=tuple(
            WorkloadFactor(
                model=names[key], parameters=key[0], dtype=key[1], time_factor=float(np.exp(value))
            )
            for key, value in zip(keys, found.workloads.tolist(), strict=True)
            if strength
        ),
        strength=strength,
        before=_mean_error(before),
        after=_mean_error(after),
        left_out=left_out,
        residuals={sample.name: float(value) for sample, value in zip(samples, np.expm1(after), strict=True)},
    )


def _require_one_machine(samples: Sequence[StepSample]) -> None:
    if not 0 < len(samples) <= MOST_STEPS:
        raise ConfigError(
            "are not as many as are fitted together", key="measured steps", found=str(len(samples)),
            allowed=f"1 to {MOST_STEPS}",
        )  # fmt: skip
    for what, names in (
        ("device classes", [name for each in samples for name in each.problem.cluster.classes]),
        ("kinds of software", [each.problem.profile.name for each in samples]),
    ):
        if len(set(names)) > 1:
            raise ConfigError(
                f"have several {what}", key="measured steps", found=", ".join(dict.fromkeys(names)),
                allowed="one at a time",
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Posterior:
    """Logarithms of the factors: of the `parts`, shape (4,), and of the `workloads`, shape (workloads,)."""

    parts: Floats
    workloads: Floats


def posterior(excess: Floats, slopes: Floats, shared: Floats, strength: float) -> Posterior:
    """The most likely logarithms of the factors.

    `excess` (steps,) is the logarithm of measured over predicted time, `slopes` (steps, 4) its derivatives by
    the parts, `shared` (steps, workloads) is 1 where a step is of a workload. `strength` scales the variances
    of the prior; 0 gives zeros."""
    weights = np.linalg.solve(covariance(slopes, shared, strength), excess)
    return Posterior(
        strength * prior() @ slopes.T @ weights, strength * WORKLOAD_SPREAD**2 * shared.T @ weights
    )


def prior() -> Floats:
    """The covariance of the logarithms of the parts, shape (4, 4)."""
    return COMMON_SPREAD**2 + PART_SPREAD**2 * np.eye(len(PARTS))


def covariance(slopes: Floats, shared: Floats, strength: float) -> Floats:
    """The covariance of measured steps around the shipped numbers, shape (steps, steps)."""
    known = slopes @ prior() @ slopes.T + WORKLOAD_SPREAD**2 * shared @ shared.T
    covariances: Floats = strength * known + STEP_SPREAD**2 * np.eye(len(slopes))
    return covariances


def left_out_errors(excess: Floats, slopes: Floats, shared: Floats, strength: float) -> Floats:
    """Predicted over measured time, minus 1, of each step by the fit of the others, shape (steps,)."""
    inverse = np.linalg.inv(covariance(slopes, shared, strength))
    errors: Floats = np.expm1(-(inverse @ excess) / np.diag(inverse))
    return errors


def strength_of(excess: Floats, slopes: Floats, shared: Floats) -> tuple[float, float | None]:
    """The strength with the least left-out error, and that error; of one step the whole strength."""
    if len(excess) == 1:
        return STRENGTHS[0], None
    errors = {
        strength: float(np.abs(left_out_errors(excess, slopes, shared, strength)).mean())
        for strength in STRENGTHS
    }
    best = min(STRENGTHS, key=lambda strength: errors[strength])
    return best, errors[best]


def linearised_steps(samples: Sequence[StepSample], parts: Floats) -> tuple[Floats, Floats]:
    """Logarithms of predicted times with these logarithms of factors, (steps,), and their derivatives,
    (steps, 4)."""
    columns = parts + np.concatenate([np.zeros((1, len(parts))), DIFFERENCE * np.eye(len(parts))])
    factors = TimeFactors(**dict(zip(PARTS, np.exp(columns.T), strict=True)))
    problems, tables = [], []
    for sample in samples:
        problem = sample.problem
        classes = {name: factors.of_device(device) for name, device in problem.cluster.classes.items()}
        job = replace(problem.job, profile=factors.of_software(problem.profile))
        cluster = replace(problem.cluster, classes=classes)
        problems.append(bind(problem.model, cluster, job, is_columnar=True))
        tables.append(StrategyTable.of([sample.strategy] * len(columns)))
    logs = np.log([figures.step_time_s for figures in step_figures_of(problems, tables)])
    return logs[:, 0], (logs[:, 1:] - logs[:, :1]) / DIFFERENCE


def _shared(samples: Sequence[StepSample]) -> Floats:
    """Which step is of which workload, shape (steps, workloads)."""
    keys = list(dict.fromkeys(sample.workload for sample in samples))
    return np.array([[float(sample.workload == key) for key in keys] for sample in samples])


def _factors(parts: Floats) -> TimeFactors:
    return TimeFactors(**dict(zip(PARTS, np.exp(parts).tolist(), strict=True)))


def _mean_error(logs: Floats) -> float:
    return float(np.abs(np.expm1(logs)).mean())
