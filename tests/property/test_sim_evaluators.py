"""Max-plus, its shortcut for long steps, the event engine and a plain recursion give the same step time."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.schedule import NAMES, Action, ActionKind, Schedule, generate
from shardwise.schedule.legality import illegal_reason
from shardwise.sim import Durations, makespan_s, simulate, task_graph
from shardwise.sim.maxplus import compile_schedule
from shardwise.sim.steady import steady_schedule

Case = tuple[str, int, int, int]


def legal_cases(largest_pp: int, largest_count: int) -> st.SearchStrategy[Case]:
    """Schedule, pp, micro-batches and vpp; numbers of micro-batches are made legal for the schedule."""

    def legal(name: str, pp: int, count: int, vpp: int) -> Case:
        pp = max(pp, 1 if name in ("1f1b", "gpipe") else 2)
        vpp = {"interleaved_1f1b": vpp, "zb_v": 2, "dualpipe_v": 2}.get(name, 1)
        if name == "interleaved_1f1b":
            count = max(count // pp, 1) * pp
        if name in ("zb_v", "dualpipe_v"):
            count = max(count, 2 * pp)
        assert illegal_reason(name, pp, count, vpp) is None
        return name, pp, count, vpp

    return st.builds(
        legal,
        st.sampled_from(NAMES),
        st.integers(1, largest_pp),
        st.integers(1, largest_count),
        st.integers(2, 4),
    )


def random_durations(stages: int, batch: int, seed: int) -> Durations:
    """Rows of all sorts: uneven, nearly even, even with uneven ends, small integers (many ties), no hops."""
    rng = np.random.default_rng(seed)

    def column(width: int, row: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        sort = row % 5
        if sort == 0:
            return rng.uniform(0.1, 3.0, width)
        if sort == 1:
            return 1.0 + 1e-5 * rng.random(width)
        if sort == 2:
            values = np.full(width, rng.uniform(0.5, 2.0))
            values[:1] *= rng.uniform(0.5, 1.5)
            values[-1:] *= rng.uniform(0.5, 1.5)
            return values
        if sort == 3:
            return rng.integers(0, 4, width).astype(np.float64)
        return rng.choice([0.0, 0.3, 1.0, 1.0 / 3.0], width)

    def rows(width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return np.array([column(width, row) for row in range(batch)]).reshape(batch, width)

    hop = rng.choice([0.0, 0.2, 2.0])
    return Durations(
        forward_s=rows(stages),
        backward_s=rows(stages),
        backward_input_s=rows(stages),
        backward_weight_s=rows(stages),
        gather_s=rng.choice([0.0, 1.0, 9.0]) * rows(stages),
        reduce_s=rng.choice([0.0, 1.0, 9.0]) * rows(stages),
        hop_forward_s=hop * rows(stages - 1),
        hop_backward_s=hop * rows(stages - 1),
    )


def recursive_makespan(schedule: Schedule, durations: Durations, row: int) -> float:
    """The step time as the docstring of Durations defines it, one action at a time, without arrays."""
    last = schedule.stages - 1
    position = {
        action: (rank, at) for rank, actions in enumerate(schedule.ranks) for at, action in enumerate(actions)
    }
    length = {
        ActionKind.FORWARD: durations.forward_s[row],
        ActionKind.BACKWARD: durations.backward_s[row],
        ActionKind.BACKWARD_INPUT: durations.backward_input_s[row],
        ActionKind.BACKWARD_WEIGHT: durations.backward_weight_s[row],
    }
    gathered: dict[int, float] = {}
    for actions in schedule.ranks:
        free = 0.0
        for stage in dict.fromkeys(action.stage for action in actions):
            free += durations.gather_s[row, stage]
            gathered[stage] = free
    done: dict[Action, float] = {}

    def start(action: Action) -> float:
        rank, at = position[action]
        times = [done[schedule.ranks[rank][at - 1]] if at else 0.0]
        stage, kind, microbatch = action
        if kind is ActionKind.FORWARD:
            times.append(gathered[stage])
            if stage > 0:
                times.append(
                    done[Action(stage - 1, kind, microbatch)] + durations.hop_forward_s[row, stage - 1]
                )
        elif kind is ActionKind.BACKWARD_WEIGHT:
            times.append(done[Action(stage, ActionKind.BACKWARD_INPUT, microbatch)])
        else:
            times.append(done[Action(stage, ActionKind.FORWARD, microbatch)])
            if stage < last:
                whole, split = (
                    Action(stage + 1, k, microbatch) for k in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
                )
                times.append(
                    (done[whole if whole in position else split]) + durations.hop_backward_s[row, stage]
                )
        return max(times)

    waiting = [list(actions) for actions in schedule.ranks]
    while any(waiting):
        for rest in waiting:
            while rest:
                try:
                    begin = start(rest[0])
                except KeyError:  # a dependency has no time yet
                    break
                done[rest[0]] = begin + length[rest[0].kind][rest[0].stage]
                rest.pop(0)
    latest = max([*done.values(), *gathered.values()])
    for actions in schedule.ranks:
        free = 0.0
        ends = {
            a.stage: at
            for at, a in enumerate(actions)
            if a.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        }
        for stage, at in sorted(ends.items(), key=lambda item: item[1]):
            free = max(free, done[actions[at]]) + durations.reduce_s[row, stage]
        latest = max(latest, free)
    return float(latest)


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(legal_cases(6, 14), st.integers(0, 1 << 30))
def test_max_plus_is_the_plain_recursion(case: Case, seed: int) -> None:
    name, pp, microbatches, vpp = case
    schedule = generate(name, pp=pp, microbatches=microbatches, vpp=vpp)
    durations = random_durations(pp * vpp, 5, seed)
    found = compile_schedule(schedule).makespan_s(durations)
    assert found.tolist() == pytest.approx(
        [recursive_makespan(schedule, durations, row) for row in range(5)], rel=1e-12, abs=0.0
    )


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(legal_cases(8, 24), st.integers(0, 1 << 30))
def test_the_event_engine_agrees(case: Case, seed: int) -> None:
    name, pp, microbatches, vpp = case
    schedule = generate(name, pp=pp, microbatches=microbatches, vpp=vpp)
    durations = random_durations(pp * vpp, 5, seed)
    row = seed % 5
    found = simulate(task_graph(schedule, durations, row)).makespan_s
    assert found == pytest.approx(compile_schedule(schedule).makespan_s(durations)[row], rel=1e-9, abs=0.0)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(legal_cases(9, 260), st.integers(0, 1 << 30))
def test_the_shortcut_for_long_steps_is_exact(case: Case, seed: int) -> None:
    name, pp, microbatches, vpp = case
    durations = random_durations(pp * vpp, 10, seed)
    whole = compile_schedule(generate(name, pp=pp, microbatches=microbatches, vpp=vpp)).makespan_s(durations)
    found = makespan_s(name, pp=pp, microbatches=microbatches, vpp=vpp, durations=durations)
    assert found.tolist() == pytest.approx(whole.tolist(), rel=1e-11, abs=0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pp", range(1, 17))
def test_every_schedule_has_a_steady_phase(name: str, pp: int) -> None:
    """Without one the shortcut would always fall back, and its test would prove nothing."""
    for vpp in {"interleaved_1f1b": (2, 3, 4), "zb_v": (2,), "dualpipe_v": (2,)}.get(name, (1,)):
        if illegal_reason(name, pp, 3 * pp, vpp) is None:
            assert steady_schedule(name, pp, vpp) is not None


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(1000, 5000), st.integers(0, 1 << 30))
def test_thousands_of_microbatches(pp: int, microbatches: int, seed: int) -> None:
    durations = random_durations(pp, 3, seed)
    whole = compile_schedule(generate("1f1b", pp=pp, microbatches=microbatches, vpp=1)).makespan_s(durations)
    found = makespan_s("1f1b", pp=pp, microbatches=microbatches, vpp=1, durations=durations)
    assert found.tolist() == pytest.approx(whole.tolist(), rel=1e-11, abs=0.0)


@cache
def compiled_rows(seed: int) -> tuple[Durations, list[float]]:
    durations = random_durations(4, 1200, seed)
    schedule = generate("zb_h1", pp=4, microbatches=9, vpp=1)
    return durations, compile_schedule(schedule).makespan_s(durations).tolist()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1190))
def test_a_case_does_not_depend_on_its_batch(first: int) -> None:
    """Bit for bit: across the chunks of a large batch, and in the loop for a single case."""
    durations, together = compiled_rows(7)
    compiled = compile_schedule(generate("zb_h1", pp=4, microbatches=9, vpp=1))
    for cases in (1, 3):
        alone = compiled.makespan_s(durations.rows(slice(first, first + cases)))
        assert alone.tolist() == together[first : first + cases]


@pytest.mark.parametrize(("name", "pp", "vpp"), [("1f1b", 3, 1), ("interleaved_1f1b", 2, 3), ("zb_v", 3, 2)])
def test_cases_of_several_numbers_of_microbatches(name: str, pp: int, vpp: int) -> None:
    """Some are short, some have a steady phase that is skipped: each has the time that it has alone."""
    counts = np.array([2, 4, 5, 10, 11, 20, 48, 48]) * pp
    durations = random_durations(pp * vpp, len(counts), 7)
    together = makespan_s(name, pp=pp, microbatches=counts, vpp=vpp, durations=durations)
    whole = [
        compile_schedule(generate(name, pp=pp, microbatches=int(m), vpp=vpp)).makespan_s(
            durations.rows(slice(row, row + 1))
        )[0]
        for row, m in enumerate(counts)
    ]
    np.testing.assert_allclose(together, whole, rtol=1e-11)
    swapped = makespan_s(name, pp=pp, microbatches=counts[::-1], vpp=vpp, durations=durations)
    assert not np.allclose(swapped, whole, rtol=1e-3)
