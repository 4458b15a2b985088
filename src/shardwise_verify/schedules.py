"""The seven schedules as words and tables, the makespan of a table, and its warm-up and cool-down
(docs/concepts/cost-model.md, section 13).

`table_of` writes the table of a schedule with the checker's own code. `makespan_s` computes the end of the
last action, on plain numbers or on columns: it only adds and takes maxima. `warmup_cooldown_of` counts what a
rank does before its first backward and after its last forward. From 4 pp micro-batches on, both ends of a row
stay the same; only the steady state grows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count

import numpy as np

from shardwise_verify.reading import InputError
from shardwise_verify.strategy_rows import NO_ROWS, Column, Family
from shardwise_verify.times import StageSeconds

TableAction = tuple[int, str, int]
"""Stage, kind (F, B, I, W), micro-batch."""

Table = tuple[tuple[TableAction, ...], ...]
"""For each pipeline rank its actions, in order."""


def table_of(family: Family) -> Table:
    """The table of the family's schedule."""
    pp, vpp, m = family.pp, family.vpp, family.microbatches
    if family.schedule == "interleaved_1f1b":
        return tuple(tuple(_interleaved(pp, vpp, m, rank)) for rank in range(pp))
    word = WORDS[family.schedule]
    return tuple(tuple(_actions_of_word(word(pp, m, rank), pp, rank)) for rank in range(pp))


MAX_ACTIONS = 1 << 22
"""Actions of the largest table that is read."""

_ACTION = re.compile(r"([0-9]{1,7})([FBIW])([0-9]{1,7})")
_RUN = re.compile(r"(\[(?:[0-9]{1,7}[FBIW][0-9]{1,7} ?)+\]|[0-9]{1,7}[FBIW][0-9]{1,7})(?:\*([0-9]{1,7}))?")


def table_in(lines: Sequence[str]) -> Table:
    """The table whose ranks are these lines, such as `0F0 [0F1 0B0]*3 0B3`; every repetition takes the next
    micro-batch. Raises InputError for other text and for too many actions."""
    found, remaining = [], MAX_ACTIONS
    for rank, line in enumerate(lines):
        row: list[TableAction] = []
        place = 0 if line != "-" else len(line) + 1
        while place <= len(line):
            run = _RUN.match(line, place)
            if run is None or line[run.end() : run.end() + 1] not in ("", " "):
                raise InputError(
                    "has no action", key=f"schedule.ranks[{rank}]", found=line[place : place + 40]
                )
            pattern, times = _ACTION.findall(run[1]), int(run[2] or 1)
            remaining -= times * len(pattern)
            if remaining < 0:
                raise InputError("has too many actions", key="schedule.ranks", allowed=str(MAX_ACTIONS))
            row += [
                (int(stage), kind, int(number) + more)
                for more in range(times)
                for stage, kind, number in pattern
            ]
            place = run.end() + 1
        found.append(tuple(row))
    return tuple(found)


def _actions_of_word(word: str, pp: int, rank: int) -> Iterator[TableAction]:
    """The actions of a word: capitals on stage `rank`, small letters on the rank's second stage, `q` the
    weight gradient of the next pending I or i."""
    back = 2 * pp - 1 - rank
    numbers = {letter: count() for letter in "FBWfbw"}
    inputs: list[tuple[int, int]] = []
    undone = count()
    for letter in word:
        if letter == "q":
            stage, microbatch = inputs[next(undone)]
            yield stage, "W", microbatch
            continue
        stage = rank if letter.isupper() else back
        class_ = {"I": "B", "i": "b"}.get(letter, letter)
        microbatch = next(numbers[class_])
        if letter in "Ii":
            inputs.append((stage, microbatch))
        yield stage, letter.upper(), microbatch


def _gpipe(pp: int, m: int, rank: int) -> str:
    return "F" * m + "B" * m


def _1f1b(pp: int, m: int, rank: int) -> str:
    k = min(pp - 1 - rank, m)
    return "F" * k + "FB" * (m - k) + "B" * k


def _zb_h(pp: int, m: int, rank: int, *, times: int) -> str:
    k, z = min(times * (pp - 1 - rank), m), times * rank
    x = min(z, m - k)
    y = min(z - x, k)
    return "F" * k + "FI" * x + "FIq" * (m - k - x) + "I" * y + "Iq" * (k - y) + "q" * (x + y)


