"""The command line with a planner that answers by hand; models and clusters are real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardwise.app.cli.main import main
from shardwise.cluster import Cluster
from shardwise.model import Model
from shardwise.plans import Answer, Certificate, Layout, PeakMemory, Pipeline, Result, Stage
from shardwise.schedule import Schedule, generate
from shardwise.sim import Durations
from shardwise.strategy import Job, Strategy, complete

GIB = 2.0**30

STEP_TIME_S = 12.5


@dataclass(frozen=True)
class Ran:
    """The result of a command: exit code, stdout, stderr."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("plan", ...)` calls the command in this process."""
    monkeypatch.delenv("SHARDWISE_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*argv: str) -> Ran:
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@dataclass
class Planner:
    """Replaces the search: answers by hand, and records its questions. `error` is raised instead of an
    answer.
    """

    questions: list[Any] = field(default_factory=list)
    error: Exception | None = None
    gap: float = 0.0

    def default_job(self, model: Model, cluster: Cluster, *, dtype: str | None = None, **options: Any) -> Job:
        return Job(dtype=dtype or "bf16", **options)

    def plan(self, question: Any, *, progress: object = None, clock: object = None) -> Answer:
        self.questions.append(question)
        if self.error is not None:
            raise self.error
        texts: tuple[Mapping[str, Any], ...] = (
            {"tp": 8, "pp": 2, "zero_stage": 1},
            {"tp": 4, "pp": 2, "schedule": "gpipe", "recompute": "full"},
            {"tp": 8, "pp": 2, "zero_stage": 3},
        )
        model, cluster, job = question.model, question.cluster, question.job
        results = [result_of(_strategy(text, model, cluster, job), model, cluster, job) for text in texts]
        return Answer(
            best=results[0],
            runners_up=tuple(results[1 : 1 + question.top]),
            certificate=certificate_of(question.space, self.gap),
        )

    def step_durations(
        self, model: Model, cluster: Cluster, job: Job, strategy: Strategy
    ) -> tuple[Schedule, Durations]:
        """1 ms forward, 2 ms backward, 0.5 ms to the next stage."""
        microbatches = job.global_batch_size // strategy.dp // strategy.micro_batch_size
        schedule = generate(strategy.schedule, pp=strategy.pp, microbatches=microbatches, vpp=strategy.vpp)
        durations = Durations.of(
            stages=schedule.stages, forward_s=1e-3, backward_s=2e-3, hop_forward_s=5e-4, hop_backward_s=5e-4
        )
        return schedule, durations

    def host_memory(self, *_: object) -> tuple[float, float]:
        """Nothing is offloaded to 256 GiB."""
        return 0.0, 256 * GIB

    def evaluate(self, model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> Result:
        if self.error is not None:
            raise self.error
        return result_of(strategy, model, cluster, job)


def certificate_of(space: str, gap: float) -> Certificate:
    return Certificate(
        space=space,
        enumerated=1_234,
        rejected={"memory": 1_000, "heads_tp": 200},
        cut_by_bound=30,
        simulated=4,
        best_s=STEP_TIME_S,
        lower_bound_s=STEP_TIME_S * (1 - gap),
        gap=gap,
        search_s=0.0123,
        search_cpu_s=0.0119,
    )


def result_of(strategy: Strategy, model: Model, cluster: Cluster, job: Job) -> Result:
    """An estimate by hand: 12.5 s, and 0.25 s more for another tp than 8 or for full recomputation."""
    time_s = STEP_TIME_S + 0.25 * (strategy.tp != 8) + 0.25 * (strategy.recompute == "full")
    tokens = job.seq_len * job.global_batch_size
    per_stage = cluster.devices // strategy.pp
    stages = tuple(
        Stage(
            devices=per_stage,
            ranks=f"{index * per_stage}-{index * per_stage + per_stage - 1}",
            device_class=next(iter(cluster.classes)),
            tp=strategy.tp,
            cp=strategy.cp,
            dp=strategy.dp,
            layers=(model.layers // strategy.pp // strategy.vpp,) * strategy.vpp,
            share=1.0,
            recompute=strategy.recompute,
        )
        for index in range(strategy.pp)
    )
    memory = {"parameters": 20 * GIB, "gradients": 10 * GIB, "activations": 25 * GIB, "context": 5 * GIB}
    return Result(
        fields=strategy,
        layout=Layout(
            schedule=strategy.schedule,
            pipelines=(
                Pipeline(
                    stages=stages,
                    micro_batch_size=strategy.micro_batch_size,
                    microbatches=job.global_batch_size // strategy.dp // strategy.micro_batch_size,
                    rows=job.global_batch_size,
                    makespan_s=time_s,
                ),
            ),
        ),
        step_time_s=time_s,
        band_s=(time_s * 0.9, time_s * 1.2),
        tokens_per_s_per_device=tokens / time_s / cluster.devices,
        mfu=0.456,
        mfu_full_attention=0.5,
        peak_memory=PeakMemory(allocated=50 * GIB, reserved=55 * GIB, device=60 * GIB, capacity=80 * GIB),
        memory_band_bytes=(57.4 * GIB, 66.6 * GIB),
        fits_probability=0.934,
        breakdown={"forward": time_s * 0.25, "backward": time_s * 0.5, "pipeline_bubble": time_s * 0.25},
        memory=memory,
        tightest_rank=3,
        evaluator="max-plus",
    )


def _strategy(fields: Mapping[str, Any], model: Model, cluster: Cluster, job: Job) -> Strategy:
    return complete(
        fields,
        devices=cluster.devices,
        layers=model.layers,
        experts=None,
        global_batch_size=job.global_batch_size,
    )


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    """Replaces the search by a `Planner`."""
    planner = Planner()
    for name in ("plan", "evaluate", "default_job", "step_durations", "host_memory"):
        where = "plan_timeline." if name == "step_durations" else ""
        monkeypatch.setattr(f"shardwise.search.{where}{name}", getattr(planner, name))
    return planner
