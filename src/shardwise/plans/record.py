"""Records of an answer: a `Result` (a layout with its prediction), its `Certificate`, and the `Answer` of a
search.

A layout has pipelines of stages. Of a uniform strategy it is one pipeline whose stages are alike; of an
uneven plan it is pipelines that differ; of an operator graph it is one pipeline whose stages have a layout of
their operators. `TraceChoice` records how a plan was chosen for a trace of events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

import numpy as np

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.graph import GraphLayout, StagedLayout
from shardwise.inputs import Fields, short_repr
from shardwise.strategy import Job, Strategy

PlanKind = Literal["uniform", "uneven", "graph"]
"""A plan of one strategy, a plan whose stages or pipelines differ, or a plan of an operator graph."""

OBJECTIVES = ("time", "memory", "devices", "cost")
"""What a plan minimises: step time, memory, number of devices, or money per step."""

UNEVEN_SPACE = "uneven"
"""The space of a certificate whose candidates are pools, micro-batch sizes and numbers of pipelines."""

PROVEN_GAP = 1e-12
"""Largest relative gap with which a step time counts as proven optimal (rounding errors)."""

SHORTEST_STEP_S = 1e-30
"""Shortest step time in seconds that a plan file may have."""

Value = int | str | bool
"""A value of a strategy field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """A part of a mixed-pool stage: `tp` devices of one node, which hold all layers of the stage and process
    `rows` of every micro-batch. `ranks` is as in `Stage`."""

    ranks: str
    device_class: str
    tp: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline rank: `devices` of `device_class`, arranged as tp x cp x dp, with `layers` decoder layers.

    `ranks` lists the global ranks as ranges (`0-7,16-23`). `layers` has one count per chunk (virtual stage)
    of the rank, in order; of an operator graph, its number of blocks, repetitions counted. A mixed-pool stage
    has `parts`; then `device_class` names both pools, `tp` is that of the first part, and `dp` is the number
    of parts. `recompute` is the recomputation of the stage's layers; that of a uniform strategy is in its
    fields. `operators` is the layout of the stage's operators; then tp and dp are 1.
    """

    devices: int
    ranks: str
    device_class: str
    tp: int
    dp: int
    layers: tuple[int, ...]
    share: float
    parts: tuple[StagePart, ...] = ()
    cp: int = 1
    recompute: str = "none"
    operators: GraphLayout | None = None

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The ranks, in the order of `ranks`. Raises ConfigError if it is not a list of ranges."""
        return rank_numbers(self.ranks)


def rank_numbers(ranges: str) -> tuple[int, ...]:
    """The ranks of `0-7,16-23`, in order. Raises ConfigError if it is not a list of ranges."""
    found: list[int] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (_is_rank(first) and _is_rank(last) and int(first) <= int(last)):
            raise ConfigError(
                "is not a list of rank ranges", key="best.layout", found=ranges[:40],
                allowed="ranges such as 0-7,16-23",
            )  # fmt: skip
        found += range(int(first), int(last) + 1)
    return tuple(found)


def as_ranges(ranks: Sequence[int]) -> str:
    """`0-7,16-23` for ascending ranks."""
    numbers = np.asarray(ranks)
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    starts = numbers[np.concatenate([[0], breaks + 1])]
    stops = numbers[np.concatenate([breaks, [len(numbers) - 1]])]
    return ",".join(
        str(a) if a == b else f"{a}-{b}" for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
    )


