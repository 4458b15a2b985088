"""Reviews: faults that are planted in configurations are found, clean ones have none, and changes are those
of a search in which everything else is fixed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardwise as sw
from shardwise.plans import Plan
from shardwise.questions import Review
from shardwise.strategy import FIELDS
from shardwise.targets import EXPORTERS, IMPORTERS

CLUSTER = "2x8xH100-SXM"

SHAPE = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --max-position-embeddings 8192
--position-embedding-type rope --swiglu --disable-bias-linear --normalization RMSNorm
--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
--bf16 --overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer
"""
DENSE = f"{SHAPE} --padded-vocab-size 128256 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128"
EXPERTS = (
    f"{SHAPE} --padded-vocab-size 32000 --seq-length 4096 --micro-batch-size 1 --global-batch-size 128"
    " --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336 --tensor-model-parallel-size 2"
    " --sequence-parallel"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP_2 = "--tensor-model-parallel-size 2 --sequence-parallel"


def reviewed(tmp_path: Path, text: str, name: str = "run.args", **arguments: Any) -> Review:
    file = tmp_path / name
    file.write_text(text)
    return sw.review(file, **{"cluster": CLUSTER, **arguments})


def codes(review: Review) -> set[str]:
    return {one.code for one in review.findings if one.severity != "info"}


def without(text: str, flag: str) -> str:
    return text.replace(f" {flag}", "")


PLANTED: dict[str, tuple[str, str, str, str]] = {
    # code: a configuration without the fault, the same with it, the flag that is named, a part of the text
    "tp_across_nodes": (
        f"{DENSE} {TP_2}", f"{DENSE} --tensor-model-parallel-size 16 --sequence-parallel",
        "--tensor-model-parallel-size", "16 tensor-parallel ranks reach beyond the 8 devices",
    ),
    "recompute_not_needed": (
        DENSE, f"{DENSE} {RECOMPUTED}",
        "--recompute-granularity", "without recomputation it fits too",
    ),
    # 8.03e9 parameters / tp 4 x 12 bytes of states = 22.4 GiB, of which 3 / 4 are saved on 4 ranks: 16.8 GiB.
    "zero1_forgotten": (
        f"{DENSE} --tensor-model-parallel-size 4 --sequence-parallel",
        without(f"{DENSE} --tensor-model-parallel-size 4 --sequence-parallel", "--use-distributed-optimizer"),
        "--use-distributed-optimizer", "16.8 GiB less",
    ),
    "micro_batch_small": (
        DENSE, f"{DENSE} {TP_2}".replace("--seq-length 4096", "--seq-length 512"),
        "--micro-batch-size", "sequences fit",
    ),
    # 8 micro-batches on 8 ranks: (8 - 1) / (8 + 8 - 1) = 47 % of the pipeline, less of the whole step.
    "pipeline_bubble": (
        f"{DENSE} --pipeline-model-parallel-size 2",
        f"{DENSE} --pipeline-model-parallel-size 8".replace("-size 128 ", "-size 16 "),
        "--pipeline-model-parallel-size", "8 ranks with 8 micro-batches",
    ),
    "ep_beyond_nvlink": (
        f"{EXPERTS} --expert-model-parallel-size 4 --expert-tensor-parallel-size 2",
        f"{EXPERTS} --expert-model-parallel-size 8 --expert-tensor-parallel-size 2",
        "--expert-model-parallel-size", "16 ranks exchange tokens of experts",
    ),
    "out_of_memory": (
        DENSE, DENSE.replace("--micro-batch-size 1", "--micro-batch-size 4"), "memory", "GiB and may use",
    ),
    "batch_does_not_divide": (
        f"{DENSE} {TP_2}", f"{DENSE} {TP_2}".replace("-size 128 ", "-size 100 "),
        "--global-batch-size",
        "100 sequences do not divide over 8 data-parallel ranks with micro-batches of 1; 96 and 104 do",
    ),
    "layers_lost": (
        f"{DENSE} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*8|t*8|t*8|t*8L",
        f"{DENSE} --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout Et*8|t*8|t*8|t*7L",
        "--pipeline-model-parallel-layout", "lack 1 of the 32 layers",
    ),
    "ignored_key": (
        DENSE, f"{DENSE} --sequence-parallel", "--sequence-parallel", "without tensor parallelism",
    ),
    "refused": (EXPERTS, without(EXPERTS, "--sequence-parallel"), "--sequence-parallel", "without it"),
    "no_overlap": (
        DENSE, without(DENSE, "--overlap-grad-reduce"), "--overlap-grad-reduce", "after the backward pass",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("code", PLANTED)
def test_a_planted_fault_is_found(tmp_path: Path, code: str) -> None:
    clean, planted, field, text = PLANTED[code]
    assert code not in codes(reviewed(tmp_path, clean))
    (found,) = [one for one in reviewed(tmp_path, planted).findings if one.code == code]
    assert found.field == field and text in found.text


DEEPSPEED = {
    "train_batch_size": 128, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"},
}  # fmt: skip
ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "mixed_precision": "bf16",
    "num_machines": 2, "num_processes": 16, "fsdp_config": {"fsdp_version": 2},
    "parallelism_config": {"parallelism_config_dp_shard_size": 16},
}  # fmt: skip
TITAN = {
    "model_spec": {"name": "llama3", "flavor": "8B"}, "compile": {"enable": True},
    "training": {"local_batch_size": 32, "global_batch_size": 128, "seq_len": 4096},
    "parallelism": {"pipeline_parallel_degree": 4, "data_parallel_shard_degree": 4,
                    "module_fqns_per_model_part": [[f"layers.{8 * part + layer}" for layer in range(8)]
                                                   for part in range(4)]},
    "activation_checkpoint": {"mode": "full"},
}  # fmt: skip


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    first, _, others = path.partition("/")
    inner = changed(values.get(first, {}), others, value) if others else value
    return {**values, first: inner}


OTHER_SOFTWARE: dict[str, tuple[dict[str, Any], str, Any, str, str]] = {
    "deepspeed unknown key": (DEEPSPEED, "zero_optimisation", {}, "ignored_key", "zero_optimisation"),
    "deepspeed pipeline": (DEEPSPEED, "pipeline", {"stages": 4}, "ignored_key", "pipeline.stages"),
    "deepspeed mics": (
        DEEPSPEED, "zero_optimization/mics_shard_size", 8, "removed_key", "zero_optimization.mics_shard_size",
    ),
    "deepspeed batch": (
        DEEPSPEED, "gradient_accumulation_steps", 4, "batch_does_not_divide", "train_batch_size",
    ),
    "accelerate pp": (
        ACCELERATE, "parallelism_config/parallelism_config_pp_size", 8, "ignored_key",
        "parallelism_config.parallelism_config_pp_size",
    ),
    "accelerate sizes": (
        ACCELERATE, "parallelism_config/parallelism_config_dp_shard_size", 8, "unused_processes",
        "parallelism_config",
    ),
    "accelerate replicas": (
        ACCELERATE, "parallelism_config",
        {"parallelism_config_dp_replicate_size": 8, "parallelism_config_tp_size": 2}, "refused",
        "parallelism_config.parallelism_config_dp_replicate_size",
    ),
    "titan layer": (
        TITAN, "parallelism/module_fqns_per_model_part", [["layers.0"], ["layers.1"], ["layers.2"], ["norm"]],
        "layers_lost", "parallelism.module_fqns_per_model_part",
    ),
    "titan parts": (
        TITAN, "parallelism/module_fqns_per_model_part",
        [[f"layers.{4 * part + layer}" for layer in range(4)] for part in range(8)],
        "layers_lost", "parallelism.module_fqns_per_model_part",
    ),
    "titan passes": (
        TITAN, "training/local_batch_size", 8, "pipeline_restarts", "training.local_batch_size",
    ),
    "titan reduction": (
        TITAN, "training/mixed_precision_reduce", "bfloat16", "refused", "training.mixed_precision_reduce",
    ),
    "titan batch": (
        TITAN, "training/global_batch_size", 132, "batch_does_not_divide", "training.global_batch_size",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_SOFTWARE)
def test_a_fault_in_files_of_other_software_is_found(tmp_path: Path, name: str) -> None:
    values, path, value, code, field = OTHER_SOFTWARE[name]
    planted = changed(values, path, value)
    given: dict[str, Any] = {}
    if values is not TITAN:
        given = {"model": "llama-3.1-8b", "seq_len": 4096, "fix": "recompute=full"}
    if values is ACCELERATE:
        given["global_batch_size"] = 128
    dumped = yaml.safe_dump if values is ACCELERATE else json.dumps
    assert code not in codes(reviewed(tmp_path, dumped(values), **given))
    found = reviewed(tmp_path, dumped(planted), **given)
    assert (code, field) in {(one.code, one.field) for one in found.findings}


@pytest.mark.parametrize("target", IMPORTERS)
def test_the_export_of_a_good_plan_is_clean(tmp_path: Path, target: str) -> None:
    """The review predicts the step time of the plan, and finds neither faults nor changes."""
    question: dict[str, Any] = {"cluster": CLUSTER, "seq_len": 4096, "global_batch_size": 128}
    plan = sw.plan("llama-3.1-8b", target=target, use_all=True, **question)
    name, text = next(iter(EXPORTERS[target].files(plan).items()))
    given: dict[str, Any] = {}
    if not target.startswith("megatron"):
        given["model"] = "llama-3.1-8b"
    if target in ("deepspeed-0.19", "fsdp2", "transformers-5"):
        names = ("recompute", "micro_batch_size")
        given["fix"] = {one: getattr(plan.strategy, one) for one in names}
        given |= {"seq_len": 4096, "global_batch_size": 128}
    found = reviewed(tmp_path, text, name, **given)
    assert found.fits and found.strategy == plan.strategy
    assert found.step_time_s == pytest.approx(plan.step_time_s, rel=1e-12)
    assert codes(found) == set() and found.changes == ()


def test_arguments_of_the_trainer_are_reviewed(tmp_path: Path) -> None:
    """The plan of Transformers from its two files is clean; faults and changes are in the words of the
    arguments."""
    question: dict[str, Any] = {"cluster": CLUSTER, "seq_len": 4096, "global_batch_size": 128}
    plan = sw.plan("llama-3.1-8b", target="transformers-5", use_all=True, **question)
    files = EXPORTERS["transformers-5"].files(plan)
    arguments = tmp_path / "trainer_args.json"
    arguments.write_text(files["trainer_args.json"])
    found = reviewed(tmp_path, files["distributed_config.py"], trainer=str(arguments), model="llama-3.1-8b")
    assert found.strategy == plan.strategy and codes(found) == set() and found.changes == ()
    assert found.step_time_s == pytest.approx(plan.step_time_s, rel=1e-12)
    own = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": True, "fsdp": True}
    sync = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
    planted = {**own, **sync, "fsdp_config": {"activation_checkpointing": True}, "max_length": 512}
    found = reviewed(tmp_path, json.dumps(planted), model="llama-3.1-8b")
    faults = {one.code: one.field for one in found.findings}
    assert faults["micro_batch_small"] == "per_device_train_batch_size"
    flags = [flag for one in found.changes for flag in one.flags]
    assert any(flag.startswith("per_device_train_batch_size: ") for flag in flags), flags
    assert not any("in the script" in flag or "fsdp_config.fsdp_" in flag for flag in flags)


# Changes


def fixed_but(plan: Plan | Review, *names: str) -> dict[str, Any]:
    strategy = plan.strategy
    assert strategy is not None
    return {name: getattr(strategy, name) for name in FIELDS if name not in names}


@pytest.mark.parametrize(
    ("text", "choices", "free"),
    [
        (f"{DENSE} {TP_2}", ("micro_batch_size",), ("micro_batch_size",)),
        (f"{DENSE} {TP_2} {RECOMPUTED}", ("recompute",), ("recompute", "recompute_layers")),
        (
            f"{DENSE} {TP_2}", ("tp",),
            ("tp", "dp", "sequence_parallel", "optim_shard"),
        ),
    ],
)  # fmt: skip
def test_a_change_is_the_optimum_with_everything_else_fixed(
    tmp_path: Path, text: str, choices: tuple[str, ...], free: tuple[str, ...]
) -> None:
    found = reviewed(tmp_path, text)
    (change,) = [one for one in found.changes if one.choices == choices]
    request = found.request
    best = sw.plan(
        request.model, cluster=CLUSTER, seq_len=4096, global_batch_size=128, target="megatron-lm-0.19",
        fix=fixed_but(found, *free), set={"tp_comm_overlap": "off"}, tolerance=0.0, use_all=True,
    )  # fmt: skip
    assert change.step_time_s == pytest.approx(best.step_time_s, rel=1e-12)
    assert found.step_time_s is not None and change.gain_s is not None
    assert found.step_time_s - change.gain_s == pytest.approx(best.step_time_s, rel=1e-12)
    # Every flag of the change is one that the exported plan has, or one that it lacks.
    words = shlex.split(EXPORTERS["megatron-lm-0.19"].files(best)["megatron-lm.args"], comments=True)
    for flag in change.flags:
        name = flag.removeprefix("without ").split()[0]
        assert (name in words) == (not flag.startswith("without "))


def test_a_change_of_two_choices_follows_where_it_is_better(tmp_path: Path) -> None:
    found = reviewed(tmp_path, f"{DENSE} {TP_2} {RECOMPUTED}")
    *singles, pair = found.changes
    assert 1 <= len(singles) <= 3 and {len(one.choices) for one in singles} == {1}
    assert len(pair.choices) == 2 and pair.step_time_s < min(one.step_time_s for one in singles)
    assert found.best_step_time_s is not None and found.best_step_time_s <= pair.step_time_s


def test_a_change_makes_what_is_too_large_fit(tmp_path: Path) -> None:
    found = reviewed(tmp_path, DENSE.replace("--micro-batch-size 1", "--micro-batch-size 4"))
    assert found.fits is False and found.changes
    words = next(iter(found.changes)).flags
    assert words and found.to_dict()["fits"] is False


def test_a_measured_step_scales_times_and_gains(tmp_path: Path) -> None:
    """Twice the predicted step time doubles every time."""
    plain = reviewed(tmp_path, f"{DENSE} {TP_2}")
    assert plain.step_time_s is not None and plain.best_step_time_s is not None
    twice = reviewed(tmp_path, f"{DENSE} {TP_2}", measured=2.0 * plain.step_time_s)
    assert twice.scale == pytest.approx(2.0)
    assert twice.step_time_s == pytest.approx(2.0 * plain.step_time_s)
    assert twice.best_step_time_s == pytest.approx(2.0 * plain.best_step_time_s)
    assert sum(twice.breakdown.values()) == pytest.approx(twice.step_time_s)
    for one, other in zip(plain.changes, twice.changes, strict=True):
        assert one.gain_s is not None and other.gain_s == pytest.approx(2.0 * one.gain_s)
    assert "measured_differs" in codes(twice) and "measured_differs" not in codes(plain)


def test_flags_of_overlap_are_a_change(tmp_path: Path) -> None:
    text = without(without(DENSE, "--overlap-grad-reduce"), "--overlap-param-gather")
    found = reviewed(tmp_path, text)
    (change,) = [one for one in found.changes if one.choices == ("overlap",)]
    assert change.flags == ("--overlap-grad-reduce", "--overlap-param-gather")
    assert change.step_time_s == pytest.approx(reviewed(tmp_path, DENSE).step_time_s, rel=1e-12)


def test_overlap_of_tensor_parallelism_is_a_change(tmp_path: Path) -> None:
    (change,) = [one for one in reviewed(tmp_path, f"{DENSE} {TP_2}").changes if one.choices == ("overlap",)]
    assert change.flags == ("--tp-comm-overlap",) and change.gain_s is not None and change.gain_s > 0.0
    on = reviewed(tmp_path, f"{DENSE} {TP_2} --tp-comm-overlap")
    assert on.step_time_s == pytest.approx(change.step_time_s)
    assert ("overlap",) not in [one.choices for one in on.changes]


def test_the_best_plan_keeps_the_numbers_of_the_training(tmp_path: Path) -> None:
    moments = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    found = reviewed(tmp_path, f"{DENSE} {TP_2} --grad-reduce-in-bf16 {moments}")
    options = {"tp_comm_overlap": "off", "grad_reduce_dtype": "bf16", "moment_dtype": "bf16"}
    assert found.request.job.profile.options == options
    assert found.best is not None
    assert found.best.job.profile.options == {**options, "tp_comm_overlap": "on"}
    plain = reviewed(tmp_path, f"{DENSE} {TP_2}")
    assert plain.result is not None and found.result is not None
    # 4 B of gradients and 12 B of states become 2 B and 6 B.
    assert found.result.memory["gradients"] == plain.result.memory["gradients"] / 2
    assert found.result.memory["optimizer"] == plain.result.memory["optimizer"] / 2


def test_a_review_in_words(tmp_path: Path) -> None:
    found = reviewed(tmp_path, DENSE)
    assert repr(found).startswith("<Review for megatron-lm-0.19: fits, ") and "1 finding>" in repr(found)
    assert "<strong>" in found._repr_html_()
