"""(f) Commands about the same question agree with each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import isclose
from typing import Any

from tests.relations.commands import Answer, Commands, SavedPoint
from tests.relations.questions import Question
from tests.relations.relation import (
    REL_TOL,
    figures,
    has_network,
    is_plan,
    is_uniform_plan,
    relation,
    require,
    require_same,
    whole,
)

MOST_EVALUATED = 20_000
"""Largest number of candidates of a space that is evaluated exhaustively."""


SEARCHED = ("ep_overlap",)
"""Options of the software that a search chooses; the others are at their defaults."""


def _strategy_text(strategy: dict[str, Any]) -> str:
    fields = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in strategy.items()
        if name != "options"
    }
    return ",".join(f"{name}={value}" for name, value in fields.items())


def _result(answer: Answer) -> Any:
    """The estimate of a result, without the keys that only plans of mixed clusters, or only `evaluate`,
    have."""
    ignored = ("uniform_step_time_s", "fastest_class_step_time_s", "why", "layout", "memory_by_stage")
    return {key: value for key, value in answer.best.items() if key not in ignored}


@relation(is_plan)
def evaluate_agrees(question: Question, shardwise: Commands) -> None:
    """`evaluate` gives the same estimate for the best strategy on all devices."""
    answer = shardwise.answer(question.words(use_all=""))
    if (
        answer.fits
        and answer.document["devices_used"] == question.cluster.devices
        and answer.best["strategy"] is not None
    ):
        options = answer.best["strategy"].get("options", {})
        chosen = [f"{name}={options[name]}" for name in SEARCHED if name in options]
        words = question.words(command="evaluate", space=None, fix=None, top=None)
        if chosen:
            words = (*words, "--set", ",".join(chosen))
        evaluated = shardwise.answer((*words, "--strategy", _strategy_text(answer.best["strategy"])))
        require_same(answer, evaluated, what="evaluate", figures=_result)


@relation(is_uniform_plan)
def frontier_begins_with_the_best(question: Question, shardwise: Commands) -> None:
    """The fastest point of `frontier` is the answer of `plan` on all devices."""
    answer = shardwise.answer(question.words(use_all=""))
    frontier = shardwise.answer(question.words(command="frontier", top=None))
    require(answer.fits == frontier.fits, "frontier: only one of them fits", answer, frontier)
    if answer.fits:
        times = frontier.step_time_s, answer.step_time_s
        found = f"frontier: {times[0]!r} s, plan: {times[1]!r} s"
        require(isclose(*times, rel_tol=REL_TOL), found, answer, frontier)


@relation(is_uniform_plan)
def frontier_ends_with_the_smallest(question: Question, shardwise: Commands) -> None:
    """The smallest point of `frontier` is the answer with objective memory."""
    smallest = shardwise.answer(question.words(objective="memory"))
    frontier = shardwise.answer(question.words(command="frontier", top=None))
    require(smallest.fits == frontier.fits, "frontier: only one of them fits", smallest, frontier)
    if smallest.fits:
        point = frontier.document["points"][-1]
        nbytes = smallest.best["peak_memory_bytes"]["device"]
        found = f"frontier: {point['memory_bytes']!r} bytes, plan: {nbytes!r}"
        require(isclose(point["memory_bytes"], nbytes, rel_tol=REL_TOL), found, smallest, frontier)


@relation(is_uniform_plan)
def frontier_of_plan(question: Question, shardwise: Commands) -> None:
    """`plan --frontier` has the points of `frontier`, on all devices."""
    answer = shardwise.answer(question.words(frontier="", use_all=""))
    if answer.fits:
        frontier = shardwise.answer(question.words(command="frontier", top=None))
        listed = [
            (point["step_time_s"], point["peak_memory_bytes"]["device"])
            for point in answer.document["frontier"]
        ]
        require_same(
            replace(answer, document={"points": listed}),
            replace(frontier, document={"points": figures(frontier)}),
            what="plan --frontier",
            figures=lambda one: one.document["points"],
        )


@relation(lambda question: is_plan(question))
def check_accepts(question: Question, shardwise: Commands) -> None:
    """`check` accepts the plan that `plan` saves."""
    answer = shardwise.answer(question.words())
    if answer.fits:
        checked = shardwise.answer(("check", question.saved()))
        wrong = [one for one in checked.document["checks"] if not (one["ok"] or one["is_open"])]
        require(checked.code == 0 and checked.document["ok"], f"check: {wrong}", checked)


@relation(lambda question: not question.cluster.is_mixed or question.is_graph)
def check_accepts_points(question: Question, shardwise: Commands) -> None:
    """`check` accepts the plans of the fastest and the smallest point that `frontier` saves."""
    words = question.words(command="frontier", top=None)
    if shardwise.answer(words).fits:
        for is_smallest in (False, True):
            checked = shardwise.answer(("check", SavedPoint(words, is_smallest)))
            wrong = [one for one in checked.document["checks"] if not (one["ok"] or one["is_open"])]
            require(checked.code == 0 and checked.document["ok"], f"check: {wrong}", checked)


@relation(is_plan)
def explain_agrees(question: Question, shardwise: Commands) -> None:
    """`explain` finds the same best plan, and accounts for every candidate."""
    answer = shardwise.answer(question.words())
    if answer.fits and answer.best["strategy"] is not None:
        explained = shardwise.answer(("explain", question.saved()))
        require(explained.document["agrees"], "explain finds another best", explained)
        certificate = answer.document["certificate"]
        counts = explained.document["candidates"], certificate["enumerated"] + certificate["unexplored"]
        require(counts[0] == counts[1], f"explain: candidates {counts}", explained)


@relation(is_uniform_plan)
def why_not_is_a_plan_with_that_fixed(question: Question, shardwise: Commands) -> None:
    """`explain --why-not` for a plan on all devices finds the same as `plan --fix` on any part of them."""
    answer = shardwise.answer(question.words(fix=None, use_all=""))
    fix = question.rng("why not").choice(
        ("tp=1", "pp=1", "zero_stage=1", "recompute=full", "micro_batch_size=1")
    )
    if answer.fits:
        saved = question.with_options({"fix": None, "use_all": ""}).saved()
        fixed = shardwise.answer(question.words(fix=fix))
        other = shardwise.answer(("explain", saved, "--why-not", fix))
        require(fixed.fits == other.fits, "why not: only one of them fits", fixed, other)
        if fixed.fits:
            times = fixed.step_time_s, other.document["result"]["step_time_s"]
            found = f"why not: {times[1]!r} s, fixed: {times[0]!r} s"
            require(isclose(*times, rel_tol=REL_TOL), found, fixed, other)


@relation(lambda question: is_uniform_plan(question) and has_network(question) and not question.cluster.tiers)
def what_if_is_a_plan_there(question: Question, shardwise: Commands) -> None:
    """`explain --what-if` with twice the bandwidth between nodes finds the same as `plan` on that cluster."""
    answer = shardwise.answer(question.words(use_all=""))
    if answer.fits:
        cluster = question.cluster.with_explicit_cards()
        faster = cluster.changed(
            lambda run: replace(run, card_bytes_per_s=2.0 * (run.card_bytes_per_s or 0.0))
        )
        there = shardwise.answer(question.on(faster).words())
        other = shardwise.answer(
            (
                "explain",
                question.with_options({"use_all": ""}).saved(),
                "--what-if",
                "inter_node_bandwidth=2x",
            )
        )
        times = there.step_time_s, other.document["result"]["step_time_s"]
        found = f"what if: {times[1]!r} s, planned there: {times[0]!r} s"
        require(isclose(*times, rel_tol=REL_TOL), found, there, other)


@relation(is_plan)
def simulate_agrees(question: Question, shardwise: Commands) -> None:
    """`simulate` has the plan's step time, and its pipeline takes no more."""
    answer = shardwise.answer(question.words())
    if answer.fits:
        timeline = shardwise.answer(("simulate", question.saved()))
        times = timeline.document["step_time_s"], timeline.document["timeline_s"]
        is_same = isclose(times[0], answer.step_time_s, rel_tol=REL_TOL)
        found = f"simulate: {times!r} s, planned {answer.step_time_s!r} s"
        require(is_same and times[1] <= times[0] * (1.0 + REL_TOL), found, answer, timeline)


