"""The explanation of a plan: the ledger's tree, every change of one field, the bottleneck, and further
questions.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
from tests.property.search_space_reference import SpaceTwin, first_reason

from shardwise.cluster import load_cluster
from shardwise.cost import peaks_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import model_from_config
from shardwise.plans import Plan, plan_of
from shardwise.search import Explanation, Question, explained, plan, what_if, why_not
from shardwise.search.best_alternatives import MAIN_FIELDS
from shardwise.search.explanation import axes_of, changes_of, question_of
from shardwise.search.step_times import step_times_s
from shardwise.strategy import FIELDS, MEMORY, Job, Strategy, StrategyTable, complete

LAYERS, BATCH, DEVICES = 4, 4, 4
DIMENSIONS = {
    "layers": LAYERS, "hidden": 3072, "ffn": 12288, "heads": 12, "kv_heads": 4, "vocab": 50_257,
    "seq_len": 4096,
}  # fmt: skip
A100 = load_cluster("2x2xA100-40G")
QUESTION = Question(
    model=model_from_config(DIMENSIONS),
    # Half a billion parameters of 18 bytes, in 6 GiB: not everything fits.
    cluster=replace(A100, classes={n: replace(d, memory_bytes=6 << 30) for n, d in A100.classes.items()}),
    job=Job(seq_len=4096, global_batch_size=BATCH, dtype="bf16"),
)


@cache
def planned(space: str = "default", experts: bool = False) -> Plan:
    routed = {"experts": 8, "top_k": 2, "ffn": 3072} if experts else {}
    requested = replace(QUESTION, space=space, top=1, model=model_from_config({**DIMENSIONS, **routed}))
    answer = plan(requested)
    return plan_of(answer, model=requested.model, cluster=requested.cluster, job=requested.job)


@cache
def found() -> Explanation:
    """With the best plan for every value of every field."""
    return explained(planned(), every_value=True)


def strategy(**fields: object) -> Strategy:
    return complete(fields, devices=DEVICES, layers=LAYERS, experts=None, global_batch_size=BATCH)


@cache
def candidates(core: bool, moe: bool = False) -> frozenset[Strategy]:
    twin = SpaceTwin(core=core, devices=DEVICES, layers=LAYERS, moe=moe, batch=BATCH)
    return frozenset(twin.candidates())


@cache
def values(core: bool, moe: bool) -> dict[str, frozenset[object]]:
    """Every value of each field."""
    return {field: frozenset(getattr(s, field) for s in candidates(core, moe)) for field in FIELDS}


def changed_to(best: Strategy, field: str, value: Any) -> Strategy:
    return replace(best, **{field: value})


def test_the_question_of_a_plan_is_that_of_its_certificate() -> None:
    of = replace(planned(), certificate=replace(planned().proof, fixed={"pp": 1}, axes={"tp": (1, 2)}))
    question = question_of(of)
    assert (question.fixed, question.axes, question.top) == ({"pp": 1}, {"tp": (1, 2)}, 1)
    assert question.cluster is of.cluster


def test_ledger_entries_hold_every_candidate_once() -> None:
    certificate = planned().proof
    entries = found().entries
    assert sum(block.candidates for block in entries) == certificate.enumerated
    assert len({(b.tp, b.cp, b.pp, b.dp) for b in entries}) == len(entries)
    assert all(b.tp * b.cp * b.pp * b.dp == DEVICES for b in entries)
    sizes = [block.candidates for block in entries]
    assert sizes == sorted(sizes, reverse=True)
    for code, count in certificate.rejected.items():
        assert sum(block.outcomes.get(code, 0) for block in entries) == found().totals[code] == count
    assert found().totals["simulated"] == certificate.simulated
    pruned = sum(count for outcome, count in found().totals.items() if outcome.startswith("cut_"))
    assert pruned == certificate.cut_by_bound
    assert found().agrees and found().unexplored == 0


def test_the_largest_ledger_entry_is_counted_by_hand() -> None:
    """Candidates by degrees, from the enumeration."""
    largest = found().entries[0]
    degrees = (largest.tp, largest.cp, largest.pp, largest.dp)
    assert largest.candidates == sum((s.tp, s.cp, s.pp, s.dp) == degrees for s in candidates(core=False))


def test_every_alternative_is_a_candidate_with_its_cost() -> None:
    problem = QUESTION.problem()
    best = planned().best
    assert [axis.field for axis in found().axes] == [name for name in FIELDS if name != "recompute_modules"]
    seen = 0
    for axis in found().axes:
        assert axis.value == getattr(best.strategy, axis.field)
        values = [alternative.value for alternative in axis.alternatives]
        assert len(set(values)) == len(values) and axis.value not in values
        for alternative in axis.alternatives:
            seen += 1
            assert alternative.strategy in candidates(core=False)
            assert getattr(alternative.strategy, axis.field) == alternative.value
            reason = first_reason(alternative.strategy, problem.limits)
            if reason is not None:
                assert (alternative.reason, alternative.slower) == (reason, None)
                continue
            table = StrategyTable.of([alternative.strategy])
            nbytes = float(peaks_of(problem, table).device_bytes[0])
            assert (alternative.reason == MEMORY) == (nbytes > problem.usable_bytes)
            if alternative.reason == MEMORY:
                assert alternative.lacking_bytes == pytest.approx(nbytes - problem.usable_bytes)
            slower = float(step_times_s(problem, table)[0]) / best.step_time_s - 1.0
            assert alternative.slower == pytest.approx(slower, abs=1e-12)
            if alternative.reason is None:
                assert slower >= -1e-12
    assert seen > 15


def test_the_nearest_alternative_is_the_fastest_feasible_one() -> None:
    nearest = [axis.nearest for axis in found().axes if axis.nearest is not None]
    assert nearest
    for axis in found().axes:
        had = [a.slower for a in axis.alternatives if a.reason is None and a.slower is not None]
        assert (axis.nearest is None) == (not had)
        assert axis.nearest is None or axis.nearest.slower == min(had)


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 2, "pp": 2, "zero_stage": 1},
        {"pp": 4, "schedule": "zb_h1"},
        {"pp": 2, "schedule": "interleaved_1f1b", "vpp": 2, "recompute": "full", "tp": 2},
        {"tp": 4, "recompute": "selective"},
        {"cp": 2, "dp": 2, "zero_stage": 3, "axis_order": "dp-cp-tp-pp"},
        {"pp": 2, "first_stage_layers": 1, "micro_batch_size": 2},
    ],
)
def test_changes_are_candidates_with_another_value(core: bool, moe: bool, fields: dict[str, object]) -> None:
    """For any strategy: every value of a field that is legal without another change is among them."""
    best = complete(
        {**fields, **({"etp": fields.get("tp", 1)} if moe else {})},
        devices=DEVICES, layers=LAYERS, experts=8 if moe else None, global_batch_size=BATCH,
    )  # fmt: skip
    model = planned(experts=moe).model
    requested = replace(QUESTION, space="core" if core else "default", model=model)
    known = candidates(core, moe)
    for field in FIELDS:
        changed = list(changes_of(requested, best, field))
        assert set(changed) <= known
        assert all(getattr(s, field) != getattr(best, field) for s in changed)
        alone = (changed_to(best, field, value) for value in values(core, moe)[field])
        assert {s for s in alone if s in known and s != best} <= set(changed), field


def test_a_changed_degree_changes_another_with_it() -> None:
    found = set(changes_of(QUESTION, strategy(tp=2, dp=2, zero_stage=1), "tp"))
    assert {(s.tp, s.pp, s.cp, s.dp) for s in found} == {
        (4, 1, 1, 1),
        (1, 2, 1, 2),
        (1, 1, 2, 2),
        (1, 1, 1, 4),
    }
    # What was sharded over all replicas stays so: dp * cp is 4, and 1.
    assert {s.optim_shard for s in found if s.cp == 2 or s.dp == 4} == {4}
    assert {s.optim_shard for s in found if s.tp == 4} == {1}


def test_fields_that_the_question_fixes_stay_fixed() -> None:
    best = strategy(tp=2, dp=2)
    assert not list(changes_of(replace(QUESTION, fixed={"tp": 2}), best, "tp"))
    within_axes = list(changes_of(replace(QUESTION, axes={"dp": (2, 4)}), best, "tp"))
    assert within_axes and all(s.dp in (2, 4) for s in within_axes)


@pytest.mark.slow
def test_memory_binds_where_a_faster_change_does_not_fit() -> None:
    """With enough memory nothing binds; the plan's own cluster has too little for its fastest change."""
    binding = found().binding
    problem = QUESTION.problem()
    assert binding.free_bytes == problem.usable_bytes - planned().best.peak_memory.device
    roomy = what_if(planned(), "memory=100x")
    assert roomy.after.step_time_s < planned().best.step_time_s
    assert binding.resource == MEMORY and binding.lacking is not None
    assert binding.lacking.slower is not None and binding.lacking.slower < 0.0
    free = replace(planned(), cluster=roomy.question.cluster, best=roomy.after)
    assert explained(free).binding.resource == "time"


