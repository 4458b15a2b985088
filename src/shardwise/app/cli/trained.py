"""What a run trains, in the words and numbers of its kind of plan."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.app.cli import words
from shardwise.graph import step_flop
from shardwise.plan import AnyPlan, GraphPlan, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedWorkload:
    """`per_step` of `unit` (tokens, or samples of a graph) are in a step, told with so many `decimals`; the
    devices' peaks would do its model flop in `peak_s`."""

    name: str
    unit: str
    per_step: int
    decimals: int
    peak_s: float

    def rate(self, step_s: float) -> str:
        """How much a second at this step time, in words."""
        return f"{self.per_step / step_s:,.{self.decimals}f} {self.unit}/s"


def workload_of(plan: AnyPlan) -> TrainedWorkload:
    """What `plan` trains."""
    if isinstance(plan, GraphPlan):
        return TrainedWorkload(
            name=f"graph:{plan.graph.name}", unit="samples", per_step=plan.graph.batch, decimals=1,
            peak_s=step_flop(plan.graph) / _peak_flop_per_s(plan),
        )  # fmt: skip
    best, job = plan.best, plan.job
    return TrainedWorkload(
        name=plan.model.name, unit="tokens", per_step=job.global_batch_size * job.seq_len, decimals=0,
        peak_s=best.mfu * best.step_time_s,
    )  # fmt: skip


def plan_label(plan: AnyPlan) -> tuple[str, str] | None:
    """What a plan is called, and the plan in a few words; nothing of a graph."""
    if isinstance(plan, GraphPlan):
        return None
    if isinstance(plan, Plan):
        return "strategy", words.degrees_text(plan.best.strategy)
    pipelines = words.counted(len(plan.best.layout.pipelines), "pipeline")
    shares = " + ".join(map(str, plan.best.microbatches))
    return "plan", f"uneven: {pipelines}, {shares} microbatches"


def _peak_flop_per_s(plan: GraphPlan) -> float:
    """Of all devices that the plan is on."""
    classes = plan.cluster.classes
    return sum(
        classes[node.device_class].peak_flop_per_s[plan.job.dtype] * node.speed * node.devices
        for node in plan.cluster.nodes
    )
