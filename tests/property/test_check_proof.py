"""The proof against plain enumeration: it takes the true optimum, and nothing else for it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.property.search_instances import Instance, instance, uneven_pipelines

from shardwise.check.count import SpaceRows
from shardwise.check.cover import Cover
from shardwise.check.figures import Figures, figures_of
from shardwise.check.optimal import PROVEN_GAP
from shardwise.check.price import evaluate
from shardwise.check.proof import Prover
from shardwise.check.rows import rows_of
from shardwise.check.rules import first_broken
from shardwise.strategy import Strategy

pytestmark = pytest.mark.xdist_group("enumerated spaces")  # by one worker, which enumerates once

INSTANCES, ALL_INSTANCES = 15, 250
LARGEST, LARGEST_OF_ALL = 5_000, 60_000
"""Candidates of an instance, at most: each is evaluated."""


@dataclass(frozen=True, kw_only=True)
class Enumerated:
    """Every candidate of a space: how many are illegal or do not fit, times and bytes of the others."""

    seed: int
    figures: Figures
    space: SpaceRows
    illegal: int
    unfitting: int
    times_s: NDArray[np.float64]
    device_bytes: NDArray[np.float64]
    strategies: list[Strategy]

    def cover(self, lowest_s: float, usable_bytes: float | None = None, *, stops: bool = False) -> Cover:
        usable = self.figures.usable_bytes if usable_bytes is None else usable_bytes
        prover = Prover(
            figures=self.figures, space=self.space, lowest_s=lowest_s, usable_bytes=usable, stops=stops
        )
        return prover.run()

    @property
    def count(self) -> int:
        return self.illegal + self.unfitting + len(self.times_s)


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
    space = SpaceRows(
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
        unfitting=int((~fits).sum()),
        times_s=np.zeros(0) if found is None else found.step_time_s[fits],
        device_bytes=np.zeros(0) if found is None else found.device_bytes[fits],
        strategies=[strategy for strategy, fit in zip(legal, fits, strict=True) if fit],
    )


def instances(full: bool) -> list[Instance]:
    drawn = (instance(seed) for seed in range(ALL_INSTANCES if full else INSTANCES))
    largest = LARGEST_OF_ALL if full else LARGEST
    return [one for one in drawn if one.count <= largest] + uneven_pipelines()[:: 1 if full else 3]


@pytest.fixture(scope="module")
def spaces(full: bool) -> list[Enumerated]:
    """Random small spaces, enumerated."""
    return [enumerated(one) for one in instances(full)]


def test_the_proof_takes_the_optimum_and_nothing_above_it(spaces: list[Enumerated]) -> None:
    checked = second_best = 0
    for whole in spaces:
        if not len(whole.times_s):
            assert whole.cover(inf).faster is None
            continue
        checked += 1
        times_s = np.sort(whole.times_s)
        best_s = float(times_s[0])
        taken = whole.cover(best_s * (1 - PROVEN_GAP))
        assert taken.faster is None, whole.seed
        assert taken.illegal == whole.illegal
        assert taken.count == whole.count
        assert taken.least_s >= best_s * (1 - PROVEN_GAP)
        above = times_s[times_s > best_s * (1 + 1e-9)]
        for claimed_s in (1.001 * best_s, *above[:1].tolist()):
            refused = whole.cover(claimed_s * (1 - PROVEN_GAP))
            assert refused.faster is not None, whole.seed
            assert abs(refused.faster_s - best_s) <= 1e-9 * best_s
            assert refused.count == whole.count
            stopped = whole.cover(claimed_s * (1 - PROVEN_GAP), stops=True)
            assert best_s * (1 - 1e-9) <= stopped.faster_s < claimed_s
        second_best += len(above) > 0
    assert checked >= len(spaces) // 2 and second_best >= checked // 2


def test_with_nothing_to_beat_every_candidate_is_judged(spaces: list[Enumerated]) -> None:
    """Without a bound the cover is the enumeration: exactly as many illegal, unfitting and evaluated."""
    for whole in spaces[::2]:
        cover = whole.cover(inf)
        assert (cover.illegal, cover.unfitting, cover.bounded, cover.evaluated) == (
            whole.illegal, whole.unfitting, 0, len(whole.times_s),
        ), whole.seed  # fmt: skip


def test_the_least_memory_is_proven_too(spaces: list[Enumerated]) -> None:
    for whole in spaces[1::3]:
        if not len(whole.times_s):
            continue
        least = float(whole.device_bytes.min())
        assert whole.cover(inf, least * (1 - PROVEN_GAP)).faster is None
        refused = whole.cover(inf, 1.001 * least)
        assert refused.faster is not None and refused.faster_bytes <= 1.001 * least


def test_fixed_fields_and_axes_narrow_the_cover(spaces: list[Enumerated]) -> None:
    """A cover of what has some values of some fields: the candidates that have them, no more and no fewer."""
    rng = random.Random(7)
    fields = (
        "tp", "pp", "vpp", "schedule", "recompute", "recompute_layers", "offload", "first_stage_layers",
        "last_stage_layers", "micro_batch_size", "axis_order", "grad_shard", "optim_shard",
    )  # fmt: skip
    checked = 0
    for whole in spaces:
        if len(whole.times_s) < 5:
            continue
        kept = rng.choice(whole.strategies)
        name, listed = rng.choice(fields), rng.choice(fields)
        fixed = {**whole.space.fixed, name: getattr(kept, name)}
        values = (getattr(kept, listed), getattr(rng.choice(whole.strategies), listed))
        axes = {**whole.space.axes, listed: values}
        has = np.array(
            [
                getattr(strategy, name) == fixed[name] and getattr(strategy, listed) in axes[listed]
                for strategy in whole.strategies
            ]
        )
        space = SpaceRows(
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
            lowest_s=inf,
            usable_bytes=whole.figures.usable_bytes,
            stops=False,
        )
        cover = prover.run()
        assert cover.evaluated == has.sum(), (whole.seed, fixed, axes)
        assert cover.count == space.total()[0]
        assert abs(cover.faster_s - whole.times_s[has].min()) <= 1e-9 * cover.faster_s
        checked += 1
    assert checked >= 10
