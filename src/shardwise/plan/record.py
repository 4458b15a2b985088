"""Records of an answer: what the search found, what it costs, and the proof."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.strategy import Strategy

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
