"""Random legal strategies of real models on awkward clusters, sampled level by level from the declared space.

Each choice of a level is equally likely, so that rare choices occur too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tests.property.search_instances import random_cluster, random_job, random_model
from tests.property.software import SOFTWARE, with_random_software

from shardwise.cluster import Cluster, load_cluster
from shardwise.cost import Index, Problem, bind, distinct_rows
from shardwise.model import load_model, model_from_config
from shardwise.search.space import Space
from shardwise.strategy import FIELDS, GRID_RULES, Column, Job, StrategyTable, first_broken, largest_stage


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a cluster with a training software; in bf16, in fp16 where a device lacks bf16, or in
    `dtype`.
    """

    model: str
    cluster: str
    batch: int
    seq_len: int = 4096
    optimizer: Any = "adamw"
    imbalance: float = 1.1
    dtype: str | None = None
    software: str = "plain"

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster}, {self.software}"


TINY: dict[str, dict[str, Any]] = {
    "tiny-dense": {
        "layers": 7, "hidden": 192, "ffn": 774, "heads": 6, "kv_heads": 3, "vocab": 50257, "seq_len": 1536,
        "window": 96,
    },
    "tiny-experts": {
        "layers": 6, "hidden": 384, "ffn": 1536, "heads": 6, "kv_heads": 2, "vocab": 32000, "seq_len": 1536,
        "experts": 6, "top_k": 2, "expert_ffn": 96, "shared_ffn": 192, "dense_layers": 2, "gated": True,
        "tied": False,
    },
}  # fmt: skip

CASES = (
    Case(model="llama-3.1-8b", cluster="8xH100-SXM", batch=24),
    Case(model="gpt2", cluster="2x6xA100-80G", batch=12, seq_len=1024, optimizer="muon"),
    Case(model="mixtral-8x7b", cluster="8xH100-SXM", batch=16, imbalance=1.4),
    Case(model="deepseek-v2", cluster="2x8xH100-SXM", batch=32),
    Case(model="gemma-2-9b", cluster="2x3xH100-SXM", batch=24),
    Case(model="gpt-oss-20b", cluster="8xMI300X", batch=32),
    Case(model="tiny-dense", cluster="3x4xV100-32G", batch=36, seq_len=1536, optimizer="sgd"),
    Case(model="tiny-experts", cluster="2x6xRTX4090", batch=24, seq_len=1536, optimizer="adafactor"),
    Case(model="tiny-dense", cluster="1x2xH100-SXM+2x2xA100-80G", batch=18, seq_len=1536),
    Case(
        model="llama-3.1-8b", cluster="2x8xH100-SXM", batch=24, dtype="fp8-block", software="early stop",
    ),
    Case(
        model="tiny-experts", cluster="2x6xB200", batch=24, seq_len=1536, dtype="nvfp4",
        software="everything",
    ),
    Case(model="gpt2", cluster="3x4xcpu", batch=36, seq_len=1024, software="unfused"),
)  # fmt: skip
"""Dense and routed models, tied and untied embeddings, windows and latent attention, six or twelve devices,
mixed classes, recipes of low precision, several kinds of software, a backend without reduce-scatter (cpu).
"""


def problem_of(case: Case) -> Problem:
    """The planning problem of the case."""
    cluster = load_cluster(case.cluster)
    has_bf16 = all("bf16" in device.peak_flop_per_s for device in cluster.classes.values())
    job = Job(
        seq_len=case.seq_len,
        global_batch_size=case.batch,
        dtype=case.dtype or ("bf16" if has_bf16 else "fp16"),
        optimizer=case.optimizer,
        expert_imbalance=case.imbalance,
        profile=SOFTWARE[case.software],
    )
    if case.model in TINY:
        return bind(model_from_config(TINY[case.model], name=case.model), cluster, job)
    return bind(load_model(case.model), cluster, job)


def space_of(problem: Problem, name: str = "default") -> Space:
    """The whole space of a problem."""
    model, batch = problem.model, problem.job.global_batch_size
    return Space(name, problem.cluster.devices, model.layers, model.experts is not None, batch, {})


