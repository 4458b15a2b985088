"""On what a graph is laid out: a machine, its mesh, and the numbers of the software that decide what hides
beside what.

Costs of choices as arrays of the five columns of a chain (frontier/network.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cluster import AttentionCurve, Cluster, Mesh
from shardwise.cost.collectives import CollectiveModel, collective_model_of
from shardwise.cost.layouts.redistribute import Redistributions, redistributions_of
from shardwise.cost.problem import Machine, attention_kernel, machine_of
from shardwise.cost.training import WHOLE_BATCH, StepCounts, Training
from shardwise.equations import compute
from shardwise.pareto import COLUMNS, Costs
from shardwise.strategy import Profile


@dataclass(frozen=True, slots=True, eq=False)
class CostContext:
    """What all prices of one graph on one mesh share.

    `counts` say how often what happens in a step. `tables` are the conversions met so far, by shape and bytes
    of an element.
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
        """What a pass over much memory reaches."""
        return self.machine.memory_bytes_per_s * self.machine.efficiency.memory.fraction

    def redistributions(self, shape: tuple[int, ...], element_bytes: float) -> Redistributions:
        """The table of a tensor, made once."""
        key = (shape, element_bytes)
        if key not in self.tables:
            self.tables[key] = redistributions_of(self.fabric, self.mesh, shape, element_bytes)
        return self.tables[key]

    def exposed_and_hidden_s(self, communication_s: Any, computation_s: Any, share: float) -> tuple[Any, Any]:
        """What communication adds to the computation that runs beside it, and for how long it does so:
        (exposed, hidden)."""
        slowdown = self.machine.efficiency.overlap_slowdown
        exposed_s = compute.exposed_s(communication_s, computation_s, share, slowdown)
        return exposed_s, np.minimum(share * communication_s, computation_s)


def cost_context_of(
    cluster: Cluster, mesh: Mesh, training: Training, counts: StepCounts = WHOLE_BATCH
) -> CostContext:
    """The ground of `training` on a mesh of `cluster`. ConfigError where its devices lack the dtype."""
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


@dataclass(slots=True)
class CostColumns:
    """Sums in the making: arrays that broadcast together.

    Of each micro-batch: `forward_s` of its forward pass; of its backward pass `blocked_s` that nothing can
    hide, `computed_s` of computation, beside which gradients are summed, and `busy_s` for which it hides
    something else already; and `saved_bytes` from one to the other. Of the step: `once_s`, and `summed_s` of
    gradient synchronisation, `late_s` of which cannot hide.
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

    def forward(self, seconds: Any) -> None:
        """Add seconds of each forward pass."""
        self.forward_s = self.forward_s + seconds

    def blocked(self, seconds: Any) -> None:
        """Add seconds of each backward pass during which nothing else runs."""
        self.blocked_s = self.blocked_s + seconds

    def once(self, seconds: Any) -> None:
        """Add seconds of each step."""
        self.once_s = self.once_s + seconds

    def computed_backward(self, seconds: Any) -> None:
        """Add computation beside which gradients can be summed."""
        self.computed_s = self.computed_s + seconds

    def hidden_backward(self, exposed_s: Any, hidden_s: Any) -> None:
        """Add communication that runs beside backward computation for `hidden_s`, and adds `exposed_s`: that
        computation hides nothing else."""
        self.blocked_s = self.blocked_s + exposed_s
        self.busy_s = self.busy_s + hidden_s

    def summed_gradients(self, seconds: Any, overlap: Any) -> None:
        """Add gradient synchronisation of which the share `overlap` can hide."""
        self.summed_s = self.summed_s + seconds
        self.late_s = self.late_s + (1.0 - overlap) * seconds

    def costs(self, context: CostContext, shape: tuple[int, ...]) -> Costs:
        """The columns as costs; allocators hold more bytes than they give out.

        The last micro-batch's backward computation hides gradients: a second of it adds to the step where it
        hides all of them, else not, for there the gradients' own seconds count.
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
