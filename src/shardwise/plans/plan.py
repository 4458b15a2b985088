"""`Plan`: a self-contained answer, which a reader can check, simulate, compare, replan or run without other
files; and `PlanQuestion`, what was asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.cluster import Cluster, Mesh, mesh_of
from shardwise.errors import ConfigError, InternalError
from shardwise.graph import GraphLayout, OpGraph
from shardwise.model import Model
from shardwise.plans.record import (
    NO_IDLE_DEVICES,
    Answer,
    Certificate,
    Idle,
    MixedFigures,
    Result,
    TraceChoice,
    Value,
)
from shardwise.schedule import Schedule, generate
from shardwise.strategy import Job, Strategy

PlanKind = Literal["uniform", "uneven", "graph"]
"""A plan of one strategy, a plan whose stages or pipelines differ, or a plan of an operator graph."""

KIND_TEXTS: Mapping[PlanKind, str] = {
    "uniform": "a plan of one strategy",
    "uneven": "an uneven plan",
    "graph": "the plan of an operator graph",
}
"""The kinds as messages name them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What was asked, except for model, cluster and job (which has the memory margin).

    `fixed` restricts fields of the strategy to one value, `axes` to several. `target` is the software that
    the answer was restricted to (None: any). With `use_all` no device may stay idle. `stage_dp` and
    `mixed_stage_rows` are the limits of uneven plans. `epsilon` is the largest factor, less one, by which a
    frontier of an operator graph was allowed to be above the exact one. `events` is the origin of the trace
    of events that the plan was chosen for.
    """

    objective: str = "time"
    space: str = "default"
    fixed: Mapping[str, Value] = field(default_factory=dict)
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    target: str | None = None
    use_all: bool = False
    stage_dp: int = 1
    mixed_stage_rows: int = 1
    epsilon: float = 0.0
    events: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A runner-up: its strategy, step time, and device bytes of its tightest rank."""

    strategy: Strategy
    step_time_s: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A self-contained answer: what was asked, the layout with its prediction, and the certificate.

    `network` is the model, or the operator graph. `cluster` has the used devices only where `idle` names
    others. `schedule` is the table of actions of a uniform strategy. `certificate` is None where nothing was
    searched: for an evaluated strategy, and for a point of a frontier. For the latter `epsilon` says how good
    the frontier is: every layout is matched in step time and device bytes within a factor 1 + `epsilon` by
    some point of it. `mixed` has the step times that a plan on a mixed cluster is compared with. `for_trace`
    is set if the plan was chosen for a trace of events.
    """

    network: Model | OpGraph
    cluster: Cluster
    job: Job
    best: Result
    question: PlanQuestion = field(default_factory=PlanQuestion)
    schedule: Schedule | None = None
    runners_up: tuple[RunnerUp, ...] = ()
    certificate: Certificate | None = None
    epsilon: float | None = None
    idle: Idle = NO_IDLE_DEVICES
    mixed: MixedFigures | None = None
    for_trace: TraceChoice | None = None

    @property
    def kind(self) -> PlanKind:
        """What the stages of the plan have in common."""
        if isinstance(self.network, OpGraph):
            return "graph"
        return "uniform" if self.best.is_uniform else "uneven"

    def require_kind(self, *kinds: PlanKind, key: str = "plan") -> None:
        """Raises ConfigError that names `key` unless the plan is of one of `kinds`."""
        if self.kind not in kinds:
            raise self._wrong_kind(kinds, key=key)

    def _wrong_kind(self, kinds: tuple[PlanKind, ...], *, key: str) -> ConfigError:
        return ConfigError(
            f"is not supported for {KIND_TEXTS[self.kind]}", key=key, found=KIND_TEXTS[self.kind],
            allowed=" or ".join(KIND_TEXTS[kind] for kind in kinds),
        )  # fmt: skip

    @property
    def model(self) -> Model:
        """The model. Raises ConfigError for the plan of an operator graph."""
        if isinstance(self.network, OpGraph):
            raise self._wrong_kind(("uniform", "uneven"), key="plan")
        return self.network

    @property
    def graph(self) -> OpGraph:
        """The operator graph. Raises ConfigError for the plan of a model."""
        if not isinstance(self.network, OpGraph):
            raise self._wrong_kind(("graph",), key="plan")
        return self.network

    @property
    def name(self) -> str:
        """The name of the model, or `graph:` and the name of the graph."""
        return f"graph:{self.network.name}" if isinstance(self.network, OpGraph) else self.network.name

    @property
    def target(self) -> str | None:
        """The software that the plan is for; None for any."""
        return self.question.target

    @property
    def objective(self) -> str:
        """What the plan minimises."""
        return self.question.objective

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.best.step_time_s

    @property
    def strategy(self) -> Strategy:
        """The strategy of all stages. Raises ConfigError if the stages are not alike."""
        return self.best.strategy

    @property
    def breakdown(self) -> Mapping[str, float]:
        """Seconds of each part of the step; they sum to the step time."""
        return self.best.breakdown

    @property
    def memory(self) -> Mapping[str, float]:
        """Bytes of each part of memory on the tightest rank; they sum to its device bytes."""
        return self.best.memory

    @property
    def devices(self) -> int:
        """Number of devices in use."""
        return sum(stage.devices for stage in self.best.layout.stages)

    @property
    def stages(self) -> int:
        """Number of stages of the longest pipeline."""
        return max(len(pipeline.stages) for pipeline in self.best.layout.pipelines)

    @property
    def microbatches(self) -> int:
        """Micro-batches of all pipelines in a step."""
        return sum(self.best.microbatches)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The table of actions of each pipeline."""
        if self.schedule is not None:
            return (self.schedule,)
        return tuple(
            generate(
                self.best.layout.schedule, pp=len(pipeline.stages), microbatches=pipeline.microbatches, vpp=1
            )
            for pipeline in self.best.layout.pipelines
        )

    @property
    def operators(self) -> GraphLayout:
        """The layout of all operators. Raises ConfigError for the plan of a model."""
        self.require_kind("graph")
        operators = self.best.layout.operators
        if operators is None:
            raise InternalError("a plan of an operator graph without a layout")
        return operators

    @property
    def mesh(self) -> Mesh:
        """The mesh of each stage of an operator graph. Raises ConfigError for the plan of a model."""
        return mesh_of(self.cluster, self.operators.ranks)

    @property
    def proof(self) -> Certificate:
        """The certificate. Raises ConfigError if nothing was searched."""
        if self.certificate is None:
            raise ConfigError(
                "has no certificate", key="certificate", found="a plan that no search chose",
                allowed="a plan of `shardwise plan`",
            )  # fmt: skip
        return self.certificate

    @property
    def priced_as(self) -> tuple[str, ...]:
        """How the cluster or its events were approximated; empty if they were estimated as given."""
        return self.cluster.priced_as if self.certificate is None else self.certificate.priced_as


def plan_of(
    answer: Answer,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    schedule: Schedule | None,
    question: PlanQuestion | None = None,
) -> Plan:
    """The plan of `answer` to `question` about `model` on `cluster`, the part of it that is used.

    `schedule` is the table of actions on which a uniform strategy was evaluated.
    """
    return Plan(
        network=model,
        cluster=cluster,
        job=job,
        question=question or PlanQuestion(objective=answer.objective),
        best=answer.best,
        schedule=schedule,
        runners_up=tuple(
            RunnerUp(
                strategy=result.strategy,
                step_time_s=result.step_time_s,
                device_bytes=result.peak_memory.device,
            )
            for result in answer.runners_up
        ),
        certificate=answer.certificate,
        idle=answer.idle,
        mixed=answer.mixed,
    )
