"""A resumed run continues as the uninterrupted one would: bit by bit under the same plan, to tolerance under
another. Torn, foreign and newer checkpoints are refused; a killed run resumes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.runtime.equality import LR, MAX_NORM, batches, load_weights, single_process, whole_module
from tests.runtime.faults import OF_RANK_0, PASSES, PHASES, Fault, train_with
from tests.runtime.jobs import uneven
from tests.runtime.plans import BATCH, make_plan
from tests.runtime.uneven_plans import make_uneven
from tests.sampling import sample_of
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.plans import Plan, write_plan
from shardwise.runtime import (
    RankLost,
    StepRecord,
    TrainOptions,
    WorkerPool,
    export,
    parallelize,
    reference_module,
    train,
    train_locally,
)
from shardwise.runtime.checkpoint import (
    MANIFEST,
    AsyncCheckpoint,
    Manifest,
    clear_unfinished,
    commit,
    files_in,
    finished,
    folder_of,
    load,
    mark_folder,
    newest,
    prune,
    resumable,
)
from shardwise.runtime.uneven import OptimizerShards
from shardwise.runtime.uniform import UniformTrainingJob
from shardwise.runtime.workers import Report

BEFORE, AFTER = 2, 2
"""Steps before and after the checkpoint."""


def saves(report: Report, plan: Plan, root: str) -> list[float]:
    """Losses of a run that saves a checkpoint midway and continues."""
    job = parallelize(whole_module(plan.model, 0), plan, lr=LR, max_norm=MAX_NORM)
    losses = [job.step(batches(plan, 0).batch(step)).loss for step in range(BEFORE)]
    saving = AsyncCheckpoint(job, root, step=BEFORE, seed=0, data="synthetic")
    losses += [job.step(batches(plan, 0).batch(BEFORE + step)).loss for step in range(AFTER)]
    saving.wait()
    return losses


def loads(report: Report, plan: Plan, root: str) -> list[float]:
    """Losses of a run that starts from other parameters, then loads the checkpoint."""
    job = parallelize(whole_module(plan.model, 5), plan, lr=LR, max_norm=MAX_NORM)
    load(job, resumable(plan, root)[0])
    return [job.step(batches(plan, 0).batch(BEFORE + step)).loss for step in range(AFTER)]


MIGRATIONS = [
    ("pp=2,schedule=1f1b,micro_batch_size=2", "tp=2,dp=2,zero_stage=3,micro_batch_size=4", "gpt", "adamw"),
    ("pp=2,schedule=zb_v,vpp=2,micro_batch_size=1", "dp=4,zero_stage=1", "gpt", "adamw"),
    (
        "tp=2,cp=2,micro_batch_size=4",
        "pp=3,schedule=1f1b,first_stage_layers=0,micro_batch_size=2",
        "llama",
        "adamw",
    ),
    ("dp=2,zero_stage=1", "pp=2,schedule=1f1b", "llama", "sgd"),
    ("dp=4,ep=2,zero_stage=3,micro_batch_size=2", "tp=2,etp=2,micro_batch_size=4", "mixtral", "adamw"),
    ("dp=2,zero_stage=1,offload=both", "pp=2,schedule=1f1b", "gpt", "adamw"),
]
MORE_MIGRATIONS = [
    (
        "tp=2,dp=2,zero_stage=2,micro_batch_size=4",
        "pp=2,schedule=zb_v,vpp=2,micro_batch_size=1",
        "gpt",
        "adamw",
    ),
    (
        "dp=4,zero_stage=3,micro_batch_size=2",
        "tp=4,sequence_parallel=true,micro_batch_size=4",
        "llama",
        "adamw",
    ),
    (
        "pp=2,tp=2,ep=2,schedule=1f1b,micro_batch_size=4",
        "dp=4,ep=4,zero_stage=1,micro_batch_size=2",
        "qwen3_moe",
        "adamw",
    ),
    (
        "tp=2,micro_batch_size=4",
        "pp=2,dp=2,schedule=1f1b,zero_stage=3,micro_batch_size=2,offload=optimizer",
        "gpt",
        "sgd",
    ),
]
"""Run with `--full` only."""


@pytest.mark.parametrize(
    ("before", "after", "model", "optimizer"), sample_of([*MIGRATIONS, *MORE_MIGRATIONS], MIGRATIONS)
)
def test_a_run_resumes_under_another_plan(
    team: WorkerPool, tmp_path: Path, before: str, after: str, model: str, optimizer: str
) -> None:
    first, second = (make_plan(text, model=model, optimizer=optimizer) for text in (before, after))
    whole = single_process(first, seed=0, steps=BEFORE + AFTER).losses
    saved = team.run(first.cluster.devices, saves, first, str(tmp_path))[0]
    loaded = team.run(second.cluster.devices, loads, second, str(tmp_path))[0]
    assert saved == pytest.approx(whole, rel=2e-5)
    assert loaded == pytest.approx(whole[BEFORE:], rel=2e-5)


UNEVEN_MIGRATIONS = [
    # cuts and tensor degrees that differ; a tied table on three ranks in one plan, on two in the other
    ("5 tp2l4 + 3 l2 l2", "3 l1 tp2l3 + 5 l4", "gpt", "adamw"),
    ("2 dp2l2 tp2l2 + 2 l4", "4 l3 l1", "llama", "sgd"),
    # from an uneven plan to a uniform one, and back
    ("6 l4 + 2 l1 l3", "tp=2,dp=2,zero_stage=1,micro_batch_size=4", "gpt", "adamw"),
    ("dp=2,zero_stage=3", "3 tp2l1 l3 + 5 l4", "llama", "adamw"),
]


def of_either_kind(text: str, model: str, optimizer: str) -> Plan:
    if "=" in text:
        return make_plan(text, model=model, optimizer=optimizer)
    shares = sum(int(pipeline.split()[0]) for pipeline in text.split("+"))
    return make_uneven(text, model=model, optimizer=optimizer, micro_batch_size=BATCH // shares)


@pytest.mark.parametrize(
    ("before", "after", "model", "optimizer"), sample_of(UNEVEN_MIGRATIONS, UNEVEN_MIGRATIONS[::3])
)
def test_a_run_resumes_from_or_under_an_uneven_plan(
    team: WorkerPool, tmp_path: Path, before: str, after: str, model: str, optimizer: str
) -> None:
    first, second = (of_either_kind(text, model, optimizer) for text in (before, after))
    one = make_plan("dp=1", model=model, optimizer=optimizer)
    whole = single_process(one, seed=0, steps=BEFORE + AFTER).losses
    saved = team.run(first.cluster.devices, saves, first, str(tmp_path))[0]
    loaded = team.run(second.cluster.devices, loads, second, str(tmp_path))[0]
    assert saved == pytest.approx(whole, rel=2e-5)
    assert loaded == pytest.approx(whole[BEFORE:], rel=2e-5)


def shares_of_3_and_1(model: str = "llama", devices: int | None = None) -> Plan:
    """Two pipelines with 3 and 1 of four micro-batches."""
    return make_uneven("3 tp2l4 + 1 l4", model=model, micro_batch_size=2, devices=devices)


def test_a_run_resumes_bit_by_bit_under_the_same_uneven_plan(team: WorkerPool, tmp_path: Path) -> None:
    """With a rank that the plan leaves idle."""
    plan = shares_of_3_and_1("gpt", devices=4)
    saved = team.run(4, saves, plan, str(tmp_path))[0]
    assert team.run(4, loads, plan, str(tmp_path))[0] == saved[BEFORE:]


def test_an_uneven_checkpoint_has_every_element_once(team: WorkerPool, tmp_path: Path) -> None:
    plan = shares_of_3_and_1("gpt")
    team.run(3, saves, plan, str(tmp_path))
    stored = FileSystemReader(folder_of(str(tmp_path), BEFORE)).read_metadata().state_dict_metadata
    tensors = {name: one for name, one in stored.items() if isinstance(one, TensorStorageMetadata)}
    assert all(prod(one.size) == sum(prod(chunk.sizes) for chunk in one.chunks) for one in tensors.values())
    weights = [name for name, _ in reference_module(plan.model).named_parameters()]
    states = ("step", "exp_avg", "exp_avg_sq")
    assert set(tensors) == set(stored) == {
        *(f"model.{name}" for name in weights),
        *(f"optimizer.{name}.{state}" for name in weights for state in states),
    }  # fmt: skip


def test_an_uneven_run_exports_the_weights_that_another_plan_would(team: WorkerPool, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    for name, plan in (("uneven", shares_of_3_and_1()), ("even", make_plan("dp=2"))):
        root, out = str(tmp_path / name), str(tmp_path / f"{name}-weights")
        team.run(plan.cluster.devices, saves, plan, root)
        export(plan, root, out)
        module = reference_module(plan.model)
        load_weights(module, plan.model, out)
        found.append(dict(module.state_dict()))
    uneven, even = found
    start = whole_module(make_plan("dp=2").model, 0).state_dict()
    assert all(torch.allclose(uneven[key], even[key], rtol=0.0, atol=5e-5) for key in even)
    assert not all(torch.allclose(uneven[key], start[key], rtol=0.0, atol=5e-5) for key in even)


def loads_upside_down(report: Report, plan: Plan, root: str) -> list[float]:
    """As `loads`, with every shard of weights and states reversed."""
    scattered = OptimizerShards.scattered
    with patch.object(
        OptimizerShards, "scattered", lambda *given: [share.flip(0) for share in scattered(*given)]
    ):
        return loads(report, plan, root)


def loads_without_states(report: Report, plan: Plan, root: str) -> list[float]:
    """As `loads`, with optimizer states as before the first step."""
    job = uneven(parallelize(whole_module(plan.model, 5), plan, lr=LR, max_norm=MAX_NORM))
    load(job, resumable(plan, root)[0])
    if job.optimizer is not None:
        job.optimizer.state.clear()
    return [job.step(batches(plan, 0).batch(BEFORE + step)).loss for step in range(AFTER)]


@pytest.mark.parametrize("broken", [loads_upside_down, loads_without_states])
def test_a_broken_load_is_caught(
    team: WorkerPool, tmp_path: Path, broken: Callable[..., list[float]]
) -> None:
    plan = shares_of_3_and_1("gpt")
    saved = team.run(3, saves, plan, str(tmp_path))[0]
    found = team.run(3, broken, plan, str(tmp_path))[0]
    assert found != pytest.approx(saved[BEFORE:], rel=2e-3)


@pytest.mark.parametrize(
    "text", ["tp=2,dp=2,zero_stage=3,micro_batch_size=4", "pp=2,schedule=zb_h1,micro_batch_size=1"]
)
def test_a_run_resumes_bit_by_bit_under_the_same_plan(team: WorkerPool, tmp_path: Path, text: str) -> None:
    plan = make_plan(text, model="gpt")
    saved = team.run(plan.cluster.devices, saves, plan, str(tmp_path))[0]
    assert team.run(plan.cluster.devices, loads, plan, str(tmp_path))[0] == saved[BEFORE:]


@pytest.fixture
def checkpoint(team: WorkerPool, tmp_path: Path) -> Path:
    plan = make_plan("dp=2,zero_stage=1")
    team.run(2, saves, plan, str(tmp_path))
    return tmp_path / f"step-{BEFORE:08d}"


def test_a_torn_foreign_or_newer_checkpoint_is_refused_by_name(checkpoint: Path) -> None:
    root, plan = str(checkpoint.parent), make_plan("dp=2")
    assert resumable(plan, root)[1].step == BEFORE
    with pytest.raises(ConfigError, match="optimizer: differs from the plan"):
        resumable(make_plan("dp=2", optimizer="sgd"), root)
    with pytest.raises(ConfigError, match="model: differs from the plan"):
        resumable(make_plan("dp=2", model="gpt"), root)
    with pytest.raises(ConfigError, match="global_batch_size: differs from the plan"):
        resumable(make_plan("dp=2", global_batch_size=16), root)
    manifest = checkpoint / MANIFEST
    text = manifest.read_text()
    manifest.write_text(text.replace('"version": 4', '"version": 5'))
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
        with pytest.raises(ConfigError, match=f"{shard.name}: differs from the file"):
            newest(root)
    shard.unlink()
    with pytest.raises(ConfigError, match="found nothing"):
        newest(root)


def test_a_folder_without_a_manifest_is_no_checkpoint(checkpoint: Path) -> None:
    """A run that is killed while it saves leaves files without a manifest: the previous checkpoint counts."""
    later = checkpoint.with_name("step-00000009")
    shutil.copytree(checkpoint, later)
    assert finished(str(checkpoint.parent)) == [BEFORE, 9]
    (later / MANIFEST).unlink()
    assert newest(str(checkpoint.parent))[1].step == BEFORE
    (checkpoint / MANIFEST).unlink()
    with pytest.raises(ConfigError, match="has no finished checkpoint"):
        newest(str(checkpoint.parent))


def saves_late(report: Report, plan: Plan, root: str, is_broken: bool) -> list[float]:
    """As `saves`, with files that are written only after the last step. The mutant does not copy the
    state."""
    are_done = threading.Event()
    write = torch.distributed.checkpoint.save

    def late(*arguments: Any, **named: Any) -> None:
        are_done.wait()
        write(*arguments, **named)

    with ExitStack() as stack:
        stack.enter_context(patch("torch.distributed.checkpoint.save", late))
        if is_broken:
            stack.enter_context(patch.object(UniformTrainingJob, "saved_state", UniformTrainingJob.state))
        job = parallelize(whole_module(plan.model, 0), plan, lr=LR, max_norm=MAX_NORM)
        for step in range(BEFORE):
            job.step(batches(plan, 0).batch(step))
        saving = AsyncCheckpoint(job, root, step=BEFORE, seed=0, data="synthetic")
        losses = [job.step(batches(plan, 0).batch(BEFORE + step)).loss for step in range(AFTER)]
        are_done.set()
        saving.wait()
    return losses


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_checkpoint_has_the_state_at_the_start_of_saving(
    team: WorkerPool, tmp_path: Path, is_broken: bool
) -> None:
    plan = make_plan("dp=2,zero_stage=1")
    saved = team.run(2, saves_late, plan, str(tmp_path), is_broken)[0]
    assert (team.run(2, loads, plan, str(tmp_path))[0] == saved) is not is_broken


def cannot_save(report: Report, plan: Plan, root: str) -> str:
    job = parallelize(whole_module(plan.model, 0), plan)
    job.step(batches(plan, 0).batch(0))
    try:
        AsyncCheckpoint(job, root, step=1, seed=0, data="synthetic").wait()
    except ConfigError as error:
        return str(error)
    return ""


def test_a_failed_write_of_a_checkpoint_is_a_one_line_error_on_every_rank(
    team: WorkerPool, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "step-00000001"
    in_the_way.write_text("a file")
    for message in team.run(2, cannot_save, make_plan("dp=2"), str(tmp_path)):
        assert message.startswith(f"{in_the_way}: --checkpoint: cannot be written: ") and "\n" not in message


def finished_files(root: Path, step: int) -> tuple[str, Manifest]:
    """A folder with the files of a checkpoint after `step` steps, and the manifest that would commit it."""
    folder = Path(folder_of(str(root), step))
    mark_folder(str(folder))
    (folder / "__0_0.distcp").write_bytes(b"%d" % step)
    return str(folder), Manifest(
        step=step, seed=0, data="synthetic", content=None, optimizer="adamw", global_batch_size=8, seq_len=32,
        model="m", plan="p", files=files_in(str(folder)),
    )  # fmt: skip


class Killed(BaseException):
    """Replaces a kill: no handler of ours may catch it."""


def test_a_commit_killed_at_any_call_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The process ends before each filesystem call in turn, until one run needs no more calls. What remains
    is always a complete checkpoint, the old or the new one."""
    calls, found = 0, set()
    names = ("os.open", "os.write", "os.fsync", "os.replace", "os.unlink", "os.rmdir")

    def commit_until(root: Path, last: int) -> bool:
        """Whether the commit finished."""
        made = [0]

        def counted(original: Any, *arguments: Any, **named: Any) -> Any:
            made[0] += 1
            if made[0] > last:
                raise Killed
            return original(*arguments, **named)

        with ExitStack() as stack:
            for name in names:
                module, attribute = name.split(".")
                original = getattr(sys.modules[module], attribute)
                stack.enter_context(patch(name, partial(counted, original)))
            try:
                commit(*finished_files(root, 6))
                prune(str(root))
            except Killed:
                return False
        return True

    is_whole = False
    while not is_whole:
        root = tmp_path / str(calls)
        for step in (2, 4):
            commit(*finished_files(root, step))
        is_whole = commit_until(root, calls)
        found.add(newest(str(root))[1].step)
        assert len(finished(str(root))) >= 2
        clear_unfinished(str(root))
        assert sorted(map(str, root.iterdir())) == [folder_of(str(root), s) for s in finished(str(root))]
        calls += 1
    assert found == {4, 6} and calls > 8


