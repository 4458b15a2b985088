"""From a measured row to what the cost model prices: model, cluster, job, software, and strategies.

Blank fields are filled by stated rules; what the source leaves open and `plan` would choose (micro-batch,
recomputation, sharding) becomes several candidates, of which the prediction takes the fastest that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from shardwise.accuracy.devices import counted_devices, device_named
from shardwise.accuracy.known import (
    bytes_per_s_of_nodes,
    dtype_named,
    inter_node_bytes_per_s,
    profile_named,
)
from shardwise.accuracy.layouts import layouts_of
from shardwise.accuracy.rows import Fault, Row
from shardwise.accuracy.sizes import SIZES, model_of
from shardwise.cluster import Cluster, Device, load_cluster
from shardwise.cost import Problem, bind
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.model import Model
from shardwise.search import default_job
from shardwise.strategy import PROFILES, Job, Optimizer, Profile, StrategyTable

MAX_DEVICES: Final = 1_000_000
"""Devices beyond which a row is not evaluated."""

IMBALANCE: Final = 1.1
"""Load of the busiest expert over the mean, where the source does not say that it was balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedDevices:
    """A run on unequal devices: for each kind the problem in which all nodes are of it, and of every node, in
    the order of ranks, which kind it is."""

    problems: tuple[Problem, ...]
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row made ready: its problem, the strategies that it may have run, and what was assumed.

    Rows that share model, cluster, job and software share one problem. Of a run on unequal devices it is that
    of the first kind alone, and `mixed` has all of them.
    """

    row: Row
    problem: Problem
    strategies: StrategyTable
    assumed: tuple[str, ...]
    mixed: MixedDevices | None = None


Assumed = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaseBuilder:
    """Makes rows ready; what several rows have in common is made once."""

    _made: dict[Hashable, Any] = field(default_factory=dict)

    def of(self, row: Row) -> Case:
        """The case of a row. ConfigError, the reason to skip it, where it names something unknown, is not
        modelled, or contradicts itself."""
        _refuse(row)
        kinds = counted_devices(row.gpu)
        if kinds:
            return self._mixed_case(row, kinds)
        profile, of_profile = _profile(row)
        device, of_device = self._once(("device", row.gpu), lambda: device_named(row.gpu))
        sizes = tuple(getattr(row, name) for name in SIZES)
        model, of_model = self._once(sizes, lambda: model_of(row))
        place = (row.gpu, row.gpus, row.gpus_per_node, row.interconnect)
        cluster, of_cluster = self._once(place, lambda: _cluster(row, device))
        job, of_job = _job(row, model, cluster, profile)
        problem = self._once(("problem", sizes, place, job), lambda: bind(model, cluster, job))
        strategies, of_strategy = layouts_of(row, problem)
        assumed = (*of_profile, *of_device, *of_model, *of_cluster, *of_job, *of_strategy)
        return Case(row=row, problem=problem, strategies=strategies, assumed=assumed)

    def _mixed_case(self, row: Row, kinds: tuple[tuple[str, int], ...]) -> Case:
        """The case of a row with several kinds of devices: nodes in the order in which the row names their
        kinds, all that leaves a node at the pace of the worst connected."""
        nodes = _nodes_of(row, kinds)
        names = [name for name, _ in kinds]
        rates = bytes_per_s_of_nodes(row.interconnect, names)
        interconnects = [row.interconnect] * len(kinds) if rates is None else _at_one_pace(names, rates)
        cases = [
            self.of(replace(row, gpu=name, interconnect=link))
            for name, link in zip(names, interconnects, strict=True)
        ]
        problems = tuple(case.problem for case in cases)
        if len({problem.job.dtype for problem in problems}) > 1:
            raise ConfigError("is not given, and its devices have none in common", key="dtype")
        assumed = list(dict.fromkeys(text for case in cases for text in case.assumed))
        if rates is not None:
            assumed.append("network: every node as the worst connected, since gradients join all")
        return Case(
            row=row,
            problem=problems[0],
            strategies=cases[0].strategies,
            assumed=(*assumed, "ranks fill the nodes in the order of gpu"),
            mixed=MixedDevices(problems=problems, nodes=nodes),
        )

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` gives, or the ConfigError that it raises, the same for the same key."""
        if key not in self._made:
            try:
                self._made[key] = make()
            except ConfigError as error:
                self._made[key] = error
        made = self._made[key]
        if isinstance(made, ConfigError):
            raise made.within()
        return made


def cases_of(rows: Iterable[Row]) -> tuple[list[Case], list[Fault]]:
    """The cases of all rows that can be used, and why the others cannot."""
    ready = CaseBuilder()
    cases: list[Case] = []
    faults: list[Fault] = []
    for row in rows:
        try:
            cases.append(ready.of(row))
        except ConfigError as error:
            faults.append(fault_of(row, error))
    return cases, faults


