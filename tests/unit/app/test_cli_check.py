"""The command `check` on plans of the real planner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from shardwise.plans import document_hash, plan_document, read_plan

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "check.json"
QUESTION = ("gpt2", "--cluster", "1x4xA100-80G", "--seq-len", "1024", "--global-batch-size", "12")


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "plan.yaml"
    assert run("plan", *QUESTION, "--space", "core", "--save", str(path)).code == 0
    return path


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
    *ok_lines, given, counts, effort = ran.out.splitlines()
    assert len(ok_lines) > 30
    assert all(line.startswith("ok ") and "; expected " in line for line in ok_lines)
    assert all(line.startswith("note   not checked ") for line in (given, counts, effort))
    assert given.endswith(" model.name, model.config, job, cluster: the question itself")
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


def test_a_plan_that_claims_too_much_exits_4(run: Run, saved: Path) -> None:
    mfu = read_plan(str(saved)).best.mfu or 0.0
    ran = run("check", str(rewritten(saved, mfu=1.1 * mfu)))
    assert ran.code == 4
    wrong = [line for line in ran.out.splitlines() if line.startswith("wrong")]
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
    (line,) = [line for line in ran.out.splitlines() if not line.startswith(("ok ", "note "))]
    assert line.startswith("open ") and line.endswith("not proven within 0.001 s")
    assert ran.err == "shardwise: not proven: optimal\n"
