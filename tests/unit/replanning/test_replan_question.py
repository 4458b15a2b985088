"""What the question of a plan allows is allowed after events too, field by field; without the field, another
plan is best.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
from tests.recorded.files import PLANS
from tests.unit.replanning.conftest import HOUR_S

from shardwise.cluster import Conditions, NodeView, events_from_text, load_cluster
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import load_model
from shardwise.plans import Layout, Plan, PlanQuestion, StagePart, plan_of, read_plan
from shardwise.replanning import (
    AllowedSpace,
    AnyArrangement,
    Arrangement,
    Costs,
    Decision,
    Planner,
    Prices,
    allowed_space_of,
    arrangement_of,
    mixed_planner_of,
    planner_of,
)
from shardwise.replanning.allowed_space import NO_STRATEGIES, BestStrategies, question_after
from shardwise.replanning.arrangement import with_dp
from shardwise.replanning.situation import Situation, situation_of
from shardwise.replanning.uneven import UnevenArrangement
from shardwise.search import Question, default_job, plan, plan_for
from shardwise.strategy import Strategy, complete, target_of
from shardwise_verify import count_space

FOUR = ("opt-350m", "4x2xV100-32G", 16, 512)
"""A model, four nodes, a batch and a sequence length."""

PAIR = ("llama-2-7b", "2x2xA100-40G+1x4xA10G", 16, 1024)
"""The best plan of one strategy is on the first two nodes. Without n1, the best plan is uneven."""

MEGATRON = "megatron-lm-0.19"


@cache
def planned(job: tuple[str, str, int, int], **fields: Any) -> Plan:
    """The best plan of one strategy, with its question."""
    name, on, batch, seq_len = job
    model, cluster = load_model(name), load_cluster(on)
    fields = {key: dict(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    target = fields.pop("target", None)
    question = Question(
        model=model,
        cluster=cluster,
        job=default_job(model, cluster, seq_len=seq_len, global_batch_size=batch),
        top=0,
        **fields,
    )
    answer = plan(question) if target is None else plan_for(target_of(target), question, plan)
    return plan_of(
        answer,
        model=model,
        cluster=answer.cluster or cluster,
        job=question.job,
        question=PlanQuestion(target=target, **fields),
    )


def situation(on: str, events: str) -> Situation:
    cluster = load_cluster(on)
    trace = events_from_text(events, len(cluster.nodes))
    conditions = Conditions.at_start(trace)
    for event in trace.events:
        conditions = conditions.after(event)
    return situation_of(NodeView(cluster), conditions)


def decided(running: Plan, on: str, events: str, *, is_of_files: bool = False) -> Decision[AnyArrangement]:
    cluster = load_cluster(on)
    allowed = replace(allowed_space_of(running), is_of_files=is_of_files)
    uniform: Planner = planner_of(Prices(running.model, cluster, running.job), Costs(), allowed_space=allowed)
    return mixed_planner_of(uniform).replan(
        arrangement_of(running, cluster), situation(on, events), horizon_s=6 * HOUR_S
    )


def strategy_of(found: Decision[AnyArrangement]) -> Strategy:
    assert isinstance(found.arrangement, Arrangement)
    return found.arrangement.strategy


def without(running: Plan, **defaults: Any) -> Plan:
    """The broken twin: the plan with these fields of its question dropped."""
    return replace(running, question=replace(running.question, **defaults))


def is_core(strategy: Strategy) -> bool:
    """Whether the core space has the strategy, by the independent count."""
    return bool(
        count_space(
            model_layers=24, experts=None, devices=strategy.tp * strategy.cp * strategy.pp * strategy.dp,
            global_batch_size=FOUR[2], space="core", fixed=asdict(strategy), axes={},
        ).count
    )  # fmt: skip


@pytest.mark.slow
def test_the_space() -> None:
    running = planned(FOUR, space="core")
    assert is_core(strategy_of(decided(running, FOUR[1], "lost n3")))
    assert not is_core(strategy_of(decided(without(running, space="default"), FOUR[1], "lost n3")))


@pytest.mark.slow
def test_fixed_fields_and_axes() -> None:
    running = planned(FOUR, fixed=(("schedule", "gpipe"), ("pp", 2)), use_all=True)
    found = strategy_of(decided(running, FOUR[1], "lost n3"))
    assert (found.schedule, found.pp) == ("gpipe", 2)
    free = strategy_of(decided(without(running, fixed={}), FOUR[1], "lost n3"))
    assert (free.schedule, free.pp) != ("gpipe", 2)
    running = planned(FOUR, axes=(("tp", (1,)),), use_all=True)
    assert strategy_of(decided(running, FOUR[1], "lost n3; lost n2")).tp == 1
    assert strategy_of(decided(without(running, axes={}), FOUR[1], "lost n3; lost n2")).tp != 1


@pytest.mark.slow
def test_the_zero_stage() -> None:
    """Stage 3 shards parameters too, over however many replicas there are. Once a changed number of replicas
    turned every stage into stage 1."""
    running = planned(FOUR, fixed=(("zero_stage", 3), ("pp", 1)), use_all=True)
    found = strategy_of(decided(running, FOUR[1], "lost n3; lost n2"))
    assert found.dp > 1 and found.param_shard == found.grad_shard == found.optim_shard == found.dp * found.cp
    free = strategy_of(decided(without(running, fixed={"pp": 1}), FOUR[1], "lost n3; lost n2"))
    assert free.param_shard == 1
    assert not allowed_space_of(running).allows_strategy(with_dp(free, 2 * free.dp))


@pytest.mark.slow
def test_the_target() -> None:
    """Megatron-LM has no zero-bubble schedules, no unequal shares and no re-routing."""
    running = planned(FOUR, target=MEGATRON, use_all=True)
    target = target_of(MEGATRON).for_job(running.model, running.job)
    for events in ("lost n3", "slow n1 0.5"):
        found = decided(running, FOUR[1], events)
        assert not [*target.refusals(strategy_of(found))]
        assert len(set(found.arrangement.microbatches)) == 1 and not found.arrangement.is_rerouted
    free = decided(without(running, target=None), FOUR[1], "lost n3")
    assert [refusal.key for refusal in target.refusals(strategy_of(free))] == ["schedule"]


def test_a_limit_of_a_target_on_several_fields() -> None:
    """Megatron-LM offloads optimizer states only where they are sharded, or where there is one replica. The
    fastest strategy of a search by hand exceeds that, so the subspaces within the limit are searched."""
    model, cluster = load_model(FOUR[0]), load_cluster("1x4xV100-32G")
    job = default_job(model, cluster, seq_len=FOUR[3], global_batch_size=FOUR[2])
    sizes = {"devices": 4, "layers": model.layers, "experts": None, "global_batch_size": FOUR[2]}
    two, single = (
        complete({"tp": tp, "dp": 4 // tp, "offload": "optimizer"}, **sizes)  # type: ignore[arg-type]
        for tp in (2, 4)
    )

    def search(question: Question) -> BestStrategies:
        for strategy, time_s in ((two, 1.0), (single, 2.0)):
            if all(getattr(strategy, name) in values for name, values in question.axes.items()):
                return BestStrategies(least_s=time_s, strategies=(strategy,))
        return NO_STRATEGIES

    free = AllowedSpace()
    megatron = replace(free, target=target_of(MEGATRON).for_job(model, job))
    assert free.best_on(model, cluster, job, search) == BestStrategies(least_s=1.0, strategies=(two,))
    assert megatron.best_on(model, cluster, job, search) == BestStrategies(least_s=2.0, strategies=(single,))


@pytest.mark.slow
def test_all_devices() -> None:
    """The best plan of the core space leaves n2 idle."""
    running = planned(FOUR, space="core", use_all=True)
    assert set(decided(running, FOUR[1], "lost n3").arrangement.nodes) == {"n0", "n1", "n2"}
    free = decided(without(running, use_all=False), FOUR[1], "lost n3")
    assert set(free.arrangement.nodes) < {"n0", "n1", "n2"}
    # A node with notice goes in any case, and a plan that runs may stay as it is.
    allowed = allowed_space_of(running)
    assert allowed.uses_enough(("n0", "n1", "n2"), situation(FOUR[1], "notice n3"))
    assert not allowed.uses_enough(("n0", "n1", "n2"), situation(FOUR[1], "slow n3 0.5"))
    small = planned((FOUR[0], "3x2xV100-32G", *FOUR[2:]), space="core", use_all=True)
    joined = decided(small, FOUR[1], "slow n3 0.9")
    assert joined.decision == "keep" or set(joined.arrangement.nodes) == {"n0", "n1", "n2", "n3"}


@pytest.mark.slow
def test_where_nothing_fills_all_devices_nothing_is_decided() -> None:
    """A batch of 16 is not a multiple of three equal pipelines."""
    running = planned(FOUR, fixed=(("tp", 2), ("pp", 1), ("cp", 1)), use_all=True)
    with pytest.raises(Infeasible):
        decided(running, FOUR[1], "lost n3", is_of_files=True)
    found = decided(without(running, use_all=False), FOUR[1], "lost n3", is_of_files=True)
    assert len(found.arrangement.nodes) == 2


@pytest.mark.slow
def test_replicas_of_a_stage() -> None:
    running = planned(PAIR, stage_dp=2)
    found = decided(running, PAIR[1], "lost n1")
    assert found.arrangement.stage_dp == 2
    single = decided(without(running, stage_dp=1), PAIR[1], "lost n1")
    assert single.arrangement.strategy is None and single.arrangement.stage_dp == 1
    assert found.step_s < single.step_s


@pytest.mark.slow
def test_fixed_fields_exclude_uneven_plans() -> None:
    """Also those that are dropped, since they follow from the number of replicas."""
    running = planned(PAIR, fixed=(("dp", 2),))
    found = decided(running, PAIR[1], "lost n1")
    assert found.arrangement.strategy is not None
    assert decided(without(running, fixed={}), PAIR[1], "lost n1").arrangement.strategy is None


def test_stages_on_two_pools_are_allowed_and_not_used() -> None:
    """The limit of their rows is kept in the question of the decided plan."""
    question = PlanQuestion(stage_dp=2, mixed_stage_rows=4, use_all=True, target=MEGATRON)
    assert question_after(question, None) == question


def test_fields_of_replicas_stay_in_the_question_where_they_hold() -> None:
    running = planned(FOUR, fixed=(("dp", 4), ("tp", 1)), axes=(("optim_shard", (4, 8)),), use_all=True)
    strategy = running.strategy
    assert question_after(running.question, strategy) == running.question
    fewer = question_after(running.question, with_dp(strategy, 2))
    assert dict(fewer.fixed) == {"tp": 1} and dict(fewer.axes) == {}
    allowed = allowed_space_of(running)
    assert allowed.fixed == {"tp": 1} and allowed.dropped == {"dp", "optim_shard"}
    only_dropped = allowed_space_of(without(running, fixed={"dp": 4}, axes={}))
    assert not only_dropped.fixed and not only_dropped.has_uneven
    assert allowed_space_of(without(running, fixed={}, axes={})).has_uneven


def test_restrictions_are_named() -> None:
    running = planned(FOUR, fixed=(("dp", 4), ("tp", 1)), axes=(("optim_shard", (4, 8)),), use_all=True)
    asked = replace(running.question, space="core", target=MEGATRON, axes={"pp": (1, 2)})
    text = allowed_space_of(replace(running, question=asked)).text
    assert text == "the space core, tp=1, pp of 1, 2, plans on all nodes, plans that Megatron-LM 0.19 runs"
    assert AllowedSpace().text == ""


def test_what_a_plan_file_cannot_represent_is_not_for_a_target() -> None:
    running = planned(FOUR, fixed=(("dp", 4), ("tp", 1)), axes=(("optim_shard", (4, 8)),), use_all=True)
    nodes = tuple(f"n{place}" for place in range(4))
    everywhere = situation(FOUR[1], "slow n0 1")
    even = Arrangement(strategy=running.strategy, slots=nodes, microbatches=(2, 2, 2, 2))
    uneven, rerouted = (
        replace(even, microbatches=(1, 2, 2, 3)),
        replace(even, slots=("", *nodes[1:])),
    )
    free, files = AllowedSpace(), AllowedSpace(is_of_files=True)
    target = AllowedSpace(target=target_of("shardwise").for_job(running.model, running.job))
    assert [space.allows(even, everywhere) for space in (free, files, target)] == [True] * 3
    for one in (uneven, rerouted):
        assert [space.allows(one, everywhere) for space in (free, files, target)] == [True, False, False]


def test_mixed_pool_stages_are_refused() -> None:
    running = read_plan(str(PLANS / "on-two-pools.yaml"))
    first, *others = running.best.layout.pipelines
    part = StagePart(ranks="0", device_class="A100-80G", tp=1, rows=1)
    stage = replace(first.stages[0], parts=(part, replace(part, ranks="1")))
    pipelines = (replace(first, stages=(stage, *first.stages[1:])), *others)
    mixed = replace(running, best=replace(running.best, layout=Layout(pipelines=pipelines)))
    assert isinstance(arrangement_of(running, running.cluster), UnevenArrangement)
    with pytest.raises(ConfigError, match="PLAN: has mixed-pool stages, which are not replanned"):
        arrangement_of(mixed, running.cluster)


def test_the_question_of_a_plan_for_a_trace_was_not_recorded_in_version_1() -> None:
    """The certificate of such a file fixes all fields of its strategy; that is not what was asked."""
    plan = read_plan(str(PLANS / "for-a-trace.yaml"))
    assert plan.for_trace is not None and plan.proof.fixed and not plan.question.fixed
    fixed = read_plan(str(PLANS / "fixed-fields.yaml"))
    assert fixed.proof.fixed == fixed.question.fixed != {}
