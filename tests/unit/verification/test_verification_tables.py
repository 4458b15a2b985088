"""The checker's schedules and its recursion through a table, compared with tables and times by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.verification.by_hand import strategy

from shardwise_verify.estimate import hops_s
from shardwise_verify.schedules import (
    DeadlockError,
    Table,
    makespan_s,
    moments_of,
    table_of,
)
from shardwise_verify.strategy_rows import Family, rows_of
from shardwise_verify.times import StageSeconds

TIMES = StageSeconds(
    forward_s=1.0, input_s=1.0, weight_s=1.0, weight_action_s=1.0, gather_s=0.25, reduce_s=0.5,
    recompute_s=0.0, offload_s=0.0, traffic_s=0.0,
)  # fmt: skip


def family(schedule: str, pp: int, m: int, vpp: int = 1) -> Family:
    return Family(schedule=schedule, pp=pp, vpp=vpp, microbatches=m, rows=rows_of([strategy(pp=pp)]))


def words(table: Table) -> list[str]:
    return [" ".join(f"{stage}{kind}{number}" for stage, kind, number in row) for row in table]


@pytest.mark.parametrize(
    ("schedule", "vpp", "expected"),
    [
        ("gpipe", 1, ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]),
        ("1f1b", 1, ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]),
        (
            "zb_h1",
            1,
            ["0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
        ),
        # Rank 0 does 2 * 1 warm-up forwards; rank 1 defers 2 weight gradients.
        (
            "zb_h2",
            1,
            ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"],
        ),
    ],
)
def test_tables_of_two_ranks(schedule: str, vpp: int, expected: list[str]) -> None:
    assert words(table_of(family(schedule, 2, 3, vpp))) == expected


def test_interleaved_has_rounds_of_pp_microbatches() -> None:
    expected = ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"]
    assert words(table_of(family("interleaved_1f1b", 2, 2, 2))) == expected


def test_a_v_schedule_folds_back_on_the_last_rank() -> None:
    v = family("zb_v", 2, 4, 2)
    assert [v.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert [v.stages_of(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert not v.ends_apart
    # Three forwards pass down before the first comes back: F^(2d+1) with d = 1.
    assert words(table_of(v))[0].startswith("0F0 0F1 0F2 3F0 3I0 3W0")
    of_ranks = [np.array([2.0]), np.array([7.0])]  # to the other rank, and back to the first
    assert [float(hop[0]) for hop in hops_s(v, of_ranks)] == [2.0, 0.0, 2.0]
    chunked = family("interleaved_1f1b", 2, 2, 2)
    assert [float(hop[0]) for hop in hops_s(chunked, of_ranks)] == [2.0, 7.0, 2.0]


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved_1f1b", "zb_v", "dualpipe_v"]
)
def test_moments_are_those_of_the_whole_table(schedule: str) -> None:
    """Every moment is in the table, and no moment of the table has as many of each and more of some; also
    with so many micro-batches that the table of fewer is counted."""
    vpp = 2 if schedule in ("interleaved_1f1b", "zb_v", "dualpipe_v") else 1
    for pp, m in ((2, 4), (3, 6), (4, 8), (2, 18), (3, 30)):
        run = family(schedule, pp, m, vpp)
        for rank, row in enumerate(table_of(run)):
            own = run.stages_of(rank)
            now = {(kind, stage): 0 for kind in ("flies", "waits") for stage in own}
            seen = set()
            for stage, kind, _ in row:
                now["flies", stage] += (kind == "F") - (kind in "BI")
                now["waits", stage] += (kind == "I") - (kind == "W")
                seen.add(tuple(now.values()))
            found = {tuple(each.ravel()) for each in moments_of(schedule, pp, vpp, m)[rank]}
            assert found <= seen, (pp, m, rank)
            for one in seen:
                assert any(all(a <= b for a, b in zip(one, most, strict=True)) for most in found), (pp, m)


def test_the_makespan_of_two_ranks() -> None:
    """F, and both halves of B, take 1 s; hops 0.5, gathers 0.25, reductions 0.5; two micro-batches.

    Rank 0: F0 0.25-1.25, F1 -2.25. Rank 1: F0 1.75-2.75, B0 -4.75, F1 -5.75, B1 -7.75, reduction -8.25.
    Rank 0: B0 5.25-7.25, B1 8.25-10.25, reduction -10.75.
    """
    table = table_of(family("1f1b", 2, 2))
    assert makespan_s(table, [TIMES, TIMES], [0.5], max) == pytest.approx(10.75)


def test_columns_are_simulated_as_numbers_are() -> None:
    table = table_of(family("1f1b", 2, 2))
    slow = replace(TIMES, forward_s=3.0, gather_s=9.0)
    names = StageSeconds.__dataclass_fields__
    both = StageSeconds(**{name: np.array([getattr(TIMES, name), getattr(slow, name)]) for name in names})
    found = makespan_s(table, [both, both], [np.array([0.5, 0.5])], np.maximum)
    alone = [makespan_s(table, [times, times], [0.5], max) for times in (TIMES, slow)]
    assert found.tolist() == pytest.approx(alone)


def test_a_gather_delays_the_first_forward_only_once() -> None:
    """Rank 0 waits 5 s for its parameters; rank 1, whose own gather takes 1 s, waits for rank 0."""
    slow_gather, fast_gather = replace(TIMES, gather_s=5.0), replace(TIMES, gather_s=1.0)
    table: Table = (((0, "F", 0), (0, "B", 0)), ((1, "F", 0), (1, "B", 0)))
    # F 5-6, F 6.5-7.5, B -9.5, B 10-12, reduction -12.5.
    assert makespan_s(table, [slow_gather, fast_gather], [0.5], max) == pytest.approx(12.5)
    # Rank 1 waits 9 s for its own parameters, although its input from rank 0 arrives at 5.5 s: B -12, B
    # 12.5-14.5.
    slow = replace(TIMES, gather_s=9.0)
    assert makespan_s(table, [replace(TIMES, gather_s=4.0), slow], [0.5], max) == pytest.approx(15.0)


def test_reductions_of_a_rank_run_one_after_another() -> None:
    """Two stages on one rank end at 6 s and 8 s; the second reduction waits until the first's 5 s
    are over.
    """
    long, short = replace(TIMES, gather_s=0.0, reduce_s=1.0), replace(TIMES, gather_s=0.0, reduce_s=5.0)
    table: Table = (((0, "F", 0), (1, "F", 0), (1, "B", 0), (0, "B", 0)),)
    # 1B0 ends at 4, its reduction at 9; 0B0 ends at 6, its reduction starts at 9 and ends at 10.
    assert makespan_s(table, [long, short], [0.0], max) == pytest.approx(10.0)


def test_a_deadlocked_table_is_refused() -> None:
    table: Table = (((0, "B", 0), (0, "F", 0)), ((1, "F", 0), (1, "B", 0)))
    with pytest.raises(DeadlockError):
        makespan_s(table, [TIMES, TIMES], [0.5], max)