def fault_of(row: Row, error: ConfigError) -> Fault:
    """Why a row is skipped, as its error says."""
    reason = ": ".join(part for part in (error.key, error.message) if part)
    allowed = f"; allowed: {error.allowed}" if error.allowed else ""
    return Fault(
        line=row.line, id=row.id, reason=reason, found=f"{error.found}{allowed}" if error.found else ""
    )


def _refuse(row: Row) -> None:
    """ConfigError for what the model of a training step leaves out, and for rows that do not say what is
    needed."""
    if "lora" in (row.model_name + row.notes).casefold():
        raise ConfigError("LoRA is not modelled (only a part of the weights is trained)", key="model_name")
    for name in ("gpu", "framework", "gpus", "global_batch", "seq_len"):
        if not getattr(row, name):
            raise ConfigError("is not given", key=name)
    if int(row.gpus or 0) > MAX_DEVICES:
        raise ConfigError(
            "is too many devices", key="gpus", found=str(row.gpus), allowed=f"at most {MAX_DEVICES}"
        )


def _nodes_of(row: Row, kinds: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """The kind of every node. ConfigError where the kinds do not fill whole nodes, or not all devices."""
    counts = [count for _, count in kinds]
    each = row.gpus_per_node
    if each is None or sum(counts) != row.gpus or any(count % each or not count for count in counts):
        raise ConfigError(
            "do not fill nodes", key="gpus",
            found=f"{' + '.join(map(str, counts))} of {row.gpus}, {each or 'not given'} per node",
        )  # fmt: skip
    return tuple(kind for kind, count in enumerate(counts) for _ in range(count // each))


def _at_one_pace(names: Sequence[str], rates: Sequence[float]) -> list[str]:
    """Links of nodes of these devices over which collectives of all of them go at the pace of the slowest:
    devices reach different fractions of their cards, so the slowest is not who has the least card."""
    fractions = [device_named(name)[0].efficiency.scale_out.fraction for name in names]
    slowest = min(part * rate for part, rate in zip(fractions, rates, strict=True))
    return [f"{slowest / part * 8e-9:.6f} Gb/s inter-node" for part in fractions]


def _profile(row: Row) -> tuple[Profile, Assumed]:
    name = profile_named(row.framework, row.year, row.notes)
    if name is None:
        raise ConfigError(
            "is not a known framework",
            key="framework",
            found=short_repr(row.framework),
            allowed=", ".join(PROFILES),
        )
    profile = PROFILES[name]
    if "overlap off" in row.notes.casefold():
        return profile.without_overlap(), ("communication overlap off, as the notes say",)
    return profile, ()


def _cluster(row: Row, device: Device) -> tuple[Cluster, Assumed]:
    devices = int(row.gpus or 0)
    assumed = []
    per_node = row.gpus_per_node
    if per_node is None:
        per_node = device.devices_per_node
        assumed.append(f"gpus_per_node: {per_node}, as is customary")
    per_node = min(per_node, devices)
    if devices % per_node:
        raise ConfigError("do not fill nodes", key="gpus", found=f"{devices}, {per_node} per node")
    rate = inter_node_bytes_per_s(row.interconnect)
    nodes = devices // per_node
    inter_node = None
    if rate is not None:
        inter_node = f"{device.nics_per_node}x{rate * 8e-9 / device.nics_per_node:.6f}Gb/s"
    elif nodes > 1:
        assumed.append(f"network: {device.scale_out_name}, as is customary")
    cluster = load_cluster(f"{nodes}x{per_node}x{device.name}", inter_node=inter_node)
    return replace(cluster, classes={device.name: device}), tuple(assumed)


def _job(row: Row, model: Model, cluster: Cluster, profile: Profile) -> tuple[Job, Assumed]:
    dtype = dtype_named(row.dtype)
    if dtype is None and row.dtype:
        raise ConfigError("is not a known dtype", key="dtype", found=short_repr(row.dtype))
    assumed = []
    imbalance = 1.0 if "balanced" in row.notes.casefold() else IMBALANCE
    if model.experts is not None and imbalance > 1.0:
        assumed.append(f"expert_imbalance: {imbalance}")
    job = default_job(
        model,
        cluster,
        seq_len=row.seq_len,
        global_batch_size=int(row.global_batch or 0),
        dtype=dtype,
        optimizer=_optimizer(row.optimizer),
        expert_imbalance=imbalance,
    )
    if dtype is None:
        assumed.append(f"dtype: {job.dtype}")
    return replace(job, profile=profile), tuple(assumed)


def _optimizer(text: str) -> Optimizer:
    """The optimizer within a text; AdamW where it names none that is known."""
    folded = text.casefold()
    names: tuple[Optimizer, ...] = ("muon", "adafactor", "sgd")
    return next((name for name in names if name in folded), "adamw")