@relation(is_plan)
def exhaustive_finds_the_same(question: Question, shardwise: Commands) -> None:
    """`--exhaustive` evaluates every candidate on all devices and finds the same plan as `--use-all`, by its
    hash too."""
    fix = question.options.get("--fix", "cp=1")  # with a fixed field no uneven plan is searched for
    answer = shardwise.answer(question.words(use_all="", fix=fix))
    if answer.fits and answer.document["certificate"]["enumerated"] <= MOST_EVALUATED:
        every = shardwise.answer(question.words(exhaustive="", fix=fix))
        require_same(answer, every, what="exhaustive", figures=figures)
        hashes = answer.document["plan_hash"], every.document["plan_hash"]
        require(hashes[0] == hashes[1], f"exhaustive: hashes {hashes}", answer, every)


@relation(lambda question: is_plan(question) and question.seed % 8 < 2)
def two_workers_find_the_same(question: Question, shardwise: Commands) -> None:
    """`--workers 2` gives the same answer, including the counts of its certificate."""
    answer, other = shardwise.answer(question.words()), shardwise.answer(question.words(workers="2"))
    require_same(answer, other, what="two workers", figures=whole)
    if answer.fits:
        hashes = answer.document["plan_hash"], other.document["plan_hash"]
        require(hashes[0] == hashes[1], f"two workers: hashes {hashes}", answer, other)


