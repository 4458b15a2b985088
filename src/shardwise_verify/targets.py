"""Limits of a target, the software that runs a plan: read from its capability file, and evaluated by the
checker's own code (docs/reference/formats.md).

The capability files are data of the package `shardwise`, which lies next to this one. Without them no target
is known.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from shardwise_verify.checks import Check
from shardwise_verify.reading import Anything, read_document, record
from shardwise_verify.records import FIELDS, JobRecord, LayersRecord, PlanRecord

CAPABILITIES = Path(__file__).parents[1] / "shardwise" / "strategy" / "data" / "targets"
"""Folder of the capability files."""

ANY = "any"
"""The target without limits."""

TARGET_REASON = "target"
"""The reason code of candidates that are legal but not supported by the target."""

GRID_FIELDS = frozenset(("tp", "cp", "dp", "pp", "etp", "ep", "cp_kind", "sequence_parallel"))
ORDER_FIELDS = (GRID_FIELDS | {"axis_order"}) - {"cp_kind", "sequence_parallel"}
SHARD_FIELDS = ("param_shard", "grad_shard", "optim_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRecord:
    """A combination that a target does not support: all conditions in `where` hold. Each is on a product of
    fields, and has values, or numbers or products by their relation."""

    field: str
    where: Mapping[str, Anything]
    allowed: str
    models: str = "all"
    families: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRecord:
    """The capability file of a target: allowed values of single fields, and excluded combinations."""

    axes: Mapping[str, tuple[Anything, ...]]
    limits: tuple[LimitRecord, ...]


@cache
def capabilities_of(target: str) -> CapabilityRecord | None:
    """The capabilities of `target`; None where its file is not there."""
    path = CAPABILITIES / f"{target}.json"
    known = {each.name for each in CAPABILITIES.glob("*.json")}  # `target` may be a path
    return record(CapabilityRecord, read_document(str(path))) if path.name in known else None


def is_known(target: str) -> bool:
    """Whether the limits of `target` are known: it has none, or its file is there."""
    return target == ANY or capabilities_of(target) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """The limits of a target for one model that the search evaluates: on a `grid`, on the `orders` of its
    axes, and on `shards`."""

    grid: tuple[LimitRecord, ...] = ()
    orders: tuple[LimitRecord, ...] = ()
    shards: tuple[LimitRecord, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def excludes_grid(self, values: Any) -> bool:
        """Whether a limit excludes a grid, by its degrees, cp_kind and sequence_parallel."""
        return self._excludes_any(self.grid, values)

    def excludes_order(self, values: Any) -> bool:
        """Whether a limit excludes an axis order, by the degrees and axis_order."""
        return self._excludes_any(self.orders, values)

    def excludes_shards(self, ranks: int, chain: Sequence[int]) -> bool:
        """Whether a limit excludes the sharding degrees of parameters, gradients and optimizer states over
        dp * cp `ranks`."""
        named = dict(zip(SHARD_FIELDS, chain, strict=True))
        return self._excludes_any(self.shards, {**named, "dp": ranks, "cp": 1})

    def _excludes_any(self, limits: tuple[LimitRecord, ...], values: Any) -> bool:
        names = {**self.sizes, **(values if isinstance(values, Mapping) else vars(values))}
        return any(_excludes(limit, names) for limit in limits)


NO_TARGET_LIMITS = TargetLimits()
"""No target: nothing is excluded."""


def limits_of(plan: PlanRecord) -> tuple[LimitRecord, ...]:
    """The combinations that the target of a plan excludes for its family of models; none where the target is
    not known."""
    capabilities = capabilities_of(plan.target)
    if capabilities is None or plan.model is None:
        return ()
    return tuple(
        limit for limit in capabilities.limits if not limit.families or plan.model.family in limit.families
    )


def target_limits_of(limits: Sequence[LimitRecord], model: LayersRecord, job: JobRecord) -> TargetLimits:
    """The limits that apply to the model and the job, by the level at which the search rejects."""
    own, sizes = _applicable(limits, model, job), _sizes(model, job)
    fields = [_fields(limit) - set(sizes) for limit in own]
    grid = tuple(limit for limit, names in zip(own, fields, strict=True) if names <= GRID_FIELDS)
    orders = tuple(
        limit for limit, names in zip(own, fields, strict=True) if limit not in grid and names <= ORDER_FIELDS
    )
    shards = tuple(limit for limit in own if _is_of_shards(limit, sizes))
    return TargetLimits(grid=grid, orders=orders, shards=shards, sizes=sizes)


def target_check(plan: PlanRecord, model: LayersRecord, capabilities: CapabilityRecord) -> Check:
    """Whether the target of a plan of one strategy supports it, and whether the axes of the certificate are
    within the target's."""
    strategy, proof = plan.best.strategy, plan.certificate
    sizes = _sizes(model, plan.job)
    values = {**sizes, **{name: getattr(strategy, name) for name in FIELDS}}
    excluded = [
        f"{limit.field} {values[limit.field]}: {limit.allowed}"
        for limit in _applicable(limits_of(plan), model, plan.job)
        if _excludes(limit, values)
    ]
    for name, allowed in capabilities.axes.items():
        found: Sequence[Any] = (values[name],)
        if proof is not None:
            found = proof.axes.get(name, (proof.fixed.get(name, values[name]),))
        known = [sizes.get(value, value) if isinstance(value, str) else value for value in allowed]
        excluded += [f"{name} {value}" for value in found if value not in known]
    return Check(
        name="target", ok=not excluded, found="; ".join(excluded) or f"a plan for {plan.target}",
        expected=f"a strategy that {plan.target} supports",
    )  # fmt: skip


