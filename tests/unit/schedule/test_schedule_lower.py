"""Communication by hand, and invalid communication."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.errors import ConfigError
from shardwise.schedule import (
    Action,
    ActionKind,
    Communication,
    CommunicationKind,
    from_text,
    generate,
    lower,
)
from shardwise.schedule.lower import LoweredSchedule
from shardwise.schedule.violations import lowering_violations

SOUND = lower(generate("1f1b", pp=2, microbatches=2, vpp=1), unshard=False)


def rows(lowered: LoweredSchedule) -> list[str]:
    return [" ".join(map(str, row)) for row in lowered.ranks]


def with_row(rank: int, text: str) -> LoweredSchedule:
    """SOUND with the row of `rank` in the order of `text`."""
    by_text = {str(step): step for row in SOUND.ranks for step in row}
    by_text["0SEND_B0"] = Communication(0, CommunicationKind.SEND_B, 0)
    changed = list(SOUND.ranks)
    changed[rank] = tuple(by_text[word] for word in text.split())
    return dataclasses.replace(SOUND, ranks=tuple(changed))


def test_transfers_by_hand() -> None:
    # Rank 1 comes right after rank 0 and inserts the gradient's receive into rank 0's row.
    assert rows(SOUND) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD",
    ]
    assert lowering_violations(SOUND) == []


def test_stages_that_are_neighbours_on_a_rank_exchange_nothing() -> None:
    lowered = lower(generate("zb_v", pp=2, microbatches=4, vpp=2))
    transfers = {(step.stage, str(step.kind)) for row in lowered.ranks for step in row if "_" in step.kind}
    assert not transfers & {(1, "SEND_F"), (2, "RECV_F"), (2, "SEND_B"), (1, "RECV_B")}


def test_parameters_are_gathered_before_and_dropped_after() -> None:
    lowered = lower(generate("gpipe", pp=1, microbatches=1, vpp=1))
    assert rows(lowered) == ["0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD"]


BROKEN = [
    (0, "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0B1 0REDUCE_GRAD", "(2 sends, 1 receives)"),
    (0, "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD", "rank 0 to rank 1: "),
    (0, "0SEND_F0 0F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD", "rank 0: 0SEND_F0 waits forever"),
    (0, "0F0 0SEND_F0 0F1 0SEND_F1 0B0 0RECV_B0 0RECV_B1 0B1 0REDUCE_GRAD", "rank 0: 0B0 waits forever"),
    (0, "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0REDUCE_GRAD 0SEND_B0", "0SEND_B0 has no peer"),
    (1, "1RECV_F0 1RECV_F1 1F0 1SEND_B0 1B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD", "rank 1: 1SEND_B0 waits forever"),
]


@pytest.mark.parametrize(("rank", "row", "fault"), BROKEN, ids=[fault for *_, fault in BROKEN])
def test_broken_communication_is_named(rank: int, row: str, fault: str) -> None:
    assert any(fault in found for found in lowering_violations(with_row(rank, row)))


def test_a_table_with_a_deadlock_is_not_lowered() -> None:
    deadlocked = from_text("schedule=x microbatches=2 stage_rank=0,1\n0F1 0B1 0F0 0B0\n1F0 1B0 1F1 1B1")
    with pytest.raises(ConfigError, match="the schedule deadlocks; found 0B1"):
        lower(deadlocked)


def test_unequal_chunks_are_lowered() -> None:
    uneven = from_text("schedule=x microbatches=1 stage_rank=0,0,1\n0F0 1F0 1I0 1W0 0B0\n2F0 2B0")
    lowered = lower(uneven, unshard=False)
    assert rows(lowered)[0] == "0F0 1F0 1SEND_F0 1RECV_B0 1I0 1W0 1REDUCE_GRAD 0B0 0REDUCE_GRAD"
    assert lowering_violations(lowered) == []
    assert Action(2, ActionKind.FORWARD, 0) in lowered.ranks[1]
