"""Models, devices and clusters whose costs can be computed by hand.

The ideal device computes 1000 flop/s and reads and writes 1000 B/s at full efficiency, without any fixed
cost. Nodes have four of them at 100 B/s; between nodes each has 20 B/s. The micro-batch of the brick model is
five tokens of ten elements of two bytes: 100 B, one second within a node and five between nodes.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from shardwise.cluster import AttentionCurve, Cluster, Device, Efficiency, Node, Tier
from shardwise.cluster.device import CollectiveCurve, GroupedMatmulCurve, MatmulCurve, MemoryCurve
from shardwise.cost import Problem, StageTimes, bind, costs_of_all_stages, rank_bytes, stage_times, step_end
from shardwise.cost.memory import RankBytes
from shardwise.cost.times import StepEnd
from shardwise.model import Model
from shardwise.model.model import Layer
from shardwise.operators import Extent, Lookup, Loss, Matmul, Operator, Pointwise, Saved, Weight
from shardwise.strategy import Job, Profile, StrategyTable, complete, parse_fields

IDEAL = Efficiency(
    matmul=MatmulCurve(peak_fraction=1.0, tile_m=1, tile_n=1, units=1, k_half=0.0, small_tile_fraction=1.0),
    grouped_matmul=GroupedMatmulCurve(fraction=1.0, tokens_half=0.0),
    attention={"flash-2": AttentionCurve(forward_fraction=1.0, backward_fraction=1.0, seq_half=0.0)},
    memory=MemoryCurve(fraction=1.0, half_bytes=0.0),
    scale_up=CollectiveCurve(fraction=1.0, startup_s=0.0),
    scale_out=CollectiveCurve(fraction=1.0, startup_s=0.0),
    launch_s=0.0,
    overlap_slowdown=1.0,
    context_bytes=0.0,
    communicator_bytes=0.0,
    fragmentation_ratio=0.0,
    is_calibrated=True,
    provenance={},
)

SOFTWARE = Profile(
    name="by hand",
    described="no host cost; hides nothing of tensor and expert communication, the rest as far as it can",
    attention=("flash-3", "flash-2"),
    tensor_overlap=0.0,
    tensor_backward_overlap=0.0,
    context_overlap=1.0,
    expert_overlap=0.0,
    data_overlap=1.0,
    state_overlap=1.0,
    shard_overlap=1.0,
    pipeline_overlap=1.0,
    pointwise_passes=1.0,
    dispatch_s=0.0,
    expert_dispatch_s=0.0,
    host_action_s=0.0,
    host_step_s=0.0,
    reduce_in_fp32=True,
    zero_stages=(0, 1, 2, 3),
    recomputes=("none", "selective", "full"),
    recompute_stops_early=False,
    applies_dropout=True,
    sequence_parallel=True,
    buffers_all_microbatches=False,
    keeps_gathered_inputs=False,
    reduces_by_block=False,
    warm_band=(0.9, 1.1),
    cold_band=(0.7, 1.3),
    provenance={},
)


def device(efficiency: Efficiency = IDEAL, **changes: Any) -> Device:
    """The ideal device with some figures changed."""
    figures: dict[str, Any] = {
        "name": "ideal",
        "vendor": "none",
        "peak_flop_per_s": {"bf16": 1000.0, "fp8": 2000.0, "fp32": 500.0},
        "memory_bytes": 100_000,
        "memory_bytes_per_s": 1000.0,
        "devices_per_node": 4,
        "nics_per_node": 4,
        "scale_up_name": "bus",
        "scale_up_domain": 4,
        "scale_up_bytes_per_s": 100.0,
        "scale_up_latency_s": 0.0,
        "scale_up_in_switch_reduction": False,
        "scale_out_name": "net",
        "scale_out_bytes_per_s": 20.0,
        "scale_out_latency_s": 0.0,
        "host_link_bytes_per_s": 50.0,
        "host_memory_bytes": 1_000_000,
        "price_usd_per_hour": None,
        "efficiency": efficiency,
        "sources": {},
    }
    return Device(**(figures | changes))


def node(device_class: str = "ideal", devices: int = 4, **changes: Any) -> Node:
    figures: dict[str, Any] = {
        "name": "node",
        "device_class": device_class,
        "devices": devices,
        "nics": 4,
        "nic_bytes_per_s": 20.0,
        "host_memory_bytes": 400_000.0,
        "host_link_bytes_per_s": 50.0,
    }
    return Node(**(figures | changes))


def cluster(
    nodes: int = 2,
    *,
    of: Device | None = None,
    latency_s: tuple[float, float] = (0.0, 0.0),
    bytes_per_s: tuple[float, float] = (100.0, 20.0),
    in_switch: bool = False,
) -> Cluster:
    """`nodes` nodes of four; a single node has one tier."""
    made = of or device()
    inner = Tier(
        name="bus", span=4, bytes_per_s=bytes_per_s[0], flow_bytes_per_s=bytes_per_s[0],
        latency_s=latency_s[0], in_switch_reduction=in_switch,
    )  # fmt: skip
    outer = Tier(
        name="net", span=4 * nodes, bytes_per_s=bytes_per_s[1], flow_bytes_per_s=bytes_per_s[1],
        latency_s=latency_s[1], is_network=True,
    )  # fmt: skip
    return Cluster(
        name="by hand",
        classes={made.name: made},
        nodes=(node(made.name),) * nodes,
        tiers=(inner, outer) if nodes > 1 else (inner,),
    )


def matmul(name: str, k: Extent, n: Extent, *, rows: Any = "tokens", saved: tuple[Saved, ...] = ()) -> Matmul:
    return Matmul(name=name, rows=rows, k=k, n=n, weights=(Weight(name=name, shape=(k, n)),), saved=saved)


def brick(size: int = 10, name: str = "brick") -> Layer:
    """One layer, per micro-batch of five tokens on one rank; n is size / 10.

    Matmul [5, 10] x [10, 10 n]: n seconds forward, n for the input gradient, n for the weight gradient; 100 n
    weights; saves its input (100 B). Norm: 0.1 s forward, 0.2 s backward, 10 weights on every rank; saves 200
    B except under selective recomputation.
    """
    return Layer(
        name=name,
        operators=(
            matmul(
                name,
                Extent(10),
                Extent(size, "ffn"),
                saved=(Saved(name="input", width=Extent(10), rows="sequence"),),
            ),
            Pointwise(
                name="norm",
                rows="sequence",
                forward=(Extent(10),),
                backward=(Extent(20),),
                weights=(Weight(name="norm", shape=(Extent(10),)),),
                saved=(Saved(name="normed", width=Extent(20), rows="sequence", selective=True),),
                selective=True,
            ),
        ),
        tensor_syncs=2,
    )


def brick_model(pattern: tuple[int, ...] = (0, 0, 0, 0), *, tied: bool = False, **changes: Any) -> Model:
    """Bricks by `pattern`: kind 0 of one second per phase, kind 1 of two.

    Embedding: 0.2 s forward, 0.5 s for its weight gradient, 200 weights. Head: 2 s per phase for the matmul,
    loss 1.2 s forward and 0.8 s backward; 200 weights unless tied; saves 5 * 20 logits of 4 B.
    """
    hidden, vocab = Extent(10), Extent(20, "vocab")
    embedding = Lookup(name="embedding", width=hidden, weights=(Weight(name="table", shape=(vocab, hidden)),))
    output = Matmul(
        name="output",
        rows="head",
        k=hidden,
        n=vocab,
        weights=() if tied else (Weight(name="output", shape=(hidden, vocab)),),
    )
    logits = Saved(name="logits", width=vocab, rows="head", dtype="fp32")
    fields: dict[str, Any] = {
        "name": "bricks",
        "family": "bricks",
        "hidden": 10,
        "vocab": 20,
        "heads": 4,
        "kv_heads": 2,
        "kinds": (brick(), brick(20, "double"))[: max(pattern) + 1],
        "pattern": pattern,
        "embedding": (embedding,),
        "head": (output, Loss(name="loss", classes=vocab, saved=(logits,))),
        "tied_embeddings": tied,
    }
    return Model(**(fields | changes))


def problem(
    model: Model | None = None, on: Cluster | None = None, *, seq_len: int = 5, batch: int = 8, **job: Any
) -> Problem:
    """The brick model (or `model`) on two nodes of four ideal devices (or `on`)."""
    figures: dict[str, Any] = {
        "seq_len": seq_len,
        "global_batch_size": batch,
        "dtype": "bf16",
        "memory_margin": 0.0,
        "expert_imbalance": 1.0,
        "profile": SOFTWARE,
    }
    return bind(model or brick_model(), on or cluster(), Job(**(figures | job)))


def with_efficiency(**changes: Any) -> Device:
    """The ideal device with some of its curves and fixed costs changed."""
    return device(replace(IDEAL, **changes))


def table(given: Problem, *texts: str) -> StrategyTable:
    """Strategies from text; fields that are not named have their simplest values."""
    experts = given.model.experts
    return StrategyTable.of(
        [
            complete(
                parse_fields(text),
                devices=given.cluster.devices,
                layers=given.model.layers,
                experts=experts.experts if experts else None,
                global_batch_size=given.job.global_batch_size,
            )
            for text in texts
        ]
    )


def with_software(given: Problem, **changes: Any) -> Problem:
    """The same problem with software that differs in some fields."""
    profile = replace(given.profile, **changes)
    return bind(given.model, given.cluster, replace(given.job, profile=profile))


def exposed(given: Problem) -> Problem:
    """The same problem with software that overlaps no communication but that between stages."""
    return with_software(given, context_overlap=0.0, data_overlap=0.0, state_overlap=0.0, shard_overlap=0.0)


def times_of(given: Problem, text: str) -> StageTimes:
    """Times of one strategy, by stage."""
    rows = table(given, text)
    return stage_times(given, rows, costs_of_all_stages(given, rows))


def end_of(given: Problem, text: str) -> StepEnd:
    """The end of the step of one strategy."""
    rows = table(given, text)
    return step_end(given, rows, costs_of_all_stages(given, rows))


def bytes_of(given: Problem, text: str) -> RankBytes:
    """Memory of one strategy by pipeline rank, each at its peak."""
    rows = table(given, text)
    costs = costs_of_all_stages(given, rows)
    memory = rank_bytes(given, rows, costs)
    ranks, device = costs.partition.moments.rank[:, 0], memory.device[:, 0]
    peaks = [max(np.flatnonzero(ranks == rank), key=lambda i: device[i]) for rank in np.unique(ranks)]
    return RankBytes(*(getattr(memory, f.name)[peaks] for f in fields(RankBytes)))


def operator_model(operators: tuple[Operator, ...], **changes: Any) -> Model:
    """A model with one kind of layer, made of `operators`."""
    kind = Layer(name="kind", operators=operators, experts=changes.pop("experts", None))
    return brick_model(pattern=(0, 0), kinds=(kind,), **changes)
