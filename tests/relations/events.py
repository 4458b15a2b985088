"""(e) Events that change nothing, or are undone, leave the plan unchanged; replanning never makes things
worse."""

from __future__ import annotations

from dataclasses import replace

from tests.relations.clusters import bytes_per_s
from tests.relations.commands import Answer, Commands, Words
from tests.relations.questions import MOST_DEVICES, Question
from tests.relations.relation import (
    REL_TOL,
    has_network,
    idle_norm_s,
    is_mixed,
    is_plan,
    relation,
    require,
)

from shardwise.cluster import link_graph, load_cluster

YEAR = 365.0 * 86400.0


def is_changed(question: Question) -> bool:
    """Whether the relations on events apply: `replan` takes long on larger clusters."""
    return is_plan(question) and question.cluster.devices <= MOST_DEVICES


def _has_several_devices(question: Question) -> bool:
    return len({run.device for run in question.cluster.nodes}) > 1


def _replan(question: Question, events: str, horizon: str = "6h") -> Words:
    own = question.cluster.words()
    return ("replan", question.saved(), *own, "--events", events, "--horizon", horizon)


def _is_answered(question: Question, shardwise: Commands) -> Answer | None:
    """The plan before the events; None where nothing fits, or where `replan` refuses the plan.

    By design it refuses a strategy on nodes of several sizes, whose ranks cannot be followed node by node,
    and one on a part of a node (`plan --use-all` uses whole nodes).
    """
    answer = shardwise.answer(question.words())
    if not answer.fits:
        return None
    used = _used_devices(question, answer)
    sizes = _sizes(question)
    is_whole = all(count in (0, size) for count, size in zip(used, sizes, strict=True))
    are_equal = len({size for count, size in zip(used, sizes, strict=True) if count}) == 1
    return answer if answer.best["strategy"] is None or (is_whole and are_equal) else None


def _sizes(question: Question) -> list[int]:
    """The number of devices of every node."""
    return [run.devices for run in question.cluster.nodes for _ in range(run.count)]


def _used_devices(question: Question, answer: Answer) -> list[int]:
    """The number of devices of every node that a plan uses."""
    idle: set[int] = set()
    for part in filter(None, (answer.document["idle"]["ranks"] or "").split(",")):
        first, _, last = part.partition("-")
        idle |= set(range(int(first), int(last or first) + 1))
    ranks = iter(range(question.cluster.devices))
    return [sum(next(ranks) not in idle for _ in range(size)) for size in _sizes(question)]


def _require_unchanged(after: Answer, what: str) -> None:
    """The decision is to keep the plan."""
    decision, step_s = after.document["decision"], after.document["step_time_s"]
    found = f"{what}: {decision} at {step_s!r} s, keeping takes {after.document['keep_step_time_s']!r} s"
    require(decision == "keep", found, after)


def _require_planned_time(question: Question, shardwise: Commands, plan: Answer) -> None:
    after = shardwise.answer(_replan(question, "slow n0 1.0"))
    times = after.document["keep_step_time_s"], plan.step_time_s
    bound_s = REL_TOL * plan.step_time_s + idle_norm_s(question, plan)
    found = f"keeping takes {times[0]!r} s, planned {times[1]!r} s"
    require(abs(times[0] - times[1]) <= bound_s, found, after)


@relation(is_changed)
def unchanged_plan_takes_its_planned_time(question: Question, shardwise: Commands) -> None:
    """After an event that changes nothing, a step takes the planned time. An uneven plan is then estimated on
    its own nodes, without the gradient norm over idle devices (`idle_norm_s`)."""
    plan = _is_answered(question, shardwise)
    if plan is not None and (plan.best["strategy"] is None or not _has_several_devices(question)):
        _require_planned_time(question, shardwise, plan)


@relation(lambda question: is_changed(question) and _has_several_devices(question))
def unchanged_strategy_on_several_devices(question: Question, shardwise: Commands) -> None:
    """The same for a uniform strategy on nodes of several device classes."""
    plan = _is_answered(question, shardwise)
    if plan is not None and plan.best["strategy"] is not None:
        _require_planned_time(question, shardwise, plan)


@relation(is_changed)
def an_event_that_changes_nothing(question: Question, shardwise: Commands) -> None:
    """Sets a node, and a device, to its current speed."""
    plan = _is_answered(question, shardwise)
    if plan is not None:
        for events in ("slow n0 1.0", "slow d0 1.0"):
            _require_unchanged(shardwise.answer(_replan(question, events)), events)


@relation(is_changed)
def an_event_taken_back(question: Question, shardwise: Commands) -> None:
    """Slows a node down, then restores its speed."""
    plan = _is_answered(question, shardwise)
    if plan is not None:
        last = question.cluster.node_count - 1
        events = f"slow n{last} 0.5; slow n{last} 1.0"
        _require_unchanged(shardwise.answer(_replan(question, events)), events)


