"""On what a graph is laid out: a machine, its mesh, and the numbers of the software that decide what hides
beside what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.cluster import AttentionCurve, Cluster, Mesh
from shardwise.cost.fabric import CollectiveModel, collective_model_of
from shardwise.cost.layouts.conversions import Redistributions, redistributions_of
from shardwise.cost.problem import Machine, attention_kernel, machine_of
from shardwise.cost.training import Training
from shardwise.cost.turns import WHOLE_BATCH, StepCounts
from shardwise.equations import compute
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
