"""One rank over a step: when it computes, gathers, reduces, sends and receives (`rank_times`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardwise.schedule import Schedule
from shardwise.sim.maxplus import BACKWARD, BACKWARD_INPUT, FORWARD, Durations, Floats, compile_schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Intervals of one pipeline rank in seconds, each of shape (intervals, 2): start and finish.

    `actions` end before the part of them in which a send blocks. `messages` are sent or received by the rank,
    from the moment when the sender's action begins to block to their arrival. `makespan_s` is that of the
    pipeline.
    """

    actions: Floats
    gathers: Floats
    reductions: Floats
    messages: Floats
    makespan_s: float


def rank_times(
    schedule: Schedule, durations: Durations, rank: int, blocked_s: tuple[Floats, Floats]
) -> RankTimes:
    """The intervals of `rank` in a step of one case of `durations`.

    Each forward (backward) of stage s includes `blocked_s[0][s]` (`blocked_s[1][s]`) seconds at its end in
    which its send blocks.
    """
    compiled = compile_schedule(schedule)
    compiled.check(durations)
    times = compiled.times(durations)
    stage, kind, _, offsets = schedule.columns
    own = np.flatnonzero(np.asarray(schedule.stage_rank) == rank)
    sends_back = (kind == BACKWARD) | (kind == BACKWARD_INPUT)
    sends_s = (kind == FORWARD) * blocked_s[0][stage] + sends_back * blocked_s[1][stage]
    begins_s = times.finish_s - sends_s
    mine = slice(int(offsets[rank]), int(offsets[rank + 1]))
    ranks = np.asarray(schedule.stage_rank)[stage]
    source = compiled.source
    is_message = (source >= 0) & (ranks != ranks[source]) & ((ranks == rank) | (ranks[source] == rank))
    (arriving,) = np.nonzero(is_message)
    sent = source[arriving]
    gathered_s, reduced_s = times.gathered_s[own], times.reduced_s[own]
    return RankTimes(
        actions=_intervals(times.start_s[mine], begins_s[mine]),
        gathers=_intervals(gathered_s - durations.gather_s[0][own], gathered_s),
        reductions=_intervals(reduced_s - durations.reduce_s[0][own], reduced_s),
        messages=_intervals(begins_s[sent], times.finish_s[sent] + times.hop_s[arriving]),
        makespan_s=times.makespan_s,
    )


def _intervals(starts_s: Floats, finishes_s: Floats) -> Floats:
    return np.stack([starts_s, finishes_s], axis=1)


def union_s(several: Iterable[Floats]) -> float:
    """Seconds that at least one of these intervals, each array of shape (intervals, 2), covers."""
    intervals = np.concatenate(list(several))
    if not len(intervals):
        return 0.0
    starts_s, finishes_s = intervals[np.argsort(intervals[:, 0], kind="stable")].T
    reached_s = np.maximum.accumulate(finishes_s)
    before_s = np.concatenate([[-np.inf], reached_s[:-1]])
    return float(np.maximum(reached_s - np.maximum(starts_s, before_s), 0.0).sum())
