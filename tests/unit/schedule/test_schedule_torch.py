"""The tables and their communication equal those of PyTorch, action for action."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from shardwise.schedule import Action, ActionKind, Communication, CommunicationKind, Schedule, generate, lower
from shardwise.schedule.violations import lowering_violations

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")

INTERLEAVED = "ScheduleInterleaved1F1B"
CASES = [(2, 4), (2, 8), (3, 6), (4, 8), (4, 20), (5, 10), (7, 21), (8, 16)]


def flattened(actions: Iterable[Any]) -> list[Any]:
    """The actions without idle cells, overlapped pairs split into their two parts."""
    compared = [action for action in actions if action is not None]
    return [part for action in compared for part in (action.sub_actions or (action,))]


def torch_rows(class_name: str, pp: int, m: int, local_stages: int) -> dict[int, list[Any]]:
    """The compute table of a PyTorch schedule class, built without stages or processes."""
    schedule = object.__new__(getattr(torch_schedules, class_name))
    schedule.pp_group_size = pp
    schedule.n_local_stages = local_stages
    schedule.num_stages = schedule._num_stages = pp * local_stages
    schedule._n_microbatches = m
    schedule.microbatches_per_round = m // max(1, m // pp)
    return {rank: flattened(schedule._calculate_single_rank_operations(rank)) for rank in range(pp)}


def our_rows(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.ranks]


def their_rows(rows: dict[int, list[Any]]) -> list[list[str]]:
    return [[str(action) for action in rows[rank]] for rank in sorted(rows)]


@pytest.mark.parametrize(("pp", "m"), CASES)
@pytest.mark.parametrize(
    ("name", "class_name", "vpp"),
    [
        ("interleaved_1f1b", INTERLEAVED, 2),
        ("interleaved_1f1b", INTERLEAVED, 4),
        ("zb_h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb_v", "ScheduleZBVZeroBubble", 2),
        ("dualpipe_v", "ScheduleDualPipeV", 2),
    ],
)
def test_tables_are_pytorchs(name: str, class_name: str, vpp: int, pp: int, m: int) -> None:
    theirs = torch_rows(class_name, pp, m, vpp)
    ours = generate(name, pp=pp, microbatches=m, vpp=vpp)
    assert our_rows(ours) == their_rows(theirs)


@pytest.mark.parametrize(("pp", "m"), CASES)
def test_gpipe_table_is_pytorchs(pp: int, m: int) -> None:
    schedule = object.__new__(torch_schedules.ScheduleGPipe)
    schedule._num_stages, schedule._n_microbatches = pp, m
    theirs = schedule._get_pipeline_order()
    computed = {rank: [a for a in row if a and a.is_compute_op] for rank, row in theirs.items()}
    assert our_rows(generate("gpipe", pp=pp, microbatches=m, vpp=1)) == their_rows(computed)


@pytest.mark.parametrize(("pp", "m"), CASES)
def test_1f1b_table_is_pytorchs_except_for_its_misnumbered_forwards_on_the_last_rank(pp: int, m: int) -> None:
    # Schedule1F1B._get_pipeline_order of 2.13 counts the last rank's forwards from 1; the schedule itself
    # counts from 0.
    schedule = object.__new__(torch_schedules.Schedule1F1B)
    schedule._num_stages, schedule._n_microbatches = pp, m
    theirs = schedule._get_pipeline_order()
    computed = {rank: [a for a in row if a and a.is_compute_op] for rank, row in theirs.items()}
    ours = our_rows(generate("1f1b", pp=pp, microbatches=m, vpp=1))
    assert ours[:-1] == their_rows(computed)[:-1]
    assert [text[1] for text in ours[-1]] == [str(action)[1] for action in computed[pp - 1]]


def torch_lowered(schedule: Schedule, *, late: bool) -> list[list[str]]:
    """PyTorch's lowering passes over our table."""
    parse = torch_schedules._Action.from_str
    rows = {rank: [parse(str(action)) for action in row] for rank, row in enumerate(schedule.ranks)}
    rows = {rank: torch_schedules._add_unshard_reshard(row) for rank, row in rows.items()}
    rows = {rank: torch_schedules._add_reduce_grad(row, schedule.microbatches) for rank, row in rows.items()}

    def stage_to_rank(stage: int) -> int:
        return schedule.stage_rank[stage]

    rows = torch_schedules._add_send_recv(rows, stage_to_rank, schedule.stages)
    if late:
        rows = torch_schedules._defer_recv_ops(rows, stage_to_rank)
    return their_rows(rows)


def with_sorted_reshards(row: list[str]) -> list[str]:
    """The row with each run of RESHARDs sorted: PyTorch takes them from a set, in no stated order."""
    result: list[str] = []
    run: list[str] = []
    for text in [*row, ""]:
        if text.endswith("RESHARD"):
            run.append(text)
        else:
            result += [*sorted(run), text]
            run = []
    return result


LOWERED = pytest.mark.parametrize(
    ("name", "pp", "m", "vpp"),
    [
        ("gpipe", 3, 5, 1),
        ("1f1b", 4, 9, 1),
        ("interleaved_1f1b", 2, 6, 3),
        ("interleaved_1f1b", 4, 12, 4),
        ("zb_h1", 4, 8, 1),
        ("zb_h2", 4, 9, 1),
        ("zb_v", 3, 8, 2),
        ("dualpipe_v", 4, 11, 2),
    ],
)


@LOWERED
def test_lowering_is_pytorchs(name: str, pp: int, m: int, vpp: int) -> None:
    schedule = generate(name, pp=pp, microbatches=m, vpp=vpp)
    ours = [[str(step) for step in row] for row in lower(schedule).ranks]
    theirs = torch_lowered(schedule, late=False)
    assert [with_sorted_reshards(row) for row in ours] == [with_sorted_reshards(row) for row in theirs]


@LOWERED
def test_late_receives_are_pytorchs_where_those_keep_the_order_of_messages(
    name: str, pp: int, m: int, vpp: int
) -> None:
    # PyTorch's pass lets a forward overtake a backward of the same sender where a rank sends in both
    # directions to a peer.
    schedule = generate(name, pp=pp, microbatches=m, vpp=vpp)
    ours = [[str(step) for step in row] for row in lower(schedule, receive="late").ranks]
    theirs = torch_lowered(schedule, late=True)
    same = [with_sorted_reshards(row) for row in ours] == [with_sorted_reshards(row) for row in theirs]
    parsed = dataclasses.replace(lower(schedule), ranks=tuple(tuple(map(parsed_step, row)) for row in theirs))
    assert same == (lowering_violations(parsed) == [])
    assert lowering_violations(lower(schedule, receive="late")) == []


def parsed_step(text: str) -> Action | Communication:
    """Our step for PyTorch's text."""
    theirs = torch_schedules._Action.from_str(text)
    stage, kind, microbatch = theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index
    if theirs.is_compute_op:
        return Action(stage, ActionKind(kind), microbatch)
    return Communication(stage, CommunicationKind(kind), microbatch)


def test_every_action_parses_in_pytorch() -> None:
    parse = torch_schedules._Action.from_str
    for row in lower(generate("zb_v", pp=2, microbatches=4, vpp=2)).ranks:
        for step in row:
            theirs = parse(str(step))
            assert (theirs.stage_index, theirs.computation_type.value, theirs.microbatch_index) == tuple(step)
            assert isinstance(step, Communication) != theirs.is_compute_op
