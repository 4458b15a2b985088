"""Compares a run under an uneven plan with the same model on one process."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.runtime.equality import LR, MAX_NORM, Difference, Gradients, Trajectory, difference, whole_module
from tests.runtime.jobs import uneven
from tests.runtime.mutation import with_mutant
from tests.runtime.uneven_mutants import MUTANTS

from shardwise.plans import Plan
from shardwise.runtime import parallelize
from shardwise.runtime.modules import TABLE
from shardwise.runtime.workers import Report


def divided_unevenly(
    report: Report, plan: Plan, expected: Trajectory, seed: int, broken: str | None = None
) -> Difference:
    """On every rank: the difference of the run under `plan` from `expected`. `broken` names a mutant to
    run."""
    with with_mutant(MUTANTS, broken):
        job = uneven(parallelize(whole_module(plan.model, seed), plan, lr=LR, max_norm=MAX_NORM))
        return difference(job, expected, seed, _gradient_error, [own for own, _ in job.owned.parameters])


def _gradient_error(job: Any, expected: Gradients) -> float:
    """The largest error of the gradients that this rank holds."""
    floor = 1e-3 * max(float(np.abs(gradient).max()) for gradient in expected.values())
    names = {} if job.stage is None else {id(p): name for name, p in job.stage.named_parameters()}
    worst, elements = 0.0, 0
    gradients = job.owned.gathered_regions([own.grad for own, _ in job.owned.parameters])
    for (parameter, region, _), values in zip(job.owned.regions, gradients, strict=True):
        whole = expected.get(names[id(parameter)], expected[TABLE])
        right = whole[tuple(slice(*ends) for ends in region[: whole.ndim])]
        error = np.abs(values.numpy() - right.flatten()).max() / max(float(np.abs(whole).max()), floor)
        worst = max(worst, float(np.nan_to_num(error, nan=np.inf)))
        elements += values.numel()
    local_elements = sum(
        p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in job.parameters
    )
    return worst if elements == local_elements else float("inf")
