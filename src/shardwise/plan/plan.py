"""The plan: all that a reader needs to check, simulate or run an answer, nothing from outside the file."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster import Cluster
from shardwise.model import Model
from shardwise.plan.for_trace import TraceChoice
from shardwise.plan.record import Answer, Certificate, Result
from shardwise.schedule import Schedule
from shardwise.strategy import Job, Strategy

SCHEMA = "shardwise.plan"
VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A strategy that came close, in brief: its step time and the device bytes of its tightest rank."""

    strategy: Strategy
    step_time_s: float
    device_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A self-contained answer: the question, the strategy with its layout and schedule, its price, and the
    proof; `for_trace` where it was chosen for a trace of events. `target` is the software that it was
    planned for, None for any."""

    model: Model
    cluster: Cluster
    job: Job
    objective: str
    best: Result
    schedule: Schedule
    runners_up: tuple[RunnerUp, ...]
    certificate: Certificate
    for_trace: TraceChoice | None = None
    target: str | None = None

    @property
    def priced_as(self) -> tuple[str, ...]:
        """What it was priced as where that is not what was given."""
        return self.certificate.priced_as


def plan_of(
    answer: Answer,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    schedule: Schedule,
    objective: str = "time",
    target: str | None = None,
) -> Plan:
    """The plan that stands for `answer` to the question about `model` on `cluster`.

    `schedule` is the table of actions that the best strategy's step time was evaluated on; `target` is the
    software that the question was restricted to.
    """
    return Plan(
        model=model,
        cluster=cluster,
        job=job,
        objective=objective,
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
        target=target,
    )
