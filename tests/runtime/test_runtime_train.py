"""The command `train`: the command lines of the docs, the log, refusals, and cleaning up."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.plans import make_plan

import shardwise
from shardwise.accuracy import compare
from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.plans import write_plan
from shardwise.runtime import RankLost, TrainOptions, WorkerPool, parallelize, reference_module, train
from shardwise.runtime.workers import HOST, Report, process_group
from shardwise.sim import COMMUNICATION, COMPUTE, Span, Trace

ROOT = Path(__file__).resolve().parents[2]


def shardwise_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardwise", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_the_documented_command_lines_work(tmp_path: Path) -> None:
    """Plans, then trains: the loss falls, and the log has a line for each step."""
    plan, log = str(tmp_path / "p.yaml"), tmp_path / "steps.jsonl"
    question = ["--cluster", "1x4xcpu", "--fix", "tp=2,pp=2", "--seq-len", "64", "--global-batch-size", "8",
                "--dtype", "fp32"]  # fmt: skip
    planned = shardwise_command("plan", str(ROOT / "examples/tiny.yaml"), *question, "--save", plan)
    assert planned.returncode == 0
    ran = shardwise_command("train", plan, "--steps", "20", "--log", str(log))
    assert ran.returncode == 0, ran.stderr
    assert "trained" in ran.stdout and "predicted" in ran.stdout
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 21))
    assert [record["tokens"] for record in records] == [512 * step for step in range(1, 21)]
    assert set(records[0]) == {
        "step", "loss", "gradient_norm", "step_time_s", "exposed_communication_s", "predicted_s", "tokens",
        "tokens_per_s", "mfu",
    }  # fmt: skip
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
    for record in records:
        assert 0.0 < record["exposed_communication_s"] < record["step_time_s"]
        assert record["tokens_per_s"] * record["step_time_s"] == pytest.approx(512)
        assert 0.0 < record["mfu"] < 1.0
    last = ran.stderr.splitlines()[-1]
    assert last.startswith("step 20/20 · loss ")
    assert re.search(r"tokens/s · MFU [0-9.]+ % · .* \([0-9.]+ % exposed communication\), predicted ", last)


def saved(tmp_path: Path, text: str, **changes: Any) -> str:
    path = str(tmp_path / "plan.yaml")
    write_plan(path, make_plan(text, **changes))
    return path


@pytest.mark.parametrize(
    ("text", "changes", "named"),
    [
        ("pp=2,schedule=zb_h1,offload=both,micro_batch_size=1", {}, "best.strategy.offload"),
        ("pp=2,dp=2,schedule=zb_h1,zero_stage=2,micro_batch_size=1", {}, "best.strategy.grad_shard"),
        ("dp=2", {"optimizer": "muon"}, "job.optimizer"),
    ],
    ids=["offload", "sharded gradients", "muon"],
)
def test_an_unsupported_plan_is_refused_before_any_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, changes: dict[str, Any], named: str
) -> None:
    assert main(["train", saved(tmp_path, text, **changes)]) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"shardwise: error: {named}: is not supported by this runtime")
        and error.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--steps", "0"], "--steps"),
        (["--lr", "fast"], "--lr"),
        (["--data", "none.bin"], "none.bin"),
        (["--log", "no/such/folder/x"], "--log"),
    ],
)
def test_bad_options_are_one_line_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["train", saved(tmp_path, "dp=2"), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shardwise: error: ") and named in error and error.count("\n") == 1


def test_a_changed_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(saved(tmp_path, "dp=2"))
    path.write_text(path.read_text().replace("global_batch_size: 8", "global_batch_size: 16"))
    assert main(["train", str(path)]) == 2
    assert "hash: does not match the content" in capsys.readouterr().err


def _refused(report: Report, plan: Any, model: Any) -> str:
    try:
        parallelize(reference_module(model), plan)
    except ConfigError as error:
        return str(error)
    return ""


def test_another_model_and_another_number_of_processes_are_refused(team: WorkerPool) -> None:
    plan, other = make_plan("dp=2"), make_plan("dp=2", model="gpt")
    assert "is not the plan's model" in team.run(2, _refused, plan, other.model)[0]
    assert "another number of processes" in team.run(4, _refused, plan, plan.model)[3]


def test_a_module_that_is_no_reference_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a whole reference module"):
        parallelize(torch.nn.Linear(2, 2), make_plan("tp=1"))


def test_the_package_offers_parallelize() -> None:
    assert shardwise.parallelize is parallelize
    with pytest.raises(AttributeError):
        shardwise.nothing  # noqa: B018


@pytest.mark.parametrize(
    "text", ["pp=2,schedule=interleaved_1f1b,vpp=2,micro_batch_size=2", "dp=2,micro_batch_size=2"]
)
def test_a_trace_shows_the_actions_of_the_plan_in_its_order(team: WorkerPool, text: str) -> None:
    plan = make_plan(text)
    options = TrainOptions(steps=2, is_traced=True)
    for rank, spans in enumerate(team.run(2, train, plan, options)):
        assert {span.rank for span in spans} == {rank}
        computed = [span.name for span in spans if span.track == COMPUTE]
        row = plan.schedules[0].ranks[rank if plan.best.strategy.pp > 1 else 0]
        assert computed == [*map(str, row), "optimizer"]
        talked = {span.name for span in spans if span.track == COMMUNICATION}
        assert talked >= ({"send", "recv"} if plan.best.strategy.pp > 1 else {"all_reduce"})
        # no reduction of gradients before the last backward of ZeRO 0
        sums = [span.start_s for span in spans if span.name == "all_reduce"]
        last = max(span.start_s for span in spans if span.name == str(row[-1]))
        assert min(sums) > last


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("tp=2,micro_batch_size=2", {"tensor"}),
        ("dp=2,zero_stage=3,micro_batch_size=2", {"parameter_gathering", "gradient_reduction"}),
        ("pp=2,micro_batch_size=2", set()),
    ],
)
def test_measured_communication_is_that_of_the_plan(team: WorkerPool, text: str, inside: set[str]) -> None:
    """Collectives run during the actions of a micro-batch exactly where the plan has such communication, and
    the parts of the critical rank sum to the step. How long they take depends on the machine."""
    plan = make_plan(text)
    by_rank = team.run(2, train, plan, TrainOptions(steps=2, is_traced=True))
    found = compare(plan, Trace(spans=tuple(span for spans in by_rank for span in spans)))
    total_s = {name: one.total_s for name, one in found.parts.communication.items()}
    named = ("tensor", "context", "expert", "parameter_gathering", "gradient_reduction")
    assert {name for name in named if total_s[name] > 0.0} == inside
    for times in (found.predicted[found.critical], found.measured[found.critical]):
        assert times.communication_s is not None and times.idle_s is not None
        assert times.communication_s > 0.0 <= times.idle_s
        assert times.communication_s + times.idle_s < times.step_s
    collectives = measured_collectives(by_rank[found.parts.rank])
    assert bool(collectives) == bool(inside)


def measured_collectives(spans: Sequence[Span]) -> list[str]:
    """The collectives that begin during an action."""
    actions = [span for span in spans if span.track == COMPUTE and span.name != "optimizer"]
    return [
        span.name
        for span in spans
        if span.track == COMMUNICATION
        and span.name.isidentifier()
        and span.name not in ("send", "recv")
        and any(one.start_s <= span.start_s < one.finish_s for one in actions)
    ]


def test_the_trace_file_has_a_process_for_each_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "measured.json"
    plan = saved(tmp_path, "pp=2,schedule=1f1b")
    assert main(["train", plan, "--steps", "1", "--trace", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert names == {"rank 0", "rank 1"}
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0.0
    capsys.readouterr()
    assert main(["compare", plan, str(trace)]) == 0
    assert "every rank ran its actions as planned" in capsys.readouterr().out


def test_too_few_processes_of_torchrun_are_a_one_line_error(tmp_path: Path) -> None:
    """Torchrun starts two processes for a plan with four ranks: one of them reports it. (A successful run
    under torchrun is in test_runtime_launch.)"""
    plan = str(tmp_path / "four.yaml")
    write_plan(plan, make_plan("dp=4"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardwise"]
    refused = subprocess.run(
        [*torchrun, "train", plan], capture_output=True, text=True, check=False, timeout=600
    )
    assert refused.returncode != 0
    assert refused.stderr.count("shardwise: error: plan: is for another number of processes") == 1


def _dies(report: Report, rank: int) -> None:
    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def _fails(report: Report) -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("a reason")
    torch.distributed.barrier()


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _started_by(report: Report) -> int:
    return os.getppid()


def test_ranks_are_copies_of_one_process(team: WorkerPool) -> None:
    """On Linux they are forks of a server process that has imported what they need. On other systems this
    process starts them, and each imports it again."""
    (server,) = set(team.run(2, _started_by))
    assert (server != os.getpid()) == (sys.platform == "linux")
    if sys.platform == "linux":
        assert b"shardwise.runtime" in Path(f"/proc/{server}/cmdline").read_bytes()


def test_a_killed_rank_ends_all_and_is_named() -> None:
    with WorkerPool(2) as team:
        assert team.run(2, _answer, 5) == [5, 6]
        pids = team.pids
        with pytest.raises(RankLost, match="rank 1 was ended by signal 9"):
            team.run(2, _dies, 1)
        assert all(map(is_gone, pids))
        with pytest.raises(RankLost, match="rank 1 failed: ValueError: a reason"):
            team.run(2, _fails)
        assert team.pids == ()


def _answer(report: Report, number: int) -> int:
    return number + torch.distributed.get_rank()


PROGRAM_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from shardwise.app.cli.main import main
sys.exit(main(["train", sys.argv[1]]))
"""


