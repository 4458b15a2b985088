"""Strategies near a given one: `predicted`, its result whether it fits or not, and `changes_of`, the best
changes of one or two of its choices with all others kept.

A choice is a flag of the user: degrees, micro-batch size, recomputation, sharded states, offload. Fields that
follow from it are not kept: data parallelism takes the devices that are left, and a named ZeRO stage stays
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from shardwise.cost import Problem, peaks_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.plans import Result, Value
from shardwise.search.infeasibility import legal_reason
from shardwise.search.result import result_of
from shardwise.search.space import divisors
from shardwise.search.step_times import step_times_s
from shardwise.strategy import (
    OFFLOADS,
    RULES,
    SCHEDULES,
    Strategy,
    StrategyTable,
    Target,
    complete,
    even_ends,
    first_broken,
    largest_stage,
)

Choices = Mapping[str, Value]
"""Fields as `complete` takes them: what a user chooses."""

LARGEST_TP = 64

MOST_COUNTS = 12
"""Most numbers of recomputed layers that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Other values of one or two `choices` of a strategy: the fastest `strategy` with them that fits, and its
    step time in seconds."""

    choices: tuple[str, ...]
    strategy: Strategy
    step_time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The best change of each choice, and of pairs of them, fastest first."""

    singles: tuple[Change, ...]
    pairs: tuple[Change, ...]


def predicted(problem: Problem, strategy: Strategy) -> Result:
    """The result of a strategy, whether it fits or not. Raises Infeasible, with the reason, if it is
    illegal."""
    reason, text = legal_reason(problem, strategy)
    if reason is not None:
        raise Infeasible(text, reasons={reason: 1})
    return result_of(problem, strategy)


def fits(problem: Problem, strategy: Strategy) -> bool:
    """Whether a legal strategy fits into the memory of devices and hosts."""
    return bool(_fitting(problem, StrategyTable.of([strategy]))[0])


def changes_of(problem: Problem, strategy: Strategy, target: Target) -> Changes:
    """The best changes of one and of two choices of `strategy`, legal or not, among the strategies that fit
    and that `target` runs. What the target does not run of the strategy itself may stay."""
    near = _Neighbourhood(problem, strategy, target.for_job(problem.model, problem.job))
    options = near.options()
    singles = near.best({(name,): list(values) for name, values in options.items()})
    possible = {one.choices[0] for one in singles}
    pairs = near.best(
        {
            (first, second): [{**one, **other} for one, other in product(options[first], options[second])]
            for first, second in combinations(options, 2)
            if {first, second} & possible or not possible
        }
    )
    return Changes(singles=tuple(singles), pairs=tuple(pairs))


