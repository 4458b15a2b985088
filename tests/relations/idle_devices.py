"""(d) Permission to leave devices idle makes no plan slower; no listed part of the cluster is faster than the
answer."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

from tests.relations.commands import Answer, Commands
from tests.relations.questions import Question
from tests.relations.relation import REL_TOL, idle_norm_s, is_plan, relation, require, require_not_slower


@relation(is_plan)
def idle_devices_are_not_slower(question: Question, shardwise: Commands) -> None:
    """A plan with `--allow-idle` is not slower than one without."""
    better, worse = shardwise.answer(question.words(allow_idle="")), shardwise.answer(question.words())
    require_not_slower(better, worse, what="--allow-idle is slower")


@relation(is_plan)
def all_devices_are_not_faster(question: Question, shardwise: Commands) -> None:
    """A plan with `--use-all` is not faster than the answer, which reports the time on all devices."""
    answer, every = shardwise.answer(question.words()), shardwise.answer(question.words(use_all=""))
    require_not_slower(answer, every, what="--use-all is faster", bound_s=idle_norm_s(question, answer))
    if answer.fits:
        reported_s = answer.document["all_devices_step_time_s"]
        found = f"all devices: {reported_s!r} s reported, {every.step_time_s!r} s with --use-all"
        is_same = (
            every.fits and isclose(reported_s, every.step_time_s, rel_tol=REL_TOL + every.gap)
            if reported_s
            else True
        )
        require(is_same, found, answer, every)


@relation(is_plan)
def idle_devices_are_counted(question: Question, shardwise: Commands) -> None:
    """Used and idle devices add up to the devices of the cluster."""
    answer = shardwise.answer(question.words())
    if answer.fits:
        used, idle = answer.document["devices_used"], answer.document["idle"]["devices"]
        found = f"idle: {used} used and {idle} idle of {question.cluster.devices}"
        require(used + idle == question.cluster.devices, found, answer)


@relation(is_plan)
def not_slower_than_a_part_listed(question: Question, shardwise: Commands) -> None:
    """The best plan is not slower than any of `parts`, with `--allow-idle` and without."""
    for answer in (shardwise.answer(question.words(allow_idle="")), shardwise.answer(question.words())):
        if answer.fits:
            _beats_parts(answer, "step_time_s", answer.step_time_s)


@relation(is_plan)
def parts_beat_those_before(question: Question, shardwise: Commands) -> None:
    """A part has a time if it beats the parts before it, else null (docs/reference/formats.md)."""
    answer = shardwise.answer(question.words(allow_idle=""))
    best_s = float("inf")
    for part in answer.document.get("parts", ()):
        if part["step_time_s"] is not None:
            found = f"a part of {part['devices']} devices: {part['step_time_s']!r} s after {best_s!r} s"
            require(part["step_time_s"] <= best_s * (1.0 + REL_TOL), found, answer)
            best_s = part["step_time_s"]


def _with_node_prices(question: Question) -> Question:
    """The question with a price for every node."""
    cluster = question.cluster.with_explicit_cards()
    prices = {run: 1.0 + place for place, run in enumerate(dict.fromkeys(cluster.nodes))}
    return question.on(
        cluster.changed(lambda run: replace(run, price_usd_per_hour=prices[run] * run.devices))
    )


@relation(is_plan)
def no_part_is_cheaper(question: Question, shardwise: Commands) -> None:
    """With objective cost, neither a listed part nor the whole cluster is cheaper than the best plan."""
    with_prices = _with_node_prices(question)
    answer = shardwise.answer(with_prices.words(objective="cost"))
    if answer.fits:
        usd = _usd_per_step(with_prices, answer)
        _beats_parts(answer, "usd_per_step", usd)
        every = shardwise.answer(with_prices.words())
        if every.fits and every.document["devices_used"] == with_prices.cluster.devices:
            other = _usd_per_step(with_prices, every)
            found = f"cost: {usd!r} USD a step over {other!r}"
            require(usd <= other * (1.0 + REL_TOL) or every.best["strategy"] is None, found, answer, every)


def _usd_per_step(question: Question, answer: Answer) -> float:
    tokens = question.seq_len * question.batch
    return float(answer.best["usd_per_billion_tokens"]) * tokens / 1e9


@relation(is_plan)
def no_smaller_part_fits(question: Question, shardwise: Commands) -> None:
    """With objective devices, nothing fits on the parts before the chosen one."""
    answer = shardwise.answer(question.words(objective="devices"))
    if answer.fits:
        used = answer.document["devices_used"]
        found = [one for one in answer.document["parts"] if one["step_time_s"] and one["devices"] < used]
        require(not found, f"{used} devices, though parts fit: {found}", answer)


def _beats_parts(answer: Answer, key: str, best: float) -> None:
    for part in answer.document["parts"]:
        if part[key] is not None:
            found = f"{key}: {best!r} over {part[key]!r} of the part of {part['devices']} devices"
            require(best <= part[key] * (1.0 + REL_TOL), found, answer)
