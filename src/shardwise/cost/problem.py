"""A problem: a model, a cluster and a job, with the figures that every estimate needs.

`Machine` has the figures of the devices and their software, `Problem` adds model and job, `bind` makes one.
`Patterns` has the kinds of layers of one decoder, or of one decoder per row. `distinct_rows` finds repeated
combinations of columns, so that each is estimated once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster import AttentionCurve, Backend, Cluster, Device, Efficiency, Tier
from shardwise.cost.recipe import OPTIMIZERS, OptimizerCost, Recipe, find_recipe
from shardwise.errors import ConfigError
from shardwise.model import Model
from shardwise.operators import Attention, Extent, Operator, Scan
from shardwise.strategy import Job, Limits, Optimizer, Profile

# Distinct rows of tables

Index = NDArray[np.intp]


def distinct_rows(columns: Sequence[NDArray[np.int64]]) -> tuple[Index, Index]:
    """Representatives and inverse of the distinct rows of integer columns of equal lengths.

    Returns (rows, inverse): `rows` has the index of one row of each distinct combination, `inverse[i]` states
    which of them row i equals. Runs of equal rows, frequent in tables in product order, are merged before the
    sort.
    """
    length = len(columns[0])
    if length <= 1:
        return np.zeros(length, dtype=np.intp), np.zeros(length, dtype=np.intp)
    change = np.zeros(length, dtype=bool)
    change[0] = True
    for column in columns:
        change[1:] |= column[1:] != column[:-1]
    heads = np.flatnonzero(change)
    key = _packed([column[heads] for column in columns])
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    if len(heads) == length:
        return heads[first], inverse
    return heads[first], inverse[np.cumsum(change) - 1]


def _packed(columns: Sequence[NDArray[np.int64]]) -> Any:
    """One int64 key per row; columns are ranked where the product of their ranges would overflow."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    radix = 1
    for column in columns:
        low = int(column.min())
        span = int(column.max()) - low + 1
        if radix * span >= 2**62:
            values, key = np.unique(key, return_inverse=True)
            radix = len(values)
        if radix * span >= 2**62:
            values, column = np.unique(column, return_inverse=True)
            low, span = 0, len(values)
        key = key * span + (column - low)
        radix *= span
    return key


# Layer patterns

