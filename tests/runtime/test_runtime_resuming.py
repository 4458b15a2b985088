"""Resuming a run: the command that it prints is accepted, its log has every step once, and options that would
lose something or have no effect are refused."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from tests.runtime.plans import make_plan
from tests.runtime.test_runtime_manifest import committed, saved_plan

from shardwise.app.cli import training
from shardwise.app.cli.launched import COMMAND_VARIABLE, TORCHRUN_VARIABLE
from shardwise.app.cli.main import main
from shardwise.app.cli.output import Output
from shardwise.app.cli.training import resume_arguments, resume_lines
from shardwise.app.cli.training_run import TrainArguments, TrainingRun, resumed_log_bytes
from shardwise.errors import ConfigError
from shardwise.runtime import StepRecord, TrainOptions, workers


def arguments_of(arguments: list[str]) -> TrainArguments:
    """What `train` reads from these arguments."""
    found: list[TrainArguments] = []

    def trained(arguments: TrainArguments) -> Output:
        found.append(arguments)
        return Output()

    with patch.object(training, "trained", trained):
        assert main(["train", *arguments]) == 0
    return found[0]


@pytest.mark.parametrize("lr", ["3e-5", "1E-3", "1e-12", "0.00003", "1.234567890123456e-4", "2.5e+0", ".5"])
@pytest.mark.parametrize("is_saved", [False, True])
def test_the_command_to_resume_is_accepted(lr: str, is_saved: bool) -> None:
    arguments = arguments_of(
        ["p.yaml", "--lr", lr, "--steps", "7", "--seed", "3", "--checkpoint", "a folder",
         "--log", "l.jsonl", "--trace", "t.json", "--export", "e", "--restarts", "1",
         "--checkpoint-every", "5", "--data", "d.bin"]
    )  # fmt: skip
    assert arguments.lr == float(lr)
    options = TrainOptions(steps=7, seed=3, lr=arguments.lr, checkpoint="a folder")
    again = arguments_of(["p.yaml", *resume_arguments(arguments, options, is_saved=is_saved)])
    unchanged = (
        "path",
        "lr",
        "steps",
        "checkpoint",
        "log",
        "trace",
        "export",
        "restarts",
        "checkpoint_every",
        "data",
    )
    assert all(getattr(again, name) == getattr(arguments, name) for name in unchanged)
    assert again.resume is is_saved and (is_saved or again.seed == 3)


def run_in(root: Path, **changes: object) -> tuple[TrainingRun, TrainOptions]:
    arguments = TrainArguments(path="p.yaml", steps=4, lr=3e-5, seed=0, checkpoint=str(root), **changes)  # type: ignore[arg-type]
    plan = make_plan("dp=2")
    return TrainingRun(arguments=arguments, plan=plan), TrainOptions(steps=4, lr=3e-5, checkpoint=str(root))


def test_the_command_to_resume_names_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, options = run_in(tmp_path)
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    monkeypatch.delenv(TORCHRUN_VARIABLE, raising=False)
    (line,) = resume_lines(run, options)
    assert line.startswith("  to resume from the beginning: shardwise train p.yaml --data synthetic")
    committed(tmp_path, 2, run.plan)
    monkeypatch.setenv(TORCHRUN_VARIABLE, "x")
    (line,) = resume_lines(run, options)
    assert line.startswith(
        "  to resume from the last checkpoint, under the same launcher: shardwise train p.yaml"
    )
    monkeypatch.setenv(COMMAND_VARIABLE, "shardwise launch p.yaml --with torchrun")
    (line,) = resume_lines(run, options)
    command = line.removeprefix("  to resume from the last checkpoint: ")
    assert command.startswith("shardwise launch p.yaml --with torchrun -- --data ")
    assert arguments_of(["p.yaml", *shlex.split(command)[6:]]).resume
    monkeypatch.setenv(COMMAND_VARIABLE, "")
    committed(tmp_path, 3, make_plan("dp=2", model="gpt"))
    (line,) = resume_lines(run, options)
    assert line.startswith("  it cannot be resumed: ") and "model: differs from the plan" in line


def step_line(step: int) -> str:
    return json.dumps({"step": step, "loss": 1.0}) + "\n"


def test_a_log_keeps_the_steps_up_to_the_checkpoint(tmp_path: Path) -> None:
    log = tmp_path / "l.jsonl"
    assert resumed_log_bytes(str(log), 3) == 0
    log.write_text("".join(map(step_line, (1, 2, 3, 4, 5))))
    assert resumed_log_bytes(str(log), 3) == 3 * len(step_line(1))
    log.write_text(step_line(1) + step_line(2)[:-5])  # ended while it wrote
    assert resumed_log_bytes(str(log), 3) == len(step_line(1))
    for other in ("no log\n", "[1]\n", '{"loss": 1.0}\n', '{"step": "1"}\n'):
        log.write_text(step_line(1) + other)
        with pytest.raises(ConfigError, match=r"is not a log of train.*line 2 without a step"):
            resumed_log_bytes(str(log), 3)


def test_a_resumed_run_appends_to_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, log = saved_plan(tmp_path), tmp_path / "l.jsonl"
    common = ["train", plan, "--checkpoint", str(tmp_path / "ck"), "--log", str(log)]
    assert main([*common, "--steps", "2"]) == 0
    before = log.read_text()
    log.write_text(before + step_line(3))  # a step after the checkpoint, which is repeated
    assert main([*common, "--steps", "4", "--resume"]) == 0
    assert log.read_text().startswith(before)
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [1, 2, 3, 4]
    assert "loss" in json.loads(log.read_text().splitlines()[2]) and step_line(3) not in log.read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--log", "{}/x", "--trace", "{}/./x"], "--trace: is also the log"),
        (
            ["--checkpoint", "{}/used", "--resume", "--weights", "w"],
            "--weights: cannot be combined with --resume",
        ),
        (["--checkpoint", "{}/new", "--resume"], "has no finished checkpoint"),
        (["--checkpoint", "{}/new", "--data", "{}/p.yaml"], "p.yaml"),
        (["--checkpoint", "{}/used", "--export", "{}/new"], "has checkpoints of an earlier run"),
    ],
)
def test_a_refused_run_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    plan = saved_plan(tmp_path)
    committed(tmp_path / "used", 2, make_plan("dp=2"))
    assert main(["train", plan, *(option.format(tmp_path) for option in options)]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_sigterm_ends_a_run_as_the_keyboard_does(tmp_path: Path) -> None:
    """With a message and an exit code, and without files left in the temporary folder."""
    log = tmp_path / "l.jsonl"
    command = ["train", saved_plan(tmp_path), "--steps", "100000", "--log", str(log)]
    with (
        tempfile.TemporaryDirectory() as temporary,
        subprocess.Popen(
            [sys.executable, "-m", "shardwise", *command],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": temporary},
        ) as run,
    ):  # fmt: skip
        assert run.stderr is not None
        try:
            while not (log.exists() and log.read_text()):
                assert run.poll() is None, run.stderr.read()
                signal.sigtimedwait([], 0.05)
            run.send_signal(signal.SIGTERM)
            assert run.wait(timeout=60) == 143
        finally:
            run.kill()
        assert (
            run.stderr.read().splitlines()[-1] == "shardwise: error: interrupted before there was an answer"
        )
        assert list(Path(temporary).iterdir()) == []


@pytest.mark.parametrize("length", [workers.MAX_TEMPDIR_BYTES, workers.MAX_TEMPDIR_BYTES + 1])
def test_the_folder_of_temporary_files_may_have_a_long_name(tmp_path: Path, length: int) -> None:
    """Names of Unix sockets have a limit: the longest folder that a fork server can use, and one byte
    more."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        temporary = Path(short) / ("x" * (length - len(os.fsencode(short)) - 1))
        temporary.mkdir()
        run = subprocess.run(
            [sys.executable, "-m", "shardwise", "train", saved_plan(tmp_path), "--steps", "2"],
            capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(temporary)},
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert list(temporary.iterdir()) == []


def record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=1.0, gradient_norm=1.0, step_time_s=1.0, predicted_s=1.0, strategy=None)


def test_an_error_during_training_reports_how_to_resume(tmp_path: Path) -> None:
    run, options = run_in(tmp_path)
    error = ConfigError("cannot be written: no space left on device", file="x")
    assert len(training.refused(error, run, options)) == 1
    run.records.append(record(1))
    first, second = training.refused(error, run, options)
    assert first.endswith("no space left on device") and second.startswith("  to resume from the beginning: ")