def odd_problem(seed: int) -> Problem:
    """A random model on a random cluster. Every other one has its own software; every other one has odd
    constants: a slow host or none, long launches, little or much slowdown, slow and fast host links.
    """
    rng = random.Random(seed)
    while True:
        model, cluster = random_model(rng, is_moe=seed % 5 in (1, 3)), random_cluster(rng)
        problem = bind(model, cluster, with_random_software(random_job(rng), cluster, seed))
        if len(sampled(problem, 30, seed, space_of(problem, "core"))):
            break
    if seed % 2 == 0:
        return problem

    def about(least: float, most: float) -> float:
        return float(10.0 ** rng.uniform(least, most))

    profile = replace(
        problem.profile,
        host_action_s=rng.choice((0.0, about(-6, -1))),
        host_step_s=rng.choice((0.0, about(-6, -1))),
    )
    efficiency = replace(
        problem.efficiency,
        launch_s=rng.choice((0.0, about(-7, -3))),
        overlap_slowdown=rng.uniform(1.0, 2.0),
        fragmentation_ratio=rng.uniform(0.0, 0.5),
    )
    return replace(
        problem,
        job=replace(problem.job, profile=profile),
        device=replace(problem.device, efficiency=efficiency),
        host_link_bytes_per_s=problem.host_link_bytes_per_s * about(-3, 2),
        memory_bytes_per_s=problem.memory_bytes_per_s * about(-2, 1),
    )


def sampled(problem: Problem, rows: int, seed: int, space: Space | None = None) -> StrategyTable:
    """`rows` legal strategies of a space (the default one), each choice at random; equal seeds give equal
    rows.
    """
    rng = np.random.default_rng(seed)
    space = space_of(problem) if space is None else space
    grids = space.grids(space.degrees())
    grids = grids.take(first_broken(grids, problem.limits, GRID_RULES) < 0)
    if not len(grids):
        return grids
    table = grids.take(_evenly(rng, grids, rows))
    table = _chosen(rng, table, [table.dp], space.micro_batch_sizes)
    microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
    legal = [
        len(space.legal_variants(int(pp), int(m))) > 0 for pp, m in zip(table.pp, microbatches, strict=True)
    ]
    return rechosen(rng, space, rescheduled(rng, space, table.take(legal), microbatches[legal]))


def rescheduled(
    rng: np.random.Generator, space: Space, table: StrategyTable, microbatches: Column
) -> StrategyTable:
    """The same rows with another legal schedule, each equally likely, and one of its numbers of chunks. Their
    splits no longer fit.
    """

    def schedules(pp: int, m: int) -> dict[str, Column]:
        return {"schedule": np.unique(space.legal_variants(pp, m).schedule)}

    def chunks(pp: int, m: int, schedule: int) -> dict[str, Column]:
        legal = space.legal_variants(pp, m)
        return {"vpp": legal.vpp[legal.schedule == schedule]}

    table = _chosen(rng, table, [table.pp, microbatches], schedules)
    return _chosen(rng, table, [table.pp, microbatches, table.schedule], chunks)


def rechosen(rng: np.random.Generator, space: Space, table: StrategyTable) -> StrategyTable:
    """The same grids and schedules with random values of all other fields."""
    table = _chosen(rng, table, [0 * table.tp], lambda _: {"recompute": space.recomputes})
    table = _chosen(rng, table, [0 * table.tp], lambda _: {"offload": space.offloads})
    return resplit(rng, space, resharded(rng, space, table))


def resharded(rng: np.random.Generator, space: Space, table: StrategyTable) -> StrategyTable:
    """The same rows with other sharding degrees."""
    return _chosen(rng, table, [table.dp * table.cp], space.shards)


def resplit(rng: np.random.Generator, space: Space, table: StrategyTable) -> StrategyTable:
    """The same rows with other stage splits."""
    return recomputing(rng, space, _chosen(rng, table, [table.pp * table.vpp], space.splits))


def recomputing(rng: np.random.Generator, space: Space, table: StrategyTable) -> StrategyTable:
    """The same rows with other numbers of recomputed layers that their splits allow."""
    ends = (table.first_stage_layers, table.last_stage_layers)
    largest = largest_stage(space.layers, table.pp * table.vpp, *ends)

    def numbers(recompute: int, most: int) -> dict[str, Column]:
        return {"recompute_layers": space.recompute_layers(recompute, most)}

    return _chosen(rng, table, [table.recompute, largest], numbers)


