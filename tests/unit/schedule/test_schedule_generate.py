"""The generated tables: by hand, and over every legal combination up to 16 ranks, 64 micro-batches,
4 chunks.
"""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.errors import ConfigError
from shardwise.schedule import (
    NAMES,
    Action,
    ActionKind,
    Schedule,
    full_moment,
    generate,
    in_flight,
    live_counts,
    live_microbatches,
    lower,
    peak_in_flight,
    stage_of,
)
from shardwise.schedule.legality import code_of, illegal_reason, rank_of_stage
from shardwise.schedule.violations import dry_run, lowering_violations, violations

GRID = [(pp, m, vpp) for pp in range(1, 17) for m in range(1, 65) for vpp in range(1, 5)]


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.ranks]


def test_gpipe_by_hand() -> None:
    assert rows(generate("gpipe", pp=2, microbatches=2, vpp=1)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_1f1b_by_hand() -> None:
    assert rows(generate("1f1b", pp=3, microbatches=4, vpp=1)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_1f1b_with_fewer_microbatches_than_ranks_is_all_forward_then_all_backward() -> None:
    assert rows(generate("1f1b", pp=3, microbatches=1, vpp=1)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_interleaved_by_hand() -> None:
    # pp 2, vpp 2: rank 0 warms up with 2 * (2 - 0 - 1) + (2 - 1) * 2 = 4 forwards, rank 1 with 2; groups of 2
    # micro-batches.
    assert rows(generate("interleaved_1f1b", pp=2, microbatches=4, vpp=2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_zb_h1_by_hand() -> None:
    # The last of two ranks has no warm-up forward and defers one weight gradient.
    assert rows(generate("zb_h1", pp=2, microbatches=3, vpp=1)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_zb_h2_by_hand() -> None:
    # Twice the warm-up of zb_h1: 2 on rank 0; twice as many deferred: 2 on rank 1.
    assert rows(generate("zb_h2", pp=2, microbatches=4, vpp=1)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    ]


def test_v_schedules_fold_the_stages() -> None:
    for name in ("zb_v", "dualpipe_v"):
        assert generate(name, pp=3, microbatches=6, vpp=2).stage_rank == (0, 1, 2, 2, 1, 0)


def test_dualpipe_v_by_hand() -> None:
    assert rows(generate("dualpipe_v", pp=2, microbatches=4, vpp=2)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3",
    ]


Counts = tuple[int, ...]
"""Pairs in flight on each chunk of a rank, then those that wait for their W on each chunk."""


def counts_one_by_one(schedule: Schedule, vpp: int) -> list[set[Counts]]:
    """For each rank its counts after every action."""
    of_ranks = []
    for rank, row in enumerate(schedule.ranks):
        chunks = sorted({action.stage for action in row})
        flying, waiting = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0)
        seen = set()
        for action in row:
            flying[action.stage] += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            waiting[action.stage] += {"I": 1, "W": -1}.get(action.kind, 0)
            seen.add((*flying.values(), *waiting.values()))
        assert len(chunks) == vpp and not any(flying.values()) and not any(waiting.values()), rank
        of_ranks.append(seen)
    return of_ranks


def counts_until_reduction(schedule: Schedule, m: int, vpp: int) -> list[set[Counts]]:
    """For each rank its counts after every action, and 1 for chunks with gradients, which are reduced when
    all micro-batches have passed backward."""
    of_ranks = []
    for row in schedule.ranks:
        chunks = sorted({action.stage for action in row})
        flying, waiting, passed = (dict.fromkeys(chunks, 0) for _ in range(3))
        seen = set()
        for action in row:
            before = dict(passed)
            flying[action.stage] += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            waiting[action.stage] += {"I": 1, "W": -1}.get(action.kind, 0)
            passed[action.stage] += action.kind in ("B", "W")
            whole = (int(passed[chunk] > 0 and before[chunk] < m) for chunk in chunks)
            seen.add((*flying.values(), *waiting.values(), *whole))
        of_ranks.append(seen)
    return of_ranks


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_whole_until_they_are_reduced(name: str) -> None:
    """All moments that no other exceeds, with few and with many micro-batches; hand-counted ones below."""
    code = code_of(name)
    for pp, m, vpp in ((2, 1, 1), (2, 2, 2), (3, 4, 1), (2, 12, 2), (3, 15, 1), (4, 24, 2), (2, 10, 3)):
        if illegal_reason(name, pp, m, vpp) is not None:
            continue
        schedule = generate(name, pp=pp, microbatches=m, vpp=vpp)
        enough = int(live_microbatches(*(np.array(each) for each in (code, pp, m))))
        found = live_counts(name, pp, enough, vpp, reduces_once=True)
        for rank, seen in enumerate(counts_until_reduction(schedule, m, vpp)):
            moments = {tuple(moment) for moment in found[rank].reshape(-1, 3 * vpp).tolist()}
            most = {one for one in seen if not any(one != other and at_most(one, other) for other in seen)}
            assert most <= moments <= seen, (pp, m, vpp, rank)


def test_moments_with_gradients_by_hand() -> None:
    # All F come first: 3 in flight without gradients, then 2 with them.
    assert live_counts("gpipe", 2, 3, 1, reduces_once=True)[1].tolist() == [
        [[3], [0], [0]],
        [[2], [0], [1]],
    ]
    # F B F ... on the last rank: one in flight and gradients of the one before.
    assert live_counts("1f1b", 2, 3, 1, reduces_once=True)[1].tolist() == [[[1], [0], [1]]]


def at_most(one: Counts, other: Counts) -> bool:
    return all(few <= many for few, many in zip(one, other, strict=True))


def check_live_counts(name: str, schedule: Schedule, pp: int, m: int, vpp: int) -> None:
    """`live_counts` has all moments that no other exceeds, and `full_moment` is one of the schedule's."""
    code = code_of(name)
    enough = int(live_microbatches(*(np.array(each) for each in (code, pp, m))))
    counts = live_counts(name, pp, enough, vpp)
    for rank, seen in enumerate(counts_one_by_one(schedule, vpp)):
        found = {tuple(moment) for moment in counts[rank].reshape(-1, 2 * vpp).tolist()}
        assert found <= seen, (pp, m, vpp, rank)
        assert found == {
            one for one in seen if not any(one != other and at_most(one, other) for other in seen)
        }, (pp, m, vpp, rank)
        flying, each, waiting = (int(part) for part in full_moment(code, pp, m, vpp, rank))
        assert flying == max(sum(one[:vpp]) for one in seen), (pp, m, vpp, rank)
        assert any(
            sum(one[:vpp]) == flying and min(one[:vpp]) >= each and sum(one[vpp:]) >= waiting for one in seen
        ), (pp, m, vpp, rank)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_legal_table_is_sound_and_agrees_with_the_closed_form(name: str, full: bool) -> None:
    """Every table is valid and is within the closed form; without `--full` one in five is counted fully."""
    seen = 0
    for pp, m, vpp in GRID:
        if illegal_reason(name, pp, m, vpp) is not None:
            continue
        seen += 1
        schedule = generate(name, pp=pp, microbatches=m, vpp=vpp)
        in_flight_now = tuple(int(in_flight(code_of(name), pp, m, vpp, rank)) for rank in range(pp))
        assert violations(schedule, in_flight_now) == [], (pp, m, vpp)
        if not full and seen % 5:
            continue
        assert peak_in_flight(schedule) == in_flight_now, (pp, m, vpp)
        assert in_flight_now == tuple(sorted(in_flight_now, reverse=True)), (pp, m, vpp)
        if pp <= 6 or full:
            check_live_counts(name, schedule, pp, m, vpp)
        check_ends(schedule, m)
    assert seen == LEGAL_COUNT[name]


# Counted by hand over pp 1-16, m 1-64: 16 * 64 and 15 * 64; interleaved has floor(64 / pp) batches for
# each pp from 2 (32 + 21 + 16 + 12 + 10 + 9 + 8 + 7 + 6 + 5 + 5 + 4 + 4 + 4 + 4 = 147) and vpp 2, 3, 4;
# the V shapes have 65 - 2 pp batches, so 15 * 65 - 2 * (2 + ... + 16) = 975 - 270.
LEGAL_COUNT = {
    "1f1b": 1024,
    "gpipe": 1024,
    "interleaved_1f1b": 441,
    "zb_h1": 960,
    "zb_h2": 960,
    "zb_v": 705,
    "dualpipe_v": 705,
}


def check_ends(schedule: Schedule, m: int) -> None:
    """Assert that every row starts with the first forward of its rank's lowest stage and ends with that
    stage's last gradient.
    """
    for rank, row in enumerate(schedule.ranks):
        assert row[0] == Action(rank, ActionKind.FORWARD, 0)
        assert row[-1].kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        assert (row[-1].stage, row[-1].microbatch) == (rank, m - 1)


@pytest.mark.parametrize("name", NAMES)
def test_stage_placement_is_a_bijection_that_the_table_follows(name: str) -> None:
    for pp, m, vpp in [(1, 2, 1), (2, 4, 1), (2, 4, 2), (5, 10, 2), (4, 8, 3), (16, 32, 4)]:
        if illegal_reason(name, pp, m, vpp) is not None:
            continue
        stage_rank = generate(name, pp=pp, microbatches=m, vpp=vpp).stage_rank
        stages = [stage_of(name, pp, rank, chunk) for rank in range(pp) for chunk in range(vpp)]
        assert sorted(stages) == list(range(pp * vpp))
        for place, stage in enumerate(stages):
            assert rank_of_stage(name, pp, stage) == stage_rank[stage] == place // vpp


@pytest.mark.parametrize(("pp", "m"), [(1, 1), (1, 7), (2, 1), (2, 5), (5, 3), (8, 24), (16, 64)])
def test_gpipe_and_1f1b_take_the_textbook_steps(pp: int, m: int) -> None:
    # Equal stages, forward and backward one step each: (m + pp - 1) * (1 + 1).
    for name in ("gpipe", "1f1b"):
        assert dry_run(generate(name, pp=pp, microbatches=m, vpp=1)).steps == 2 * (m + pp - 1)


@pytest.mark.parametrize(("pp", "m", "vpp"), [(2, 2, 2), (2, 8, 4), (3, 9, 2), (8, 24, 3)])
def test_interleaving_divides_the_bubble_by_vpp(pp: int, m: int, vpp: int) -> None:
    # In steps of one chunk: 2 m vpp of work and (pp - 1) * 2 idle, where 1F1B would idle (pp - 1) * 2 * vpp.
    steps = dry_run(generate("interleaved_1f1b", pp=pp, microbatches=m, vpp=vpp)).steps
    assert steps == 2 * m * vpp + 2 * (pp - 1)


@pytest.mark.parametrize(("pp", "m"), [(2, 3), (3, 5), (4, 7), (4, 30), (8, 15), (16, 64)])
def test_zero_bubble_steps_when_f_i_and_w_take_one_step_each(pp: int, m: int) -> None:
    # Nothing can end before 3 m + pp - 1: the last rank starts after pp - 1 steps and has 3 m of work.
    # Both schedules reach it.
    h1 = dry_run(generate("zb_h1", pp=pp, microbatches=m, vpp=1))
    h2 = dry_run(generate("zb_h2", pp=pp, microbatches=m, vpp=1))
    assert h1.steps == h2.steps == 3 * m + pp - 1
    # They differ in the idle time within the rank: (pp - 1) (F + I - W) = pp - 1 steps with h1, arXiv
    # 2401.10241 table 1; none with h2, given at least 2 pp - 1 micro-batches.
    assert m >= 2 * pp - 1
    assert [row[-1] + 1 for row in h1.starts] == [3 * m + pp - 1] * pp
    assert [row[-1] + 1 - row[0] for row in h2.starts] == [3 * m] * pp


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (3, 6), (4, 30), (8, 16)])
def test_zb_v_has_no_bubble_inside_a_rank_when_f_i_and_w_take_one_step_each(pp: int, m: int) -> None:
    # Two chunks: 6 m of work per rank; rank r starts at step r.
    run = dry_run(generate("zb_v", pp=pp, microbatches=m, vpp=2))
    assert [(row[0], row[-1] + 1 - row[0]) for row in run.starts] == [(rank, 6 * m) for rank in range(pp)]


@pytest.mark.parametrize("name", NAMES)
def test_lowered_tables_match_their_transfers(name: str) -> None:
    for pp, m, vpp in [
        (1, 3, 1),
        (2, 1, 1),
        (2, 4, 1),
        (3, 7, 1),
        (2, 4, 2),
        (3, 9, 2),
        (4, 8, 4),
        (8, 16, 2),
    ]:
        if illegal_reason(name, pp, m, vpp) is None:
            schedule = generate(name, pp=pp, microbatches=m, vpp=vpp)
            assert lowering_violations(lower(schedule)) == []
            assert lowering_violations(lower(schedule, receive="late", unshard=False)) == []


ILLEGAL = [
    ("1f1b", 0, 4, 1, "schedule_not_positive"),
    ("1f1b", 4, 0, 1, "schedule_not_positive"),
    ("gpipe", 4, 4, 0, "schedule_not_positive"),
    ("1f1b", 4, 4, 2, "schedule_vpp"),
    ("gpipe", 4, 4, 2, "schedule_vpp"),
    ("zb_h1", 4, 4, 2, "schedule_vpp"),
    ("zb_h2", 4, 4, 2, "schedule_vpp"),
    ("zb_v", 4, 8, 1, "schedule_vpp"),
    ("zb_v", 4, 8, 3, "schedule_vpp"),
    ("dualpipe_v", 4, 8, 4, "schedule_vpp"),
    ("interleaved_1f1b", 4, 8, 1, "schedule_vpp"),
    ("interleaved_1f1b", 1, 8, 2, "schedule_needs_pipeline"),
    ("zb_h1", 1, 8, 1, "schedule_needs_pipeline"),
    ("zb_h2", 1, 8, 1, "schedule_needs_pipeline"),
    ("zb_v", 1, 8, 2, "schedule_needs_pipeline"),
    ("dualpipe_v", 1, 8, 2, "schedule_needs_pipeline"),
    ("interleaved_1f1b", 4, 6, 2, "schedule_microbatches_divisible"),
    ("interleaved_1f1b", 4, 2, 2, "schedule_microbatches_divisible"),
    ("zb_v", 4, 7, 2, "schedule_microbatches_minimum"),
    ("dualpipe_v", 4, 7, 2, "schedule_microbatches_minimum"),
]


@pytest.mark.parametrize(("name", "pp", "m", "vpp", "reason"), ILLEGAL)
def test_illegal_combinations_are_refused_by_code(name: str, pp: int, m: int, vpp: int, reason: str) -> None:
    assert illegal_reason(name, pp, m, vpp) == reason
    with pytest.raises(ConfigError, match=reason):
        generate(name, pp=pp, microbatches=m, vpp=vpp)


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="is not a known schedule; found '2f2b'"):
        generate("2f2b", pp=2, microbatches=2, vpp=1)


@pytest.mark.parametrize("name", NAMES)
def test_stages_meet_microbatches_in_rising_order_and_last_kind_is_as_documented(name: str) -> None:
    last_kind = (
        ActionKind.BACKWARD if name in ("gpipe", "1f1b", "interleaved_1f1b") else ActionKind.BACKWARD_WEIGHT
    )
    for pp, m, vpp in [
        (1, 3, 1),
        (2, 4, 1),
        (4, 2, 1),
        (3, 7, 1),
        (2, 4, 2),
        (3, 9, 2),
        (4, 8, 4),
        (8, 24, 2),
    ]:
        if illegal_reason(name, pp, m, vpp) is not None:
            continue
        for row in generate(name, pp=pp, microbatches=m, vpp=vpp).ranks:
            assert row[-1].kind is last_kind
            for stage in {action.stage for action in row}:
                mine = [action for action in row if action.stage == stage]
                for kinds in ("F", "BI", "BW"):
                    order = [action.microbatch for action in mine if action.kind in kinds]
                    assert order == list(range(m)), (pp, m, vpp, stage, kinds)
