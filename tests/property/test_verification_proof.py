"""The proof of optimality compared with plain enumeration: it accepts the true optimum, and nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.checker_records import figures_of
from tests.property.search_instances import Instance, instance, uneven_pipelines

from shardwise.strategy import Strategy
from shardwise_verify.estimate import evaluate
from shardwise_verify.problem import Figures
from shardwise_verify.proof import PROVEN_GAP, ProofOutcome, Prover
from shardwise_verify.rules import first_broken
from shardwise_verify.space import SpaceDefinition
from shardwise_verify.strategy_rows import rows_of

pytestmark = pytest.mark.xdist_group("enumerated spaces")  # by one worker, which enumerates once

INSTANCES, ALL_INSTANCES = 15, 250
LARGEST, LARGEST_OF_ALL = 5_000, 60_000
"""Most candidates of an instance: each is evaluated."""


@dataclass(frozen=True, kw_only=True)
class Enumerated:
    """Every candidate of a space: the number of illegal ones, of those out of memory, and times and bytes of
    the others.
    """

    seed: int
    figures: Figures
    space: SpaceDefinition
    illegal: int
    out_of_memory: int
    times_s: NDArray[np.float64]
    device_bytes: NDArray[np.float64]
    strategies: list[Strategy]

    def outcome(
        self, cutoff_s: float, usable_bytes: float | None = None, *, stops_early: bool = False
    ) -> ProofOutcome:
        usable = self.figures.usable_bytes if usable_bytes is None else usable_bytes
        prover = Prover(
            figures=self.figures,
            space=self.space,
            cutoff_s=cutoff_s,
            usable_bytes=usable,
            stops_early=stops_early,
        )
        return prover.run()

    @property
    def count(self) -> int:
        return self.illegal + self.out_of_memory + len(self.times_s)


def enumerated(one: Instance) -> Enumerated:
    question = one.question
    figures = figures_of(question.model, question.cluster, question.job)
    listed = one.listed or one.candidates()
    broken = first_broken(rows_of(listed), figures)
    legal = [strategy for strategy, code in zip(listed, broken, strict=True) if not code]
    found = evaluate(figures, rows_of(legal)) if legal else None
    fits = np.zeros(0, dtype=bool)
    if found is not None:
        fits = (found.device_bytes <= figures.usable_bytes) & (
            found.host_bytes <= figures.host_capacity_bytes
        )
    space = SpaceDefinition(
        layers=question.model.layers,
        is_moe=question.model.experts is not None,
        devices=question.cluster.devices,
        batch=question.job.global_batch_size,
        is_core=question.space == "core",
        fixed=question.fixed,
        axes=question.axes,
    )
    return Enumerated(
        seed=one.seed,
        figures=figures,
        space=space,
        illegal=len(listed) - len(legal),
        out_of_memory=int((~fits).sum()),
        times_s=np.zeros(0) if found is None else found.step_time_s[fits],
        device_bytes=np.zeros(0) if found is None else found.device_bytes[fits],
        strategies=[strategy for strategy, fit in zip(legal, fits, strict=True) if fit],
    )


def instances(full: bool) -> list[Instance]:
    candidates_of_seeds = (instance(seed) for seed in range(ALL_INSTANCES if full else INSTANCES))
    largest = LARGEST_OF_ALL if full else LARGEST
    return [one for one in candidates_of_seeds if one.count <= largest] + uneven_pipelines()[
        :: 1 if full else 3
    ]


@pytest.fixture(scope="module")
def spaces(full: bool) -> list[Enumerated]:
    """Random small spaces, enumerated."""
    return [enumerated(one) for one in instances(full)]


@pytest.mark.slow
def test_the_proof_accepts_the_optimum_and_no_higher_bound(spaces: list[Enumerated]) -> None:
    checked = second_best = 0
    for whole in spaces:
        if not len(whole.times_s):
            assert whole.outcome(inf).counterexample is None
            continue
        checked += 1
        times_s = np.sort(whole.times_s)
        best_s = float(times_s[0])
        taken = whole.outcome(best_s * (1 - PROVEN_GAP))
        assert taken.counterexample is None, whole.seed
        assert taken.illegal == whole.illegal
        assert taken.count == whole.count
        assert taken.lower_bound_s >= best_s * (1 - PROVEN_GAP)
        above = times_s[times_s > best_s * (1 + 1e-9)]
        for claimed_s in (1.001 * best_s, *above[:1].tolist()):
            refused = whole.outcome(claimed_s * (1 - PROVEN_GAP))
            assert refused.counterexample is not None, whole.seed
            assert abs(refused.counterexample_s - best_s) <= 1e-9 * best_s
            assert refused.count == whole.count
            stopped = whole.outcome(claimed_s * (1 - PROVEN_GAP), stops_early=True)
            assert best_s * (1 - 1e-9) <= stopped.counterexample_s < claimed_s
        second_best += len(above) > 0
    assert checked >= len(spaces) // 2 and second_best >= checked // 2


@pytest.mark.slow
def test_without_a_cutoff_every_candidate_is_evaluated(spaces: list[Enumerated]) -> None:
    """Without a bound the proof is the enumeration: equal numbers of illegal, out-of-memory and evaluated
    candidates.
    """
    for whole in spaces[::2]:
        outcome = whole.outcome(inf)
        assert (outcome.illegal, outcome.out_of_memory, outcome.pruned, outcome.evaluated) == (
            whole.illegal, whole.out_of_memory, 0, len(whole.times_s),
        ), whole.seed  # fmt: skip


def test_the_least_memory_is_proven_too(spaces: list[Enumerated]) -> None:
    for whole in spaces[1::3]:
        if not len(whole.times_s):
            continue
        least = float(whole.device_bytes.min())
        assert whole.outcome(inf, least * (1 - PROVEN_GAP)).counterexample is None
        refused = whole.outcome(inf, 1.001 * least)
        assert refused.counterexample is not None and refused.counterexample_bytes <= 1.001 * least


@pytest.mark.slow
def test_fixed_fields_and_axes_restrict_the_proof(spaces: list[Enumerated]) -> None:
    """A proof over some values of some fields covers exactly the candidates with these values."""
    rng = random.Random(7)
    fields = (
        "tp", "pp", "vpp", "schedule", "recompute", "recompute_layers", "offload", "first_stage_layers",
        "last_stage_layers", "micro_batch_size", "axis_order", "grad_shard", "optim_shard",
    )  # fmt: skip
    checked = 0
    for whole in spaces:
        if len(whole.times_s) < 5:
            continue
        chosen = rng.choice(whole.strategies)
        name, listed = rng.choice(fields), rng.choice(fields)
        fixed = {**whole.space.fixed, name: getattr(chosen, name)}
        values = (getattr(chosen, listed), getattr(rng.choice(whole.strategies), listed))
        axes = {**whole.space.axes, listed: values}
        has = np.array(
            [
                getattr(strategy, name) == fixed[name] and getattr(strategy, listed) in axes[listed]
                for strategy in whole.strategies
            ]
        )
        space = SpaceDefinition(
            layers=whole.space.layers,
            is_moe=whole.space.is_moe,
            devices=whole.space.devices,
            batch=whole.space.batch,
            is_core=whole.space.is_core,
            fixed=fixed,
            axes=axes,
        )
        prover = Prover(
            figures=whole.figures,
            space=space,
            cutoff_s=inf,
            usable_bytes=whole.figures.usable_bytes,
            stops_early=False,
        )
        outcome = prover.run()
        assert outcome.evaluated == has.sum(), (whole.seed, fixed, axes)
        assert outcome.count == space.total()[0]
        assert abs(outcome.counterexample_s - whole.times_s[has].min()) <= 1e-9 * outcome.counterexample_s
        checked += 1
    assert checked >= 10
