"""The training loop (`train`), its options and records, and training on this machine's processes with
restarts (`train_locally`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import distributed

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.runtime.adaptive import Adaptation, Advisor, ReplanEvent
from shardwise.runtime.checkpoint import (
    AsyncCheckpoint,
    Manifest,
    check_unfinished,
    clear_unfinished,
    finished,
    load,
    resumable,
)
from shardwise.runtime.data import ORDER_VERSION, SYNTHETIC, DataIdentity
from shardwise.runtime.devices import check_local_devices, is_on_host, synchronize_device
from shardwise.runtime.distribute import divided, network_of
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.profiling import StepTrace, traced
from shardwise.runtime.timing import Stopwatch, thread_busy_s, unknown_busy_s
from shardwise.runtime.workers import RankLost, RankTask, WorkerPool
from shardwise.sim import Span
from shardwise.strategy import Strategy

# The training loop


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of `train`. `data` is `synthetic`, or the path of a token file (for a graph, of a folder of
    arrays).

    With `checkpoint` (a folder), the job is saved there after every `checkpoint_every` steps and at the end,
    while the next step runs. The run resumes from the checkpoint in the folder `resumed` after its `start`
    steps, if given. Else parameters come from the safetensors in the folder `weights`, or from the seed. With
    an `advisor`, the run replans.
    """

    steps: int
    data: str = SYNTHETIC
    lr: float = 1e-3
    seed: int = 0
    checkpoint: str | None = None
    checkpoint_every: int = 100
    is_traced: bool = False
    weights: str | None = None
    resumed: str | None = None
    start: int = 0
    advisor: Advisor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Record of one step, counted from 1.

    Has the mean loss per token (for a graph, its loss), and the measured and predicted seconds of the step.
    `strategy` is None unless the plan is uniform. `exposed_s` is exposed communication in seconds, None if
    unknown. `change` is a replan event after the step.
    """

    step: int
    loss: float
    gradient_norm: float
    step_time_s: float
    predicted_s: float
    strategy: Strategy | None
    exposed_s: float | None = None
    change: ReplanEvent | None = None


def train(report: Callable[[StepRecord], None], plan: Plan, options: TrainOptions) -> tuple[Span, ...]:
    """Train under `plan` until step `options.steps`. Call it on every rank of the process group.

    `report` gets a record of every step, equal on all ranks except for times. Returns the spans of the last
    step on this rank if `is_traced`, which makes that step slower; else nothing.
    """
    check_options(plan, is_adaptive=options.advisor is not None, is_traced=options.is_traced)
    busy = thread_busy_s if is_on_host(plan.cluster) else unknown_busy_s
    samples = network_of(plan).samples(options.data, options.seed)
    job = start_job(plan, options)
    rank = distributed.get_rank()
    if options.checkpoint is not None and rank == 0:
        clear_unfinished(options.checkpoint)
    content = samples.content() if options.checkpoint is not None and rank == 0 else None
    trace = StepTrace()
    saving: AsyncCheckpoint | None = None
    adaptation = None
    if options.advisor is not None:
        adaptation = Adaptation(options.advisor, plan, options.steps)
    for step in range(options.start, options.steps):
        batch = samples.batch(step)
        is_last = step + 1 == options.steps
        with traced(rank) if is_last and options.is_traced else nullcontext(trace) as trace:
            stopwatch = Stopwatch.started(busy=busy)
            result = job.step(batch)
            synchronize_device(plan.cluster)
            step_s, exposed_s = stopwatch.read()
        record = StepRecord(
            step=step + 1,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            step_time_s=step_s,
            predicted_s=plan.step_time_s if adaptation is None else adaptation.predicted_s,
            strategy=job.plan.best.fields,
            exposed_s=exposed_s,
        )
        if saving is not None:  # a step is reported only after the checkpoint before it is complete
            saving.wait()
            saving = None
        if adaptation is not None:
            job, change = adaptation.after(job, step + 1, step_s)
            record = replace(record, change=change)
        report(record)
        is_due = (step + 1) % options.checkpoint_every == 0 or is_last
        if options.checkpoint is not None and is_due:
            saving = AsyncCheckpoint(
                job,
                options.checkpoint,
                step=step + 1,
                seed=options.seed,
                data=options.data,
                content=content,
            )
    if saving is not None:
        saving.wait()
    return trace.spans


def start_job(plan: Plan, options: TrainOptions) -> TrainingJob:
    """The job under `plan` with the state after `options.start` steps. Call it on every rank."""
    network = network_of(plan)
    job = divided(network.module(), plan, lr=options.lr)
    if options.resumed is not None:
        load(job, options.resumed)
    else:
        job.fill(network.values(seed=options.seed, weights=options.weights))
    return job


# Checks of options


def check_options(plan: Plan, *, is_adaptive: bool, is_traced: bool) -> None:
    """ConfigError if an option is not available for this kind of plan or its devices."""
    if is_adaptive:
        plan.require_kind("uniform", key="--adaptive")
    if is_on_host(plan.cluster):
        return
    for key, is_requested in (("--adaptive", is_adaptive), ("--trace", is_traced)):
        if is_requested:
            raise ConfigError(
                "is not supported on accelerators", key=key, found=", ".join(plan.cluster.classes),
                allowed="train without it",
            )  # fmt: skip


def check_unused(folder: str) -> None:
    """ConfigError if `folder` has checkpoints of an earlier run, since `--resume` would take them for this
    run's. Also if it has folders named like checkpoints that shardwise did not create."""
    steps = finished(folder)
    if steps:
        raise ConfigError(
            "has checkpoints of an earlier run", file=folder, key="--checkpoint",
            found=f"step {steps[-1]}", allowed="another folder, or --resume",
        )  # fmt: skip
    check_unfinished(folder)