def test_the_cost_of_a_value_is_that_of_why_not() -> None:
    """Each row is the best plan with its value, and a value is excluded where there is none. The same change
    of the plan with all other fields kept costs up to many times as much."""
    of = planned()
    alone = {
        (axis.field, one.value): one
        for axis in axes_of(question_of(of), QUESTION.problem(), of.best)
        for one in axis.alternatives
    }
    excess = []
    for axis in found().axes:
        for one in axis.alternatives:
            pinned = {axis.field: cast(Any, one.value)}
            assert one.reason is None
            after = why_not(of, pinned).after
            assert one.slower is not None
            assert of.step_time_s * (1.0 + one.slower) == pytest.approx(after.step_time_s, rel=1e-12)
            assert (one.device_bytes, one.strategy) == (after.peak_memory.device, after.strategy)
            assert one.fits_probability == after.fits_probability
            before = alone[axis.field, one.value]
            if before.reason is None and before.slower is not None:
                excess.append(before.slower - one.slower)
    assert len(excess) >= 7 and min(excess) >= -1e-12 and max(excess) > 0.02


def test_a_value_without_a_plan_has_the_reason() -> None:
    """tp = 4 does not divide 6 heads."""
    model = model_from_config({**DIMENSIONS, "heads": 6, "kv_heads": 6})
    found = plan(replace(QUESTION, model=model, fixed={"schedule": "1f1b"}, top=0))
    of = plan_of(found, model=model, cluster=QUESTION.cluster, job=QUESTION.job)
    (tp,) = (axis for axis in explained(of, every_value=True).axes if axis.field == "tp")
    reasons = {one.value: one.reason for one in tp.alternatives}
    assert reasons.pop(4) == "heads_tp" and set(reasons.values()) <= {None, MEMORY}
    with pytest.raises(Infeasible):
        why_not(of, {"tp": 4})


