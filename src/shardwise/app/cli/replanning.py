"""The command `replan`: keep, patch or migrate after events, with the gain and the transition cost.

`replanned` answers; the decision is `shardwise.api.replan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from shardwise import api
from shardwise.app.cli import words
from shardwise.app.cli.card import priced_as_lines
from shardwise.app.cli.division import plan_lines
from shardwise.app.cli.output import Line, Output, row
from shardwise.cluster import Cluster
from shardwise.plans import Plan, check_output_path
from shardwise.replanning import (
    AnyArrangement,
    Arrangement,
    Costs,
    Decision,
)
from shardwise.strategy import Strategy, layer_counts
from shardwise.units import format_bytes, format_seconds

# The command

SCHEMA, VERSION = "shardwise.replan", 1

MAX_NAMED_LINKS = 4
"""Most links that the card lists, those with most bytes."""

MAX_NAMED_NODES = 8
"""Most nodes that a note lists."""


def replanned(
    path: str,
    *,
    cluster: str | None,
    inter_node: str | None,
    events: str,
    horizon_s: float,
    costs: Costs,
    target: str | None,
    software: str | None,
    save: str | None,
    is_json: bool,
) -> Output:
    """The answer of `replan` for the plan file at `path` after all events of a trace (a file or text). With
    `save`, decides among plans that a plan file can represent, and writes the decision there."""
    if save is not None:
        check_output_path("--save", save, inputs=(path, cluster or path, events))
    found = api.replan(
        api.load(path),
        cluster=cluster,
        inter_node=inter_node,
        events=events,
        horizon=horizon_s,
        regroup=costs.regroup_s,
        restart=costs.restart_s,
        checkpoint_interval=costs.checkpoint_interval_s,
        savable=save is not None,
        target=target,
        software=software,
    )
    decision, given = found.outcome, found.given
    priced_as = (*found.cluster.priced_as, *given.priced_as)
    notes = (*given.notes, *unreachable_lines("unreachable", found.unreachable))
    if save is not None:
        notes = (*notes, f"wrote {save} ({api.save(found.plan, save)})")
    reason = _horizon_reason(decision, horizon_s, costs)
    if is_json:
        horizon = {"horizon_s": horizon_s, "used_horizon_s": decision.horizon_s, "horizon_reason": reason}
        idle = {"idle": asdict(found.idle)}
        document = {**document_of(decision, found.cluster), **idle, **horizon, "priced_as": list(priced_as)}
        return Output(document=document, notes=notes)
    lines = _card(decision, found.running, found.cluster)
    if reason is not None:
        lines.append(row("horizon", (reason, "warn")))
    return Output(lines=[*lines, *priced_as_lines(priced_as)], notes=notes)


def _horizon_reason(decision: Decision[AnyArrangement], requested_s: float, costs: Costs) -> str | None:
    """Why the decision has a longer horizon than requested; None where it has the requested one."""
    if decision.horizon_s == requested_s:
        return None
    return (
        f"{format_seconds(requested_s)} requested; {format_seconds(decision.horizon_s)} used, since the plan "
        f"cannot continue and a restart alone takes {format_seconds(costs.restart_s)}"
    )


def unreachable_lines(label: str, names: Iterable[str]) -> Iterator[str]:
    """A note with the names of the nodes; none without nodes."""
    ordered = sorted(names, key=lambda name: int(name[1:]))
    if ordered:
        more = " ..." if len(ordered) > MAX_NAMED_NODES else ""
        yield f"shardwise: {label}: {', '.join(ordered[:MAX_NAMED_NODES])}{more}"


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
