"""Findings of a review: what is risky or slow in a configuration, beyond what its reader found.

Findings about speed need an alternative: they appear where the best plan of the software, or a change of the
choice itself, is faster by more than `WORTH`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.cluster import Cluster
from shardwise.plans import Result
from shardwise.search import Change
from shardwise.strategy import Strategy, rank_grid
from shardwise.targets import ImportedRun, ReviewFinding
from shardwise.units import format_bytes, format_seconds

WORTH = 0.01
"""Share of the step time by which a change is worth a finding."""

BUBBLE = 0.1
"""Share of the step time from which a pipeline bubble is a finding."""

TIGHT = 0.02
"""Share of the usable memory below which free memory is a finding."""

SAVED = 0.02
"""Share of the device memory that sharded optimizer states must save to be a finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """A configuration with its prediction. `usable_bytes` is the memory that a rank may use; `singles` are
    the best changes of one choice, `best_s` the step time in seconds of the best plan of the software (None:
    not known)."""

    run: ImportedRun
    cluster: Cluster
    strategy: Strategy
    result: Result
    fits: bool
    usable_bytes: float
    singles: Mapping[str, Change]
    best_s: float | None

    @property
    def is_slow(self) -> bool:
        """Whether another plan is faster by more than `WORTH`, or the configuration does not fit."""
        return not self.fits or (self.best_s is not None and self._is_worth(self.best_s))

    def _is_worth(self, other_s: float) -> bool:
        return other_s < self.result.step_time_s * (1.0 - WORTH)

    def field(self, name: str) -> str:
        """The flag or key of a field."""
        return self.run.names.get(name, name)

    def gain_of(self, choice: str) -> Change | None:
        """The best change of a choice where it is worth a finding."""
        change = self.singles.get(choice)
        return change if change is not None and self._is_worth(change.step_time_s) else None


def findings_of(found: Reviewed) -> Iterator[ReviewFinding]:
    """Findings about memory, links and choices that cost time."""
    yield from _memory(found)
    yield from _states(found)
    yield from _recompute(found)
    yield from _micro_batch(found)
    if found.is_slow:
        yield from _links(found)
        yield from _bubble(found)


def _warning(code: str, field: str, text: str) -> ReviewFinding:
    return ReviewFinding(code=code, severity="warning", field=field, text=text)


def _memory(found: Reviewed) -> Iterator[ReviewFinding]:
    needed, usable = found.result.peak_memory.device, found.usable_bytes
    if needed > usable:
        name, nbytes = max(found.result.memory.items(), key=lambda part: part[1])
        yield ReviewFinding(
            code="out_of_memory", severity="error", field="memory",
            text=f"rank {found.result.tightest_rank} needs {format_bytes(needed)} and may use"
            f" {format_bytes(usable)}; most of it {name.replace('_', ' ')}, {format_bytes(nbytes)}",
        )  # fmt: skip
    elif not found.fits:
        yield ReviewFinding(
            code="out_of_host_memory", severity="error", field=found.field("offload"),
            text="what is offloaded does not fit into the memory of the hosts",
        )  # fmt: skip
    elif usable - needed < TIGHT * usable:
        yield ReviewFinding(
            code="tight_memory", severity="info", field="memory",
            text=f"{format_bytes(usable - needed)} of the usable {format_bytes(usable)} are free",
        )  # fmt: skip


def _states(found: Reviewed) -> Iterator[ReviewFinding]:
    """Optimizer states that every data-parallel rank holds whole, where sharding them costs no time."""
    s, change = found.strategy, found.singles.get("zero_stage")
    copies = s.dp * s.cp
    if s.optim_shard > 1 or copies == 1 or change is None or change.strategy.optim_shard == 1:
        return
    states = found.result.memory.get("optimizer", 0.0)
    saved = states * (1.0 - 1.0 / copies)
    is_free = change.step_time_s <= found.result.step_time_s * (1.0 + WORTH)
    if is_free and saved > SAVED * found.result.peak_memory.capacity:
        yield _warning(
            "zero1_forgotten", found.field("optim_shard"),
            f"optimizer states are whole on each of {copies} data-parallel ranks; sharded they need"
            f" {format_bytes(saved)} less at the same speed",
        )  # fmt: skip


def _recompute(found: Reviewed) -> Iterator[ReviewFinding]:
    change = found.gain_of("recompute")
    if found.strategy.recompute == "none" or change is None:
        return
    other = change.strategy
    instead = "without recomputation it fits too"
    if other.recompute != "none":
        layers = f" of {other.recompute_layers} layers" if other.recompute == "full" else ""
        instead = f"{other.recompute} recomputation{layers} fits too"
    saved = found.result.step_time_s - change.step_time_s
    yield _warning(
        "recompute_not_needed", found.field("recompute"),
        f"{instead}, and a step takes {format_seconds(saved)} less",
    )  # fmt: skip


def _micro_batch(found: Reviewed) -> Iterator[ReviewFinding]:
    change = found.gain_of("micro_batch_size")
    if change is not None and change.strategy.micro_batch_size > found.strategy.micro_batch_size:
        yield _warning(
            "micro_batch_small", found.field("micro_batch_size"),
            f"{change.strategy.micro_batch_size} sequences fit, and a step takes"
            f" {format_seconds(found.result.step_time_s - change.step_time_s)} less",
        )  # fmt: skip


def _links(found: Reviewed) -> Iterator[ReviewFinding]:
    """Groups of ranks that need fast links and reach beyond the scale-up domain."""
    s, domain = found.strategy, scale_up_span(found.cluster)
    grid = rank_grid(s)
    name = found.cluster.tiers[0].name
    if _reaches_beyond(grid.reshape(-1, s.tp), domain):
        yield _warning(
            "tp_across_nodes", found.field("tp"),
            f"{s.tp} tensor-parallel ranks reach beyond the {domain} devices of {name}",
        )  # fmt: skip
    size = s.etp * s.ep
    ranks = np.moveaxis(grid, 1, 0).reshape(s.pp, -1)
    if s.ep > 1 and _reaches_beyond(ranks.reshape(-1, size), domain):
        yield _warning(
            "ep_beyond_nvlink", found.field("ep"),
            f"{size} ranks exchange tokens of experts beyond the {domain} devices of {name}",
        )  # fmt: skip


def scale_up_span(cluster: Cluster) -> int:
    """Devices that are connected without the network."""
    return max((tier.span for tier in cluster.tiers if not tier.is_network), default=1)


def _reaches_beyond(groups: np.ndarray[tuple[int, ...], np.dtype[np.int64]], domain: int) -> bool:
    """Whether any group (shape groups x members) has ranks of several domains."""
    domains = groups // domain
    return bool((domains.max(axis=1) > domains.min(axis=1)).any())


def _bubble(found: Reviewed) -> Iterator[ReviewFinding]:
    bubble_s = found.result.breakdown.get("pipeline_bubble", 0.0)
    share = bubble_s / found.result.step_time_s
    if found.strategy.pp > 1 and share > BUBBLE:
        microbatches = found.result.layout.pipelines[0].microbatches
        yield _warning(
            "pipeline_bubble", found.field("pp"),
            f"{share:.0%} of the step waits in the pipeline: {found.strategy.pp} ranks with {microbatches}"
            " micro-batches",
        )  # fmt: skip
