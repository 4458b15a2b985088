"""Two implementations of legality: the checker's rules and counts, compared with the planner's rules and
plain enumeration.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.checker_records import figures_of
from tests.property.search_space_reference import SpaceTwin, keeps

from shardwise.cluster import Cluster, load_cluster
from shardwise.cost import bind
from shardwise.model import Model, model_from_config
from shardwise.strategy import RULES, Job, Strategy, StrategyTable
from shardwise.strategy import first_broken as planned_first_broken
from shardwise_verify.problem import Figures
from shardwise_verify.rules import first_broken, is_candidate, rejected_counts
from shardwise_verify.strategy_rows import rows_of

DENSE = {"layers": 5, "hidden": 384, "ffn": 1032, "heads": 6, "kv_heads": 3, "vocab": 999, "seq_len": 96}
ROUTED = {
    **DENSE, "layers": 4, "ffn": 1030, "experts": 6, "top_k": 2, "expert_ffn": 100, "dense_layers": 1,
    "gated": True,
}  # fmt: skip
QUESTIONS: tuple[tuple[dict[str, Any], str, int, int], ...] = (
    (DENSE, "8xH100-SXM", 12, 96),
    (DENSE, "2x6xA100-80G", 20, 88),
    (ROUTED, "6xH100-SXM", 9, 96),
    (ROUTED, "2x4xH100-SXM", 6, 40),
)
"""Questions whose degrees break every rule that needs no estimate."""

NAMES = ["dense on 8", "dense on 2x6", "experts on 6", "experts on 2x4"]

FIXED: tuple[dict[str, object], ...] = (
    {},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2, "micro_batch_size": 1},
    {"cp_kind": "all_to_all", "offload": "none"},
    {"zero_stage": 2, "dp_replicate": 2},
    {"schedule": "interleaved_1f1b", "recompute": "full"},
    {"ep": 2, "first_stage_layers": 1},
)


Question = tuple[dict[str, Any], str, int, int]


def problem_of(question: Question) -> tuple[Model, Cluster, Job]:
    config, cluster, batch, seq_len = question
    job = Job(seq_len=seq_len, global_batch_size=batch, dtype="bf16")
    return model_from_config(config, name="tiny"), load_cluster(cluster), job


def figures_for(question: Question) -> Figures:
    return figures_of(*problem_of(question))


def twin_of(figures: Figures, *, core: bool) -> SpaceTwin:
    return SpaceTwin(
        core=core,
        devices=figures.cluster.devices,
        layers=figures.limits.layers,
        moe=figures.model.experts is not None,
        batch=figures.job.global_batch_size,
    )


def planned_reasons(question: Question, strategies: list[Strategy]) -> list[str]:
    limits = bind(*problem_of(question)).limits
    codes = planned_first_broken(StrategyTable.of(strategies), limits, RULES)
    return ["" if code < 0 else RULES[code].code for code in codes.tolist()]


@pytest.mark.parametrize("question", QUESTIONS, ids=NAMES)
def test_the_first_broken_rule(question: tuple[dict[str, Any], str, int, int], full: bool) -> None:
    figures = figures_for(question)
    twin, rng = twin_of(figures, core=False), random.Random(7)
    strategies = [twin.random_candidate(rng) for _ in range(20_000 if full else 1_500)]
    own = first_broken(rows_of(strategies), figures).tolist()
    assert own == planned_reasons(question, strategies)
    assert len(set(own)) >= 6
    for strategy in strategies[:40]:
        assert is_candidate(figures, strategy, "default", {})


@pytest.mark.slow
def test_every_rule_is_met() -> None:
    seen: set[str] = set()
    for question in QUESTIONS:
        figures, rng = figures_for(question), random.Random(8)
        twin = twin_of(figures, core=False)
        seen |= set(
            first_broken(rows_of([twin.random_candidate(rng) for _ in range(3_000)]), figures).tolist()
        )
    # `tp_overlap` is of a job that requests the overlap: the last test here.
    assert seen == {"", *(rule.code for rule in RULES)} - {"tp_overlap"}


@pytest.mark.xdist_group("enumerated")  # by one worker, which lists candidates once
@pytest.mark.parametrize("fixed", FIXED, ids=lambda fixed: ",".join(fixed) or "nothing fixed")
@pytest.mark.parametrize("question", QUESTIONS[::3], ids=NAMES[::3])
@pytest.mark.parametrize("space", ["core", "default"])
def test_counts_per_rule_are_those_of_enumeration(
    question: tuple[dict[str, Any], str, int, int], space: str, fixed: dict[str, object]
) -> None:
    """Small clusters, so that all candidates can be listed: the default space of 4 devices, the core space of
    all.
    """
    figures, candidates = enumerated(QUESTIONS.index(question), space)
    found = Counter(reason for strategy, reason in candidates if keeps(strategy, fixed))
    found.pop("", None)
    assert rejected_counts(figures, space, fixed) == dict(found)


@cache
def enumerated(question: int, space: str) -> tuple[Figures, list[tuple[Strategy, str]]]:
    """Every candidate of the space, with the reason why the planner rejects it."""
    config, cluster, batch, seq_len = QUESTIONS[question]
    whole = (config, "4xH100-SXM" if space == "default" else cluster, batch, seq_len)
    figures = figures_for(whole)
    strategies = list(twin_of(figures, core=space == "core").candidates())
    return figures, list(zip(strategies, planned_reasons(whole, strategies), strict=True))


def test_strategies_outside_of_the_space_are_no_candidates() -> None:
    figures = figures_for(QUESTIONS[0])
    strategy = next(twin_of(figures, core=True).candidates())
    values = {name: getattr(strategy, name) for name in Strategy.__dataclass_fields__}
    assert is_candidate(figures, strategy, "core", {})
    assert is_candidate(figures, strategy, "core", {"tp": strategy.tp})
    assert not is_candidate(figures, strategy, "core", {"tp": strategy.tp + 1})
    assert not is_candidate(figures, strategy, "no such space", {})
    for name, value in (
        ("tp", 7), ("dp", -1), ("axis_order", "pp-dp-cp-tp"), ("vpp", 3), ("recompute_layers", 1),
        ("param_shard", 2), ("micro_batch_size", 5), ("etp", 2), ("first_stage_layers", 0),
    ):  # fmt: skip
        assert not is_candidate(figures, Strategy(**{**values, name: value}), "core", {}), name


def test_the_overlap_of_tensor_communication_stays_within_a_node() -> None:
    """Of a job that requests it, where 4 devices are linked and tp may be 3: no other job breaks the rule."""
    model, cluster, job = problem_of((DENSE, "6xH100-SXM", 12, 96))
    requested = replace(job, profile=replace(job.profile, linked_devices=4))
    figures, rng = figures_of(model, cluster, requested), random.Random(9)
    twin = twin_of(figures, core=False)
    strategies = [twin.random_candidate(rng) for _ in range(6_000)]
    own = first_broken(rows_of(strategies), figures).tolist()
    limits = bind(model, cluster, requested).limits
    codes = planned_first_broken(StrategyTable.of(strategies), limits, RULES).tolist()
    assert own == ["" if code < 0 else RULES[code].code for code in codes]
    assert "tp_overlap" in own
    assert "tp_overlap" not in first_broken(rows_of(strategies), figures_of(model, cluster, job)).tolist()
