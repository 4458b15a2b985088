"""Fixed fields and aliases: the answer has them, and is the best of exactly the candidates that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
from tests.property.search_space_reference import SpaceTwin, first_reason, keeps

from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import model_from_config
from shardwise.search import Question, plan
from shardwise.search.step_times import step_times_s
from shardwise.strategy import Job, Strategy, StrategyTable
from shardwise_verify import count_space

LAYERS, BATCH, DEVICES = 5, 6, 6
DIMENSIONS = {
    "layers": LAYERS, "hidden": 768, "ffn": 3072, "heads": 12, "kv_heads": 6, "vocab": 50_257,
    "seq_len": 4096,
}  # fmt: skip


def question(space: str, fixed: Mapping[str, int | str | bool], *, experts: bool = False) -> Question:
    routed = {"experts": 6, "top_k": 2} if experts else {}
    return Question(
        model=model_from_config({**DIMENSIONS, **routed}),
        cluster=load_cluster("2x3xA100-40G"),
        job=Job(seq_len=1536, global_batch_size=BATCH, dtype="bf16"),
        space=space,
        fixed=fixed,
        use_all=True,
    )


@cache
def candidates(space: str) -> tuple[Strategy, ...]:
    twin = SpaceTwin(core=space == "core", devices=DEVICES, layers=LAYERS, moe=False, batch=BATCH)
    return tuple(twin.candidates())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("space", "fixed"),
    [
        ("core", {"pp": 3}),
        ("core", {"schedule": "gpipe"}),
        ("core", {"schedule": "interleaved_1f1b", "vpp": 2}),
        ("core", {"zero_stage": 0}),
        ("core", {"zero_stage": 1}),
        ("core", {"zero_stage": 2, "dp": 3}),
        ("core", {"zero_stage": 3}),
        ("core", {"recompute": "full", "micro_batch_size": 2}),
        ("core", {"sequence_parallel": True}),
        ("default", {"pp": 2, "tp": 3, "schedule": "zb_v"}),
        ("default", {"pp": 3, "tp": 1, "dp": 2, "first_stage_layers": 0, "recompute_layers": 2}),
        ("default", {"pp": 1, "tp": 1, "cp": 2, "cp_kind": "all_to_all", "offload": "both"}),
        ("default", {"cp": 1, "tp": 1, "zero_stage": 2, "dp_shard": 3}),
        ("default", {"cp": 1, "tp": 1, "pp": 1, "dp_replicate": 2}),
        ("default", {"tp": 2, "dp": 3, "axis_order": "cp-dp-tp-pp"}),
        ("default", {"tp": 2, "cp": 1, "optim_shard": 3, "grad_shard": 1}),
    ],
)
def test_fixed_fields_have_their_values(space: str, fixed: dict[str, int | str | bool]) -> None:
    """The best, the runners-up and the count equal those of a plain enumeration with a filter."""
    requested = question(space, fixed)
    problem = requested.problem()
    with_fixed = [strategy for strategy in candidates(space) if keeps(strategy, fixed)]
    legal = [strategy for strategy in with_fixed if first_reason(strategy, problem.limits) is None]
    best_s = step_times_s(problem, StrategyTable.of(legal)).min()
    for answer in (plan(requested), plan(replace(requested, exhaustive=True))):
        assert answer.certificate.enumerated == len(with_fixed)
        assert answer.best.step_time_s == pytest.approx(best_s, rel=1e-12)
        assert all(keeps(result.strategy, fixed) for result in (answer.best, *answer.runners_up))


def test_fixed_experts() -> None:
    fixed: dict[str, int | str | bool] = {"ep": 3, "etp": 1, "pp": 1, "offload": "none", "cp": 1}
    answer, whole = (plan(question("default", f, experts=True)) for f in (fixed, {**fixed, "tp": 2}))
    assert answer.best.strategy.ep == 3
    assert whole.best.step_time_s >= answer.best.step_time_s


@pytest.mark.parametrize(
    "fixed", [{"tp": 4}, {"zero_stage": 1, "dp_shard": 5}, {"vpp": 9}, {"micro_batch_size": 4}]
)
def test_a_value_that_no_candidate_has_leaves_none(fixed: dict[str, int]) -> None:
    with pytest.raises(Infeasible, match="space is empty") as caught:
        plan(question("core", fixed))
    assert caught.value.reasons == {}
    counted = count_space(
        model_layers=LAYERS, experts=None, devices=DEVICES, global_batch_size=BATCH, space="core", fixed=fixed
    )
    assert counted.count == 0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"fixed": {"tpp": 1}}, "fix.tpp"),
        ({"fixed": {"schedule": "2f2b"}}, "fix.schedule"),
        ({"fixed": {"dp": 5}}, "global_batch_size"),
        ({"space": "small"}, "space"),
        ({"top": -1}, "top"),
    ],
)
def test_invalid_fixed_fields_are_refused(changes: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(replace(question("core", {}), **changes))  # type: ignore[arg-type]
    assert caught.value.key == key


def test_a_batch_that_dp_does_not_divide_names_its_neighbours() -> None:
    """With dp = 5 and a batch of 6: 5 and 10 are the nearest multiples."""
    with pytest.raises(ConfigError, match="nearest 5 and 10"):
        plan(question("core", {"dp": 5}))
