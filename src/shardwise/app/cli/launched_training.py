"""What `train` does in a process that a launcher started: all meet first, and one speaks for all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.app.cli.failure import failure_of
from shardwise.app.cli.launched import Place, place_of
from shardwise.app.cli.output import INTERRUPTED, Output, talk
from shardwise.app.cli.resuming import interrupted, lost
from shardwise.app.cli.signals import ignore_ending
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
from shardwise.app.cli.training_run import Asked, Run, showing
from shardwise.errors import ConfigError
from shardwise.sim import Span

if TYPE_CHECKING:
    from shardwise.runtime import Meeting, RankLost, TrainOptions


def trained_by_launcher(asked: Asked) -> Output:
    """This process's part of a run: rank 0 speaks and writes for all while it lives, else the lowest rank
    that does. What is refused on any rank ends all of them, before anything is written."""
    place = place_of(os.environ)
    try:
        return _taken_part(asked, place)
    except KeyboardInterrupt:
        if place.rank:
            return Output(code=INTERRUPTED)
        raise


def _taken_part(asked: Asked, place: Place) -> Output:
    from shardwise.runtime import Meeting

    meeting = Meeting(place.rank, place.ranks)
    found = _looked_at(asked, place.rank)
    refusal = meeting.agreed(found if isinstance(found, ConfigError) else None)
    if refusal is None:
        refusal = meeting.agreed(_folders(asked))
    if isinstance(found, Prepared) and refusal is None:
        return _trained(found.run, found.options, meeting)
    lines = failure_of(refusal).lines() if refusal is not None else ()
    return _said(lines, REFUSED, meeting, is_speaker=place.rank == 0)


def _looked_at(asked: Asked, rank: int) -> Prepared | ConfigError:
    """The run, or why this rank refuses it."""
    try:
        if rank == 0:  # which alone writes them
            check_files(asked)
        return prepared(asked)
    except ConfigError as error:
        return error


def _folders(asked: Asked) -> ConfigError | None:
    try:
        make_folders(asked)
    except ConfigError as error:
        return error
    return None


def _trained(run: Run, options: TrainOptions, meeting: Meeting) -> Output:
    from shardwise.runtime import RankLost, leave_group

    try:
        spans = _steps(run, options, is_first=meeting.rank == 0)
        if meeting.rank:
            leave_group()
            return Output()
        if run.asked.trace is not None:
            write_trace_of(run, spans)
        said = answer(run, options)
        leave_group()
        return said
    except ConfigError as error:
        ignore_ending()
        if meeting.rank:
            meeting.post(error)
            return _said((), REFUSED, meeting, is_speaker=False)
        return _said(refused(error, run, options), REFUSED, meeting, is_speaker=True)
    except (RankLost, KeyboardInterrupt) as error:
        ignore_ending()
        return _ended(error if isinstance(error, RankLost) else None, run, options, meeting)


def _steps(run: Run, options: TrainOptions, *, is_first: bool) -> Sequence[Span]:
    """Take the steps; on rank 0 what the last one did on all ranks, where that is traced."""
    from shardwise.runtime import losses_of_peers, together, train

    with losses_of_peers():
        if is_first:
            with showing(run, options.start) as shown:
                spans = train(shown.report, run.plan, options)
        else:
            spans = train(run.records.append, run.plan, options)
        return together(spans) if options.is_traced else ()


def _ended(error: RankLost | None, run: Run, options: TrainOptions, meeting: Meeting) -> Output:
    """A rank is lost, or this one is to end: by the user, or by a launcher that has seen another end."""
    is_speaker = meeting.is_speaker()
    posted = meeting.posted() if is_speaker else None
    if posted is not None:
        return _said(refused(posted, run, options), REFUSED, meeting, is_speaker=True)
    if error is not None:
        lines, code = lost(error, run, options), FAILED
    else:
        lines, code = interrupted(run, options), INTERRUPTED
    return _said(lines, code, meeting, is_speaker=is_speaker)


def _said(lines: Sequence[str], code: int, meeting: Meeting, *, is_speaker: bool) -> Output:
    """Say it before any process ends, as a launcher ends all others then: which those do not say too."""
    ignore_ending()
    if is_speaker:
        talk(lines)
    meeting.end(is_speaker=is_speaker)
    return Output(code=code)
