"""One step of a graph plan over time: parts that sum to its step time, operators that fill its actions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from tests.property.layout_instances import chain
from tests.runtime.graph_plans import estimated, plan_with, sampled, sampled_in_stages

from shardwise.cost import LayoutEstimate
from shardwise.cost.layouts.context import When
from shardwise.cost.layouts.one import Charge, Place, _Ledger
from shardwise.errors import ConfigError
from shardwise.graph import StagedLayout, block_labels, data_parallel, load_graph, scaled
from shardwise.plans import Plan
from shardwise.search import pipeline_trace, plan_timelines
from shardwise.sim import BLOCKS, COMPUTE, DATA_PARALLEL, OPERATORS, TRAFFIC, Span

CHAIN = chain(16, 8, 16, 4)

MICROBATCHES = 4


def whole_plans() -> list[Plan]:
    """Random layouts with some blocks recomputed, on two and on 2 x 2 processes."""
    return [estimated(plan) for ranks in ((2,), (2, 2)) for plan in sampled(CHAIN, ranks, range(6))]


def staged_plans() -> list[Plan]:
    """Three stages; half of each message overlaps with other work."""
    return [
        estimated(with_overlap(plan, 0.5))
        for plan in sampled_in_stages(CHAIN, (2,), (1, 3), MICROBATCHES, range(4))
    ]


def with_overlap(plan: Plan, share: float) -> Plan:
    """The plan for software that overlaps this fraction of its messages with other work."""
    return replace(plan, job=replace(plan.job, profile=replace(plan.job.profile, pipeline_overlap=share)))


def estimates_of(plan: Plan) -> tuple[LayoutEstimate, ...]:
    """The estimate of each stage."""
    (only,) = plan_timelines(plan)
    return only.estimates


def is_summed_up(price: LayoutEstimate) -> bool:
    """Whether the charges of a stage sum to its estimate, pass by pass."""
    spent: defaultdict[When, float] = defaultdict(float)
    for charge in price.charges:
        spent[charge.when] += charge.seconds
    seconds_by_pass: dict[When, float] = {
        "forward": price.forward_s,
        "backward": price.backward_s,
        "step": price.end_s,
    }
    return all(spent[when] == pytest.approx(seconds, rel=1e-12) for when, seconds in seconds_by_pass.items())


def test_the_times_of_operators_sum_to_the_step_time() -> None:
    prices = [price for plan in [*whole_plans(), *staged_plans()] for price in estimates_of(plan)]
    assert all(map(is_summed_up, prices))
    what = {charge.what for price in prices for charge in price.charges if charge.seconds}
    assert what >= {"forward", "backward", "recomputation", "conversions", "gathers", "gradients", "sends"}
    assert any(price.hidden_s > 0.0 for price in prices)


def test_a_mutant_that_omits_backward_computation_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(ledger: _Ledger, place: Place, what: str, when: When, seconds: float) -> None:
        ledger.seconds[what] += seconds * (1 if when == "step" else ledger.counts.microbatches)
        ledger.passes[when] += seconds
        if what != "backward":
            ledger.charges.append(Charge(place, what, when, seconds))

    plan = estimated(next(sampled(CHAIN, (2,), [0])))
    assert is_summed_up(estimates_of(plan)[0])
    monkeypatch.setattr(_Ledger, "spend", forgets)
    assert not is_summed_up(estimates_of(plan)[0])


def spans_of(plan: Plan) -> Sequence[Span]:
    return pipeline_trace(plan, plan_timelines(plan)[0]).spans


def finish_times(plan: Plan) -> list[float]:
    """The end time of each stage."""
    spans = spans_of(plan)
    return [max(span.finish_s for span in spans if span.rank == stage) for stage in range(plan.stages)]


def test_the_step_ends_at_the_time_of_the_plan() -> None:
    for plan in [*whole_plans(), *staged_plans()]:
        assert max(finish_times(plan)) == pytest.approx(plan.step_time_s, rel=1e-9)


def test_operators_fill_the_actions_of_a_whole_graph() -> None:
    """Forward in order and backward in reverse, without gaps; a block takes as long as its operators."""
    for plan in whole_plans():
        spans = spans_of(plan)
        for action, direction in (("0F0", 1), ("0B0", -1)):
            (whole,) = [span for span in spans if span.name == action and span.track == COMPUTE]
            kind = action[1:]
            for track in (OPERATORS, BLOCKS):
                own = [span for span in spans if span.track == track and span.name.startswith(f"{kind} ")]
                own.sort(key=lambda span: span.start_s)
                assert own[0].start_s == pytest.approx(whole.start_s)
                assert own[-1].finish_s == pytest.approx(whole.finish_s)
                for one, following in pairwise(own):
                    assert one.finish_s == pytest.approx(following.start_s)
            blocks = [span.name.removeprefix(f"{kind} ") for span in own]
            order = [label for label in block_labels(CHAIN)[::direction] if label in blocks]
            assert blocks == order and len(order) >= 4


def test_every_stage_runs_its_blocks_once_for_each_micro_batch() -> None:
    for plan in staged_plans():
        spans = spans_of(plan)
        labels = block_labels(CHAIN)
        assert isinstance(plan.operators, StagedLayout)
        for stage, (first, end) in enumerate(plan.operators.spans):
            for number in range(MICROBATCHES):
                for kind, step in (("F", 1), ("B", -1)):
                    found = [
                        span.name for span in sorted(spans, key=lambda span: span.start_s)
                        if span.rank == stage and span.track == BLOCKS
                        and re.match(rf"{kind}{number} ", span.name)
                    ]  # fmt: skip
                    assert found == [f"{kind}{number} {label}" for label in labels[first:end][::step]]


def test_traffic_is_in_its_operators_and_hidden_sums_overlap_the_last_pass() -> None:
    hidden = 0
    for plan in whole_plans():
        spans = spans_of(plan)
        operators = [span for span in spans if span.track == OPERATORS]
        last = max(span.finish_s for span in operators)
        for each in (span for span in spans if span.track == TRAFFIC and span.start_s < last - 1e-15):
            middle = (each.start_s + each.finish_s) / 2
            assert any(one.start_s <= middle <= one.finish_s for one in operators)
        overlapping = [span for span in spans if span.track == DATA_PARALLEL]
        hidden += len(overlapping)
        assert all(span.finish_s == pytest.approx(last) for span in overlapping)
    assert hidden


def test_a_plan_with_another_step_time_is_refused() -> None:
    """The plan of another version, with another cost model."""
    plan = estimated(next(sampled(CHAIN, (2,), [0])))
    other = replace(plan, best=replace(plan.best, step_time_s=plan.step_time_s * (1 + 1e-6)))
    with pytest.raises(ConfigError, match="step_time_s: is not what this version"):
        plan_timelines(other)


def test_repetitions_are_distinguished() -> None:
    assert block_labels(CHAIN) == ("first", "middle[0]", "middle[1]", "bend", "head")


@pytest.mark.slow
def test_a_shipped_graph_of_many_blocks() -> None:
    """Data parallelism: gradient reduction is overlapped or exposed, and nothing is redistributed."""
    graph = scaled(load_graph("graph:gpt2-1.5b"), 8)
    layout = data_parallel(graph, (2,))
    assert layout is not None
    plan = estimated(plan_with(graph, (2,), layout))
    spans = spans_of(plan)
    blocks = [span for span in spans if span.track == BLOCKS and span.name.startswith("F0 ")]
    assert [span.name for span in blocks] == [f"F0 {label}" for label in block_labels(graph)]
    assert max(finish_times(plan)) == pytest.approx(plan.step_time_s, rel=1e-9)
