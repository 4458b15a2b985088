"""Targets: the software that runs a plan, and the limits of what it supports.

A `Target` is read from a capability file (`strategy/data/targets`, docs/reference/formats.md). Its `axes` are
allowed values of single fields; its `limits` exclude combinations of `Condition`s. The search uses both to
prune. Our own runtime uses them to reject a plan. Entry points: `target_of`, `target_names`.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, combinations
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.model import NO_MODULES, Model, has_plain_causal_attention, modules_of_layers, names_of
from shardwise.strategy.profile import NEWEST_MEGATRON_LM, PROFILES, Job, Profile
from shardwise.strategy.strategy import FIELD_VALUES, Strategy, StrategyTable, code_of

Value = int | str | bool
Axes = Mapping[str, tuple[Value, ...]]
"""For some fields, the values that they may have."""

ANY = "any"

PACKED_SAMPLES = "packed samples"
"""The name in `lacks` of targets that compute attention over whole sequences."""
"""The target without limits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """`times` x the product of some fields."""

    fields: tuple[str, ...]
    times: int = 1

    def of(self, table: Any) -> Any:
        """The product in every row of a table."""
        return prod((getattr(table, name) for name in self.fields), start=np.int64(self.times))

    def with_sizes(self, sizes: Mapping[str, int]) -> Product:
        """The same with the names of model sizes replaced by their values."""
        times = prod((sizes[name] for name in self.fields if name in sizes), start=self.times)
        return Product(fields=tuple(name for name in self.fields if name not in sizes), times=times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition on `left`, a product of fields: everything that is set holds.

    It has one of `values` (of one field); it is `above` a number, or less than the product `below`; it is
    `other_than` a product, does not divide one (`not_dividing`), or is no multiple of one
    (`not_multiple_of`).
    """

    left: Product
    values: tuple[Value, ...] = ()
    above: int | None = None
    below: Product | None = None
    other_than: Product | None = None
    not_dividing: Product | None = None
    not_multiple_of: Product | None = None

    @property
    def fields(self) -> frozenset[str]:
        """The fields that decide the condition."""
        return frozenset(chain.from_iterable(each.fields for each in self.products))

    @property
    def products(self) -> tuple[Product, ...]:
        """The left side and those that it is compared with."""
        rights = (self.below, self.other_than, self.not_dividing, self.not_multiple_of)
        return (self.left, *(right for right in rights if right is not None))

    def with_sizes(self, sizes: Mapping[str, int]) -> Condition:
        """The same with the names of model sizes replaced by their values."""
        products = {
            name: value.with_sizes(sizes)
            for name in ("left", "below", "other_than", "not_dividing", "not_multiple_of")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **products)

    def holds(self, table: Any) -> Any:
        """Rows of a table where the condition holds."""
        found = self.left.of(table)
        satisfied = np.ones(np.shape(found), dtype=bool)
        if self.values:
            (name,) = self.left.fields
            satisfied = satisfied & np.isin(found, [code_of(name, value) for value in self.values])
        if self.above is not None:
            satisfied = satisfied & (found > self.above)
        if self.below is not None:
            satisfied = satisfied & (found < self.below.of(table))
        if self.other_than is not None:
            satisfied = satisfied & (found != self.other_than.of(table))
        if self.not_dividing is not None:
            satisfied = satisfied & (self.not_dividing.of(table) % found != 0)
        if self.not_multiple_of is not None:
            satisfied = satisfied & (found % self.not_multiple_of.of(table) != 0)
        return satisfied

    def inside(self, degrees: tuple[int, ...]) -> Axes:
        """Values among these `degrees` for which the condition may hold."""
        (name,) = self.left.fields
        if self.values:
            return {name: self.values}
        return {name: tuple(degree for degree in degrees if self.above is None or degree > self.above)}

    def outside(self, degrees: tuple[int, ...], layers: int) -> Iterator[Axes]:
        """Disjoint subspaces that together are all strategies for which the condition does not hold, for a
        model of `layers`."""
        if len(self.left.fields) > 1:  # a product that is not above 1
            yield dict.fromkeys(self.left.fields, (1,))
            return
        (name,) = self.left.fields
        if self.values:
            numbers = {"vpp": range(1, layers + 3), **dict.fromkeys(ENDS, range(layers + 1))}
            known = FIELD_VALUES.get(name, tuple(numbers.get(name, degrees)))
            yield {name: tuple(value for value in known if value not in self.values)}
            return
        if self.above is not None:
            yield {name: tuple(degree for degree in degrees if degree <= self.above)}
        right = self.below or self.not_multiple_of
        if right is not None:
            (other,) = right.fields
            for degree in degrees:
                least = [(each, each * right.times) for each in degrees]
                others = (each for each, by in least if (degree >= by if self.below else degree % by == 0))
                if self.above is None or degree > self.above:
                    yield {name: (degree,), other: tuple(others)}


DEGREES = frozenset(("tp", "cp", "dp", "pp", "etp", "ep"))

GRID = DEGREES | {"cp_kind", "sequence_parallel"}
"""The fields of a grid, except the order of its axes."""

SHARDS = frozenset(("param_shard", "grad_shard", "optim_shard"))

ENDS = ("first_stage_layers", "last_stage_layers")

DATA = ("dp", "cp")
"""Fields whose product the sharding degrees divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A combination that the target does not support: strategies for which all conditions in `where` hold.

    Messages name `field` and the `allowed` values. It applies to dense models or to models with experts where
    `models` is not "all", and to some `families` of models and some `optimizers` where any are named.
    """

    field: str
    where: tuple[Condition, ...]
    allowed: str
    models: str = "all"
    families: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()

    @property
    def fields(self) -> frozenset[str]:
        """The fields that decide whether a strategy is excluded."""
        return frozenset().union(*(condition.fields for condition in self.where))

    @property
    def level(self) -> str | None:
        """The level of the search that rejects excluded strategies: `grid`, `order` (of the axes) or
        `shards`.

        None where no single level knows all of its fields; then the search runs over `allowed_subspaces`.
        """
        if self.fields <= GRID:
            return "grid"
        if self.fields <= DEGREES | {"axis_order"}:
            return "order"
        products = chain.from_iterable(condition.products for condition in self.where)
        is_known = all(set(each.fields) <= SHARDS or sorted(each.fields) == sorted(DATA) for each in products)
        return "shards" if is_known else None

    def excluded(self, table: Any) -> Any:
        """Rows of a table that the limit excludes."""
        return np.logical_and.reduce([condition.holds(table) for condition in self.where])

    def excludes(self, strategy: Strategy) -> bool:
        return bool(self.excluded(StrategyTable.of([strategy]))[0])

    def with_sizes(self, sizes: Mapping[str, int]) -> Limit:
        """The same with the names of model sizes replaced by their values."""
        return replace(self, where=tuple(condition.with_sizes(sizes) for condition in self.where))

    def allowed_subspaces(self, degrees: tuple[int, ...], layers: int) -> Iterator[Axes]:
        """Disjoint subspaces that together are all strategies that the limit allows, for a model of `layers`.
        Only the last condition may be on a product of fields, because no subspace represents one."""
        satisfied: Axes = {}
        *first, last = self.where
        for condition in first:
            for part in condition.outside(degrees, layers):
                yield _both(satisfied, part)
            satisfied = {**satisfied, **condition.inside(degrees)}
        for part in last.outside(degrees, layers):
            yield _both(satisfied, part)


def _both(first: Axes, second: Axes) -> Axes:
    """The values that both subspaces have."""
    shared = {
        name: tuple(value for value in values if value in first[name])
        for name, values in second.items()
        if name in first
    }
    return {**first, **second, **shared}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A value that the target does not support, and the values that it does."""

    key: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.key}={self.found} (it runs {self.allowed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionValue:
    """One value of an option of the software.

    - `profile`: fields of a Profile that it replaces. `source`: where they come from.
    - `acts_on`: conditions; the option acts on strategies for which all of them hold.
    - `limits`: combinations that the software does not support while the option has this value.
    - `within_node`: where it was requested, tensor parallelism must stay inside a node.
    - `dtypes`, `optimizers`, `accelerators` (vendors of devices): everything that it supports (empty: as the
      target).
    - `flags`: how the software says it.
    - `axes`: fields of which it leaves some values only. `without_modules`: modules that recomputation cannot
      name with it.
    """

    profile: Mapping[str, Any] = field(hash=False)
    source: str = ""
    acts_on: tuple[Condition, ...] = ()
    limits: tuple[Limit, ...] = ()
    dtypes: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    accelerators: tuple[str, ...] = ()
    within_node: bool = False
    flags: tuple[str, ...] = ()
    axes: Axes = field(default_factory=dict, hash=False)
    without_modules: tuple[str, ...] = ()

    def unsupported(self, job: Job, vendors: Iterable[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """What of a job on devices of these vendors it cannot be combined with: the option of the question,
        what was found, and what is allowed."""
        for key, found, allowed in (
            ("--dtype", [job.dtype], self.dtypes),
            ("--optimizer", [job.optimizer], self.optimizers),
            ("cluster", vendors, self.accelerators),
        ):
            others = [one for one in found if one not in allowed]
            if allowed and others:
                yield key, others[0], allowed

    def acts(self, strategy: Strategy) -> bool:
        """Whether the option changes how the strategy runs."""
        table = StrategyTable.of([strategy])
        return all(bool(condition.holds(table)[0]) for condition in self.acts_on)


Options = Mapping[str, Mapping[str, OptionValue]]
"""The values of each option; the first that supports the job is the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The features and limits of one version of a target.

    - `axes`: fields of which it supports some values only; a value may be the name of a size (`sizes_of`)
      until `for_job`. `windowed_axes`: the same for models with
      sliding-window attention, soft cap or sinks. `tower_axes`: the same for models with a vision tower.
      `unfused_axes`: the same on devices without a fused
      attention kernel.
    - `limits`: combinations that it does not support.
    - `searched_options`: options that a search tries unless they are requested.
    - `has_empty_ends`: whether an interleaved pipeline may have two stages more than layers.
    - `modules`: those that its selective recomputation names (`for_job`: of the model); empty where it names
      none. `module_sets` are the sets of them that a search tries, `unfused_module_sets` further ones on
      devices without a fused attention kernel.
    - `default_axes`: values that plans for clusters of `devices` (of any, where it names none) have unless
      others are requested.
    - `devices`, `dtypes`, `optimizers`, `families` (of models): everything that it supports. `lacks`: parts
      of models (`Model.special_parts`) that it does not support, and `PACKED_SAMPLES`.
    - `accelerators`: vendors on whose devices it also runs, but for which it is not the default target.
    - `command`: the command that runs a plan.
    - `uneven_dtypes`: dtypes of uneven plans that it runs (empty: none); `runs_mixed_pool_stages`: also with
      stages on two pools.
    - `profile`: the name of its software profile. `software`: fields of a Profile that the target fixes,
      whatever software the plan's numbers come from. `options`: what can be set in this software, without a
      change of the strategy.
    - `since`: flags or keys, and the version of the software that brought each, where it is known.
    """

    name: str
    version: int
    command: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    optimizers: tuple[str, ...]
    families: tuple[str, ...]
    axes: Axes = field(hash=False)
    limits: tuple[Limit, ...]
    profile: str
    software: Mapping[str, bool | str] = field(hash=False)
    accelerators: tuple[str, ...] = ()
    uneven_dtypes: tuple[str, ...] = ()
    runs_mixed_pool_stages: bool = False
    windowed_axes: Axes = field(default_factory=dict, hash=False)
    tower_axes: Axes = field(default_factory=dict, hash=False)
    unfused_axes: Axes = field(default_factory=dict, hash=False)
    default_axes: Axes = field(default_factory=dict, hash=False)
    lacks: tuple[str, ...] = ()
    options: Options = field(default_factory=dict, hash=False)
    searched_options: tuple[str, ...] = ()
    has_empty_ends: bool = False
    modules: tuple[str, ...] = ()
    module_sets: tuple[str, ...] = ()
    unfused_module_sets: tuple[str, ...] = ()
    since: Mapping[str, str] = field(default_factory=dict, hash=False)

    def for_job(self, model: Model, job: Job) -> Target:
        """The target for one model and job: with `windowed_axes` where attention is not plain causal
        attention, with the limits for such models, optimizers and options, with the axes of options, and with
        sizes instead of their names."""
        kinds = ("all", "dense" if model.experts is None else "experts")
        sizes = sizes_of(model, job)
        options = self.values_of(job.profile.options).values()
        of_options = (value.limits for value in options)
        limits = tuple(
            limit.with_sizes(sizes)
            for limit in chain(self.limits, *of_options)
            if limit.models in kinds
            and model.family in (limit.families or (model.family,))
            and job.optimizer in (limit.optimizers or (job.optimizer,))
        )
        axes = (
            self.axes
            if has_plain_causal_attention(model, job.seq_len)
            else {**self.axes, **self.windowed_axes}
        )
        if model.patches:
            axes = {**axes, **self.tower_axes}
        for option in options:
            axes = {**axes, **option.axes}
        sized = {name: tuple(_sized(value, sizes) for value in values) for name, values in axes.items()}
        own = modules_of_layers(kind.operators for kind in model.kinds)
        excluded = {name for option in options for name in option.without_modules}
        modules = tuple(name for name in self.modules if name in own and name not in excluded)
        sets, unfused_sets = (
            tuple(one for one in each if set(names_of(one)) <= set(modules))
            for each in (self.module_sets, self.unfused_module_sets)
        )
        return replace(
            self,
            axes=sized,
            limits=limits,
            modules=modules,
            module_sets=sets,
            unfused_module_sets=unfused_sets,
        )

    def axes_for(self, classes: Iterable[str], requested: Container[str] = ()) -> Axes:
        """Allowed values of fields for a plan on these classes of devices; `requested` fields do not take
        their defaults."""
        own = dict(self.default_axes) if self.knows_devices(classes) or not self.devices else {}
        if self.modules:
            own["recompute_modules"] = (NO_MODULES, *self.module_sets)
        return {**{name: values for name, values in own.items() if name not in requested}, **self.axes}

    def knows_devices(self, classes: Iterable[str]) -> bool:
        """Whether the target knows all of these classes of devices."""
        return set(classes) <= set(self.devices)

    def runs_on(self, vendors: Mapping[str, str]) -> bool:
        """Whether it runs on clusters of these classes of devices, by their vendors: all known by name, or
        all of the vendors in `accelerators`."""
        return self.knows_devices(vendors) or set(vendors.values()) <= set(self.accelerators)

    @property
    def known_devices(self) -> str:
        """The devices that it runs on, in words."""
        vendors = f"devices of {' and '.join(self.accelerators)}" if self.accelerators else ""
        return ", or ".join(filter(None, (", ".join(self.devices), vendors)))

    @property
    def own_profile(self) -> Profile:
        """The software profile of the target, without its options."""
        return self.run_by(PROFILES[self.profile])

    def profile_for(self, job: Job, vendors: Iterable[str]) -> Profile:
        """The software profile of the target for a job on devices of these vendors, with all options at their
        defaults."""
        return self.with_options(self.own_profile, self.default_options(job, vendors))

    def default_options(self, job: Job, vendors: Iterable[str]) -> dict[str, str]:
        """The options that support a job on devices of these vendors, at their defaults."""
        vendors = tuple(vendors)
        fitting = {name: self.values_for(name, job, vendors) for name in self.options}
        return {name: values[0] for name, values in fitting.items() if values}

    def values_for(self, option: str, job: Job, vendors: Iterable[str]) -> tuple[str, ...]:
        """The values of an option that support a job on devices of these vendors, the default first."""
        vendors, values = tuple(vendors), self.options[option]
        return tuple(name for name, own in values.items() if not any(own.unsupported(job, vendors)))

    def value_of(self, option: str, job: Job, vendors: Iterable[str]) -> str:
        """The value of an option that a job has: the default where its profile names none."""
        return job.profile.options.get(option) or self.values_for(option, job, vendors)[0]

    def with_options(self, profile: Profile, chosen: Mapping[str, str]) -> Profile:
        """`profile` with options of this target at these values. Its `options` are those that changed it."""
        found = profile
        for name, value in self.values_of(chosen).items():
            changed = replace(found, **value.profile)
            if changed != found or name in found.options:
                sources = dict.fromkeys(value.profile, value.source) if value.source else {}
                options = {**found.options, name: chosen[name]}
                found = replace(changed, options=options, provenance={**found.provenance, **sources})
        return found

    def values_of(self, chosen: Mapping[str, str]) -> dict[str, OptionValue]:
        """These values of options, of those that the target has."""
        return {
            name: self.options[name][value]
            for name, value in chosen.items()
            if value in self.options.get(name, ())
        }

    def run_by(self, profile: Profile) -> Profile:
        """`profile` with the fields that the target fixes."""
        facts: dict[str, Any] = dict(self.software)
        return replace(profile, **facts)

    def refusals(self, strategy: Strategy) -> Iterator[Refusal]:
        """Every value of `strategy` that the target does not support, field by field."""
        for name, values in self.axes.items():
            found = getattr(strategy, name)
            if found not in values:
                yield Refusal(key=name, found=str(found), allowed=", ".join(map(str, values)))
        refused = self.refused_modules(strategy.recompute, strategy.recompute_modules)
        if refused is not None:
            yield refused
        for limit in self.limits:
            if limit.excludes(strategy):
                found = getattr(strategy, limit.field)
                yield Refusal(key=limit.field, found=str(found), allowed=limit.allowed)

    def refused_modules(self, recompute: str, modules: str) -> Refusal | None:
        """Why the target does not recompute a set of modules: it has no names for them, or it has no own set
        and none is named."""
        allowed = "sets of " + ", ".join(self.modules) if self.modules else "its own set of operators"
        unknown = [name for name in names_of(modules) if name not in self.modules]
        if unknown:
            return Refusal(key="recompute_modules", found="+".join(unknown), allowed=allowed)
        if self.modules and recompute == "selective" and not modules:
            return Refusal(key="recompute", found="selective without recompute_modules", allowed=allowed)
        return None

    def broken_limit(self, strategy: Strategy) -> Limit | None:
        """The first limit that excludes `strategy`."""
        return next((limit for limit in self.limits if limit.excludes(strategy)), None)


def option_values() -> dict[str, tuple[str, ...]]:
    """Every option of some target, with its values."""
    found: dict[str, tuple[str, ...]] = {}
    for target in map(target_of, target_names()):
        for name, values in target.options.items():
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *values)))
    return found


def target_of_options(name: str | None) -> Target:
    """The target whose options a plan for the target of this name has; those of `any` (None) are the newest
    Megatron-LM's."""
    return target_of(NEWEST_MEGATRON_LM.name if name is None or name == ANY else name)


def acting_options(target: str | None, profile: Profile, strategy: Strategy | None) -> dict[str, str]:
    """The options of the software that change how a plan for this target runs, with their values. `strategy`
    is None where stages are not alike; then all of the profile's are meant, as for a target without a
    file."""
    if target not in (None, ANY, *target_names()):
        return dict(profile.options)
    values = target_of_options(target).values_of(profile.options)
    return {
        name: profile.options[name]
        for name, value in values.items()
        if strategy is None or value.acts(strategy)
    }


def target_names() -> tuple[str, ...]:
    """Targets that have a file, in alphabetical order."""
    return tuple(sorted(path.stem for path in _folder().glob("*.json")))


def newest_target(name: str) -> str:
    """The target of this name; the newest version where the name has none; the name itself where there is
    no such target."""
    versions = [known for known in target_names() if name and known.rpartition("-")[0] == name]
    return max(versions, key=version_of, default=name)


def newer_target(name: str) -> str | None:
    """The target whose software `name` is an older version of; None where there is none."""
    stem, _, version = name.rpartition("-")
    known = newest_target(stem)
    is_older = known in target_names() and known != stem and version.replace(".", "").isdigit()
    return known if is_older and version_of(name) < version_of(known) else None


def version_of(name: str) -> tuple[int, ...]:
    """The numbers at the end of a name, or those of a version."""
    return tuple(int(number) for number in name.rpartition("-")[2].split(".") if number.isdigit())


def software_names() -> tuple[str, ...]:
    """Names of software profiles and of the targets that bring one."""
    return tuple(dict.fromkeys((*PROFILES, *target_names())))


def software_of(name: str) -> Profile:
    """The software profile of this name, one of `software_names`."""
    return PROFILES[name] if name in PROFILES else target_of(name).own_profile


@cache
def target_of(name: str) -> Target:
    """The target of this name, one of `target_names`."""
    # The package's own file, so it is read without the checks for users' files.
    return target_from_record(json.loads(_folder().joinpath(f"{name}.json").read_text("utf-8")))


def target_from_record(record: Mapping[str, Any]) -> Target:
    """The target in a capability file (docs/reference/formats.md)."""
    known = ("devices", "dtypes", "optimizers", "families")
    modules = record.get("recompute_modules", {})
    return Target(
        name=record["target"],
        version=record["version"],
        command=record["command"],
        axes={name: tuple(values) for name, values in record["axes"].items()},
        limits=_limits(record["limits"]),
        profile=record.get("profile", NEWEST_MEGATRON_LM.name),
        software=record["software"],
        accelerators=tuple(record.get("accelerators", ())),
        uneven_dtypes=tuple(record.get("uneven", {}).get("dtypes", ())),
        runs_mixed_pool_stages=record.get("uneven", {}).get("mixed_pool_stages", False),
        windowed_axes={name: tuple(values) for name, values in record.get("windowed_axes", {}).items()},
        tower_axes={name: tuple(values) for name, values in record.get("tower_axes", {}).items()},
        unfused_axes={name: tuple(values) for name, values in record.get("unfused_axes", {}).items()},
        default_axes={name: tuple(values) for name, values in record.get("default_axes", {}).items()},
        lacks=tuple(record.get("lacks", ())),
        options={
            name: {value: _option_value(own) for value, own in _with_sets(values).items()}
            for name, values in record.get("options", {}).items()
        },
        searched_options=tuple(record.get("searched_options", ())),
        has_empty_ends=record.get("empty_ends", False),
        modules=tuple(modules.get("names", ())),
        module_sets=tuple(modules.get("searched", ())),
        unfused_module_sets=tuple(modules.get("searched_unfused", ())),
        since={
            flag: version
            for version, flags in record.get("since", {}).get("flags", {}).items()
            for flag in flags
        },
        **{name: tuple(record[name]) for name in known},
    )


def _limits(records: Iterable[Mapping[str, Any]]) -> tuple[Limit, ...]:
    return tuple(
        Limit(
            field=limit["field"],
            allowed=limit["allowed"],
            models=limit.get("models", "all"),
            families=tuple(limit.get("families", ())),
            optimizers=tuple(limit.get("optimizers", ())),
            where=_conditions(limit["where"]),
        )
        for limit in records
    )


def _with_sets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The records of an option's values, with one for each set of names in the place of that for sets. Such a
    record has the names (`sets_of`), a name that another one `needs`, and recomputed modules that a name
    `excludes`."""
    found: dict[str, Any] = {}
    for value, record in values.items():
        names: Sequence[str] = record.get("sets_of", ())
        if not names:
            found[value] = record
        for size in range(1, len(names) + 1):
            for own in combinations(names, size):
                if all(other in own for name, other in record["needs"].items() if name in own):
                    found["+".join(own)] = _of_set(record, own)
    return found


def _of_set(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The record of one set of names."""
    profile = {field: "+".join(names) for field in record["profile"]}
    excluded = dict.fromkeys(each for name in names for each in record["excludes"].get(name, ()))
    flags = [flag.replace("NAMES", " ".join(names)) for flag in record["flags"]]
    return {**record, "profile": profile, "without_modules": list(excluded), "flags": flags}


def _option_value(record: Mapping[str, Any]) -> OptionValue:
    return OptionValue(
        profile={
            name: tuple(found) if isinstance(found, list) else found
            for name, found in record["profile"].items()
        },
        source=record.get("source", ""),
        acts_on=_conditions(record.get("acts_on", {})),
        limits=_limits(record.get("limits", ())),
        dtypes=tuple(record.get("dtypes", ())),
        optimizers=tuple(record.get("optimizers", ())),
        accelerators=tuple(record.get("accelerators", ())),
        within_node=record.get("within_node", False),
        flags=tuple(record.get("flags", ())),
        axes={name: tuple(allowed) for name, allowed in record.get("axes", {}).items()},
        without_modules=tuple(record.get("without_modules", ())),
    )


def _conditions(record: Mapping[str, Any]) -> tuple[Condition, ...]:
    return tuple(_condition(name, spec) for name, spec in record.items())


def _condition(name: str, spec: Any) -> Condition:
    left = _product(name)
    if isinstance(spec, list):
        return Condition(left=left, values=tuple(spec))
    if "has" in spec:
        sets = FIELD_VALUES[name]
        return Condition(left=left, values=tuple(one for one in sets if spec["has"] in str(one).split("+")))
    products: dict[str, Any] = {key: _product(text) for key, text in spec.items() if key != "above"}
    return Condition(left=left, above=spec.get("above"), **products)


def _product(text: str) -> Product:
    factors = text.split("*")
    return Product(
        fields=tuple(factor for factor in factors if not factor.isdigit()),
        times=prod(int(factor) for factor in factors if factor.isdigit()),
    )


def _sized(value: Value, sizes: Mapping[str, int]) -> Value:
    """The size of this name, else the value itself."""
    return sizes.get(value, value) if isinstance(value, str) else value


def sizes_of(model: Model, job: Job) -> Mapping[str, int]:
    """The sizes of a model and a job that conditions and axes may name; `tied` is 1 where the embedding and
    the output share their weight, else 0."""
    experts = 1 if model.experts is None else model.experts.experts
    return {
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "vocab": model.vocab,
        "hidden": model.hidden,
        "experts": experts,
        "tied": int(model.tied_embeddings),
        "seq_len": job.seq_len,
        "global_batch_size": job.global_batch_size,
    }


def _folder() -> Path:
    return Path(__file__).with_name("data") / "targets"
