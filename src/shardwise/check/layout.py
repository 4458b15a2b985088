"""Which devices and layers each stage of a pipeline has (docs/concepts/cost-model.md, sections 4, 9 and
15)."""

from __future__ import annotations

from shardwise.check.rows import Family, strides
from shardwise.check.stages import layers_of_stages
from shardwise.cluster import Cluster
from shardwise.plan import Layout, Pipeline, Stage


def layout_of(family: Family, layers: int, cluster: Cluster) -> Layout:
    """The layout that the single strategy of `family` means for so many layers."""
    rows = family.rows
    counts = [int(count[0]) for count in layers_of_stages(layers, family)]
    stride = {axis: int(values[0]) for axis, values in strides(rows).items()}
    degrees = {axis: int(getattr(rows, axis)[0]) for axis in ("tp", "cp", "dp")}
    stages = []
    for rank in range(family.pp):
        ranks = sorted(
            rank * stride["pp"] + x * stride["tp"] + y * stride["cp"] + z * stride["dp"]
            for x in range(degrees["tp"])
            for y in range(degrees["cp"])
            for z in range(degrees["dp"])
        )
        stages.append(
            Stage(
                devices=len(ranks),
                ranks=ranges(ranks),
                device_class=device_class(cluster, ranks[0]),
                tp=degrees["tp"],
                dp=degrees["dp"],
                layers=tuple(counts[stage] for stage in family.stages_of(rank)),
                share=1.0,
            )
        )
    return Layout(pipelines=(Pipeline(stages=tuple(stages)),))


def ranges(ranks: list[int]) -> str:
    """Ascending numbers as ranges: `0-7,16-23`."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def device_class(cluster: Cluster, rank: int) -> str:
    """The class of the device at global rank `rank`."""
    for node in cluster.nodes:
        if rank < node.devices:
            return node.device_class
        rank -= node.devices
    raise ValueError("the cluster has fewer devices")
