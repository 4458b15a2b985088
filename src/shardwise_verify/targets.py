"""Limits of a target, the software that runs a plan: read from its capability file, and evaluated by the
checker's own code (docs/reference/formats.md).

The capability files are data of the package `shardwise`, which lies next to this one. Without them no target
is known.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from shardwise_verify.checks import Check, value_check
from shardwise_verify.reading import Anything, InputError, read_document, record, short
from shardwise_verify.records import (
    FIELDS,
    CertificateRecord,
    JobRecord,
    LayersRecord,
    PlanRecord,
    StrategyRecord,
)

CAPABILITIES = Path(__file__).parents[1] / "shardwise" / "strategy" / "data" / "targets"
"""Folder of the capability files."""

ANY = "any"
"""The target without limits."""

OPTIONS_OF_ANY = "megatron-lm-0.19"
"""The target whose options a plan without limits may have."""

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
class OptionRecord:
    """A value of an option of the software: the fields of its profile, the strategies on which it acts, and
    combinations that are excluded with it."""

    profile: Mapping[str, Anything]
    acts_on: Mapping[str, Anything] = field(default_factory=dict)
    limits: tuple[LimitRecord, ...] = ()
    sets_of: tuple[str, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    axes: Mapping[str, tuple[Anything, ...]] = field(default_factory=dict)
    excludes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilityRecord:
    """The capability file of a target: allowed values of single fields, excluded combinations,
    and options of the software."""

    axes: Mapping[str, tuple[Anything, ...]]
    limits: tuple[LimitRecord, ...]
    empty_ends: bool = False
    recompute_modules: Mapping[str, tuple[Anything, ...]] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, OptionRecord]] = field(default_factory=dict)

    def values_of(self, chosen: Mapping[str, str]) -> dict[str, OptionRecord | None]:
        """The records of these values of options; None for those that the target does not have."""
        return {name: self._value_of(name, value) for name, value in chosen.items()}

    def _value_of(self, name: str, value: str) -> OptionRecord | None:
        """The record of a value; where it is a set of names, that for sets with this set and its limits."""
        values = self.options.get(name, {})
        for_sets = next((one for one in values.values() if one.sets_of), None)
        names = value.split("+")
        if value in values or for_sets is None:
            return values.get(value)
        ordered = [one for one in for_sets.sets_of if one in names]
        if ordered != names or any(
            one in names and other not in names for one, other in for_sets.needs.items()
        ):
            return None
        excludes = {name: modules for name, modules in for_sets.excludes.items() if name in names}
        return replace(for_sets, profile=dict.fromkeys(for_sets.profile, value), excludes=excludes)


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
    options = capabilities.values_of(plan.job.profile.options).values()
    limits = [*capabilities.limits, *(limit for option in options if option for limit in option.limits)]
    return tuple(limit for limit in limits if not limit.families or plan.model.family in limit.families)


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


def with_options(plan: PlanRecord, certificate: CertificateRecord) -> PlanRecord:
    """The plan whose job has the options of a certificate, with this certificate. Raises InputError where the
    target has no such option."""
    capabilities = capabilities_of(OPTIONS_OF_ANY if plan.target == ANY else plan.target)
    profile = plan.job.profile
    values = {} if capabilities is None else capabilities.values_of(certificate.options)
    if not values or None in values.values():
        raise InputError("is no option of the target", key="certificate.other_options",
                         found=short(certificate.options))  # fmt: skip
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for one in values.values()
        if one is not None
        for name, value in one.profile.items()
    }
    profile = replace(profile, **fields, options={**profile.options, **certificate.options})
    return replace(plan, job=replace(plan.job, profile=profile), certificate=certificate)


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
    options = [one for one in capabilities.values_of(plan.job.profile.options).values() if one is not None]
    narrowed = [axis for option in options for axis in option.axes.items()]
    for name, allowed in (*capabilities.axes.items(), *narrowed):
        found: Sequence[Any] = (values[name],)
        if proof is not None:
            found = proof.axes.get(name, (proof.fixed.get(name, values[name]),))
        known = [sizes.get(value, value) if isinstance(value, str) else value for value in allowed]
        excluded += [f"{name} {value}" for value in found if value not in known]
    if proof is not None and proof.empty_ends and not capabilities.empty_ends:
        excluded.append("empty_ends")
    sets = [str(values["recompute_modules"])]
    sets += [] if proof is None else map(str, proof.axes.get("recompute_modules", ()))
    unknown = {name for option in options for names in option.excludes.values() for name in names}
    known_modules = [name for name in capabilities.recompute_modules.get("names", ()) if name not in unknown]
    named = [name for one in sets for name in one.split("+") if name]
    excluded += [f"recompute_modules {name}" for name in named if name not in known_modules]
    if known_modules and values["recompute"] == "selective" and not values["recompute_modules"]:
        excluded.append("recompute selective without recompute_modules")
    return Check(
        name="target", ok=not excluded, found="; ".join(excluded) or f"a plan for {plan.target}",
        expected=f"a strategy that {plan.target} supports",
    )  # fmt: skip


def options_checks(plan: PlanRecord) -> Iterator[Check]:
    """Whether the profile has what follows from the options of the software, and whether those that are
    claimed for the strategy are those that act on it; nothing without options."""
    requested, profile, strategy = plan.question.options, plan.job.profile, plan.best.strategy
    claimed = {} if strategy is None else strategy.options
    capabilities = capabilities_of(OPTIONS_OF_ANY if plan.target == ANY else plan.target)
    if not (requested or profile.options or claimed) or capabilities is None:
        return
    wrong, acting = [], {}
    for chosen in (requested, profile.options):
        for name, option in capabilities.values_of(chosen).items():
            own = {} if option is None else option.profile
            unlike = [f"{key} {short(getattr(profile, key, None))}" for key, value in own.items()
                      if _plain(getattr(profile, key, None)) != value]  # fmt: skip
            if option is None or unlike:
                wrong.append(f"{name} {chosen[name]}: {', '.join(unlike) or 'no option of the target'}")
            elif chosen is profile.options and (strategy is None or _acts(option, strategy)):
                acting[name] = chosen[name]
    yield Check(
        name="options", ok=not wrong, found="; ".join(wrong) or "the profile of these options",
        expected=", ".join(f"{name} {value}" for name, value in {**requested, **profile.options}.items()),
    )  # fmt: skip
    if strategy is not None:
        yield value_check("options of the strategy", dict(claimed), acting)


def _acts(option: OptionRecord, strategy: StrategyRecord) -> bool:
    return _all_hold(option.acts_on, {name: getattr(strategy, name) for name in FIELDS})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


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
    """The relations of a condition with the products on their right; none for a list of values."""
    return {name: value for name, value in spec.items() if name != HAS} if isinstance(spec, Mapping) else {}


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


HAS = "has"
"""The relation of a set such as `mlp+moe` with a name in it."""

_RELATIONS: Mapping[str, Any] = {
    "above": lambda left, right: left > right,
    "below": lambda left, right: left < right,
    "other_than": lambda left, right: left != right,
    "not_dividing": lambda left, right: right % left != 0,
    "not_multiple_of": lambda left, right: left % right != 0,
}


def _excludes(limit: LimitRecord, values: Mapping[str, Any]) -> bool:
    """Whether all conditions of the limit hold for these values of fields and sizes."""
    return _all_hold(limit.where, values)


def _all_hold(where: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(_holds(_value(left, values), spec, values) for left, spec in where.items())


def _holds(found: Any, spec: Any, values: Mapping[str, Any]) -> bool:
    if isinstance(spec, list):
        return found in spec
    if HAS in spec and spec[HAS] not in found.split("+"):
        return False
    rights = _right_sides(spec).items()
    return all(_RELATIONS[name](found, _value(str(right), values)) for name, right in rights)
