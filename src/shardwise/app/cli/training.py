"""The command `train`: validates a run, trains on own or launched processes, and prints a summary.

`trained` starts processes on this machine; under torchrun, `trained_by_launcher` is the part of one launched
process: ranks agree on errors before the run, and rank 0 reports. `resume_lines` prints the command that
resumes a run that ended.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from shardwise.app.cli import words
from shardwise.app.cli.adapting import advisor_for
from shardwise.app.cli.division import division_text
from shardwise.app.cli.launched import (
    COMMAND_VARIABLE,
    TORCHRUN_VARIABLE,
    LaunchedRank,
    launched_rank_of,
)
from shardwise.app.cli.output import Line, Output, failure_of, print_notes, row
from shardwise.app.cli.training_run import (
    TrainArguments,
    TrainingRun,
    resumed_log_bytes,
    step_reporter,
)
from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.interrupts import INTERRUPTED, ignore_termination
from shardwise.plans import check_output_path, plan_hash, read_plan
from shardwise.sim import Span, Trace, write_trace

if TYPE_CHECKING:
    from shardwise.runtime import RankLost, Rendezvous, TrainOptions


# Reports of a run that ended early


def lost(error: RankLost, run: TrainingRun, options: TrainOptions) -> list[str]:
    """The report of a lost rank."""
    lines = [f"shardwise: error: {error} {run.progress()}; the other ranks were ended"]
    lines += resume_lines(run, options)
    if os.environ.get("SHARDWISE_DEBUG") and error.details:
        lines.append(error.details)
    return lines


def interrupted(run: TrainingRun, options: TrainOptions) -> list[str]:
    """The report of a run that the user or the launcher ended."""
    return [f"shardwise: error: interrupted {run.progress()}", *resume_lines(run, options)]


def resume_lines(run: TrainingRun, options: TrainOptions) -> list[str]:
    """The command that resumes `run`; empty without `--checkpoint`, and a reason where the checkpoint cannot
    be resumed from."""
    from shardwise.runtime import restart_options

    if options.checkpoint is None:
        return []
    try:
        is_saved = restart_options(options, run.plan).resumed is not None
    except ConfigError as error:
        return [f"  it cannot be resumed: {error}"]
    where = "the last checkpoint" if is_saved else "the beginning"
    launcher = os.environ.get(COMMAND_VARIABLE)
    words = resume_arguments(run.arguments, options, is_saved=is_saved)
    if launcher:
        return [f"  to resume from {where}: {launcher} -- {shlex.join(words)}"]
    if TORCHRUN_VARIABLE in os.environ:
        where += ", under the same launcher"
    return [f"  to resume from {where}: {shlex.join(['shardwise', 'train', run.arguments.path, *words])}"]


def resume_arguments(arguments: TrainArguments, options: TrainOptions, *, is_saved: bool) -> list[str]:
    """The options of `train` that resume a run, from its last checkpoint where `is_saved`."""
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


# Training on processes of this machine

FAILED = 1
"""Exit code after a lost rank."""

REFUSED = 2
"""Exit code for bad input."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated run; nothing is written yet."""

    run: TrainingRun
    options: TrainOptions


_PROFILER_LEVEL = "6"
"""Log level that silences PyTorch's profiler, which otherwise prints a line whenever it starts or stops.
PyTorch reads it when it is loaded, here and in the processes that are started."""