@dataclass(frozen=True, slots=True)
class _Neighbourhood:
    problem: Problem
    strategy: Strategy
    target: Target

    def options(self) -> dict[str, list[Choices]]:
        """Other values of each choice, where the target has any."""
        found = {name: self._without_current(values) for name, values in self._all_options()}
        return {name: values for name, values in found.items() if values}

    def _without_current(self, values: Iterable[Choices]) -> list[Choices]:
        def is_current(choices: Choices) -> bool:
            return all(getattr(self.strategy, name, None) == value for name, value in choices.items())

        return [choices for choices in values if not is_current(choices) and self._is_supported(choices)]

    def _is_supported(self, choices: Choices) -> bool:
        axes = self.target.axes
        return all(
            value in axes.get(name, (value,)) or value == getattr(self.strategy, name, None)
            for name, value in choices.items()
        )

    def _all_options(self) -> Iterator[tuple[str, Iterable[Choices]]]:
        s, model, devices = self.strategy, self.problem.model, self.problem.cluster.devices
        batch = self.problem.job.global_batch_size
        degrees = divisors(devices)
        yield (
            "micro_batch_size",
            ({"micro_batch_size": size} for size in divisors(batch) if size <= LARGEST_TP),
        )
        yield (
            "recompute",
            [
                {"recompute": "none"},
                *self._selective(),
                *self._full(),
            ],
        )
        yield "zero_stage", self._states()
        yield "tp", ({"tp": tp} for tp in degrees if tp <= LARGEST_TP)
        yield "pp", ({"pp": pp} for pp in degrees if pp <= model.layers)
        yield "cp", ({"cp": cp} for cp in degrees)
        chunks = divisors(model.layers // s.pp) if s.pp > 1 and model.layers % s.pp == 0 else ()
        yield "vpp", ({"vpp": vpp, "schedule": "interleaved_1f1b" if vpp > 1 else "1f1b"} for vpp in chunks)
        one = [name for name in SCHEDULES if s.pp > 1 and name != "interleaved_1f1b"]
        yield "schedule", ({"schedule": name} for name in one)
        experts = 1 if model.experts is None else model.experts.experts
        yield "ep", ({"ep": ep} for ep in divisors(experts))
        yield "offload", ({"offload": name} for name in OFFLOADS)
        yield "sequence_parallel", ({"sequence_parallel": is_on} for is_on in (False, True) if s.tp > 1)

    def _selective(self) -> Iterator[Choices]:
        """Selective recomputation: of the target's sets of named modules, or of its own set."""
        if not self.target.modules:
            yield {"recompute": "selective"}
        for modules in self.target.module_sets:
            yield {"recompute": "selective", "recompute_modules": modules}

    def _full(self) -> Iterator[Choices]:
        """Full recomputation of numbers of layers of a stage."""
        s, layers = self.strategy, self.problem.model.layers
        most = int(largest_stage(layers, s.pp * s.vpp, s.first_stage_layers, s.last_stage_layers))
        for count in sorted({round(most * place / MOST_COUNTS) for place in range(1, MOST_COUNTS + 1)} - {0}):
            yield {"recompute": "full", "recompute_layers": count}

    def _states(self) -> Iterator[Choices]:
        """Named ZeRO stages over all ranks that hold copies."""
        s = self.strategy
        copies = s.dp * s.cp
        for stage in range(4):
            shards = [copies if stage >= least else 1 for least in (3, 2, 1)]
            if shards != [s.param_shard, s.grad_shard, s.optim_shard]:
                yield {"zero_stage": stage}

    def best(self, sets: Mapping[tuple[str, ...], Sequence[Choices]]) -> list[Change]:
        """For each set of changed choices, the fastest strategy that fits, fastest first."""
        found = [(names, one) for names, many in sets.items() for one in self._strategies(names, many)]
        if not found:
            return []
        table = StrategyTable.of([one for _, one in found])
        is_legal = first_broken(table, self.problem.limits, RULES) < 0
        rows = np.flatnonzero(is_legal & ~self._is_refused(table))
        if not rows.size:
            return []
        rows = rows[_fitting(self.problem, table.take(rows))]
        if not rows.size:
            return []
        times = step_times_s(self.problem, table.take(rows))
        best: dict[tuple[str, ...], Change] = {}
        for row, time_s in zip(rows, times.tolist(), strict=True):
            names, strategy = found[row]
            if names not in best or time_s < best[names].step_time_s:
                best[names] = Change(choices=names, strategy=strategy, step_time_s=time_s)
        return sorted(best.values(), key=lambda one: one.step_time_s)

    def _is_refused(self, table: StrategyTable) -> Any:
        """Rows that the target does not run; limits that the strategy itself exceeds do not count."""
        refused = np.zeros(len(table), dtype=bool)
        for limit in self.target.limits:
            if not limit.excludes(self.strategy):
                refused |= limit.excluded(table)
        return refused

    def _strategies(self, names: tuple[str, ...], many: Iterable[Choices]) -> Iterator[Strategy]:
        others = _choices_of(self.strategy, self.problem)
        for group in names:
            for name in _FREED.get(group, (group,)):
                others.pop(name, None)
        for choices in many:
            found = self._completed({**others, **choices})
            if found is not None and self._keeps_axes(found):
                yield found

    def _keeps_axes(self, found: Strategy) -> bool:
        return all(
            getattr(found, name) in (*values, getattr(self.strategy, name))
            for name, values in self.target.axes.items()
        )

    def _completed(self, choices: dict[str, Value]) -> Strategy | None:
        experts = self.problem.model.experts
        if choices.get("tp", 1) == 1:
            choices["sequence_parallel"] = False
        elif "sequence_parallel" not in choices:
            choices["sequence_parallel"] = True in self.target.axes.get("sequence_parallel", (True,))
        if choices.get("cp", 1) == 1:
            choices.pop("cp_kind", None)
        if choices.get("pp", 1) == 1:
            choices.pop("schedule", None)
            choices.pop("vpp", None)
        try:
            return complete(
                choices,
                devices=self.problem.cluster.devices,
                layers=self.problem.model.layers,
                experts=None if experts is None else experts.experts,
                global_batch_size=self.problem.job.global_batch_size,
            )
        except ConfigError:
            return None


_FREED: Mapping[str, tuple[str, ...]] = {
    "recompute": ("recompute", "recompute_modules", "recompute_layers"),
    "zero_stage": ("zero_stage", "dp_replicate", "param_shard", "grad_shard", "optim_shard"),
    "tp": ("tp", "sequence_parallel"),
    "pp": ("pp", "first_stage_layers", "last_stage_layers"),
    "vpp": ("vpp", "schedule", "first_stage_layers", "last_stage_layers"),
    "schedule": ("vpp", "schedule", "first_stage_layers", "last_stage_layers"),
    "ep": ("ep", "etp"),
}
"""The choices that a change of one choice does not keep."""


def _choices_of(strategy: Strategy, problem: Problem) -> dict[str, Value]:
    """What a user chose of a strategy. Values that follow from others are left out: an even split, all layers
    recomputed, states over all ranks, experts with the tensor parallelism of dense layers."""
    s, layers = strategy, problem.model.layers
    plain = ("tp", "pp", "cp", "cp_kind", "vpp", "schedule", "ep", "micro_batch_size", "recompute", "offload",
             "axis_order")  # fmt: skip
    found: dict[str, Value] = {name: getattr(s, name) for name in plain}
    if s.tp > 1:
        found["sequence_parallel"] = s.sequence_parallel
    if s.etp != s.tp:
        found["etp"] = s.etp
    stages, first, last = s.pp * s.vpp, s.first_stage_layers, s.last_stage_layers
    if (first, last) != tuple(int(end) for end in even_ends(layers, stages)):
        found |= {"first_stage_layers": first, "last_stage_layers": last}
    if s.recompute == "full" and s.recompute_layers != largest_stage(layers, stages, first, last):
        found["recompute_layers"] = s.recompute_layers
    return found | _states_of(s)


def _states_of(s: Strategy) -> dict[str, Value]:
    """The ZeRO stage, with the number of replicas where there are several; else the sharding degrees."""
    degree = s.optim_shard
    shards = (s.param_shard, s.grad_shard, s.optim_shard)
    for stage in range(4):
        if shards == tuple(degree if stage >= least else 1 for least in (3, 2, 1)):
            copies = s.dp * s.cp
            several = stage > 0 and 1 < degree < copies
            return {"zero_stage": stage, **({"dp_replicate": copies // degree} if several else {})}
    return dict(zip(("param_shard", "grad_shard", "optim_shard"), shards, strict=True))


def _fitting(problem: Problem, table: StrategyTable) -> Any:
    """Rows that fit into the memory of devices and hosts."""
    peaks = peaks_of(problem, table)
    return (np.asarray(peaks.device_bytes) <= problem.usable_bytes) & (
        np.asarray(peaks.host_bytes) <= problem.host_bytes_per_device
    )