def _is_rank(text: str) -> bool:
    """Whether it can be the number of a device: at most seven digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline by its stages in order. It takes `rows` sequences (or samples) of a step, in `microbatches`
    of `micro_batch_size` on each replica, and `makespan_s` seconds, the end of the step included."""

    stages: tuple[Stage, ...]
    micro_batch_size: int
    microbatches: int
    rows: int
    makespan_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pipelines that run in parallel, all with the same schedule. A uniform strategy is one pipeline with
    equal stages, whose share is 1."""

    pipelines: tuple[Pipeline, ...]
    schedule: str = "1f1b"

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of all pipelines."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    def with_times(self, makespans_s: Sequence[float]) -> Layout:
        """The layout with the makespan of each pipeline, in seconds."""
        return replace(
            self,
            pipelines=tuple(
                replace(pipeline, makespan_s=time_s)
                for pipeline, time_s in zip(self.pipelines, makespans_s, strict=True)
            ),
        )

    @property
    def operators(self) -> GraphLayout | None:
        """The layout of all operators of a graph; None for a layout of layers."""
        found = [stage.operators for stage in self.stages if stage.operators is not None]
        if len(found) < 2:
            return found[0] if found else None
        return StagedLayout(
            ranks=found[0].ranks,
            blocks=tuple(block for layout in found for block in layout.blocks),
            cuts=tuple(accumulate(len(layout.blocks) for layout in found[:-1])),
            microbatches=self.pipelines[0].microbatches,
            schedule=self.schedule,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes on the tightest rank: allocated tensors, reserved by the allocator, used on the device, and the
    capacity that the driver reports."""

    allocated: float
    reserved: float
    device: float
    capacity: float

    @property
    def parts(self) -> dict[str, float]:
        """The device bytes as a sum of named parts."""
        return {
            "allocated": self.allocated,
            "fragmentation": self.reserved - self.allocated,
            "context_and_communicators": self.device - self.reserved,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A layout with its predicted step time and memory.

    `fields` is the strategy if all stages are alike, else None. `breakdown` (seconds of the slowest pipeline)
    sums to the step time; `memory` (bytes on rank `tightest_rank`) sums to the device bytes. `pools` are
    those on which an uneven plan is estimated, empty for others. If its pipelines are `is_alike`, they have
    the same stages, whose replicas communicate over the tiers of their own pool. Operator graphs have no
    throughput in tokens or model FLOPs utilisation. `memory_band_bytes` is the central 80 % of the device
    bytes that are measured where these are predicted, `fits_probability` the probability that they are at
    most the capacity.
    """

    fields: Strategy | None
    layout: Layout
    step_time_s: float
    band_s: tuple[float, float]
    tokens_per_s_per_device: float | None
    mfu: float | None
    mfu_full_attention: float | None
    peak_memory: PeakMemory
    memory_band_bytes: tuple[float, float]
    fits_probability: float
    breakdown: Mapping[str, float]
    memory: Mapping[str, float]
    tightest_rank: int
    evaluator: str
    pools: tuple[str, ...] = ()
    is_alike: bool = False

    @property
    def strategy(self) -> Strategy:
        """The strategy of all stages. Raises ConfigError if the stages are not alike."""
        if self.fields is None:
            raise ConfigError(
                "needs a plan whose stages are alike", key="best.strategy", found="stages that differ",
                allowed="the plan of a uniform strategy",
            )  # fmt: skip
        return self.fields

    @property
    def is_uniform(self) -> bool:
        """Whether all stages follow one strategy."""
        return self.fields is not None

    @property
    def can_be_evaluated(self) -> bool:
        """Whether fields of a strategy alone determine it, so that `evaluate` can predict it again."""
        return self.is_uniform

    @property
    def can_swap_nodes(self) -> bool:
        """Whether any node of its cluster may have the ranks of any other, since all stages are alike; else
        stages are assigned to devices."""
        return self.is_uniform

    @property
    def has_operators(self) -> bool:
        """Whether it is a layout of the operators of a graph, which software must be able to compute."""
        return self.layout.operators is not None

    @property
    def kind(self) -> PlanKind:
        """What the stages have in common."""
        if self.fields is not None:
            return "uniform"
        return "graph" if self.has_operators else "uneven"

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline."""
        return tuple(pipeline.microbatches for pipeline in self.layout.pipelines)

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch of the first pipeline."""
        return self.layout.pipelines[0].micro_batch_size

    @property
    def recompute(self) -> tuple[tuple[str, ...], ...]:
        """The recomputation of each stage, pipeline by pipeline."""
        return tuple(
            tuple(stage.recompute for stage in pipeline.stages) for pipeline in self.layout.pipelines
        )

    @property
    def pipeline_s(self) -> tuple[float, ...]:
        """Seconds of each pipeline."""
        return tuple(pipeline.makespan_s for pipeline in self.layout.pipelines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The outcomes of all candidates: `enumerated = sum(rejected) + cut_by_bound + simulated`, exactly.

    The space is `space` with fields restricted to one value (`fixed`) or to several (`axes`), with
    `empty_ends` also with interleaved pipelines of two stages more than layers, with `own_set` also with the
    own set of our runtime where `axes` names modules to recompute; it has
    `enumerated + unexplored` candidates. `cut_by_bound` counts pruned candidates, `simulated` evaluated ones.
    `unexplored` are the candidates left out by a search that ended early: none of them takes less than
    `lower_bound_s`. `priced_as` are lines that say how the cluster or its events were approximated; if it is
    not empty, bound and gap are those of the approximation, and nothing is proven.

    `other_options` are the certificates of the same question with other values of options of the software,
    which are their `options`.
    """

    space: str
    fixed: Mapping[str, Value] = field(default_factory=dict)
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    empty_ends: bool = False
    own_set: bool = False
    enumerated: int
    unexplored: int = 0
    rejected: Mapping[str, int]
    cut_by_bound: int
    simulated: int
    best_s: float
    lower_bound_s: float
    gap: float
    search_s: float
    search_cpu_s: float
    priced_as: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    other_options: tuple[Certificate, ...] = ()

    @property
    def is_proven(self) -> bool:
        """Whether the lower bound proves that no candidate takes less time on the cluster as given."""
        is_proven = not self.priced_as and self.gap <= PROVEN_GAP
        return is_proven and all(one.is_proven for one in self.other_options)

    @property
    def counted(self) -> int:
        """All candidates that were counted, also with other options."""
        return self.enumerated + sum(one.enumerated for one in self.other_options)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """A non-dominated strategy: step time in seconds, and bytes on the tightest rank."""

    strategy: Strategy
    step_time_s: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFrontier:
    """The Pareto frontier of time and memory, fastest first; the certificate has the outcomes of the other
    candidates."""

    points: tuple[FrontierPoint, ...]
    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """The idle devices of an answer: their number, the number of nodes on which all devices are idle, and
    their ranks in the whole cluster, as ranges (`8-15,24-31`)."""

    devices: int = 0
    nodes: int = 0
    ranks: str = ""


NO_IDLE_DEVICES = Idle()


def idle_in(cluster: Cluster, used: Iterable[int]) -> Idle:
    """The devices and nodes that are idle if the devices with these ranks are used."""
    taken = frozenset(used)
    if len(taken) == cluster.devices:
        return Idle()
    firsts = accumulate((node.devices for node in cluster.nodes), initial=0)
    idle_nodes = sum(
        taken.isdisjoint(range(first, first + node.devices))
        for first, node in zip(firsts, cluster.nodes, strict=False)
    )
    ranks = [rank for rank in range(cluster.devices) if rank not in taken]
    return Idle(devices=len(ranks), nodes=idle_nodes, ranks=as_ranges(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedPart:
    """A part of the cluster that was searched. `step_time_s` is its best, None if nothing fits or nothing is
    better than on the parts before it. `is_complete`: no candidate was left out."""

    devices: int
    nodes: int
    step_time_s: float | None
    usd_per_step: float | None
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFigures:
    """Step times that an answer on a mixed cluster is compared with: the best uniform strategy on any union
    of pools, and the best on a single pool, in seconds (None: nothing uniform fits).

    `idle` names the unused pools. `why_uniform` says why the answer is not an uneven plan, if it is uniform.
    `uneven_gap` is how much less time an uneven plan may take at most, as a share (0: none is searched).
    """

    uniform_step_time_s: float | None
    fastest_class_step_time_s: float | None
    fastest_class: str | None
    idle: tuple[str, ...]
    why_uniform: str | None = None
    uneven_gap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The fastest strategy of the target, where another one within the tolerance is recommended."""

    strategy: Strategy
    step_time_s: float
    fits_probability: float | None = None
    """As in `Result`; None in plan files that do not have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetBest:
    """The best plan of a target: its strategy (None if it is uneven), its step time, and the value of its
    objective over that without a target, less one. Where there is no plan, only `reason` says why."""

    target: str
    strategy: Strategy | None = None
    step_time_s: float | None = None
    over_any: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best strategy, its runners-up (each differs in a degree, the schedule or recomputation), and the
    certificate.

    `cluster` is the used part of the requested cluster (None: all of it). `parts` are the searched parts;
    `unexplored_parts` counts parts that were left out and may be better. `idle` are the unused devices.
    `all_devices_step_time_s` is the best step time on all devices (None: nothing fits on all, or no time was
    left to find it). `mixed` has the comparison on a mixed cluster. `is_interrupted`: the user ended the
    search early. `whole` is the requested cluster, None where it is not known. `optimum` is the
    fastest strategy where another one is recommended as `best`; the certificate is that of the optimum.
    `targets` has the best of each target. `job` is that of the question with the best values of open options
    of the software (None: that of the question).
    """

    best: Result
    runners_up: tuple[Result, ...]
    certificate: Certificate
    objective: str = "time"
    cluster: Cluster | None = None
    parts: tuple[SearchedPart, ...] = ()
    pruned_parts: int = 0
    unexplored_parts: int = 0
    idle: Idle = NO_IDLE_DEVICES
    all_devices_step_time_s: float | None = None
    frontier: StrategyFrontier | None = None
    mixed: MixedFigures | None = None
    is_interrupted: bool = False
    whole: Cluster | None = None
    optimum: Optimum | None = None
    targets: tuple[TargetBest, ...] = ()
    job: Job | None = None

    @property
    def is_proven(self) -> bool:
        """Whether no candidate is better: no part or candidate that may be better was left out, and no uneven
        plan if these are searched."""
        certificate = self.certificate
        if self.mixed is not None and self.mixed.uneven_gap > PROVEN_GAP:
            return False
        if certificate.unexplored and (self.objective == "memory" or not self.best.is_uniform):
            return False
        if self.unexplored_parts:
            return False
        return certificate.is_proven and all(part.is_complete for part in self.parts)


# Choice for a trace

TRACE_POLICIES = ("now", "expected", "worst")
"""Best in the first epoch of a trace; most steps over the trace; fastest slowest epoch."""

DECISION = "decision"
"""The policy of plans that `replan` decided after all events of a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """The policy and the trace by which a plan was chosen, and its steps there if it never changes.

    `trace` is the SHA-256 of the trace in canonical form, `source` its origin. `nodes` are the nodes of the
    cluster in the order of the plan's nodes. The plan makes `steps` over `length_s`. `now_step_time_s` is its
    step time in the first epoch and `worst_step_time_s` that in the slowest (None: it does not run).
    `considered` arrangements were evaluated in `situations` distinct situations. The score of the policy is
    at most `gap` below that of any plan on the sets of nodes considered.

    For a decision of `replan`, both step times are those after all events, and `length_s` is its horizon.
    `gap` is None for a decision, and if the plan's certificate has `priced_as`: then nothing is proven.
    """

    policy: str
    source: str
    trace: str
    nodes: tuple[str, ...]
    length_s: float
    steps: float
    now_step_time_s: float | None
    worst_step_time_s: float | None
    situations: int
    considered: int
    gap: float | None


def read_for_trace(fields: Fields, priced_as: Sequence[str]) -> TraceChoice:
    """The record of a plan file with these lines in `priced_as`. Raises ConfigError if it is invalid."""
    nodes = fields.sequence("nodes", low=1, high=1_000_000)
    for name in nodes:
        if not isinstance(name, str) or name[:1] != "n" or not name[1:].isdigit() or len(name) > 9:
            raise fields.error(
                "nodes", "is not a list of nodes", found=short_repr(name), allowed="n0, n1, ..."
            )
    if len(set(nodes)) < len(nodes):
        raise fields.error("nodes", "names a node twice")
    policy, gap = fields.choice("policy", (*TRACE_POLICIES, DECISION)), _number(fields, "gap", high=1.0)
    if (gap is None) != (policy == DECISION or bool(priced_as)):
        allowed = "null" if gap is not None else "a number from 0 to 1"
        why = "priced_as" if priced_as else f"the policy {policy}"
        raise fields.error("gap", f"does not go with {why}", found=short_repr(gap), allowed=allowed)
    found = TraceChoice(
        policy=policy,
        source=fields.text("source", max_length=10_000),
        trace=fields.text("trace"),
        nodes=tuple(map(str, nodes)),
        length_s=fields.number("length_s"),
        steps=fields.number("steps"),
        now_step_time_s=_number(fields, "now_step_time_s"),
        worst_step_time_s=_number(fields, "worst_step_time_s"),
        situations=fields.integer("situations", low=1),
        considered=fields.integer("considered", low=1),
        gap=gap,
    )
    fields.finish()
    return found


def check_for_trace(found: TraceChoice | None, cluster: Cluster, file: str | None) -> None:
    """Raises ConfigError unless it names one node for each node of the plan's `cluster`."""
    if found is not None and len(found.nodes) != len(cluster.nodes):
        raise ConfigError(
            "is not one for each node of the plan's cluster", file=file, key="for_trace.nodes",
            found=str(len(found.nodes)), allowed=str(len(cluster.nodes)),
        )  # fmt: skip


def _number(fields: Fields, name: str, high: float = 1e30) -> float | None:
    """A number, or None for null."""
    return None if fields.any(name, default=None) is None else fields.number(name, high=high)
