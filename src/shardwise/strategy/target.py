"""What a target, the software that is to carry out a plan, cannot do: data, read by the search and by the
target itself where it is our own runtime."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.strategy.profile import Profile
from shardwise.strategy.strategy import Strategy
from shardwise.strategy.table import NAMES

Value = int | str | bool
Axes = Mapping[str, tuple[Value, ...]]
"""For some fields, the values that they may have."""

ANY = "any"
"""The target that can do everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A field has one of `values`; or, where there are none, is more than `above`, and less than the field
    `below` where that is named."""

    field: str
    values: tuple[Value, ...] = ()
    above: int = 0
    below: str | None = None

    def holds(self, strategy: Strategy) -> bool:
        found = getattr(strategy, self.field)
        if self.values:
            return found in self.values
        return found > self.above and (self.below is None or found < getattr(strategy, self.below))

    def inside(self, degrees: tuple[int, ...]) -> Axes:
        """Where the condition may hold, among these `degrees`."""
        if self.values:
            return {self.field: self.values}
        return {self.field: tuple(degree for degree in degrees if degree > self.above)}

    def outside(self, degrees: tuple[int, ...]) -> Iterator[Axes]:
        """Disjoint parts of the space that together are all that the condition does not hold for. (No chain
        of sharding degrees falls, so what is not less than `below` equals it.)"""
        if self.values:
            yield {self.field: tuple(name for name in NAMES[self.field] if name not in self.values)}
            return
        yield {self.field: tuple(degree for degree in degrees if degree <= self.above)}
        if self.below is not None:
            for degree in self.inside(degrees)[self.field]:
                yield {self.field: (degree,), self.below: (degree,)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Strategies that all of the conditions hold for are beyond the target, by the value of `field`; it does
    what is `allowed`."""

    field: str
    where: tuple[Condition, ...]
    allowed: str

    def is_beyond(self, strategy: Strategy) -> bool:
        return all(condition.holds(strategy) for condition in self.where)

    def parts_left(self, degrees: tuple[int, ...]) -> Iterator[Axes]:
        """Disjoint parts of the space that together are all that is not beyond the limit."""
        held: Axes = {}
        for condition in self.where:
            for part in condition.outside(degrees):
                yield {**held, **part}
            held = {**held, **condition.inside(degrees)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What is in the way: a value of a field, and what the target does instead."""

    key: str
    found: str
    allowed: str

    def __str__(self) -> str:
        return f"{self.key}={self.found} (it runs {self.allowed})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What one version of a target can do.

    `axes` are fields of which it does some values only, `windowed_axes` those of models whose attention looks
    through windows of the sequence, caps its scores or has sinks, `limits` what it does not do together. Of
    the fields of `unasked_axes` plans for clusters of `devices` have these values, where no others are asked
    for. `devices`, `dtypes`, `optimizers` and model `families` are all that it knows, `lacks` parts of models
    (`Model.special_parts`) that it does not; on devices of the vendors of
    `accelerators` it runs too, but is not what a plan for them is made for unless it is asked for. `command`
    carries out a plan. Uneven plans it carries out in `uneven_dtypes`, in none where that is empty;
    `runs_braids`: also those with stages on two pools. `software` are fields of a Profile that are so here,
    whatever software the numbers of a plan are from.
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
    software: Mapping[str, bool] = field(hash=False)
    accelerators: tuple[str, ...] = ()
    uneven_dtypes: tuple[str, ...] = ()
    runs_braids: bool = False
    windowed_axes: Axes = field(default_factory=dict, hash=False)
    unasked_axes: Axes = field(default_factory=dict, hash=False)
    lacks: tuple[str, ...] = ()

    def for_scores(self, are_plain: bool) -> Target:
        """What it can do with a model whose attention has plain scores, or with one of `windowed_axes`."""
        return self if are_plain else replace(self, axes={**self.axes, **self.windowed_axes})

    def axes_for(self, classes: Iterable[str], asked: Container[str] = ()) -> Axes:
        """Values of fields among which a plan for a cluster of these classes of devices is looked for, where
        the fields `asked` for are up to the question."""
        own = self.unasked_axes if self.knows_devices(classes) else {}
        return {**{name: values for name, values in own.items() if name not in asked}, **self.axes}

    def knows_devices(self, classes: Iterable[str]) -> bool:
        """Whether it runs on clusters of these classes of devices."""
        return set(classes) <= set(self.devices)

    def runs_on(self, vendors: Mapping[str, str]) -> bool:
        """Whether it runs on clusters of these classes of devices, by their vendors: of those it knows by
        name alone, or of those vendors alone."""
        return self.knows_devices(vendors) or set(vendors.values()) <= set(self.accelerators)

    @property
    def known_devices(self) -> str:
        """What `runs_on`, in words."""
        vendors = f"devices of {' and '.join(self.accelerators)}" if self.accelerators else ""
        return ", or ".join(filter(None, (", ".join(self.devices), vendors)))

    def run_by(self, profile: Profile) -> Profile:
        """`profile` with what the target does in its own way."""
        facts: dict[str, Any] = dict(self.software)
        return replace(profile, **facts)

    def refusals(self, strategy: Strategy) -> Iterator[Refusal]:
        """All that is in the way of `strategy`, field by field."""
        for name, values in self.axes.items():
            found = getattr(strategy, name)
            if found not in values:
                yield Refusal(key=name, found=str(found), allowed=", ".join(map(str, values)))
        for limit in self.limits:
            if limit.is_beyond(strategy):
                found = getattr(strategy, limit.field)
                yield Refusal(key=limit.field, found=str(found), allowed=limit.allowed)

    def broken_limit(self, strategy: Strategy) -> Limit | None:
        """The first limit that `strategy` is beyond."""
        return next((limit for limit in self.limits if limit.is_beyond(strategy)), None)


def target_names() -> tuple[str, ...]:
    """Targets that have a file, in alphabetical order."""
    return tuple(sorted(path.stem for path in _folder().glob("*.json")))


@cache
def target_of(name: str) -> Target:
    """The target of this name, one of `target_names`."""
    # The package's own file, so read without the checks that users' files need.
    return target_from_record(json.loads(_folder().joinpath(f"{name}.json").read_text("utf-8")))


def target_from_record(record: Mapping[str, Any]) -> Target:
    """The target that a capability file says (docs/formats.md)."""
    known = ("devices", "dtypes", "optimizers", "families")
    return Target(
        name=record["target"],
        version=record["version"],
        command=record["command"],
        axes={name: tuple(values) for name, values in record["axes"].items()},
        limits=tuple(
            Limit(
                field=limit["field"],
                allowed=limit["allowed"],
                where=tuple(_condition(name, said) for name, said in limit["where"].items()),
            )
            for limit in record["limits"]
        ),
        software=record["software"],
        accelerators=tuple(record.get("accelerators", ())),
        uneven_dtypes=tuple(record.get("uneven", {}).get("dtypes", ())),
        runs_braids=record.get("uneven", {}).get("braids", False),
        windowed_axes={name: tuple(values) for name, values in record.get("windowed_axes", {}).items()},
        unasked_axes={name: tuple(values) for name, values in record.get("unasked_axes", {}).items()},
        lacks=tuple(record.get("lacks", ())),
        **{name: tuple(record[name]) for name in known},
    )


def _condition(name: str, said: Any) -> Condition:
    if isinstance(said, list):
        return Condition(field=name, values=tuple(said))
    return Condition(field=name, above=said["above"], below=said.get("below"))


def _folder() -> Path:
    return Path(__file__).with_name("data") / "targets"
