"""What `train` does: checks what is asked for, starts the processes where none were started, says how it
went."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from shardwise.app.cli import words
from shardwise.app.cli.adapting import advisor_for
from shardwise.app.cli.failure import failure_of
from shardwise.app.cli.launched import TORCHRUN_VARIABLE
from shardwise.app.cli.output import INTERRUPTED, Line, Output, row
from shardwise.app.cli.request import writable
from shardwise.app.cli.resuming import going_on, interrupted, lost
from shardwise.app.cli.signals import ended_like_interrupts
from shardwise.app.cli.trained import kind_of
from shardwise.app.cli.training_run import Asked, Run, kept_bytes, showing
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plan import AnyPlan, GraphPlan, Plan, plan_hash, read_any_plan
from shardwise.sim import Span, Trace, write_trace

if TYPE_CHECKING:
    from shardwise.runtime import TrainOptions

FAILED = 1
REFUSED = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may begin: nothing was written for it yet."""

    run: Run
    options: TrainOptions


_PROFILER_LEVEL = "6"
"""Above all that PyTorch's profiler says by itself amid what is said of steps, a line whenever it starts or
stops. It is read when PyTorch is loaded, here and in the processes that are started."""


def trained(asked: Asked) -> Output:
    """Train as `asked`, on processes of this machine or on those that a launcher started.

    ConfigError where the plan cannot be run here; exit code 1 where a rank is lost.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _PROFILER_LEVEL)
    with ended_like_interrupts():
        if TORCHRUN_VARIABLE in os.environ:
            from shardwise.app.cli.launched_training import trained_by_launcher

            return trained_by_launcher(asked)
        check_files(asked)
        return _trained_here(prepared(asked))


def _trained_here(ready: Prepared) -> Output:
    """Train on processes of this machine."""
    from shardwise.runtime import RankLost, train_here

    run, options, asked = ready.run, ready.options, ready.run.asked
    make_folders(asked)
    try:
        with showing(run, options.start) as out:
            spans = train_here(
                run.plan, options, report=out.report, restarts=asked.restarts, on_restart=out.go_back
            )
    except RankLost as error:
        return Output(talk=lost(error, run, options), code=FAILED)
    except ConfigError as error:
        return Output(talk=refused(error, run, options), code=REFUSED)
    except KeyboardInterrupt:
        if options.checkpoint is None:
            raise
        return Output(talk=interrupted(run, options), code=INTERRUPTED)
    if asked.trace is not None:
        write_trace_of(run, [span for rank in spans for span in rank])
    return answer(run, options)


def check_files(asked: Asked) -> None:
    """ConfigError where the log or the trace cannot be written, or would be lost."""
    paths = [os.path.realpath(path) for path in (asked.log, asked.trace) if path is not None]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            "is the log too, which would be lost", file=printable(str(asked.trace)), key="--trace",
            allowed="the name of another file",
        )  # fmt: skip
    for option, written in (("--log", asked.log), ("--trace", asked.trace)):
        if written is not None:
            writable(option, written, inputs=(asked.path, asked.data))


def prepared(asked: Asked) -> Prepared:
    """The run that is asked for, once all that it needs was looked at. ConfigError where it cannot begin."""
    plan = read_any_plan(asked.path)
    from shardwise.runtime import (
        TrainOptions,
        check_named,
        check_options,
        check_unused,
        resumed_options,
        samples_of,
    )

    options = TrainOptions(
        steps=asked.steps,
        data=asked.data,
        lr=asked.lr,
        seed=asked.seed,
        checkpoint=asked.checkpoint,
        checkpoint_every=asked.checkpoint_every,
        is_traced=asked.trace is not None,
        weights=asked.weights,
    )
    _check_runs(plan)
    check_options(plan, is_adaptive=asked.adaptive, is_traced=asked.trace is not None)
    if asked.adaptive and isinstance(plan, Plan):
        options = replace(options, advisor=advisor_for(plan))
    if asked.resume and asked.weights is not None:
        raise ConfigError(
            "is not used where a run goes on from a checkpoint, which has its own", key="--weights",
            found=asked.weights, allowed="--resume without it, or another --checkpoint without --resume",
        )  # fmt: skip
    if not isinstance(plan, GraphPlan) and (asked.weights is not None or asked.export is not None):
        check_named(plan.model)
    if asked.export is not None and asked.checkpoint is None:
        raise ConfigError("needs --checkpoint, from which it is made", key="--export", found=asked.export)
    samples_of(plan, options).batch(0)
    if asked.resume:
        options = resumed_options(options, plan)
        if asked.log is not None:
            kept_bytes(asked.log, options.start)
    elif asked.checkpoint is not None:
        check_unused(asked.checkpoint)
    return Prepared(Run(asked=asked, plan=plan), options)


def _check_runs(plan: AnyPlan) -> None:
    """ConfigError where the runtime does not run `plan`."""
    from shardwise.runtime import check_graph_runnable, check_runnable, check_told, check_uneven_runnable

    if isinstance(plan, Plan):
        check_runnable(plan)
    elif isinstance(plan, GraphPlan):
        check_graph_runnable(plan)
        check_told(plan.graph)
    else:
        check_uneven_runnable(plan)


def refused(error: ConfigError, run: Run, options: TrainOptions) -> list[str]:
    """What to say of a run that `error` ended: where it had begun, how it goes on too."""
    return [*failure_of(error).lines(), *(going_on(run, options) if run.records else ())]


def answer(run: Run, options: TrainOptions) -> Output:
    """The summary; the parameters too, where a folder is named for them."""
    from shardwise.runtime import export

    if run.asked.export is not None and options.checkpoint is not None:
        export(run.plan, options.checkpoint, run.asked.export)
    return _summary(run)


def write_trace_of(run: Run, spans: Sequence[Span]) -> None:
    """The trace that was asked for: the spans of all ranks, from the first on, in the form that `simulate
    --trace` writes, with the hash of the plan that they ran."""
    origin_s = min(span.start_s for span in spans)
    shifted = (
        replace(span, start_s=span.start_s - origin_s, finish_s=span.finish_s - origin_s) for span in spans
    )
    write_trace(Trace(spans=tuple(shifted), plan_hash=plan_hash(run.last_plan())), str(run.asked.trace))


def make_folders(asked: Asked) -> None:
    """The folders that the run writes into; last of all, so that what is refused leaves none."""
    for option, folder in (("--checkpoint", asked.checkpoint), ("--export", asked.export)):
        if folder is not None:
            _make_folder(option, folder)


def _make_folder(option: str, path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be made: {why}", file=printable(path), key=option) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError("cannot be written to", file=printable(path), key=option)


def _changed(run: Run, changes: Sequence[int]) -> list[Line]:
    """That the run has changed its strategy after the steps `changes`, and what it began with."""
    first, last = run.records[0].strategy, run.records[-1].strategy
    if not changes or first is None or last is None:
        return []
    began = words.degrees_text(first)
    if first != last and began == words.degrees_text(last):
        began += f" ({words.changed_fields(first, last, but='')})"
    times = "" if len(changes) == 1 else f"{words.counted(len(changes), 'time')}, last "
    return [row("changed", (f"{times}after step {changes[-1]:,}; it began with {began}", ""))]


def _summary(run: Run) -> Output:
    """What the run was under its last strategy, and whether that is the one of the plan."""
    trained, records = run.trained, run.records
    first, last = records[0], records[-1]
    changes = run.changes()
    under_last = [record for record in records if not changes or record.step > changes[-1]]
    typical_s = median(record.step_time_s for record in under_last[len(under_last) // 4 :])
    amount = f"   {words.counted(last.step, 'step')} of {trained.per_step:,} {trained.unit}"
    kind = kind_of(run.last_plan())
    described = [] if kind is None else [row(kind[0], (kind[1], "")), *_changed(run, changes)]
    return Output(
        lines=[
            row("trained", (f"{trained.name} on {run.plan.cluster.name}", "value"), (amount, "")),
            *described,
            row("loss", (f"{first.loss:.4f} to {last.loss:.4f}", "value")),
            row("step time", (words.seconds(typical_s), "time"),
                (f" measured (median), {words.seconds(last.predicted_s)} predicted", "")),
        ]
    )  # fmt: skip