def _applicable(limits: Sequence[LimitRecord], model: LayersRecord, job: JobRecord) -> list[LimitRecord]:
    """The limits for such models and optimizers."""
    kind = "dense" if model.experts is None else "experts"
    return [
        limit
        for limit in limits
        if limit.models in ("all", kind) and (not limit.optimizers or job.optimizer in limit.optimizers)
    ]


def _sizes(model: LayersRecord, job: JobRecord) -> dict[str, int]:
    return {
        "layers": len(model.layer_kinds), "heads": model.heads, "kv_heads": model.kv_heads,
        "vocab": model.vocab, "hidden": model.hidden, "tied": int(model.tied_embeddings),
        "experts": 1 if model.experts is None else model.experts.experts, "seq_len": job.seq_len,
        "global_batch_size": job.global_batch_size,
    }  # fmt: skip


def _factors(product: str) -> list[str]:
    """The names of the fields of a product such as `cp*2`."""
    return [factor for factor in product.split("*") if not factor.isdigit()]


def _value(product: str, values: Mapping[str, Any]) -> Any:
    """The value of a product; of a single field, its value of any type."""
    factors = product.split("*")
    if len(factors) == 1:
        return int(product) if product.isdigit() else values[product]
    return prod(int(factor) if factor.isdigit() else values[factor] for factor in factors)


def _right_sides(spec: Any) -> Mapping[str, Any]:
    """The relations of a condition with what stands on their right; none for a list of values."""
    return spec if isinstance(spec, Mapping) else {}


def _fields(limit: LimitRecord) -> set[str]:
    products = [
        *limit.where,
        *(str(each) for spec in limit.where.values() for each in _right_sides(spec).values()),
    ]
    return {name for product in products for name in _factors(product)}


def _is_of_shards(limit: LimitRecord, sizes: Container[str]) -> bool:
    """Whether a limit reads only sharding degrees, numbers, sizes, and the product dp * cp."""
    for left, spec in limit.where.items():
        for product in (left, *map(str, _right_sides(spec).values())):
            fields = [name for name in _factors(product) if name not in sizes]
            if not set(fields) <= set(SHARD_FIELDS) and sorted(fields) != ["cp", "dp"]:
                return False
    return True


_RELATIONS: Mapping[str, Any] = {
    "above": lambda left, right: left > right,
    "below": lambda left, right: left < right,
    "other_than": lambda left, right: left != right,
    "not_dividing": lambda left, right: right % left != 0,
    "not_multiple_of": lambda left, right: left % right != 0,
}


def _excludes(limit: LimitRecord, values: Mapping[str, Any]) -> bool:
    """Whether all conditions of the limit hold for these values of fields and sizes."""
    return all(
        _value(left, values) in spec
        if isinstance(spec, list)
        else all(
            _RELATIONS[name](_value(left, values), _value(str(right), values))
            for name, right in _right_sides(spec).items()
        )
        for left, spec in limit.where.items()
    )