STEPS, EVERY = 8, 2


@dataclass
class Survived:
    """Results of a run: losses by step as in a log, and for each restart the steps done before and the step
    it resumed from."""

    losses: dict[int, float] = field(default_factory=dict)
    restarts: list[tuple[int, int]] = field(default_factory=list)

    def report(self, record: StepRecord) -> None:
        assert record.step == len(self.losses) + 1  # each step once
        self.losses[record.step] = record.loss

    def roll_back(self, _: RankLost, step: int) -> None:
        self.restarts.append((len(self.losses), step))
        self.losses = {done: loss for done, loss in self.losses.items() if done <= step}


def survived(plan: Plan, root: Path, faults: tuple[Fault, ...] = ()) -> Survived:
    options = TrainOptions(steps=STEPS, checkpoint=str(root), checkpoint_every=EVERY)
    run = Survived()
    train_locally(
        plan, options, report=run.report, restarts=len(faults), on_restart=run.roll_back,
        work=partial(train_with, faults=faults),
    )  # fmt: skip
    return run


def check_survives(
    plan: Plan, folder: Path, whole: Mapping[int, float], struck: Sequence[tuple[int, int, str]]
) -> None:
    """Rank, step and phase of each death, in order, are in `struck`; the run ends like one without deaths."""
    faults = tuple(
        Fault(rank, step, phase, str(folder / f"{number}"))
        for number, (rank, step, phase) in enumerate(struck)
    )
    run = survived(plan, folder / "run", faults)
    assert all(os.path.exists(fault.mark) for fault in faults) and len(run.restarts) == len(faults)
    assert all(0 <= done - again <= EVERY for done, again in run.restarts), run.restarts
    assert run.losses == whole
    assert resumable(plan, str(folder / "run"))[1].step == STEPS


