"""The plan file of an operator graph: a layout of each operator, with the graph, the cluster and the job.

It is a schema of its own, self-contained, with a hash over its content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import isclose
from typing import Any, get_args

from shardwise.cluster import Cluster, Mesh, cluster_record, mesh_of
from shardwise.errors import ConfigError
from shardwise.graph import (
    GraphLayout,
    OpGraph,
    StagedLayout,
    graph_text,
    layout_from_record,
    layout_record,
    parse_graph,
    staged_from_record,
    staged_record,
)
from shardwise.inputs import Fields, dumps, parse_mapping, read_bytes, read_mapping, short_repr
from shardwise.plans.atomic_write import Files, write_file
from shardwise.plans.plan_file import (
    GRAPH_PLAN_SCHEMA,
    MAX_PLAN_BYTES,
    MAX_PLAN_NODES,
    document_hash,
    plain_mapping,
    read_cluster,
    verify,
)
from shardwise.plans.record import NO_IDLE_DEVICES, SHORTEST_STEP_S, Idle
from shardwise.strategy import Optimizer, Profile, profile_from_record

VERSION = 1

SCHEDULES_OF_STAGES = ("1f1b",)
"""Schedules of graph stages: those with one stage per pipeline rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphJob:
    """How a graph is trained; the graph itself has the batch size."""

    dtype: str
    optimizer: Optimizer
    memory_margin: float
    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """A layout of `graph` on `mesh`, with its predicted step time and memory. The mesh covers all of
    `cluster`, or each stage of a pipeline.

    `seconds` sum to the step time, and `nbytes` to `device_bytes` on the tightest rank. Device bytes are the
    resident bytes, saved activations and largest temporaries, as in the Pareto search; at most
    `at_once_bytes` of them are allocated at one moment. Every layout is matched in step time and device bytes
    within a factor 1 + `epsilon` by some point of the frontier that contains this plan. `cluster` has the
    used devices only; `idle` are the others.
    """

    graph: OpGraph
    cluster: Cluster
    job: GraphJob
    mesh: Mesh
    layout: GraphLayout
    step_time_s: float
    device_bytes: float
    at_once_bytes: float
    seconds: Mapping[str, float]
    nbytes: Mapping[str, float]
    epsilon: float
    idle: Idle = NO_IDLE_DEVICES

    @property
    def priced_as(self) -> tuple[str, ...]:
        """How the cluster was approximated; empty if it was estimated as given."""
        return self.cluster.priced_as

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 if the graph is not cut."""
        return len(self.layout.spans) if isinstance(self.layout, StagedLayout) else 1

    @property
    def devices(self) -> int:
        """Number of devices of all stages."""
        return self.stages * self.mesh.devices

    @property
    def microbatches(self) -> int:
        """Number of micro-batches; 1 if the batch is not divided."""
        return self.layout.microbatches if isinstance(self.layout, StagedLayout) else 1


_SCHEMA_LINE = re.compile(rb'\s*(\{\s*)?"?schema"?\s*:\s*"?' + re.escape(GRAPH_PLAN_SCHEMA.encode()) + rb"\b")


def is_graph_plan(path: str) -> bool:
    """Whether the file at `path` begins with the schema of a graph plan."""
    return _SCHEMA_LINE.match(read_bytes(os.fspath(path), max_bytes=MAX_PLAN_BYTES)) is not None


def write_graph_plan(path: str, plan: GraphPlan, *, files: Files | None = None) -> str:
    """Writes `plan` to `path` atomically; returns the plan hash."""
    document = graph_plan_document(plan)
    write_file(path, dumps(document, file=path).encode(), files=files)
    return str(document["hash"])


def graph_plan_document(plan: GraphPlan) -> dict[str, object]:
    """The plan file as plain values, including the hash."""
    document = plain_mapping(
        {
            "schema": GRAPH_PLAN_SCHEMA,
            "version": VERSION,
            "hash": "",
            "job": asdict(plan.job),
            "mesh": list(plan.mesh.ranks),
            "layout": _layout_document(plan.layout),
            "step_time_s": plan.step_time_s,
            "device_bytes": plan.device_bytes,
            "at_once_bytes": plan.at_once_bytes,
            "breakdown": dict(plan.seconds),
            "memory": dict(plan.nbytes),
            "epsilon": plan.epsilon,
            **({"idle": asdict(plan.idle)} if plan.idle.devices else {}),
            "graph": _graph_document(graph_text(plan.graph)),
            "cluster": cluster_record(plan.cluster),
        }
    )
    document["hash"] = document_hash(document)
    return document


@lru_cache(maxsize=2)
def _graph_document(text: str) -> dict[str, object]:
    """A graph as plain values, shared by the plans of a frontier; read-only."""
    return parse_mapping(text)


def read_graph_plan(path: str) -> GraphPlan:
    """The plan in the file at `path`. Raises ConfigError if it is not a graph plan, has a newer version, was
    altered or is incomplete."""
    path = os.fspath(path)
    document = read_mapping(path, max_bytes=MAX_PLAN_BYTES, max_nodes=MAX_PLAN_NODES)
    verify(document, path, schema=GRAPH_PLAN_SCHEMA, version=VERSION, what="the plan of an operator graph")
    fields = Fields(document, file=path)
    for name in ("schema", "version", "hash"):
        fields.any(name)
    graph = _graph(fields, path)
    cluster = read_cluster(fields, path)
    record = _mapping(fields, "layout")
    stages = record.get("stages")
    mesh = _mesh(fields, cluster, len(stages) if isinstance(stages, list) and stages else 1)
    device_bytes = fields.number("device_bytes")
    plan = GraphPlan(
        graph=graph,
        cluster=cluster,
        job=_job(fields.mapping("job")),
        mesh=mesh,
        layout=_layout(record, graph, mesh, path),
        step_time_s=fields.number("step_time_s", low=SHORTEST_STEP_S),
        device_bytes=device_bytes,
        # Older files do not have it; `device_bytes` is an upper bound.
        at_once_bytes=fields.number("at_once_bytes", default=device_bytes),
        seconds=_parts(fields, "breakdown", "step_time_s"),
        nbytes=_parts(fields, "memory", "device_bytes"),
        epsilon=fields.number("epsilon", high=1e6),
        idle=_idle(fields),
    )
    fields.finish()
    return plan


def _layout_document(layout: GraphLayout) -> dict[str, Any]:
    return staged_record(layout) if isinstance(layout, StagedLayout) else layout_record(layout)


def _layout(record: Mapping[str, Any], graph: OpGraph, mesh: Mesh, path: str) -> GraphLayout:
    if "stages" in record:
        return staged_from_record(record, graph, mesh.ranks, SCHEDULES_OF_STAGES, file=path)
    return layout_from_record(record, graph, mesh.ranks, file=path)


def _mapping(fields: Fields, name: str) -> Mapping[str, Any]:
    value = fields.any(name)
    if not isinstance(value, Mapping):
        raise fields.error(name, "is not a mapping", found=short_repr(value))
    return value


def _graph(fields: Fields, path: str) -> OpGraph:
    try:
        return parse_graph(_mapping(fields, "graph"))
    except ConfigError as error:
        raise error.within(file=path, key="graph") from None


def _mesh(fields: Fields, cluster: Cluster, stages: int) -> Mesh:
    """The mesh of each stage; all stages together use all devices of the cluster."""
    sizes = fields.sequence("mesh", low=1, high=3)
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise fields.error(
                "mesh", "is not a list of sizes", found=short_repr(size), allowed="whole numbers"
            )
    try:
        mesh = mesh_of(cluster, tuple(int(str(size)) for size in sizes))
    except ConfigError as error:
        raise fields.error("mesh", error.message, found=error.found, allowed=error.allowed) from None
    if stages * mesh.devices != cluster.devices:
        allowed = f"sizes whose product is {cluster.devices // stages}"
        raise fields.error("mesh", "does not use all devices", found=mesh.name, allowed=allowed)
    return mesh


def _job(fields: Fields) -> GraphJob:
    optimizer: Any = fields.choice("optimizer", get_args(Optimizer))
    job = GraphJob(
        dtype=fields.text("dtype"),
        optimizer=optimizer,
        memory_margin=fields.number("memory_margin", low=0.0, high=1.0),
        profile=profile_from_record(fields.mapping("profile")),
    )
    fields.finish()
    return job


def _idle(fields: Fields) -> Idle:
    """The idle devices; NO_IDLE_DEVICES if the file has none."""
    if not fields.has("idle"):
        return NO_IDLE_DEVICES
    part = fields.mapping("idle")
    idle = Idle(
        devices=part.integer("devices", low=1, high=1e9),
        nodes=part.integer("nodes", high=1e9),
        ranks=part.text("ranks", max_length=100_000),
    )
    part.finish()
    return idle


def _parts(fields: Fields, name: str, total_key: str) -> dict[str, float]:
    """Named numbers that sum to the number at `total_key`; their names are those of the cost model."""
    part = fields.mapping(name)
    found = {each: part.number(each, low=-1e30) for each in part.names}
    if not isclose(sum(found.values()), fields.number(total_key), rel_tol=1e-9):
        raise fields.error(name, f"does not sum to {total_key}", found=repr(sum(found.values())))
    return found
