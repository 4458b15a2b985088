"""Answers of the product as plain records with names of their own, which survive changes of the product.

Plan hashes, counts of search effort (pruned, evaluated, seconds) and sentences are left out. Entries with
equal numbers are in text order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from math import inf, isclose
from typing import Any

from shardwise.errors import Infeasible
from shardwise.graph import GraphLayout, StagedLayout, layout_record, staged_record
from shardwise.plans import (
    Answer,
    Certificate,
    Idle,
    Layout,
    MixedFigures,
    PeakMemory,
    Plan,
    Result,
    SearchedPart,
    Stage,
    StrategyFrontier,
    TraceChoice,
)
from shardwise.search import Curve, Point, Reference
from shardwise.strategy import HOST_MEMORY, MEMORY, Strategy
from shardwise.ties import TIE, least_first

Record = dict[str, Any]

STRATEGY = (
    "tp", "cp", "cp_kind", "pp", "vpp", "dp", "ep", "etp", "param_shard", "grad_shard", "optim_shard",
    "micro_batch_size", "schedule", "sequence_parallel", "recompute", "recompute_layers", "offload",
    "axis_order", "first_stage_layers", "last_stage_layers",
)  # fmt: skip
"""The fields of a strategy."""


BLOCK = ("name", "mode", "operators", "tensors", "stored", "used")
"""The keys of a block's layout, as in plan files."""


def in_order(entries: Sequence[Record], what: str) -> list[Record]:
    """Records by increasing step time; ties in the text order of their `what`."""
    by_text = sorted(entries, key=lambda entry: json.dumps(entry[what], sort_keys=True))
    return [by_text[place] for place in least_first([entry["step_time_s"] for entry in by_text])]


def answer_record(answer: Answer) -> Record:
    """The answer of `plan`."""
    found: Record = {
        "best": result_record(answer.best)
        if answer.best.is_uniform
        else uneven_record(answer.best, answer.idle.devices),
        "runners_up": [],
        "certificate": certificate_record(answer.certificate),
        "is_proven": answer.is_proven,
        "idle": idle_record(answer.idle),
        "all_devices_step_time_s": answer.all_devices_step_time_s,
        "parts": [part_record(part) for part in answer.parts],
        "unexplored_parts": answer.unexplored_parts,
        "mixed": mixed_record(answer.mixed),
    }
    if not answer.best.is_uniform:
        return found
    runners_up = [result_record(result) for result in answer.runners_up]
    return found | {
        "runners_up": in_order(runners_up, "strategy"),
        "objective": answer.objective,
        "devices": None if answer.cluster is None else answer.cluster.devices,
        "frontier": None if answer.frontier is None else tradeoff_record(answer.frontier),
    }


def strategy_record(strategy: Strategy) -> Record:
    return {name: getattr(strategy, name) for name in STRATEGY}


def strategy_text(strategy: Strategy) -> str:
    """Every field of a strategy in one line."""
    values = strategy_record(strategy).items()
    return ",".join(f"{name}={str(value).lower()}" for name, value in values)


def result_record(result: Result) -> Record:
    """A strategy with its estimate."""
    return {
        "strategy": strategy_record(result.strategy),
        "step_time_s": result.step_time_s,
        "seconds": dict(result.breakdown),
        "bytes": dict(result.memory),
        "peak_bytes": peak_record(result.peak_memory),
        "tightest_rank": result.tightest_rank,
        "band_s": list(result.band_s),
        "tokens_per_s_per_device": result.tokens_per_s_per_device,
        "mfu": result.mfu,
        "mfu_full_attention": result.mfu_full_attention,
        "layout": layout_of(result.layout),
    }


def uneven_record(result: Result, idle_devices: int) -> Record:
    """An uneven plan with its estimate; so many devices of its cluster are not in use."""
    return {
        "step_time_s": result.step_time_s,
        "pipeline_s": list(result.pipeline_s),
        "micro_batch_size": result.micro_batch_size,
        "microbatches": list(result.microbatches),
        "recompute": [list(stages) for stages in result.recompute],
        "seconds": dict(result.breakdown),
        "peak_bytes": peak_record(result.peak_memory),
        "tightest_rank": result.tightest_rank,
        "idle_devices": idle_devices,
        "pools": list(result.pools),
        "is_alike": result.is_alike,
        "band_s": list(result.band_s),
        "tokens_per_s_per_device": result.tokens_per_s_per_device,
        "mfu": result.mfu,
        "mfu_full_attention": result.mfu_full_attention,
        "layout": layout_of(result.layout),
    }


