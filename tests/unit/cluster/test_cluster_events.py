"""Event traces: legal orders of events, the file format, and the cluster of a trace."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster import (
    EVENT_KINDS,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    Notice,
    Slowdown,
    check_events,
    convert_events,
    event_file,
    events_text,
    generate_events,
    load_cluster,
    load_events,
)
from shardwise.cluster.event_file import parse_events
from shardwise.cluster.events import first_invalid_event
from shardwise.errors import ConfigError

HEAD = '{"schema": "shardwise.events", "version": 1, "nodes": 3}\n'
LOST = '{"time_s": 10, "kind": "lost", "node": "n1"}\n'
REGIONS = "region_a,region_b,delay_ms,bandwidth_gbit_per_s\n"
REAL = Path(__file__).parents[4] / "shared" / "data" / "traces"
"""Recorded traces, if they are next to the repository; otherwise they are not tested."""


def test_a_file_is_read_back_as_it_was_written() -> None:
    trace = EventTrace(
        nodes=4,
        absent=frozenset({"n3"}),
        sites={"Oregon": ("n0", "n1"), "Ohio": ("n2", "n3")},
        source="by hand",
        events=(
            LinkChange(time_s=0.0, link="n0>s1g0", bytes_per_s=1e9),
            LinkChange(time_s=1.5, sites=("Oregon", "Ohio"), latency_s=0.05),
            Slowdown(time_s=2.0, where="d5", speed=0.5),
            Notice(time_s=3.0, node="n0", lost_at_s=123.0),
            NodeLost(time_s=4.0, node="n0"),
            NodeJoined(time_s=4.0, node="n3"),
        ),
    )
    assert parse_events(events_text(trace)) == (trace, None)
    n = [f"n{i}" for i in range(4)]
    assert list(trace.present()) == [(0.0, frozenset(n[:3])), (4.0, frozenset(n[1:]))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", EVENT_KINDS)
def test_generated_traces_are_complete_deterministic_and_fit_their_cluster(kind: str) -> None:
    cluster = load_cluster("3x4xA100-80G+2x2xT4")
    for seed in range(20):
        trace = generate_events(cluster, kind, length_s=2 * 86400.0, seed=seed)
        assert first_invalid_event(trace) is None
        check_events(trace, cluster)
        assert trace == generate_events(cluster, kind, length_s=2 * 86400.0, seed=seed)
        assert trace.end_s <= 2 * 86400.0
        assert parse_events(events_text(trace))[0] == trace
    one, other = (generate_events(cluster, kind, length_s=2e5, seed=seed) for seed in (1, 2))
    assert one.events and one.events != other.events


def test_shuffled_events_and_broken_rules_are_invalid() -> None:
    cluster = load_cluster("6x2xT4")
    rng = random.Random(3)
    for seed in range(30):
        trace = generate_events(cluster, "preemption", length_s=3e5, seed=seed)
        events = list(trace.events)
        rng.shuffle(events)
        if [e.time_s for e in events] != sorted(e.time_s for e in events):
            assert first_invalid_event(replace(trace, events=tuple(events))) is not None
        # Without its loss, a later join of the node is invalid; without a later join the trace stays valid.
        lost = [place for place, event in enumerate(trace.events) if isinstance(event, NodeLost)]
        for place in lost:
            remaining_events = trace.events[:place] + trace.events[place + 1 :]
            node = trace.events[place].node  # type: ignore[union-attr]
            joins_later = any(isinstance(e, NodeJoined) and e.node == node for e in trace.events[place:])
            assert (first_invalid_event(replace(trace, events=remaining_events)) is not None) == joins_later


@pytest.mark.parametrize(
    ("text", "key", "message"),
    [
        ("", None, "is empty"),
        ("[1]\n", "line 1", "is not a JSON object"),
        ('{"schema": "x", "version": 1, "nodes": 1}\n', "line 1.schema", "not a trace of this version"),
        ('{"schema": "shardwise.events", "version": 2, "nodes": 1}\n', "line 1.schema", "of this version"),
        (HEAD + '{"time_s": 1, "kind": "lost", "node": "n1"', None, ""),  # torn at the end: dropped
        (HEAD + '{"time_s": 1, "kin\n' + LOST, "line 2", "is not a JSON object"),
        (HEAD + LOST + '{"time_s": 9, "kind": "joined", "node": "n1"}\n', "line 3", "is earlier"),
        (HEAD + LOST + LOST, "line 3", "is already lost"),
        (HEAD + '{"time_s": 1, "kind": "joined", "node": "n0"}\n', "line 2", "is already present"),
        (HEAD + '{"time_s": 1, "kind": "lost", "node": "n7"}\n', "line 2", "not one of n0 to n2"),
        (HEAD + '{"time_s": 1, "kind": "lost", "node": "n01"}\n', "line 2", "not one of n0 to n2"),
        (HEAD + '{"time_s": -1, "kind": "lost", "node": "n1"}\n', "line 2.time_s", "not a number in range"),
        (HEAD + '{"time_s": NaN, "kind": "lost", "node": "n1"}\n', "line 2", "not finite"),
        (HEAD + '{"time_s": 1, "kind": "gone", "node": "n1"}\n', "line 2.kind", ""),
        (HEAD + '{"time_s": 1, "kind": "lost", "node": "n1", "why": 1}\n', "line 2.why", ""),
        (HEAD + '{"time_s": 1, "kind": "link", "link": "a", "bytes_per_s": -1}\n', "line 2.bytes_per_s", ""),
        (HEAD + '{"time_s": 1, "kind": "link", "link": "a"}\n', "line 2.bytes_per_s", "is missing"),
        (HEAD + '{"time_s": 1, "kind": "sites", "sites": ["a", "b"], "latency_s": 1}\n', "line 2", "sites"),
        (HEAD + '{"time_s": 9, "kind": "notice", "node": "n1", "lost_at_s": 3}\n', "line 2", "past"),
        (HEAD + '{"time_s": 9, "kind": "slow", "where": "d0", "speed": -0.5}\n', "line 2.speed", ""),
        (HEAD[:-2] + ', "absent": ["n9"]}\n', "line 1.absent", "an unknown node"),
        (HEAD[:-2] + ', "nodes": 4}\n', "line 1", "twice"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(text: str, key: str | None, message: str) -> None:
    if text == HEAD + '{"time_s": 1, "kind": "lost", "node": "n1"':
        trace, notes = parse_events(text, file="t.jsonl")
        assert trace.events == () and notes is not None and "line 2 is incomplete" in notes
        return
    with pytest.raises(ConfigError) as caught:
        parse_events(text, file="t.jsonl")
    assert caught.value.file == "t.jsonl"
    assert caught.value.key == key and message in caught.value.message


def test_a_complete_last_line_without_a_newline_is_read() -> None:
    trace, notes = parse_events(HEAD + LOST.rstrip("\n"))
    assert trace.events == (NodeLost(time_s=10.0, node="n1"),) and notes is None


def test_a_trace_of_another_cluster_is_refused() -> None:
    cluster = load_cluster("2x2xT4")
    good = EventTrace(nodes=2, events=(LinkChange(time_s=0.0, link="n0>s1g0", bytes_per_s=1.0),))
    check_events(good, cluster)
    for bad, key in (
        (replace(good, nodes=3), "nodes"),
        (replace(good, events=(LinkChange(time_s=0.0, link="n9>s1g0", bytes_per_s=1.0),)), "link"),
        (replace(good, events=(Slowdown(time_s=0.0, where="d4", speed=0.5),)), "where"),
        (replace(good, events=(Slowdown(time_s=0.0, where="n2", speed=0.5),)), "where"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_events(bad, cluster)
        assert caught.value.key == key


def test_added_and_removed_nodes_become_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text(
        "1000,add,b\n1000,add,a\n3000,remove,b\n2000,add,c\n4000,add,c\n5000,remove,x\n6000,add,b\n"
    )
    trace, notes = convert_events(str(path), per_node=1)
    # b, a and c are n0, n1, n2 by time of arrival; x is n3, which is removed without having been there.
    assert trace.nodes == 4 and trace.absent == {"n0", "n1", "n2", "n3"}
    assert [(event.time_s, type(event).__name__, event.node) for event in trace.events] == [  # type: ignore[union-attr]
        (0.0, "NodeJoined", "n0"), (0.0, "NodeJoined", "n1"), (1.0, "NodeJoined", "n2"),
        (2.0, "NodeLost", "n0"), (5.0, "NodeJoined", "n0"),
    ]  # fmt: skip
    assert notes == [
        "1 lines are earlier than the one before them: sorted by time",
        "2 lines add a present node or remove an absent one: skipped",
    ]
    assert first_invalid_event(trace) is None


def test_counts_become_nodes_of_which_the_first_are_there(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_text("2021-12-10, 13:00:00, 8\n2021-12-10, 13:01:00, 17\n2021-12-10, 13:03:00, 3\n")
    trace, notes = convert_events(str(path), per_node=4)
    assert trace.nodes == 4 and trace.absent == frozenset({"n2", "n3"}) and not notes
    assert [(start, len(there)) for start, there in trace.present()] == [(0.0, 2), (60.0, 4), (180.0, 0)]


def test_pairs_of_regions_become_sites_with_their_links(tmp_path: Path) -> None:
    path = tmp_path / "regions.csv"
    path.write_text(f"{REGIONS}Oregon,Ohio,49,1.10\nOregon,Tokyo,96,0.5\n")
    trace, notes = convert_events(str(path), per_node=1)
    assert dict(trace.sites) == {"Oregon": ("n0",), "Ohio": ("n1",), "Tokyo": ("n2",)} and not notes
    # 1.1 Gbit/s are 137.5 MB/s, 0.5 are 62.5.
    assert trace.events == (
        LinkChange(time_s=0.0, sites=("Oregon", "Ohio"), bytes_per_s=137.5e6, latency_s=0.049),
        LinkChange(time_s=0.0, sites=("Oregon", "Tokyo"), bytes_per_s=62.5e6, latency_s=0.096),
    )
    assert first_invalid_event(trace) is None and parse_events(events_text(trace))[0] == trace


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n",
        "PAIRS",
        "PAIRSa,b,1\n",
        "PAIRSa,b,x,1\n",
        "PAIRSa,a,1,1\n",
        "PAIRSa,b,1,0\n",
        "PAIRSa,b,1,1\nb,a,1,1\n",
        "1,add\n2,add,x\n",
        "1,add,a\nx,add,b\n",
        "2021-13-40, 1, 3\n",
        "i,Timestamp,z\n0,x,3\n",
    ],
)
def test_other_csv_files_are_refused_by_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text.replace("PAIRS", REGIONS))
    with pytest.raises(ConfigError):
        convert_events(str(path), per_node=1)


@pytest.mark.parametrize(
    "path", [*sorted(REAL.glob("*.csv")), *REAL.parent.glob("wan-*.csv")], ids=lambda path: path.stem
)
def test_the_real_traces_convert_to_valid_events(path: Path) -> None:
    trace, _ = convert_events(str(path), per_node=1)
    assert first_invalid_event(trace) is None and trace.events
    assert parse_events(events_text(trace))[0] == trace


def test_a_quote_without_an_end_is_named(tmp_path: Path) -> None:
    """Without its end, a cell would contain all that follows, which is longer than any cell may be."""
    path = tmp_path / "q.csv"
    path.write_text('0,add,"a\n' + "1,add,b\n" * 30_000)
    with pytest.raises(ConfigError, match="is not a CSV file") as caught:
        convert_events(str(path), per_node=1)
    assert str(caught.value.key).startswith("line ")


def test_events_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(HEAD + LOST)
    assert load_events(str(path))[0].events == (NodeLost(time_s=10.0, node="n1"),)


def read(line: str) -> object:
    """The event of a line, or the error of the file."""
    try:
        return parse_events(HEAD + line + "\n")[0].events
    except ConfigError as error:
        return str(error)


def test_plain_lines_are_read_as_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as `events_text` writes them take a tenth of the time: the same events, and the same errors."""
    rng = random.Random(4)
    numbers = [
        "0",
        "7",
        "12.5",
        "1e2",
        "1.5E-3",
        "1e10",
        "1e11",
        "1e99",
        "1e400",
        "-1",
        "01",
        "nan",
        "9" * 41,
    ]
    names = ["n1", "n01", "n9", "d3", "n0>s1g0", "", "a b", "n1\\n", "\\u006e1", "n" * 101]
    forms = (
        '{"time_s": T, "kind": "lost", "node": "N"}',
        '{"time_s": T, "kind": "joined", "node": "N"}',
        '{"time_s": T, "kind": "notice", "node": "N", "lost_at_s": V}',
        '{"time_s": T, "kind": "slow", "where": "N", "speed": V}',
        '{"time_s": T, "kind": "link", "link": "N", "bytes_per_s": V}',
        '{"time_s": T, "kind": "link", "link": "N", "latency_s": V}',
        '{"kind": "lost", "time_s": T, "node": "N"}',
        '{"time_s": T, "kind": "lost", "node": "N", "node": "n2"}',
        '{"time_s": T, "kind": "lots", "node": "N"}',
    )
    lines = [
        form.replace("T", rng.choice(numbers))
        .replace("N", rng.choice(names))
        .replace("V", rng.choice(numbers))
        for form in forms
        for _ in range(60)
    ]
    plain = [event_file._plain_event(line) is not None for line in lines]
    assert 40 < sum(plain) < 100
    found = [read(line) for line in lines]
    monkeypatch.setattr(event_file, "_plain_event", lambda line: None)
    assert [read(line) for line in lines] == found
