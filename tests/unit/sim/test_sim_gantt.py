"""The chart in the terminal, column by column."""

from __future__ import annotations

from shardwise.schedule import generate
from shardwise.sim import COMPUTE, Durations, gantt, simulate, task_graph
from shardwise.sim.engine import TaskGraphBuilder


def test_a_gantt_chart_of_two_ranks() -> None:
    # Step 9 s on 36 columns, 4 per second. Rank 0: F0 0-1, F1 1-2, B0 4-6, B1 7-9 (rank 1: F0 1-2, B0 2-4, F1
    # 4-5, B1 5-7). Both compute 6 of 9 s.
    schedule = generate("1f1b", pp=2, microbatches=2, vpp=1)
    timeline = simulate(task_graph(schedule, Durations.of(stages=2, forward_s=1, backward_s=2)))
    lines = gantt(timeline, width=36).split("\n")
    assert lines == [
        "rank 0 |F0FFF1FF········B0BBBBBB····B1BBBBBB|  66.7%",
        "rank 1 |····F0FFB0BBBBBBF1FFB1BBBBBB········|  66.7%",
        "F forward  B backward  · idle  digits: microbatch  %: computing  step 9 s",
        "",
    ]


def test_split_backward_and_communication() -> None:
    # One rank: gather 0-1, F 1-2, I 2-3, W 3-4, reduction 4-6; 12 columns, 2 per second.
    schedule = generate("zb_h1", pp=2, microbatches=1, vpp=1)
    durations = Durations.of(
        stages=2, forward_s=1, backward_input_s=1, backward_weight_s=1, gather_s=[1, 0], reduce_s=[2, 0]
    )
    lines = gantt(simulate(task_graph(schedule, durations)), width=16, communication=True).split("\n")
    # Rank 0: F 1-2, (rank 1: F 2-3, I 3-4), I 4-5, W 5-6, reduction 6-8: 8 s, 2 columns per second.
    assert lines[0] == "rank 0 |··F0····I0W0····|  37.5%"
    assert lines[1] == "       |gg··········rrrr|"
    assert lines[2] == "rank 1 |····F0I0W0······|  37.5%"
    assert "I input grad  W weight grad  g gather  r reduce" in lines[4]


def test_numbers_show_only_where_they_fit() -> None:
    builder = TaskGraphBuilder()
    for name, length in (("0F7", 1.0), ("0F123", 3.0), ("0B123", 4.0), ("0F8", 0.0), ("0B9", 2.0)):
        builder.add_task(name, length, rank=0, stream=COMPUTE)
    row = gantt(simulate(builder.build()), width=10).split("\n")[0]
    assert row == "rank 0 |FFFFB123B9| 100.0%"


def test_rows_have_the_requested_width() -> None:
    schedule = generate("interleaved_1f1b", pp=3, microbatches=6, vpp=2)
    timeline = simulate(task_graph(schedule, Durations.of(stages=6, forward_s=0.37, backward_s=0.91)))
    for width in range(10, 140, 7):
        rows = gantt(timeline, width=width).split("\n")[:3]
        assert {len(row) for row in rows} == {len("rank 0 |") + width + len("|  00.0%")}


def test_an_empty_timeline_has_only_a_legend() -> None:
    assert gantt(simulate(TaskGraphBuilder().build())).startswith("· idle")


def test_a_column_shows_what_fills_its_middle() -> None:
    # A second per column; the middle of column 5 is 5.5, where b begins; that of column 8 is 8.5, past b's
    # end at 8.4.
    builder = TaskGraphBuilder()
    builder.add_task("0F1", 5.5, rank=0, stream=COMPUTE)
    builder.add_task("0B1", 2.9, rank=0, stream=COMPUTE)
    builder.add_task("wait", 10.0)
    assert gantt(simulate(builder.build()), width=10).startswith("rank 0 |F1FFFB1B··|")


def test_a_long_step_shows_its_beginning_and_its_end() -> None:
    """One rank: F 1 s and B 2 s for each of 20 micro-batches, 60 s. 12 columns of 3 per second are 4 s: F0,
    B0, F1 and B18 (from 56 s in, its end at 57), F19, B19.
    """
    builder = TaskGraphBuilder()
    for place in range(20):
        builder.add_task(f"0F{place}", 1.0, rank=0, stream=COMPUTE)
        builder.add_task(f"0B{place}", 2.0, rank=0, stream=COMPUTE)
    timeline = simulate(builder.build())
    lines = gantt(timeline, width=12, narrowest=3).split("\n")
    assert lines == [
        "beginning: 0 s to 4 s",
        "rank 0 |F0FB0BBBBF1F| 100.0%",
        "end: 56 s to 60 s",
        "rank 0 |BBBF19B19BBB| 100.0%",
        "F forward  B backward  · idle  digits: microbatch  %: computing  step 60 s",
        "",
    ]
    # Where all actions are wide enough, the whole step is shown: 60 s on 180 columns.
    assert len(gantt(timeline, width=180, narrowest=3).split("\n")) == 3
    assert "beginning" not in gantt(timeline, width=12)