def peak_record(peak: PeakMemory) -> Record:
    return {
        "allocated": peak.allocated,
        "reserved": peak.reserved,
        "device": peak.device,
        "capacity": peak.capacity,
    }


def layout_of(layout: Layout) -> list[list[Record]]:
    """The stages of every pipeline."""
    return [[stage_record(stage) for stage in pipeline.stages] for pipeline in layout.pipelines]


def stage_record(stage: Stage) -> Record:
    found: Record = {
        "devices": stage.devices,
        "ranks": stage.ranks,
        "class": stage.device_class,
        "tp": stage.tp,
        "dp": stage.dp,
        "layers": list(stage.layers),
        "share": stage.share,
    }
    parts = [
        {"ranks": part.ranks, "class": part.device_class, "tp": part.tp, "rows": part.rows}
        for part in stage.parts
    ]
    return found | ({"parts": parts} if parts else {})


def certificate_record(certificate: Certificate) -> Record:
    """What is proven, without counts that depend on the search: how many candidates are rejected for memory
    depends on which are pruned first."""
    return {
        "space": certificate.space,
        "fixed": dict(certificate.fixed),
        "axes": {name: list(values) for name, values in certificate.axes.items()},
        "enumerated": certificate.enumerated,
        "unexplored": certificate.unexplored,
        "rejected_by_rules": {
            reason: count
            for reason, count in certificate.rejected.items()
            if reason not in (MEMORY, HOST_MEMORY)
        },
        "best_s": certificate.best_s,
        "lower_bound_s": certificate.lower_bound_s,
        "gap": certificate.gap,
        "is_priced_otherwise": bool(certificate.priced_as),
    }


def idle_record(idle: Idle) -> Record:
    return {"devices": idle.devices, "nodes": idle.nodes, "ranks": idle.ranks}


def part_record(part: SearchedPart) -> Record:
    """A part of the cluster that was searched too."""
    return {
        "devices": part.devices,
        "nodes": part.nodes,
        "step_time_s": part.step_time_s,
        "usd_per_step": part.usd_per_step,
        "is_complete": part.is_complete,
    }


def mixed_record(mixed: MixedFigures | None) -> Record | None:
    """The plans that an answer on a mixed cluster is compared with."""
    if mixed is None:
        return None
    return {
        "uniform_step_time_s": mixed.uniform_step_time_s,
        "fastest_class_step_time_s": mixed.fastest_class_step_time_s,
        "fastest_class": mixed.fastest_class,
        "idle_pools": list(mixed.idle),
        "uneven_gap": mixed.uneven_gap,
    }


def tradeoff_record(frontier: StrategyFrontier) -> Record:
    """The frontier of step time and memory of strategies."""
    points = [
        {
            "step_time_s": point.step_time_s,
            "bytes": point.device_bytes,
            "strategy": strategy_text(point.strategy),
        }
        for point in frontier.points
    ]
    return {
        "points": in_order(points, "strategy"),
        "certificate": certificate_record(frontier.certificate),
    }


def infeasible_record(error: Infeasible) -> Record:
    """An infeasible question: the reasons without their counts, and the number of relaxations that would
    help."""
    return {"infeasible": sorted(error.reasons), "changes": len(error.relaxations)}


