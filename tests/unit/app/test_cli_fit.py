"""The command `fit`: its file and its answer; exit 2, one line and no file where nothing can be fitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from benchmarks.ship_fit import DEVICES, SOFTWARE, merged
from tests.unit.accuracy.tables import file_of, text_of

from shardwise.accuracy.cross_validation import LEAST_RUNS
from shardwise.accuracy.fit import Numbers
from shardwise.app.cli.output import columns
from shardwise.errors import ConfigError
from shardwise.numbers import numbers_of
from shardwise.strategy import read_calibration

if TYPE_CHECKING:
    from tests.unit.app.conftest import Ran, Run

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "fit.json"

OF_V100 = {"gpu": "V100-SXM2-32GB"}
"""A device whose matmul rate is fitted."""

RUNS = [
    {"id": f"mine-{number:03}", **OF_V100, "step_time_s": f"{3.0 + 0.01 * number}"}
    for number in range(LEAST_RUNS - 8)
] + [
    {"id": f"yours-{number:03}", **OF_V100, "gpus": "32", "dp": "8", "step_time_s": f"{1.6 + 0.01 * number}"}
    for number in range(8)
]  # fmt: skip
"""Just enough runs from two sources."""

UNUSED = ({"gpu": "Quantum9"}, {"layers": "many"}, {"step_time_s": "", "peak_mem_gib": "10"})


def validated(document: Any) -> Any:
    """A document, validated against its published schema."""
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def refused(ran: Ran, *words: str) -> None:
    assert (ran.code, ran.out) == (2, ""), ran
    assert ran.err.startswith("shardwise: error: ") and ran.err.count("\n") == 1
    for word in words:
        assert word in ran.err, ran.err


def test_the_file_and_the_answer(run: Run, tmp_path: Path) -> None:
    rows, out = file_of(tmp_path, text_of(*RUNS, *UNUSED)), tmp_path / "fit.json"
    out.write_text("something older, and longer than nothing")
    ran = run("fit", rows, "--out", str(out), "--json")
    assert ran.code == 0
    document = validated(json.loads(out.read_text("utf-8")))
    assert json.loads(ran.out) == document
    fitted = len(Numbers.shipped().fitted())
    assert ran.err == f"wrote {out}: {fitted} numbers from {LEAST_RUNS} runs, 3 rows skipped\n"
    # No other file remains: the temporary file was renamed.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit.json", "rows.csv"]
    assert (document["runs"], document["fitted_numbers"]) == (LEAST_RUNS, fitted)
    assert document["sources"]["mine"]["runs"] == LEAST_RUNS - 8 and document["sources"]["yours"]["runs"] == 8
    # Twelve runs of 3.00 to 3.11 s with the same prediction: no error needs to be larger than that.
    assert document["sources"]["mine"]["mape"] < 0.04
    # Only values differ from the shipped numbers, and only fitted ones.
    numbers = numbers_of((*document["devices"], *document["software"]))
    for before, after in zip(Numbers.shipped().all, numbers, strict=True):
        assert (before.name, before.source) == (after.name, after.source)
        assert before.is_fitted or before.value == after.value
    assert numbers != Numbers.shipped().all
    check_merged(document)


def check_merged(document: Any) -> None:
    """The package's data files accept the fitted numbers and keep the assumed ones."""
    for file, package in ((DEVICES, "devices"), (SOFTWARE, "software")):
        own = json.loads(file.read_text("utf-8"))["numbers"]
        assert merged(own, document[package]) == document[package]
        # A number whose assumption changed after the fit keeps its new value.
        changed = [
            number if number["source"] == "fitted" else {**number, "value": 0.125, "source": "assumed: anew"}
            for number in own
        ]
        found = merged(changed, document[package])
        for number, new, fit in zip(found, changed, document[package], strict=True):
            assert number == (fit if new["source"] == "fitted" else new)
        assert any(number["value"] == 0.125 for number in found)
    with pytest.raises(KeyError):
        merged([{"of": ["new"], "field": "launch_s", "value": 1.0, "source": "fitted"}], document["devices"])


def test_the_answer_for_people(run: Run, tmp_path: Path) -> None:
    rows, out = file_of(tmp_path, text_of(*RUNS)), tmp_path / "fit.json"
    ran = run("fit", rows, "--out", str(out))
    lines = ran.out.splitlines()
    assert ran.code == 0 and ran.err.endswith("0 rows skipped\n")
    assert lines[0].split() == ["source", "runs", "mean", "error", "bias"]
    assert [line.split()[:2] for line in lines[1:3]] == [["mine", "12"], ["yours", "8"]]
    bands = json.loads(out.read_text("utf-8"))["bands"]
    assert lines[3:] == [
        f" band, {name}: {low:g} to {high:g} of the predicted time" for name, (low, high) in bands.items()
    ]
    assert max(map(len, lines)) <= columns()


