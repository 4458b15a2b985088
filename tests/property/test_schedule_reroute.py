"""Re-routed tables do all work once, within the same memory, in no less time than a lower bound; invalid
tables are detected.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from shardwise.errors import ConfigError
from shardwise.schedule import (
    Action,
    ActionKind,
    PipelineStage,
    RelativeDurations,
    Rerouted,
    generate,
    peak_in_flight,
    reroute,
)
from shardwise.schedule.action import columns_of
from shardwise.schedule.violations import findings, violations
from shardwise.sim import Durations, makespan_s, rerouted_s

SCHEDULES = ("1f1b", "gpipe", "zb_h1", "zb_h2")


class Sampled:
    """Random pipelines with some lost ranks, and action times."""

    def __init__(self, rng: random.Random) -> None:
        self.schedule = rng.choice(SCHEDULES)
        self.stages, self.pipelines = rng.randint(2, 6), rng.randint(2, 6)
        least = rng.randint(1, 12)
        self.microbatches = [least + rng.randint(0, 2) for _ in range(self.pipelines)]
        rank_stages = [(one, stage) for one in range(self.pipelines) for stage in range(self.stages)]
        lost: set[PipelineStage] = set()
        for one, stage in rng.sample(rank_stages, rng.randint(1, 3)):
            if sum((other, stage) in lost for other in range(self.pipelines)) < self.pipelines - 1:
                lost.add((one, stage))
        self.lost = lost
        self.is_split = self.schedule.startswith("zb")
        table = generate(self.schedule, pp=self.stages, microbatches=max(self.microbatches), vpp=1)
        self.max_in_flight = peak_in_flight(table)
        self.across_s = rng.choice([0.0, 0.3])
        self.durations = Durations.of(
            stages=self.stages,
            batch=self.pipelines,
            forward_s=[[rng.uniform(0.5, 1.5) for _ in range(self.stages)] for _ in range(self.pipelines)],
            backward_s=[[rng.uniform(1.0, 3.0) for _ in range(self.stages)] for _ in range(self.pipelines)],
            backward_input_s=[[rng.uniform(0.5, 1.5) for _ in range(self.stages)]] * self.pipelines,
            backward_weight_s=[[rng.uniform(0.5, 1.5) for _ in range(self.stages)]] * self.pipelines,
            gather_s=rng.choice([0.0, 0.7]),
            reduce_s=rng.choice([0.0, 0.9]),
            hop_forward_s=0.1,
            hop_backward_s=0.2,
        )

    def table(self) -> Rerouted:
        relative_durations = RelativeDurations(
            forward=[1.0] * self.stages, backward=[2.0 - self.is_split] * self.stages,
            weight=[1.0] * self.stages, is_split=self.is_split,
        )  # fmt: skip
        return reroute(
            self.microbatches,
            self.stages,
            self.lost,
            max_in_flight=self.max_in_flight,
            relative_durations=relative_durations,
        )

    def limits(self, table: Rerouted) -> list[int]:
        return [self.max_in_flight[stage] for _, stage in table.rank_stages]


def sampled(pytestconfig: pytest.Config, few: int = 80) -> list[Sampled]:
    rng = random.Random(17)
    return [Sampled(rng) for _ in range(3000 if pytestconfig.getoption("--full") else few)]


def test_every_microbatch_runs_once_on_every_stage_within_the_old_memory(
    pytestconfig: pytest.Config,
) -> None:
    rerouted = 0
    for case in sampled(pytestconfig):
        table = case.table()
        assert violations(table, case.limits(table)) == []
        done = Counter(
            (action.stage, action.kind, action.microbatch) for row in table.ranks for action in row
        )
        kinds = "FIW" if case.is_split else "FB"
        assert set(done.values()) == {1}
        assert len(done) == case.stages * sum(case.microbatches) * len(kinds)
        assert {kind for _, kind, _ in done} == set(kinds)
        assert not case.lost & set(table.rank_stages)
        for rank, (_, stage) in enumerate(table.rank_stages):
            assert {action.stage for action in table.ranks[rank]} == {stage}
        for stage in range(case.stages):
            for microbatch, rank in enumerate(table.rank_of[stage]):
                own = int(table.pipeline_of[microbatch]), stage
                assert (table.rank_stages[rank] == own) == (own not in case.lost)
                rerouted += own in case.lost
    assert rerouted > 500


def test_peers_share_rerouted_micro_batches_evenly(pytestconfig: pytest.Config) -> None:
    for case in sampled(pytestconfig):
        table = case.table()
        for stage in {stage for _, stage in case.lost}:
            load = Counter(table.rank_of[stage].tolist())
            own = Counter(table.pipeline_of.tolist())
            more = [load[rank] - own[one] for rank, (one, at) in enumerate(table.rank_stages) if at == stage]
            assert sum(more) == sum(own[one] for one, at in case.lost if at == stage)
            # No peer does two micro-batches more than another peer that could have taken one of them.
            takers = [
                load[rank]
                for rank, (one, at) in enumerate(table.rank_stages)
                if at == stage and load[rank] > own[one]
            ]
            least = min(load[rank] for rank, (_, at) in enumerate(table.rank_stages) if at == stage)
            assert not takers or max(takers) <= least + 1


def test_no_step_is_shorter_than_its_work_or_its_longest_path(pytestconfig: pytest.Config) -> None:
    for case in sampled(pytestconfig):
        table = case.table()
        times = case.durations
        took_s = rerouted_s(table, times, case.across_s)
        back = times.backward_input_s + times.backward_weight_s if case.is_split else times.backward_s
        each = times.forward_s + back
        for stage in range(case.stages):
            peers = [one for one, at in table.rank_stages if at == stage]
            perfect_s = sum(case.microbatches) / sum(1.0 / each[one, stage] for one in peers)
            assert took_s >= perfect_s * (1.0 - 1e-12)
        needed = times.backward_input_s if case.is_split else times.backward_s
        path_s = sum((times.forward_s + needed)[:, stage].min() for stage in range(case.stages))
        hops_s = 0.3 * (case.stages - 1)
        assert took_s >= path_s + hops_s - 1e-9


def test_with_nothing_lost_the_step_is_that_of_1f1b(pytestconfig: pytest.Config) -> None:
    """Equal stages without hops take (m + p - 1) (f + b); the table's own evaluator agrees with max-plus on
    the 1F1B order.
    """
    for pipelines, stages, microbatches in ((1, 4, 8), (3, 4, 8), (2, 3, 3), (2, 5, 2)):
        times = Durations.of(stages=stages, batch=pipelines, forward_s=1.0, backward_s=2.0)
        relative_durations = RelativeDurations(
            forward=[1.0] * stages, backward=[2.0] * stages, weight=[0.0] * stages, is_split=False
        )
        max_in_flight = [stages - stage for stage in range(stages)]
        table = reroute(
            [microbatches] * pipelines,
            stages,
            (),
            max_in_flight=max_in_flight,
            relative_durations=relative_durations,
        )
        found_s = rerouted_s(table, times, 9.0)
        assert found_s == pytest.approx((microbatches + stages - 1) * 3.0)
        plain_s = makespan_s("1f1b", pp=stages, microbatches=microbatches, vpp=1, durations=times)
        assert found_s == pytest.approx(float(plain_s.max()))


def test_one_of_two_pipelines_without_a_stage_by_hand() -> None:
    """Two pipelines of two stages, one micro-batch each, F = 1, B = 2; (1, 1) is lost. Rank (0, 1) runs F0
    from 1 to 2, B0 to 4, F1 (which arrives at 2, after a hop of 1) to 5, and B1 to 7 of its stage. After
    the hop back, B1 of stage 0 runs from 8 to 10.
    """
    table = reroute(
        [1, 1], 2, [(1, 1)], max_in_flight=[2, 1],
        relative_durations=RelativeDurations(forward=[1.0, 1.0], backward=[2.0, 2.0], weight=[0.0, 0.0],
        is_split=False),
    )  # fmt: skip
    assert [" ".join(map(str, row)) for row in table.ranks] == ["0F0 0B0", "1F0 1B0 1F1 1B1", "0F1 0B1"]
    times = Durations.of(stages=2, batch=2, forward_s=1.0, backward_s=2.0)
    assert rerouted_s(table, times, 1.0) == pytest.approx(10.0)


Rows = list[list[Action]]


def _moved_to_a_peer(rows: Rows, table: Rerouted, rng: random.Random) -> None:
    """The mutant moves one action to another rank of its stage."""
    rank = rng.choice([r for r, (_, at) in enumerate(table.rank_stages) if len(table.ranks_for(at)) > 1])
    others = [r for r in table.ranks_for(table.rank_stages[rank][1]) if r != rank]
    rows[rng.choice(others)].append(rows[rank].pop())


def _left_out(rows: Rows, table: Rerouted, rng: random.Random) -> None:
    rows[rng.randrange(len(rows))].pop()


def _done_twice(rows: Rows, table: Rerouted, rng: random.Random) -> None:
    row = rows[rng.randrange(len(rows))]
    row.append(rng.choice(row))


def _done_by_two_peers(rows: Rows, table: Rerouted, rng: random.Random) -> None:
    """The mutant repeats all of one micro-batch at one stage on a peer: its gradient would count twice."""
    rank = rng.choice([r for r, (_, at) in enumerate(table.rank_stages) if len(table.ranks_for(at)) > 1])
    other = next(r for r in table.ranks_for(table.rank_stages[rank][1]) if r != rank)
    rows[other] += [action for action in rows[rank] if action.microbatch == rows[rank][0].microbatch]


def _backward_first(rows: Rows, table: Rerouted, rng: random.Random) -> None:
    row = rows[rng.randrange(len(rows))]
    place = next(place for place, action in enumerate(row) if action.kind is not ActionKind.FORWARD)
    row.insert(0, row.pop(place))


def _of_another_stage(rows: Rows, table: Rerouted, rng: random.Random) -> None:
    row = rows[rng.randrange(len(rows))]
    row[0] = row[0]._replace(stage=(row[0].stage + 1) % table.stages)


BROKEN: tuple[Callable[[Rows, Rerouted, random.Random], None], ...] = (
    _moved_to_a_peer, _left_out, _done_twice, _done_by_two_peers, _backward_first, _of_another_stage,
)  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_table_is_found(
    broken: Callable[[Rows, Rerouted, random.Random], None], pytestconfig: pytest.Config
) -> None:
    rng = random.Random(3)
    for case in sampled(pytestconfig, 25):
        table = case.table()
        if len(case.lost) == 0 or all(len(table.ranks_for(stage)) == 1 for stage in range(case.stages)):
            continue
        rows = [list(row) for row in table.ranks]
        broken(rows, table, rng)
        mutant = Rerouted(table.rank_stages, table.rank_of, table.pipeline_of, columns_of(rows))
        assert findings(mutant), broken.__name__


def test_a_rank_that_holds_too_much_is_found() -> None:
    case = Sampled(random.Random(2))
    table = case.table()
    limits = case.limits(table)
    busiest = int(np.argmax(peak_in_flight(table)))
    limits[busiest] = peak_in_flight(table)[busiest] - 1
    assert [one.rank for one in findings(table, limits)] == [busiest]


def test_a_rank_that_does_not_exist_is_found() -> None:
    case = Sampled(random.Random(2))
    table = case.table()
    rank_of = table.rank_of.copy()
    rank_of[0, 0] = table.pp
    assert (
        "ranks go from 0"
        in violations(Rerouted(table.rank_stages, rank_of, table.pipeline_of, table.columns))[0]
    )


def test_a_stage_lost_everywhere_cannot_be_rerouted() -> None:
    relative_durations = RelativeDurations(
        forward=[1.0] * 2, backward=[2.0] * 2, weight=[0.0] * 2, is_split=False
    )
    with pytest.raises(ConfigError, match="stage 1 is lost in all pipelines"):
        reroute([2, 2], 2, [(0, 1), (1, 1)], max_in_flight=[2, 1], relative_durations=relative_durations)
    with pytest.raises(ConfigError, match="in-flight limit is too small"):
        reroute([2, 2], 2, [(0, 1)], max_in_flight=[2, 0], relative_durations=relative_durations)
