"""Records of an answer: results and certificates of uniform (`Answer`) and uneven plans (`UnevenAnswer`).

`TraceChoice` records how a plan was chosen for a trace of events. `Plan` is self-contained: a reader can
check, simulate or run it without other files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, short_repr
from shardwise.model import Model
from shardwise.schedule import Schedule
from shardwise.strategy import Job, Strategy

OBJECTIVES = ("time", "memory", "devices", "cost")
"""What a plan minimises: step time, memory, number of devices, or money per step."""

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
    of the rank, in order. A mixed-pool stage has `parts`; then `device_class` names both pools, `tp` is that
    of the first part, and `dp` is the number of parts.
    """

    devices: int
    ranks: str
    device_class: str
    tp: int
    dp: int
    layers: tuple[int, ...]
    share: float
    parts: tuple[StagePart, ...] = ()

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """The ranks, in the order of `ranks`. Raises ConfigError if it is not a list of ranges."""
        found: list[int] = []
        for part in self.ranks.split(","):
            first, dash, last = part.partition("-")
            last = last if dash else first
            if not (_is_rank(first) and _is_rank(last) and int(first) <= int(last)):
                raise ConfigError(
                    "is not a list of rank ranges", key="best.layout", found=self.ranks[:40],
                    allowed="ranges such as 0-7,16-23",
                )  # fmt: skip
            found += range(int(first), int(last) + 1)
        return tuple(found)


