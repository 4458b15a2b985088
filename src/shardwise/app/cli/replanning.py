"""The command `replan`: keep, patch or migrate after events, with the gain and the transition cost.

`replanned` answers. `plan_on` turns an arrangement into a plan for a plan file; `trace_for` reads `--events`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from shardwise import search
from shardwise.app.cli import words
from shardwise.app.cli.card import priced_as_lines
from shardwise.app.cli.division import plan_lines
from shardwise.app.cli.output import Line, Output, row
from shardwise.app.cli.request import check_output_path
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
from shardwise.plans import (
    DECISION,
    Answer,
    Idle,
    Plan,
    PlanQuestion,
    TraceChoice,
    idle_in,
    plan_of,
    read_plan,
    write_plan,
)
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
from shardwise.strategy import Strategy, layer_counts, target_of
from shardwise.units import format_bytes, format_seconds

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


# The command

SCHEMA, VERSION = "shardwise.replan", 1

MAX_NAMED_LINKS = 4
"""Most links that the card lists, those with most bytes."""

MAX_NAMED_NODES = 8
"""Most nodes that a note lists."""


def replanned(
    path: str,
    *,
    cluster: str,
    inter_node: str | None,
    events: str,
    horizon_s: float,
    costs: Costs,
    save: str | None,
    is_json: bool,
) -> Output:
    """The answer of `replan` for the plan file at `path` after all events of a trace (a file or text). With
    `save`, decides among plans that a plan file can represent, and writes the decision there."""
    if save is not None:
        check_output_path("--save", save, inputs=(path, cluster, events))
    plan = read_plan(path)
    loaded = cluster_for(plan, cluster, inter_node)
    running = arrangement_of(plan, loaded)
    given = trace_for(events, loaded)
    trace, notes, priced_as = given.trace, given.notes, (*loaded.priced_as, *given.priced_as)
    conditions = Conditions.at_start(trace)
    saved, gone = frozenset[str](), trace.absent
    for event in trace.events:
        before = conditions
        conditions = conditions.after(event)
        saved |= before.noticed - conditions.present
        gone |= before.present - conditions.present
    situation, returned = situation_of(NodeView(loaded), conditions, trace.sites), gone & conditions.present
    allowed = replace(allowed_space_of(plan), is_of_files=save is not None)
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
    notes = (*notes, *unreachable_lines("unreachable", situation.unreachable))
    if save is not None:
        notes = (*notes, f"wrote {save} ({_written(save, decision, planner, given, plan.question)})")
    reason = _horizon_reason(decision, horizon_s, costs)
    if is_json:
        horizon = {"horizon_s": horizon_s, "used_horizon_s": decision.horizon_s, "horizon_reason": reason}
        idle = {"idle": asdict(_idle(decision.arrangement, situation, loaded))}
        document = {**document_of(decision, loaded), **idle, **horizon, "priced_as": list(priced_as)}
        return Output(document=document, notes=notes)
    lines = _card(decision, plan, loaded)
    if reason is not None:
        lines.append(row("horizon", (reason, "warn")))
    return Output(lines=[*lines, *priced_as_lines(priced_as)], notes=notes)


def _idle(arrangement: AnyArrangement, situation: Situation, cluster: Cluster) -> Idle:
    """The idle devices of nodes that can be used."""
    used = set(search.ranks_of_nodes(cluster, [int(name[1:]) for name in arrangement.nodes]))
    cannot = [place for place in range(len(cluster.nodes)) if f"n{place}" not in situation.states]
    return idle_in(cluster, used.union(search.ranks_of_nodes(cluster, cannot)))


def _horizon_reason(decision: Decision[AnyArrangement], requested_s: float, costs: Costs) -> str | None:
    """Why the decision has a longer horizon than requested; None where it has the requested one."""
    if decision.horizon_s == requested_s:
        return None
    return (
        f"{format_seconds(requested_s)} requested; {format_seconds(decision.horizon_s)} used, since the plan "
        f"cannot continue and a restart alone takes {format_seconds(costs.restart_s)}"
    )


def _written(
    path: str,
    decision: Decision[AnyArrangement],
    planner: MixedPlanner,
    given: GivenEvents,
    question: PlanQuestion,
) -> str:
    """Write the decision as a plan file; returns its hash. `asked` is the question of the running plan."""
    arrangement = decision.arrangement
    found = TraceChoice(
        policy=DECISION,
        source=trace_source(given.given),
        trace=trace_hash(given.given),
        nodes=arrangement.nodes,
        length_s=decision.horizon_s,
        steps=decision.steps,
        now_step_time_s=decision.step_s,
        worst_step_time_s=decision.step_s,
        situations=1,
        considered=max(decision.considered, 1),
        gap=None,
    )
    question = replace(question_after(question, arrangement.strategy), events=found.source)
    return write_plan(
        path, plan_on(planner, arrangement, found, question=question, priced_as=given.priced_as)[0]
    )


def cluster_for(plan: Plan, name: str, inter_node: str | None) -> Cluster:
    """The named cluster with the devices of the plan. ConfigError where they differ, or where the software
    that the plan is for does not run on the cluster."""
    cluster = with_devices_of(plan.cluster, load_cluster(name, inter_node=inter_node))
    if plan.target is not None and not target_of(plan.target).runs_on(cluster.vendors):
        target = target_of(plan.target)
        raise ConfigError(
            f"is not a cluster on which {target.command} runs, which the plan is for", key="--cluster",
            found=cluster.name, allowed=f"clusters of {target.known_devices}",
        )  # fmt: skip
    return cluster


def unreachable_lines(label: str, names: Iterable[str]) -> Iterator[str]:
    """A note with the names of the nodes; none without nodes."""
    ordered = sorted(names, key=lambda name: int(name[1:]))
    if ordered:
        more = " ..." if len(ordered) > MAX_NAMED_NODES else ""
        yield f"shardwise: {label}: {', '.join(ordered[:MAX_NAMED_NODES])}{more}"


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


# Output


def described(arrangement: AnyArrangement, plan: Plan | None = None) -> tuple[str, list[Line]]:
    """An arrangement in a few words, and its lines on the card; `plan` runs before it. Only this function
    shows strategies and uneven plans differently."""
    if arrangement.strategy is None:
        pipelines = words.counted(len(arrangement.microbatches), "pipeline")
        return f"uneven, {pipelines}", list(plan_lines(arrangement.result))
    degrees = words.degrees_text(arrangement.strategy)
    return degrees, [] if plan is None else [row("plan", (degrees, "")), *_strategy_lines(arrangement, plan)]


def document_of(decision: Decision[AnyArrangement], cluster: Cluster) -> dict[str, object]:
    """`replan --json` without the horizon."""
    arrangement, rerouted = decision.arrangement, decision.rerouted
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "decision": decision.decision,
        "plan": {
            **arrangement.document,
            "nodes": [name or None for name in arrangement.slots],
            "microbatches": list(arrangement.microbatches),
            "is_rerouted": arrangement.is_rerouted,
            "idle_nodes": len(cluster.nodes) - len(arrangement.nodes),
            "step_time_s": decision.step_s,
        },
        "step_time_s": decision.step_s,
        "keep_step_time_s": decision.keep_step_s,
        "gain_s_per_step": decision.gain_s_per_step,
        "transition": {
            "bytes_per_link": dict(decision.transition.bytes_per_link),
            "seconds": decision.transition.seconds,
            "moving_s": decision.transition.transfer_s,
            "lost_work_s": decision.transition.lost_s,
        },
        "pays_after_s": decision.pays_after_s,
        "steps": decision.steps,
        "keep_steps": decision.keep_steps,
        "considered": decision.considered,
        "rerouted": None if rerouted is None else _rerouted_document(rerouted),
    }


def _rerouted_document(rerouted: Decision[Arrangement]) -> dict[str, object]:
    return {
        "step_time_s": rerouted.step_s,
        "transition_s": rerouted.transition.seconds,
        "steps": rerouted.steps,
    }


def _layers(strategy: Strategy, layers: int) -> tuple[int, ...]:
    stages = strategy.pp * strategy.vpp
    return layer_counts(layers, stages, strategy.first_stage_layers, strategy.last_stage_layers)


def _strategy_lines(arrangement: Arrangement, plan: Plan) -> Iterator[Line]:
    strategy = arrangement.strategy
    shares = sorted(set(arrangement.microbatches))
    batch = words.microbatches_text(strategy.micro_batch_size, shares[-1])
    if len(shares) > 1:
        batch = f"micro-batch size {strategy.micro_batch_size}, {shares[0]:,} to {shares[-1]:,} micro-batches"
    yield row("", (f"{batch} · {strategy.schedule}", ""))
    layers = _layers(strategy, plan.model.layers)
    before = None if plan.best.fields is None else _layers(plan.best.fields, plan.model.layers)
    if layers != before and strategy.pp > 1:
        yield row("layers", (" / ".join(map(str, layers)), ""), ("   per stage", "dim"))
    if arrangement.is_rerouted:
        text = "micro-batches of lost nodes go to their peers in other pipelines"
        yield row("re-routed", (text, ""))


def _card(decision: Decision[AnyArrangement], plan: Plan, cluster: Cluster) -> list[Line]:
    arrangement = decision.arrangement
    lines = [row("decision", (decision.decision, "value")), *described(arrangement, plan)[1]]
    used = len(arrangement.nodes)
    idle = len(cluster.nodes) - used
    nodes = f"{used:,} of {len(cluster.nodes):,} nodes"
    lines.append(row("nodes", (nodes, ""), (f"   {idle:,} idle or lost" if idle else "", "dim")))
    unchanged = (
        "the current plan cannot run"
        if decision.keep_step_s is None
        else f"{format_seconds(decision.keep_step_s)} if kept"
    )
    lines.append(row("step time", (format_seconds(decision.step_s), "time"), (f"   {unchanged}", "dim")))
    rerouted = decision.rerouted
    if rerouted is not None and rerouted.arrangement != arrangement:
        steps = f"   {rerouted.steps:,.0f} steps in {format_seconds(decision.horizon_s)}"
        instead = f"{format_seconds(rerouted.step_s)} per step instead"
        lines.append(row("re-routed", (instead, ""), (steps, "dim")))
    if decision.decision == "keep":
        return lines
    change = decision.transition
    total = format_bytes(sum(change.bytes_per_link.values()))
    lines.append(
        row("transition", (format_seconds(change.seconds), "time"), (f"   {total} over all links", "dim"))
    )
    if change.lost_s:
        lines.append(row("", (f"{format_seconds(change.lost_s)} of work is lost", "warn")))
    busiest = sorted(change.bytes_per_link.items(), key=lambda item: (-item[1], item[0]))
    lines += [
        row("", (f"{name}  {format_bytes(nbytes)}", "dim")) for name, nbytes in busiest[:MAX_NAMED_LINKS]
    ]
    if decision.pays_after_s is not None:
        lines.append(row("pays after", (format_seconds(decision.pays_after_s), "time")))
    more = f"{decision.steps:,.0f} steps; {decision.keep_steps:,.0f} if kept"
    lines.append(row("in " + format_seconds(decision.horizon_s), (more, "")))
    return lines
