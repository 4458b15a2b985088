"""`plan` decides about `ep_overlap` where `--set` does not, and its commands repeat the decision."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.unit.targets.small_plans import MIXTRAL

from shardwise.plans import plan_document, read_plan
from shardwise_verify import check_document

if TYPE_CHECKING:
    from tests.unit.app.conftest import Ran, Run

CONFIG = {**MIXTRAL, "hidden_size": 4096, "intermediate_size": 8192, "num_local_experts": 16}


def document(ran: Ran) -> Any:
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


@pytest.fixture
def question(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), "utf-8")
    return (str(path), "--cluster", "2x4xA100-80G", "--seq-len", "1024", "--global-batch-size", "16")


def test_the_option_is_chosen_and_fixed_by_set(run: Run, question: tuple[str, ...], tmp_path: Path) -> None:
    argv = ("plan", *question, "--target", "megatron-lm-0.19", "--use-all", "--top", "0", "--tolerance", "0")
    path = str(tmp_path / "plan.yaml")
    found = document(run(*argv, "--json", "--save", path))
    assert found["best"]["strategy"]["options"]["ep_overlap"] == "on"
    others = found["certificate"]["other_options"]
    assert {"ep_overlap": "off"} in [one["options"] for one in others]
    off, on = (document(run(*argv, "--json", "--set", f"ep_overlap={value}")) for value in ("off", "on"))
    assert "other_options" not in off["certificate"] and "other_options" not in on["certificate"]
    assert found["best"]["step_time_s"] == on["best"]["step_time_s"] < off["best"]["step_time_s"]
    assert run("check", path).code == 0


def test_the_card_names_it_and_its_command_predicts_the_same(run: Run, question: tuple[str, ...]) -> None:
    argv = (*question, "--target", "megatron-lm-0.19", "--use-all", "--tolerance", "0")
    ran = run("plan", *argv)
    assert " options       ep_overlap on" in ran.out and "with ep_overlap off: " in ran.out
    whole = ran.out.replace(" \\\n", " ")  # a shell continues such a line
    (command,) = [line for line in whole.splitlines() if "shardwise evaluate" in line]
    again = document(run(*shlex.split(command)[shlex.split(command).index("shardwise") + 1 :], "--json"))
    best = document(run("plan", *argv, "--json"))["best"]
    assert again["result"]["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-12)


def test_a_requested_overlap_of_tensor_parallelism_over_nodes_is_refused_by_name(run: Run) -> None:
    """8 tensor-parallel ranks on two nodes of 4 devices; by default nothing is checked."""
    question = ("llama-2-7b", "--cluster", "2x4xA100-80G", "--seq-len", "1024", "--global-batch-size", "16")
    argv = ("evaluate", *question, "--target", "megatron-lm-0.19", "--set", "tp_comm_overlap=on")
    refused = run(*argv, "--strategy", "tp=8")
    assert refused.code == 3 and "tp_overlap: with tp_comm_overlap=on, tp" in refused.err
    assert "found tp 8, sequence_parallel True, 4 devices with direct links" in refused.err
    assert run(*argv, "--strategy", "tp=4,zero_stage=1").code == 0
    assert run(*argv[:-1], "tp_comm_overlap=off", "--strategy", "tp=8").code == 0
    assert run(*argv[:-2], "--strategy", "tp=8").code == 0
    plan = ("plan", *argv[1:], "--fix", "tp=8,sequence_parallel=true")
    assert "tp_overlap" in run(*plan).err


def test_the_checker_refuses_it_too(run: Run, tmp_path: Path) -> None:
    question = ("llama-2-7b", "--cluster", "1x4xA100-80G", "--seq-len", "1024", "--global-batch-size", "16")
    argv = ("plan", *question, "--target", "megatron-lm-0.19", "--set", "tp_comm_overlap=on", "--use-all")
    path = str(tmp_path / "plan.yaml")
    assert run(*argv, "--fix", "tp=4,sequence_parallel=true", "--save", path).code == 0
    assert run("check", path).code == 0
    plan = read_plan(path)
    assert plan.job.profile.linked_devices == 4
    narrower = replace(plan, job=replace(plan.job, profile=replace(plan.job.profile, linked_devices=2)))
    failed = {check.name for check in check_document(plan_document(narrower)).checks if not check.ok}
    assert "strategy" in failed
