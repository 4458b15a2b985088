"""From a plan and events to a decision (`decide_after`), and from an arrangement to a plan (`plan_on`)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    load_events,
)
from shardwise.errors import ConfigError, Infeasible
from shardwise.plans import DECISION, Answer, Idle, Plan, PlanQuestion, TraceChoice, idle_in, plan_of
from shardwise.replanning.allowed_space import allowed_space_of, question_after
from shardwise.replanning.arrangement import with_devices_of
from shardwise.replanning.mixed_planner import AnyArrangement, MixedPlanner, mixed_planner_of
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.planner import Decision, planner_of
from shardwise.replanning.situation import Situation, situation_of
from shardwise.replanning.transition import Costs
from shardwise.replanning.uneven import arrangement_of
from shardwise.search import ranks_of_nodes
from shardwise.strategy import target_of

# Inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenEvents:
    """The events of a trace: as `given`, and approximated by node (`trace`), with these approximations
    (`priced_as`); and `notes` about reading them."""

    given: EventTrace
    trace: EventTrace
    priced_as: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def source(self) -> str:
        """The origin of the trace, for the plan file."""
        return self.given.source or "events"

    @property
    def sha256(self) -> str:
        """The SHA-256 of the trace in its canonical form."""
        return f"sha256:{hashlib.sha256(events_text(self.given).encode()).hexdigest()}"


def trace_for(events: str, cluster: Cluster) -> GivenEvents:
    """The trace in a file, or in text. Raises ConfigError where it does not match the cluster."""
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


def cluster_for(plan: Plan, cluster: Cluster) -> Cluster:
    """The cluster with the devices of the plan. Raises ConfigError where they differ, or where the software
    that the plan is for does not run on the cluster."""
    found = with_devices_of(plan.cluster, cluster)
    target = None if plan.target is None else target_of(plan.target)
    if target is not None and not target.runs_on(found.vendors):
        raise ConfigError(
            f"is not a cluster on which {target.command} runs, which the plan is for", key="--cluster",
            found=found.name, allowed=f"clusters of {target.known_devices}",
        )  # fmt: skip
    return found


# Arrangements as plans


def on_nodes(found: TraceChoice, cluster: Cluster) -> Cluster:
    """The cluster of the plan's nodes, in their state without events."""
    return cluster_of_nodes(cluster, [int(name[1:]) for name in found.nodes])


def plan_on(
    planner: MixedPlanner,
    arrangement: AnyArrangement,
    found: TraceChoice,
    *,
    question: PlanQuestion,
    priced_as: tuple[str, ...],
    uniform: AnyArrangement | None = None,
) -> tuple[Plan, Answer]:
    """The plan and answer of an arrangement with equal shares or of an uneven one, estimated on its nodes
    without events, and compared with a `uniform` one. The certificate covers this plan only.

    `priced_as` are the approximations of events; with any, nothing is proven.
    """
    prices = planner.prices
    model, job, cluster, own = prices.model, prices.job, prices.cluster, on_nodes(found, prices.cluster)
    answer = planner.answer_on(arrangement, own, question.space)
    certificate = replace(answer.certificate, priced_as=(*answer.certificate.priced_as, *priced_as))
    mixed = answer.mixed
    if mixed is not None and uniform is not None:
        mixed = replace(mixed, uniform_step_time_s=planner.step_s(uniform, _nominal(cluster)))
    used = [rank for stage in answer.best.layout.stages for rank in stage.rank_numbers]
    ranks = ranks_of_nodes(cluster, [int(name[1:]) for name in found.nodes])
    answer = replace(
        answer, certificate=certificate, mixed=mixed, idle=idle_in(cluster, [ranks[rank] for rank in used]),
        all_devices_step_time_s=None, whole=cluster,
    )  # fmt: skip
    plan = plan_of(answer, model=model, cluster=own, job=job, question=question)
    return replace(plan, for_trace=found), answer


def _nominal(cluster: Cluster, sites: Mapping[str, tuple[str, ...]] | None = None) -> Situation:
    """The situation without events."""
    no_events = EventTrace(nodes=len(cluster.nodes), events=())
    return situation_of(NodeView(cluster), Conditions.at_start(no_events), sites)


# The decision


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionAfter:
    """The `decision` for `running`, a plan on `planner.prices.cluster`, in the situation after the events."""

    running: Plan
    given: GivenEvents
    situation: Situation
    planner: MixedPlanner
    decision: Decision[AnyArrangement]

    @property
    def idle(self) -> Idle:
        """The idle devices of nodes that can be used."""
        cluster = self.planner.prices.cluster
        taken = {int(name[1:]) for name in self.decision.arrangement.nodes}
        taken |= {place for place in range(len(cluster.nodes)) if f"n{place}" not in self.situation.states}
        return idle_in(cluster, ranks_of_nodes(cluster, sorted(taken)))

    @property
    def plan(self) -> Plan:
        """The decision as a plan, with the question of the running plan. Raises ConfigError if a plan cannot
        represent it (see `decide_after`)."""
        decision, arrangement = self.decision, self.decision.arrangement
        found = TraceChoice(
            policy=DECISION,
            source=self.given.source,
            trace=self.given.sha256,
            nodes=arrangement.nodes,
            length_s=decision.horizon_s,
            steps=decision.steps,
            now_step_time_s=decision.step_s,
            worst_step_time_s=decision.step_s,
            situations=1,
            considered=max(decision.considered, 1),
            gap=None,
        )
        question = question_after(self.running.question, arrangement.strategy)
        return plan_on(
            self.planner,
            arrangement,
            found,
            question=replace(question, events=self.given.source),
            priced_as=self.given.priced_as,
        )[0]


def decide_after(
    plan: Plan, cluster: Cluster, given: GivenEvents, *, horizon_s: float, costs: Costs, is_of_files: bool
) -> DecisionAfter:
    """The decision for a plan after all events of a trace, on the cluster of `cluster_for`, over `horizon_s`
    seconds. If nothing has changed, it is to keep the plan.

    With `is_of_files`, only what a plan can represent is considered: equal shares, and no re-routing. Raises
    ConfigError for a plan that is not replanned, Infeasible if nothing runs that its question allows.
    """
    trace, running = given.trace, arrangement_of(plan, cluster)
    conditions = Conditions.at_start(trace)
    saved, gone = frozenset[str](), trace.absent
    for event in trace.events:
        before = conditions
        conditions = conditions.after(event)
        saved |= before.noticed - conditions.present
        gone |= before.present - conditions.present
    situation, returned = situation_of(NodeView(cluster), conditions, trace.sites), gone & conditions.present
    allowed = replace(allowed_space_of(plan), is_of_files=is_of_files)
    prices = Prices(plan.model, cluster, plan.job)
    planner = mixed_planner_of(planner_of(prices, costs, allowed_space=allowed))
    decision = None
    if situation.key == _nominal(cluster, trace.sites).key and not returned:
        decision = planner.keep(running, situation, horizon_s=horizon_s)
    try:
        decision = decision or planner.replan(
            running, situation, horizon_s=horizon_s, saved=saved, returned=returned
        )
    except Infeasible as error:
        note = f"; the plan's question allows only {allowed.text}" if allowed.text else ""
        raise Infeasible(f"{error.message}{note}", reasons=error.reasons) from None
    return DecisionAfter(running=plan, given=given, situation=situation, planner=planner, decision=decision)
