"""The command `launch`: its output, its files, its child process, and its errors."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from tests.property.layout_instances import mlp
from tests.runtime.graph_plans import by_rules, plan_with
from tests.runtime.plans import make_plan
from tests.runtime.uneven_plans import make_uneven
from tests.unit.app.conftest import Run

from shardwise.cluster import load_cluster
from shardwise.graph import Block
from shardwise.plans import write_plan


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a plan for four processes, from its folder."""
    monkeypatch.chdir(tmp_path)
    write_plan("p.yaml", make_plan("tp=2,pp=2,micro_batch_size=2"))
    return "p.yaml"


def test_torchrun_is_printed(run: Run, plan: str) -> None:
    ran = run("launch", plan, "--with", "torchrun", "--print", "--", "--steps", "5", "--log", "a b.jsonl")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == (
        "torchrun --standalone --nproc-per-node 4 -m -- shardwise train p.yaml --steps 5 --log 'a b.jsonl'\n"
    )
    assert os.listdir() == ["p.yaml"]


@pytest.mark.parametrize(
    ("launcher", "mark"),
    [("slurm", "#SBATCH --nodes=1"), ("ray", "HOSTS = 1"), ("k8s", "- /etc/shardwise/plan.yaml")],
)
def test_a_file_is_printed_and_nothing_is_written(run: Run, plan: str, launcher: str, mark: str) -> None:
    ran = run("launch", plan, "--with", launcher, "--print", "--image", "me/it", "--", "--steps", "5")
    assert (ran.code, ran.err) == (0, "")
    assert mark in ran.out and "--steps" in ran.out
    assert os.listdir() == ["p.yaml"]


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("torchrun", "torchrun --standalone --nproc-per-node 4 -m -- shardwise train p.yaml"),
        ("slurm", "sbatch p.sbatch"),
        ("ray", "ray job submit --working-dir . -- python p.ray.py"),
        ("k8s", "kubectl apply -f p.k8s.yaml"),
    ],
)
def test_a_launcher_that_is_not_installed_is_named_with_its_command(
    run: Run, plan: str, monkeypatch: pytest.MonkeyPatch, missing: str, line: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ran = run("launch", plan, "--with", missing, "--image", "me/it")
    assert (ran.code, ran.out) == (2, "")
    *_, shown, error = ran.err.splitlines()
    assert shown == line
    assert error.startswith(f"shardwise: error: {line.split()[0]}: is not installed")
    assert all(name in ("p.yaml", line.split()[-1]) for name in os.listdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--with", "pbs"), "--with"),
        (("--with", "k8s", "--print"), "--image"),
        (("--with", "torchrun", "--host", "1"), "--host"),
        (("--with", "torchrun", "--port", "0"), "--port"),
        (("--with", "torchrun", "--print", "--", "--stps", "5"), "--stps"),
        (("--with", "torchrun", "--print", "--", "other.yaml"), "other.yaml"),
        (("--with", "torchrun", "--print", "--", "--steps", "abc"), "--steps"),
        (("--with", "slurm", "--print", "--", "--lr", "-1"), "--lr"),
        (("--with", "torchrun", "--print", "--", "--checkpoint-every", "0"), "--checkpoint-every"),
        (("--with", "torchrun", "--print", "--", "--adaptive"), "--adaptive: has no links to monitor"),
    ],
)
def test_an_impossible_launch_is_refused_in_one_line(
    run: Run, plan: str, arguments: tuple[str, ...], named: str
) -> None:
    ran = run("launch", plan, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1 and named in ran.err


def test_a_plan_that_train_refuses_is_not_launched(run: Run, plan: str) -> None:
    other = make_plan("tp=2")
    write_plan("offload.yaml", make_plan("pp=2,schedule=zb_h1,micro_batch_size=1,offload=both"))
    write_plan("fp16.yaml", replace(other, job=replace(other.job, dtype="fp16")))
    for name, field in (("offload.yaml", "best.strategy.offload"), ("fp16.yaml", "job.dtype")):
        ran = run("launch", name, "--with", "torchrun", "--print")
        assert (ran.code, ran.out) == (2, "")
        assert f"{field}: is not supported by this runtime" in ran.err and ran.err.count("\n") == 1
        assert ("as in plans of `plan --target shardwise`" in ran.err) == field.startswith("best.strategy")
    write_plan("u.yaml", make_uneven("5 tp2l4+3 l2 l2"))
    ran = run("launch", "u.yaml", "--with", "torchrun", "--print", "--", "--adaptive")
    assert ran.code == 2 and "--adaptive: is not supported for an uneven plan" in ran.err


def test_the_plan_of_a_graph_is_launched(run: Run, plan: str) -> None:
    """With the same launchers as other plans; whatever `train` does not support is refused here too."""
    graph = mlp(8, 6, 12, 5)
    write_plan("g.yaml", plan_with(graph, (2,), by_rules(graph, (2,), lambda op: ("split b",))))
    ran = run("launch", "g.yaml", "--with", "torchrun", "--print", "--", "--steps", "5")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "torchrun --standalone --nproc-per-node 2 -m -- shardwise train g.yaml --steps 5\n"
    for launcher, mark in (("slurm", "--job-name=shardwise-mlp"), ("k8s", "name: shardwise-mlp")):
        ran = run("launch", "g.yaml", "--with", launcher, "--print", "--image", "me/it")
        assert ran.code == 0 and mark in ran.out
    ran = run("launch", "g.yaml", "--with", "torchrun", "--print", "--", "--adaptive")
    assert (ran.code, ran.out) == (2, "") and ran.err.count("\n") == 1
    assert "--adaptive: is not supported for the plan of an operator graph" in ran.err
    undefined = replace(graph, blocks=tuple(map(_dropping, graph.blocks)))
    write_plan("d.yaml", plan_with(undefined, (2,), by_rules(undefined, (2,), lambda op: ("split b",))))
    ran = run("launch", "d.yaml", "--with", "slurm", "--print")
    assert (ran.code, ran.out) == (2, "") and ran.err.count("\n") == 1
    assert "does not define what is computed; found dropout" in ran.err


def _dropping(block: Block) -> Block:
    """The graph with a dropout in place of an elementwise operator."""
    incomplete = {"function": "dropout"}
    operators = (
        replace(op, attributes=incomplete) if op.kind == "elementwise" else op for op in block.operators
    )
    return replace(block, operators=tuple(operators))


def test_a_port_in_use_is_reported_before_torchrun_starts(run: Run, plan: str) -> None:
    two = replace(make_plan("tp=2"), cluster=load_cluster("2x1xcpu"))
    write_plan("two.yaml", two)
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = run("launch", "two.yaml", "--with", "torchrun", "--head", "localhost", "--port", port)
    assert (ran.code, ran.out) == (2, "") and ran.err.count("\n") == 1
    assert f"--port: cannot be opened: address already in use; found {port}" in ran.err


def test_a_file_that_is_no_plan_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n")
    ran = run("launch", str(path), "--with", "torchrun", "--print")
    assert ran.code == 2 and "schema" in ran.err


def test_an_uneven_plan_starts_as_many_processes_as_each_host_has(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uneven = replace(make_uneven("5 tp2l4+3 l2 l2"), cluster=load_cluster("1x2xcpu+2x1xcpu"))
    write_plan("u.yaml", uneven)
    ran = run("launch", "u.yaml", "--with", "torchrun", "--head", "h0", "--print", "--", "--steps", "5")
    assert (ran.code, ran.err) == (0, "")
    tail = "--master-port 29500 --node-rank {} --master-addr h0 -m -- shardwise train u.yaml --steps 5"
    assert ran.out.splitlines() == [
        f"torchrun --nnodes 3 --nproc-per-node {processes} {tail.format(host)}"
        for host, processes in enumerate((2, 1, 1))
    ]
    script = run("launch", "u.yaml", "--with", "slurm", "--print")
    assert (script.code, script.err) == (0, "")
    assert "#SBATCH hetjob" in script.out
    assert "--nproc-per-node 2" in script.out and "--nproc-per-node 1" in script.out
