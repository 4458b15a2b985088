"""The files of an export: bash reads the array as the flags, and both files have the same flags."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.targets.small_plans import LLAMA, MIXTRAL, PLAIN, small_plan

from shardwise.cluster import load_cluster
from shardwise.plans import Plan, plan_hash
from shardwise.targets import EXPORTERS
from shardwise.targets.megatron_lm import megatron_lm_flags

TARGET = "megatron-lm-0.19"

PLANS = {
    "layout": lambda: small_plan(LLAMA, "tp=2,pp=4,first_stage_layers=2,last_stage_layers=2"),
    "experts": lambda: small_plan(MIXTRAL, "ep=4"),
    "pattern": lambda: small_plan(
        PLAIN | {"bias": False, "experts": 4, "top_k": 2, "dense_layers": 1}, "ep=4"
    ),
}


def words_of(plan: Plan) -> list[str]:
    return [word for flag in megatron_lm_flags(plan) for word in flag]


@pytest.mark.parametrize("name", PLANS)
def test_bash_reads_the_flags(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]()
    script = tmp_path / "megatron-lm.sh"
    script.write_text(EXPORTERS[TARGET].files(plan)["megatron-lm.sh"])
    subprocess.run(["bash", "-n", str(script)], check=True)
    program = '. "$1"; printf "%s\\n" "$CUDA_DEVICE_MAX_CONNECTIONS" "${megatron_lm_args[@]}"'
    # Files whose names match the patterns of a layout do not change it.
    (tmp_path / "Et|tttt").touch()
    done = subprocess.run(
        ["bash", "-c", program, "bash", str(script)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["1", *words_of(plan)]


def test_xargs_reads_the_flags(tmp_path: Path) -> None:
    """As docs/how-to/megatron-lm.md passes them."""
    plan = PLANS["pattern"]()
    file = tmp_path / "megatron-lm.args"
    file.write_text(EXPORTERS[TARGET].files(plan)[file.name])
    program = "grep -v '^#' \"$1\" | xargs printf '%s\\n'"
    done = subprocess.run(
        ["bash", "-c", program, "bash", str(file)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == words_of(plan)


@pytest.mark.parametrize("name", PLANS)
def test_a_flag_a_line(name: str) -> None:
    plan = PLANS[name]()
    lines = EXPORTERS[TARGET].files(plan)["megatron-lm.args"].splitlines()
    own = [tuple(shlex.split(line)) for line in lines if line and not line.startswith("#")]
    assert tuple(own) == megatron_lm_flags(plan)
    assert shlex.split("\n".join(lines), comments=True) == words_of(plan)


def test_the_head_of_the_file_describes_it() -> None:
    plan = PLANS["layout"]()
    best = plan.best
    # 2^36 bytes are 64 GiB.
    peak = replace(best.peak_memory, device=2.0**36)
    plan = replace(plan, best=replace(best, step_time_s=1.5, band_s=(1.25, 2.0), peak_memory=peak))
    for text in EXPORTERS[TARGET].files(plan).values():
        assert "target megatron-lm-0.19 (Megatron-LM 0.19)" in text
        assert plan_hash(plan) in text
        assert "step time: 1.5 s (band 1.25 s to 2 s; profile megatron-2024)" in text
        assert "peak memory: 64 GiB of 79.2 GiB per device" in text
        assert "this file was not run on hardware" in text


def test_settings_of_a_run_are_comments() -> None:
    """Learning rate, iterations and data are not part of a plan; the routing loss comes with experts."""
    dense, experts = (EXPORTERS[TARGET].files(PLANS[name]()) for name in ("layout", "experts"))
    for text in (dense["megatron-lm.args"], dense["megatron-lm.sh"]):
        found = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
        assert {"--lr 3e-4", "--train-iters 100000", "--mock-data"} <= set(found)
        assert not any(line.startswith("--moe") for line in found)
    for name in ("megatron-lm.args", "megatron-lm.sh"):
        assert "--moe-aux-loss-coeff 0.01" in experts[name]


@pytest.mark.parametrize(
    ("cluster", "line"),
    [
        ("1x8xH100-SXM", "torchrun --standalone --nproc-per-node 8 -- pretrain_gpt.py"),
        ("2x8xH100-SXM", "torchrun --nnodes 2 --nproc-per-node 8 --master-port 29500 --node-rank"),
    ],
)
def test_the_command_that_starts_the_run(cluster: str, line: str) -> None:
    plan = small_plan(LLAMA, "", cluster=cluster)
    assert f"# {line}" in EXPORTERS[TARGET].files(plan)["megatron-lm.sh"]


def test_nodes_of_unlike_sizes_are_listed() -> None:
    plan = replace(
        small_plan(LLAMA, "dp=4", cluster="1x4xH100-SXM"), cluster=load_cluster("1x3xH100-SXM+1x1xH100-SXM")
    )
    text = EXPORTERS[TARGET].files(plan)["megatron-lm.sh"]
    assert "number of devices of the node: 3, 1." in text and '--nproc-per-node "$DEVICES"' in text