def undisturbed(team: WorkerPool, plan: Plan) -> dict[int, float]:
    """Losses of a run that is not interrupted and saves nothing."""
    run = Survived()
    team.run(plan.cluster.devices, train, plan, TrainOptions(steps=STEPS), report=run.report)
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    return run.losses


def test_a_run_survives_a_killed_rank_with_the_same_losses(team: WorkerPool, tmp_path: Path) -> None:
    """A rank dies while a checkpoint is committed: at most one interval is repeated, and every loss is that
    of the undisturbed run, bit by bit."""
    plan = make_plan("dp=2,zero_stage=1")
    check_survives(plan, tmp_path, undisturbed(team, plan), [(0, 4, "committing")])


def test_a_run_under_an_uneven_plan_survives_a_killed_rank(team: WorkerPool, tmp_path: Path) -> None:
    """The rank whose pipeline has 3 of the 8 micro-batches dies in the backward pass of step 5."""
    plan = make_uneven("5 l4 + 3 l4")
    check_survives(plan, tmp_path, undisturbed(team, plan), [(1, 5, "backward")])


MATRIX = (
    "dp=2,zero_stage=1",
    "pp=2,schedule=1f1b,micro_batch_size=2",
    "tp=2,zero_stage=0,micro_batch_size=4",
)


