"""Max-plus on tables small enough to follow by hand, closed forms, and tables that cannot run."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.errors import ConfigError, InternalError
from shardwise.schedule import Action, ActionKind, Schedule, generate
from shardwise.sim import Durations, makespan_s
from shardwise.sim.maxplus import CompiledSchedule, FinishTimes, Floats, compile_schedule

TWO_RANKS = generate("1f1b", pp=2, microbatches=2, vpp=1)


def table(*rows: str, stage_rank: tuple[int, ...], microbatches: int) -> Schedule:
    ranks = [
        [Action(int(word[0]), ActionKind(word[1]), int(word[2])) for word in row.split()] for row in rows
    ]
    return Schedule(name="own", microbatches=microbatches, stage_rank=stage_rank, ranks=ranks)


class Times:
    """Start and finish of every action, gather and reduction, in seconds, for every case."""

    def __init__(self, compiled: CompiledSchedule, durations: Durations) -> None:
        cases = FinishTimes(compiled, durations)
        cases.run(compiled.rows.levels)
        self.finish_s: Floats = cases.finish[compiled.rows.row_of].T
        self.start_s = self.finish_s - cases.parts[compiled.duration_row].T
        self.gather_finish_s = cases.gathered.T.copy()
        self.gather_start_s = self.gather_finish_s - durations.gather_s
        self.reduce_finish_s = cases.reduced_s().T
        self.reduce_start_s = self.reduce_finish_s - durations.reduce_s
        self.makespan_s = cases.makespan_s()


def test_two_ranks_by_hand() -> None:
    # rank 0: 0F0 0F1 0B0 0B1, rank 1: 1F0 1B0 1F1 1B1; gathers end at 1 (stage 0) and 9 (stage 1).
    # 0F0 1-3, 0F1 3-5; 1F0 waits for max(3 + 1, gather 9): 9-12, 1B0 12-16, 1F1 16-19, 1B1 19-23.
    # 0B0 from 16 + 2 = 18 to 23, 0B1 from max(23, 23 + 2) = 25 to 30; reductions 30-31 and 23-33.
    durations = Durations.of(
        stages=2,
        forward_s=[2, 3],
        backward_s=[5, 4],
        gather_s=[1, 9],
        reduce_s=[1, 10],
        hop_forward_s=1,
        hop_backward_s=2,
    )
    compiled = compile_schedule(TWO_RANKS)
    times = Times(compiled, durations)
    assert times.start_s.tolist() == [[1, 3, 18, 25, 9, 12, 16, 19]]
    assert times.finish_s.tolist() == [[3, 5, 23, 30, 12, 16, 19, 23]]
    assert times.gather_start_s.tolist() == [[0, 0]]
    assert times.gather_finish_s.tolist() == [[1, 9]]
    assert times.reduce_start_s.tolist() == [[30, 23]]
    assert times.reduce_finish_s.tolist() == [[31, 33]]
    assert times.makespan_s.tolist() == [33]
    assert compiled.makespan_s(durations).tolist() == [33]


def test_gathers_and_reductions_of_one_rank_queue() -> None:
    # One rank with two stages, all work 1 long: F0 waits for gather 4, F1 for 4 + 3 = 7; F0 4-5, F1 7-8, B1
    # 8-9, B0 9-10. Reduction of stage 1 from 9 to 15; that of stage 0 waits for it: 15-17.
    schedule = table("0F0 1F0 1B0 0B0", stage_rank=(0, 0), microbatches=1)
    durations = Durations.of(stages=2, forward_s=1, backward_s=1, gather_s=[4, 3], reduce_s=[2, 6])
    times = Times(compile_schedule(schedule), durations)
    assert times.start_s.tolist() == [[4, 7, 8, 9]]
    assert times.gather_start_s.tolist() == [[0, 4]]
    assert times.reduce_start_s.tolist() == [[15, 9]]
    assert times.makespan_s.tolist() == [17]


def test_split_backward_releases_the_stage_before_early() -> None:
    # Stage 1: F 0+1=1..2 after 0F0 (0-1), I 2-3, W 3-13. Stage 0's I waits for I of stage 1 only: 3-4, W
    # 4-14.
    schedule = table("0F0 0I0 0W0", "1F0 1I0 1W0", stage_rank=(0, 1), microbatches=1)
    durations = Durations.of(stages=2, forward_s=1, backward_input_s=1, backward_weight_s=10)
    assert compile_schedule(schedule).makespan_s(durations).tolist() == [14]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 40, 333])
def test_equal_stages_follow_the_closed_form(name: str, pp: int, microbatches: int) -> None:
    durations = Durations.of(stages=pp, batch=2, forward_s=[[3.0], [1.0]], backward_s=[[5.0], [2.5]])
    # (m + pp - 1)(t_f + t_b), also with fewer micro-batches than ranks (Narayanan et al. 2021, section 2.2).
    expected = [(microbatches + pp - 1) * 8.0, (microbatches + pp - 1) * 3.5]
    found = makespan_s(name, pp=pp, microbatches=microbatches, vpp=1, durations=durations)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (3, 2), (4, 3), (8, 4)])
@pytest.mark.parametrize("groups", [1, 2, 9])
def test_interleaving_divides_the_bubble_by_vpp(pp: int, vpp: int, groups: int) -> None:
    # Each of a rank's vpp chunks takes 1/vpp of (t_f, t_b) = (2, 4): bubble (pp - 1) * 6 / vpp and m * 6
    # of work.
    microbatches = groups * pp
    durations = Durations.of(stages=pp * vpp, forward_s=2 / vpp, backward_s=4 / vpp)
    found = makespan_s("interleaved_1f1b", pp=pp, microbatches=microbatches, vpp=vpp, durations=durations)
    assert found == pytest.approx([microbatches * 6 + (pp - 1) * 6 / vpp], rel=1e-12)


def test_the_textbook_formula_is_not_the_value() -> None:
    # Slow first stage: sum(f + b) + (m - 1) max(f + b) happens to hold; with hops the true step is longer.
    durations = Durations.of(stages=3, forward_s=1, backward_s=1, hop_forward_s=1, hop_backward_s=1)
    textbook = 3 * 2 + 2 * 2 + 7 * 2
    assert compile_schedule(generate("1f1b", pp=3, microbatches=8, vpp=1)).makespan_s(durations)[0] > textbook


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["0F0 0B0", "1B0 1F0"], "1B0 runs before its dependency"),
        (["0F0 0W0 0I0", "1F0 1B0"], "0W0 runs before its dependency"),
        (["0F0 0B0", "1F0"], "no backward|waits for an action that is not in the table"),
        (["0F0 0B0", "1F0 1F0 1B0"], "twice"),
        (["0F0 0B0 1B0", "1F0"], "does not hold its stage"),
        (["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], "deadlocks"),
        (["0F0 0B0 0F3", "1F0 1B0"], "does not exist"),
        (["0F0 0B0", "1F0 1B0", ""], "a rank has no actions"),
    ],
)
def test_tables_that_cannot_run_are_refused(rows: list[str], message: str) -> None:
    schedule = table(*rows, stage_rank=(0, 1), microbatches=2)
    with pytest.raises(ConfigError, match=message):
        compile_schedule(schedule).makespan_s(Durations.of(stages=2, forward_s=1))


def test_durations_are_checked() -> None:
    one = np.ones((1, 2))
    with pytest.raises(InternalError, match="hop_forward_s has shape"):
        Durations(
            forward_s=one,
            backward_s=one,
            backward_input_s=one,
            backward_weight_s=one,
            gather_s=one,
            reduce_s=one,
            hop_forward_s=one,
            hop_backward_s=np.ones((1, 1)),
        )
    for bad in (-1.0, np.nan, np.inf):
        with pytest.raises(InternalError, match="forward_s is negative or not finite"):
            Durations.of(stages=2, forward_s=bad)
    with pytest.raises(InternalError, match="3 stages for a table of 2"):
        compile_schedule(TWO_RANKS).makespan_s(Durations.of(stages=3, forward_s=1))
