"""After events: what a plan for a trace is (`plan_on`), and the decision of `replan` (`Replanned`).

`trace_for` reads events, `cluster_for` the cluster with the devices of a plan.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise import search
from shardwise.cluster import (
    Cluster,
    Conditions,
    EventTrace,
    NodeView,
    check_events,
    cluster_of_nodes,
    events_from_text,
    events_of_nodes,
    events_text,
    load_cluster,
    load_events,
)
from shardwise.errors import ConfigError, Infeasible
from shardwise.notebook import panel, table
from shardwise.plans import DECISION, Answer, Idle, Plan, PlanQuestion, TraceChoice, idle_in, plan_of
from shardwise.questions.arguments import text
from shardwise.replanning import (
    AnyArrangement,
    Arrangement,
    Costs,
    Decision,
    MixedPlanner,
    Prices,
    Situation,
    allowed_space_of,
    arrangement_of,
    mixed_planner_of,
    planner_of,
    question_after,
    situation_of,
    with_devices_of,
)
from shardwise.strategy import target_of
from shardwise.units import format_seconds

# Arrangements as plans


def trace_source(trace: EventTrace) -> str:
    """The source of a trace, for the plan file."""
    return trace.source or "events"


def trace_hash(trace: EventTrace) -> str:
    """The SHA-256 of a trace in its canonical form."""
    return f"sha256:{hashlib.sha256(events_text(trace).encode()).hexdigest()}"


def on_nodes(found: TraceChoice, cluster: Cluster) -> Cluster:
    """The cluster of the plan's nodes, in their state without events."""
    return cluster_of_nodes(cluster, [int(name[1:]) for name in found.nodes])


def plan_on(
    planner: MixedPlanner,
    arrangement: AnyArrangement,
    found: TraceChoice,
    *,
    question: PlanQuestion,
    priced_as: Sequence[str],
    uniform: AnyArrangement | None = None,
) -> tuple[Plan, Answer]:
    """The plan and answer of an arrangement with equal shares or of an uneven one, estimated on its nodes
    without events, and compared with a `uniform` one. The certificate covers this plan only.

    `asked` is the question. `priced_as` are the approximations of events; with any, nothing is proven.
    """
    prices = planner.prices
    model, job, cluster, own = prices.model, prices.job, prices.cluster, on_nodes(found, prices.cluster)
    answer = planner.answer_on(arrangement, own, question.space)
    certificate = replace(answer.certificate, priced_as=(*answer.certificate.priced_as, *priced_as))
    mixed = answer.mixed
    if mixed is not None and uniform is not None:
        mixed = replace(mixed, uniform_step_time_s=planner.step_s(uniform, _nominal(cluster)))
    used = [rank for stage in answer.best.layout.stages for rank in stage.rank_numbers]
    answer = replace(answer, certificate=certificate, mixed=mixed, idle=idle_in(own, used))
    plan = plan_of(answer, model=model, cluster=own, job=job, question=question)
    ranks = search.ranks_of_nodes(cluster, [int(name[1:]) for name in found.nodes])
    idle = idle_in(cluster, [ranks[rank] for rank in used])
    return replace(plan, for_trace=found), replace(answer, idle=idle, all_devices_step_time_s=None)


def _nominal(cluster: Cluster, sites: Mapping[str, tuple[str, ...]] | None = None) -> Situation:
    """The situation without events."""
    no_events = EventTrace(nodes=len(cluster.nodes), events=())
    return situation_of(NodeView(cluster), Conditions.at_start(no_events), sites)


# Events and clusters


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenEvents:
    """The events of a trace: as `given`, and approximated by node (`trace`), with these approximations
    (`priced_as`); and `notes` about reading them."""

    given: EventTrace
    trace: EventTrace
    priced_as: tuple[str, ...]
    notes: tuple[str, ...]


