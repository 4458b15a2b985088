"""Random plans for software whose ranks are data-parallel and tensor-parallel: models of Transformers,
clusters of one to four nodes, and strategies within the limits of each target, which are written here a
second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.targets.random_plans import random_model

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import Model
from shardwise.plans import Plan
from shardwise.strategy import Job, Strategy, complete

_IN_ALL = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "fsdp2": (*_IN_ALL, "gpt2"),
    "deepspeed-0.19": (*_IN_ALL, "gpt2"),
    "transformers-5": _IN_ALL,  # it would not shard the layers of gpt2, whose modules have other names
}
"""Families of each target."""

NODES = (1, 2, 4)
DEVICES_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A strategy for a model and a job on a number of devices."""

    model: Model
    job: Job
    devices: int
    strategy: Strategy


def questions(target: str, *, seed: int) -> Iterator[Question]:
    """Random strategies, legal in themselves or not, within the limits of the target or not; families
    alternate."""
    random = Random(seed)
    while True:
        for family in FAMILIES[target]:
            model = random_model(random, family)
            found = None
            while found is None:
                found = _question(target, random, model)
            yield found


def replica_plans(target: str, number: int, *, seed: int, is_free: bool = False) -> list[Plan]:
    """`number` plans within the target's limits, or any legal plans if `is_free`; families alternate."""
    plans: list[Plan] = []
    drawn = questions(target, seed=seed)
    while len(plans) < number:
        one = next(drawn)
        is_next = one.model.family == FAMILIES[target][len(plans) % len(FAMILIES[target])]
        if is_next and (is_free or WITHIN[target](one.strategy, one.model, one.job)):
            cluster = load_cluster(f"{one.devices // DEVICES_PER_NODE}x{DEVICES_PER_NODE}xH100-SXM")
            with suppress(ConfigError, Infeasible):
                plans.append(search.plan_of_strategy(one.model, cluster, one.job, one.strategy))
    return plans


def _question(target: str, random: Random, model: Model) -> Question | None:
    """A question for the model; None if its fields do not fit together."""
    devices = random.choice(NODES) * DEVICES_PER_NODE
    job = Job(
        seq_len=random.choice((1024, 2048)),
        global_batch_size=random.choice((32, 64, 128)),
        dtype=random.choice(DTYPES[target]),
        optimizer="sgd" if random.random() < 0.1 else "adamw",
    )
    fields = {**_fields(target, random, model, devices), **_other_fields(random)}
    experts = model.experts
    try:
        strategy = complete(
            fields,
            devices=devices,
            layers=model.layers,
            experts=None if experts is None else experts.experts,
            global_batch_size=job.global_batch_size,
        )
    except (ConfigError, Infeasible):
        return None
    return Question(model=model, job=job, devices=devices, strategy=strategy)


