"""Plans for a target: the best plan that it can run, compared with an exhaustive search of the
whole space.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import load_model, model_from_config
from shardwise.plans import Answer
from shardwise.search import Question, plan_for, plan_mixed_cluster
from shardwise.search.bnb.incumbent import Tradeoff
from shardwise.strategy import Job, StrategyTable, Target, target_of
from shardwise.strategy.target import target_from_record

ROOT = Path(__file__).parents[3]
MODEL = model_from_config(
    {"layers": 4, "hidden": 64, "ffn": 128, "heads": 4, "vocab": 512, "seq_len": 64}, name="tiny"
)
JOB = Job(seq_len=64, global_batch_size=8, dtype="fp32")


def question(**changes: Any) -> Question:
    requested = Question(
        model=MODEL, cluster=load_cluster("1x4xcpu"), job=JOB, fixed={"axis_order": "tp-cp-dp-pp"}, top=3
    )
    return replace(requested, **changes)


def target(**changes: Any) -> Target:
    record = {
        "target": "some", "version": 1, "command": "some train", "devices": [], "dtypes": [],
        "optimizers": [], "families": [], "software": {}, "axes": {}, "limits": [],
    }  # fmt: skip
    return target_from_record(record | changes)


LIMITS = [
    # A limit on the best strategy, then also one on the best strategy under the first limit.
    [{"field": "dp", "where": {"dp": {"above": 1}}, "allowed": "1"}],
    [{"field": "dp", "where": {"dp": {"above": 1}}, "allowed": "1"},
     {"field": "tp", "where": {"tp": {"above": 1}, "recompute": ["none"]}, "allowed": "1"}],
    [{"field": "optim_shard", "where": {"dp": {"above": 2}, "recompute": ["none", "full"]}, "allowed": "1"},
     {"field": "dp", "where": {"dp": {"above": 2}}, "allowed": "2"}],
]  # fmt: skip


def least_s(requested: Question, some: Target) -> float:
    """The least step time of every legal candidate that fits and that the target allows, all evaluated; the
    best for each kind (degrees, schedule, recomputation: all that these limits read).
    """
    problem = requested.problem()
    goal = search.Fastest(10**6)
    search.BranchAndBound(problem, requested.candidates(), goal, exhaustive=True).run()
    table = StrategyTable.joined([found.table for found in goal.incumbents])
    return min(
        found.time_s
        for found, strategy in zip(goal.incumbents, table, strict=True)
        if not list(some.refusals(strategy))
    )


@pytest.mark.slow
@pytest.mark.parametrize("limits", LIMITS)
def test_the_best_within_limits_is_the_best_that_is_not_refused(limits: Any) -> None:
    requested, some = (
        question(axes={"offload": ("none",), "recompute": ("none", "selective")}),
        target(limits=limits),
    )
    free = search.plan(requested)
    assert list(some.refusals(free.best.strategy))
    answer = plan_for(some, requested, search.plan)
    assert not list(some.refusals(answer.best.strategy))
    assert all(some.broken_limit(other.strategy) is None for other in answer.runners_up)
    assert answer.best.step_time_s > free.best.step_time_s
    assert answer.best.step_time_s == pytest.approx(least_s(requested, some), rel=1e-12)


def frontier_by_parts(requested: Question, some: Target) -> list[tuple[float, float]]:
    """Seconds and bytes of the frontier of all strategies that the target allows: the frontiers of parts in
    which every field that the limits read has one value, so that a part is allowed or not as a whole."""
    figures = []
    for dp, tp, recompute in product((1, 2, 4), (1, 2, 4), ("none", "selective")):
        part = replace(requested, fixed={**requested.fixed, "dp": dp, "tp": tp, "recompute": recompute})
        if any(part.candidates().degrees()):
            outcome = search.answer.search(part, part.problem(), Tradeoff())
            figures += [
                (point.step_time_s, point.device_bytes)
                for point in search.answer.frontier_points(part.problem(), outcome)
                if some.broken_limit(point.strategy) is None
            ]
    return [
        (time_s, nbytes)
        for time_s, nbytes in sorted(set(figures))
        if all(other == (time_s, nbytes) or other[0] > time_s or other[1] > nbytes for other in figures)
    ]


@pytest.mark.parametrize("limits", LIMITS)
def test_the_frontier_within_limits_is_that_of_all_allowed_strategies(limits: Any) -> None:
    requested = question(axes={"offload": ("none",), "recompute": ("none", "selective")}, use_all=True)
    some = target(limits=limits)
    expected = frontier_by_parts(requested, some)
    free = search.StrategyCurves(requested).curve(requested.cluster)
    assert any(some.broken_limit(point.layout) is not None for point in free.points)
    curve = search.StrategyCurves(requested, some).curve(requested.cluster)
    assert [(point.time_s, point.memory_bytes) for point in curve.points] == [
        pytest.approx(figures, rel=1e-12) for figures in expected
    ]
    answer = plan_for(some, replace(requested, frontier=True), search.plan)
    assert answer.frontier is not None
    assert [point.strategy for point in answer.frontier.points] == [point.layout for point in curve.points]
    assert answer.frontier.points[0].step_time_s == pytest.approx(answer.best.step_time_s, rel=1e-12)
    for place, point in enumerate(curve.points):  # the plan of a point is of the subspace that has it
        used, found = search.answer_at(curve, place)
        assert found.best.strategy == point.layout
        assert all(getattr(point.layout, name) in values for name, values in used.axes.items())


def test_values_that_a_target_lacks_are_axes_of_the_certificate() -> None:
    some = target(axes={"tp": [2], "offload": ["none"]})
    answer = plan_for(some, question(), search.plan)
    assert answer.best.strategy.tp == 2
    assert answer.certificate.axes == {"tp": (2,), "offload": ("none",)}
    narrower = plan_for(some, question(axes={"tp": (1, 2), "pp": (2,)}), search.plan)
    assert narrower.certificate.axes == {"tp": (2,), "pp": (2,), "offload": ("none",)}


def test_a_fixed_value_that_a_target_lacks_is_refused_by_name() -> None:
    some = target(axes={"offload": ["none"]})
    with pytest.raises(ConfigError, match=r"fix.offload: is not run by some train.*optimizer"):
        plan_for(some, question(fixed={"offload": "optimizer"}), search.plan)


@pytest.mark.slow
def test_offload_is_planned_for_our_runtime_on_cpu_devices_where_it_is_requested() -> None:
    own = target_of("shardwise")
    assert plan_for(own, question(), search.plan).certificate.axes["offload"] == ("none",)
    fixed = plan_for(own, question(fixed={"offload": "optimizer"}), search.plan)
    assert fixed.best.strategy.offload == "optimizer" and "offload" not in fixed.certificate.axes
    some = plan_for(own, question(axes={"offload": ("optimizer", "both")}), search.plan)
    assert some.best.strategy.offload == "optimizer"  # fewer bytes are offloaded
    assert some.certificate.axes["offload"] == ("optimizer", "both")


def test_limits_that_exclude_every_plan_are_reported() -> None:
    everything = [{"field": "tp", "where": {"tp": {"above": 0}}, "allowed": "nothing"}]
    with pytest.raises(Infeasible, match="no strategy of this space is run by the target: its limits"):
        plan_for(target(limits=everything), question(), search.plan)
    with pytest.raises(Infeasible, match="no strategy of this space that fits is run by some train"):
        plan_for(target(axes={"tp": [2]}), question(axes={"tp": (1, 4)}), search.plan)


def unequal(**changes: Any) -> Question:
    """A small job on two unequal processes, where an uneven plan is best."""
    model = load_model(str(ROOT / "examples/tiny.yaml"))
    cluster = load_cluster(str(ROOT / "examples/clusters/unequal.yaml"))
    job = Job(seq_len=64, global_batch_size=16, dtype="fp32")
    return replace(Question(model=model, cluster=cluster, job=job), **changes)


@pytest.mark.slow
def test_uneven_plans_are_for_targets_that_run_them() -> None:
    free = plan_mixed_cluster(unequal())
    assert not free.best.is_uniform
    # The reference that it is compared with is of the target too: with fewer choices no faster than without
    # limits.
    narrow = target(axes={"tp": [1], "dp": [1]}, uneven={"dtypes": ["fp32"]})
    found = plan_mixed_cluster(unequal(), target=narrow)
    assert not found.best.is_uniform and found.best == free.best
    least_s = plan_for(narrow, unequal(), search.plan).best.step_time_s
    assert found.mixed is not None and free.mixed is not None
    assert found.mixed.uniform_step_time_s == least_s
    assert free.mixed.uniform_step_time_s is not None and least_s >= free.mixed.uniform_step_time_s
    answer = plan_mixed_cluster(unequal(), target=target())
    assert isinstance(answer, Answer) and answer.mixed is not None
    assert answer.best.step_time_s == free.mixed.uniform_step_time_s
    message = "some train runs no uneven plans: use --target any to search them"
    assert answer.mixed.why_uniform == message


@pytest.mark.slow
def test_stages_on_two_pools_are_for_targets_that_run_them() -> None:
    model, cluster = load_model("gpt2-xl"), load_cluster("1x2xRTX4090+2x1xA100-40G", inter_node="200Gb/s")
    job = Job(seq_len=4096, global_batch_size=8, dtype="bf16")
    requested = Question(model=model, cluster=cluster, job=job, mixed_stage_rows=4)
    steps_s = []
    for uneven in ({"dtypes": ["bf16"], "mixed_pool_stages": True}, {"dtypes": ["bf16"]}):
        found = plan_mixed_cluster(requested, target=target(uneven=uneven))
        assert not found.best.is_uniform
        stages = [stage for pipeline in found.best.layout.pipelines for stage in pipeline.stages]
        assert any(stage.parts for stage in stages) == ("mixed_pool_stages" in uneven)
        steps_s.append(found.best.step_time_s)
    assert steps_s[0] < steps_s[1]


@pytest.mark.slow
def test_an_uneven_plan_is_found_where_the_target_runs_no_uniform_one() -> None:
    none = target(axes={"tp": [64]}, uneven={"dtypes": ["fp32"]})
    with pytest.raises(Infeasible):
        plan_for(none, unequal(), search.plan)
    found = plan_mixed_cluster(unequal(), target=none)
    assert not found.best.is_uniform
    assert found.mixed is not None and found.mixed.uniform_step_time_s is None
    with pytest.raises(Infeasible):
        plan_mixed_cluster(unequal(), target=target(axes={"tp": [64]}))


def test_sharding_degrees_are_compared_with_numbers_while_they_are_listed() -> None:
    """3 is divided by no degree of 4 devices but 1."""
    limits = [{"field": "optim_shard", "where": {"optim_shard": {"not_dividing": "3"}}, "allowed": "1 or 3"}]
    axes, some = {"offload": ("none",), "recompute": ("none",)}, target(limits=limits)
    assert [limit.level for limit in some.limits] == ["shards"]
    answer = plan_for(some, question(axes=axes), search.plan)
    assert answer.best.strategy.optim_shard == 1 and answer.certificate.rejected["target"] > 0
    unsharded = search.plan(question(axes={**axes, "optim_shard": (1,)}))
    assert answer.best.step_time_s == pytest.approx(unsharded.best.step_time_s, rel=1e-12)
