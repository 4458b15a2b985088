"""`train` with the plan of an operator graph: the user's own lines, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.property.layout_instances import mlp
from tests.runtime.graph_plans import by_rules, plan_with

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, OpNode, graph_text
from shardwise.plan import read_graph_plan, write_graph_plan
from shardwise.runtime import check_told

pytestmark = pytest.mark.xdist_group("runtime")

MLP = mlp(8, 6, 12, 5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_users_own_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    """Frontier, then train a point of it: the loss falls, and the log has a line for each step."""
    graph, points, log = tmp_path / "mlp.yaml", tmp_path / "points", tmp_path / "steps.jsonl"
    graph.write_text(graph_text(MLP))
    question = ["--cluster", "1x2xcpu", "--global-batch-size", "8", "--dtype", dtype, "--save", str(points)]
    assert main(["frontier", str(graph), *question]) == 0
    names = [name for name in json.loads((points / "frontier.json").read_text())["plans"] if name]
    on_two = next(name for name in names if read_graph_plan(str(points / name)).mesh.devices == 2)
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
    # Products of a step: 2 x 8 x (6 x 12 + 12 x 5) forth, the same again for the weights, and 2 x 8 x 12 x 5
    # for the hidden layer (the input has no gradient): 2,112 + 2,112 + 960 = 5,184 flop on two devices.
    peak = read_graph_plan(str(points / on_two)).cluster.classes["cpu"].peak_flop_per_s[dtype]
    for record in records:
        assert record["mfu"] == pytest.approx(5_184 / (record["step_time_s"] * 2 * peak))
        assert record["samples_per_s"] * record["step_time_s"] == pytest.approx(8)
    losses = [record["loss"] for record in records]
    assert sum(losses[-4:]) < sum(losses[:4]) - 0.2  # the same four batches


@pytest.mark.parametrize("option", [["--data", "x.bin"], ["--checkpoint", "runs"]])
def test_options_of_other_plans_are_refused(
    tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "p.yaml")
    write_graph_plan(path, plan_with(MLP, (2,), by_rules(MLP, (2,), lambda op: ("split b",))))
    assert main(["train", path, *option]) == 2
    assert option[0] in capsys.readouterr().err


def test_functions_that_a_graph_does_not_tell_are_refused() -> None:
    check_told(MLP)
    with pytest.raises(ConfigError, match="of operator relu does not say what is computed"):
        check_told(_with_function(MLP, function="scale"))
    check_told(_with_function(MLP, function="scale", number=0.5))


def _with_function(graph: OpGraph, **attributes: str | float) -> OpGraph:
    def changed(op: OpNode) -> OpNode:
        return replace(op, attributes=attributes) if op.kind == "elementwise" else op

    blocks = (replace(block, operators=tuple(map(changed, block.operators))) for block in graph.blocks)
    return replace(graph, blocks=tuple(blocks))