def test_fewer_rows_give_a_calibration(run: Run, tmp_path: Path) -> None:
    """Nineteen rows of one software on one kind of device, as `calibrate --from` takes them."""
    rows, out, other = file_of(tmp_path, text_of(*RUNS[:-1])), tmp_path / "a.yaml", tmp_path / "b.yaml"
    ran = run("fit", rows, "--out", str(out))
    assert ran.code == 0 and ran.out.startswith(" calibrated "), ran.err
    assert run("calibrate", "--from", rows, "--out", str(other)).code == 0
    assert out.read_text() == other.read_text()
    found = read_calibration(str(out))
    assert list(found.devices) == ["V100-32G"] and found.profile is not None
    document = json.loads(run("fit", rows, "--out", str(out), "--json").out)
    assert document["schema"] == "shardwise.calibration" and document["measured"]["steps"]["times"] == 19


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{**row, "gpu": "Quantum9"} for row in RUNS], ("rows.csv: has too few runs to fit", "found 0")),
        ([{**row, "step_time_s": ""} for row in RUNS], ("has too few runs to fit", "found 0")),
        (
            [{**row, "step_time_s": "-1"} for row in RUNS],
            ("rows.csv: has no row that can be read", "step_time_s"),
        ),
        ([], ("has no row that can be read", "a header alone")),
    ],
)
def test_too_few_rows_are_refused(
    run: Run, tmp_path: Path, changes: list[dict[str, str]], words: tuple[str, ...]
) -> None:
    rows, out = file_of(tmp_path, text_of(*changes)), tmp_path / "fit.json"
    refused(run("fit", rows, "--out", str(out)), *words)
    assert not out.exists()
    out.write_text("older")
    ran = run("fit", rows, "--out", str(out), "--json")
    assert ran.code == 2 and json.loads(ran.out)["error"]["kind"] == "config"
    assert out.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit.json", "rows.csv"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("missing.csv", "--out", "fit.json"), ("missing.csv", "cannot be read")),
        ((".", "--out", "fit.json"), ("a directory",)),
        (("rows.csv", "--out", "missing/fit.json"), ("--out", "missing/fit.json", "folder does not exist")),
        (("rows.csv", "--out", "."), ("--out", "a directory")),
        (("rows.csv", "--out", ""), ("--out", "found ''")),
        (("rows.csv", "--out", "/dev/null"), ("/dev/null", "not a regular file")),
        (("rows.csv", "--out", "rows.csv"), ("--out", "is an input file, which would be overwritten")),
        (("rows.csv",), ("--out",)),
        (("--out", "fit.json"), ("ROWS",)),
    ],
)
def test_arguments_that_cannot_be_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    """Reported before the fit, which takes a minute on many rows."""

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("rows were fitted")

    monkeypatch.setattr("shardwise.app.cli.measured_runs.fit_rows", unexpected)
    monkeypatch.chdir(tmp_path)
    text = text_of(*RUNS)
    file_of(tmp_path, text)
    refused(run("fit", *argv), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    assert (tmp_path / "rows.csv").read_text() == text


def test_a_file_that_cannot_be_written_after_all(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the fit ends: the older file stays."""

    def full(*_: object) -> None:
        raise ConfigError("cannot be written: no space left on device", file="fit.json")

    monkeypatch.setattr("shardwise.plans.atomic_write._write_and_rename", full)
    monkeypatch.setattr("shardwise.app.cli.measured_runs.fit_rows", lambda *_, **__: None)
    monkeypatch.setattr("shardwise.app.cli.measured_runs.fit_document", lambda _: {"schema": "shardwise.fit"})
    rows, out = file_of(tmp_path, text_of(*RUNS)), tmp_path / "fit.json"
    out.write_text("older")
    refused(run("fit", rows, "--out", str(out)), "no space left")
    assert out.read_text() == "older"


@pytest.mark.slow
def test_a_fit_within_its_budget(run: Run, tmp_path: Path) -> None:
    """No time for a step: the numbers are the initial ones, and a line says that the fit ended early."""
    rows, out = file_of(tmp_path, text_of(*RUNS)), tmp_path / "fit.json"
    ran = run("fit", rows, "--out", str(out), "--budget", "1ms")
    assert ran.code == 0
    assert ran.err.splitlines()[1:] == [
        "shardwise: the fit ended at --budget; with more time its errors may be smaller"
    ]
    validated(json.loads(out.read_text("utf-8")))
