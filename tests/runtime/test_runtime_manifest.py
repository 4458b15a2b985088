"""Cleaning a checkpoint folder removes our own unfinished files only; a checkpoint is complete when rank 0
sees all of its files."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.runtime.equality import batches, whole_module
from tests.runtime.plans import make_plan

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.plans import Plan, write_plan
from shardwise.runtime import TrainOptions, WorkerPool, export, parallelize, resumed_options, train
from shardwise.runtime.checkpoint import (
    MANIFEST,
    MARKER,
    AsyncCheckpoint,
    Manifest,
    check_unfinished,
    check_visible,
    clear_unfinished,
    commit,
    files_in,
    finished,
    folder_of,
    load,
    mark_folder,
    newest,
    prune,
)
from shardwise.runtime.network import model_hash
from shardwise.runtime.run_lock import LOCK_FILE
from shardwise.runtime.workers import Report


def committed(root: Path, step: int, plan: Plan, **changes: Any) -> Path:
    """A finished checkpoint of a run under `plan`, with a stand-in for PyTorch's files."""
    folder = Path(folder_of(str(root), step))
    mark_folder(str(folder))
    (folder / "__0_0.distcp").write_bytes(b"%d" % step)
    manifest = Manifest(
        step=step, seed=0, data="synthetic", content=None, optimizer=plan.job.optimizer,
        global_batch_size=plan.job.global_batch_size, seq_len=plan.job.seq_len,
        model=model_hash(plan.model.config), plan="p", files=files_in(str(folder)),
    )  # fmt: skip
    commit(str(folder), replace(manifest, **changes))
    return folder


def saved_plan(tmp_path: Path) -> str:
    path = str(tmp_path / "p.yaml")
    write_plan(path, make_plan("dp=2"))
    return path


@pytest.mark.parametrize("more", [[], ["--resume"]])
def test_a_foreign_folder_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    root = tmp_path / "foreign"
    foreign = root / "step-00000001"
    foreign.mkdir(parents=True)
    (foreign / "model.bin").write_text("weights")
    if more:
        committed(root, 2, make_plan("dp=2"))
    assert main(["train", saved_plan(tmp_path), "--checkpoint", str(root), *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shardwise: error: {foreign}: --checkpoint: has the name of a checkpoint")
    assert "found model.bin" in error and error.count("\n") == 1
    with pytest.raises(ConfigError):
        clear_unfinished(str(root))
    assert (foreign / "model.bin").read_text() == "weights"


def test_only_our_own_files_are_removed(tmp_path: Path) -> None:
    plan = make_plan("dp=2")
    folders = [committed(tmp_path, step, plan) for step in (1, 2, 3, 4)]
    (folders[0] / MARKER).unlink()
    (folders[0] / MANIFEST).write_text("{}")  # not ours
    (folders[1] / MARKER).unlink()  # of a version without markers
    unfinished = Path(folder_of(str(tmp_path), 9))
    mark_folder(str(unfinished))
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    empty = Path(folder_of(str(tmp_path), 8))  # ended before its marker was written, or after its removal
    empty.mkdir()
    check_unfinished(str(tmp_path))
    clear_unfinished(str(tmp_path))
    prune(str(tmp_path))
    assert finished(str(tmp_path)) == [1, 3, 4]
    assert sorted(os.listdir(tmp_path)) == [f"step-0000000{step}" for step in (1, 3, 4)]


def test_of_links_only_the_link_is_removed(tmp_path: Path) -> None:
    plan = make_plan("dp=2")
    root, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    target = committed(elsewhere, 1, plan)
    unfinished = elsewhere / "unfinished"
    mark_folder(str(unfinished))
    for step in (2, 3):
        committed(root, step, plan)
    (root / "step-00000001").symlink_to(target)
    (root / "step-00000009").symlink_to(unfinished)
    clear_unfinished(str(root))
    prune(str(root))
    assert sorted(os.listdir(root)) == ["step-00000002", "step-00000003"]
    assert (target / MANIFEST).is_file() and (unfinished / MARKER).is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"seed": 7}, "hash: does not fit the content"), ({"step": 5}, "hash: does not fit the content")],
    ids=["seed", "step"],
)
def test_a_changed_manifest_is_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    path = committed(tmp_path, 2, make_plan("dp=2")) / MANIFEST
    assert newest(str(tmp_path))[1].step == 2
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=message):
        newest(str(tmp_path))


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    committed(tmp_path, 2, make_plan("dp=2")).rename(tmp_path / "step-00000004")
    with pytest.raises(ConfigError, match="step: differs from the name of the folder; found 2; allowed: 4"):
        newest(str(tmp_path))