@pytest.mark.parametrize("text", sample_of(MATRIX, MATRIX[:2]))
def test_a_run_survives_a_kill_of_any_rank_at_any_step_and_phase(
    team: WorkerPool, tmp_path: Path, full: bool, text: str
) -> None:
    """With `--full`: every rank in every phase of steps 1 to 5, and of the checkpoints after steps 2 to 6.
    Otherwise two of these deaths in one run, different ones for each plan."""
    plan = make_plan(text)
    whole = undisturbed(team, plan)
    every: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
    for phase in PHASES:
        for rank in (0,) if phase in OF_RANK_0 else (0, 1):
            steps = range(1, 6) if phase in PASSES else (6,) if phase == "pruning" else (2, 4, 6)
            every[phase, rank] = [(rank, step, phase) for step in steps]
    if not full:
        sampled = random.Random(text).sample([death for deaths in every.values() for death in deaths], 2)
        every = {("drawn", 0): sorted(sampled, key=lambda death: death[1])}
    for (phase, rank), deaths in every.items():
        folder = tmp_path / f"{phase}-{rank}"
        folder.mkdir()
        check_survives(plan, folder, whole, deaths)


def command(plan: str, folder: Path, *more: str) -> list[str]:
    options = ("--steps", str(STEPS), "--checkpoint", str(folder), "--checkpoint-every", "2")
    return [sys.executable, "-m", "shardwise", "train", plan, *options, *more]


