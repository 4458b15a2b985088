"""`Plan`: a self-contained answer, which a reader can check, simulate, compare, replan or run without other
files; and `PlanQuestion`, what was asked.

Methods of `Plan` that ask a question call `shardwise.api`, which is above this package and imported when they
run (docs/contributing/packages.md).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, overload

from shardwise.cluster import Cluster, Mesh, mesh_of
from shardwise.errors import ConfigError, InternalError
from shardwise.graph import GraphLayout, OpGraph
from shardwise.model import Model
from shardwise.notebook import bars, line, panel, table
from shardwise.plans.record import (
    NO_IDLE_DEVICES,
    Answer,
    Certificate,
    Idle,
    MixedFigures,
    Optimum,
    PlanKind,
    Result,
    TargetBest,
    TraceChoice,
    Value,
)
from shardwise.plans.step_parts import StepParts
from shardwise.schedule import MAX_ACTIONS, Schedule, generate
from shardwise.strategy import ORDERS, Job, Strategy, acting_options, brief_text, groups_of, strategy_record
from shardwise.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from shardwise.api import ExportedPlan, PlanComparison, PlanExplanation
    from shardwise.plans.whole_run import WholeRun

KIND_TEXTS: Mapping[PlanKind, str] = {
    "uniform": "a plan of one strategy",
    "uneven": "an uneven plan",
    "graph": "the plan of an operator graph",
}
"""The kinds as messages name them."""


SPLIT_BACKWARDS = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")
"""Schedules that split the backward pass: up to three actions per stage and micro-batch instead of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What was asked, except for model and job (which has the memory margin).

    `cluster` is the requested cluster, None if it is that of the plan.
    `fixed` restricts fields of the strategy to one value, `axes` to several. `target` is the software that
    the answer was restricted to (None: any). With `use_all` no device may stay idle. `stage_dp` and
    `mixed_stage_rows` are the limits of uneven plans. `epsilon` is the largest factor, less one, by which a
    frontier of an operator graph was allowed to be above the exact one. `events` is the origin of the trace
    of events that the plan was chosen for. `tolerance` is the largest factor, less one, by which a
    recommended strategy may be slower than the optimum. `options` are the requested options of the software.
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
    tolerance: float = 0.0
    options: Mapping[str, str] = field(default_factory=dict)
    cluster: Cluster | None = None

    def of_part(self, part: Cluster, whole: Cluster | None) -> PlanQuestion:
        """The question about the `whole` cluster (None: unknown) for a plan on a `part` of it."""
        return replace(self, cluster=None if whole == part else whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A runner-up: its strategy, step time, and device bytes of its tightest rank."""

    strategy: Strategy
    step_time_s: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """A self-contained answer: what was asked, the layout with its prediction, and the certificate.

    `network` is the model, or the operator graph. `cluster` has the used devices only where `idle` names
    others; then `question` has the requested cluster. `schedule` is the table of actions of a uniform
    strategy, None where it is too long for a plan file. `certificate` is None where nothing was searched: for
    an evaluated strategy, and for a point of a frontier. For the latter `epsilon` says how good the frontier
    is: every layout is matched in step time and device bytes within a factor 1 + `epsilon` by some point of
    it. `mixed` has the step times that a plan on a mixed cluster is compared with. `for_trace` is set if the
    plan was chosen for a trace of events. `answer` is the whole answer of the search, with all figures of the
    runners-up; a plan file does not have it. `optimum` is the fastest strategy where another one within the
    tolerance is recommended, and the certificate is that of the optimum. `targets` are the best strategies of
    targets, in the order in which they are recommended.
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
    answer: Answer | None = field(default=None, compare=False)
    optimum: Optimum | None = None
    targets: tuple[TargetBest, ...] = ()

    @property
    def optimum_s(self) -> float:
        """Step time in seconds of the fastest strategy of the question; that of `best` unless another one is
        recommended."""
        return self.step_time_s if self.optimum is None else self.optimum.step_time_s

    @property
    def runner_up_groups(self) -> tuple[int, ...]:
        """For each runner-up the number of its kind: 0 is that of the best strategy, and runners-up with the
        same number differ in small choices only."""
        return groups_of(self.strategy, [one.strategy for one in self.runners_up]) if self.runners_up else ()

    @property
    def given_up(self) -> float:
        """Step time over the optimum, less one."""
        return self.step_time_s / self.optimum_s - 1.0

    @property
    def memory_band(self) -> tuple[float, float]:
        """Bytes on the device of the tightest rank: the central 80 % of the peaks that runs of unseen sources
        show where these are predicted."""
        return self.best.memory_band_bytes

    @property
    def fits_probability(self) -> float:
        """Probability that the peak memory of the tightest rank is at most the capacity of its device."""
        return self.best.fits_probability

    @property
    def optimum_fits(self) -> float | None:
        """`fits_probability` of the optimum; None in plan files that do not have it."""
        return self.fits_probability if self.optimum is None else self.optimum.fits_probability

    @property
    def kind(self) -> PlanKind:
        """What the stages of the plan have in common."""
        return self.best.kind

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
    def options(self) -> Mapping[str, str]:
        """The options of the software that change how the plan runs, with their values: where stages are not
        alike, those that act on one of them."""
        found: dict[str, str] = {}
        for strategy in (self.best.fields,) if self.best.fields is not None else self._stage_strategies():
            found |= acting_options(self.target, self.job.profile, strategy)
        return found

    def _stage_strategies(self) -> Iterator[Strategy]:
        """Each stage, or each part of a mixed-pool stage, as a strategy. Tensor parallelism of uneven plans
        is with sequence parallelism."""
        for pipeline in self.best.layout.pipelines:
            for stage in pipeline.stages:
                for tp in {part.tp for part in stage.parts} or {stage.tp}:
                    yield Strategy(
                        tp=tp, pp=len(pipeline.stages), vpp=len(stage.layers), cp=stage.cp, cp_kind="ring",
                        ep=1, etp=1, dp=stage.dp, param_shard=1, grad_shard=1, optim_shard=1,
                        micro_batch_size=pipeline.micro_batch_size, schedule="1f1b",
                        sequence_parallel=tp > 1, recompute="none", recompute_layers=0, offload="none",
                        axis_order=ORDERS[0], first_stage_layers=0, last_stage_layers=0,
                    )  # fmt: skip

    @property
    def requested_cluster(self) -> Cluster:
        """The cluster that was asked about: with the nodes that the plan leaves idle, where these are
        known."""
        return self.question.cluster or self.cluster

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
    def step_parts(self) -> StepParts:
        """Computation, communication, overlap and idle time of a step on its critical rank, estimated again.
        Raises ConfigError for an uneven plan that is not one of its cluster."""
        from shardwise.api import step_parts

        return step_parts(self)

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
        """The table of actions of each pipeline.

        Raises ConfigError where one is too long for a plan file.
        """
        if self.schedule is not None:
            return (self.schedule,)
        name, pipelines = self.best.layout.schedule, self.best.layout.pipelines
        if self.best.is_uniform:
            each = _actions(name, len(pipelines[0].stages), len(pipelines[0].stages[0].layers))
            raise ConfigError(
                "has too many micro-batches for a plan file and JSON; leave out --save and --json",
                key="--global-batch-size", found=f"{self.microbatches} micro-batches of {each} actions",
                allowed=f"{MAX_ACTIONS} actions",
            )  # fmt: skip
        return tuple(
            generate(name, pp=len(pipeline.stages), microbatches=pipeline.microbatches, vpp=1)
            for pipeline in pipelines
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

    # For people and notebooks

    @overload
    def explain(
        self, why_not: None = None, *, workers: int = 1, budget: float | str | None = None
    ) -> PlanExplanation: ...

    @overload
    def explain(
        self,
        why_not: Mapping[str, Value] | str,
        *,
        workers: int = 1,
        budget: float | str | None = None,
    ) -> PlanComparison: ...

    def explain(
        self,
        why_not: Mapping[str, Value] | str | None = None,
        *,
        workers: int = 1,
        budget: float | str | None = None,
    ) -> PlanExplanation | PlanComparison:
        """Why this plan: its stages and free memory and, of a uniform strategy, the outcomes of all
        candidates, the best alternative of each field, and what binds.

        With `why_not`, fields of a strategy such as `{"tp": 8}`: the best plan with these values, compared
        with this one term by term. `workers` are processes of the search, `budget` is its limit in seconds.
        Raises ConfigError for fields that cannot be used, Infeasible if nothing with these values fits.
        """
        from shardwise.api import explain

        return explain(self, why_not, workers=workers, budget=budget)

    def what_if(
        self, *, workers: int = 1, budget: float | str | None = None, **changes: str | float
    ) -> PlanComparison:
        """The best plan on a changed cluster or for a changed job, compared with this one term by term.

        Changes are a factor such as `inter_node_bandwidth="2x"` or a value such as `nodes=16`; the names are
        those of the option `--what-if` of `shardwise explain`. Raises ConfigError for a change that cannot
        be made, Infeasible if nothing fits then.
        """
        from shardwise.api import what_if

        return what_if(self, changes, workers=workers, budget=budget)

    def whole_run(
        self,
        *,
        tokens: float | str | None = None,
        steps: int | None = None,
        days: float | None = None,
        power: float | str | None = None,
        mtbf: float | str | None = None,
        checkpoint_interval: float | str | None = None,
        checkpoint_stall: float | str | None = None,
        restart: float | str | None = None,
        jitter: float | None = None,
    ) -> WholeRun:
        """The days, device hours, money and energy of a training run, with failures and checkpoints.

        One of `tokens` (a number, or text such as `15T`), `steps` and `days` says how long the run is.
        `power` is that of a device, in watts or as text such as `1.2kW`, instead of its rated power. Times
        are seconds or text such as `30min`: the mean time between failures of a device (`mtbf`), the work
        between checkpoints, the `checkpoint_stall` of each, and the `restart` after a failure. `jitter` is
        the standard deviation of a node's step time over its mean. Raises ConfigError for an argument that
        cannot be used.
        """
        from shardwise.api import whole_run

        return whole_run(
            self, tokens=tokens, steps=steps, days=days, power=power, mtbf=mtbf,
            checkpoint_interval=checkpoint_interval, checkpoint_stall=checkpoint_stall, restart=restart,
            jitter=jitter,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes the plan file at `path` atomically, as YAML or, for a name that ends in .json, as JSON.

        Returns the hash of the plan. Raises ConfigError if the path cannot be written.
        """
        from shardwise.api import save

        return save(self, path)

    def export(self, *, to: str, out: str | os.PathLike[str], validate: bool = False) -> ExportedPlan:
        """Writes the plan as files of the target `to`, such as `megatron-lm-0.19`, into the folder `out`.

        With `validate` the target's own code reads the files first. Raises ConfigError for a value that the
        target cannot express, or a folder that cannot be written.
        """
        from shardwise.api import export

        return export(self, to=to, out=out, validate=validate)

    def report(self, out: str | os.PathLike[str] | None = None, *, frontier: bool = False) -> str:
        """The report of the plan, one HTML page that needs no network; written to `out` where it is given.

        `frontier` adds the frontier of step time and memory, which is searched. Raises ConfigError for a path
        that cannot be written.
        """
        from shardwise.api import report

        return report(self, out=out, frontier=frontier)

    def to_dict(self) -> dict[str, object]:
        """The plan as plain values, as its file has them: seconds, bytes, tokens per second."""
        from shardwise.plans.documents import plan_document

        return plan_document(self)

    def rows(self) -> list[dict[str, object]]:
        """A row for a data frame for this plan and each runner-up: seconds, bytes, fields of the strategy."""
        found = [(self.best.fields, self.step_time_s, self.best.peak_memory.device)]
        found += [(other.strategy, other.step_time_s, other.device_bytes) for other in self.runners_up]
        return [
            {
                "step_time_s": time_s,
                "device_bytes": nbytes,
                **({} if strategy is None else strategy_record(strategy)),
            }
            for strategy, time_s, nbytes in found
        ]

    def __repr__(self) -> str:
        peak = self.best.peak_memory
        return (
            f"<Plan {self.name} on {self.cluster.name}: {format_seconds(self.step_time_s)} a step, "
            f"{format_bytes(peak.device)} of {format_bytes(peak.capacity)}, {self._division}>"
        )

    @property
    def _division(self) -> str:
        """How the plan divides the work, in a few words."""
        if self.best.fields is not None:
            return self._text_of(self.best.fields)
        if isinstance(self.network, OpGraph):
            return (
                f"mesh {self.mesh.name}" if self.stages == 1 else f"{self.stages} stages of {self.mesh.name}"
            )
        return f"{len(self.best.layout.pipelines)} pipelines"

    def _text_of(self, strategy: Strategy) -> str:
        """The fewest fields that determine a strategy of this plan."""
        experts = self.model.experts
        return brief_text(
            strategy,
            devices=self.devices,
            layers=self.model.layers,
            experts=None if experts is None else experts.experts,
            global_batch_size=self.job.global_batch_size,
        )

    def _repr_html_(self) -> str:
        best, peak = self.best, self.best.peak_memory
        facts = [
            ("strategy", self._division),
            ("step time", f"{format_seconds(self.step_time_s)} (80 % band "
             f"{format_seconds(best.band_s[0])} to {format_seconds(best.band_s[1])})"),
            ("peak memory", f"{format_bytes(peak.device)} of {format_bytes(peak.capacity)} (80 % band "
             f"{' to '.join(map(format_bytes, best.memory_band_bytes))}; "
             f"{best.fits_probability:.2f} likely to fit)"),
        ]  # fmt: skip
        if best.tokens_per_s_per_device is not None:
            facts.append(("throughput", f"{format_count(best.tokens_per_s_per_device)} tokens/s per device"))
        parts = [
            table((), facts),
            bars("Step time", self.breakdown, format_seconds),
            bars("Memory of the tightest rank", self.memory, format_bytes),
        ]
        if self.runners_up:
            others = [
                (
                    self._text_of(other.strategy),
                    format_seconds(other.step_time_s),
                    format_bytes(other.device_bytes),
                )
                for other in self.runners_up
            ]
            parts.append(table(("runner-up", "step time", "peak memory"), others))
        if self.certificate is not None:
            parts.append(line(_proof_text(self.certificate)))
        return panel(f"{self.name} on {self.cluster.name}", *parts)


def schedule_of(result: Result) -> Schedule | None:
    """The table of actions of a uniform strategy for a step; None if the stages are not alike, or if it is
    too long for a plan file."""
    if not result.is_uniform:
        return None
    name, pipeline = result.layout.schedule, result.layout.pipelines[0]
    pp, vpp = len(pipeline.stages), len(pipeline.stages[0].layers)
    if pipeline.microbatches * _actions(name, pp, vpp) > MAX_ACTIONS:
        return None
    return generate(name, pp=pp, microbatches=pipeline.microbatches, vpp=vpp)


def _actions(name: str, pp: int, vpp: int) -> int:
    """Actions of a micro-batch on all stages."""
    return (3 if name in SPLIT_BACKWARDS else 2) * pp * vpp


def _proof_text(certificate: Certificate) -> str:
    if certificate.is_proven:
        return f"Proven optimal among {certificate.enumerated:,} candidates."
    return f"Not proven: no candidate takes less than {format_seconds(certificate.lower_bound_s)}."


def plan_of(
    answer: Answer, *, model: Model, cluster: Cluster, job: Job, question: PlanQuestion | None = None
) -> Plan:
    """The plan of `answer` to `question` about `model` on `cluster`, the part of it that is used."""
    return Plan(
        network=model,
        cluster=cluster,
        job=job,
        question=(question or PlanQuestion(objective=answer.objective)).of_part(cluster, answer.whole),
        best=answer.best,
        schedule=schedule_of(answer.best),
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
        answer=answer,
        optimum=answer.optimum,
        targets=answer.targets,
    )
