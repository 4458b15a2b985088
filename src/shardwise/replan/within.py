"""The space that a plan's question allows, for plans that follow it on other nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.plan import Plan, UnevenFile, Value
from shardwise.strategy import FIELDS, Strategy, Target

OF_REPLICAS = frozenset(("dp", "param_shard", "grad_shard", "optim_shard", "dp_replicate", "dp_shard"))
"""Fields that follow from the number of replicas, which changes with the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedSpace:
    """The space that strategies are of, as `Question` has it, and the replicas that a stage of an uneven plan
    has at most; `target` is to carry plans out (None: whatever can)."""

    space: str = "default"
    fixed: Mapping[str, Value] = field(default_factory=dict)
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    stage_dp: int = 1
    target: Target | None = None

    def has_uneven_in(self, dtype: str) -> bool:
        """Whether uneven plans are searched for too: they have neither fields nor axes."""
        is_run = self.target is None or dtype in self.target.uneven_dtypes
        return is_run and self.space == "default" and not self.fixed and not self.axes

    @property
    def text(self) -> str:
        """What it holds fields to, as a person reads it; nothing where it allows everything."""
        texts = [f"the space {self.space}"] if self.space != "default" else []
        texts += [f"{name}={value}" for name, value in self.fixed.items()]
        texts += [f"{name} of {', '.join(map(str, values))}" for name, values in self.axes.items()]
        return ", ".join(texts)

    def allows(self, strategy: Strategy) -> bool:
        """Whether the strategy has the values that the question allows."""
        values = {**{name: (value,) for name, value in self.fixed.items()}, **self.axes}
        return all(getattr(strategy, name) in allowed for name, allowed in values.items() if name in FIELDS)


ANY = AllowedSpace()
"""Everything that the planner knows."""


def allowed_space_of(plan: Plan | UnevenFile) -> AllowedSpace:
    """What the question of a plan allows on any nodes: its space, fixed fields and axes, but for those that
    follow from the number of replicas. A plan that was chosen for events names its strategy and no
    question."""
    if not isinstance(plan, Plan) or plan.for_trace is not None:
        return AllowedSpace()
    proof = plan.certificate
    return AllowedSpace(
        space=proof.space,
        fixed={name: value for name, value in proof.fixed.items() if name not in OF_REPLICAS},
        axes={name: values for name, values in proof.axes.items() if name not in OF_REPLICAS},
    )
