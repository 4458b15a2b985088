"""Plan and export by the commands that users run, with Megatron-LM and TorchTitan themselves as readers."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.targets.megatron import environment
from tests.targets.titan import titan_environment

from shardwise.plans import Plan, read_plan
from shardwise.targets.megatron_lm_read_back import ReaderRequest, differences, read_by_megatron_lm

pytestmark = pytest.mark.xdist_group("megatron-lm files")

MODELS = ("llama-3.1-8b", "mixtral-8x7b")


def _shardwise(
    folder: Path, *words: str, path: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *words],
        check=False, capture_output=True, text=True, cwd=folder, env=path or environment(),
    )  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `plan.yaml`, a plan for Megatron-LM, and its export in `out`."""
    folder = tmp_path_factory.mktemp(request.param)
    question = (
        "plan", request.param, "--cluster", "2x8xH100-SXM", "--seq-len", "4096", "--global-batch-size", "128",
        "--target", "megatron-lm-0.19", "--save", "plan.yaml",
    )  # fmt: skip
    assert (planned := _shardwise(folder, *question)).returncode == 0, planned.stderr
    return folder


def _differences(plan: Plan, flags: list[str]) -> object:
    request = ReaderRequest(flags=(*flags, "--no-rope-fusion"), world_size=plan.cluster.devices)
    (reading,) = read_by_megatron_lm([request], environment=environment())
    return reading.error or differences(plan, reading)


def test_a_plan_for_the_target_is_exported_and_read_back_equal(folder: Path) -> None:
    done = _shardwise(folder, "export", "plan.yaml", "--to", "megatron-lm-0.19", "--out", "out", "--validate")
    assert (done.returncode, done.stderr) == (0, "")
    plan = read_plan(str(folder / "plan.yaml"))
    assert plan.target == "megatron-lm-0.19"
    args = (folder / "out" / "megatron-lm.args").read_text()
    own = shlex.split(args, comments=True)
    assert _differences(plan, own) == ()
    # Settings that plans lack are comments for users to fill in: Megatron-LM knows these flags.
    placeholders = [
        word for line in re.findall(r"^# (--.*)$", args, re.MULTILINE) for word in shlex.split(line)
    ]
    assert "--lr" in placeholders
    assert _differences(plan, [*own, *placeholders]) == ()
    script = 'source out/megatron-lm.sh && printf "%s\\0" "${megatron_lm_args[@]}"'
    sourced = subprocess.run(["bash", "-euc", script], check=True, capture_output=True, text=True, cwd=folder)
    assert sourced.stdout.split("\0")[:-1] == own


def test_an_edited_file_is_detected(folder: Path) -> None:
    """A mutant: one value of the file is changed by hand."""
    assert _shardwise(folder, "export", "plan.yaml", "--to", "megatron-lm", "--out", "out").returncode == 0
    plan = read_plan(str(folder / "plan.yaml"))
    own = shlex.split((folder / "out" / "megatron-lm.args").read_text(), comments=True)
    place = own.index("--micro-batch-size") + 1
    edited = [*own[:place], str(2 * int(own[place])), *own[place + 1 :]]
    assert "micro_batch_size" in str(_differences(plan, edited))


@pytest.mark.parametrize("model", MODELS)
def test_torchtitan_builds_its_best_plan(model: str, tmp_path: Path) -> None:
    to = ("--target", "torchtitan-0.3", "--save", "plan.yaml")
    question = ("--cluster", "2x8xH100-SXM", "--seq-len", "4096", "--global-batch-size", "128")
    path = titan_environment()
    planned = _shardwise(tmp_path, "plan", model, *question, *to, path=path)
    assert planned.returncode == 0, planned.stderr
    export = ("export", "plan.yaml", "--to", "torchtitan", "--out", "out", "--validate")
    done = _shardwise(tmp_path, *export, path=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "values read back equal by TorchTitan itself" in done.stdout
    assert read_plan(str(tmp_path / "plan.yaml")).target == "torchtitan-0.3"
    assert (tmp_path / "out" / "torchtitan_0_3.py").is_file()