def _is_rank(text: str) -> bool:
    """Whether it can be the number of a device: at most seven digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline by its stages in order."""

    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pipelines that run in parallel. A uniform strategy is one pipeline with equal stages, whose share is
    1."""

    pipelines: tuple[Pipeline, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes on the tightest rank: allocated tensors, reserved by the allocator, used on the device, and the
    capacity that the driver reports."""

    allocated: float
    reserved: float
    device: float
    capacity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One strategy with its predicted step time and memory.

    `breakdown` (seconds) sums to the step time; `memory` (bytes on rank `tightest_rank`) sums to the device
    bytes.
    """

    strategy: Strategy
    layout: Layout
    step_time_s: float
    band_s: tuple[float, float]
    tokens_per_s_per_device: float
    mfu: float
    mfu_full_attention: float
    peak_memory: PeakMemory
    breakdown: Mapping[str, float]
    memory: Mapping[str, float]
    tightest_rank: int
    evaluator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The outcomes of all candidates: `enumerated = sum(rejected) + cut_by_bound + simulated`, exactly.

    The space is `space` with fields restricted to one value (`fixed`) or to several (`axes`); it has
    `enumerated + unexplored` candidates. `cut_by_bound` counts pruned candidates, `simulated` evaluated ones.
    `unexplored` are the candidates left out by a search that ended early: none of them takes less than
    `lower_bound_s`. `priced_as` are lines that say how the cluster or its events were approximated; if it is
    not empty, bound and gap are those of the approximation, and nothing is proven.
    """

    space: str
    fixed: Mapping[str, Value] = field(default_factory=dict)
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
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

    @property
    def is_proven(self) -> bool:
        """Whether the lower bound proves that no candidate takes less time on the cluster as given."""
        return not self.priced_as and self.gap <= PROVEN_GAP


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
class Answer:
    """The best strategy, its runners-up (each differs in a degree, the schedule or recomputation), and the
    certificate.

    `cluster` is the used part of the requested cluster (None: all of it). `parts` are the searched parts;
    `unexplored_parts` counts parts that were left out and may be better. `idle` are the unused devices.
    `all_devices_step_time_s` is the best step time on all devices (None: nothing fits on all, or no time was
    left to find it). `mixed` has the comparison on a mixed cluster. `is_interrupted`: the user ended the
    search early.
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

    @property
    def is_proven(self) -> bool:
        """Whether no candidate is better: no part or candidate that may be better was left out, and no uneven
        plan if these are searched."""
        certificate = self.certificate
        if self.mixed is not None and self.mixed.uneven_gap > PROVEN_GAP:
            return False
        if self.objective == "memory" and certificate.unexplored:
            return False
        if self.unexplored_parts:
            return False
        return certificate.is_proven and all(part.is_complete for part in self.parts)


# Uneven plans


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenResult:
    """An uneven plan with its predicted step time and memory. All pipelines have one schedule (1f1b) and one
    micro-batch size, in sequences.

    For each pipeline of `layout`: its `microbatches`, its makespan in seconds (`pipeline_s`), and the
    recomputation of each stage. `breakdown` (seconds, of the slowest pipeline) sums to the step time.
    `idle_devices` are unused. `pools` are the pools on which the plan is estimated. If it `is_alike`, all
    pipelines have the same stages, whose replicas communicate over the tiers of their own pool.
    """

    layout: Layout
    micro_batch_size: int
    microbatches: tuple[int, ...]
    pipeline_s: tuple[float, ...]
    recompute: tuple[tuple[str, ...], ...]
    step_time_s: float
    band_s: tuple[float, float]
    tokens_per_s_per_device: float
    mfu: float
    mfu_full_attention: float
    peak_memory: PeakMemory
    breakdown: Mapping[str, float]
    tightest_rank: int
    idle_devices: int
    pools: tuple[str, ...]
    is_alike: bool
    evaluator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenAnswer:
    """The best uneven plan, its certificate, and the step times that it is compared with.

    The candidates of the certificate are triples of pools, micro-batch size and number of pipelines: no plan
    of any triple takes less than the lower bound (docs/concepts/mixed-clusters.md). `parts`,
    `unexplored_parts` and `idle` are as in `Answer`; `all_devices_step_time_s` is that of a uniform strategy,
    if devices are idle. `is_interrupted`: the user ended the search early.
    """

    best: UnevenResult
    certificate: Certificate
    mixed: MixedFigures
    parts: tuple[SearchedPart, ...] = ()
    pruned_parts: int = 0
    unexplored_parts: int = 0
    idle: Idle = NO_IDLE_DEVICES
    all_devices_step_time_s: float | None = None
    is_interrupted: bool = False

    @property
    def is_proven(self) -> bool:
        """Whether no plan is better, uneven or uniform: nothing that may take less time was left out."""
        certificate = self.certificate
        is_complete = not certificate.unexplored and not self.unexplored_parts
        is_complete = is_complete and all(part.is_complete for part in self.parts)
        return is_complete and certificate.is_proven


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


# The plan

SCHEMA = "shardwise.plan"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A runner-up: its strategy, step time, and device bytes of its tightest rank."""

    strategy: Strategy
    step_time_s: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A self-contained answer: the question, the strategy with its layout and schedule, its prediction, and
    the certificate. `for_trace` is set if it was chosen for a trace of events. `target` is the software that
    it was planned for, None for any."""

    model: Model
    cluster: Cluster
    job: Job
    objective: str
    best: Result
    schedule: Schedule
    runners_up: tuple[RunnerUp, ...]
    certificate: Certificate
    for_trace: TraceChoice | None = None
    target: str | None = None

    @property
    def priced_as(self) -> tuple[str, ...]:
        """How the cluster or its events were approximated; empty if they were estimated as given."""
        return self.certificate.priced_as


def plan_of(
    answer: Answer,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    schedule: Schedule,
    objective: str = "time",
    target: str | None = None,
) -> Plan:
    """The plan of `answer` to the question about `model` on `cluster`.

    `schedule` is the table of actions on which the best strategy was evaluated; `target` is the software that
    the question was restricted to.
    """
    return Plan(
        model=model,
        cluster=cluster,
        job=job,
        objective=objective,
        best=answer.best,
        schedule=schedule,
        runners_up=tuple(
            RunnerUp(
                strategy=result.strategy,
                step_time_s=result.step_time_s,
                device_bytes=result.peak_memory.device,
            )
            for result in answer.runners_up
        ),
        certificate=answer.certificate,
        target=target,
    )
