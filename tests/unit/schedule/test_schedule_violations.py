"""The validator's messages, one invalid table each; and the grid that marks the place."""

from __future__ import annotations

import pytest

from shardwise.schedule import Schedule, from_text, generate, peak_in_flight
from shardwise.schedule.legality import peak_activations
from shardwise.schedule.text import format_findings, format_grid
from shardwise.schedule.violations import dry_run, violations


def table(*rows: str, microbatches: int = 1, stage_rank: str = "0,1") -> Schedule:
    return from_text("\n".join([f"schedule=hand microbatches={microbatches} stage_rank={stage_rank}", *rows]))


BROKEN = [
    (table("0F0 0B0", "1B0 1F0"), "rank 1, action 0: 1B0 comes before its F"),
    (table("0F0 0B0", "1F0"), "rank 1: stage 1, micro-batch 0 ends after F; it needs F B or F I W"),
    (table("0F0 0B0", "-"), "rank 1: stage 1, micro-batch 0 ends before its F; it needs F B or F I W"),
    (table("0F0 0B0", "1F0 1F0 1B0"), "rank 1, action 1: 1F0 comes after F"),
    (table("0F0 0B0", "1F0 1B0 1B0"), "rank 1, action 2: 1B0 comes after F B"),
    (table("0F0 0B0", "1F0 1I0"), "rank 1: stage 1, micro-batch 0 ends after F I; it needs F B or F I W"),
    (table("0F0 0B0", "1F0 1W0 1I0"), "rank 1, action 1: 1W0 comes after F"),
    (table("0F0 0B0", "1F0 1I0 1B0"), "rank 1, action 2: 1B0 comes after F I"),
    (table("0F0 0B0 1F0", "1F0 1B0"), "rank 0, action 2: stage 1 is on rank 1"),
    (table("0F0 0B0 2F0", "1F0 1B0"), "rank 0, action 2: stage 2 does not exist; the last is 1"),
    (table("0F0 0B0 0F1", "1F0 1B0"), "rank 0, action 2: micro-batch 1 does not exist; the last is 0"),
    (table("0F0 0B0", "1F0 1B0", stage_rank="0,2"), "rank 2: holds stage 1, but ranks go from 0 to 1"),
    (
        table("0F0 0B0", microbatches=0, stage_rank="0"),
        "rank 0: there are 0 micro-batches; at least 1 is needed",
    ),
]


@pytest.mark.parametrize(("schedule", "text"), BROKEN, ids=[text[:60] for _, text in BROKEN])
def test_each_fault_has_its_sentence(schedule: Schedule, text: str) -> None:
    assert text in violations(schedule)


def test_a_schedule_without_stages_is_refused() -> None:
    schedule = Schedule(name="none", microbatches=1, stage_rank=(), ranks=((),))
    assert violations(schedule) == ["rank 0: there is no stage"]


def test_a_deadlock_is_found() -> None:
    # Rank 0 waits for the gradient of micro-batch 1 first; rank 1 computes it only after micro-batch 0.
    deadlocked = table("0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1", microbatches=2)
    assert violations(deadlocked) == [
        "rank 0, action 1: 0B1 waits forever for stage 1, micro-batch 1",
        "rank 1, action 0: 1F0 waits forever for stage 0, micro-batch 0",
    ]
    assert dry_run(deadlocked).starts == ((0,), ())
    assert dry_run(deadlocked).waits_for == (1, 0)


def test_unequal_chunks_per_rank_are_sound() -> None:
    # Rank 0 has stages 0, 1 and 3, rank 1 stage 2.
    uneven = table("0F0 1F0 3F0 3B0 1I0 1W0 0B0", "2F0 2B0", stage_rank="0,0,1,0")
    assert violations(uneven) == []
    assert peak_in_flight(uneven) == (3, 1)
    # Stage 1 needs five times as much as the others: 1 + 5 + 1 on rank 0.
    assert peak_activations(uneven, [1.0, 5.0, 2.0, 1.0]).tolist() == [7.0, 2.0]
    assert peak_activations(uneven, [[1.0, 0.0], [5.0, 2.0], [2.0, 0.0], [1.0, 1.0]]).tolist() == [
        [7, 3],
        [2, 0],
    ]


def test_an_input_gradient_releases_nothing() -> None:
    # Two forwards, two input gradients, then a third forward: all three are in flight until the weight
    # gradients.
    schedule = table("0F0 0I0 0F1 0I1 0F2 0W0 0I2 0W1 0W2", microbatches=3, stage_rank="0")
    assert violations(schedule) == []
    assert peak_in_flight(schedule) == (3,)


def test_the_in_flight_limit_names_the_first_forward_above_it() -> None:
    schedule = generate("gpipe", pp=2, microbatches=3, vpp=1)
    assert violations(schedule, [3, 3]) == []
    assert violations(schedule, [3, 2]) == ["rank 1, action 2: 1F2 makes 3 in flight; the limit is 2"]


def test_grid_shows_each_action_in_its_step() -> None:
    assert format_grid(generate("1f1b", pp=2, microbatches=2, vpp=1)).split("\n") == [
        "        rank 0  rank 1",
        "step 0  0F0     .",
        "step 1  0F1     1F0",
        "step 2  .       1B0",
        "step 3  0B0     1F1",
        "step 4  .       1B1",
        "step 5  0B1     .",
    ]


def test_grid_can_be_cut() -> None:
    grid = format_grid(generate("gpipe", pp=2, microbatches=3, vpp=1), max_steps=2).split("\n")
    assert grid == ["        rank 0  rank 1", "step 0  0F0     .", "step 1  0F1     1F0", "(6 more steps)"]


def test_findings_mark_the_failing_actions() -> None:
    text = format_findings(table("0F1 0B1 0F0 0B0", "1F0 1B0 1F1 1B1", microbatches=2))
    lines = text.split("\n")
    assert lines[0] == "rank 0, action 1: 0B1 waits forever for stage 1, micro-batch 1"
    assert [line.split() for line in lines[3:5]] == [
        ["step", "0", "0F1", "1F0", "<--", "here"],
        ["step", "1", "0B1", "<--", "here", "1B0"],
    ]
    assert format_findings(generate("gpipe", pp=2, microbatches=3, vpp=1)) == ""
