"""`--set`: options of the software in the card, the plan file, the answer and the commands that follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.plans import read_plan

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

JOB = ("llama-3.1-8b", "--cluster", "1x8xA100-80G", "--seq-len", "4096", "--global-batch-size", "32")
MEGATRON = ("--target", "megatron-lm-0.19")
STRATEGY = ("--strategy", "tp=2,zero_stage=1,sequence_parallel=yes")


def evaluated(run: Run, *words: str) -> Any:
    ran = run("evaluate", *JOB, *STRATEGY, *words, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_options_change_the_prediction_of_a_strategy(run: Run) -> None:
    any_, on, off = (
        evaluated(run, *words)["result"]
        for words in ((), MEGATRON, (*MEGATRON, "--set", "tp_comm_overlap=off"))
    )
    # Megatron-LM has it on, unless it is off; so has a plan without a target.
    assert any_["strategy"]["options"] == on["strategy"]["options"] == {"tp_comm_overlap": "on"}
    assert off["strategy"]["options"] == {"tp_comm_overlap": "off"}
    assert on["step_time_s"] == any_["step_time_s"] < off["step_time_s"]


def test_gradients_in_16_bits_take_half_the_bytes(run: Run) -> None:
    fp32, bf16 = (
        evaluated(run, *MEGATRON, "--set", f"grad_reduce_dtype={dtype}")["result"]
        for dtype in ("fp32", "bf16")
    )
    assert bf16["memory"]["gradients"] == fp32["memory"]["gradients"] / 2
    assert bf16["breakdown"]["gradient_reduction"] <= fp32["breakdown"]["gradient_reduction"]


def test_moments_in_16_bits_take_half_the_bytes_and_remainders_too(run: Run) -> None:
    fp32, bf16 = (
        evaluated(run, *MEGATRON, "--set", f"moment_dtype={dtype}")["result"] for dtype in ("fp32", "bf16")
    )
    assert bf16["memory"]["optimizer"] == fp32["memory"]["optimizer"] / 2  # 2 + 2 * 2 B of 4 + 2 * 4 B


@pytest.mark.slow
def test_a_plan_shows_its_options_and_keeps_them(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    chosen = "grad_reduce_dtype=bf16,moment_dtype=bf16"
    ran = run("plan", *JOB, *MEGATRON, "--set", chosen, "--fix", "tp=2", "--save", str(path))
    assert ran.code == 0
    line = "options       grad_reduce_dtype bf16 · moment_dtype bf16"
    assert line in ran.out and "--tp-comm-overlap" in ran.out and f"--set {chosen}" in ran.out
    plan = read_plan(str(path))
    assert plan.question.options == {"grad_reduce_dtype": "bf16", "moment_dtype": "bf16"}
    assert plan.options == {"tp_comm_overlap": "on", **plan.question.options}
    assert run("check", str(path)).code == 0
    assert run("simulate", str(path)).code == 0
    out = tmp_path / "run"
    assert run("export", str(path), "--to", "megatron-lm-0.19", "--out", str(out)).code == 0
    flags = (out / "megatron-lm.args").read_text().splitlines()
    assert {"--tp-comm-overlap", "--grad-reduce-in-bf16", "--use-precision-aware-optimizer"} <= set(flags)
    assert {"--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16", "--use-distributed-optimizer"} <= set(flags)


@pytest.mark.parametrize(
    ("words", "key", "text"),
    [
        (("--set", "frobnicate=on"), "--set", "is not an option of any target; found 'frobnicate'"),
        (("--set", "tp_com_overlap=on"), "--set", "did you mean tp_comm_overlap?"),
        (("--set", "tp_comm_overlap=maybe"), "--set.tp_comm_overlap", "on, off"),
        (("--set", "tp_comm_overlap"), "--set", "NAME=VALUE"),
        (("--target", "fsdp2", "--set", "moment_dtype=bf16"), "--set.moment_dtype", "megatron-lm-0.19"),
        ((*MEGATRON, "--set", "moment_dtype=bf16", "--optimizer", "sgd"), "--optimizer", "adamw"),
        ((*MEGATRON, "--set", "offload_modules=moe_act"), "--set.offload_modules", "qkv_linear+core_attn"),
        ((*MEGATRON, "--set", "offload_modules=attn_proj"), "--set.offload_modules", "joined by +"),
        ((*MEGATRON, "--set", "offload_modules=mlp"), "--set.offload_modules", "core_attn"),
        ((*MEGATRON, "--set", "grad_reduce_dtype=bf16", "--dtype", "fp16"), "--dtype", "moment"),
    ],
)
def test_what_cannot_be_set_is_refused(run: Run, words: tuple[str, ...], key: str, text: str) -> None:
    ran = run("evaluate", *JOB, *STRATEGY, *words)
    assert ran.code == 2 and f"{key}: " in ran.err
    assert text in ran.err or text == "moment"


def test_communication_of_experts_overlaps_where_it_is_set(run: Run) -> None:
    job = ("mixtral-8x7b", "--cluster", "4x8xH100-SXM", *JOB[3:], *MEGATRON)
    strategy = ("--strategy", "tp=2,ep=8,etp=1,zero_stage=1,sequence_parallel=yes", "--json")
    off, on = (
        json.loads(run("evaluate", *job, *strategy, *words).out)["result"]
        for words in ((), ("--set", "ep_overlap=on"))
    )
    assert "ep_overlap" not in off["strategy"]["options"]
    assert on["strategy"]["options"] == {"tp_comm_overlap": "on", "ep_overlap": "on"}
    assert on["breakdown"]["expert_communication"] < off["breakdown"]["expert_communication"]
    assert on["peak_memory_bytes"] == off["peak_memory_bytes"]
    refused = run("evaluate", *job, "--strategy", "ep=8,pp=2,dp=16", "--set", "ep_overlap=on")
    assert refused.code == 3 and "vpp" in refused.err


@pytest.mark.slow
def test_a_search_keeps_the_limits_of_an_option(run: Run, tmp_path: Path) -> None:
    """Without virtual stages, no plan with a pipeline overlaps the communication of experts."""
    path = tmp_path / "plan.yaml"
    job = ("mixtral-8x7b", "--cluster", "4x8xH100-SXM", *JOB[3:], *MEGATRON, "--fix", "vpp=1,ep=8")
    assert run("plan", *job, "--set", "ep_overlap=on", "--save", str(path)).code == 0
    plan = read_plan(str(path))
    assert plan.strategy.pp == 1 and plan.strategy.recompute != "full"
    assert plan.proof.rejected["target"] > 0
    assert run("check", str(path)).code == 0


@pytest.mark.slow
def test_a_frontier_has_options(run: Run, tmp_path: Path) -> None:
    words = (*MEGATRON, "--set", "grad_reduce_dtype=bf16", "--fix", "tp=4,pp=1", "--save", str(tmp_path))
    ran = run("frontier", *JOB, *words)
    assert ran.code == 0 and "options       tp_comm_overlap on · grad_reduce_dtype bf16" in ran.out
    first = read_plan(str(tmp_path / "devices-8-point-01.yaml"))
    assert first.options == {"tp_comm_overlap": "on", "grad_reduce_dtype": "bf16"}
    assert first.question.options == {"grad_reduce_dtype": "bf16"}


def test_moments_need_the_distributed_optimizer(run: Run) -> None:
    words = (*MEGATRON, "--set", "moment_dtype=bf16")
    ran = run("evaluate", *JOB, "--strategy", "tp=2,zero_stage=0", *words)
    assert ran.code == 3 and "optim_shard" in ran.err


def test_the_table_says_which_targets_lack_an_option(run: Run) -> None:
    ran = run("plan", *JOB, "--fix", "tp=2,pp=1", "--set", "moment_dtype=bf16", "--json")
    assert ran.code == 0
    rows = {row["target"]: row for row in json.loads(ran.out)["targets"]}
    assert "step_time_s" in rows["megatron-lm-0.19"] and "step_time_s" in rows["any"]
    assert rows["fsdp2"]["reason"] == "does not run moment_dtype=bf16"


def test_options_are_arguments_of_the_functions() -> None:
    given: dict[str, Any] = {"cluster": "1x8xA100-80G", "seq_len": 4096, "global_batch_size": 32}
    plan = sw.evaluate(
        "llama-3.1-8b", strategy="tp=2", target="megatron-lm", set={"grad_reduce_dtype": "bf16"}, **given
    )
    assert not plan.job.profile.reduce_in_fp32 and plan.options["grad_reduce_dtype"] == "bf16"
    with pytest.raises(ConfigError, match=r"set.grad_reduce_dtype: .*found 'int8'; allowed: bf16, fp32"):
        sw.evaluate("llama-3.1-8b", strategy="tp=2", set={"grad_reduce_dtype": "int8"}, **given)


def test_an_exported_plan_has_its_options_or_is_refused(run: Run, tmp_path: Path) -> None:
    """A plan for any target is priced again with its options by the target that has them."""
    path, out = tmp_path / "plan.yaml", tmp_path / "run"
    words = ("--set", "moment_dtype=bf16", "--save", str(path))
    assert run("evaluate", *JOB, "--strategy", "tp=1,zero_stage=3", *words).code == 0
    refused = run("export", str(path), "--to", "fsdp2", "--out", str(out))
    assert refused.code == 2 and "moment_dtype" in refused.err and "megatron-lm-0.19" in refused.err
    assert run("evaluate", *JOB, "--strategy", "tp=1,zero_stage=1", *words).code == 0
    assert run("export", str(path), "--to", "megatron-lm", "--out", str(out)).code == 0
    assert "--exp-avg-dtype bf16\n" in (out / "megatron-lm.args").read_text()


def test_options_of_a_named_target_are_its_own(run: Run) -> None:
    # Eager PyTorch has 12 B a logit, a fused loss 2 B: 4096 x 128,256 of them.
    job = ("llama-3.1-8b", "--cluster", "1x8xH100-SXM", "--seq-len", "4096", "--global-batch-size", "8")
    words = ("--strategy", "zero_stage=3,micro_batch_size=1", "--json")
    peaks, temporaries = {}, {}
    for target, loss in (
        ("fsdp2", "eager"),
        ("fsdp2", "fused"),
        ("deepspeed", "eager"),
        ("deepspeed", "fused"),
    ):
        ran = run("evaluate", *job, *words, "--target", target, "--set", f"loss={loss},attention=efficient")
        assert ran.code == 0, ran.err
        peaks[target, loss] = json.loads(ran.out)["result"]["peak_memory_bytes"]["allocated"]
        temporaries[target, loss] = json.loads(ran.out)["result"]["memory"]["temporaries"]
    saved = 10 * 4096 * 128_256
    assert peaks["fsdp2", "eager"] - peaks["fsdp2", "fused"] == pytest.approx(saved)
    # With a fused loss the peak of DeepSpeed is where it reduces the head: a copy of a bucket (1 GB),
    # and the gradients of the head and the last norm, 2 B each, instead of the temporaries of the loss.
    at_head = 1e9 + 2 * (128_256 * 4096 + 4096)
    later = at_head - temporaries["deepspeed", "fused"]
    assert peaks["deepspeed", "eager"] - peaks["deepspeed", "fused"] == pytest.approx(saved - later)
    refused = run("evaluate", *job, *words, "--target", "megatron-lm", "--set", "loss=fused")
    assert refused.code == 2 and "is no option of Megatron-LM" in refused.err


@pytest.mark.parametrize(("modules", "is_warned"), [("core_attn+layernorm", True), ("mlp", False)])
def test_the_card_says_where_fused_norms_need_more_memory(run: Run, modules: str, is_warned: bool) -> None:
    """Transformer Engine, which the exported flags use, drops nothing for layernorm on a dense model."""
    question = ("llama-3.1-8b", "--cluster", "1x8xH100-SXM", "--seq-len", "4096", "--global-batch-size", "64")
    strategy = f"tp=2,zero_stage=1,recompute=selective,recompute_modules={modules}"
    ran = run("evaluate", *question, "--target", "megatron-lm-0.19", "--strategy", strategy)
    assert ran.code == 0 and ("needs more memory" in " ".join(ran.out.split())) is is_warned