def _chosen(
    rng: np.random.Generator,
    table: StrategyTable,
    keys: Sequence[Any],
    options_of: Callable[..., Mapping[str, Column]],
) -> StrategyTable:
    """Every row with one of the options that `options_of(*key)` gives for its key."""
    rows, of_row = distinct_rows([np.asarray(key) for key in keys])
    each = [options_of(*(int(key[row]) for key in keys)) for row in rows]
    names = list(each[0])
    lengths = np.array([len(options[names[0]]) for options in each])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    option = starts[of_row] + rng.integers(0, lengths[of_row])
    columns = {name: np.concatenate([options[name] for options in each])[option] for name in names}
    return table.replaced(**columns)


def _evenly(rng: np.random.Generator, grids: StrategyTable, rows: int) -> Index:
    """`rows` grids at random, about equally many for each number of pipeline ranks."""
    _, depth, count = np.unique(grids.pp, return_inverse=True, return_counts=True)
    weights = 1.0 / count[depth]
    return rng.choice(len(grids), rows, p=weights / weights.sum())


def descended(
    problem: Problem, space: Space, table: StrategyTable, cost: Callable[[StrategyTable], Any], rounds: int
) -> StrategyTable:
    """The same grids and kinds of recomputation and offload with the cheapest of several random choices of
    all other fields: close to the lower bounds of their subproblems.
    """
    rng, costs = np.random.default_rng(rounds), cost(table)
    for number in range(rounds):
        other = _neighbour(rng, problem, space, table, number % 4)
        others = cost(other)
        is_less = others < costs
        columns = {name: np.where(is_less, getattr(other, name), getattr(table, name)) for name in FIELDS}
        table, costs = StrategyTable(**columns), np.where(is_less, others, costs)
    return table


def _neighbour(
    rng: np.random.Generator, problem: Problem, space: Space, table: StrategyTable, turn: int
) -> StrategyTable:
    if turn == 0:
        return resplit(rng, space, table)
    if turn == 1:
        return recomputing(rng, space, table)
    if turn == 2:
        return resharded(rng, space, table)
    microbatches = problem.job.global_batch_size // (table.dp * table.micro_batch_size)
    return resplit(rng, space, rescheduled(rng, space, table, microbatches))


def without_fixed_costs(problem: Problem) -> Problem:
    """The problem without latencies, launches and host costs: all times are proportional to amounts."""
    classes = {
        name: replace(
            device,
            efficiency=replace(
                device.efficiency,
                launch_s=0.0,
                scale_up=replace(device.efficiency.scale_up, startup_s=0.0),
                scale_out=replace(device.efficiency.scale_out, startup_s=0.0),
            ),
        )
        for name, device in problem.cluster.classes.items()
    }
    tiers = tuple(replace(tier, latency_s=0.0) for tier in problem.cluster.tiers)
    profile = replace(
        problem.profile, dispatch_s=0.0, expert_dispatch_s=0.0, host_action_s=0.0, host_step_s=0.0
    )
    job = replace(problem.job, profile=profile)
    return bind(problem.model, replace(problem.cluster, classes=classes, tiers=tiers), job)


def with_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with all links between devices `factor` times as fast."""
    tiers = tuple(
        replace(
            tier,
            bytes_per_s=factor * tier.bytes_per_s,
            flow_bytes_per_s=factor * tier.flow_bytes_per_s,
        )
        for tier in cluster.tiers
    )
    return replace(cluster, tiers=tiers)


def with_speed(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with arithmetic, memory and host links `factor` times as fast."""
    classes = {
        name: replace(
            device,
            peak_flop_per_s={dtype: factor * peak for dtype, peak in device.peak_flop_per_s.items()},
            memory_bytes_per_s=factor * device.memory_bytes_per_s,
        )
        for name, device in cluster.classes.items()
    }
    nodes = tuple(
        replace(node, host_link_bytes_per_s=factor * node.host_link_bytes_per_s) for node in cluster.nodes
    )
    return replace(cluster, classes=classes, nodes=nodes)
