"""The checker alone: a process that can import nothing of `shardwise` reads and judges plan files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from tests.architecture.sources import ROOT

from shardwise.plans import plan_document, read_plan
from shardwise.plans.documents import document_hash
from shardwise_verify import InputError, check_document, read_document, targets
from shardwise_verify.__main__ import main

RECORDED = ROOT / "tests" / "recorded" / "plans"
SCHEMA = json.loads((ROOT / "docs" / "reference" / "schemas" / "check.json").read_text())

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "shardwise":
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
"""
"""Makes every import of `shardwise` fail."""

RUN = f"{BLOCKER}import runpy\nrunpy.run_module('shardwise_verify', run_name='__main__')\n"


def alone(*arguments: str, script: str = RUN) -> subprocess.CompletedProcess[str]:
    """A process that runs `script` with these arguments."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "src")


def converted(name: str, folder: Path) -> Path:
    """A recorded plan of version 1 as a file of version 2."""
    path = folder / "plan.json"
    path.write_text(json.dumps(plan_document(read_plan(str(RECORDED / name)))))
    return path


@pytest.mark.parametrize("name", ["for-megatron-lm.yaml", "uneven.yaml", "staged-graph.yaml"])
def test_it_judges_plans_of_every_kind(name: str, tmp_path: Path) -> None:
    """The first is for a target, whose limits are data of the other package."""
    ran = alone(str(converted(name, tmp_path)), "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    answer = json.loads(ran.stdout)
    jsonschema.Draft202012Validator(SCHEMA).validate(answer)
    assert answer["ok"] and answer["checks"][0]["name"] == "hash"
    named = {one["key"] for one in answer["not_re_derived"]}
    assert ("best.breakdown" in named) == (name != "for-megatron-lm.yaml")
    optimal = [check for check in answer["checks"] if check["name"] == "optimal"]
    assert [check["ok"] for check in optimal] == {"for": [True], "une": [False], "sta": []}[name[:3]]


def test_the_blocker_blocks() -> None:
    ran = alone(script=f"{BLOCKER}import shardwise_verify\nimport shardwise.errors\n")
    assert ran.returncode == 1 and "shardwise.errors is blocked" not in ran.stderr.splitlines()[0]
    assert ran.stderr.splitlines()[-1] == "ImportError: shardwise is blocked"


def test_a_wrong_figure_exits_4_and_bad_input_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = converted("uniform.yaml", tmp_path)
    document = json.loads(path.read_text())
    document["best"]["mfu"] *= 1.1
    path.write_text(json.dumps(document))
    assert main([str(path)]) == 2
    assert "does not match the content: the file was changed" in capsys.readouterr().err
    path.write_text(json.dumps({**document, "hash": document_hash(document)}))
    assert main([str(path)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("wrong")] == ["mfu"]


def test_version_1_must_be_converted_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(RECORDED / "uneven.yaml")]) == 2
    assert "version 1, which must be converted first" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["schema", "version", "hash"])
def test_no_plan_is_refused(key: str) -> None:
    document = plan_document(read_plan(str(RECORDED / "uniform.yaml")))
    for value in ("x", None, 3, True):
        with pytest.raises(InputError) as caught:
            check_document({**document, key: value})
        assert caught.value.key == key


def test_without_capability_files_the_target_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = converted("for-megatron-lm.yaml", tmp_path)
    monkeypatch.setattr(targets, "CAPABILITIES", tmp_path / "none")
    targets.capabilities_of.cache_clear()
    try:
        verdict = check_document(read_document(str(path)))
    finally:
        targets.capabilities_of.cache_clear()
    assert [one.key for one in verdict.not_re_derived] == ["target", "certificate.rejected"]
    (optimal,) = [check for check in verdict.checks if not check.ok]
    assert (optimal.name, optimal.is_open, verdict.ok) == ("optimal", True, True)
    assert not [check for check in verdict.checks if check.name.startswith("rejected by")]
