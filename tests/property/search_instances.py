"""Small random questions that together exercise every rule, schedule and reason; equal seeds give equal
questions.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.property.search_space_reference import SpaceTwin, divisors, first_reason, keeps
from tests.property.software import PLAIN, with_random_software

from shardwise.cluster import Cluster, load_cluster
from shardwise.cost import Problem, costs_of_all_stages, host_bytes, rank_bytes
from shardwise.model import MODULE_SETS, Model, model_from_config, modules_of_layers, names_of
from shardwise.search import Question
from shardwise.search.space import Space
from shardwise.strategy import (
    ALIASES,
    CP_KINDS,
    OFFLOADS,
    RECOMPUTES,
    SCHEDULES,
    Job,
    Strategy,
    StrategyTable,
)
from shardwise_verify import count_space

CLUSTERS = (
    "1xH100-SXM", "2xA100-80G", "3xV100-32G", "4xL4", "5xA10G", "6xMI250X", "8xH100-SXM", "2x2xA100-40G",
    "2x3xH200", "3x2xB200", "2x4xMI300X", "3x4xV100-16G", "2x6xRTX4090", "4x4xA100-80G", "2x8xH800",
    "1x2xH100-SXM+1x2xA100-80G",
)  # fmt: skip

LARGEST_LISTED, LARGEST_SPACE = 1_500, 20_000
"""Most candidates of an instance whose candidates are listed one by one; most of the others (one in
`RARELY`), which are only evaluated.
"""

SMALLEST_SPACE, RARELY = 50, 40


def module_sets_of(question: Question) -> tuple[str, ...]:
    """The sets of modules of selective recomputation; an empty name is the own set of our runtime."""
    given = tuple(map(str, question.axes.get("recompute_modules", ("",))))
    return given if question.has_own_set else tuple(filter(None, given)) or ("",)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A question and its seed; its candidates where they were listed."""

    seed: int
    question: Question
    listed: tuple[Strategy, ...] = ()

    @property
    def twin(self) -> SpaceTwin:
        q = self.question
        return SpaceTwin(
            core=q.space == "core",
            devices=q.cluster.devices,
            layers=q.model.layers,
            moe=q.model.experts is not None,
            batch=q.job.global_batch_size,
            empty_ends=q.has_empty_ends,
            module_sets=module_sets_of(q),
        )

    def candidates(self) -> list[Strategy]:
        """Every candidate, listed one by one."""
        if self.listed:
            return list(self.listed)
        q = self.question

        aliases = {name: value for name, value in q.fixed.items() if name in ALIASES}

        def allows(grid: Mapping[str, int], choice: Mapping[str, object]) -> bool:
            fixed = all(choice[name] == value for name, value in q.fixed.items() if name in choice)
            if "param_shard" in choice:
                fixed = fixed and keeps(SimpleNamespace(**grid, **choice), aliases)
            return fixed and all(choice[name] in values for name, values in q.axes.items() if name in choice)

        return list(self.twin.candidates(allows))

    @property
    def space(self) -> Space:
        q = self.question
        return Space(
            q.space,
            q.cluster.devices,
            q.model.layers,
            q.model.experts is not None,
            q.job.global_batch_size,
            q.fixed,
            q.axes,
        )

    @cached_property
    def count(self) -> int:
        """Number of candidates, counted independently of the search."""
        q = self.question
        return count_space(
            model_layers=q.model.layers,
            experts=None if q.model.experts is None else q.model.experts.experts,
            devices=q.cluster.devices,
            global_batch_size=q.job.global_batch_size,
            space=q.space,
            fixed=q.fixed,
            axes=q.axes,
        ).count


def instance(seed: int) -> Instance:
    """The instance of a seed. Three in four are in the default space with some of it left out; two in five
    have experts, one in six layers of two kinds; two in three have tight memory (in one of twelve nothing
    fits); half run with their own software and dtype.
    """
    rng = random.Random(seed)
    most = LARGEST_SPACE if seed % RARELY == 7 else LARGEST_LISTED
    while True:
        model = random_layer_kinds(rng) if seed % 6 == 5 else random_model(rng, is_moe=seed % 5 in (1, 3))
        cluster = random_cluster(rng)
        question = Question(
            model=model,
            cluster=cluster,
            job=with_random_software(random_job(rng), cluster, seed),
            space="default" if seed % 4 else "core",
            top=rng.choice((0, 1, 3)),
        )
        found = restricted(rng, Instance(seed=seed, question=question), most)
        if not SMALLEST_SPACE <= found.count <= most:
            continue
        limits = question.problem().limits
        if found.count <= LARGEST_LISTED:
            found = replace(found, listed=tuple(found.candidates()))
        some = rng.sample(found.listed, min(len(found.listed), 400)) or [
            found.twin.random_candidate(rng) for _ in range(120)
        ]
        legal = [strategy for strategy in some if first_reason(strategy, limits) is None]
        if legal:
            break
    if seed % 3:
        share = -1.0 if seed % 12 == 1 else rng.choice((0.2, 0.4, 0.6, 0.8, 0.9, 0.95))
        cluster = with_tight_memory(rng, question.problem(), legal[:60], share)
        found = replace(found, question=replace(found.question, cluster=cluster))
    return found


