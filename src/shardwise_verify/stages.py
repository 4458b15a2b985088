"""Stages of a pipeline: their layers and amounts (docs/concepts/cost-model.md, section 9), and the layout
of a strategy: devices and layers of each stage (sections 4, 9 and 15)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from shardwise_verify.layers import Amounts
from shardwise_verify.records import ClusterRecord, LayoutRecord, PipelineRecord, StageRecord
from shardwise_verify.strategy_rows import Column, Family, strides


def layers_of_stages(layers: int, family: Family) -> tuple[Column, ...]:
    """Decoder layers of each stage, on every row."""
    first, last, stages = family.rows.first_stage_layers, family.rows.last_stage_layers, family.stages
    if stages == 1:
        return (first,)
    if stages == 2:
        return first, last
    each, extra = np.divmod(layers - first - last, stages - 2)
    between = [each + (stage >= stages - 2 - extra) for stage in range(stages - 2)]
    return first, *between, last


def kinds_of_stages(pattern: Sequence[int], kinds: int, counts: Sequence[Column]) -> list[list[Column]]:
    """[stage][kind]: number of layers of each kind on each stage, on every row."""
    up_to = np.zeros((kinds, len(pattern) + 1), dtype=np.int64)
    for place, kind in enumerate(pattern):
        up_to[:, place + 1] = up_to[:, place]
        up_to[kind, place + 1] += 1
    found, start = [], np.zeros_like(counts[0])
    for count in counts:
        end = start + count
        found.append([up_to[kind][end] - up_to[kind][start] for kind in range(kinds)])
        start = end
    return found


def amounts_of_stages(
    blocks: Sequence[Amounts], kinds: Sequence[Sequence[Column]], names: Iterable[str]
) -> list[dict[str, Column]]:
    """The sums over the blocks of each stage; `blocks` are the kinds of layers, the embedding, the head."""
    names = tuple(names)
    *layers, embedding, head = blocks
    found = []
    for stage, counts in enumerate(kinds):
        sums = {
            name: sum(count * block[name] for count, block in zip(counts, layers, strict=True))
            for name in names
        }
        for block, is_here in ((embedding, stage == 0), (head, stage == len(kinds) - 1)):
            if is_here:
                sums = {name: sums[name] + block[name] for name in names}
        found.append(sums)
    return found


def on_ranks(family: Family, per_stage: Sequence[Column]) -> list[Column]:
    """The sum over the stages of each pipeline rank."""
    return [sum(per_stage[stage] for stage in family.stages_of(rank)) for rank in range(family.pp)]


def with_tied_copy(
    family: Family, stages: Sequence[Mapping[str, Column]], name: str, copy: Column
) -> list[Column]:
    """The amount `name` of each stage, plus `copy` on the last stage where it has its own copy of tied
    weights."""
    values = [stage[name] for stage in stages]
    if family.ends_apart:
        values[-1] = values[-1] + copy
    return values


def layout_of(
    family: Family, layers: int, cluster: ClusterRecord, batch: int, makespan_s: float
) -> LayoutRecord:
    """The layout of the single strategy of `family` for this number of layers, and for a `batch` of sequences
    that takes `makespan_s`."""
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
            StageRecord(
                devices=len(ranks),
                ranks=ranges(ranks),
                device_class=device_class(cluster, ranks[0]),
                tp=degrees["tp"],
                cp=degrees["cp"],
                dp=degrees["dp"],
                layers=sum(counts[stage] for stage in family.stages_of(rank)),
                chunks=tuple(counts[stage] for stage in family.stages_of(rank)),
                share=1.0,
                recompute=rows.recompute[0].item(),
            )
        )
    pipeline = PipelineRecord(
        stages=tuple(stages),
        micro_batch_size=int(rows.micro_batch_size[0]),
        microbatches=family.microbatches,
        rows=batch,
        makespan_s=makespan_s,
    )
    return LayoutRecord(schedule=rows.schedule[0].item(), pipelines=(pipeline,))


def ranges(ranks: list[int]) -> str:
    """Ascending numbers as ranges: `0-7,16-23`."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def device_class(cluster: ClusterRecord, rank: int) -> str:
    """The class of the device at global rank `rank`. Raises ValueError for a rank outside the cluster."""
    for node in cluster.nodes:
        if rank < node.count * node.devices:
            return node.device_class
        rank -= node.count * node.devices
    raise ValueError("the cluster has fewer devices")