@relation(
    lambda question: (
        is_changed(question)
        and not is_mixed(question)
        and has_network(question)
        and question.cluster.has_shorthand
    )
)
def a_link_as_it_is(question: Question, shardwise: Commands) -> None:
    """Sets a link to its current bandwidth, also after it was slow."""
    plan = _is_answered(question, shardwise)
    if plan is None:
        return
    cluster = load_cluster(question.cluster.shorthand, inter_node=question.cluster.inter_node)
    link = next(link for link in link_graph(cluster) if link.source.startswith("n"))
    now = f"link {link.name} {bytes_per_s(link.capacity.at(0.0))}"
    for events in (now, f"link {link.name} 1MB/s; {now}"):
        _require_unchanged(shardwise.answer(_replan(question, events)), events)


@relation(lambda question: is_changed(question) and any(run.count > 1 for run in question.cluster.nodes))
def loss_of_any_equal_node(question: Question, shardwise: Commands) -> None:
    """Whichever of an entry's equal nodes is lost, a step after a year takes the same time.

    The transition depends on the node. Over the horizon it counts at most its seconds divided by the horizon,
    which is the bound.
    """
    if _is_answered(question, shardwise) is None:
        return
    counts = [run.count for run in question.cluster.nodes]
    at = next(place for place, count in enumerate(counts) if count > 1)
    first = sum(counts[:at])
    answers = [
        shardwise.answer(_replan(question, f"lost n{node}", "365d"))
        for node in (first, first + counts[at] - 1)
    ]
    require(answers[0].fits == answers[1].fits, "one loss can be answered, the other cannot", *answers)
    if answers[0].fits:
        bound = sum(one.document["transition"]["seconds"] for one in answers) / YEAR + REL_TOL
        times = [one.document["step_time_s"] for one in answers]
        found = f"any like node is lost: {times[0]!r} and {times[1]!r} s"
        require(abs(times[0] - times[1]) <= bound * times[0], found, *answers)


@relation(lambda question: is_changed(question) and has_network(question))
def a_node_lost_and_back(question: Question, shardwise: Commands) -> None:
    """A node that left and returned holds no state, but the step is no longer.

    Its state has to be restored, so the decision is a patch (docs/concepts/replanning.md). Over a year that
    counts at most its seconds.
    """
    plan = _is_answered(question, shardwise)
    if plan is not None:
        after = shardwise.answer(_replan(question, "lost n0; joined n0", "365d"))
        bound = after.document["transition"]["seconds"] / YEAR + REL_TOL
        found = f"a node lost and back: {after.document['step_time_s']!r} s"
        unchanged_s = shardwise.answer(_replan(question, "slow n0 1.0")).document["step_time_s"]
        require(after.document["step_time_s"] <= unchanged_s * (1.0 + bound), found, after)


@relation(lambda question: is_changed(question) and has_network(question))
def a_change_pays(question: Question, shardwise: Commands) -> None:
    """The decision makes no fewer steps over the horizon than keeping the plan."""
    if _is_answered(question, shardwise) is None:
        return
    last = question.cluster.node_count - 1
    after = shardwise.answer(_replan(question, f"slow n{last} 0.5"))
    document = after.document
    found = f"a change pays: {document['steps']!r} steps, kept {document['keep_steps']!r}"
    require(document["steps"] >= document["keep_steps"] * (1.0 - REL_TOL), found, after)


@relation(lambda question: is_changed(question) and has_network(question) and not is_mixed(question))
def a_longer_horizon(question: Question, shardwise: Commands) -> None:
    """A longer horizon gives no longer step: more expensive transitions pay off by then."""
    if _is_answered(question, shardwise) is None:
        return
    events = f"slow n{question.cluster.node_count - 1} 0.5"
    after_5_minutes, after_a_year = (
        shardwise.answer(_replan(question, events, horizon)) for horizon in ("5min", "365d")
    )
    times = after_5_minutes.document["step_time_s"], after_a_year.document["step_time_s"]
    found = f"a longer horizon: {times[1]!r} s after a year, {times[0]!r} s after five minutes"
    require(times[1] <= times[0] * (1.0 + REL_TOL), found, after_5_minutes, after_a_year)


@relation(
    lambda question: (
        is_changed(question)
        and not is_mixed(question)
        and has_network(question)
        and not question.cluster.tiers
    )
)
def loss_equals_plan_on_remaining_nodes(question: Question, shardwise: Commands) -> None:
    """After a loss, over a year, a step takes no more than the best plan on the remaining nodes."""
    if _is_answered(question, shardwise) is None:
        return
    run = question.cluster.nodes[0]
    remaining_question = question.on(replace(question.cluster, nodes=(replace(run, count=run.count - 1),)))
    planned = shardwise.answer(remaining_question.words())
    after = shardwise.answer(_replan(question, "lost n0", "365d"))
    if planned.fits:
        step_s = after.document["step_time_s"] if after.fits else float("inf")
        bound = after.document["transition"]["seconds"] / YEAR + REL_TOL if after.fits else 0.0
        found = f"after a loss {step_s!r} s, planned on what is left {planned.step_time_s!r} s"
        require(step_s <= planned.step_time_s * (1.0 + bound), found, after, planned)
