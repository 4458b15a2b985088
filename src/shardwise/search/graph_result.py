"""The prediction of one layout of an operator graph as a `Result`."""

from __future__ import annotations

from shardwise.cluster import Cluster, mesh_of
from shardwise.cost import LayoutEstimate, Training, estimate_layout
from shardwise.graph import GraphLayout, OpGraph, StagedLayout
from shardwise.plans import Layout, PeakMemory, Pipeline, Result, Stage, as_ranges
from shardwise.search.graph_pipeline import PipelineEstimate, estimate_pipeline
from shardwise.search.result import EVALUATOR, band_of


def estimate_of(
    graph: OpGraph, cluster: Cluster, training: Training, layout: GraphLayout
) -> LayoutEstimate | PipelineEstimate:
    """Step time and memory of a layout of a graph, or of its stages, on equal meshes of `cluster`."""
    mesh = mesh_of(cluster, layout.ranks)
    if isinstance(layout, StagedLayout):
        return estimate_pipeline(graph, cluster, training, mesh, layout)
    return estimate_layout(graph, cluster, training, mesh, layout)


def graph_result(graph: OpGraph, cluster: Cluster, training: Training, layout: GraphLayout) -> Result:
    """The result of a layout of `graph`, whose stages use all devices of `cluster`.

    Device bytes are the resident bytes, saved activations and largest temporaries, as in the Pareto search;
    the allocated bytes are the most of them at one moment.
    """
    estimate = estimate_of(graph, cluster, training, layout)
    layouts: tuple[GraphLayout, ...]
    layouts, microbatches, schedule = (layout,), 1, "1f1b"
    if isinstance(layout, StagedLayout):
        layouts, microbatches, schedule = layout.stages, layout.microbatches, layout.schedule
    devices = cluster.devices // len(layouts)
    classes = [node.device_class for node in cluster.nodes for _ in range(node.devices)]
    stages = []
    for place, own in enumerate(layouts):
        ranks = range(place * devices, (place + 1) * devices)
        stages.append(
            Stage(
                devices=devices,
                ranks=as_ranges(ranks),
                device_class=" + ".join(dict.fromkeys(classes[rank] for rank in ranks)),
                tp=1,
                dp=1,
                layers=(len(own.blocks),),
                share=1.0,
                operators=own,
            )
        )
    peak = PeakMemory(
        allocated=estimate.at_once_bytes,
        reserved=estimate.memory_bytes,
        device=estimate.memory_bytes,
        capacity=float(min(device.memory_bytes for device in cluster.classes.values())),
    )
    errors = training.profile.peak_errors
    bands = [band_of(training.profile, device.efficiency) for device in cluster.classes.values()]
    return Result(
        fields=None,
        layout=Layout(
            schedule=schedule,
            pipelines=(
                Pipeline(
                    stages=tuple(stages),
                    micro_batch_size=graph.batch // microbatches,
                    microbatches=microbatches,
                    rows=graph.batch,
                    makespan_s=estimate.time_s,
                ),
            ),
        ),
        step_time_s=estimate.time_s,
        band_s=(
            estimate.time_s * min(low for low, _ in bands),
            estimate.time_s * max(high for _, high in bands),
        ),
        tokens_per_s_per_device=None,
        mfu=None,
        mfu_full_attention=None,
        peak_memory=peak,
        memory_band_bytes=errors.band_bytes(peak.device),
        fits_probability=errors.fits_probability(peak.device, peak.capacity),
        breakdown=estimate.seconds,
        memory=estimate.nbytes,
        tightest_rank=0,
        evaluator=EVALUATOR,
    )
