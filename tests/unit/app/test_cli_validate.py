"""The command `validate`: bad rows are reported and the rest is used; exit 2 where nothing can be read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from tests.unit.accuracy.tables import PLAIN, file_of, text_of

from shardwise.app.cli.output import USUAL as WIDTH

if TYPE_CHECKING:
    from tests.unit.app.conftest import Ran, Run

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "validation.json"

MIXED = ({"peak_mem_gib": "10"}, {"gpu": "Quantum9"}, {"tp": "3"}, {"layers": "many"}, {"step_time_s": "-1"},
         {"gpu": "Quantum9"}, {"recompute": ""})  # fmt: skip
"""Two rows that can be used and five that cannot, for four reasons."""


def answered(ran: Ran) -> Any:
    """The JSON answer, validated against its published schema."""
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


@pytest.mark.slow
def test_without_a_file_the_published_rows_are_used(run: Run) -> None:
    ran = run("validate")
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert lines[0] == " the published rows"
    assert lines[1] == " 885 rows used, 0 skipped"
    names = [line.split()[0] for line in lines[4:18]]
    assert names[:3] == ["korthi", "foundry", "vtrain-mn"] and names[-1] == "overall"
    assert max(map(len, lines)) <= WIDTH
    assert " left out" in ran.out and " measured steps of" in ran.out


@pytest.mark.slow
def test_the_answer_as_json(run: Run) -> None:
    document = answered(run("validate", "--json"))
    overall = document["overall"]
    assert (overall["n"], overall["skipped"]) == (885, 0)
    assert sum(group["n"] for group in document["groups"]) == 885
    assert len(document["rows"]) == 885
    assert [row["line"] for row in document["rows"]] == list(range(2, 887))
    used = [row for row in document["rows"] if row["skipped"] is None]
    assert len(used) == 885
    errors = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in used]
    assert overall["mape"] == pytest.approx(sum(errors) / len(errors))
    assert overall["worst"] == pytest.approx(max(errors))
    inside = [row["band_s"][0] <= row["measured_s"] <= row["band_s"][1] for row in used]
    assert overall["band_coverage"] == pytest.approx(sum(inside) / len(inside))
    memory = [row["predicted_gib"] / row["measured_gib"] - 1 for row in used if row["measured_gib"]]
    assert overall["memory_n"] == len(memory) == 61
    assert overall["memory_mape"] == pytest.approx(sum(map(abs, memory)) / len(memory))
    workloads = document["workloads"]
    assert overall["kendall_tau"] == pytest.approx(
        sum(workload["kendall_tau"] for workload in workloads) / len(workloads)
    )
    assert overall["regret"] == max(workload["regret"] for workload in workloads)
    left_out = document["left_out"]
    sources = [group for group in left_out["groups"] if group["kind"] == "source"]
    # Every published source but the one on unequal devices, to which nothing is fitted.
    assert {group["name"] for group in sources} == {g["name"] for g in document["groups"]} - {"amp-het"}
    assert all(point["after"] < point["before"] for point in left_out["curve"])


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(run: Run) -> None:
    assert (
        run("validate", "--level", "complete", "--json").out
        == run("validate", "--level", "complete", "--json").out
    )


@pytest.mark.parametrize("by", ["source", "software", "gpu", "family", "row"])
def test_every_grouping_and_level_has_its_schema(run: Run, tmp_path: Path, by: str) -> None:
    path = file_of(tmp_path, text_of(*MIXED))
    for level in ("complete", "near", "all"):
        document = answered(run("validate", path, "--by", by, "--level", level, "--json"))
        assert (document["by"], document["level"], document["rows_of"]) == (by, level, path)


def test_bad_rows_are_reported_and_the_others_are_used(run: Run, tmp_path: Path) -> None:
    path = file_of(tmp_path, text_of(*MIXED))
    document = answered(run("validate", path, "--json"))
    assert (document["overall"]["n"], document["overall"]["skipped"]) == (2, 5)
    skipped = [row["skipped"] for row in document["rows"]]
    assert skipped[0] is None and skipped[6] is None
    assert skipped[1] == "line 3: gpu: is not a known device; found 'Quantum9'"
    assert (
        skipped[2]
        == "line 4: gpus: tp * pp * cp * dp is not the number of devices; found 3 * 2 * 1 * 4; allowed: 16"
    )
    assert skipped[3] == "line 5: layers is not a number; found 'many'"
    assert skipped[4] == "line 6: step_time_s is not in range; found '-1'; allowed: more than 0, at most 1e15"
    assert document["skipped"][0] == {
        "n": 2, "reason": "gpu: is not a known device", "found": "'Quantum9'", "lines": [3, 7],
    }  # fmt: skip
    assert document["rows"][6]["assumed"] == [
        "sequence_parallel: off, the default", "recompute: the fastest that fits",
    ]  # fmt: skip
    text = run("validate", path).out
    assert " 2 rows used, 5 skipped" in text
    assert " skipped 2     gpu: is not a known device; found 'Quantum9'" in text and "lines 3, 7" in text


def test_one_line_per_row(run: Run, tmp_path: Path) -> None:
    path = file_of(tmp_path, text_of(*MIXED))
    ran = run("validate", path, "--by", "row")
    lines = ran.out.splitlines()
    rows = [line for line in lines if line.startswith(" mine-00")]
    assert [line.split()[0] for line in rows] == [f"mine-00{number}" for number in range(1, 8)]
    assert "2.500 s" in rows[0] and "10.0" in rows[0] and "16 A100-80G" in rows[0]
    assert rows[1] == " mine-002  skipped: line 3: gpu: is not a known device; found 'Quantum9'"
    assert any(line.startswith(" overall") for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_rows_without_a_time_or_memory_have_no_error(run: Run, tmp_path: Path) -> None:
    path = file_of(tmp_path, text_of({"step_time_s": "", "peak_mem_gib": "10"}))
    (row,) = answered(run("validate", path, "--json"))["rows"]
    assert (row["measured_s"], row["error"], row["measured_gib"]) == (None, None, 10.0)
    assert row["memory_error"] is not None and row["predicted_s"] > 0
    assert run("validate", path, "--by", "row").code == 0
    assert run("validate", path).code == 0


def test_a_file_of_unknown_devices_is_answered(run: Run, tmp_path: Path) -> None:
    path = file_of(tmp_path, text_of({"gpu": "Quantum9"}))
    document = answered(run("validate", path, "--json"))
    assert document["overall"]["mape"] is None and document["overall"]["n"] == 0
    assert run("validate", path).code == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--by", "colour"), ("--by", "source, software, gpu, family, row")),
        (("--by", "sorce"), ("did you mean source?",)),
        (("--level", "most"), ("--level", "complete, near, all")),
        (("missing.csv",), ("missing.csv", "cannot be read")),
        ((".",), ("a directory",)),
        (("/dev/null",), ("/dev/null", "cannot be read")),
    ],
)
def test_arguments_that_cannot_be_used(run: Run, argv: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(run("validate", *argv), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has no columns of measured rows"),
        (b"\x00\x01\x02", "has no columns of measured rows"),
        (b"a,b,c\n1,2,3\n", "has no columns of measured rows"),
        (b"id,gpus,gpu\n", "has no row that can be read; found a header alone"),
        (b"id,gpus,gpus\na,1,1\n", "has a column twice; found gpus"),
        (b'id,gpus,gpu\na,"8,H100\n', "has no row that can be read"),
    ],
)
def test_files_without_a_readable_row_are_refused(
    run: Run, tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    refused(run("validate", str(path)), "rows.csv", words)
    error = json.loads(run("validate", str(path), "--json").out)["error"]
    assert error["kind"] == "config" and error["file"] == str(path)


def refused(ran: Ran, *words: str) -> None:
    """Assert exit 2 and one line that contains all the words."""
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("shardwise: error: ") and ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err


CELLS = (
    "", "0", "-1", "1e300", "nan", "inf", "1e15", "999999999999", "abc", "3.5", "10000000", "1", "2", "7",
    "1024", '"', "H100", "\x00", "\u2028", "none", "FSDP", "3 (FSDP 0)", "8/8", "99999/1", "zb_v",
    "dualpipe_v", "fp8", "moe", "LLAMA3.1_405B", "H100-SXM 1W", "A100 999GB", "99999 Gb/s inter",
    "0 Gb/s inter", "hardware", "\uff15", "x" * 9999,
)  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_nothing_in_a_file_is_a_bug(run: Run, tmp_path: Path, seed: int) -> None:
    """Rows with cells of other rows' kinds, truncated and damaged text, bytes: an answer, or one line and
    exit 2.
    """
    rng = random.Random(seed)
    changes = [{rng.choice(tuple(PLAIN)): rng.choice(CELLS) for _ in range(3)} for _ in range(12)]
    text = text_of(*changes)
    at = rng.randrange(len(text))
    contents = (
        text.encode(),
        (text[:at] + rng.choice(('"', ",", "\n", "\r", "\x00", "\u2028")) + text[at:]).encode(),
        text.encode()[:at],
        bytes(rng.randrange(256) for _ in range(500)),
        text.splitlines()[0].encode() + b"\n" + bytes(rng.randrange(256) for _ in range(500)),
    )
    path = tmp_path / "rows.csv"
    for content in contents:
        path.write_bytes(content)
        ran = run("validate", str(path), "--by", rng.choice(("source", "gpu", "family", "row")))
        assert ran.code in (0, 2), ran.err
        assert "Traceback" not in ran.err and ran.err.count("\n") == (ran.code == 2)
        if ran.code == 0:
            answered(run("validate", str(path), "--json"))