def frontier_record(
    *,
    points: Sequence[Point[Any]],
    chosen: Point[Any] | None,
    idle: Idle,
    references: Sequence[Reference[Any]],
    curves: Sequence[Curve[Any]],
    price: Callable[[Point[Any]], tuple[float, float]],
) -> Record:
    """The frontier of an operator graph: seconds, bytes and devices of all points, and the layouts of some.

    `price` estimates the layout of a point with separate code. `blocks` has each different block layout once.
    """
    blocks: dict[str, Record] = {}
    front = undominated(points)
    step = max(-(-len(front) // SHOWN), 1)
    shown = dict.fromkeys((*range(0, len(front), step), len(front) - 1))
    return {
        "points": [[point.time_s, point.memory_bytes, point.devices] for point in front],
        "layouts": [point_record(front[place], blocks, price) for place in shown],
        "chosen": None if chosen is None else point_record(chosen, blocks, price),
        "idle": idle_record(idle),
        "references": [
            {"name": one.name, "fits": one.fits, **point_record(one.point, blocks, price)}
            for one in references
        ],
        "curves": [
            {"devices": curve.devices, "epsilon": curve.epsilon, "points": len(undominated(curve.points))}
            for curve in curves
        ],
        "blocks": dict(sorted(blocks.items())),
    }


SHOWN = 8
"""Approximate number of frontier points whose layouts are recorded."""


def undominated(points: Sequence[Point[Any]]) -> list[Point[Any]]:
    """The points by device count and step time, without those that another point dominates up to rounding:
    the order of sums decides which of them the search finds."""
    found: list[Point[Any]] = []
    for devices in sorted({point.devices for point in points}):
        own = sorted(
            (point for point in points if point.devices == devices),
            key=lambda point: (point.time_s, point.memory_bytes),
        )
        least_bytes = inf
        for point, after in zip(own, [*own[1:], None], strict=True):
            is_beaten = (
                after is not None
                and after.time_s <= point.time_s * (1.0 + TIE)
                and after.memory_bytes <= point.memory_bytes
            )
            if not is_beaten and point.memory_bytes < least_bytes * (1.0 - TIE):
                found.append(point)
                least_bytes = point.memory_bytes
    return found


def point_record(
    point: Point[Any], blocks: dict[str, Record], price: Callable[[Point[Any]], tuple[float, float]]
) -> Record:
    """A point with its layout; its blocks are names in `blocks`."""
    time_s, nbytes = price(point)
    return {
        "step_time_s": point.time_s,
        "bytes": point.memory_bytes,
        "usd": point.cost_usd,
        "devices": point.devices,
        "costs_what_its_layout_does": isclose(time_s, point.time_s, rel_tol=TIE)
        and isclose(nbytes, point.memory_bytes, rel_tol=TIE),
        "layout": graph_layout_record(point.layout, blocks),
    }


def graph_layout_record(layout: GraphLayout, blocks: dict[str, Record]) -> Record:
    """A layout of a graph as names in `blocks`, to which new ones are added."""
    found: Record = {"mesh": list(layout.ranks)}
    if isinstance(layout, StagedLayout):
        record = staged_record(layout)
        return found | {
            "schedule": record["schedule"],
            "microbatches": record["microbatches"],
            "stages": [_names_of(stage["blocks"], blocks) for stage in record["stages"]],
        }
    return found | {"stages": [_names_of(layout_record(layout)["blocks"], blocks)]}


def _names_of(run: Sequence[Mapping[str, Any]], blocks: dict[str, Record]) -> str:
    """Text such as `2x 0f3a9c1d`: the count of a block, and the digest of its layout as its name."""
    names = []
    for item in run:
        block = {key: item[key] for key in BLOCK}
        name = sha256(json.dumps(block, sort_keys=True).encode()).hexdigest()[:8]
        blocks[name] = block
        names.append(f"{item['count']}x {name}")
    return ", ".join(names)


def plan_record(plan: Plan) -> Record:
    """The content of a plan file."""
    if plan.kind == "graph":
        return _graph_plan_record(plan)
    found: Record = {
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "devices": plan.cluster.devices,
        "software": plan.job.profile.name,
        "batch": plan.job.global_batch_size,
        "target": plan.target,
        "certificate": certificate_record(plan.proof),
        "for_trace": None if plan.for_trace is None else trace_record(plan.for_trace),
    }
    if plan.kind == "uneven":
        idle_devices = plan.cluster.devices - plan.devices
        return found | {"best": uneven_record(plan.best, idle_devices), "mixed": mixed_record(plan.mixed)}
    (schedule,) = plan.schedules
    return found | {
        "objective": plan.objective,
        "best": result_record(plan.best),
        "runners_up": [
            {
                "strategy": strategy_record(one.strategy),
                "step_time_s": one.step_time_s,
                "bytes": one.device_bytes,
            }
            for one in plan.runners_up
        ],
        "schedule": [schedule.name, schedule.microbatches],
    }


def trace_record(found: TraceChoice) -> Record:
    """How a plan was chosen for a trace of events, without the number of candidates."""
    return {
        "policy": found.policy,
        "trace": found.trace,
        "nodes": list(found.nodes),
        "length_s": found.length_s,
        "steps": found.steps,
        "now_step_time_s": found.now_step_time_s,
        "worst_step_time_s": found.worst_step_time_s,
        "gap": found.gap,
    }


def _graph_plan_record(plan: Plan) -> Record:
    blocks: dict[str, Record] = {}
    return {
        "graph": plan.graph.name,
        "batch": plan.graph.batch,
        "cluster": plan.cluster.name,
        "devices": plan.cluster.devices,
        "software": plan.job.profile.name,
        "step_time_s": plan.step_time_s,
        "device_bytes": plan.best.peak_memory.device,
        "at_once_bytes": plan.best.peak_memory.allocated,
        "seconds": dict(plan.breakdown),
        "bytes": dict(plan.memory),
        "epsilon": plan.epsilon,
        "idle": idle_record(plan.idle),
        "layout": graph_layout_record(plan.operators, blocks),
        "blocks": dict(sorted(blocks.items())),
    }
