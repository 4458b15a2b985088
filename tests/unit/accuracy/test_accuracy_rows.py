"""Rows are read one by one: an error in one does not affect the others."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.unit.accuracy.tables import file_of, row_of, text_of

from shardwise.accuracy.rows import SHIPPED, parse_rows, read_rows, source_of
from shardwise.errors import ConfigError

DIGEST = "c1fceff1e2ab40b040839685bb317def7b606f90833d47e7e8978c99754e5948"
SHARED = Path(__file__).parents[4] / "shared" / "data" / "measurements.csv"


def test_the_shipped_rows_are_all_read() -> None:
    rows, faults = read_rows(str(SHIPPED))
    assert (len(rows), faults) == (885, [])
    assert sum(row.is_complete for row in rows) == 306
    assert all(row.source and row.id for row in rows)


def test_the_shipped_rows_are_unchanged() -> None:
    assert hashlib.sha256(SHIPPED.read_bytes()).hexdigest() == DIGEST


@pytest.mark.parametrize("shared", [path for path in (SHARED,) if path.exists()])
def test_the_shipped_rows_are_the_shared_ones(shared: Path) -> None:
    assert SHIPPED.read_bytes() == shared.read_bytes()


def test_a_row_has_the_values_of_its_cells() -> None:
    row = row_of(gpus="16", step_time_s="2.5", notes='a "quoted", long note')
    assert (row.line, row.id, row.gpus, row.step_time_s) == (2, "mine-001", 16, 2.5)
    assert row.notes == 'a "quoted", long note'
    assert row.kv_heads is None and row.optimizer == ""


def test_notes_are_read_in_full() -> None:
    """Every note is searched for the words."""
    assert row_of(notes="x" * 500 + " overlap off").notes.endswith("overlap off")


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("gpus", "many", "gpus is not a number"),
        ("gpus", "1.5", "gpus is not a whole number"),
        ("step_time_s", "-2.5", "step_time_s is not in range"),
        ("step_time_s", "0", "step_time_s is not in range"),
        ("step_time_s", "nan", "step_time_s is not a number"),
        ("global_batch", "1e300", "global_batch is not in range"),
        ("layers", "1e999", "layers is not a number"),
    ],
)
def test_a_wrong_number_skips_its_row_alone(column: str, cell: str, reason: str) -> None:
    rows, faults = parse_rows(text_of({}, {column: cell}, {}))
    assert [row.line for row in rows] == [2, 4]
    (fault,) = faults
    assert (fault.line, fault.id, fault.reason) == (3, "mine-002", reason)
    assert cell in fault.found and fault.text.startswith(f"line 3: {reason}")


def test_a_missing_column_is_blank_everywhere() -> None:
    rows, faults = parse_rows("id,gpus,somebody's own\nmine-1,8,x\n")
    assert (rows[0].gpus, rows[0].framework, faults) == (8, "", [])


def test_a_row_with_other_cells_than_the_header_is_a_fault() -> None:
    rows, faults = parse_rows("id,gpus\na-1,8\na-2\na-3,8,9\n\n,\na-4,8\n")
    assert [row.id for row in rows] == ["a-1", "a-4"]
    assert [fault.text for fault in faults] == [
        "line 3: has 1 cells; the header has 2",
        "line 4: has 3 cells; the header has 2",
    ]


def test_an_unclosed_quote_does_not_swallow_the_following_rows() -> None:
    rows, faults = parse_rows('id,notes,gpus\na-1,"open,8\na-2,fine,8\na-3,"also fine",8\n')
    assert [row.line for row in rows] == [3, 4]
    assert [fault.line for fault in faults] == [2]


def test_quotes_may_span_lines() -> None:
    rows, faults = parse_rows('id,notes,gpus\na-1,"two\nlines",8\na-2,one,16\n')
    assert [(row.line, row.gpus) for row in rows] == [(2, 8), (4, 16)]
    assert faults == []


def test_line_ends_and_a_mark_at_the_start_do_not_matter(tmp_path: Path) -> None:
    for ending in ("\r\n", "\r"):
        rows, _ = parse_rows(f"\ufeffid,gpus{ending}a-1,8{ending}")
        assert [(row.id, row.line) for row in rows] == [("a-1", 2)]
    path = tmp_path / "rows.csv"
    path.write_bytes(b"id,gpus,notes\na-1,8,3 \xd7 4\na-2,8,\xc3")
    assert [row.id for row in read_rows(str(path))[0]] == ["a-1", "a-2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no columns of measured rows"),
        ("a,b,c\n1,2,3\n", "has no columns of measured rows; found 'a, b, c'"),
        ("id,gpus\n", "has no row that can be read; found a header alone"),
        (
            "id,gpus\na-1,x\n",
            "has no row that can be read; found 1 rows, all with faults, such as line 2: gpus",
        ),
        ("id,gpus,gpus\na-1,8,8\n", "has a column twice; found gpus"),
    ],
)
def test_a_file_without_a_readable_row_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_rows(file_of(tmp_path, text))
    assert words in str(caught.value) and "rows.csv" in str(caught.value)


def test_completeness_is_stated_or_follows_from_the_cells() -> None:
    assert row_of(level="complete", dtype="").is_complete
    assert not row_of(level="near").is_complete
    assert row_of(level="").is_complete
    assert not row_of(level="", micro_batch="").is_complete


@pytest.mark.parametrize(
    ("name", "source"),
    [("vtrain-mn-012", "vtrain-mn"), ("foundry-1", "foundry"), ("run", "run"), ("a-b", "a-b")],
)
def test_a_source_is_the_id_without_its_number(name: str, source: str) -> None:
    assert source_of(name) == source