def resumed_options(options: TrainOptions, plan: Plan) -> TrainOptions:
    """`options` to resume from the newest checkpoint in `options.checkpoint`, with its seed. ConfigError if
    there is none, or if it does not fit `plan` and `options`."""
    if options.checkpoint is None:
        raise ConfigError("needs --checkpoint", key="--resume", allowed="--checkpoint DIR --resume")
    folder, manifest = resumable(plan, options.checkpoint)
    check_unfinished(options.checkpoint)
    resumed = replace(options, resumed=folder, start=manifest.step, seed=manifest.seed)
    _check_data(resumed, plan, manifest)
    if manifest.step >= options.steps:
        raise ConfigError(
            "is not after the checkpoint", key="--steps", found=str(options.steps),
            allowed=f"more than {manifest.step}, the steps of the checkpoint",
        )  # fmt: skip
    return resumed


def _check_data(options: TrainOptions, plan: Plan, manifest: Manifest) -> None:
    """ConfigError if `options` name other data than the checkpoint's, or the same data in another order. Data
    is compared by its content, not by its path."""
    if (options.data == SYNTHETIC) != (manifest.data == SYNTHETIC):
        raise ConfigError(
            "differs from the checkpoint", key="--data", found=options.data, allowed=manifest.data
        )
    if options.data == SYNTHETIC:
        return
    if manifest.content is None or manifest.content.order != ORDER_VERSION:
        raise ConfigError(
            "has an order of samples that this version of shardwise does not support",
            file=options.resumed, key="data", found=manifest.data,
            allowed="a checkpoint of this version, or a new run with --weights of an --export",
        )  # fmt: skip
    content = network_of(plan).samples(options.data, options.seed).content()
    if content != manifest.content:
        raise ConfigError(
            "differs from the checkpoint's data", file=options.data, key="--data",
            found="nothing" if content is None else _describe(content),
            allowed=f"{_describe(manifest.content)}, as in {manifest.data}",
        )  # fmt: skip


def _describe(content: DataIdentity) -> str:
    return f"{content.nbytes:,} bytes ({content.hash[:19]}) in {content.windows:,} windows"


# Training on this machine


def train_locally(
    plan: Plan,
    options: TrainOptions,
    *,
    report: Callable[[StepRecord], None],
    restarts: int = 0,
    on_restart: Callable[[RankLost, int], None] | None = None,
    work: RankTask = train,
) -> list[tuple[Span, ...]]:
    """Train on processes of this machine, one per device of the plan; returns the result of `work` on each
    rank.

    `work` is `train`, except in tests. If a signal ends a rank, up to `restarts` times, all ranks restart
    from the newest checkpoint, or from the beginning if there is none. `on_restart` gets the loss and the
    step to resume from; `report` then gets the later steps again. Raises ConfigError if the plan's devices
    are not all here. Raises RankLost if a rank fails by itself, if there are no checkpoints, and after the
    last restart.
    """
    ranks = plan.cluster.devices
    check_local_devices(plan.cluster, ranks)
    with WorkerPool(ranks) as team:
        while True:
            try:
                return team.run(ranks, work, plan, options, report=report)
            except RankLost as error:
                if not (error.was_ended and options.checkpoint is not None and restarts):
                    raise
                restarts -= 1
                options = restart_options(options, plan)
                if on_restart is not None:
                    on_restart(error, options.start)


def restart_options(options: TrainOptions, plan: Plan) -> TrainOptions:
    """`options` to resume from the newest checkpoint of the run; from the beginning if there is none yet."""
    if options.checkpoint is None or not finished(options.checkpoint):
        return replace(options, resumed=None, start=0)
    return resumed_options(options, plan)
