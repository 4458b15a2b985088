"""Random plans that TorchTitan 0.3 can run: models of the families that it trains, clusters of one to eight
nodes, and strategies within the target's limits, which are written here a second time."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.targets.random_plans import DEVICES_PER_NODE, NODES, random_model

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import Model
from shardwise.plans import Plan
from shardwise.strategy import Job, Strategy, complete, even_ends

TITAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")

CHUNKS = {"interleaved_1f1b": (2, 3), "zb_v": (2,), "dualpipe_v": (2,)}
"""Chunks per rank of the schedules that have several."""


def random_titan_plans(number: int, *, seed: int, is_free: bool = False) -> list[Plan]:
    """`number` plans within the target's limits, or any legal plans if `is_free`; families alternate."""
    drawn = _plans(Random(seed), is_free)
    return [next(drawn) for _ in range(number)]


def _plans(random: Random, is_free: bool) -> Iterator[Plan]:
    while True:
        for family in TITAN_FAMILIES:
            model = random_model(random, family)
            plan = None
            while plan is None:
                plan = _plan(random, model, is_free)
            yield plan


def _plan(random: Random, model: Model, is_free: bool) -> Plan | None:
    """A plan for the model; None if the random strategy is illegal, or outside the target unless
    `is_free`."""
    nodes = random.choice(NODES)
    cluster = load_cluster(f"{nodes}x{DEVICES_PER_NODE}xH100-SXM")
    job = Job(
        seq_len=random.choice((1024, 1026, 1028, 1028)),
        global_batch_size=random.choice((64, 128, 256)),
        dtype=random.choice(("bf16", "bf16", "fp32")),
        optimizer="adamw",
    )
    fields = _fields(random, model, nodes * DEVICES_PER_NODE)
    if is_free:
        fields |= _other_fields(random, fields)
    experts = model.experts
    try:
        strategy = complete(
            fields,
            devices=nodes * DEVICES_PER_NODE,
            layers=model.layers,
            experts=None if experts is None else experts.experts,
            global_batch_size=job.global_batch_size,
        )
        if not (is_free or is_within_titan(strategy, model, job)):
            return None
        return search.plan_of_strategy(model, cluster, job, strategy)
    except (ConfigError, Infeasible):
        return None


def _fields(random: Random, model: Model, devices: int) -> dict[str, Any]:
    """Fields of a strategy, chosen so that they often fit together."""
    tp, pp = random.choice((1, 2, 4)), random.choice((1, 2, 2, 4, 4, 8))
    ranks = max(devices // (tp * pp), 1)
    cp = random.choice([degree for degree in (1, 1, 2, 4) if ranks % degree == 0])
    dp = ranks // cp
    schedules = ["1f1b", "gpipe"]
    if pp > 1:
        schedules += ["interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]
    schedule = random.choice(schedules)
    vpp = random.choice(CHUNKS.get(schedule, (1,)))
    shard = random.choice([degree for degree in (1, 2, 4, ranks, ranks) if ranks % degree == 0])
    if model.experts is not None:
        shard = ranks
    fields: dict[str, Any] = {
        "tp": tp, "cp": cp, "pp": pp, "dp": dp, "vpp": vpp, "schedule": schedule,
        "sequence_parallel": tp > 1 and random.random() < 0.7,
        "micro_batch_size": random.choice((1, 1, 2)),
        "param_shard": random.choice((1, shard)), "grad_shard": shard, "optim_shard": shard,
        "axis_order": "tp-cp-dp-pp", "offload": "none",
    }  # fmt: skip
    if model.experts is not None:
        fields["ep"] = random.choice((1, 2, 4, 8))
        fields["etp"] = tp if fields["ep"] == 1 else 1
    stages = pp * vpp
    first, last = (int(end) for end in even_ends(model.layers, stages))
    if stages > 2 and random.random() < 0.5:  # fewer layers on the first and the last stage, as in the search
        first, last = (max(end + random.choice((-2, -1, 0)), 0) for end in (first, last))
        fields |= {"first_stage_layers": first, "last_stage_layers": last}
    if random.random() < 0.5:
        fields |= {"recompute": "full", "recompute_layers": random.randint(1, max(model.layers // stages, 1))}
    return fields


def _other_fields(random: Random, fields: dict[str, Any]) -> dict[str, Any]:
    """Occasionally values that the target may not support."""
    dp, tp = fields["dp"], fields["tp"]
    alone = {"param_shard": 1, "grad_shard": 1}
    others: tuple[dict[str, Any], ...] = (
        {"cp": 2, "dp": max(dp // 2, 1), "optim_shard": 1, **alone},
        {"cp": 2, "dp": max(dp // 2, 1), "cp_kind": "all_to_all"},
        {"optim_shard": dp, **alone},
        {"optim_shard": max(dp // 2, 1), "grad_shard": max(dp // 2, 1), "param_shard": 1},
        {"param_shard": 2, "grad_shard": dp, "optim_shard": dp},
        {"recompute": "selective", "recompute_layers": 0},
        {"offload": "optimizer"},
        {"axis_order": "tp-cp-pp-dp"},
        {"tp": 8, "dp": max(tp * dp // 8, 1), "optim_shard": 1, "etp": 8, **alone},
    )
    if "ep" in fields and random.random() < 0.5:
        fewer = max(tp * dp * fields["cp"] // 4, 1)
        many = {"tp": 4, "cp": 1, "dp": fewer, "optim_shard": fewer, "grad_shard": fewer, "param_shard": 1}
        off = {"sequence_parallel": False, "ep": 2, "etp": 1}
        half = max(dp * fields["cp"] // 2, 1)
        part = {"optim_shard": half, "grad_shard": half, "param_shard": 1}
        return random.choice(({"ep": 2, "etp": tp}, {"ep": 1, "etp": 1}, {**many, **off}, part))
    if fields["cp"] > 1 and fields["pp"] > 1 and random.random() < 0.3:
        return {random.choice(("first_stage_layers", "last_stage_layers")): 0}
    return {} if random.random() < 0.4 else random.choice(others)


def is_within_titan(strategy: Strategy, model: Model, job: Job) -> bool:
    """Whether TorchTitan 0.3 supports the strategy: the limits of the target in plain code."""
    has_experts = model.experts is not None
    if strategy.recompute == "selective" or strategy.offload != "none":
        return False
    if strategy.cp > 1:
        divisor = 2 * strategy.cp * (strategy.tp if strategy.sequence_parallel else 1)
        if not (strategy.first_stage_layers and strategy.last_stage_layers):
            return False
        if strategy.cp_kind != "ring" or strategy.optim_shard % strategy.cp or job.seq_len % divisor:
            return False
    if strategy.axis_order != "tp-cp-dp-pp":
        return False
    shards = strategy.param_shard, strategy.grad_shard, strategy.optim_shard
    if shards[1] != shards[2] or shards[0] not in (1, shards[1]):
        return False
    if model.kv_heads % strategy.tp or model.vocab % strategy.tp:
        return False
    if model.tied_embeddings and strategy.pp > 1:
        return False
    if not has_experts:
        return True
    if strategy.etp != (strategy.tp if strategy.ep == 1 else 1):
        return False
    if strategy.ep > 1 and job.seq_len % (strategy.tp * strategy.cp):
        return False
    return strategy.optim_shard == strategy.dp * strategy.cp