Pattern = tuple[int, ...]
"""The kind of every layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """Layer patterns of several decoders.

    `before[d, k, i]` is the number of layers of kind k among the first i layers of decoder d (all its layers
    where it has fewer). `of_row` is the decoder of each row of a table; 0 where all rows have the same.
    """

    patterns: tuple[Pattern, ...]
    before: Any
    of_row: Any = 0

    @staticmethod
    def of(patterns: Sequence[Pattern], kinds: int, of_row: Any = 0) -> Patterns:
        """Patterns of decoders with `kinds` kinds of layers."""
        steps = np.zeros((len(patterns), kinds, max(map(len, patterns)) + 1), dtype=np.int64)
        for decoder, pattern in enumerate(patterns):
            steps[decoder, pattern, np.arange(1, len(pattern) + 1)] = 1
        return Patterns(tuple(patterns), steps.cumsum(axis=2), of_row)

    @staticmethod
    def joined(parts: Sequence[Patterns], rows: Sequence[int]) -> Patterns:
        """The patterns of a table that has `rows[i]` rows of `parts[i]`, in their order."""
        every = dict.fromkeys(pattern for part in parts for pattern in part.patterns)
        at = {pattern: place for place, pattern in enumerate(every)}
        own = [np.array([at[pattern] for pattern in part.patterns])[part.of_row] for part in parts]
        of_row = np.concatenate([np.broadcast_to(places, n) for places, n in zip(own, rows, strict=True)])
        return Patterns.of(list(every), parts[0].before.shape[1], of_row if len(every) > 1 else 0)

    @property
    def columns(self) -> list[Any]:
        """Columns in which rows must agree to have the same layers."""
        return [self.of_row] if np.ndim(self.of_row) else []

    @property
    def layers(self) -> Any:
        """Number of layers of each row."""
        return np.array([len(pattern) for pattern in self.patterns])[self.of_row]

    def count(self, kind: int) -> Any:
        """Number of layers of one kind."""
        return self.before[self.of_row, kind, -1]

    def between(self, start: Any, end: Any) -> Any:
        """Layers of each kind in the range [start, end), columns over places and rows; shape (kinds, places,
        rows).
        """
        kinds = np.arange(self.before.shape[1])[:, None, None]
        return self.before[self.of_row, kinds, end] - self.before[self.of_row, kinds, start]

    def taken(self, rows: Any) -> Patterns:
        """The patterns of these rows."""
        return Patterns(self.patterns, self.before, self.of_row[rows]) if self.columns else self


# Machine and problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Figures of the devices: rates, capacities, number formats and optimizer. Units: flop/s, bytes/s, bytes.

    On a mixed cluster the figures are those of the slowest class, because every rank keeps its pace.
    `matmul_flop_per_s` and `other_flop_per_s` are dense peaks times the slowest node's speed, over the time
    of the slowest of its devices relative to their mean.
    `capacity_bytes` is the smallest device's memory, `host_bytes_per_device` a device's share of its node's
    memory.
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
    def stream_bytes_per_s(self) -> float:
        """Achieved memory bandwidth of a long sequential pass."""
        return self.memory_bytes_per_s * self.efficiency.memory.fraction

    @property
    def backend(self) -> Backend:
        """The collective library of the cluster's devices."""
        return self.device.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Machine):
    """A model and a job on a machine: everything that an estimate needs.

    `patterns` has the layers of the model, or of each row's. Where `is_columnar`, numbers are columns with
    one value per row of the estimated tables. Rows with equal strategies may differ then.
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
        """The fused kernel that both software and device have; None where attention is unfused."""
        return attention_kernel(self.efficiency, self.profile)

    def distinct(self, columns: Sequence[Any]) -> tuple[Any, Any]:
        """Rows that need an estimate of their own, among rows that may agree in `columns`.

        Returns (rows, inverse) as `distinct_rows` does.
        """
        if not self.is_columnar:
            return distinct_rows(columns)
        every = np.arange(np.broadcast(*columns).size)
        return every, every

    @property
    def usable_bytes(self) -> float:
        """Device bytes that a rank may use: capacity * (1 - margin)."""
        return self.capacity_bytes * (1.0 - self.job.memory_margin)


def attention_kernel(efficiency: Efficiency, profile: Profile) -> AttentionCurve | None:
    """The first fused attention kernel of the software that the device has; None if it has none of them."""
    kernels = efficiency.attention
    return next((kernels[name] for name in profile.attention if name in kernels), None)


def has_fused_attention(cluster: Cluster, profile: Profile) -> bool:
    """Whether every class of devices has a fused attention kernel of the software."""
    classes = cluster.classes.values()
    return all(attention_kernel(device.efficiency, profile) is not None for device in classes)


def bind(model: Model, cluster: Cluster, job: Job, *, is_columnar: bool = False) -> Problem:
    """The problem of training `model` on `cluster` for `job`.

    Raises ConfigError where a class of devices lacks the dtype.
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
    """Figures of `cluster` with the number formats of `dtype` as the software stores them.

    Raises ConfigError where a class of devices lacks the dtype.
    """
    recipe = find_recipe(dtype)
    if not profile.reduce_in_fp32:
        accumulated = recipe.gradient_bytes if profile.accumulates_in_fp32 else recipe.weight_bytes
        recipe = replace(recipe, gradient_bytes=accumulated, reduced_bytes=recipe.weight_bytes)
    recipe = replace(recipe, master_bytes=min(recipe.master_bytes, profile.master_bytes))
    for device in cluster.classes.values():
        for peak in (recipe.matmul, recipe.other):
            if peak not in device.peak_flop_per_s:
                raise ConfigError(
                    f"{device.name} has no {peak} peak", key="dtype", found=dtype,
                    allowed=", ".join(sorted(device.peak_flop_per_s)),
                )  # fmt: skip
    used = {node.device_class for node in cluster.nodes}
    slowest = min(
        (cluster.classes[name] for name in sorted(used)),
        key=lambda device: device.peak_flop_per_s[recipe.matmul],
    )
    speed = min(node.speed for node in cluster.nodes)
    speed /= slowest.efficiency.lag(cluster.devices)
    return Machine(
        cluster=cluster,
        recipe=recipe,
        optimizer=OPTIMIZERS[optimizer].with_moments(profile.moment_bytes),
        device=slowest,
        matmul_flop_per_s=_matmul_flop_per_s(slowest, recipe.matmul) * speed,
        other_flop_per_s=slowest.peak_flop_per_s[recipe.other] * speed,
        memory_bytes_per_s=min(cluster.classes[name].memory_bytes_per_s for name in used) * speed,
        capacity_bytes=float(min(cluster.classes[name].memory_bytes for name in used)),
        host_bytes_per_device=min(node.host_memory_bytes / node.devices for node in cluster.nodes),
        host_link_bytes_per_s=min(node.host_link_bytes_per_s for node in cluster.nodes),
    )


def _matmul_flop_per_s(device: Device, dtype: str) -> float:
    """The dense peak, scaled by the fraction that a matmul of `dtype` reaches relative to a 16-bit matmul."""
    curve = device.efficiency.matmul
    relative = {"fp8": curve.fp8_fraction, "fp4": curve.fp4_fraction}
    return device.peak_flop_per_s[dtype] * relative.get(dtype, 1.0)


def limits_of(model: Model, job: Job) -> Limits:
    """The counts that the legality rules need, over all kinds of layers."""
    operators = [operator for kind in model.kinds for operator in kind.operators]
    attention = [operator for operator in operators if isinstance(operator, Attention)]
    cores = [operator for operator in attention if operator.heads.role != "whole"]
    scans = [operator for operator in operators if isinstance(operator, Scan)]
    of_scans = [each.size for scan in scans for each in (scan.heads, scan.key_heads) if each.role == "heads"]
    return Limits(
        layers=model.layers,
        heads=_common([core.heads.size for core in cores] + of_scans),
        kv_heads=_common([core.kv_heads.size for core in cores] or of_scans),
        experts=_common([kind.experts.experts for kind in model.kinds if kind.experts]),
        ffn_splits=_common(_sizes(operators, "ffn")),
        expert_ffn=_common(_sizes(operators, "expert_ffn")),
        seq_len=job.seq_len,
        global_batch_size=job.global_batch_size,
        linked_devices=job.profile.linked_devices,
    )


def _sizes(operators: list[Operator], role: str) -> list[int]:
    """Sizes of all weight extents that are split by `role`."""
    extents: list[Extent] = [
        extent for operator in operators for weight in operator.weights for extent in weight.shape
    ]
    return [extent.size for extent in extents if extent.role == role]


def _common(sizes: list[int]) -> int:
    """Greatest common divisor of the sizes; 0, which every degree divides, where there are none."""
    return gcd(*sizes)