def trained(arguments: TrainArguments) -> Output:
    """The answer of `train`, on processes of this machine or on those of a launcher.

    ConfigError where the plan cannot run here; exit code 1 where a rank is lost.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", _PROFILER_LEVEL)
    if TORCHRUN_VARIABLE in os.environ:
        return trained_by_launcher(arguments)
    check_files(arguments)
    return _trained_here(prepared(arguments))


def _trained_here(ready: Prepared) -> Output:
    """Train on processes of this machine."""
    from shardwise.runtime import RankLost, only_run, train_locally

    run, options, arguments = ready.run, ready.options, ready.run.arguments
    make_folders(arguments)
    try:
        with only_run(options.checkpoint), step_reporter(run, options.start) as out:
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
    """ConfigError where the log or the trace cannot be written, or would be overwritten."""
    paths = [os.path.realpath(path) for path in (arguments.log, arguments.trace) if path is not None]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            "is also the log, which would be overwritten",
            file=printable(str(arguments.trace)), key="--trace", allowed="the name of another file",
        )  # fmt: skip
    for option, written in (("--log", arguments.log), ("--trace", arguments.trace)):
        if written is not None:
            check_output_path(option, written, inputs=(arguments.path, arguments.data))


def prepared(arguments: TrainArguments, *, is_writer: bool = True) -> Prepared:
    """The requested run, validated. ConfigError where it cannot start, also because another run uses its
    folder; of the ranks of one run only `is_writer` looks for others."""
    plan = read_plan(arguments.path)
    from shardwise.runtime import (
        TrainOptions,
        check_no_run,
        check_options,
        check_runnable,
        check_unused,
        network_of,
        resumed_options,
    )

    options = TrainOptions(
        steps=arguments.steps,
        data=arguments.data,
        lr=arguments.lr,
        seed=arguments.seed or 0,
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
        is_traced=arguments.trace is not None,
        weights=arguments.weights,
    )
    network = network_of(plan)
    check_runnable(plan)
    network.check(has_weight_files=arguments.weights is not None or arguments.export is not None)
    check_options(plan, is_adaptive=arguments.adaptive, is_traced=arguments.trace is not None)
    if arguments.adaptive:
        options = replace(options, advisor=advisor_for(plan))
    if arguments.resume and arguments.weights is not None:
        raise ConfigError(
            "cannot be combined with --resume: the checkpoint has its own weights", key="--weights",
            found=arguments.weights, allowed="--resume alone, or --weights with a new --checkpoint",
        )  # fmt: skip
    if arguments.export is not None and arguments.checkpoint is None:
        raise ConfigError("requires --checkpoint", key="--export", found=arguments.export)
    network.samples(options.data, options.seed).batch(0)
    if is_writer and arguments.checkpoint is not None:
        check_no_run(arguments.checkpoint)
    if arguments.resume:
        options = resumed_options(options, plan)
        if arguments.seed not in (None, options.seed):
            raise ConfigError(
                "differs from the checkpoint", key="--seed", found=str(arguments.seed),
                allowed=f"{options.seed}, or no --seed",
            )  # fmt: skip
        if arguments.log is not None:
            resumed_log_bytes(arguments.log, options.start)
    elif arguments.checkpoint is not None:
        check_unused(arguments.checkpoint)
    return Prepared(TrainingRun(arguments=arguments, plan=plan), options)


def refused(error: ConfigError, run: TrainingRun, options: TrainOptions) -> list[str]:
    """The report of a run that `error` ended, with the command that resumes it where it had started."""
    return [*failure_of(error).lines(), *(resume_lines(run, options) if run.records else ())]


def answer(run: TrainingRun, options: TrainOptions) -> Output:
    """The summary; exports the weights where `--export` is given."""
    from shardwise.runtime import export

    if run.arguments.export is not None and options.checkpoint is not None:
        export(run.plan, options.checkpoint, run.arguments.export)
    return _summary(run)


def write_trace_of(run: TrainingRun, spans: Sequence[Span]) -> None:
    """Write the spans of all ranks in the format of `simulate --trace`, with times from the first span on and
    the hash of the plan."""
    origin_s = min(span.start_s for span in spans)
    shifted = (
        replace(span, start_s=span.start_s - origin_s, finish_s=span.finish_s - origin_s) for span in spans
    )
    write_trace(Trace(spans=tuple(shifted), plan_hash=plan_hash(run.last_plan())), str(run.arguments.trace))


def make_folders(arguments: TrainArguments) -> None:
    """Create the folders of the run; after validation, so that a refused run leaves none."""
    for option, folder in (("--checkpoint", arguments.checkpoint), ("--export", arguments.export)):
        if folder is not None:
            _make_folder(option, folder)


def _make_folder(option: str, path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be created: {why}", file=printable(path), key=option) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError("cannot be written to", file=printable(path), key=option)


def _changed(run: TrainingRun, changes: Sequence[int]) -> list[Line]:
    """A line about the changes of strategy after the steps `changes`, with the initial strategy."""
    first, last = run.records[0].strategy, run.records[-1].strategy
    if not changes or first is None or last is None:
        return []
    began = words.degrees_text(first)
    if first != last and began == words.degrees_text(last):
        began += f" ({words.changed_fields(first, last, but='')})"
    times = "" if len(changes) == 1 else f"{words.counted(len(changes), 'time')}, last "
    return [row("changed", (f"{times}after step {changes[-1]:,}; initially {began}", ""))]


def _summary(run: TrainingRun) -> Output:
    """Loss and median step time under the last strategy, with its prediction."""
    network, records = run.network, run.records
    first, last = records[0], records[-1]
    changes = run.changes()
    under_last = [record for record in records if not changes or record.step > changes[-1]]
    typical_s = median(record.step_time_s for record in under_last[len(under_last) // 4 :])
    amount = f"   {words.counted(last.step, 'step')} of {network.per_step:,} {network.unit}"
    return Output(
        lines=[
            row("trained", (f"{run.plan.name} on {run.plan.cluster.name}", "value"), (amount, "")),
            row("plan", (division_text(run.last_plan()), "")),
            *_changed(run, changes),
            row("loss", (f"{first.loss:.4f} to {last.loss:.4f}", "value")),
            row("step time", (words.seconds(typical_s), "time"),
                (f" measured (median), {words.seconds(last.predicted_s)} predicted", "")),
            *_doubts(run.plan.cluster),
        ]
    )  # fmt: skip


def _doubts(cluster: Cluster) -> Iterator[Line]:
    """Why a step may take much longer than predicted: processes that share cores, and devices that were not
    measured."""
    cores = os.cpu_count() or 1
    processes = sum(
        node.devices for node in cluster.nodes if cluster.classes[node.device_class].name == "cpu"
    )
    if TORCHRUN_VARIABLE not in os.environ and processes > cores:
        text = (
            f"{processes} processes share {words.counted(cores, 'core')}; each is predicted to have its own"
        )
        yield row("", (text, "warn"))
    unmeasured = [name for name, device in cluster.classes.items() if not device.efficiency.is_calibrated]
    if unmeasured:
        text = (
            f"{', '.join(unmeasured)} predicted from datasheets; `shardwise calibrate` measures this machine"
        )
        yield row("", (text, "warn"))


# Training in a launched process


def trained_by_launcher(arguments: TrainArguments) -> Output:
    """The part of this launched process in a run. Rank 0 reports and writes for all; once it is lost, the
    lowest rank that is left reports. An error on any rank ends all ranks before anything is written."""
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
    with ExitStack() as held:
        if refusal is None:
            refusal = rendezvous.agree_on_error(_make_folders(arguments, launched_rank.rank, held))
        if isinstance(found, Prepared) and refusal is None:
            return _train_rank(found.run, found.options, rendezvous)
    lines = failure_of(refusal).lines() if refusal is not None else ()
    return _report(lines, REFUSED, rendezvous, is_reporter=launched_rank.rank == 0)


def _prepare(arguments: TrainArguments, rank: int) -> Prepared | ConfigError:
    """The run, or the error for which this rank refuses it."""
    try:
        if rank == 0:  # the only rank that writes files
            check_files(arguments)
        return prepared(arguments, is_writer=rank == 0)
    except ConfigError as error:
        return error


def _make_folders(arguments: TrainArguments, rank: int, held: ExitStack) -> ConfigError | None:
    """Create the folders; rank 0, which prunes checkpoints, locks that of the checkpoints until `held`
    closes."""
    from shardwise.runtime import only_run

    try:
        make_folders(arguments)
        if rank == 0:
            held.enter_context(only_run(arguments.checkpoint))
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
    """Train; returns on rank 0 the spans of the last step on all ranks, where it is traced."""
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
    """The end of a run by a lost rank (`error`), or by the user or the launcher (None)."""
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
    """Report before any process ends, since the launcher then ends all others; the others do not report."""
    ignore_termination()
    if is_reporter:
        print_notes(lines)
    rendezvous.end(is_reporter=is_reporter)
    return Output(code=code)
