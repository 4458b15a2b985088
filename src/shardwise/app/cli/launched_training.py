"""What `train` does in a process that a launcher started: all meet first, and one speaks for all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.app.cli.failure import failure_of
from shardwise.app.cli.launched import LaunchedRank, launched_rank_of
from shardwise.app.cli.output import INTERRUPTED, Output, print_notes
from shardwise.app.cli.resuming import interrupted, lost
from shardwise.app.cli.signals import ignore_termination
from shardwise.app.cli.training import (
    FAILED,
    REFUSED,
    Prepared,
    answer,
    check_files,
    make_folders,
    prepared,
    refused,
    write_trace_of,
)
from shardwise.app.cli.training_run import TrainArguments, TrainingRun, step_reporter
from shardwise.errors import ConfigError
from shardwise.sim import Span

if TYPE_CHECKING:
    from shardwise.runtime import RankLost, Rendezvous, TrainOptions


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
