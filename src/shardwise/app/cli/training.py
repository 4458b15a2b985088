"""What `train` does: checks what is asked for, starts the processes where none were started, says how it
went.

How a run that has ended goes on: the command that does it.

What `train` does in a process that a launcher started: all meet first, and one speaks for all.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from shardwise.app.cli import words
from shardwise.app.cli.adapting import advisor_for
from shardwise.app.cli.launched import (
    COMMAND_VARIABLE,
    TORCHRUN_VARIABLE,
    LaunchedRank,
    ignore_termination,
    launched_rank_of,
    signals_as_interrupts,
)
from shardwise.app.cli.output import INTERRUPTED, Line, Output, failure_of, print_notes, row
from shardwise.app.cli.request import check_output_path
from shardwise.app.cli.training_run import (
    TrainArguments,
    TrainingRun,
    plan_label,
    resumed_log_bytes,
    step_reporter,
)
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import AnyPlan, GraphPlan, Plan, plan_hash, read_any_plan
from shardwise.sim import Span, Trace, write_trace

if TYPE_CHECKING:
    from shardwise.runtime import RankLost, Rendezvous, TrainOptions


def lost(error: RankLost, run: TrainingRun, options: TrainOptions) -> list[str]:
    """What to say where a rank is lost."""
    lines = [f"shardwise: error: {error} {run.progress()}; the other ranks were ended"]
    lines += resume_lines(run, options)
    if os.environ.get("SHARDWISE_DEBUG") and error.details:
        lines.append(error.details)
    return lines


def interrupted(run: TrainingRun, options: TrainOptions) -> list[str]:
    """What to say where the user, or who started this process, ends it."""
    return [f"shardwise: error: interrupted {run.progress()}", *resume_lines(run, options)]


def resume_lines(run: TrainingRun, options: TrainOptions) -> list[str]:
    """The command that goes on with `run`, and from where; nothing where it saves nothing, or what it has
    saved cannot be gone on from."""
    from shardwise.runtime import restart_options

    if options.checkpoint is None:
        return []
    try:
        is_saved = restart_options(options, run.plan).resumed is not None
    except ConfigError as error:
        return [f"  it cannot go on: {error}"]
    where = "the last checkpoint" if is_saved else "the beginning"
    launcher = os.environ.get(COMMAND_VARIABLE)
    words = resume_arguments(run.arguments, options, is_saved=is_saved)
    if launcher:
        return [f"  to go on from {where}: {launcher} -- {shlex.join(words)}"]
    if TORCHRUN_VARIABLE in os.environ:
        where += ", under the same launcher"
    return [f"  to go on from {where}: {shlex.join(['shardwise', 'train', run.arguments.path, *words])}"]


def resume_arguments(arguments: TrainArguments, options: TrainOptions, *, is_saved: bool) -> list[str]:
    """The options of `train` that go on with a run, from its last checkpoint where there `is_saved` one."""
    words = ["--data", arguments.data, "--steps", str(arguments.steps), "--lr", repr(arguments.lr)]
    words += ["--checkpoint-every", str(arguments.checkpoint_every), "--restarts", str(arguments.restarts)]
    given = {"--checkpoint": arguments.checkpoint, "--log": arguments.log, "--trace": arguments.trace,
             "--export": arguments.export}  # fmt: skip
    if not is_saved:
        words += ["--seed", str(options.seed)]
        given["--weights"] = arguments.weights
    for option, text in given.items():
        if text is not None:
            words += [option, text]
    if arguments.adaptive:
        words.append("--adaptive")
    if is_saved:
        words.append("--resume")
    return words


FAILED = 1
REFUSED = 2


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may begin: nothing was written for it yet."""

    run: TrainingRun
    options: TrainOptions


_PROFILER_LEVEL = "6"
"""Above all that PyTorch's profiler says by itself amid what is said of steps, a line whenever it starts or
stops. It is read when PyTorch is loaded, here and in the processes that are started."""