def test_another_seed_than_the_checkpoints_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    committed(root, 2, make_plan("dp=2"))
    words = ["train", saved_plan(tmp_path), "--steps", "3", "--checkpoint", str(root), "--resume"]
    assert main([*words, "--seed", "1"]) == 2
    assert "--seed: differs from the checkpoint; found 1; allowed: 0, or no --seed" in capsys.readouterr().err


@pytest.mark.parametrize("last", range(5))
def test_remains_of_a_removal_are_recognised_as_ours(tmp_path: Path, last: int) -> None:
    """The marker is removed last: a process that ends between any two calls leaves a folder that the next run
    removes."""
    calls = [0]

    def counted(original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] > last:
                raise KeyboardInterrupt
            return original(*arguments, **named)

        return call

    for step in (1, 2, 3):
        committed(tmp_path, step, make_plan("dp=2"))
    with (
        contextlib.suppress(KeyboardInterrupt),
        patch("os.unlink", counted(os.unlink)),
        patch("os.rmdir", counted(os.rmdir)),
    ):
        prune(str(tmp_path))
    clear_unfinished(str(tmp_path))
    assert finished(str(tmp_path)) == ([1, 2, 3] if last == 0 else [2, 3])
    assert len(os.listdir(tmp_path)) == len(finished(str(tmp_path)))


def saves_apart(report: Report, plan: Plan, root: str) -> None:
    """Each rank has its own folder of the same name, as on hosts without a shared filesystem."""
    rank = torch.distributed.get_rank()
    job = parallelize(whole_module(plan.model, 0), plan)
    job.step(batches(plan, 0).batch(0))
    try:
        AsyncCheckpoint(job, f"{root}/{rank}", step=1, seed=0, data="synthetic").wait()
    except ConfigError:
        torch.distributed.barrier()  # the first error ends the pool: wait until all have cleaned up
        raise


def test_a_checkpoint_needs_all_parts_visible_to_rank_0(team: WorkerPool, tmp_path: Path) -> None:
    plan = make_plan("dp=2,zero_stage=1")
    with pytest.raises(ConfigError, match="a folder that all hosts share") as refused:
        team.run(2, saves_apart, plan, str(tmp_path))
    text = str(refused.value)
    assert "__1_0.distcp" in text and "written by rank 1 on " in text and "found nothing" in text
    assert [os.listdir(tmp_path / rank) for rank in "01"] == [[], []]


def test_a_part_that_is_too_short_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    check_visible(str(tmp_path), [{"a": 4}], ["here"])
    with pytest.raises(ConfigError, match="written by rank 0 on here; found 4 bytes"):
        check_visible(str(tmp_path), [{"a": 5}], ["here"])


def cannot_load(report: Report, plan: Plan, folder: str) -> str:
    try:
        load(parallelize(whole_module(plan.model, 5), plan), folder)
    except ConfigError as error:
        return str(error)
    return ""


def saves_once(report: Report, plan: Plan, root: str) -> None:
    job = parallelize(whole_module(plan.model, 0), plan)
    job.step(batches(plan, 0).batch(0))
    AsyncCheckpoint(job, root, step=1, seed=0, data="synthetic").wait()


def test_an_unreadable_checkpoint_is_a_one_line_error_on_every_rank(team: WorkerPool, tmp_path: Path) -> None:
    plan = make_plan("dp=2,zero_stage=1")
    team.run(2, saves_once, plan, str(tmp_path))
    folder = folder_of(str(tmp_path), 1)
    os.unlink(os.path.join(folder, "__1_0.distcp"))
    for message in team.run(2, cannot_load, plan, folder):
        assert (
            message.startswith(f"{folder}/__1_0.distcp: cannot be read: no such file") and "\n" not in message
        )
    with (
        patch("shardwise.runtime.checkpoint.resumable", lambda *_: (folder, None)),
        pytest.raises(ConfigError, match=r"__1_0\.distcp: cannot be read: no such file"),
    ):
        export(plan, str(tmp_path), str(tmp_path / "out"))
    shutil.rmtree(folder)
    for message in team.run(2, cannot_load, plan, folder):
        assert message.startswith(folder) and "cannot be read" in message


