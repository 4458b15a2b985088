"""Limits of a target in the search: the rejected candidates, the answer and the checker's counts equal those
of listing every candidate.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.checker_records import figures_of, job_of, layers_of
from tests.property.search_instances import Instance, instance

from shardwise.cost import peaks_of
from shardwise.search import BranchAndBound, Fastest
from shardwise.search.step_times import step_times_s
from shardwise.strategy import (
    GRID_RULES,
    INTERLEAVED,
    ORDERS,
    RULES,
    TARGET_LIMIT,
    Limit,
    Strategy,
    StrategyTable,
    first_broken,
)
from shardwise.strategy.target import target_from_record
from shardwise_verify.proof import Prover
from shardwise_verify.reading import record
from shardwise_verify.rules import rejected_counts
from shardwise_verify.space import SpaceDefinition
from shardwise_verify.targets import NO_TARGET_LIMITS, CapabilityRecord, TargetLimits, target_limits_of

WITH_EMPTY_ENDS = (68, 84, 91, 104, 120, 174, 208, 296, 328, 351, 575)
"""Seeds of instances with legal candidates that have more stages than layers; in 575 the best is one."""

SEEDS = [*(seed for seed in range(60) if seed % 40 != 7), *WITH_EMPTY_ENDS]
MOST = 20_000
"""Most candidates of an instance that is listed here."""


def random_record(rng: random.Random) -> Mapping[str, Any]:
    """A limit that one level checks: of a grid, of the order of its axes, or of its sharding degrees."""
    above = {"above": 1}
    degree, other = rng.sample(["tp", "cp", "dp", "pp", "ep", "etp"], 2)
    where: Mapping[str, Any] = rng.choice(
        [
            {"tp": above, "sequence_parallel": [rng.random() < 0.5]},
            {degree: {"not_dividing": rng.choice(["kv_heads", "vocab", "layers", "seq_len"])}},
            {degree: {"not_multiple_of": other}, other: above},
            {"etp*ep": {"other_than": "tp*cp"}, "pp": above},
            {"cp": above, "cp_kind": ["all_to_all"]},
            {"axis_order": rng.sample(ORDERS, 6)},
            {"axis_order": rng.sample(ORDERS, 12), "pp": above, "etp*ep": {"other_than": "tp*cp"}},
            {"optim_shard": {"above": 1, "below": "dp*cp"}},
            {"grad_shard": {"above": 1, "below": "optim_shard"}},
            {"param_shard": above},
        ]
    )
    return {"field": "tp", "where": where, "allowed": "less", "models": rng.choice(["all", "all", "experts"])}


def random_target(rng: random.Random) -> Mapping[str, Any]:
    """A capability file with one to three such limits, and with empty ends of pipelines."""
    return {
        "target": "some", "version": 1, "command": "some", "devices": [], "dtypes": [], "optimizers": [],
        "families": [], "software": {}, "axes": {},
        "limits": [random_record(rng) for _ in range(rng.randint(1, 3))],
        "empty_ends": True,
    }  # fmt: skip


class Case:
    """A small space with the limits of a target, and every candidate of it."""

    def __init__(self, one: Instance) -> None:
        self.given = random_target(random.Random(one.seed))
        target = target_from_record(self.given).for_job(one.question.model, one.question.job)
        self.limits: tuple[Limit, ...] = target.limits
        self.question = replace(one.question, limits=self.limits, has_empty_ends=target.has_empty_ends)
        self.problem = self.question.problem()
        self.listed: list[Strategy] = replace(one, question=self.question, listed=()).candidates()
        self.table = StrategyTable.of(self.listed)

    @property
    def excluded(self) -> NDArray[np.bool_]:
        found = np.zeros(len(self.table), dtype=bool)
        for limit in self.limits:
            found |= limit.excluded(self.table)
        return found

    @property
    def reasons(self) -> list[str]:
        """The reason why each candidate is rejected: a rule on grids, then the target, then a rule on
        schedules.
        """
        broken = first_broken(self.table, self.problem.limits, RULES)
        grids = (broken >= 0) & (broken < len(GRID_RULES))
        codes = [RULES[code].code if code >= 0 else "" for code in broken.tolist()]
        is_out = (self.excluded & ~grids).tolist()
        return [TARGET_LIMIT if out else code for out, code in zip(is_out, codes, strict=True)]

    @property
    def rejected(self) -> dict[str, int]:
        counts = Counter(self.reasons)
        counts.pop("", None)
        return dict(counts)

    @property
    def best_s(self) -> float:
        """The least step time of the candidates that the target allows, and that are legal and fit; infinity
        without any.
        """
        table = self.table.take(np.array([not reason for reason in self.reasons]))
        if not len(table):
            return np.inf
        peaks = peaks_of(self.problem, table)
        fits = peaks.device_bytes <= self.problem.usable_bytes
        fits &= peaks.host_bytes <= self.problem.host_bytes_per_device
        return float(step_times_s(self.problem, table.take(fits)).min()) if fits.any() else np.inf

    def checked(self) -> TargetLimits:
        given = record(CapabilityRecord, self.given)
        model, job = layers_of(self.question.model), job_of(self.question.job)
        return target_limits_of(given.limits, model, job)

    @property
    def with_empty_ends(self) -> int:
        """Legal candidates with more stages than layers."""
        table = self.table.take(np.array([not reason for reason in self.reasons], dtype=bool))
        return int(np.count_nonzero(table.pp * table.vpp > self.question.model.layers))


def cases() -> list[Case]:
    instances = [instance(seed) for seed in SEEDS]
    return [Case(one) for one in instances if one.count <= MOST]


@pytest.fixture(scope="module")
def every() -> list[Case]:
    return cases()


@pytest.mark.slow
def test_the_search_rejects_excluded_candidates_and_finds_the_best_other(every: list[Case]) -> None:
    found, out, empty, best_empty = 0, 0, 0, 0
    for case in every:
        goal = Fastest(1)
        outcome = BranchAndBound(case.problem, case.question.candidates(), goal).run()
        expected = case.rejected
        rules = {code: n for code, n in outcome.ledger.rejected.items() if "memory" not in code}
        assert rules == expected
        assert outcome.enumerated == len(case.listed)
        best_s = outcome.found[0].time_s if outcome.found else np.inf
        assert best_s == pytest.approx(case.best_s, rel=1e-12)
        found += bool(outcome.found)
        out += expected.get(TARGET_LIMIT, 0) > 0
        empty += case.with_empty_ends > 0
        best = outcome.found[0].table[0] if outcome.found else None
        best_empty += best is not None and best.pp * best.vpp > case.question.model.layers
    assert found >= 20 and out >= 20 and empty >= len(WITH_EMPTY_ENDS) and best_empty >= 1


@pytest.mark.slow
def test_the_checker_counts_and_proves_the_same(every: list[Case]) -> None:
    for case in every:
        question, target_limits = case.question, case.checked()
        figures = figures_of(question.model, question.cluster, question.job)
        arguments = (figures, question.space, question.fixed, question.axes)
        assert rejected_counts(*arguments, target_limits, empty_ends=True) == case.rejected
        if not np.isfinite(case.best_s):
            continue
        outcome = proven(case, target_limits, case.best_s * (1 - 1e-9))
        assert outcome.counterexample is None and outcome.count == len(case.listed)
        assert proven(case, target_limits, case.best_s * (1 + 1e-9)).counterexample is not None


def proven(case: Case, target_limits: TargetLimits, cutoff_s: float, *, empty_ends: bool = True) -> Any:
    question = case.question
    figures = figures_of(question.model, question.cluster, question.job)
    space = SpaceDefinition(
        layers=question.model.layers,
        is_moe=question.model.experts is not None,
        devices=question.cluster.devices,
        batch=question.job.global_batch_size,
        is_core=question.space == "core",
        fixed=question.fixed,
        axes=question.axes,
        target_limits=target_limits,
        empty_ends=empty_ends,
    )
    return Prover(figures=figures, space=space, cutoff_s=cutoff_s, usable_bytes=figures.usable_bytes).run()


@pytest.mark.slow
def test_a_search_without_limits_is_noticed(every: list[Case]) -> None:
    """Without its limits the search finds a plan that the target cannot express, and the checker
    accepts it.
    """
    faster, counted = 0, 0
    for case in every:
        goal = Fastest(1)
        free = BranchAndBound(case.problem, replace(case.question, limits=()).candidates(), goal).run()
        is_faster = bool(free.found) and free.found[0].time_s < case.best_s * (1 - 1e-9)
        faster += is_faster
        if is_faster and np.isfinite(case.best_s):
            counted += proven(case, NO_TARGET_LIMITS, case.best_s * (1 - 1e-9)).counterexample is not None
    assert faster >= 5 and counted >= 3


@pytest.mark.slow
def test_a_checker_without_empty_ends_is_noticed(every: list[Case]) -> None:
    """It counts exactly the candidates without empty ends."""
    for case in every:
        counted = proven(case, case.checked(), 0.0, empty_ends=False).count
        stages = case.table.pp * case.table.vpp
        is_more = (stages > case.question.model.layers) & (case.table.schedule == INTERLEAVED)
        assert len(case.listed) - counted == np.count_nonzero(is_more)
