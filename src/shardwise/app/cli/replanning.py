"""The command `replan`: keep, patch or migrate after events, with the gain and the transition cost.

`replanned` answers. `uniform_plan` and `uneven_plan` turn an arrangement into a plan for a plan file;
`trace_for` reads `--events`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from shardwise import search
from shardwise.app.cli import words
from shardwise.app.cli.card import plan_lines, priced_as_lines
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
from shardwise.errors import ConfigError, Infeasible, InternalError
from shardwise.model import Model
from shardwise.plans import (
    DECISION,
    Answer,
    Certificate,
    Idle,
    MixedFigures,
    Plan,
    PlanQuestion,
    Result,
    TraceChoice,
    idle_in,
    layout_document,
    plan_of,
    read_plan,
    write_plan,
)
from shardwise.questions import OWN_TARGET
from shardwise.replanning import (
    AllowedSpace,
    AnyArrangement,
    Arrangement,
    Costs,
    Decision,
    MixedPlanner,
    Planner,
    Prices,
    Situation,
    UnevenArrangement,
    allowed_space_of,
    mixed_planner_of,
    planner_of,
    running_on,
    situation_of,
    uneven_running_on,
    with_devices_of,
)
from shardwise.strategy import Job, Strategy, layer_counts, target_of
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


def uniform_plan(
    arrangement: Arrangement,
    found: TraceChoice,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    asked: PlanQuestion,
    priced_as: Sequence[str],
) -> tuple[Plan, Answer]:
    """The plan and answer of a uniform arrangement with equal shares, estimated on its nodes. `asked` is the
    question. `priced_as` are the approximations of events; with any, nothing is proven."""
    strategy, own = arrangement.strategy, on_nodes(found, cluster)
    fixed = asdict(strategy)
    question = search.Question(
        model=model, cluster=own, job=job, space=asked.space, fixed=fixed, use_all=True, top=0
    )
    answer = search.plan(question)
    answer = replace(answer, certificate=_with_events(answer.certificate, priced_as))
    plan = plan_of(answer, model=model, cluster=own, job=job)
    nodes = [int(name[1:]) for name in found.nodes]
    idle = idle_in(cluster, search.ranks_of_nodes(cluster, nodes))
    plan = replace(plan, question=asked, for_trace=found)
    return plan, replace(answer, idle=idle, all_devices_step_time_s=None)


def _with_events(certificate: Certificate, priced_as: Sequence[str]) -> Certificate:
    """The certificate with the approximations of the events."""
    return replace(certificate, priced_as=(*certificate.priced_as, *priced_as))


def uneven_plan(
    planner: MixedPlanner,
    arrangement: UnevenArrangement,
    found: TraceChoice,
    uniform: Arrangement | UnevenArrangement | None,
    asked: PlanQuestion,
    priced_as: Sequence[str],
) -> tuple[Plan, Answer]:
    """The plan and answer of an uneven arrangement, with the step time of a uniform one for comparison. The
    certificate covers this plan only. `asked` is the question."""
    prices = planner.prices
    no_events = EventTrace(nodes=len(prices.cluster.nodes), events=())
    nominal = situation_of(NodeView(prices.cluster), Conditions.at_start(no_events))
    predicted = planner.uneven.predicted(arrangement, nominal)
    if predicted is None:
        raise InternalError("the plan for the trace does not run on the cluster without events")
    step_s = predicted.result.step_time_s
    own = on_nodes(found, prices.cluster)
    certificate = Certificate(
        space="uneven", enumerated=1, rejected={}, cut_by_bound=0, simulated=1, best_s=step_s,
        lower_bound_s=step_s, gap=0.0, search_s=0.0, search_cpu_s=0.0, priced_as=own.priced_as,
    )  # fmt: skip
    answer = Answer(
        best=predicted.result,
        runners_up=(),
        certificate=_with_events(certificate, priced_as),
        mixed=MixedFigures(
            uniform_step_time_s=None if uniform is None else planner.step_s(uniform, nominal),
            fastest_class_step_time_s=None,
            fastest_class=None,
            idle=(),
        ),
    )
    plan = plan_of(answer, model=prices.model, cluster=own, job=prices.job, question=asked)
    return replace(plan, for_trace=found), answer


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
    plan.require_kind("uniform", "uneven")
    loaded = with_devices_of(plan.cluster, load_cluster(cluster, inter_node=inter_node))
    given = trace_for(events, loaded)
    trace, notes, priced_as = given.trace, given.notes, (*loaded.priced_as, *given.priced_as)
    view = NodeView(loaded)
    conditions = Conditions.at_start(trace)
    saved, gone = frozenset[str](), trace.absent
    for event in trace.events:
        before = conditions
        conditions = conditions.after(event)
        saved |= before.noticed - conditions.present
        gone |= before.present - conditions.present
    situation = situation_of(view, conditions, trace.sites)
    allowed_space, returned = allowed_space_of(plan), gone & conditions.present
    planner = mixed_planner_of(
        planner_of(Prices(plan.model, loaded, plan.job), costs, allowed_space=allowed_space)
        if save is None
        else _planner_of_files(plan, loaded, costs, allowed_space),
        allowed_space=allowed_space,
    )
    running = running_on(plan, loaded) if plan.kind == "uniform" else uneven_running_on(plan, loaded)
    no_events = EventTrace(nodes=trace.nodes, events=())
    nominal = situation_of(view, Conditions.at_start(no_events), trace.sites)
    decision = None
    if situation.key == nominal.key and not returned:
        decision = planner.keep(running, situation, horizon_s=horizon_s)
    try:
        decision = decision or planner.replan(
            running, situation, horizon_s=horizon_s, saved=saved, returned=returned
        )
    except Infeasible as error:
        note = f"; the plan's question allows only {allowed_space.text}" if allowed_space.text else ""
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


def _planner_of_files(plan: Plan, cluster: Cluster, costs: Costs, allowed_space: AllowedSpace) -> Planner:
    """A planner of plans that a plan file can represent and, on devices that our own runtime knows, that it
    runs."""
    prices = Prices(plan.model, cluster, plan.job)
    target = target_of(OWN_TARGET).for_job(plan.model, plan.job)
    if not target.knows_devices(cluster.classes):
        return planner_of(prices, costs, can_run=_is_of_files, allowed_space=allowed_space)
    offloads = plan.kind == "uniform" and plan.best.strategy.offload != "none"
    return planner_of(
        prices,
        costs,
        can_run=lambda one: _is_of_files(one) and not any(target.refusals(one.strategy)),
        axes=target.axes_for(cluster.classes, ("offload",) if offloads else ()),
        allowed_space=allowed_space,
    )


def _is_of_files(arrangement: Arrangement) -> bool:
    """Whether a plan file can represent the arrangement as a strategy: no re-routing, equal shares of
    pipelines."""
    return not arrangement.is_rerouted and len(set(arrangement.microbatches)) == 1


def _written(
    path: str,
    decision: Decision[AnyArrangement],
    planner: MixedPlanner,
    given: GivenEvents,
    asked: PlanQuestion,
) -> str:
    """Write the decision as a plan file; returns its hash. `asked` is the question of the running plan."""
    arrangement, prices = decision.arrangement, planner.prices
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
    if isinstance(arrangement, UnevenArrangement):
        return write_plan(path, uneven_plan(planner, arrangement, found, None, asked, given.priced_as)[0])
    job, cluster = prices.job, prices.cluster
    plan, _ = uniform_plan(
        arrangement, found, model=prices.model, cluster=cluster, job=job, asked=asked,
        priced_as=given.priced_as,
    )  # fmt: skip
    return write_plan(path, plan)


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


def arrangement_document(arrangement: Arrangement, cluster: Cluster, step_s: float) -> dict[str, object]:
    """`plan` of the answer: the strategy, the node in each slot, the micro-batches of each pipeline."""
    return {
        "strategy": asdict(arrangement.strategy),
        "nodes": [name or None for name in arrangement.slots],
        "microbatches": list(arrangement.microbatches),
        "is_rerouted": arrangement.is_rerouted,
        "idle_nodes": len(cluster.nodes) - len(arrangement.nodes),
        "step_time_s": step_s,
    }


def uneven_document(arrangement: UnevenArrangement, cluster: Cluster, step_s: float) -> dict[str, object]:
    """`plan` of the answer for an uneven plan: `uneven` has its pipelines, whose ranks number the devices of
    `nodes`."""
    result = arrangement.result
    return {
        "strategy": None,
        "uneven": uneven_layout(result),
        "nodes": list(arrangement.nodes),
        "microbatches": list(result.microbatches),
        "is_rerouted": False,
        "idle_nodes": len(cluster.nodes) - len(arrangement.nodes),
        "step_time_s": step_s,
    }


def uneven_layout(result: Result) -> dict[str, object]:
    """`uneven` of the answer."""
    return {
        "layout": layout_document(result.layout),
        "micro_batch_size": result.micro_batch_size,
        "recompute": [list(stages) for stages in result.recompute],
        "pipeline_s": list(result.pipeline_s),
    }


def arrangement_text(arrangement: AnyArrangement) -> str:
    """An arrangement in a few words."""
    if isinstance(arrangement, Arrangement):
        return words.degrees_text(arrangement.strategy)
    pipelines = arrangement.result.layout.pipelines
    return f"uneven, {words.counted(len(pipelines), 'pipeline')}"


def document_of(decision: Decision[AnyArrangement], cluster: Cluster) -> dict[str, object]:
    """`replan --json` without the horizon."""
    arrangement, rerouted = decision.arrangement, decision.rerouted
    if isinstance(arrangement, UnevenArrangement):
        plan = uneven_document(arrangement, cluster, decision.step_s)
    else:
        plan = arrangement_document(arrangement, cluster, decision.step_s)
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "decision": decision.decision,
        "plan": plan,
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


def _arrangement_lines(arrangement: Arrangement, plan: Plan) -> Iterator[Line]:
    strategy = arrangement.strategy
    yield row("plan", (words.degrees_text(strategy), ""))
    shares = sorted(set(arrangement.microbatches))
    batch = words.microbatches_text(strategy.micro_batch_size, shares[-1])
    if len(shares) > 1:
        batch = f"micro-batch size {strategy.micro_batch_size}, {shares[0]:,} to {shares[-1]:,} micro-batches"
    yield row("", (f"{batch} · {strategy.schedule}", ""))
    layers = _layers(strategy, plan.model.layers)
    before = _layers(plan.best.strategy, plan.model.layers) if plan.kind == "uniform" else None
    if layers != before and strategy.pp > 1:
        yield row("layers", (" / ".join(map(str, layers)), ""), ("   per stage", "dim"))
    if arrangement.is_rerouted:
        text = "micro-batches of lost nodes go to their peers in other pipelines"
        yield row("re-routed", (text, ""))


def _card(decision: Decision[AnyArrangement], plan: Plan, cluster: Cluster) -> list[Line]:
    arrangement = decision.arrangement
    lines = [row("decision", (decision.decision, "value"))]
    if isinstance(arrangement, UnevenArrangement):
        lines += plan_lines(arrangement.result)
    else:
        lines += _arrangement_lines(arrangement, plan)
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
