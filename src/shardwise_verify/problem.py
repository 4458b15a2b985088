"""Figures of a problem: peaks, bandwidths, capacities and precision of one model on one cluster
(`Figures`, docs/concepts/cost-model.md, sections 1 and 2). Also the numbers of trained and active
parameters, without prediction modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd
from statistics import NormalDist

import numpy as np

from shardwise_verify.reading import InputError
from shardwise_verify.records import (
    AttentionFigures,
    AttentionOperator,
    ClusterRecord,
    DeviceRecord,
    EfficiencyRecord,
    ExtentRecord,
    JobRecord,
    LayerOperator,
    LayersRecord,
    LibraryRecord,
    PartRecord,
    RoutingRecord,
    ScanOperator,
    SoftwareRecord,
)
from shardwise_verify.strategy_rows import Column

MTP_PREFIX = "mtp."
"""Prefix of the names of operators of multi-token-prediction modules, which are part of the head."""


@dataclass(frozen=True, slots=True)
class PrecisionRecipe:
    """Dtypes of weight matmuls and of attention (their peaks); bytes per activation, weight, accumulated
    gradient and master weight, per saved activation that only a matmul reads, and per gradient that a
    collective reduces."""

    matmul: str
    other: str
    activation_bytes: int = 2
    weight_bytes: int = 2
    gradient_bytes: int = 4
    master_bytes: float = 4
    operand_bytes: float = 2
    reduced_bytes: int = 4

    @property
    def cast_bytes(self) -> int:
        """Bytes moved to cast an element to the matmul dtype: read once, written straight and transposed."""
        return 4 if self.matmul in ("fp8", "fp4") else 0


RECIPES: Mapping[str, PrecisionRecipe] = {
    "fp32": PrecisionRecipe("fp32", "fp32", 4, 4, 4, 0, 4),
    "tf32": PrecisionRecipe("tf32", "fp32", 4, 4, 4, 0, 4),
    "fp16": PrecisionRecipe("fp16", "fp16"),
    "bf16": PrecisionRecipe("bf16", "bf16"),
    "fp8": PrecisionRecipe("fp8", "bf16", operand_bytes=1),
    "fp8-current": PrecisionRecipe("fp8", "bf16", operand_bytes=1),
    "fp8-block": PrecisionRecipe("fp8", "bf16", operand_bytes=1 + 4 / 128),
    "mxfp8": PrecisionRecipe("fp8", "bf16", operand_bytes=1 + 1 / 32),
    "nvfp4": PrecisionRecipe("fp4", "bf16", operand_bytes=0.5 + 1 / 16),
}

FP32_BYTES = 4

OPTIMIZERS: Mapping[str, tuple[int, int]] = {
    "adamw": (8, 0),
    "adafactor": (0, 0),
    "sgd": (4, 0),
    "muon": (4, 30),
}
"""State bytes per parameter with fp32 moments; FLOP per parameter and hidden unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreeLimits:
    """Sizes that degrees must divide; 0 where the model has none of the kind."""

    layers: int
    heads: int
    kv_heads: int
    experts: int
    ffn: int
    expert_ffn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One model on one cluster for one job, in SI units; `device` is the slowest class in use."""

    model: LayersRecord
    cluster: ClusterRecord
    job: JobRecord
    limits: DegreeLimits
    device: DeviceRecord
    efficiency: EfficiencyRecord
    recipe: PrecisionRecipe
    state_bytes: float
    update_flop: int
    matmul_flop_per_s: float
    attention_flop_per_s: float
    memory_bytes_per_s: float
    capacity_bytes: float
    host_capacity_bytes: float
    host_link_bytes_per_s: float

    @property
    def profile(self) -> SoftwareRecord:
        """The software profile of the job."""
        return self.job.profile

    @property
    def backend(self) -> LibraryRecord:
        """The collective library of the devices."""
        return self.device.backend

    @property
    def fused(self) -> AttentionFigures | None:
        """The first attention kernel of the profile that the device has; None: unfused attention, whose
        scores go through memory."""
        has = self.efficiency.attention
        for kernel in self.profile.attention:
            if kernel in has:
                return has[kernel]
        return None

    @property
    def usable_bytes(self) -> float:
        """Bytes of device memory that a rank may use."""
        return self.capacity_bytes * (1 - self.job.memory_margin)

    def exposed_s(self, communication_s: Column, computation_s: Column, overlap: Column) -> Column:
        """Seconds that a communication adds to the computation that it overlaps with."""
        hidden = np.minimum(overlap * communication_s, computation_s)
        return communication_s - hidden + (self.efficiency.overlap_slowdown - 1) * hidden


def figures_of(model: LayersRecord, cluster: ClusterRecord, job: JobRecord) -> Figures:
    """The figures of a problem. Raises InputError for a dtype that is unknown or that a class of the
    cluster lacks, and for samples that are longer than the sequence they are packed into."""
    if job.mean_sample_len is not None and job.mean_sample_len > job.seq_len:
        raise InputError(
            "is longer than the sequence", key="job.mean_sample_len", found=str(job.mean_sample_len),
            allowed=f"1 to {job.seq_len}",
        )  # fmt: skip
    recipe = _recipe(job.dtype, cluster)
    if not job.profile.applies_dropout:
        model = _without_dropout(model)
    if not job.profile.reduce_in_fp32:
        accumulated = recipe.gradient_bytes if job.profile.accumulates_in_fp32 else recipe.weight_bytes
        recipe = replace(recipe, gradient_bytes=accumulated, reduced_bytes=recipe.weight_bytes)
    recipe = replace(recipe, master_bytes=min(float(recipe.master_bytes), job.profile.master_bytes))
    state_bytes, update_flop = OPTIMIZERS[job.optimizer]
    nodes = set(cluster.nodes)
    used = sorted({node.device_class for node in nodes})
    devices = [cluster.classes[name] for name in used]
    slowest = min(devices, key=lambda device: device.peak_flop_per_s[recipe.matmul])
    efficiency = slowest.efficiency
    speed = min(node.speed for node in nodes) / _slowest_of(cluster.devices, efficiency.speed_spread)
    of_dtype = {"fp8": efficiency.matmul.fp8_fraction, "fp4": efficiency.matmul.fp4_fraction}
    return Figures(
        model=model,
        cluster=cluster,
        job=job,
        limits=degree_limits_of(model),
        device=slowest,
        efficiency=efficiency,
        recipe=recipe,
        state_bytes=state_bytes / FP32_BYTES * job.profile.moment_bytes,
        update_flop=update_flop,
        matmul_flop_per_s=slowest.peak_flop_per_s[recipe.matmul] * speed * of_dtype.get(recipe.matmul, 1.0),
        attention_flop_per_s=slowest.peak_flop_per_s[recipe.other] * speed,
        memory_bytes_per_s=min(device.memory_bytes_per_s for device in devices)
        * speed
        * efficiency.memory.fraction,
        capacity_bytes=min(device.memory_bytes for device in devices),
        host_capacity_bytes=min(node.host_memory_bytes / node.devices for node in nodes),
        host_link_bytes_per_s=min(node.host_link_bytes_per_s for node in nodes),
    )


def _slowest_of(devices: int, spread: float) -> float:
    """The expected time of the slowest of `devices`, relative to the mean. Normally distributed; the expected
    quantile of the largest is (n - 3/8) / (n + 1/4) (Blom 1958)."""
    if devices == 1:
        return 1.0
    return 1 + spread * NormalDist().inv_cdf((devices - 3 / 8) / (devices + 1 / 4))


def has_dropout(model: LayersRecord) -> bool:
    """Whether some layer has a dropout operator."""
    return any(each.name.endswith(".dropout") for kind in model.kinds for each in kind.operators)


def _without_dropout(model: LayersRecord) -> LayersRecord:
    """The model without dropout operators, for software that does not apply dropout."""

    def other_operators(operators: tuple[LayerOperator, ...]) -> tuple[LayerOperator, ...]:
        return tuple(each for each in operators if not each.name.endswith(".dropout"))

    layers = tuple(
        replace(layer, parts=(PartRecord(operators=other_operators(layer.operators)),))
        for layer in model.kinds
    )
    return replace(
        model, kinds=layers, embedding=other_operators(model.embedding), head=other_operators(model.head)
    )


def _recipe(dtype: str, cluster: ClusterRecord) -> PrecisionRecipe:
    if dtype not in RECIPES:
        raise InputError("unknown dtype", key="job.dtype", found=repr(dtype), allowed=", ".join(RECIPES))
    recipe = RECIPES[dtype]
    for name, device in cluster.classes.items():
        if not {recipe.matmul, recipe.other} <= set(device.peak_flop_per_s):
            raise InputError(f"{name} has no such peak", key="job.dtype", found=repr(dtype))
    return recipe


def degree_limits_of(model: LayersRecord) -> DegreeLimits:
    """The sizes that degrees must divide, over all operators of all kinds of layers."""
    operators = [operator for kind in model.kinds for operator in kind.operators]
    attention = [
        operator
        for operator in operators
        if isinstance(operator, AttentionOperator) and operator.heads.role != "whole"
    ]
    scans = [operator for operator in operators if isinstance(operator, ScanOperator)]
    of_scans = [
        extent.size for scan in scans for extent in (scan.heads, scan.key_heads) if extent.role != "whole"
    ]
    extents = list(_weight_extents(operators))
    return DegreeLimits(
        layers=len(model.layer_kinds),
        heads=gcd(*(operator.heads.size for operator in attention), *of_scans),
        kv_heads=gcd(*((operator.kv_heads.size for operator in attention) if attention else of_scans)),
        experts=gcd(*(kind.experts.experts for kind in model.kinds if kind.experts is not None)),
        ffn=gcd(*(extent.size for extent in extents if extent.role == "ffn")),
        expert_ffn=gcd(*(extent.size for extent in extents if extent.role == "expert_ffn")),
    )


def _weight_extents(operators: Iterable[LayerOperator]) -> Iterator[ExtentRecord]:
    for operator in operators:
        for weight in operator.weights:
            yield from weight.shape


def parameters(model: LayersRecord) -> int:
    """Trained elements, all experts included."""
    return sum(weight.parameters for operator, _ in _operators(model) for weight in operator.weights)


def active_parameters(model: LayersRecord) -> int:
    """Elements that one token uses: of the experts, those that it is routed to."""
    return sum(active_elements(operator, experts) for operator, experts in _operators(model))


def active_elements(operator: LayerOperator, experts: RoutingRecord | None) -> int:
    """Elements of the operator's weights that one token uses."""
    total = 0
    for weight in operator.weights:
        if weight.experts and experts is not None:
            total += weight.parameters // weight.experts * experts.top_k
        else:
            total += weight.parameters
    return total


def _operators(model: LayersRecord) -> Iterator[tuple[LayerOperator, RoutingRecord | None]]:
    for operator in model.embedding:
        yield operator, None
    for kind in model.layer_kinds:
        for operator in model.kinds[kind].operators:
            yield operator, model.kinds[kind].experts
    for operator in model.head:
        if not operator.name.startswith(MTP_PREFIX):
            yield operator, None
