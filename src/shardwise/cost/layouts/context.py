"""Context of all costs of one graph on one mesh (`CostContext`), and sums of costs (`CostColumns`).

A cost has the five columns of `pareto.COLUMNS`. docs/concepts/pareto-search.md, section "Costs".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from shardwise.cluster import AttentionCurve, Cluster, Mesh
from shardwise.cost.collectives import CollectiveModel, collective_model_of
from shardwise.cost.layouts.redistribute import Redistributions, redistributions_of
from shardwise.cost.problem import Machine, attention_kernel, machine_of
from shardwise.cost.training import WHOLE_BATCH, StepCounts, Training
from shardwise.equations import compute
from shardwise.graph import Mode
from shardwise.pareto import COLUMNS, Costs
from shardwise.strategy import Profile


@dataclass(frozen=True, slots=True, eq=False)
class CostContext:
    """Machine, mesh, software profile and collectives of all costs of one graph on one mesh.

    `counts` are the step counts. `tables` caches redistributions by shape and bytes per element.
    """

    machine: Machine
    profile: Profile
    mesh: Mesh
    fabric: CollectiveModel
    attention: AttentionCurve | None
    counts: StepCounts
    tables: dict[tuple[tuple[int, ...], float], Redistributions]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks per axis of the mesh."""
        return self.mesh.ranks

    @property
    def activation_bytes(self) -> float:
        """Bytes per element of an activation."""
        return self.machine.recipe.activation_bytes

    @property
    def stream_bytes_per_s(self) -> float:
        """Achieved memory bandwidth of a long sequential pass."""
        return self.machine.stream_bytes_per_s

    def redistributions(self, shape: tuple[int, ...], element_bytes: float) -> Redistributions:
        """The redistributions of a tensor, computed once per shape and element size."""
        key = (shape, element_bytes)
        if key not in self.tables:
            self.tables[key] = redistributions_of(self.fabric, self.mesh, shape, element_bytes)
        return self.tables[key]

    def exposed_and_hidden_s(self, communication_s: Any, computation_s: Any, share: float) -> tuple[Any, Any]:
        """(Seconds that communication adds to the computation that it overlaps with, seconds that are
        hidden).
        """
        slowdown = self.machine.efficiency.overlap_slowdown
        exposed_s = compute.exposed_s(communication_s, computation_s, share, slowdown)
        return exposed_s, np.minimum(share * communication_s, computation_s)


def cost_context_of(
    cluster: Cluster, mesh: Mesh, training: Training, counts: StepCounts = WHOLE_BATCH
) -> CostContext:
    """The context of `training` on a mesh of `cluster`. Raises ConfigError where a device class lacks the
    dtype.
    """
    machine = machine_of(cluster, training.dtype, training.optimizer, training.profile)
    return CostContext(
        machine=machine,
        profile=training.profile,
        mesh=mesh,
        fabric=collective_model_of(machine),
        attention=attention_kernel(machine.efficiency, training.profile),
        counts=counts,
        tables={},
    )


When = Literal["forward", "backward", "step"]
"""The pass of a micro-batch in which seconds are spent, or once per step."""


@dataclass(frozen=True, slots=True)
class SavedBytes:
    """Bytes that exist from the end of operator `since` of their block until the backward pass returns there;
    -1 is the last operator of the block before. They are saved, or recomputed."""

    nbytes: Any
    since: int
    is_recomputed: bool


