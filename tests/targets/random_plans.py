"""Random plans that Megatron-LM 0.19 can run: models of the families that it trains, clusters of one to eight
nodes, and strategies within the target's limits, which are written here a second time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.cost import bind, costs_of_all_stages
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import MODULES, Model, load_model, model_from_config, set_text
from shardwise.plans import Plan
from shardwise.strategy import (
    ORDERS,
    SCHEDULES,
    Job,
    Strategy,
    StrategyTable,
    complete,
    even_ends,
    layer_counts,
    parse_fields,
)

EXPERT_FAMILIES = ("mixtral", "qwen3_moe")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "megatron", *EXPERT_FAMILIES)

NODES = (1, 2, 4, 8)
DEVICES_PER_NODE = 8


def random_plans(
    number: int, *, seed: int, is_free: bool = False, target: str = "megatron-lm-0.19"
) -> list[Plan]:
    """`number` plans within the limits of a target of Megatron-LM, or any legal plans if `is_free`; families
    alternate."""
    drawn = _plans(Random(seed), is_free, target)
    return [next(drawn) for _ in range(number)]


def _plans(random: Random, is_free: bool, target: str) -> Iterator[Plan]:
    while True:
        for family in FAMILIES:
            model = random_model(random, family)
            plan = None
            while plan is None:
                plan = _plan(random, model, is_free, target)
            yield plan


def random_model(random: Random, family: str) -> Model:
    """A small model of a family with random sizes."""
    kv_heads = random.choice((2, 4, 8))
    heads = kv_heads * random.choice((1, 2, 4))
    head_dim = random.choice((16, 32, 64))
    layers, vocab = random.randint(4, 20), 64 * random.randint(8, 64) + random.choice((0, 0, 0, 2))
    hidden, ffn = heads * head_dim, 64 * random.randint(4, 16)
    is_tied = random.random() < 0.3
    if family == "gpt2":
        sizes: dict[str, Any] = {
            "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_inner": ffn, "n_positions": 2048,
            "vocab_size": vocab,
        }  # fmt: skip
    elif family == "megatron":
        return model_from_config(
            {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "vocab": vocab, "seq_len": 2048},
            name=family,
        )
    else:
        sizes = {
            "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
            "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": is_tied,
        }  # fmt: skip
    if family == "mistral":
        sizes |= {"sliding_window": None}
    if family == "qwen3":
        sizes |= {"head_dim": 2 * head_dim}
    if family in EXPERT_FAMILIES:
        sizes |= {"num_experts_per_tok": random.choice((2, 4))}
    if family == "mixtral":
        sizes |= {"num_local_experts": random.choice((4, 8, 16))}
    if family == "qwen3_moe":
        sizes |= {
            "num_experts": random.choice((8, 16)), "moe_intermediate_size": 64 * random.randint(1, 4),
            "head_dim": head_dim, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
        }  # fmt: skip
    return model_from_config({"model_type": family, **sizes}, name=family)


def _plan(random: Random, model: Model, is_free: bool, target: str) -> Plan | None:
    """A plan for the model; None if the random strategy is illegal, or outside the target unless
    `is_free`."""
    nodes = random.choice(NODES)
    cluster = load_cluster(f"{nodes}x{DEVICES_PER_NODE}xH100-SXM")
    job = Job(
        seq_len=random.choice((1024, 2048, 1028)),
        global_batch_size=random.choice((64, 128, 256)),
        dtype=random.choice(("bf16", "bf16", OTHER_DTYPES[target])),
        optimizer="sgd" if random.random() < 0.1 else "adamw",
    )
    fields = _fields(random, model, nodes * DEVICES_PER_NODE)
    if target == MEGATRON_FSDP:
        fields |= _sharded_fields(random, fields)
    if is_free:
        fields |= _other_fields(random)
    fields |= _module_fields(fields, model, is_free)
    experts = model.experts
    try:
        strategy = complete(
            fields,
            devices=nodes * DEVICES_PER_NODE,
            layers=model.layers,
            experts=None if experts is None else experts.experts,
            global_batch_size=job.global_batch_size,
        )
        if not (is_free or WITHIN[target](strategy, model, job)):
            return None
        return search.plan_of_strategy(model, cluster, job, strategy)
    except (ConfigError, Infeasible):
        return None


def _fields(random: Random, model: Model, devices: int) -> dict[str, Any]:
    """Fields of a strategy, chosen so that they often fit together."""
    tp, cp, pp = random.choice((1, 2, 4, 8)), random.choice((1, 1, 2, 4)), random.choice((1, 2, 4, 8))
    ranks = max(devices // (tp * pp), 1)
    dp = max(ranks // cp, 1)
    vpp = random.choice((1, 1, 2, 3)) if pp > 1 else 1
    fields: dict[str, Any] = {
        "tp": tp, "cp": cp, "pp": pp, "dp": dp, "vpp": vpp,
        "cp_kind": random.choice(("ring", "all_to_all")) if cp > 1 else "ring",
        "sequence_parallel": tp > 1 and (model.experts is not None or random.random() < 0.7),
        "micro_batch_size": random.choice((1, 1, 2)),
        "optim_shard": random.choice([degree for degree in (1, 2, 4, ranks, ranks) if ranks % degree == 0]),
        "offload": random.choice(("none", "none", "none", "optimizer")),
        "axis_order": random.choice(("tp-cp-dp-pp", "tp-cp-pp-dp")),
    }  # fmt: skip
    if model.experts is not None:
        fields["ep"] = random.choice((1, 2, 4, 8))
        fields["etp"] = random.choice((1, 2, tp))
    stages = pp * vpp
    first, last = (int(end) for end in even_ends(model.layers, stages))
    if stages > 2 and random.random() < 0.5:  # first and last stage differ from the even split
        first, last = (max(end + random.choice((-1, 0, 1)), 0) for end in (first, last))
        fields |= {"first_stage_layers": first, "last_stage_layers": last}
    if random.random() < 0.4:
        fields |= {"recompute": "full", "recompute_layers": random.randint(1, max(model.layers // stages, 1))}
    return fields


def _module_fields(fields: Mapping[str, Any], model: Model, is_free: bool) -> dict[str, Any]:
    """Occasionally a set of recomputed modules, also of other models if `is_free`."""
    random = Random(str(sorted(fields.items())))
    if "recompute" in fields or random.random() < 0.6:
        return {}
    known = MODULES_OF[model.experts is not None]
    names = MODULES if is_free and random.random() < 0.3 else known
    return {"recompute_modules": set_text(random.sample(names, random.randint(1, 2)))}


MODULES_OF = {False: ("core_attn", "layernorm", "mlp"), True: ("core_attn", "layernorm", "moe", "moe_act")}
"""The modules of layers without and with experts, for these families."""


def _sharded_fields(random: Random, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Sharding degrees of parameters, gradients and optimizer states, of which Megatron-FSDP has some."""
    ranks = int(fields["dp"]) * int(fields["cp"])
    some = random.choice([degree for degree in (1, 2, 4, ranks, ranks, ranks) if ranks % degree == 0])
    half = max(some // 2, 1)
    chains = [(1, 1, some), (1, some, some), (some, some, some), (some, some, ranks)] * 2
    chains += [(1, half, some), (half, some, some), (half, half, some)]
    names = ("param_shard", "grad_shard", "optim_shard")
    sharded = dict(zip(names, random.choice(chains), strict=True))
    is_plain = random.random() < 0.8
    return sharded | ({"offload": "none", "axis_order": "tp-cp-dp-pp"} if is_plain else {})


def _other_fields(random: Random) -> dict[str, Any]:
    """Occasionally values that the target may not support."""
    others: dict[str, tuple[Any, ...]] = {
        "schedule": SCHEDULES,
        "grad_shard": (2, 4),
        "param_shard": (2, 4),
        "recompute": ("selective",),
        "offload": ("activations", "both"),
        "axis_order": ORDERS,
        "sequence_parallel": (False,),
    }
    return {name: random.choice(values) for name, values in others.items() if random.random() < 0.15}


def is_within_target(strategy: Strategy, model: Model, job: Job) -> bool:
    """Whether Megatron-LM 0.19 supports the strategy: the limits of the target in plain code."""
    has_experts, ranks = model.experts is not None, strategy.dp * strategy.cp
    if (
        strategy.schedule not in ("1f1b", "interleaved_1f1b")
        or strategy.param_shard > 1
        or strategy.grad_shard > 1
        or not _has_known_modules(strategy, model)
        or strategy.offload in ("activations", "both")
        or strategy.axis_order not in ("tp-cp-dp-pp", "tp-cp-pp-dp")
    ):
        return False
    if model.vocab % strategy.tp or (strategy.cp > 1 and job.seq_len % (2 * strategy.cp)):
        return False
    if strategy.axis_order == "tp-cp-pp-dp" and strategy.pp > 1:
        if has_experts and strategy.etp * strategy.ep != strategy.tp * strategy.cp:
            return False
        if not has_experts and strategy.cp > 1:
            return False
    if has_experts and strategy.optim_shard not in (1, ranks):
        return False
    if has_experts and strategy.tp > 1 and not strategy.sequence_parallel:
        return False
    if strategy.offload == "none":
        return True
    return job.optimizer == "adamw" and (strategy.optim_shard > 1 or ranks == 1)


def _has_known_modules(strategy: Strategy, model: Model) -> bool:
    """Whether selective recomputation, if any, is of modules that the model has."""
    if strategy.recompute != "selective":
        return True
    names = strategy.recompute_modules.split("+")
    return set(names) <= set(MODULES_OF[model.experts is not None])


def is_within_megatron_fsdp(strategy: Strategy, model: Model, job: Job) -> bool:
    """Whether Megatron-LM 0.19 with Megatron-FSDP supports the strategy."""
    ranks = strategy.dp * strategy.cp
    param, grad, optim = strategy.param_shard, strategy.grad_shard, strategy.optim_shard
    if (
        strategy.schedule not in ("1f1b", "interleaved_1f1b")
        or not _has_known_modules(strategy, model)
        or strategy.offload != "none"
        or strategy.axis_order != "tp-cp-dp-pp"
        or model.vocab % strategy.tp
        or (strategy.cp > 1 and job.seq_len % (2 * strategy.cp))
    ):
        return False
    is_partly_outer = 1 < param == grad and optim == ranks
    if optim == 1 or not ((param in (1, grad) and grad in (1, optim)) or is_partly_outer):
        return False
    if model.experts is None:
        return True
    return optim == ranks and grad in (1, ranks) and (strategy.tp == 1 or strategy.sequence_parallel)


MEGATRON_FSDP = "megatron-fsdp-0.19"

WITHIN = {"megatron-lm-0.19": is_within_target, MEGATRON_FSDP: is_within_megatron_fsdp}
"""Whether each target supports the strategy."""

OTHER_DTYPES = {"megatron-lm-0.19": "fp16", MEGATRON_FSDP: "fp32"}
"""A dtype of each target that is not bf16."""


def parameters_by_stage(plan: Plan) -> list[int]:
    """Elements of the parameters on the first rank of each pipeline stage, as the cost model counts them."""
    strategy = plan.best.strategy
    problem = bind(plan.model, plan.cluster, plan.job)
    price = costs_of_all_stages(problem, StrategyTable.of([strategy]))
    nbytes = price.shards.parameter_bytes[:, price.of_shards[0]]
    ranks = price.partition.moments.rank[:, 0].tolist()
    first = [ranks.index(rank) for rank in range(strategy.pp)]
    return [round(float(nbytes[moment]) / problem.recipe.weight_bytes) for moment in first]


def parameters_not_in_megatron_lm(plan: Plan) -> list[int]:
    """Elements by stage that the cost model counts and Megatron-LM does not build.

    Where tp exceeds the key-value heads, each of our ranks holds one head, so that some heads are replicated.
    Megatron-LM divides the weights of keys and values over all ranks and gathers their outputs. Where the
    embedding is tied and pp > 1, our last stage also holds a copy of the learned positions.
    """
    strategy, config = plan.best.strategy, dict[str, Any](plan.model.config)
    stages = strategy.pp * strategy.vpp
    ends = strategy.first_stage_layers, strategy.last_stage_layers
    counts = layer_counts(plan.model.layers, stages, *ends)
    hidden: int = next(config[key] for key in ("hidden_size", "n_embd", "hidden") if key in config)
    extra = [0] * strategy.pp
    kv_heads = config.get("num_key_value_heads")
    if kv_heads is not None and strategy.tp > kv_heads:
        head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
        rows = hidden + (1 if plan.model.name == "qwen2" else 0)  # with biases
        # 2: keys and values. Each of our ranks has a head of head_dim, Megatron-LM's kv_heads / tp of one.
        a_layer = 2 * head_dim * rows * (strategy.tp - kv_heads) // strategy.tp
        extra = [a_layer * sum(counts[stage :: strategy.pp]) for stage in range(strategy.pp)]
    if plan.model.name in ("gpt2", "megatron") and strategy.pp > 1:
        positions: int = next(config[key] for key in ("n_positions", "seq_len") if key in config)
        extra[-1] += positions * hidden
    return extra


def plan_of_text(model: str, text: str) -> Plan:
    """A plan for a model of the catalogue from the text of its strategy, on as many devices as it needs."""
    fields = parse_fields(text)
    devices = 1
    for axis in ("tp", "cp", "pp", "dp"):
        devices *= int(fields.get(axis, 1))
    trained = load_model(model)
    experts = trained.experts
    job = Job(seq_len=4096, global_batch_size=64, dtype="bf16", optimizer="adamw")
    strategy = complete(
        fields, devices=devices, layers=trained.layers, experts=None if experts is None else experts.experts,
        global_batch_size=job.global_batch_size,
    )  # fmt: skip
    cluster = load_cluster(f"{max(devices // DEVICES_PER_NODE, 1)}x{min(devices, DEVICES_PER_NODE)}xB300")
    return search.plan_of_strategy(trained, cluster, job, strategy)
