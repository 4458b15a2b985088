"""Records of an answer: what the search found, what it costs, and the proof.

Records of an uneven answer: pipelines that differ in devices, stages, layers and share.

How a plan was chosen for a trace of events: kept with the plan, so that it says what it is the best of.

The plan: all that a reader needs to check, simulate or run an answer, nothing from outside the file.
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
"""What a plan may be best in: least step time, least memory, fewest devices, least money per step."""

PROVEN_GAP = 1e-12
"""A gap up to which a step time is proven to be the least."""

SHORTEST_STEP_S = 1e-30
"""No step takes less: a plan file that says so is none."""

Value = int | str | bool
"""A value of a strategy's field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """A part of a stage that lies on two pools: `tp` devices of a pool's node, which hold all of the stage's
    layers and do `rows` of every microbatch. `ranks` as of a stage."""

    ranks: str
    device_class: str
    tp: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline rank's part: `devices` of `device_class`, arranged tp x cp x dp, holding `layers` decoder
    layers.

    `ranks` lists the global ranks as ranges (`0-7,16-23`). `layers` is one count per virtual chunk that the
    rank holds, in the order of the chunks. A stage that lies on two pools has `parts`, and for them together
    the names of both as `device_class`, the first one's tp, and as many replicas (`dp`) as parts.
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
        """The ranks, in the order of `ranks`. ConfigError where that is no list of ranges."""
        found: list[int] = []
        for part in self.ranks.split(","):
            first, dash, last = part.partition("-")
            last = last if dash else first
            if not (_is_rank(first) and _is_rank(last) and int(first) <= int(last)):
                raise ConfigError(
                    "is no list of ranges of ranks", key="best.layout", found=self.ranks[:40],
                    allowed="such as 0-7,16-23",
                )  # fmt: skip
            found += range(int(first), int(last) + 1)
        return tuple(found)


def _is_rank(text: str) -> bool:
    """Whether it may be the number of a device: no cluster has ten million."""
    return text.isascii() and text.isdecimal() and len(text) <= 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Pipelines side by side; a uniform strategy is one pipeline whose stages are alike and take share 1."""

    pipelines: tuple[Pipeline, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes on the tightest rank: by tensors, by the allocator, by the device as a whole, and what the driver
    has."""

    allocated: float
    reserved: float
    device: float
    capacity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One strategy with its price.

    `breakdown` (seconds) and `memory` (bytes on rank `tightest_rank`) sum to the step time and to the device
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
    """What happened to every candidate: `enumerated = sum(rejected) + cut_by_bound + simulated`, exactly.

    The space is `space` with fields held to one value (`fixed`) or to some values (`axes`); it has
    `enumerated + unexplored` candidates. `unexplored` are those that a search ended early did not look at:
    none of them takes less than `lower_bound_s`. `priced_as` are lines that say what the cluster or its
    events were priced as where that is not what was given: bound and gap are of that, and nothing is proven.
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
        """Whether the bound proves that no candidate takes less time on what was given."""
        return not self.priced_as and self.gap <= PROVEN_GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """A strategy that none beats in time without taking more memory: seconds, and bytes on the tightest
    rank."""

    strategy: Strategy
    step_time_s: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyFrontier:
    """Time against memory, fastest first; the certificate says what became of the other candidates."""

    points: tuple[FrontierPoint, ...]
    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """What an answer leaves idle: a number of devices, the nodes of which all devices are idle, and the ranks
    of the devices in the whole cluster, as ranges (`8-15,24-31`)."""

    devices: int = 0
    nodes: int = 0
    ranks: str = ""


NO_IDLE_DEVICES = Idle()


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedPart:
    """A part of the cluster that was searched too. `step_time_s` is its best, None where nothing fits or
    nothing is better than on the parts before it. `is_complete`: nothing was left out."""

    devices: int
    nodes: int
    step_time_s: float | None
    usd_per_step: float | None
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFigures:
    """What an answer on a mixed cluster is compared with: the best uniform strategy on any union of pools
    (alike nodes) and the least that one pool alone takes, in seconds, None where nothing uniform fits.

    `idle` names the pools left unused; `why_uniform` says why the answer is no uneven plan, if it is none,
    and `uneven_gap` how much less an uneven plan may take all the same, as a share (0 where none is looked
    for).
    """

    uniform_step_time_s: float | None
    fastest_class_step_time_s: float | None
    fastest_class: str | None
    idle: tuple[str, ...]
    why_uniform: str | None = None
    uneven_gap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best strategy, the runners-up (each differs in a degree, the schedule or recompute), and the
    certificate.

    `cluster` is what the answer uses: the cluster asked about, or the part of it that serves the objective
    best (None: the cluster asked about). `parts` are the parts that were searched; `unexplored_parts` could
    be better and were left out. `idle` says which devices are not used, `all_devices_step_time_s` what all of
    them take (None: nothing fits on all, or there was no time to find it). `mixed` are the figures of a mixed
    cluster. `is_interrupted`: the user ended the search early.
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
        """Whether no candidate is better: nothing was left out, or nothing that could take less time, and no
        uneven plan where these are looked for."""
        certificate = self.certificate
        if self.mixed is not None and self.mixed.uneven_gap > PROVEN_GAP:
            return False
        if self.objective == "memory" and certificate.unexplored:
            return False
        if self.unexplored_parts:
            return False
        return certificate.is_proven and all(part.is_complete for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenResult:
    """An uneven plan with its price; one schedule (1f1b) and one micro-batch size, in sequences, for all
    pipelines.

    Of each pipeline of `layout`: its `microbatches`, seconds of its step, and what each stage recomputes.
    `breakdown` (seconds, of the slowest pipeline) sums to the step time. `idle_devices` are left unused.
    It is priced as one of the `pools` of these names; where it `is_alike`, all pipelines have the same
    stages, whose replicas meet on the tiers of their own pool.
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
    """The best uneven plan, its certificate, and what it is compared with.

    The candidates of the certificate are triples of pools, micro-batch size and number of pipelines: none of
    the plans of any takes less than the lower bound (docs/concepts/mixed-clusters.md). `parts`,
    `unexplored_parts` and `idle` are as in `Answer`; `all_devices_step_time_s` is that of a uniform strategy
    where devices are idle. `is_interrupted`: the user ended the search early."""

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
        """Whether no plan is better, uneven or uniform: nothing was left out that could take less time."""
        certificate = self.certificate
        is_complete = not certificate.unexplored and not self.unexplored_parts
        is_complete = is_complete and all(part.is_complete for part in self.parts)
        return is_complete and certificate.is_proven


TRACE_POLICIES = ("now", "expected", "worst")
"""Best in the first epoch of a trace; over all of it; in its slowest epoch."""

DECISION = "decision"
"""What `replan` decided on behind all events of a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """The policy and the trace that a plan was chosen by, and what it does there, never changed.

    `trace` is the SHA-256 of the trace in its canonical form, `source` where that is from. `nodes` are the
    cluster's nodes in the places of the plan's. Over `length_s` it makes `steps`; `now_step_time_s` is its
    step time in the first epoch and `worst_step_time_s` in the slowest (None: it stands still). `considered`
    arrangements were weighed in `situations` distinct ones; what the policy counts is at most `gap` below
    what any plan on the sets of nodes that were looked at makes.

    Of a decision both step times are those behind all events, the length is its horizon, and `gap` is None:
    nothing is proven of what it weighed. Nor is there a gap where the plan's certificate says that something
    else was priced than what was given."""

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
    """The record from the file of a plan that is `priced_as` something else. ConfigError for what is none."""
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
    """ConfigError unless it names a node for each of the plan's `cluster`."""
    if found is not None and len(found.nodes) != len(cluster.nodes):
        raise ConfigError(
            "is not one for each node of the plan's cluster", file=file, key="for_trace.nodes",
            found=str(len(found.nodes)), allowed=str(len(cluster.nodes)),
        )  # fmt: skip


def _number(fields: Fields, name: str, high: float = 1e30) -> float | None:
    """A number, or null."""
    return None if fields.any(name, default=None) is None else fields.number(name, high=high)


SCHEMA = "shardwise.plan"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A strategy that came close, in brief: its step time and the device bytes of its tightest rank."""

    strategy: Strategy
    step_time_s: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A self-contained answer: the question, the strategy with its layout and schedule, its price, and the
    proof; `for_trace` where it was chosen for a trace of events. `target` is the software that it was
    planned for, None for any."""

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
        """What it was priced as where that is not what was given."""
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
    """The plan that stands for `answer` to the question about `model` on `cluster`.

    `schedule` is the table of actions that the best strategy's step time was evaluated on; `target` is the
    software that the question was restricted to.
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
