"""`train` with a graph plan: the command lines of the docs, and refusals."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.property.layout_instances import chain, mlp
from tests.runtime.graph_plans import by_rules, plan_with, sampled_in_stages
from tests.runtime.plans import make_plan
from tests.runtime.test_runtime_checkpoint import workers_of
from tests.runtime.test_runtime_manifest import committed
from tests.sampling import sample_of

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, OpNode, graph_text
from shardwise.plans import Plan, read_plan, write_plan
from shardwise.runtime import check_computable
from shardwise.runtime.checkpoint import finished
from shardwise.runtime.weights import graph_weights_in

MLP = mlp(8, 6, 12, 5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_documented_command_lines_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    """Computes a frontier, then trains a point of it: the loss falls, and the log has a line for each
    step."""
    graph, points, log = tmp_path / "mlp.yaml", tmp_path / "points", tmp_path / "steps.jsonl"
    graph.write_text(graph_text(MLP))
    question = ["--cluster", "1x2xcpu", "--global-batch-size", "8", "--dtype", dtype, "--save", str(points)]
    assert main(["frontier", str(graph), *question]) == 0
    names = [name for name in json.loads((points / "frontier.json").read_text())["plans"] if name]
    on_two = next(name for name in names if read_plan(str(points / name)).mesh.devices == 2)
    capsys.readouterr()
    assert main(["train", str(points / on_two), "--steps", "40", "--lr", "0.03", "--log", str(log)]) == 0
    shown = capsys.readouterr()
    assert "trained" in shown.out and "predicted" in shown.out
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["samples"] for record in records] == [8 * step for step in range(1, 41)]
    assert set(records[0]) == {
        "step", "loss", "gradient_norm", "step_time_s", "exposed_communication_s", "predicted_s", "samples",
        "samples_per_s", "mfu",
    }  # fmt: skip
    # Matrix products of a step: 2 x 8 x (6 x 12 + 12 x 5) forward, the same again for the weights, and 2 x 8
    # x 12 x 5 for the hidden layer (the input has no gradient): 2,112 + 2,112 + 960 = 5,184 flop on two
    # devices.
    peak = read_plan(str(points / on_two)).cluster.classes["cpu"].peak_flop_per_s[dtype]
    for record in records:
        assert record["mfu"] == pytest.approx(5_184 / (record["step_time_s"] * 2 * peak))
        assert record["samples_per_s"] * record["step_time_s"] == pytest.approx(8)
    losses = [record["loss"] for record in records]
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.2  # the same four batches


def saved(path: Path, plan: Plan) -> str:
    write_plan(str(path), plan)
    return str(path)


def halves(graph: OpGraph = MLP) -> Plan:
    """Data parallelism on two processes."""
    return plan_with(graph, (2,), by_rules(graph, (2,), lambda op: ("split b",)))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--data", "{}/none"], "/none/x.npy: --data: cannot be read: no such file"),
        (["--adaptive"], "--adaptive: is not supported for the plan of an operator graph"),
        (["--resume"], "--resume: needs --checkpoint"),
        (["--export", "{}/e"], "--export: requires --checkpoint"),
        (["--checkpoint", "{}/none", "--resume"], "has no finished checkpoint"),
        (["--checkpoint", "{}/model", "--resume"], "is a checkpoint of another kind of plan"),
        (["--checkpoint", "{}/model"], "has checkpoints of an earlier run"),
        (["--checkpoint", "{}/model", "--resume", "--weights", "w"], "--weights: cannot be combined with"),
    ],
)
def test_a_refusal_is_one_line_and_leaves_no_folder(
    tmp_path: Path, options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    committed(tmp_path / "model", 2, make_plan("dp=2"))
    path = saved(tmp_path / "p.yaml", halves())
    assert main(["train", path, *(option.format(tmp_path) for option in options)]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "p.yaml"]


def test_a_model_does_not_resume_from_the_checkpoint_of_a_graph(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path / "ck")
    assert main(["train", saved(tmp_path / "p.yaml", halves()), "--steps", "1", "--checkpoint", root]) == 0
    capsys.readouterr()
    write_plan(str(tmp_path / "q.yaml"), make_plan("dp=2"))
    assert main(["train", str(tmp_path / "q.yaml"), "--checkpoint", root, "--resume"]) == 2
    error = capsys.readouterr().err
    assert "found the plan of an operator graph; allowed: a plan of a model" in error
    assert error.count("\n") == 1


def losses_of(log: Path) -> list[float]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def test_a_run_resumes_under_another_plan_and_appends_to_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Then its parameters are exported, and another run starts from them."""
    graph = chain(8, 6, 12, 5)
    first = saved(tmp_path / "p.yaml", halves(graph))
    second = saved(tmp_path / "q.yaml", next(sampled_in_stages(graph, (1,), (2,), 2, [0])))
    logs = [tmp_path / f"{name}.jsonl" for name in ("whole", "parts", "from")]
    root, out = str(tmp_path / "ck"), tmp_path / "exported"
    assert main(["train", first, "--steps", "6", "--log", str(logs[0])]) == 0
    common = ["--checkpoint", root, "--checkpoint-every", "2", "--log", str(logs[1])]
    assert main(["train", first, "--steps", "3", *common]) == 0
    assert main(["train", second, "--steps", "6", "--resume", *common, "--export", str(out)]) == 0
    assert losses_of(logs[1]) == pytest.approx(losses_of(logs[0]), rel=2e-5)
    assert losses_of(logs[1])[:3] == losses_of(logs[0])[:3]
    assert finished(root) == [4, 6]
    assert "6 steps of 8 samples" in capsys.readouterr().out
    written = load_file(out / "model.safetensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in written.items()}
    assert shapes == {
        "w_up": (6, 12), "b_up": (12,), "middle.0.scale": (12,), "middle.0.mix": (12, 12),
        "middle.1.scale": (12,), "middle.1.mix": (12, 12), "w_down": (12, 5),
    }  # fmt: skip
    assert {tensor.dtype for tensor in written.values()} == {torch.float32}
    value = graph_weights_in(str(out), graph)
    assert all(torch.equal(value(name, each.shape), each) for name, each in written.items())
    assert main(["train", first, "--weights", str(out), "--steps", "1", "--log", str(logs[2])]) == 0
    assert losses_of(logs[2])[0] < losses_of(logs[0])[0] - 0.01  # trained on this batch twice
    written["w_up"] = written["w_up"][:, :5].contiguous()
    save_file(written, out / "model.safetensors")
    assert main(["train", first, "--weights", str(out)]) == 2
    assert "w_up: does not have the model's shape; found (6, 5)" in capsys.readouterr().err
    del written["b_up"]
    save_file(written | {"w_up": torch.zeros(6, 12)}, out / "model.safetensors")
    assert main(["train", first, "--weights", str(out)]) == 2
    assert "b_up: has no such tensor" in capsys.readouterr().err


def takes_interrupts() -> None:
    """Restores the handler: a process started from a background job ignores interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("ending", sample_of([signal.SIGKILL, signal.SIGINT], [signal.SIGKILL]))
def test_an_interrupted_run_reports_how_to_resume(tmp_path: Path, ending: signal.Signals) -> None:
    """kill -9 of a rank without restarts, or Ctrl-C: one line names the cause, one has the command to resume.
    That run ends with the losses of an uninterrupted one."""
    path, log, whole = saved(tmp_path / "p.yaml", halves()), tmp_path / "l.jsonl", tmp_path / "w.jsonl"
    command = [sys.executable, "-m", "shardwise", "train", path, "--steps", "40", "--restarts", "0"]
    command += ["--checkpoint", str(tmp_path / "ck"), "--checkpoint-every", "2", "--log", str(log)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=takes_interrupts) as run:
        try:
            assert run.stderr is not None
            next(line for line in run.stderr if line.startswith("step 8/"))
            os.kill(workers_of(run.pid)[1] if ending == signal.SIGKILL else run.pid, ending)
            message = [line.rstrip() for line in run.stderr if not line.startswith("step ")]
            code = run.wait(timeout=60)
        finally:
            run.kill()
    assert code == (1 if ending == signal.SIGKILL else 130)
    what = "rank 1 was ended by signal 9" if ending == signal.SIGKILL else "interrupted"
    assert message[0].startswith(f"shardwise: error: {what} after step ") and len(message) == 2
    command_again = message[1].removeprefix("  to resume from the last checkpoint: shardwise ")
    assert main(shlex.split(command_again)) == 0
    assert main(["train", path, "--steps", "40", "--log", str(whole)]) == 0
    assert losses_of(log) == losses_of(whole)


def test_functions_that_a_graph_does_not_define_are_refused() -> None:
    check_computable(MLP)
    with pytest.raises(ConfigError, match="of operator relu does not define what is computed"):
        check_computable(_with_function(MLP, function="scale"))
    check_computable(_with_function(MLP, function="scale", number=0.5))


def _with_function(graph: OpGraph, **attributes: str | float) -> OpGraph:
    def changed(op: OpNode) -> OpNode:
        return replace(op, attributes=attributes) if op.kind == "elementwise" else op

    blocks = (replace(block, operators=tuple(map(changed, block.operators))) for block in graph.blocks)
    return replace(graph, blocks=tuple(blocks))
