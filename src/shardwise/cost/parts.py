"""What a pass through a block spends its seconds on, and what of it contends for the cards of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from shardwise.cluster import Tier
from shardwise.cost.fabric import ProcessGroups, contends


@dataclass(frozen=True, slots=True)
class Contention:
    """Of each kind of collectives within the passes, whether (0 or 1) they leave by the cards by which
    gradients are summed over replicas."""

    tensor: Any = 1.0
    context: Any = 1.0
    expert: Any = 1.0

    @staticmethod
    def of(tiers: Sequence[Tier], groups: ProcessGroups) -> Contention:
        """Of grids with these groups on these tiers."""
        kinds = (groups.tensor, groups.context, groups.expert)
        return Contention(*(1.0 * contends(tiers, kind, groups.data) for kind in kinds))


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Seconds of one phase, by what they are spent on; communication as far as it is exposed."""

    matmul_s: Any = 0.0
    attention_s: Any = 0.0
    memory_bound_s: Any = 0.0
    tensor_s: Any = 0.0
    context_s: Any = 0.0
    expert_s: Any = 0.0
    host_s: Any = 0.0

    @property
    def compute_s(self) -> Any:
        """What communication can hide beside: computation, and waiting for the host."""
        return self.matmul_s + self.attention_s + self.memory_bound_s + self.host_s

    @property
    def total_s(self) -> Any:
        return self.compute_s + self.tensor_s + self.context_s + self.expert_s

    def contended_s(self, contention: Contention) -> Any:
        """What passes in collectives of the kinds that contend."""
        return (
            contention.tensor * self.tensor_s
            + contention.context * self.context_s
            + contention.expert * self.expert_s
        )

    def __add__(self, other: PhaseTimes) -> PhaseTimes:
        return PhaseTimes(
            matmul_s=self.matmul_s + other.matmul_s,
            attention_s=self.attention_s + other.attention_s,
            memory_bound_s=self.memory_bound_s + other.memory_bound_s,
            tensor_s=self.tensor_s + other.tensor_s,
            context_s=self.context_s + other.context_s,
            expert_s=self.expert_s + other.expert_s,
            host_s=self.host_s + other.host_s,
        )

    def taken(self, rows: Any) -> PhaseTimes:
        """The columns at these rows."""
        return PhaseTimes(*(getattr(self, name)[rows] for name in COMPONENTS))

    def scaled(self, factor: Any) -> PhaseTimes:
        """Every part times `factor`."""
        return PhaseTimes(**{f.name: factor * getattr(self, f.name) for f in fields(PhaseTimes)})


COMPONENTS = tuple(f.name for f in fields(PhaseTimes))