def trained(arguments: TrainArguments) -> Output:
    """Train as `arguments`, on processes of this machine or on those that a launcher started.

    ConfigError where the plan cannot be run here; exit code 1 where a rank is lost.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _PROFILER_LEVEL)
    with signals_as_interrupts():
        if TORCHRUN_VARIABLE in os.environ:
            return trained_by_launcher(arguments)
        check_files(arguments)
        return _trained_here(prepared(arguments))


def _trained_here(ready: Prepared) -> Output:
    """Train on processes of this machine."""
    from shardwise.runtime import RankLost, train_locally

    run, options, arguments = ready.run, ready.options, ready.run.arguments
    make_folders(arguments)
    try:
        with step_reporter(run, options.start) as out:
            spans = train_locally(
                run.plan, options, report=out.report, restarts=arguments.restarts, on_restart=out.roll_back
            )
    except RankLost as error:
        return Output(notes=lost(error, run, options), code=FAILED)
    except ConfigError as error:
        return Output(notes=refused(error, run, options), code=REFUSED)
    except KeyboardInterrupt:
        if options.checkpoint is None:
            raise
        return Output(notes=interrupted(run, options), code=INTERRUPTED)
    if arguments.trace is not None:
        write_trace_of(run, [span for rank in spans for span in rank])
    return answer(run, options)


def check_files(arguments: TrainArguments) -> None:
    """ConfigError where the log or the trace cannot be written, or would be lost."""
    paths = [os.path.realpath(path) for path in (arguments.log, arguments.trace) if path is not None]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            "is the log too, which would be lost", file=printable(str(arguments.trace)), key="--trace",
            allowed="the name of another file",
        )  # fmt: skip
    for option, written in (("--log", arguments.log), ("--trace", arguments.trace)):
        if written is not None:
            check_output_path(option, written, inputs=(arguments.path, arguments.data))


def prepared(arguments: TrainArguments) -> Prepared:
    """The run that is asked for, once all that it needs was looked at. ConfigError where it cannot begin."""
    plan = read_any_plan(arguments.path)
    from shardwise.runtime import (
        TrainOptions,
        check_options,
        check_unused,
        check_weight_names,
        resumed_options,
        samples_of,
    )

    options = TrainOptions(
        steps=arguments.steps,
        data=arguments.data,
        lr=arguments.lr,
        seed=arguments.seed,
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
        is_traced=arguments.trace is not None,
        weights=arguments.weights,
    )
    _check_runs(plan)
    check_options(plan, is_adaptive=arguments.adaptive, is_traced=arguments.trace is not None)
    if arguments.adaptive and isinstance(plan, Plan):
        options = replace(options, advisor=advisor_for(plan))
    if arguments.resume and arguments.weights is not None:
        raise ConfigError(
            "is not used where a run goes on from a checkpoint, which has its own", key="--weights",
            found=arguments.weights, allowed="--resume without it, or another --checkpoint without --resume",
        )  # fmt: skip
    if not isinstance(plan, GraphPlan) and (arguments.weights is not None or arguments.export is not None):
        check_weight_names(plan.model)
    if arguments.export is not None and arguments.checkpoint is None:
        raise ConfigError("needs --checkpoint, from which it is made", key="--export", found=arguments.export)
    samples_of(plan, options).batch(0)
    if arguments.resume:
        options = resumed_options(options, plan)
        if arguments.log is not None:
            resumed_log_bytes(arguments.log, options.start)
    elif arguments.checkpoint is not None:
        check_unused(arguments.checkpoint)
    return Prepared(TrainingRun(arguments=arguments, plan=plan), options)


def _check_runs(plan: AnyPlan) -> None:
    """ConfigError where the runtime does not run `plan`."""
    from shardwise.runtime import (
        check_computable,
        check_graph_runnable,
        check_runnable,
        check_uneven_runnable,
    )

    if isinstance(plan, Plan):
        check_runnable(plan)
    elif isinstance(plan, GraphPlan):
        check_graph_runnable(plan)
        check_computable(plan.graph)
    else:
        check_uneven_runnable(plan)


def refused(error: ConfigError, run: TrainingRun, options: TrainOptions) -> list[str]:
    """What to say of a run that `error` ended: where it had begun, how it goes on too."""
    return [*failure_of(error).lines(), *(resume_lines(run, options) if run.records else ())]


def answer(run: TrainingRun, options: TrainOptions) -> Output:
    """The summary; the parameters too, where a folder is named for them."""
    from shardwise.runtime import export

    if run.arguments.export is not None and options.checkpoint is not None:
        export(run.plan, options.checkpoint, run.arguments.export)
    return _summary(run)


def write_trace_of(run: TrainingRun, spans: Sequence[Span]) -> None:
    """The trace that was asked for: the spans of all ranks, from the first on, in the form that `simulate
    --trace` writes, with the hash of the plan that they ran."""
    origin_s = min(span.start_s for span in spans)
    shifted = (
        replace(span, start_s=span.start_s - origin_s, finish_s=span.finish_s - origin_s) for span in spans
    )
    write_trace(Trace(spans=tuple(shifted), plan_hash=plan_hash(run.last_plan())), str(run.arguments.trace))


def make_folders(arguments: TrainArguments) -> None:
    """The folders that the run writes into; last of all, so that what is refused leaves none."""
    for option, folder in (("--checkpoint", arguments.checkpoint), ("--export", arguments.export)):
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


def _changed(run: TrainingRun, changes: Sequence[int]) -> list[Line]:
    """That the run has changed its strategy after the steps `changes`, and what it began with."""
    first, last = run.records[0].strategy, run.records[-1].strategy
    if not changes or first is None or last is None:
        return []
    began = words.degrees_text(first)
    if first != last and began == words.degrees_text(last):
        began += f" ({words.changed_fields(first, last, but='')})"
    times = "" if len(changes) == 1 else f"{words.counted(len(changes), 'time')}, last "
    return [row("changed", (f"{times}after step {changes[-1]:,}; it began with {began}", ""))]


def _summary(run: TrainingRun) -> Output:
    """What the run was under its last strategy, and whether that is the one of the plan."""
    workload, records = run.workload, run.records
    first, last = records[0], records[-1]
    changes = run.changes()
    under_last = [record for record in records if not changes or record.step > changes[-1]]
    typical_s = median(record.step_time_s for record in under_last[len(under_last) // 4 :])
    amount = f"   {words.counted(last.step, 'step')} of {workload.per_step:,} {workload.unit}"
    kind = plan_label(run.last_plan())
    described = [] if kind is None else [row(kind[0], (kind[1], "")), *_changed(run, changes)]
    return Output(
        lines=[
            row("trained", (f"{workload.name} on {run.plan.cluster.name}", "value"), (amount, "")),
            *described,
            row("loss", (f"{first.loss:.4f} to {last.loss:.4f}", "value")),
            row("step time", (words.seconds(typical_s), "time"),
                (f" measured (median), {words.seconds(last.predicted_s)} predicted", "")),
        ]
    )  # fmt: skip


def trained_by_launcher(arguments: TrainArguments) -> Output:
    """This process's part of a run: rank 0 speaks and writes for all while it lives, else the lowest rank
    that does. What is refused on any rank ends all of them, before anything is written."""
    launched_rank = launched_rank_of(os.environ)
    try:
        return _run_rank(arguments, launched_rank)
    except KeyboardInterrupt:
        if launched_rank.rank:
            return Output(code=INTERRUPTED)
        raise


def _run_rank(arguments: TrainArguments, launched_rank: LaunchedRank) -> Output:
    from shardwise.runtime import Rendezvous

    rendezvous = Rendezvous(launched_rank.rank, launched_rank.ranks)
    found = _prepare(arguments, launched_rank.rank)
    refusal = rendezvous.agree_on_error(found if isinstance(found, ConfigError) else None)
    if refusal is None:
        refusal = rendezvous.agree_on_error(_make_folders(arguments))
    if isinstance(found, Prepared) and refusal is None:
        return _train_rank(found.run, found.options, rendezvous)
    lines = failure_of(refusal).lines() if refusal is not None else ()
    return _report(lines, REFUSED, rendezvous, is_reporter=launched_rank.rank == 0)


def _prepare(arguments: TrainArguments, rank: int) -> Prepared | ConfigError:
    """The run, or why this rank refuses it."""
    try:
        if rank == 0:  # which alone writes them
            check_files(arguments)
        return prepared(arguments)
    except ConfigError as error:
        return error


def _make_folders(arguments: TrainArguments) -> ConfigError | None:
    try:
        make_folders(arguments)
    except ConfigError as error:
        return error
    return None


def _train_rank(run: TrainingRun, options: TrainOptions, rendezvous: Rendezvous) -> Output:
    from shardwise.runtime import RankLost, leave_group

    try:
        spans = _steps(run, options, is_first=rendezvous.rank == 0)
        if rendezvous.rank:
            leave_group()
            return Output()
        if run.arguments.trace is not None:
            write_trace_of(run, spans)
        output = answer(run, options)
        leave_group()
        return output
    except ConfigError as error:
        ignore_termination()
        if rendezvous.rank:
            rendezvous.report_error(error)
            return _report((), REFUSED, rendezvous, is_reporter=False)
        return _report(refused(error, run, options), REFUSED, rendezvous, is_reporter=True)
    except (RankLost, KeyboardInterrupt) as error:
        ignore_termination()
        return _report_end(error if isinstance(error, RankLost) else None, run, options, rendezvous)


def _steps(run: TrainingRun, options: TrainOptions, *, is_first: bool) -> Sequence[Span]:
    """Take the steps; on rank 0 what the last one did on all ranks, where that is traced."""
    from shardwise.runtime import gather_spans, peer_failures, train

    with peer_failures():
        if is_first:
            with step_reporter(run, options.start) as reporter:
                spans = train(reporter.report, run.plan, options)
        else:
            spans = train(run.records.append, run.plan, options)
        return gather_spans(spans) if options.is_traced else ()


def _report_end(
    error: RankLost | None, run: TrainingRun, options: TrainOptions, rendezvous: Rendezvous
) -> Output:
    """A rank is lost, or this one is to end: by the user, or by a launcher that has seen another end."""
    is_reporter = rendezvous.is_reporter()
    reported_error = rendezvous.reported_error() if is_reporter else None
    if reported_error is not None:
        return _report(refused(reported_error, run, options), REFUSED, rendezvous, is_reporter=True)
    if error is not None:
        lines, code = lost(error, run, options), FAILED
    else:
        lines, code = interrupted(run, options), INTERRUPTED
    return _report(lines, code, rendezvous, is_reporter=is_reporter)


def _report(lines: Sequence[str], code: int, rendezvous: Rendezvous, *, is_reporter: bool) -> Output:
    """Say it before any process ends, as a launcher ends all others then: which those do not say too."""
    ignore_termination()
    if is_reporter:
        print_notes(lines)
    rendezvous.end(is_reporter=is_reporter)
    return Output(code=code)