def test_only_neighbouring_values_of_the_main_fields_are_searched_by_default() -> None:
    some = {axis.field: axis for axis in explained(planned()).axes}
    for axis in found().axes:
        every = {one.value: one for one in axis.alternatives}
        few = {one.value: one for one in some[axis.field].alternatives}
        assert all(every[value] == one for value, one in few.items())
        if axis.field not in MAIN_FIELDS:
            assert not few
        elif axis.field in ("tp", "pp", "cp", "dp", "micro_batch_size"):
            below = [value for value in every if cast(int, value) < cast(int, axis.value)]
            above = [value for value in every if cast(int, value) > cast(int, axis.value)]
            assert set(few) == {*sorted(below)[-1:], *sorted(above)[:1]}
        else:
            assert set(few) == set(every)


def test_more_of_a_resource_brings_what_what_if_finds() -> None:
    relaxed = found().relaxed
    gains = [one.gain for one in relaxed]
    assert gains == sorted(gains, reverse=True) and min(gains) >= -1e-12
    # 6 GiB are too little for the fastest strategy, and products take most of the step.
    helpful = {one.resource for one in relaxed if one.gain > 1e-3}
    assert {"computation", "device memory"} <= helpful
    for one in relaxed:
        compared = what_if(planned(), one.change)
        assert one.step_time_s == pytest.approx(compared.after.step_time_s, rel=1e-12)
        per_row = one.step_time_s / compared.question.job.global_batch_size * BATCH
        assert one.gain == pytest.approx(1.0 - per_row / planned().optimum_s, abs=1e-12)


def test_searches_that_the_budget_leaves_out_are_counted() -> None:
    hurried = explained(planned(), budget_s=1e-3)
    assert hurried.unsearched > 0 and not hurried.relaxed
    assert all(one.reason is not None for axis in hurried.axes for one in axis.alternatives)
    assert found().unsearched == 0


def test_why_not_searches_with_the_pinned_values() -> None:
    comparison = why_not(planned(), {"tp": 4})
    expected = plan(replace(QUESTION, fixed={"tp": 4}, top=0)).best
    assert comparison.after == expected
    difference_s = expected.step_time_s - planned().best.step_time_s
    assert sum(comparison.breakdown_s.values()) == pytest.approx(difference_s, rel=1e-9)
    more = expected.peak_memory.device - planned().best.peak_memory.device
    assert sum(comparison.memory_bytes.values()) == pytest.approx(more, rel=1e-9)
    assert comparison.fields["tp"] == (planned().best.strategy.tp, 4)


def test_pinned_values_override_fixed_ones() -> None:
    certificate = replace(planned().proof, fixed={"tp": 1}, axes={"pp": (1,)})
    comparison = why_not(replace(planned(), certificate=certificate), {"tp": 2, "pp": 2})
    assert (comparison.after.strategy.tp, comparison.after.strategy.pp) == (2, 2)


def test_why_not_of_an_impossible_value_is_infeasible() -> None:
    """tp = 4 does not divide 6 heads; dp = 3 does not divide the batch."""
    heads = model_from_config({**DIMENSIONS, "heads": 6, "kv_heads": 6})
    with pytest.raises(Infeasible) as caught:
        why_not(replace(planned(), network=heads), {"tp": 4})
    assert set(caught.value.reasons) == {"heads_tp"} and caught.value.relaxations == ()
    with pytest.raises(ConfigError):
        why_not(planned(), {"dp": 3})


@pytest.mark.slow
def test_what_if_plans_again() -> None:
    slower = what_if(planned(), "inter_node_bandwidth=0.01x")
    assert slower.after.step_time_s >= planned().best.step_time_s
    assert slower.question.cluster.tiers[-1].bytes_per_s == pytest.approx(
        0.01 * QUESTION.cluster.tiers[-1].bytes_per_s
    )
    longer = what_if(planned(), "seq_len=0.5x")
    assert longer.after == plan(replace(QUESTION, top=0, job=replace(QUESTION.job, seq_len=2048))).best
    with pytest.raises(Infeasible) as caught:
        what_if(planned(), "memory=0.01x,host_memory=0.001x")
    assert MEMORY in caught.value.reasons and caught.value.relaxations == ()
