"""Why a plan is what it is, and what another question would give: the answers of `explain` and `what_if`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardwise import search
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.notebook import bars, line, panel, table
from shardwise.plans import Plan
from shardwise.questions import arguments
from shardwise.questions.arguments import Progress
from shardwise.search import Explanation, PlanComparison, PlanOverview
from shardwise.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanExplanation:
    """Where time and memory of a plan go. `overview` has its stages, the free memory, and the plans that it
    was compared with; `candidates` has the outcomes of all candidates, the best alternative of each field,
    and what binds (None: the plan is not of one strategy)."""

    plan: Plan
    overview: PlanOverview
    candidates: Explanation | None

    def rows(self) -> list[dict[str, object]]:
        """A row for a data frame for the best alternative of each field: its value, the share by which it is
        slower, the reason if it is not possible, and the missing bytes."""
        if self.candidates is None:
            return []
        return [
            {
                "field": axis.field,
                "best": axis.value,
                "value": axis.nearest.value,
                "slower": axis.nearest.slower,
                "reason": axis.nearest.reason,
                "lacking_bytes": axis.nearest.lacking_bytes,
            }
            for axis in self.candidates.axes
            if axis.nearest is not None
        ]

    def to_dict(self) -> dict[str, object]:
        """The explanation as plain values: seconds, bytes and counts of candidates."""
        found = self.candidates
        return {
            **asdict(self.overview),
            "totals": None if found is None else dict(found.totals),
            "alternatives": self.rows(),
            "binding": None if found is None else asdict(found.binding),
            "relaxed": [] if found is None else [asdict(one) for one in found.relaxed],
        }

    def __repr__(self) -> str:
        found = self.candidates
        many = "" if found is None else f", {sum(found.totals.values()) + found.unexplored:,} candidates"
        binding = "" if found is None else f", {found.binding.resource} binds"
        free = format_bytes(self.overview.free_bytes)
        return (
            f"<PlanExplanation of {self.plan.name} on {self.plan.cluster.name}{many}: {free} free{binding}>"
        )

    def _repr_html_(self) -> str:
        names = ("field", "best", "value", "slower", "reason")
        found = [[row[name] for name in names] for row in self.rows()]
        parts = [
            line(f"{format_bytes(self.overview.free_bytes)} of the usable memory are free."),
            bars("Step time", self.plan.breakdown, format_seconds),
            *(
                [table(("field", "best", "nearest alternative", "slower by", "excluded by"), found)]
                if found
                else []
            ),
        ]
        return panel(f"{self.plan.name} on {self.plan.cluster.name}", *parts)


def explained(
    plan: Plan,
    *,
    every_value: object = False,
    workers: object = 1,
    budget: object = None,
    progress: Progress | None = None,
) -> PlanExplanation:
    """The explanation of a plan of any kind, with `every_value` of each field searched. Raises ConfigError if
    this version estimates it otherwise."""
    many, limit_s = arguments.workers(workers), arguments.budget_s(budget)
    is_full = arguments.flag("--verbose", every_value)
    overview = search.overview_of(plan)
    found = None
    if plan.kind == "uniform":
        found = search.explained(plan, every_value=is_full, workers=many, budget_s=limit_s, progress=progress)
    return PlanExplanation(plan=plan, overview=overview, candidates=found)


def why_not(
    plan: Plan,
    pinned: object,
    *,
    workers: object = 1,
    budget: object = None,
    progress: Progress | None = None,
) -> PlanComparison:
    """The best plan with these fields of a strategy, compared with `plan`. Raises ConfigError for fields that
    cannot be used, Infeasible if nothing with them fits."""
    fields = arguments.fields("--why-not", pinned)
    if not fields:
        raise ConfigError("names no field", key="--why-not", found=repr(pinned), allowed="name=value,...")
    many, limit_s = arguments.workers(workers), arguments.budget_s(budget)
    plan.require_kind("uniform", "uneven", key="--why-not")
    return search.why_not(plan, fields, workers=many, budget_s=limit_s, progress=progress)


def what_if(
    plan: Plan,
    changes: object,
    *,
    workers: object = 1,
    budget: object = None,
    progress: Progress | None = None,
) -> PlanComparison:
    """The best plan on a changed cluster or for a changed job, compared with `plan`. Raises ConfigError for a
    change that cannot be made, Infeasible if nothing fits then."""
    if isinstance(changes, Mapping):
        changes = ",".join(f"{name}={value}" for name, value in changes.items())
    if not isinstance(changes, str):
        raise ConfigError(
            "is not a change", key="--what-if", found=short_repr(changes), allowed="name=value,..."
        )
    many, limit_s = arguments.workers(workers), arguments.budget_s(budget)
    plan.require_kind("uniform", "uneven", key="--what-if")
    return search.what_if(plan, changes, workers=many, budget_s=limit_s, progress=progress)