def trace_for(events: str, cluster: Cluster) -> GivenEvents:
    """The trace in a file, or in text. ConfigError where it does not match the cluster."""
    dropped: str | None = None
    file: str | None = None
    if os.path.exists(events):
        trace, dropped = load_events(events)
        file = events
    elif events.endswith((".jsonl", ".json")):
        raise ConfigError("does not exist", file=events, key="--events")
    else:
        trace = events_from_text(events, len(cluster.nodes))
    check_events(trace, cluster, file=file)
    found = events_of_nodes(trace, cluster, file=file)
    notes = () if dropped is None else (f"shardwise: {dropped}",)
    return GivenEvents(given=trace, trace=found.trace, priced_as=found.priced_as, notes=notes)


def cluster_for(plan: Plan, given: object, inter_node: str | None) -> Cluster:
    """The given cluster with the devices of the plan. ConfigError where they differ, or where the software
    that the plan is for does not run on the cluster."""
    if not isinstance(given, Cluster):
        given = load_cluster(text("--cluster", given), inter_node=inter_node)
    cluster = with_devices_of(plan.cluster, given)
    if plan.target is not None and not target_of(plan.target).runs_on(cluster.vendors):
        target = target_of(plan.target)
        raise ConfigError(
            f"is not a cluster on which {target.command} runs, which the plan is for", key="--cluster",
            found=cluster.name, allowed=f"clusters of {target.known_devices}",
        )  # fmt: skip
    return cluster


# Decisions


@dataclass(frozen=True, kw_only=True, repr=False)
class Replanned:
    """The decision of `replan` for a `running` plan on `cluster`. `outcome` has all figures of the decision:
    the new arrangement, the bytes that move over each link, the steps over the horizon, and the option that
    re-routes micro-batches. `idle` are the idle devices that could be used. `unreachable` are nodes that no
    path leads to."""

    running: Plan
    cluster: Cluster
    outcome: Decision[AnyArrangement]
    requested_horizon_s: float
    idle: Idle
    unreachable: frozenset[str]
    given: GivenEvents
    planner: MixedPlanner

    @property
    def decision(self) -> str:
        """`keep`, `patch` or `move`."""
        return self.outcome.decision

    @property
    def step_time_s(self) -> float:
        """Seconds of a step after the decision."""
        return self.outcome.step_s

    @property
    def gain_s_per_step(self) -> float | None:
        """Seconds that a step takes less than if the plan is kept; None if it cannot be kept."""
        return self.outcome.gain_s_per_step

    @property
    def transition_s(self) -> float:
        """Seconds without training until the new plan runs."""
        return self.outcome.transition.seconds

    @property
    def pays_after_s(self) -> float | None:
        """Seconds after which training is ahead of keeping the plan; None: never."""
        return self.outcome.pays_after_s

    @cached_property
    def plan(self) -> Plan:
        """The plan that is decided. Raises ConfigError where no plan file holds it, since micro-batches are
        re-routed; `savable=True` decides without these."""
        arrangement = self.outcome.arrangement
        if isinstance(arrangement, Arrangement) and not arrangement.has_equal_shares:
            raise ConfigError(
                "cannot be held by a plan file", key="plan", found="an arrangement with unequal shares",
                allowed="replan(..., savable=True)",
            )  # fmt: skip
        found = TraceChoice(
            policy=DECISION,
            source=trace_source(self.given.given),
            trace=trace_hash(self.given.given),
            nodes=arrangement.nodes,
            length_s=self.outcome.horizon_s,
            steps=self.outcome.steps,
            now_step_time_s=self.outcome.step_s,
            worst_step_time_s=self.outcome.step_s,
            situations=1,
            considered=max(self.outcome.considered, 1),
            gap=None,
        )
        question = question_after(self.running.question, arrangement.strategy)
        question = replace(question, events=found.source)
        priced_as = self.given.priced_as
        return plan_on(self.planner, arrangement, found, question=question, priced_as=priced_as)[0]

    def to_dict(self) -> dict[str, object]:
        """The decision as plain values: seconds, bytes and steps."""
        outcome = self.outcome
        return {
            "decision": outcome.decision,
            **outcome.arrangement.document,
            "nodes": list(outcome.arrangement.nodes),
            "step_time_s": outcome.step_s,
            "keep_step_time_s": outcome.keep_step_s,
            "gain_s_per_step": outcome.gain_s_per_step,
            "transition_s": outcome.transition.seconds,
            "bytes_per_link": dict(outcome.transition.bytes_per_link),
            "pays_after_s": outcome.pays_after_s,
            "horizon_s": outcome.horizon_s,
            "steps": outcome.steps,
            "keep_steps": outcome.keep_steps,
        }

    def __repr__(self) -> str:
        return (
            f"<Replanned {self.running.name} on {self.cluster.name}: {self.decision}, "
            f"{format_seconds(self.step_time_s)} a step after {format_seconds(self.transition_s)}>"
        )

    def _repr_html_(self) -> str:
        def shown(seconds: float | None) -> str:
            return "" if seconds is None else format_seconds(seconds)

        facts = [
            ("step time", shown(self.step_time_s)),
            ("step time if kept", shown(self.outcome.keep_step_s) or "the plan cannot run"),
            ("transition", shown(self.transition_s)),
            ("pays after", shown(self.pays_after_s)),
            ("nodes", f"{len(self.outcome.arrangement.nodes):,} of {len(self.cluster.nodes):,}"),
        ]
        return panel(f"{self.running.name} on {self.cluster.name}: {self.decision}", table((), facts))


