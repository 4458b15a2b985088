"""Computation, communication, overlap and idle time of a step of an operator graph: `graph_parts`.

Communication that a recomputation repeats counts as computation, as in the breakdown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from shardwise.cluster import Cluster
from shardwise.cost import LayoutEstimate, Training, cluster_without_slowdown
from shardwise.graph import GraphLayout, OpGraph, StagedLayout
from shardwise.plans import StepParts
from shardwise.search.graph_pipeline import PipelineEstimate
from shardwise.search.graph_result import estimate_of
from shardwise.search.step_parts import EndSeconds, RankTraffic, Seconds, TimedPipeline, joined
from shardwise.sim import Durations
from shardwise.ties import first_largest

MECHANISM_OF: Mapping[str, str] = {
    "gathers": "parameter_gathering",
    "gradients": "gradient_reduction",
    "conversions": "redistribution",
    "exchanges": "redistribution",
}
"""The mechanism of each part of a breakdown that communicates in the passes."""

When = Literal["forward", "backward", "step"]
"""The pass of a micro-batch, or the end of the step, in which seconds are spent."""


def graph_parts(graph: OpGraph, cluster: Cluster, training: Training, layout: GraphLayout) -> StepParts:
    """The parts of a step on the stage that works longest."""
    whole = estimate_of(graph, cluster, training, layout)
    alone = replace(training, profile=training.profile.without_overlap())
    stages = _stages_of(whole)
    index = int(first_largest([stage.time_s for stage in stages]))
    microbatches = layout.microbatches if isinstance(layout, StagedLayout) else 1
    hops_s = whole.hops_s if isinstance(whole, PipelineEstimate) else ()
    timed = TimedPipeline(
        "1f1b",
        len(stages),
        1,
        Durations.of(
            stages=len(stages),
            forward_s=[stage.forward_s for stage in stages],
            backward_s=[stage.backward_s for stage in stages],
            reduce_s=[stage.end_s for stage in stages],
            hop_forward_s=hops_s,
            hop_backward_s=hops_s,
        ),
        (
            np.array([_spent_s(stage, "sends", "forward") for stage in stages]),
            np.array([_spent_s(stage, "sends", "backward") for stage in stages]),
        ),
    )
    own = stages[index]
    undisturbed = _stages_of(estimate_of(graph, cluster_without_slowdown(cluster), training, layout))[index]
    every = _stages_of(estimate_of(graph, cluster, alone, layout))[index]
    work = replace(
        timed.work(index, microbatches),
        gathers_s=_spent_s(own, "gathers", "step"),
        reductions_s=_spent_s(own, "gradients", "step"),
    )
    return joined(
        (0, index, index * (cluster.devices // len(stages))),
        work,
        RankTraffic(
            total_s=_in_passes(every),
            exposed_s=_in_passes(undisturbed),
            slowdown_s=own.forward_s + own.backward_s - undisturbed.forward_s - undisturbed.backward_s,
            gathering_s=_spent_s(every, "gathers", "step"),
            reduction_s=_spent_s(every, "gradients", "step"),
        ),
        microbatches,
        host_s=0.0,
        end=EndSeconds(
            {"gradient_norm": _spent_s(own, "norm", "step")},
            _spent_s(own, "optimizer", "step"),
            _spent_s(own, "host", "step"),
        ),
        step_time_s=whole.time_s,
    )


def _stages_of(estimate: LayoutEstimate | PipelineEstimate) -> tuple[LayoutEstimate, ...]:
    return estimate.stages if isinstance(estimate, PipelineEstimate) else (estimate,)


def _spent_s(stage: LayoutEstimate, what: str, when: When) -> float:
    """Seconds of a stage for one purpose, in a pass of a micro-batch or at the end of the step."""
    return sum(each.seconds for each in stage.charges if (each.what, each.when) == (what, when))


def _in_passes(stage: LayoutEstimate) -> Seconds:
    """Seconds of communication in both passes of a micro-batch, by mechanism."""
    found = dict.fromkeys(MECHANISM_OF.values(), 0.0)
    for what, mechanism in MECHANISM_OF.items():
        found[mechanism] += _spent_s(stage, what, "forward") + _spent_s(stage, what, "backward")
    return found