def instance_with_modules(seed: int) -> Instance | None:
    """The instance of a seed with two or three sets of named modules instead of the own set; None where its
    question excludes selective recomputation."""
    found, rng = instance(seed), random.Random(seed)
    question = found.question
    own = modules_of_layers(kind.operators for kind in question.model.kinds)
    sets = [one for one in MODULE_SETS[1:] if set(names_of(one)) <= set(own)]
    axes = {**question.axes, "recompute_modules": ("", *rng.sample(sets, rng.randint(2, 3)))}
    recomputes = (question.fixed.get("recompute", "selective"), *axes.get("recompute", ("selective",)))
    if recomputes.count("selective") < 2:
        return None
    return replace(found, question=replace(question, axes=axes), listed=())


def restricted(rng: random.Random, case: Instance, most: int) -> Instance:
    """The instance with fixed fields and shortened axes, in random order, until its space is small enough."""
    q, twin = case.question, case.twin
    sizes, names = divisors(twin.devices), list(RESTRICTED)
    rng.shuffle(names)
    for name in names:
        if case.count <= most:
            break
        values = RESTRICTED[name] or tuple(sizes)
        if name == "dp":
            values = tuple(size for size in sizes if q.job.global_batch_size % size == 0)
        some = tuple(rng.sample(values, rng.randint(1, max(len(values) // 2, 1))))
        if len(some) == 1 or name in ALIASES:
            changed = replace(q, fixed={**q.fixed, name: some[0]})
        else:
            changed = replace(q, axes={**q.axes, name: some})
        smaller = replace(case, question=changed)
        if smaller.count:
            q, case = changed, smaller
    return case


RESTRICTED: dict[str, tuple[Any, ...]] = {
    **{name: () for name in ("tp", "cp", "dp", "pp", "ep", "etp")},
    **{name: () for name in ("optim_shard", "grad_shard", "param_shard", "dp_shard", "dp_replicate")},
    "zero_stage": (0, 1, 2, 3),
    "micro_batch_size": (1, 2, 3, 4, 6, 8, 12),
    "schedule": SCHEDULES,
    "vpp": (1, 2, 3),
    "first_stage_layers": (0, 1, 2, 3, 4),
    "last_stage_layers": (0, 1, 2, 3, 4),
    "recompute": RECOMPUTES,
    "recompute_layers": (0, 1, 2, 3),
    "offload": OFFLOADS,
    "cp_kind": CP_KINDS,
    "sequence_parallel": (False, True),
    "axis_order": ("tp-cp-dp-pp", "dp-tp-cp-pp", "pp-dp-tp-cp", "cp-tp-pp-dp"),
}
"""Values that a field may be restricted to; degrees divide the devices."""


def uneven_pipelines() -> list[Instance]:
    """An odd number of layers on two devices in a pipeline: no split is even, hops are nearly free."""
    dimensions = {"hidden": 4096, "ffn": 16_384, "heads": 32, "vocab": 1000, "seq_len": 4096}
    questions = [
        Question(
            model=model_from_config({**dimensions, "layers": layers}, name="odd"),
            cluster=load_cluster("2xH100-SXM"),
            job=Job(seq_len=4096, global_batch_size=batch, dtype="bf16", profile=PLAIN),
            space="default",
            fixed={"tp": 1, "cp": 1, "dp": 1, "offload": "none"},
            top=0,
        )
        for layers in (3, 5, 7)
        for batch in (4, 6)
    ]
    return [Instance(seed=seed, question=question) for seed, question in enumerate(questions)]


def random_model(rng: random.Random, *, is_moe: bool) -> Model:
    """A decoder of 1 to 8 layers with realistic widths and awkward divisors."""
    heads = rng.choice((3, 4, 5, 6, 8, 12, 12, 16))
    hidden = heads * rng.choice((64, 80, 128))
    dimensions: dict[str, Any] = {
        "layers": rng.choice((1, 2, 3, 4, 5, 5, 6, 7, 7, 8)),
        "hidden": hidden,
        "ffn": rng.choice((4 * hidden, 3 * hidden + 2, 2 * hidden + 6)),
        "heads": heads,
        "kv_heads": rng.choice([k for k in range(1, heads + 1) if heads % k == 0]),
        "vocab": rng.choice((32_000, 50_257, 128_256)),
        "seq_len": 4096,
        "tied": rng.random() < 0.5,
        "gated": rng.random() < 0.5,
    }
    if is_moe:
        experts = rng.choice((2, 3, 4, 6, 8))
        dimensions |= {
            "experts": experts,
            "top_k": rng.randint(1, min(experts, 3)),
            "expert_ffn": rng.choice((hidden, hidden // 2 + 1, 3 * hidden)),
            "dense_layers": rng.randint(0, dimensions["layers"] - 1) if rng.random() < 0.4 else 0,
        }
    return model_from_config(dimensions, name="random")


def random_layer_kinds(rng: random.Random) -> Model:
    """A small decoder whose layers alternate, as Gemma's do, or whose first layers are dense, as DeepSeek's
    are.
    """
    heads, layers = rng.choice((4, 6, 8)), rng.choice((2, 3, 4, 5, 6, 7))
    alike = {
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 32_000,
        "max_position_embeddings": 4096, "hidden_size": 128 * heads, "intermediate_size": 384 * heads + 24,
    }  # fmt: skip
    if rng.random() < 0.5:
        window = rng.choice((96, 256, 500))
        own = {
            "model_type": "gemma2",
            "sliding_window": window,
            "head_dim": 128,
            "num_key_value_heads": heads // 2,
        }
    else:
        own = {
            "model_type": "deepseek_v2", "num_key_value_heads": heads, "q_lora_rank": 192, "kv_lora_rank": 64,
            "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 96 * rng.randint(1, 8),
            "first_k_dense_replace": rng.randint(0, layers - 1), "tie_word_embeddings": False,
        }  # fmt: skip
    hidden_act = "silu" if own["model_type"] == "deepseek_v2" else "gelu_pytorch_tanh"
    return model_from_config({**alike, "hidden_act": hidden_act, **own}, name="kinds")


def random_cluster(rng: random.Random) -> Cluster:
    """A cluster of 1 to 16 devices of several kinds; half of the clusters have slow or distant links."""
    cluster = load_cluster(rng.choice(CLUSTERS))
    if rng.random() < 0.5:
        return cluster
    slower, later = 10.0 ** rng.uniform(0.0, 2.0), 10.0 ** rng.uniform(0.0, 2.0)
    tiers = tuple(
        replace(
            tier,
            bytes_per_s=tier.bytes_per_s / slower,
            flow_bytes_per_s=tier.flow_bytes_per_s / slower,
            latency_s=tier.latency_s * later,
        )
        for tier in cluster.tiers
    )
    return replace(cluster, tiers=tiers)


def random_job(rng: random.Random) -> Job:
    return Job(
        seq_len=rng.choice((510, 512, 1000, 1024, 1536, 2048)),
        global_batch_size=rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 12, 16, 18, 20, 24, 24, 30)),
        dtype="fp16",
        optimizer=rng.choice(("adamw", "adafactor", "sgd", "muon")),
        memory_margin=rng.choice((0.0, 0.05)),
        expert_imbalance=rng.choice((1.0, 1.1)),
        profile=PLAIN,
    )


def with_tight_memory(rng: random.Random, problem: Problem, legal: list[Strategy], share: float) -> Cluster:
    """The cluster with so little memory, on devices and hosts, that about a fraction `share` of some
    strategies fits.
    """
    cluster = problem.cluster
    table = StrategyTable.of(legal)
    on_device, on_host = memory_of(problem, table)
    usable = 0.5 * on_device.min() if share < 0 else float(np.quantile(on_device, share))
    capacity = int(usable / (1.0 - problem.job.memory_margin)) + 1
    classes = {name: replace(device, memory_bytes=capacity) for name, device in cluster.classes.items()}
    offloading = on_host[on_host > 0.0]
    host = float(np.quantile(offloading, rng.choice((0.3, 0.7, 1.0)))) if len(offloading) else 1e12
    nodes = tuple(replace(node, host_memory_bytes=host * node.devices) for node in cluster.nodes)
    return replace(cluster, classes=classes, nodes=nodes)


def memory_of(problem: Problem, table: StrategyTable) -> tuple[Any, Any]:
    """Bytes on the tightest rank and on the host for every row, the most of all stages."""
    price = costs_of_all_stages(problem, table)
    return (
        rank_bytes(problem, table, price).device.max(axis=0),
        host_bytes(problem, table, price),
    )