def _zb_v(pp: int, m: int, rank: int) -> str:
    d = pp - 1 - rank
    return (
        "F" * (2 * d + 1)
        + "fF" * rank
        + "fiw" * (d + 1)
        + "FIWfiw" * (m - 2 * pp + rank + 1)
        + "IWfiw" * d
        + "Ii" * rank
        + "IW" * (d + 1)
        + "w" * rank
        + "W" * rank
    )


def _dualpipe_v(pp: int, m: int, rank: int) -> str:
    d, c = pp - 1 - rank, (rank + 1) // 2
    middle = "iI" * ((rank + 1) // 2) if rank % 2 else "bI" + "iI" * (rank // 2)
    return (
        "F" * (2 * d)
        + "Ff" * (rank + 1)
        + "iqf" * d
        + "FbfB" * (m - 2 * pp + rank + 1)
        + "bfB" * d
        + "bB" * c
        + middle
        + "qI" * d
        + "q" * (rank + 1)
    )


WORDS: dict[str, Callable[[int, int, int], str]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "zb_h1": lambda pp, m, rank: _zb_h(pp, m, rank, times=1),
    "zb_h2": lambda pp, m, rank: _zb_h(pp, m, rank, times=2),
    "zb_v": _zb_v,
    "dualpipe_v": _dualpipe_v,
}
"""The word of a rank, from pp, the micro-batches and the rank."""


def _interleaved(pp: int, vpp: int, m: int, rank: int) -> Iterator[TableAction]:
    total = m * vpp
    k = min(2 * (pp - 1 - rank) + (vpp - 1) * pp, total)
    numbers = {"F": count(), "B": count()}
    for letter in "F" * k + "FB" * (total - k) + "B" * k:
        j = next(numbers[letter])
        chunk = (j // pp) % vpp
        stage = (chunk if letter == "F" else vpp - 1 - chunk) * pp + rank
        yield stage, letter, (j // pp // vpp) * pp + j % pp


IN_FLIGHT, WAITING, UNREDUCED = 0, 1, 2
"""Second axis of `moments_of`: pairs between F and B (or I), and pairs between I and W; stages with gradients
that are not reduced yet."""


@lru_cache(maxsize=4096)
def moments_of(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[Column, ...]:
    """For each rank [moment, IN_FLIGHT or WAITING, chunk]: how many micro-batches of each of its stages have
    activations, at every moment at which no other has as many of each."""
    if schedule == "gpipe":
        return (np.array([[[microbatches], [0]]]),) * pp
    few = min(microbatches, pp if schedule == "1f1b" else 4 * pp)
    family = empty_family(schedule, pp, vpp, few)
    changes = {"F": (1, 0), "B": (-1, 0), "I": (-1, 1), "W": (0, -1)}
    of_ranks = []
    for rank, row in enumerate(table_of(family)):
        own = family.stages_of(rank)
        chunk = {stage: place for place, stage in enumerate(own)}
        steps = np.zeros((len(row), 2, len(own)), dtype=np.int64)
        for number, (stage, kind, _) in enumerate(row):
            steps[number, :, chunk[stage]] = changes[kind]
        of_ranks.append(_most(np.unique(steps.cumsum(axis=0), axis=0)))
    return tuple(of_ranks)


@lru_cache(maxsize=4096)
def moments_until_reduction(schedule: str, pp: int, vpp: int, microbatches: int) -> tuple[Column, ...]:
    """The same with a third row: 1 for stages some, or just all, of whose micro-batches have passed B (or W),
    where gradients are reduced after the last one."""
    few = microbatches if schedule == "gpipe" else min(microbatches, 4 * pp)
    family = empty_family(schedule, pp, vpp, few)
    of_ranks = []
    for rank, row in enumerate(table_of(family)):
        chunk = {stage: place for place, stage in enumerate(family.stages_of(rank))}
        now = np.zeros((3, vpp), dtype=np.int64)
        passed = np.zeros(vpp, dtype=np.int64)
        seen = set()
        for number, (stage, kind, _) in enumerate(row):
            at = chunk[stage]
            now[IN_FLIGHT, at] += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]
            now[WAITING, at] += {"F": 0, "B": 0, "I": 1, "W": -1}[kind]
            passed[at] += kind in ("B", "W")
            now[UNREDUCED, at] = passed[at] > 0
            is_reduced = passed == few
            if number + 1 < len(row) and row[number + 1][1] == "F" and not is_reduced.any():
                continue  # the next moment has all of this one, and one more in flight
            seen.add(now.tobytes())
            now[UNREDUCED, is_reduced] = 0
        counts = np.array([np.frombuffer(one, dtype=np.int64) for one in sorted(seen)])
        of_ranks.append(_most(counts).reshape(-1, 3, vpp))
    return tuple(of_ranks)


def _most(counts: Column) -> Column:
    """Those of distinct moments that no other one exceeds."""
    flat = counts.reshape(len(counts), -1)
    is_below = [bool(((flat >= one).all(axis=1) & (flat > one).any(axis=1)).any()) for one in flat]
    found: Column = counts[~np.array(is_below)]
    return found


class DeadlockError(Exception):
    """A table in which some rank waits forever."""


@dataclass(slots=True)
class _Simulation:
    """The end times of finished actions; `maximum` is the larger of two times."""

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
        # No other action waits for this end time; it is removed to save memory with many rows.
        return self.maximum(now_s, ends.pop((stage, microbatch)) + self.hops_s[hop])

    def end(self, action: TableAction, start_s: Column) -> Column:
        """Record and return the end of an action that starts at `start_s`."""
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
    """The latest end of any action, parameter all-gather or gradient reduction of the table.

    `times` of each stage; `hops_s` from each stage to the next, equal in both directions. `maximum` is `max`
    for plain numbers, `numpy.maximum` for columns. Raises DeadlockError where some action never starts.
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
                    # Moved to the end of the dict: the order of the last actions is the order of the
                    # reductions.
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
    """The end of the last gradient reduction of a rank; `ends` are those of its stages, in the order of
    the reductions."""
    free_s = 0.0 * times[0].forward_s
    for stage, end_s in ends.items():
        free_s = maximum(end_s, free_s) + times[stage].reduce_s
    return free_s


def _gathered(row: Sequence[TableAction], times: Sequence[StageSeconds]) -> dict[int, Column]:
    """When the parameters of each stage of a rank are gathered, in the order of their first F."""
    found: dict[int, Column] = {}
    end_s = 0.0 * times[0].forward_s
    for stage, kind, _ in row:
        if kind == "F" and stage not in found:
            end_s = end_s + times[stage].gather_s
            found[stage] = end_s
    return found


@dataclass(frozen=True, slots=True)
class WarmupCooldown:
    """Warm-up and cool-down of one schedule: counts of actions per stage, shape (stages,), and stages per
    rank, shape (pp,).

    `warmup_forwards`: forwards of a stage before the first backward of its rank. `cooldown_backwards`,
    `cooldown_inputs`, `cooldown_weights`: B, I and W after the last forward. `first_backward_stage` and
    `last_forward_stage`: stages of these two actions, the former of the first micro-batch, the latter of the
    last. `has_steady_state`: the first backward comes before the last forward.
    """

    warmup_forwards: Column
    cooldown_backwards: Column
    cooldown_inputs: Column
    cooldown_weights: Column
    first_backward_stage: Column
    last_forward_stage: Column
    has_steady_state: Column


@lru_cache(maxsize=4096)
def warmup_cooldown_of(schedule: str, pp: int, vpp: int, microbatches: int) -> WarmupCooldown:
    """The warm-up and cool-down of a legal combination."""
    if schedule == "gpipe":
        ranks = np.arange(pp)
        all_of = np.full(pp, microbatches)
        none = np.zeros(pp, dtype=np.int64)
        return WarmupCooldown(all_of, all_of, none, none, ranks, ranks, np.zeros(pp, dtype=bool))
    family = empty_family(schedule, pp, vpp, min(microbatches, 4 * pp))
    counts = {name: np.zeros(pp * vpp, dtype=np.int64) for name in ("before", "B", "I", "W")}
    places = []
    for row in table_of(family):
        first = next(place for place, action in enumerate(row) if action[1] in "BI")
        last = max(place for place, action in enumerate(row) if action[1] == "F")
        for stage, kind, _ in row[:first]:
            counts["before"][stage] += kind == "F"
        for stage, kind, _ in row[last + 1 :]:
            counts[kind][stage] += 1
        places.append((row[first][0], row[last][0], first < last))
    first_backward_stage, last_forward_stage, has_steady_state = map(np.array, zip(*places, strict=True))
    return WarmupCooldown(
        counts["before"],
        counts["B"],
        counts["I"],
        counts["W"],
        first_backward_stage,
        last_forward_stage,
        has_steady_state,
    )


def empty_family(schedule: str, pp: int, vpp: int, microbatches: int) -> Family:
    """A family that has a table but no rows."""
    return Family(schedule=schedule, pp=pp, vpp=vpp, microbatches=microbatches, rows=NO_ROWS)