def replanned(
    plan: Plan,
    *,
    cluster: object,
    inter_node: str | None,
    events: object,
    horizon_s: float,
    costs: Costs,
    is_of_files: bool,
) -> Replanned:
    """The decision for a running plan after all events of a trace; with `is_of_files` among plans that a plan
    file can hold. Raises ConfigError for events or a cluster that do not match, Infeasible where nothing
    runs."""
    loaded = cluster_for(plan, cluster, inter_node)
    running = arrangement_of(plan, loaded)
    given = trace_for(text("--events", events), loaded)
    trace = given.trace
    conditions = Conditions.at_start(trace)
    saved, gone = frozenset[str](), trace.absent
    for event in trace.events:
        before = conditions
        conditions = conditions.after(event)
        saved |= before.noticed - conditions.present
        gone |= before.present - conditions.present
    situation, returned = situation_of(NodeView(loaded), conditions, trace.sites), gone & conditions.present
    allowed = replace(allowed_space_of(plan), is_of_files=is_of_files)
    prices = Prices(plan.model, loaded, plan.job)
    planner = mixed_planner_of(planner_of(prices, costs, allowed_space=allowed))
    decision = None
    if situation.key == _nominal(loaded, trace.sites).key and not returned:
        decision = planner.keep(running, situation, horizon_s=horizon_s)
    try:
        decision = decision or planner.replan(
            running, situation, horizon_s=horizon_s, saved=saved, returned=returned
        )
    except Infeasible as error:
        note = f"; the plan's question allows only {allowed.text}" if allowed.text else ""
        raise Infeasible(f"{error.message}{note}", reasons=error.reasons) from None
    return Replanned(
        running=plan,
        cluster=loaded,
        outcome=decision,
        requested_horizon_s=horizon_s,
        idle=_idle(decision.arrangement, situation, loaded),
        unreachable=frozenset(situation.unreachable),
        given=given,
        planner=planner,
    )


def _idle(arrangement: AnyArrangement, situation: Situation, cluster: Cluster) -> Idle:
    """The idle devices of nodes that can be used."""
    used = set(search.ranks_of_nodes(cluster, [int(name[1:]) for name in arrangement.nodes]))
    cannot = [place for place in range(len(cluster.nodes)) if f"n{place}" not in situation.states]
    return idle_in(cluster, used.union(search.ranks_of_nodes(cluster, cannot)))