def _fields(target: str, random: Random, model: Model, devices: int) -> dict[str, Any]:
    """Fields of a strategy, chosen so that they often fit together."""
    tp = random.choice((1, 2, 4))
    cp = random.choice((1, 1, 2, 4)) if target == "fsdp2" else 1
    dp, ranks = devices // tp // cp, devices // tp
    shard = random.choice([degree for degree in (1, 2, 4, 8, *[ranks] * 4) if ranks % degree == 0])
    half = max(shard // 2, 1)
    all_three = (shard, shard, shard)
    others = ((1, 1, shard), (1, shard, shard), (half, shard, shard), (half, half, shard), (1, half, shard))
    chain = random.choice((*others, *[all_three] * 4))
    fields: dict[str, Any] = {
        "tp": tp, "dp": dp, "pp": 1, "cp": cp, "sequence_parallel": tp > 1 and random.random() < 0.1,
        "micro_batch_size": random.choice((1, 1, 2)),
        **dict(zip(("param_shard", "grad_shard", "optim_shard"), chain, strict=True)),
        "offload": random.choice(("none", "none", "none", "optimizer")),
    }  # fmt: skip
    if model.experts is not None:
        fields |= {"ep": random.choice((1, 1, 2, 4)), "etp": random.choice((1, tp))}
    if random.random() < 0.4:
        layers = random.choice((model.layers, model.layers, model.layers, model.layers - 1))
        fields |= {"recompute": "full", "recompute_layers": layers}
    return fields


def _other_fields(random: Random) -> dict[str, Any]:
    """Occasionally values that no such target supports."""
    others: dict[str, tuple[Any, ...]] = {
        "recompute": ("selective",),
        "cp_kind": ("all_to_all",),
        "offload": ("activations", "both"),
    }
    return {name: random.choice(values) for name, values in others.items() if random.random() < 0.1}


def _is_of_replicas(strategy: Strategy, model: Model) -> bool:
    """The limits that all of these targets share."""
    return (
        strategy.pp == strategy.vpp == 1
        and not strategy.sequence_parallel
        and strategy.recompute != "selective"
        and strategy.recompute_layers in (0, model.layers)
        and strategy.offload not in ("activations", "both")
    )


def _is_tensor_parallel(strategy: Strategy, model: Model) -> bool:
    """Whether a plan of Transformers shards the layers as the strategy does."""
    if model.family == "gpt2":
        return strategy.tp == 1
    return model.kv_heads % strategy.tp == model.vocab % strategy.tp == 0


def _is_ring(strategy: Strategy, model: Model) -> bool:
    """Whether Accelerate runs the ring: FSDP shards over its ranks and, with replicas, over more."""
    if strategy.cp == 1:
        return True
    shards, left = divmod(strategy.optim_shard, strategy.cp)
    return (
        model.family != "gpt2"
        and strategy.cp_kind == "ring"
        and left == 0
        and (shards > 1 or strategy.dp == 1)
    )


def _is_fsdp2(strategy: Strategy, model: Model, job: Job) -> bool:
    return (
        _is_ring(strategy, model)
        and _is_of_replicas(strategy, model)
        and _is_tensor_parallel(strategy, model)
        and strategy.ep == 1
        and (model.experts is None or strategy.etp == strategy.tp)
        and 1 < strategy.param_shard == strategy.grad_shard == strategy.optim_shard
        and (model.experts is None or model.experts.experts % strategy.param_shard == 0)
        and strategy.offload == "none"
    )


def _is_deepspeed(strategy: Strategy, model: Model, job: Job) -> bool:
    return (
        _is_of_replicas(strategy, model)
        and strategy.tp == strategy.cp == strategy.ep == strategy.etp == 1
        and strategy.optim_shard == strategy.dp
        and {strategy.param_shard, strategy.grad_shard} <= {1, strategy.dp}
        and (strategy.offload == "none" or job.optimizer == "adamw")
    )


def _is_transformers(strategy: Strategy, model: Model, job: Job) -> bool:
    if model.experts is None:
        has_its_experts = True
    elif strategy.ep > 1:
        is_whole = model.experts.experts % (strategy.dp * strategy.tp) == 0
        has_its_experts = strategy.etp == 1 and strategy.ep % strategy.tp == 0 and is_whole
    else:
        has_its_experts = strategy.etp == strategy.tp and model.experts.experts % strategy.dp == 0
    return (
        _is_of_replicas(strategy, model)
        and _is_tensor_parallel(strategy, model)
        and has_its_experts
        and 1 < strategy.param_shard == strategy.grad_shard == strategy.optim_shard
        and (model.experts is None or strategy.optim_shard == strategy.dp)
        and strategy.offload == "none"
    )


WITHIN: Mapping[str, Callable[[Strategy, Model, Job], bool]] = {
    "fsdp2": _is_fsdp2,
    "deepspeed-0.19": _is_deepspeed,
    "transformers-5": _is_transformers,
}
"""Whether each target supports the strategy: its limits in plain code."""

DTYPES: Mapping[str, tuple[str, ...]] = {
    "fsdp2": ("bf16", "bf16", "fp32"),
    "deepspeed-0.19": ("bf16", "fp16", "fp32"),
    "transformers-5": ("bf16", "bf16", "fp32"),
}