@dataclass(slots=True)
class CostColumns:
    """Costs while they are summed: arrays that broadcast together.

    Seconds per micro-batch: `forward_s` of the forward pass; `blocked_s` of the backward pass without
    overlap; `computed_s` of backward computation, which can overlap with gradient synchronisation, except for
    `busy_s` that overlap with other communication. Seconds per step: `once_s`; `summed_s` of gradient
    synchronisation, of which `late_s` cannot overlap.

    Bytes: `resident_bytes` throughout the step, `saved_bytes` of saved activations per micro-batch,
    `recomputed_bytes` within a recomputed block, `peak_bytes` of the largest temporaries.

    `spent`, `held` and `saved` are the terms of these sums one by one: seconds with their purpose and pass,
    resident bytes with their purpose, and activations.
    """

    resident_bytes: Any = 0.0
    saved_bytes: Any = 0.0
    recomputed_bytes: Any = 0.0
    peak_bytes: Any = 0.0
    forward_s: Any = 0.0
    blocked_s: Any = 0.0
    computed_s: Any = 0.0
    busy_s: Any = 0.0
    once_s: Any = 0.0
    summed_s: Any = 0.0
    late_s: Any = 0.0
    spent: list[tuple[str, When, Any]] = field(default_factory=list)
    held: list[tuple[str, Any]] = field(default_factory=list)
    saved: list[SavedBytes] = field(default_factory=list)

    def forward(self, seconds: Any, what: str) -> None:
        """Add seconds of each forward pass."""
        self.forward_s = self.forward_s + seconds
        self.spent.append((what, "forward", seconds))

    def blocked(self, seconds: Any, what: str) -> None:
        """Add seconds of each backward pass that overlap with nothing."""
        self.blocked_s = self.blocked_s + seconds
        self.spent.append((what, "backward", seconds))

    def once(self, seconds: Any, what: str) -> None:
        """Add seconds of each step."""
        self.once_s = self.once_s + seconds
        self.spent.append((what, "step", seconds))

    def computed_backward(self, seconds: Any, what: str) -> None:
        """Add backward computation that gradient synchronisation can overlap with."""
        self.computed_s = self.computed_s + seconds
        self.spent.append((what, "backward", seconds))

    def hidden_backward(self, times: tuple[Any, Any], what: str) -> None:
        """Add communication that adds `times[0]` seconds to the backward pass, and overlaps with `times[1]`
        seconds of its computation.

        That computation then overlaps with nothing else.
        """
        exposed_s, hidden_s = times
        self.blocked(exposed_s, what)
        self.busy_s = self.busy_s + hidden_s

    def summed_gradients(self, seconds: Any, overlap: Any) -> None:
        """Add gradient synchronisation of which the share `overlap` can overlap."""
        self.summed_s = self.summed_s + seconds
        self.late_s = self.late_s + (1.0 - overlap) * seconds

    def hold(self, nbytes: Any, what: str) -> None:
        """Add bytes that are resident throughout the step."""
        self.resident_bytes = self.resident_bytes + nbytes
        self.held.append((what, nbytes))

    def save(self, nbytes: Any, mode: Mode, since: int) -> None:
        """Add bytes that are saved for the backward pass, or recomputed before it, since operator `since`."""
        if mode == "kept":
            self.saved_bytes = self.saved_bytes + nbytes
        else:
            self.recomputed_bytes = self.recomputed_bytes + nbytes
        self.saved.append(SavedBytes(nbytes, since, mode == "recomputed"))

    def costs(self, context: CostContext, shape: tuple[int, ...]) -> Costs:
        """The costs by column, with the fragmentation of the allocator.

        Gradients overlap with the backward computation of the last micro-batch. Column `hidden_s` is the step
        time if that computation hides all gradients that can overlap. Column `exposed_s` is the step time if
        the gradients take longer, so that their own seconds count instead of the computation.
        """
        counts = context.counts
        others = counts.microbatches - counts.steps
        costs = np.empty((*shape, len(COLUMNS)))
        forwards = counts.microbatches + counts.extra_forwards
        common_s = (
            forwards * self.forward_s + counts.microbatches * self.blocked_s + counts.steps * self.once_s
        )
        costs[..., 0] = common_s + counts.microbatches * self.computed_s + counts.steps * self.late_s
        costs[..., 1] = common_s + others * self.computed_s + counts.steps * (self.busy_s + self.summed_s)
        reserved = 1.0 + context.machine.efficiency.fragmentation_ratio
        all_resident = self.resident_bytes + counts.in_flight * self.saved_bytes
        for column, nbytes in enumerate((all_resident, self.recomputed_bytes, self.peak_bytes), 2):
            costs[..., column] = reserved * np.asarray(nbytes)
        return costs
