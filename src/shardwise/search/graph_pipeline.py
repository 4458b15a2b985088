"""The cost of one layout of an operator graph in pipeline stages: each stage, the sends, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.cluster import Cluster, Mesh
from shardwise.cost import LayoutEstimate, Training, estimate_stage, stage_transfer_of
from shardwise.errors import InternalError
from shardwise.graph import OpGraph, StagedLayout, scaled
from shardwise.search.staged.problem import SCHEDULE, StagedProblem
from shardwise.ties import first_largest


@dataclass(frozen=True, slots=True)
class PipelineEstimate:
    """Step time in seconds and bytes on the rank with most.

    `seconds` are the parts of the step time on the stage that works longest, with its `waiting`. `nbytes` are
    the parts of `memory_bytes`. No rank has more than `at_once_bytes` at one moment. `stages` are the
    estimates of each stage, `hops_s` the sends between them as far as they overlap.
    """

    time_s: float
    memory_bytes: float
    at_once_bytes: float
    seconds: Mapping[str, float]
    nbytes: Mapping[str, float]
    stages: tuple[LayoutEstimate, ...]
    hops_s: tuple[float, ...]


def estimate_pipeline(
    graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh, layout: StagedLayout
) -> PipelineEstimate:
    """Costs of a layout of `graph` (sizes of the whole batch) in 1F1B stages on meshes like `mesh`.

    Raises InternalError for another schedule, and where the micro-batches do not divide the batch.
    docs/concepts/pareto-search.md.
    """
    if layout.schedule != SCHEDULE or graph.batch % layout.microbatches:
        raise InternalError(
            f"no estimate: {layout.microbatches} micro-batches of batch {graph.batch}, {layout.schedule}"
        )
    problem = StagedProblem(
        graph=scaled(graph, graph.batch // layout.microbatches),
        cluster=cluster,
        training=training,
        mesh=mesh,
        stages=len(layout.spans),
        microbatches=layout.microbatches,
    )
    transfer = stage_transfer_of(problem.graph, cluster, training, mesh, problem.stages, layout)
    stages = [
        estimate_stage(
            problem.graph, cluster, training, mesh, layout.stages[stage], first=first, end=end,
            counts=transfer.counts(stage, first, end, layout.microbatches, schedule=SCHEDULE),
        )
        for stage, (first, end) in enumerate(layout.spans)
    ]  # fmt: skip
    hops_s = np.array([transfer.hop_s(stage, cut) for stage, cut in enumerate(layout.cuts)])
    forward_s, backward_s, end_s = (
        np.array([[getattr(stage, name) for stage in stages]])
        for name in ("forward_s", "backward_s", "end_s")
    )
    step_s = float(problem.makespan_s(forward_s, backward_s, end_s, hops_s)[0])
    busy = stages[int(first_largest([stage.time_s for stage in stages]))]
    full = stages[int(first_largest([stage.memory_bytes for stage in stages]))]
    return PipelineEstimate(
        time_s=step_s,
        memory_bytes=full.memory_bytes,
        at_once_bytes=max(stage.at_once_bytes for stage in stages),
        seconds={**busy.seconds, "waiting": step_s - busy.time_s},
        nbytes=full.nbytes,
        stages=tuple(stages),
        hops_s=tuple(hops_s.tolist()),
    )
