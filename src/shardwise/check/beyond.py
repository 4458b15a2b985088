"""What a target cannot say: the limits of its capability file (docs/reference/formats.md), read by code of
its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shardwise.check.finding import Check
from shardwise.model import Model
from shardwise.plan import Plan
from shardwise.strategy import FIELDS, Job, Limit, Strategy, target_of

TARGET_REASON = "target"
"""The reason of candidates that are legal and beyond the target."""

GRID_FIELDS = frozenset(("tp", "cp", "dp", "pp", "etp", "ep", "cp_kind", "sequence_parallel"))
ORDER_FIELDS = (GRID_FIELDS | {"axis_order"}) - {"cp_kind", "sequence_parallel"}
SHARD_FIELDS = ("param_shard", "grad_shard", "optim_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetLimits:
    """The limits of a target for one model that the search judges: those about a `grid`, the `orders` of its
    axes, and its `shards`."""

    grid: tuple[Limit, ...] = ()
    orders: tuple[Limit, ...] = ()
    shards: tuple[Limit, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def excludes_grid(self, values: Any) -> bool:
        """Whether a grid is, by its degrees, cp_kind and sequence_parallel."""
        return self._excludes_any(self.grid, values)

    def excludes_order(self, values: Any) -> bool:
        """Whether the order of the axes is, by the degrees and axis_order."""
        return self._excludes_any(self.orders, values)

    def excludes_shards(self, ranks: int, chain: Sequence[int]) -> bool:
        """Whether the sharding degrees of parameters, gradients and optimizer over dp * cp `ranks` are."""
        named = dict(zip(SHARD_FIELDS, chain, strict=True))
        return self._excludes_any(self.shards, {**named, "dp": ranks, "cp": 1})

    def _excludes_any(self, limits: tuple[Limit, ...], values: Any) -> bool:
        names = {**self.sizes, **(values if isinstance(values, Mapping) else vars(values))}
        return any(_excludes(limit, names) for limit in limits)


NO_TARGET_LIMITS = TargetLimits()
"""Without a target nothing is."""


def target_limits_of(limits: Sequence[Limit], model: Model, job: Job) -> TargetLimits:
    """What the search rejects for a target with these limits."""
    own, sizes = _applicable(limits, model, job), _sizes(model, job)
    fields = [_fields(limit) - set(sizes) for limit in own]
    grid = tuple(limit for limit, names in zip(own, fields, strict=True) if names <= GRID_FIELDS)
    orders = tuple(
        limit for limit, names in zip(own, fields, strict=True) if limit not in grid and names <= ORDER_FIELDS
    )
    shards = tuple(limit for limit in own if _is_of_shards(limit))
    return TargetLimits(grid=grid, orders=orders, shards=shards, sizes=sizes)


def plan_limits_of(plan: Plan) -> tuple[Limit, ...]:
    """The limits of the target of a plan; none without one."""
    return () if plan.target is None else target_of(plan.target).limits


def target_check(plan: Plan) -> Check:
    """Whether the target of a plan can say its strategy, and whether the axes of the certificate are no wider
    than the target's."""
    name = str(plan.target)
    target = target_of(name)
    values = {**_sizes(plan.model, plan.job), **_values(plan.best.strategy)}
    excluded = [
        f"{limit.field} {values[limit.field]}: {limit.allowed}"
        for limit in _applicable(target.limits, plan.model, plan.job)
        if _excludes(limit, values)
    ]
    fixed, axes = plan.certificate.fixed, plan.certificate.axes
    for field_, allowed in target.axes.items():
        best = getattr(plan.best.strategy, field_)
        found = axes.get(field_, (fixed.get(field_, best),))
        excluded += [f"{field_} {value}" for value in found if value not in allowed]
    return Check(
        name="target", ok=not excluded, found="; ".join(excluded) or f"a plan for {name}",
        expected=f"what {name} can say",
    )  # fmt: skip


def _applicable(limits: Sequence[Limit], model: Model, job: Job) -> list[Limit]:
    """Those that are about such models and optimizers."""
    kind = "dense" if all(layer.experts is None for layer in model.kinds) else "experts"
    return [
        limit
        for limit in limits
        if limit.models in ("all", kind) and (not limit.optimizers or job.optimizer in limit.optimizers)
    ]


def _sizes(model: Model, job: Job) -> dict[str, int]:
    experts = [layer.experts.experts for layer in model.kinds if layer.experts is not None]
    return {
        "layers": len(model.pattern), "heads": model.heads, "kv_heads": model.kv_heads, "vocab": model.vocab,
        "hidden": model.hidden, "experts": experts[0] if experts else 1, "seq_len": job.seq_len,
        "global_batch_size": job.global_batch_size,
    }  # fmt: skip


def _values(strategy: Strategy) -> dict[str, Any]:
    return {name: getattr(strategy, name) for name in FIELDS}


def _fields(limit: Limit) -> set[str]:
    return {name for condition in limit.where for name in condition.fields}


def _is_of_shards(limit: Limit) -> bool:
    """Whether all that a limit compares are sharding degrees, numbers, and the product dp * cp."""
    for condition in limit.where:
        if condition.other_than or condition.not_dividing or condition.not_multiple_of:
            return False
        for product in filter(None, (condition.left, condition.below)):
            if not set(product.fields) <= set(SHARD_FIELDS) and sorted(product.fields) != ["cp", "dp"]:
                return False
    return True


def _excludes(limit: Limit, values: Mapping[str, Any]) -> bool:
    """Whether all conditions hold for these values of fields and sizes."""
    for condition in limit.where:
        names = condition.left.fields
        if condition.values:
            if values[names[0]] not in condition.values:
                return False
            continue
        left = condition.left.times * prod(values[name] for name in names)
        rights = {
            key: product.times * prod(values[name] for name in product.fields)
            for key in ("below", "other_than", "not_dividing", "not_multiple_of")
            if (product := getattr(condition, key)) is not None
        }
        satisfied = (
            (condition.above is None or left > condition.above)
            and left < rights.get("below", left + 1)
            and ("other_than" not in rights or left != rights["other_than"])
            and ("not_dividing" not in rights or rights["not_dividing"] % left != 0)
            and ("not_multiple_of" not in rights or left % rights["not_multiple_of"] != 0)
        )
        if not satisfied:
            return False
    return True