def losses(log: Path) -> dict[int, float]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len({record["step"] for record in records}) == len(records)
    return {record["step"]: record["loss"] for record in records}


def workers_of(pid: int) -> list[int]:
    """Process ids of the ranks of a run, in order: children of its fork server."""
    servers = [
        child for child in children(pid) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return [worker for server in servers for worker in children(server)]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_run_with_killed_ranks_continues_and_is_resumed(team: WorkerPool, tmp_path: Path) -> None:
    """kill -9 of a worker after steps 3 and 6, with one restart allowed. The first time the run continues by
    itself; the second time one line names the cause and one has the command to resume. Every step is in the
    logs once, with the loss of the undisturbed run; two checkpoints are kept."""
    plan = str(tmp_path / "p.yaml")
    write_plan(plan, make_plan("dp=2,zero_stage=1"))
    logs = [tmp_path / f"{name}.jsonl" for name in ("killed", "resumed")]
    killed = subprocess.Popen(
        command(plan, tmp_path / "b", "--restarts", "1", "--log", str(logs[0])),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert killed.stderr is not None
    for step, rank in ((3, 1), (6, 0)):
        next(line for line in killed.stderr if line.startswith(f"step {step}/"))
        workers = workers_of(killed.pid)
        assert len(workers) == 2
        os.kill(workers[rank], signal.SIGKILL)
    remaining = killed.stderr.read().splitlines()
    killed.stderr.close()
    assert killed.wait(timeout=600) == 1
    errors = [line for line in remaining if not line.startswith("step ")]
    assert "was ended by signal 9" in errors[0] and errors[1].endswith("--resume") and len(errors) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    subprocess.run(
        command(plan, tmp_path / "b", "--resume", "--log", str(logs[1])),
        check=True,
        capture_output=True,
        timeout=600,
    )
    whole = undisturbed(team, make_plan("dp=2,zero_stage=1"))
    first, resumed = map(losses, logs)
    assert min(resumed) in (5, 7) and max(resumed) == STEPS
    assert first | resumed == whole and len(first) >= min(resumed) - 1
    assert resumed == {step: whole[step] for step in resumed}
    assert finished(str(tmp_path / "b")) == [6, 8]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--resume"], "--resume: needs --checkpoint"),
        (["--resume", "--checkpoint", "{}/none"], "has no finished checkpoint"),
        (["--checkpoint", "{}/p.yaml"], "--checkpoint: cannot be created"),
        (["--checkpoint", "{}/x", "--checkpoint-every", "0"], "--checkpoint-every"),
        (["--checkpoint", "{}/x", "--restarts", "-1"], "--restarts"),
        (["--checkpoint", "{}/used"], "has checkpoints of an earlier run"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    plan = str(tmp_path / "p.yaml")
    write_plan(plan, make_plan("dp=2"))
    commit(*finished_files(tmp_path / "used", 2))
    assert main(["train", plan, *(option.format(tmp_path) for option in options)]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
