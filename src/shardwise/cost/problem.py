"""One problem: a model, a cluster and a job, with the figures that every price needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any

import numpy as np

from shardwise.cluster import AttentionCurve, Backend, Cluster, Device, Efficiency, Tier
from shardwise.cost.distinct import distinct_rows
from shardwise.cost.patterns import Patterns
from shardwise.cost.recipe import OPTIMIZERS, OptimizerCost, Recipe, find_recipe
from shardwise.errors import ConfigError
from shardwise.model import Model
from shardwise.operators import Attention, Extent, Operator
from shardwise.strategy import Job, Limits, Optimizer, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What ranks compute, store and send with: a cluster, number formats, an optimizer.

    On a mixed cluster the figures are those of the slowest class (every rank keeps its pace).
    `matmul_flop_per_s` and `other_flop_per_s` are dense peaks times the slowest node's speed.
    `capacity_bytes` is the smallest device's memory; `host_bytes_per_device` its share of the node's.
    """

    cluster: Cluster
    recipe: Recipe
    optimizer: OptimizerCost
    device: Device
    matmul_flop_per_s: float
    other_flop_per_s: float
    memory_bytes_per_s: float
    capacity_bytes: float
    host_bytes_per_device: float
    host_link_bytes_per_s: float

    @property
    def efficiency(self) -> Efficiency:
        return self.device.efficiency

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self.cluster.tiers

    @property
    def backend(self) -> Backend:
        """The library that carries collectives between the cluster's devices."""
        return self.device.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Machine):
    """What is priced: a model and a job on a machine.

    Where numbers are columns (`is_columnar`), one value for each row of the tables that are priced, rows that
    agree in their strategy still differ. `patterns` has the layers of the model, or of each row's.
    """

    model: Model
    job: Job
    limits: Limits
    patterns: Patterns = field(compare=False)
    is_columnar: bool = False

    @property
    def profile(self) -> Profile:
        return self.job.profile

    @property
    def attention(self) -> AttentionCurve | None:
        """The fused kernel that software and device agree on; None where attention is computed unfused."""
        return attention_kernel(self.efficiency, self.profile)

    def distinct(self, columns: Sequence[Any]) -> tuple[Any, Any]:
        """Rows that need a price of their own, of rows that agree in `columns`: (their indices, which of them
        each row equals)."""
        if not self.is_columnar:
            return distinct_rows(columns)
        every = np.arange(np.broadcast(*columns).size)
        return every, every

    @property
    def usable_bytes(self) -> float:
        """What a rank may take: capacity * (1 - margin)."""
        return self.capacity_bytes * (1.0 - self.job.memory_margin)


def attention_kernel(efficiency: Efficiency, profile: Profile) -> AttentionCurve | None:
    """The first fused kernel of the software's that the device has; None where it has none of them."""
    kernels = efficiency.attention
    return next((kernels[name] for name in profile.attention if name in kernels), None)


def has_fused_attention(cluster: Cluster, profile: Profile) -> bool:
    """Whether every class of devices has a fused attention kernel of the software's."""
    classes = cluster.classes.values()
    return all(attention_kernel(device.efficiency, profile) is not None for device in classes)


def bind(model: Model, cluster: Cluster, job: Job, *, is_columnar: bool = False) -> Problem:
    """The problem of training `model` on `cluster` as `job` asks.

    ConfigError where the devices lack the dtype, or the job's sizes do not suit the model.
    """
    machine = machine_of(cluster, job.dtype, job.optimizer, job.profile)
    if not job.profile.applies_dropout:
        model = model.without_dropout()
    return Problem(
        **{each.name: getattr(machine, each.name) for each in fields(Machine)},
        model=model,
        job=job,
        limits=limits_of(model, job),
        patterns=Patterns.of([model.pattern], len(model.kinds)),
        is_columnar=is_columnar,
    )


def machine_of(cluster: Cluster, dtype: str, optimizer: Optimizer, profile: Profile) -> Machine:
    """`cluster` with the number formats of `dtype` as the software stores them. ConfigError where its devices
    lack the dtype."""
    recipe = find_recipe(dtype)
    if not profile.reduce_in_fp32:
        recipe = replace(recipe, gradient_bytes=recipe.weight_bytes)
    for device in cluster.classes.values():
        for peak in (recipe.matmul, recipe.other):
            if peak not in device.peak_flop_per_s:
                raise ConfigError(
                    f"{device.name} has no {peak}", key="dtype", found=dtype,
                    allowed=", ".join(sorted(device.peak_flop_per_s)),
                )  # fmt: skip
    used = {node.device_class for node in cluster.nodes}
    slowest = min(
        (cluster.classes[name] for name in sorted(used)),
        key=lambda device: device.peak_flop_per_s[recipe.matmul],
    )
    speed = min(node.speed for node in cluster.nodes)
    return Machine(
        cluster=cluster,
        recipe=recipe,
        optimizer=OPTIMIZERS[optimizer],
        device=slowest,
        matmul_flop_per_s=_matmul_flop_per_s(slowest, recipe.matmul) * speed,
        other_flop_per_s=slowest.peak_flop_per_s[recipe.other] * speed,
        memory_bytes_per_s=min(cluster.classes[name].memory_bytes_per_s for name in used) * speed,
        capacity_bytes=float(min(cluster.classes[name].memory_bytes for name in used)),
        host_bytes_per_device=min(node.host_memory_bytes / node.devices for node in cluster.nodes),
        host_link_bytes_per_s=min(node.host_link_bytes_per_s for node in cluster.nodes),
    )


def _matmul_flop_per_s(device: Device, dtype: str) -> float:
    """The dense peak, times how much of its own peak a matmul of `dtype` reaches over what a 16-bit one
    reaches of its own."""
    curve = device.efficiency.matmul
    relative = {"fp8": curve.fp8_fraction, "fp4": curve.fp4_fraction}
    return device.peak_flop_per_s[dtype] * relative.get(dtype, 1.0)


def limits_of(model: Model, job: Job) -> Limits:
    """What the legality rules need: counts that must divide, over all kinds of layers."""
    operators = [operator for kind in model.kinds for operator in kind.operators]
    cores = [operator for operator in operators if isinstance(operator, Attention)]
    return Limits(
        layers=model.layers,
        heads=_common([core.heads.size for core in cores]),
        kv_heads=_common([core.kv_heads.size for core in cores]),
        experts=_common([kind.experts.experts for kind in model.kinds if kind.experts]),
        ffn_splits=_common(_sizes(operators, "ffn")),
        expert_ffn=_common(_sizes(operators, "expert_ffn")),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
    )


def _sizes(operators: list[Operator], role: str) -> list[int]:
    """Sizes of all weight extents that are split by `role`."""
    extents: list[Extent] = [
        extent for operator in operators for weight in operator.weights for extent in weight.shape
    ]
    return [extent.size for extent in extents if extent.role == role]


def _common(sizes: list[int]) -> int:
    """Greatest common divisor: what divides it divides all. 0, which everything divides, where there are
    none."""
    return gcd(*sizes)
