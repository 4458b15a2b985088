"""Records of an uneven answer: pipelines that differ in devices, stages, layers and share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.plan.record import (
    NO_IDLE_DEVICES,
    Certificate,
    Idle,
    Layout,
    MixedFigures,
    PeakMemory,
    SearchedPart,
)


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