@relation(is_plan)
def a_budget_that_is_enough(question: Question, shardwise: Commands) -> None:
    """A budget that is not used up changes nothing."""
    answer, other = shardwise.answer(question.words()), shardwise.answer(question.words(budget="1h"))
    require_same(answer, other, what="a budget that is enough", figures=whole)


@relation(is_plan)
def a_budget_that_is_too_short(question: Question, shardwise: Commands) -> None:
    """A search that ends early finds no faster plan than a full one, and its lower bound is not above the
    best."""
    answer, early = shardwise.answer(question.words()), shardwise.answer(question.words(budget="20ms"))
    if early.fits:
        found = f"ended early: {early.step_time_s!r} s, at least {early.lower_bound_s!r}"
        text = f"{found}; whole: {answer.step_time_s!r} s, at least {answer.lower_bound_s!r}"
        holds = early.step_time_s >= answer.lower_bound_s * (1.0 - REL_TOL)
        bound_s = early.document["certificate"]["lower_bound_s"]
        is_bound = early.document["best"]["strategy"] is None or bound_s <= early.step_time_s * (
            1.0 + REL_TOL
        )
        is_true = (
            answer.step_time_s >= early.lower_bound_s * (1.0 - REL_TOL) or not early.document["is_proven"]
        )
        require(holds and is_bound and is_true, text, early, answer)


@relation(is_plan)
def more_runners_up(question: Question, shardwise: Commands) -> None:
    """A shorter list of runners-up is the beginning of a longer one, and the best plan is the same."""
    few, many = shardwise.answer(question.words(top="1")), shardwise.answer(question.words(top="4"))
    require(few.fits == many.fits, "runners-up: only one fits", few, many)
    if few.fits:
        times = [
            [one["step_time_s"] for one in (answer.best, *answer.document["runners_up"])]
            for answer in (few, many)
        ]
        is_same = all(isclose(a, b, rel_tol=REL_TOL) for a, b in zip(*times, strict=False))
        is_sorted = all(a <= b * (1.0 + REL_TOL) for a, b in pairwise(times[1]))
        require(is_same and is_sorted, f"runners-up: {times}", few, many)


@relation(is_uniform_plan)
def the_space_is_counted(question: Question, shardwise: Commands) -> None:
    """The certificate has as many candidates as `space` counts."""
    answer = shardwise.answer(question.words(use_all=""))
    if answer.fits:
        words = question.words(command="space", top=None, memory_margin=None, optimizer=None)
        space = shardwise.answer(words)
        certificate = answer.document["certificate"]
        counts = space.document["count"], certificate["enumerated"] + certificate["unexplored"]
        require(int(counts[0]) == counts[1], f"the space: candidates {counts}", answer, space)
