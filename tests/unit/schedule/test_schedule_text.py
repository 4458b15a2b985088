"""The text form of schedules: its appearance, round trips, and errors."""

from __future__ import annotations

import pytest

from shardwise.errors import ConfigError
from shardwise.schedule import NAMES, Action, ActionKind, Schedule, from_text, generate, to_text
from shardwise.schedule.legality import illegal_reason


def test_runs_are_folded() -> None:
    assert to_text(generate("1f1b", pp=2, microbatches=8, vpp=1)).split("\n") == [
        "schedule=1f1b microbatches=8 stage_rank=0,1",
        "0F0*2 [0B0 0F2]*6 0B6*2",
        "[1F0 1B0]*8",
    ]


def test_plain_actions_parse() -> None:
    schedule = from_text("schedule=x microbatches=2 stage_rank=0\n0F0 0F1 0I0 0W0 0B1")
    letters = [
        Action(0, ActionKind(kind), mb) for kind, mb in [("F", 0), ("F", 1), ("I", 0), ("W", 0), ("B", 1)]
    ]
    assert schedule == Schedule(name="x", microbatches=2, stage_rank=(0,), ranks=(tuple(letters),))


def test_runs_count_microbatches_up() -> None:
    folded = from_text("schedule=x microbatches=9 stage_rank=0\n[0F4 0B2]*3 0F7*2")
    assert " ".join(map(str, folded.ranks[0])) == "0F4 0B2 0F5 0B3 0F6 0B4 0F7 0F8"


@pytest.mark.parametrize("name", NAMES)
def test_every_legal_table_round_trips(name: str) -> None:
    for pp in range(1, 17):
        for m in (1, 2, 7, 16, 33, 48, 64):
            for vpp in range(1, 5):
                if illegal_reason(name, pp, m, vpp) is None:
                    schedule = generate(name, pp=pp, microbatches=m, vpp=vpp)
                    text = to_text(schedule)
                    assert from_text(text) == schedule
                    assert to_text(from_text(text)) == text


def test_a_rank_without_actions_round_trips() -> None:
    schedule = Schedule(
        name="idle", microbatches=1, stage_rank=(1,), ranks=((), (Action(0, ActionKind.FORWARD, 0),))
    )
    assert to_text(schedule).split("\n")[1] == "-"
    assert from_text(to_text(schedule)) == schedule


def test_long_schedules_stay_short() -> None:
    # 24,576 actions; fully written, they would take about 150 kB.
    assert len(to_text(generate("1f1b", pp=8, microbatches=1536, vpp=1))) < 400


HEAD = "schedule=x microbatches=4 stage_rank=0"
REFUSED = [
    ("", "line 1"),
    ("0F0", "line 1"),
    (HEAD, "line 2"),
    ("schedule=x microbatches=4 stage_rank=\n0F0", "line 1"),
    ("schedule=x microbatches=-4 stage_rank=0\n0F0", "line 1"),
    ("schedule=x microbatches=04 stage_rank=0\n0F0", "line 1"),
    ("schedule=x y microbatches=4 stage_rank=0\n0F0", "line 1"),
    (f"{HEAD} \n0F0", "line 1"),
    (f"{HEAD}\n", "line 2"),
    (f"{HEAD}\n0F0\n", "line 3"),
    (f"{HEAD}\n0X0", "line 2"),
    (f"{HEAD}\n0F", "line 2"),
    (f"{HEAD}\nF0", "line 2"),
    (f"{HEAD}\n0F00", "line 2"),
    (f"{HEAD}\n-1F0", "line 2"),
    (f"{HEAD}\n0F0  0B0", "line 2"),
    (f"{HEAD}\n0F0 ", "line 2"),
    (f"{HEAD}\n0F0\t0B0", "line 2"),
    (f"{HEAD}\n0f0", "line 2"),
    (f"{HEAD}\n0SEND_F0", "line 2"),
    (f"{HEAD}\n0F0*0", "line 2"),
    (f"{HEAD}\n0F0*", "line 2"),
    (f"{HEAD}\n0F0*9999999", "line 2"),
    (f"{HEAD}\n0F99999999", "line 2"),
    (f"{HEAD}\n[0F0 0B0*3", "line 2"),
    (f"{HEAD}\n0F0 0B0]*3", "line 2"),
    (f"{HEAD}\n[[0F0 0B0]*2]*3", "line 2"),
    (f"{HEAD}\n[]*3", "line 2"),
    (f"{HEAD}\n0F\u0663", "line 2"),
    (f"{HEAD}\n" + "0F0*4000000 " * 2 + "0B0", "line 2"),
    (f"{HEAD}\n" + "\n".join(["0F0*2000000"] * 3), "line 4"),
    (HEAD + "\n-" * 4097, "line 2"),
]


@pytest.mark.parametrize(("text", "line"), REFUSED, ids=range(len(REFUSED)))
def test_malformed_text_is_refused_with_its_line(text: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_text(text)
    assert caught.value.key == line
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_too_long_a_text_is_refused_before_it_is_read() -> None:
    with pytest.raises(ConfigError, match="too long"):
        from_text("0" * (1 << 20) + "0")


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(name="two words", microbatches=1, stage_rank=(0,), ranks=((),)),
        Schedule(name="x", microbatches=-1, stage_rank=(0,), ranks=((),)),
        Schedule(name="x", microbatches=1, stage_rank=(), ranks=((),)),
        Schedule(name="x", microbatches=1, stage_rank=(0,), ranks=((Action(-1, ActionKind.FORWARD, 0),),)),
        Schedule(name="x", microbatches=1, stage_rank=(0,), ranks=((Action(0, ActionKind.FORWARD, 10**7),),)),
    ],
    ids=["name", "microbatches", "no stages", "negative stage", "huge microbatch"],
)
def test_schedules_that_would_not_parse_are_not_written(schedule: Schedule) -> None:
    with pytest.raises(ConfigError):
        to_text(schedule)


def test_schedules_are_values() -> None:
    first, second = (generate("zb_v", pp=3, microbatches=7, vpp=2) for _ in range(2))
    other = generate("zb_v", pp=3, microbatches=8, vpp=2)
    assert first == second and hash(first) == hash(second) and first != other
    rebuilt = Schedule(
        name=first.name, microbatches=first.microbatches, stage_rank=first.stage_rank, ranks=first.ranks
    )
    assert rebuilt == first and hash(rebuilt) == hash(first)
    with pytest.raises(AttributeError):
        first.name = "other"
    with pytest.raises(ValueError, match="read-only"):
        first.columns.stage[0] = 1
