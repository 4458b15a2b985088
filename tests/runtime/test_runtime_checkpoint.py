"""A checkpoint goes on as the run would have, under the same plan bit by bit and under another to tolerance;
what is torn, foreign or newer is refused; a killed run resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.equality import LR, MAX_NORM, batches, single_process, whole_module
from tests.runtime.plans import make_plan

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.plan import Plan, write_plan
from shardwise.runtime import Report, Team, parallelize
from shardwise.runtime.checkpoint import load, resumable, save
from shardwise.runtime.manifest import MANIFEST, finished, newest

pytestmark = pytest.mark.xdist_group("runtime")

BEFORE, AFTER = 2, 2
"""Steps before and behind the checkpoint."""


def saves(report: Report, plan: Plan, root: str) -> list[float]:
    """Losses of a run that is saved on the way and goes on."""
    job = parallelize(whole_module(plan.model, 0), plan, lr=LR, max_norm=MAX_NORM)
    losses = [job.step(batches(plan, 0).batch(step)).loss for step in range(BEFORE)]
    save(job, root, step=BEFORE, seed=0, data="synthetic")
    return losses + [job.step(batches(plan, 0).batch(BEFORE + step)).loss for step in range(AFTER)]


def loads(report: Report, plan: Plan, root: str) -> list[float]:
    """Losses of a run that starts from other parameters, then from the checkpoint."""
    job = parallelize(whole_module(plan.model, 5), plan, lr=LR, max_norm=MAX_NORM)
    load(job, resumable(plan, root)[0])
    return [job.step(batches(plan, 0).batch(BEFORE + step)).loss for step in range(AFTER)]


MOVES = [
    ("pp=2,schedule=1f1b", "tp=2,dp=2,zero_stage=3", "gpt", "adamw"),
    ("pp=2,schedule=zb_v,vpp=2,micro_batch_size=1", "dp=4,zero_stage=1", "gpt", "adamw"),
    ("tp=2,dp=2,zero_stage=2", "pp=2,schedule=zb_v,vpp=2,micro_batch_size=1", "gpt", "adamw"),
    ("dp=4,zero_stage=3", "tp=4,sequence_parallel=true", "llama", "adamw"),
    ("tp=2,cp=2", "pp=3,schedule=1f1b,first_stage_layers=0,last_stage_layers=1", "llama", "adamw"),
    ("dp=2,zero_stage=1", "pp=2,schedule=1f1b", "llama", "sgd"),
    ("dp=4,ep=2,zero_stage=3", "tp=2,etp=2", "mixtral", "adamw"),
    ("pp=2,tp=2,ep=2,schedule=1f1b,micro_batch_size=2", "dp=4,ep=4,zero_stage=1", "qwen3_moe", "adamw"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "model", "optimizer"), MOVES)
def test_a_run_goes_on_under_another_plan(
    team: Team, tmp_path: Path, before: str, after: str, model: str, optimizer: str
) -> None:
    first, second = (make_plan(text, model=model, optimizer=optimizer) for text in (before, after))
    whole = single_process(first, seed=0, steps=BEFORE + AFTER).losses
    saved = team.run(first.cluster.devices, saves, first, str(tmp_path))[0]
    loaded = team.run(second.cluster.devices, loads, second, str(tmp_path))[0]
    assert saved == pytest.approx(whole, rel=2e-5)
    assert loaded == pytest.approx(whole[BEFORE:], rel=2e-5)


@pytest.mark.parametrize("text", ["tp=2,dp=2,zero_stage=3", "pp=2,schedule=zb_h1,micro_batch_size=1"])
def test_under_the_same_plan_it_goes_on_bit_by_bit(team: Team, tmp_path: Path, text: str) -> None:
    plan = make_plan(text, model="gpt")
    saved = team.run(plan.cluster.devices, saves, plan, str(tmp_path))[0]
    assert team.run(plan.cluster.devices, loads, plan, str(tmp_path))[0] == saved[BEFORE:]


@pytest.fixture
def checkpoint(team: Team, tmp_path: Path) -> Path:
    plan = make_plan("dp=2,zero_stage=1")
    team.run(2, saves, plan, str(tmp_path))
    return tmp_path / f"step-{BEFORE:08d}"


def test_what_is_torn_foreign_or_newer_is_refused_by_name(checkpoint: Path) -> None:
    root, plan = str(checkpoint.parent), make_plan("dp=2")
    assert resumable(plan, root)[1].step == BEFORE
    with pytest.raises(ConfigError, match="optimizer: is not the plan's"):
        resumable(make_plan("dp=2", optimizer="sgd"), root)
    with pytest.raises(ConfigError, match="model: is not the plan's"):
        resumable(make_plan("dp=2", model="gpt"), root)
    with pytest.raises(ConfigError, match="global_batch_size: is not the plan's"):
        resumable(make_plan("dp=2", global_batch_size=16), root)
    manifest = checkpoint / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(ConfigError, match="is newer than this shardwise reads"):
        newest(root)
    manifest.write_text(text[:-20])
    with pytest.raises(ConfigError, match=MANIFEST):
        newest(root)
    manifest.write_text(text.replace('"files": {\n', '"files": {\n  "../x": [1, "a"],\n'))
    with pytest.raises(ConfigError, match="is not the name of a file"):
        newest(root)
    manifest.write_text(text)
    shard = next(checkpoint.glob("*.distcp"))
    content = shard.read_bytes()
    for damaged in (content[:-1], content[:100] + b"x" + content[101:]):
        shard.write_bytes(damaged)
        with pytest.raises(ConfigError, match=f"{shard.name}: is not the file"):
            newest(root)
    shard.unlink()
    with pytest.raises(ConfigError, match="found nothing"):
        newest(root)


def test_a_checkpoint_without_a_manifest_is_none(checkpoint: Path) -> None:
    """A run that is killed while it saves leaves files without a manifest: the one before counts."""
    later = checkpoint.with_name("step-00000009")
    shutil.copytree(checkpoint, later)
    assert finished(str(checkpoint.parent)) == [BEFORE, 9]
    (later / MANIFEST).unlink()
    assert newest(str(checkpoint.parent))[1].step == BEFORE
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="has no finished checkpoint"):
        newest(str(checkpoint.parent))


STEPS = 8


def command(plan: str, folder: Path, *more: str) -> list[str]:
    options = ("--steps", str(STEPS), "--checkpoint", str(folder), "--checkpoint-every", "2")
    return [sys.executable, "-m", "shardwise", "train", plan, *options, *more]


def losses(log: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in map(json.loads, log.read_text().splitlines())}


def test_a_run_with_a_killed_rank_is_resumed(tmp_path: Path) -> None:
    """kill -9 of a worker after step 5: one line says so, one has the command that goes on; from the step
    behind the last checkpoint on, every loss is that of the undisturbed run; two checkpoints are kept."""
    plan = str(tmp_path / "p.yaml")
    write_plan(plan, make_plan("dp=2,zero_stage=1"))
    logs = [tmp_path / f"{name}.jsonl" for name in ("whole", "killed", "resumed")]
    subprocess.run(
        command(plan, tmp_path / "a", "--log", str(logs[0])), check=True, capture_output=True, timeout=120
    )
    killed = subprocess.Popen(
        command(plan, tmp_path / "b", "--log", str(logs[1])), stderr=subprocess.PIPE, text=True
    )
    assert killed.stderr is not None
    next(line for line in killed.stderr if line.startswith("step 5/"))
    children = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    workers = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) == 2
    os.kill(int(workers[-1]), signal.SIGKILL)
    rest = killed.stderr.read().splitlines()
    killed.stderr.close()
    assert killed.wait(timeout=60) == 1
    errors = [line for line in rest if not line.startswith("step ")]
    assert "was ended by signal 9" in errors[0] and errors[1].endswith("--resume") and len(errors) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    subprocess.run(
        command(plan, tmp_path / "b", "--resume", "--log", str(logs[2])),
        check=True,
        capture_output=True,
        timeout=120,
    )
    whole, resumed = losses(logs[0]), losses(logs[2])
    assert min(resumed) in (5, 7) and max(resumed) == STEPS
    assert resumed == {step: whole[step] for step in resumed}
    assert finished(str(tmp_path / "b")) == finished(str(tmp_path / "a")) == [6, 8]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--resume"], "--resume: needs --checkpoint"),
        (["--resume", "--checkpoint", "{}/none"], "has no finished checkpoint"),
        (["--checkpoint", "{}/p.yaml"], "--checkpoint: cannot be made"),
        (["--checkpoint", "{}/x", "--checkpoint-every", "0"], "--checkpoint-every"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    plan = str(tmp_path / "p.yaml")
    write_plan(plan, make_plan("dp=2"))
    assert main(["train", plan, *(option.format(tmp_path) for option in options)]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