def test_without_torch_the_error_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITHOUT_TORCH, saved(tmp_path, "dp=2")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "pip install 'shardwise[torch]'" in done.stderr


def test_importing_the_package_imports_no_torch() -> None:
    program = "import shardwise, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def ended(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | (environment or {}),
    )


def test_a_newer_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(saved(tmp_path, "dp=2"))
    path.write_text(path.read_text().replace("version: 2\n", "version: 3\n", 1))
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert "version: " in error and "newer" in error and error.count("\n") == 1


def test_a_data_file_that_is_too_short_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "tokens.bin"
    data.write_bytes(bytes(2 * 32))  # a sequence, and no token after it
    assert main(["train", saved(tmp_path, "dp=2"), "--data", str(data)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shardwise: error: {data}: is too short; found 32 tokens; allowed: at least 33")
    assert error.count("\n") == 1


def test_without_gloo_an_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.runtime.workers.distributed.is_gloo_available", lambda: False)
    with pytest.raises(ConfigError, match="torch: has no gloo"), process_group(0, 1, 0, name="none"):
        pass


def test_a_port_in_use_is_a_one_line_error(tmp_path: Path) -> None:
    """The port on which rank 0 of two has to listen is used by another program."""
    with socket.create_server((HOST, 0)) as other:
        port = str(other.getsockname()[1])
        variables = {
            "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": HOST, "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "none",
        }  # fmt: skip
        plan = saved(tmp_path, "dp=2")
        done = ended([sys.executable, "-m", "shardwise", "train", plan], variables)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("shardwise")]
    assert len(lines) == 1 and "MASTER_PORT: rendezvous of the processes failed" in lines[0]
    assert f"{HOST}:{port}" in lines[0] and "Traceback" not in done.stderr


def dies_at_start(rank: int, port: int, threads: int, connection: Any) -> None:
    """Replaces a worker's main loop: rank 1 ends before it receives any work."""
    if rank == 1:
        os._exit(7)
    connection.recv()
    signal.pause()


def test_a_rank_killed_at_start_ends_all_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shardwise.runtime.workers._serve", dies_at_start)
    before = {child.pid for child in multiprocessing.active_children()}
    assert main(["train", saved(tmp_path, "dp=2")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "shardwise: error: rank 1 ended with code 7 before the first step; the other ranks"
    )
    assert error.count("\n") == 1
    assert {child.pid for child in multiprocessing.active_children()} <= before
