"""When the last action of a table ends (docs/concepts/cost-model.md, section 13): the longest path, walked
once.

The same walk serves plain numbers and columns of them: it adds and takes the later of two, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.check.durations import StageSeconds
from shardwise.check.rows import Column
from shardwise.check.schedules import Table, TableAction


class DeadlockError(Exception):
    """A table in which some rank waits for ever."""


@dataclass(slots=True)
class _Simulation:
    """What has ended so far, and when; `maximum` is the larger of two times."""

    actions_s: Sequence[Mapping[str, Column]]
    hops_s: Sequence[Column]
    maximum: Callable[[Column, Column], Column]
    forward_end: dict[tuple[int, int], Column] = field(default_factory=dict)
    backward_end: dict[tuple[int, int], Column] = field(default_factory=dict)

    def ready_s(self, action: TableAction, now_s: Column, gathered_s: dict[int, Column]) -> Column | None:
        """When the action can start on a rank that is free from `now_s` on; None: not known yet."""
        stage, kind, microbatch = action
        if kind == "F":
            ready_s = self.maximum(now_s, gathered_s[stage])
            return self._after(self.forward_end, stage - 1, microbatch, stage - 1, ready_s)
        if kind in "BI":
            return self._after(self.backward_end, stage + 1, microbatch, stage, now_s)
        return now_s

    def _after(
        self, ends: dict[tuple[int, int], Column], stage: int, microbatch: int, hop: int, now_s: Column
    ) -> Column | None:
        if not 0 <= stage < len(self.actions_s):
            return now_s
        if (stage, microbatch) not in ends:
            return None
        # Nothing else waits for it: with many rows, what is no longer needed is let go.
        return self.maximum(now_s, ends.pop((stage, microbatch)) + self.hops_s[hop])

    def end(self, action: TableAction, start_s: Column) -> Column:
        """When the action ends that starts then; others may now wait for it."""
        stage, kind, microbatch = action
        end_s = start_s + self.actions_s[stage][kind]
        if kind == "F":
            self.forward_end[stage, microbatch] = end_s
        elif kind in "BI":
            self.backward_end[stage, microbatch] = end_s
        return end_s


def makespan_s(
    table: Table,
    times: Sequence[StageSeconds],
    hops_s: Sequence[Column],
    maximum: Callable[[Column, Column], Column],
) -> Column:
    """The latest end of any action, gather or reduction of the table.

    `times` of each stage, `hops_s` from each stage to the next, both ways alike. `maximum` is `max` for plain
    numbers, `numpy.maximum` for columns. Raises StuckError where some action never starts.
    """
    actions_s = [{kind: stage.action_s(kind) for kind in "FBIW"} for stage in times]
    simulation = _Simulation(actions_s=actions_s, hops_s=hops_s, maximum=maximum)
    waits = [_gathered(row, times) for row in table]
    now_s: list[Column] = [0.0 * times[0].forward_s] * len(table)
    done = [0] * len(table)
    last_s: list[dict[int, Column]] = [{} for _ in table]
    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(table):
            while done[rank] < len(row):
                action = row[done[rank]]
                start_s = simulation.ready_s(action, now_s[rank], waits[rank])
                if start_s is None:
                    break
                now_s[rank] = simulation.end(action, start_s)
                done[rank] += 1
                progressed = True
                if action[1] in "BW":
                    # Moved to the end: the order of the last ones is the order of the reductions.
                    last_s[rank].pop(action[0], None)
                    last_s[rank][action[0]] = now_s[rank]
    if any(place < len(row) for place, row in zip(done, table, strict=True)):
        raise DeadlockError
    found = now_s[0]
    for rank, row in enumerate(table):
        reduced_s = _reduced_s(last_s[rank], times, maximum)
        for end_s in (now_s[rank], reduced_s, *_gathered(row, times).values()):
            found = maximum(found, end_s)
    return found


def _reduced_s(
    ends: Mapping[int, Column],
    times: Sequence[StageSeconds],
    maximum: Callable[[Column, Column], Column],
) -> Column:
    """When the last reduction of a rank is over; `ends` of its stages, in the order of the reductions."""
    free_s = 0.0 * times[0].forward_s
    for stage, end_s in ends.items():
        free_s = maximum(end_s, free_s) + times[stage].reduce_s
    return free_s


def _gathered(row: Sequence[TableAction], times: Sequence[StageSeconds]) -> dict[int, Column]:
    """When the parameters of each stage of a rank are there, in the order of their first F."""
    found: dict[int, Column] = {}
    end_s = 0.0 * times[0].forward_s
    for stage, kind, _ in row:
        if kind == "F" and stage not in found:
            end_s = end_s + times[stage].gather_s
            found[stage] = end_s
    return found