def test_a_full_disk_is_a_one_line_error_and_leaves_nothing(tmp_path: Path) -> None:
    """No file may grow beyond 100,000 bytes, as on a full disk, where PyTorch reports a file that ends too
    early. The run can be resumed, as the next line says."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    root = tmp_path / "ck"
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", saved_plan(tmp_path), "--steps", "2", "--checkpoint",
         str(root), "--lr", "3e-5"],
        capture_output=True, text=True, check=False, timeout=600, preexec_fn=limit,
    )  # fmt: skip
    assert ran.returncode == 2
    message = [line for line in ran.stderr.splitlines() if not line.startswith("step ")]
    assert message[0] == (
        f"shardwise: error: {root}/step-00000002: --checkpoint: cannot be written: file too large"
    )
    assert message[1].startswith("  to resume from the beginning: shardwise train ") and len(message) == 2
    assert os.listdir(root) == [LOCK_FILE]


def trained_on(report: Report, plan: Plan, options: TrainOptions) -> None:
    train(report, plan, options)


def test_data_is_identified_by_its_content(team: WorkerPool, tmp_path: Path) -> None:
    """A run resumes with a copy of the data under another name, but not with a shorter file, other data, or
    an earlier order of samples."""
    plan = make_plan("dp=2")
    data, root = tmp_path / "tokens.bin", str(tmp_path / "ck")
    np.random.default_rng(0).integers(0, 40, 33 * 40, dtype="<u2").tofile(data)
    options = TrainOptions(steps=1, data=str(data), checkpoint=root)
    team.run(2, trained_on, plan, options)
    manifest = newest(root)[1]
    assert manifest.content is not None and manifest.content.nbytes == 2 * 33 * 40
    copy = tmp_path / "elsewhere.bin"
    copy.write_bytes(data.read_bytes())
    longer = replace(options, steps=2, data=str(copy))
    assert resumed_options(longer, plan).start == 1
    copy.write_bytes(data.read_bytes()[:-64])
    with pytest.raises(ConfigError, match="--data: differs from the checkpoint's data; found 2,576 bytes"):
        resumed_options(longer, plan)
    with pytest.raises(ConfigError, match="--data: differs from the checkpoint; found synthetic"):
        resumed_options(replace(longer, data="synthetic"), plan)
    path = Path(newest(root)[0]) / MANIFEST
    document = json.loads(path.read_text())
    del document["content"], document["graph"], document["hash"]
    path.write_text(json.dumps({**document, "version": 1}))
    with pytest.raises(ConfigError, match="has an order of samples that this version"):
        resumed_options(replace(options, steps=2), plan)


@pytest.mark.parametrize("version", [1, 2])
def test_a_manifest_of_an_earlier_version_resumes_with_synthetic_data(tmp_path: Path, version: int) -> None:
    """As those versions wrote it: without graphs, and the first without the identity of data."""
    plan = make_plan("dp=2")
    path = committed(tmp_path, 2, plan) / MANIFEST
    document = json.loads(path.read_text())
    del document["graph"], document["hash"]
    if version == 1:
        del document["content"]
    path.write_text(json.dumps({**document, "version": version}))
    options = TrainOptions(steps=3, checkpoint=str(tmp_path))
    assert resumed_options(options, plan).start == 2
    path.write_text(json.dumps({**document, "version": version, "graph": "sha256:0"}))
    with pytest.raises(ConfigError, match="graph: is not a known key"):
        resumed_options(options, plan)


@pytest.mark.parametrize("changes", [{"graph": "sha256:0"}, {"model": None}])
def test_a_manifest_is_of_a_model_or_of_a_graph(tmp_path: Path, changes: dict[str, Any]) -> None:
    committed(tmp_path, 2, make_plan("dp=2"), **changes)
    with pytest.raises(ConfigError, match="model: and graph are both given, or neither"):
        newest(str(tmp_path))
