"""What `check` finds of the plan of an operator graph: its layout is priced anew, from its names alone."""

from __future__ import annotations

from shardwise.check import (
    REASON_QUESTION,
    Check,
    Verdict,
    fit_check,
    number_check,
    open_if_priced_as,
    parts_check,
    priced_as_check,
    unchecked,
    value_check,
)
from shardwise.cluster import Cluster, Mesh
from shardwise.cost import LayoutEstimate, PipelineEstimate, Training, estimate_layout, estimate_pipeline
from shardwise.graph import GraphLayout, OpGraph, StagedLayout
from shardwise.plan import document_hash, graph_plan_document, read_graph_plan


def check_graph_file(path: str) -> Verdict:
    """The verdict on the graph plan at `path`, by the program that prices one layout and shares no code with
    the search (docs/concepts/pareto-search.md). That no layout is better is not proven again: it stays open.

    Raises ConfigError for a file that is no such plan, was altered, or has a layout that is none of its graph
    on its mesh.
    """
    plan = read_graph_plan(path)
    training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
    estimate = estimate_of(plan.graph, plan.cluster, training, plan.mesh, plan.layout)
    document = graph_plan_document(plan)
    stated = str(document["hash"])
    capacity = min(device.memory_bytes for device in plan.cluster.classes.values())
    limit = capacity * (1.0 - plan.job.memory_margin)
    layout = f"{len(plan.layout.blocks)} blocks on {plan.mesh.name}"
    if isinstance(plan.layout, StagedLayout):
        layout = f"{layout} in {len(plan.layout.stages)} stages"
    return Verdict(
        plan_hash=stated,
        checks=(
            value_check("hash", stated, document_hash(document)),
            Check(name="layout", ok=True, found=layout, expected="rules that the operators have"),
            number_check("step time", plan.step_time_s, estimate.time_s),
            parts_check("breakdown", plan.seconds, estimate.seconds, estimate.time_s),
            number_check("device bytes", plan.device_bytes, estimate.memory_bytes),
            number_check("bytes at once", plan.at_once_bytes, estimate.at_once_bytes),
            parts_check("memory", plan.nbytes, estimate.nbytes, estimate.memory_bytes),
            fit_check("fits", estimate.memory_bytes, limit),
            *priced_as_check(plan.cluster, plan.priced_as, is_for_trace=False),
            open_if_priced_as(
                Check(
                    name="optimal",
                    ok=False,
                    found=f"matches all layouts within {plan.epsilon!r}",
                    expected="the same, by another search: there is none for layouts of operators",
                    is_open=True,
                ),
                plan.priced_as,
            ),
        ),
        unchecked=(
            *unchecked(REASON_QUESTION, "graph", "job", "cluster"),
            *unchecked("no other search bounds layouts of operators", "epsilon"),
            *unchecked("the file has the used devices alone", *(["idle"] if plan.idle.devices else [])),
        ),
    )


def estimate_of(
    graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh, layout: GraphLayout
) -> LayoutEstimate | PipelineEstimate:
    """The price of a layout of a graph, or of its stages, from its names."""
    if isinstance(layout, StagedLayout):
        return estimate_pipeline(graph, cluster, training, mesh, layout)
    return estimate_layout(graph, cluster, training, mesh, layout)
