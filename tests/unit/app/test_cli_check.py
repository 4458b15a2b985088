"""The command `check` on plans of the real planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

import shardwise_verify
from shardwise.plans import plan_document, read_plan
from shardwise.plans.documents import document_hash

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "check.json"
RECORDED = Path(__file__).parents[2] / "recorded" / "plans"
QUESTION = ("gpt2", "--cluster", "1x4xA100-80G", "--seq-len", "1024", "--global-batch-size", "12")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal so wide that no check needs two lines."""
    monkeypatch.setattr("shardwise.app.cli.checking.columns", lambda: 1000)
    monkeypatch.setattr("shardwise.app.cli.output.columns", lambda: 1000)


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    assert run("plan", "--target=any", *QUESTION, "--space", "core", "--save", str(path)).code == 0
    return path


def checks_of(text: str) -> list[str]:
    """The lines of an answer; a value that starts on the next line is on that of its check."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("  ") and lines:
            lines[-1] += f"  {line.strip()}"
        else:
            lines.append(line)
    return lines


def rewritten(path: Path, **best: Any) -> Path:
    """The plan with some keys of `best` changed, and with its new hash."""
    document = plan_document(read_plan(str(path)))
    document["best"] = {**document["best"], **best}  # type: ignore[dict-item]
    document["hash"] = document_hash(document)
    path.write_text(json.dumps(document))
    return path


def test_a_plan_is_correct_line_by_line(run: Run, saved: Path) -> None:
    ran = run("check", str(saved))
    assert (ran.code, ran.err) == (0, "")
    *ok_lines, given, idle, counts, effort = checks_of(ran.out)
    assert len(ok_lines) > 30
    assert all(line.startswith("ok ") for line in ok_lines)
    # What is found as expected is shown once; else both.
    assert any("; expected more than 0, and at most " in line for line in ok_lines)
    assert any(line.split()[1:] == ["gap", "0.0"] for line in ok_lines)
    assert all(line.startswith("note   not judged ") for line in (given, idle, counts, effort))
    assert given.endswith(" model.config, model.layers, job, cluster: the question itself")
    assert effort.endswith(" certificate.search_s, certificate.search_cpu_s: search effort")


def test_json_has_the_same(run: Run, saved: Path) -> None:
    ran = run("check", str(saved), "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    assert document["ok"] is True
    assert {check["ok"] for check in document["checks"]} == {True}
    assert document["plan_hash"] == plan_document(read_plan(str(saved)))["hash"]
    names = [check["name"] for check in document["checks"]]
    assert len(set(names)) == len(names)
    assert {"key": "certificate.search_s", "why": "search effort"} in document["not_judged"]
    assert (document["not_re_derived"], document["computed_again"]) == ([], [])


def test_a_plan_that_claims_too_much_exits_4(run: Run, saved: Path) -> None:
    mfu = read_plan(str(saved)).best.mfu or 0.0
    ran = run("check", str(rewritten(saved, mfu=1.1 * mfu)))
    assert ran.code == 4
    wrong = [line for line in checks_of(ran.out) if line.startswith("wrong")]
    assert len(wrong) == 1 and repr(1.1 * mfu) in wrong[0]
    assert float(wrong[0].rsplit("expected ", 1)[1]) == pytest.approx(mfu, rel=1e-12)
    assert ran.err.startswith("shardwise: 1 of ") and ran.err.endswith("checks fail: mfu\n")
    document = json.loads(run("check", str(saved), "--json").out)
    assert document["ok"] is False


def test_an_invalid_plan_file_exits_2(run: Run, saved: Path, tmp_path: Path) -> None:
    saved.write_text(saved.read_text().replace("optim_shard: 4", "optim_shard: 2", 1))
    for path, words in ((saved, "the file was changed"), (tmp_path / "none.yaml", "none.yaml")):
        ran = run("check", str(path))
        assert (ran.code, ran.out) == (2, "")
        assert words in ran.err


def test_a_value_out_of_its_range_is_bad_input_in_one_line(run: Run, saved: Path) -> None:
    document = plan_document(read_plan(str(saved)))
    document["cluster"]["tiers"][0]["bytes_per_s"] = 0  # type: ignore[index]
    document["hash"] = document_hash(document)
    saved.write_text(json.dumps(document))
    ran = run("check", str(saved))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert (
        "cluster.tiers[0].bytes_per_s: is not a number in range; found 0; allowed: a number from 1e-30"
        in ran.err
    )


def test_a_proof_without_time_is_open_and_no_failure(run: Run, saved: Path) -> None:
    ran = run("check", str(saved), "--proof-budget", "1ms")
    assert ran.code == 0
    (line,) = [line for line in checks_of(ran.out) if not line.startswith(("ok ", "note "))]
    assert line.startswith("open ") and line.endswith("not proven within 0.001 s")
    assert ran.err == "shardwise: not proven: optimal\n"


def test_what_the_planner_computes_again_stands_apart(run: Run, tmp_path: Path) -> None:
    saved = tmp_path / "uneven.yaml"
    cluster = "1x2xA100-40G+1x2xV100-16G"
    command = (
        "plan",
        "--target=any",
        "opt-350m",
        "--cluster",
        cluster,
        "--seq-len",
        "2048",
        "--global-batch-size",
        "64",
    )
    assert run(*command, "--save", str(saved)).code == 0
    ran = run("check", str(saved))
    assert (ran.code, ran.err) == (0, "shardwise: not proven: optimal\n")
    independent, again = ran.out.split("\ncomputed again by the planner (no independent check)\n")
    assert "not re-derived" in independent and "best.breakdown" in independent
    assert "predicted" not in independent
    assert all(line.startswith("ok ") for line in checks_of(again))
    document = json.loads(run("check", str(saved), "--json").out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    names = {one["name"] for one in document["computed_again"]}
    assert {"predicted breakdown", "predicted band low"} <= names
    band = read_plan(str(saved)).best.band_s
    wrong = run("check", str(rewritten(saved, band_s=[0.9 * band[0], band[1]])))
    assert wrong.code == 4 and wrong.err.endswith("checks fail: predicted band low\n")


def test_of_a_plan_that_no_search_chose_optimality_is_not_claimed(run: Run, tmp_path: Path) -> None:
    """Its first stage has five of twelve layers, more than in any candidate of the default space."""
    saved = tmp_path / "evaluated.yaml"
    options = ("--strategy", "pp=4,first_stage_layers=5", "--save", str(saved))
    assert run("evaluate", *QUESTION, *options).code == 0
    ran = run("check", str(saved))
    assert (ran.code, ran.err) == (0, "")
    assert any("optimality " in line and " not claimed; expected " in line for line in checks_of(ran.out))
    document = plan_document(read_plan(str(saved)))
    strategy = document["best"]["strategy"]  # type: ignore[index]
    illegal = run("check", str(rewritten(saved, strategy={**strategy, "recompute_layers": 1})))
    assert illegal.code == 4 and "illegal: recompute; expected a legal strategy" in illegal.out


@pytest.mark.parametrize("name", ["uniform.yaml", "uneven.yaml", "graph.yaml"])
def test_a_file_of_version_1_is_converted_and_keeps_its_hash(run: Run, name: str) -> None:
    path = RECORDED / name
    document = json.loads(run("check", str(path), "--json").out)
    stated = str(shardwise_verify.read_document(str(path))["hash"])
    assert (document["ok"], document["plan_hash"]) == (True, stated)
    assert document["checks"][0]["name"] == "hash of version 1"
