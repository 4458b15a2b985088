"""Replanning and replay of traces: CPU seconds, and each policy's share of the oracle's tokens."""

from __future__ import annotations

import random
import time
from pathlib import Path

from shardwise import search
from shardwise.cluster import (
    Cluster,
    Conditions,
    EventTrace,
    NodeLost,
    NodeView,
    convert_events,
    generate_events,
    load_cluster,
)
from shardwise.cluster.events import ClusterEvent
from shardwise.model import load_model
from shardwise.replanning import (
    Costs,
    Planner,
    PlansBySize,
    Prices,
    best_interval_s,
    mixed_planner_of,
    planner_of,
    replay,
)
from shardwise.replanning.situation import situation_of

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
"""Folder of recorded availability traces, where it exists."""

RECORDED: dict[str, tuple[str, int, str]] = {
    # file, devices of a node, node
    "aws_p3": ("aws-p3-spot.csv", 1, "1xV100-16G"),
    "aws_g4dn": ("aws-g4dn-spot.csv", 1, "1xT4"),
    "gcloud_v100": ("gcloud-v100-east1c.csv", 4, "4xV100-16G"),
    "gcloud_a100": ("gcloud-a100-east1b.csv", 4, "4xA100-40G"),
}

KINDS = ("preemption", "diurnal", "bursty", "flapping", "slowdown")

WEEK_S, EVENTS = 7 * 86400.0, 10_000
DAY_S = 86400.0


def at_hand() -> tuple[str, ...]:
    """The recorded traces whose files exist."""
    return tuple(name for name, (file, _, _) in RECORDED.items() if (TRACES / file).exists())


def loss_figures() -> dict[str, float]:
    """CPU seconds of one decision after one of 1,024 nodes is lost, with only the plan and its costs known:
    for patches alone, and for all alternatives."""
    cluster = load_cluster("1024x8xH100-SXM")
    model = load_model("llama-2-7b")
    job = search.default_job(model, cluster, seq_len=4096, global_batch_size=8192)
    answer = search.plan(search.Question(model=model, cluster=cluster, job=job, use_all=True, top=0))
    trace = EventTrace(nodes=1024, events=())
    view, start = NodeView(cluster), Conditions.at_start(trace)
    planner = planner_of(Prices(model, cluster, job), Costs())
    slots = tuple(f"n{index}" for index in range(1024))
    running = planner.steps.balanced(answer.best.strategy, slots, situation_of(view, start))
    if running is None:
        raise RuntimeError("the plan does not run")
    situation = situation_of(view, start.after(NodeLost(time_s=0.0, node="n500")))
    started = time.process_time()
    patch = planner.patch(running, situation, horizon_s=6 * 3600.0)
    patched = time.process_time()
    decision = planner.replan(running, situation, horizon_s=6 * 3600.0)
    return {
        "patch_cpu_s": patched - started,
        "all_cpu_s": time.process_time() - patched,
        "patch_step_s": patch.step_s,
        "step_s": decision.step_s,
        "considered": float(decision.considered),
    }


def replay_figures(name: str) -> dict[str, float]:
    """Each policy's share of the oracle's tokens on a recorded trace."""
    file, per_node, node = RECORDED[name]
    trace, _ = convert_events(str(TRACES / file), per_node=per_node)
    return _replayed(trace, load_cluster(f"{trace.nodes}x{node}"), batch=512, end_s=trace.end_s)


def week_figures() -> dict[str, float]:
    """Replay of a week of 10,000 events on 64 nodes: preemptions, and bursts on links."""
    cluster = load_cluster("64x4xA100-40G")
    lost = generate_events(cluster, "preemption", length_s=WEEK_S, seed=1)
    bursts = generate_events(cluster, "bursty", length_s=WEEK_S, seed=1)
    some = random.Random(1).sample(bursts.events, EVENTS - len(lost.events))
    events: list[ClusterEvent] = sorted([*lost.events, *some], key=lambda event: event.time_s)
    trace = EventTrace(nodes=64, events=tuple(events))
    return _replayed(trace, cluster, batch=1024, end_s=WEEK_S)


def generated_figures(kind: str) -> dict[str, float]:
    """Replay of two days of one kind of generated events on eight nodes."""
    cluster = load_cluster("8x4xA100-40G")
    trace = generate_events(cluster, kind, length_s=2 * DAY_S, seed=1)
    return _replayed(trace, cluster, batch=256, end_s=2 * DAY_S)


def _replayed(trace: EventTrace, cluster: Cluster, *, batch: int, end_s: float) -> dict[str, float]:
    model = load_model("opt-350m")
    job = search.default_job(model, cluster, seq_len=2048, global_batch_size=batch)
    started = time.process_time()
    interval_s = best_interval_s(trace, end_s) or Costs().checkpoint_interval_s
    planner: Planner = planner_of(Prices(model, cluster, job), Costs(checkpoint_interval_s=interval_s))
    found = replay(mixed_planner_of(planner, PlansBySize), trace, end_s=end_s)
    oracle = found.tokens(found.run("oracle"))
    return {
        "cpu_s": time.process_time() - started,
        "events": float(len(trace.events)),
        "epochs": float(len(found.epochs)),
        "changes": float(found.run("adaptive").changes),
        "goodput": found.goodput(found.run("adaptive")),
        "oracle_tokens": oracle,
        **{f"{run.name}_share": found.tokens(run) / oracle for run in found.runs},
    }
