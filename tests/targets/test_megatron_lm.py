"""Megatron-LM 0.19.2 reads exported flags: its parser and its configuration agree with the plan, and its
model has the parameters that the cost model counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.targets.megatron import built_by_megatron_lm, environment, request_of
from tests.targets.mutants import mutants
from tests.targets.random_plans import (
    EXPERT_FAMILIES,
    FAMILIES,
    MODULES_OF,
    parameters_by_stage,
    parameters_not_in_megatron_lm,
    plan_of_text,
    random_plans,
)
from tests.unit.targets.small_plans import LLAMA, small_plan

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import complete, target_of
from shardwise.targets import IMPORTERS, Supplied
from shardwise.targets.megatron_lm import effective_order, megatron_lm_flags
from shardwise.targets.megatron_lm_read_back import (
    ReaderRequest,
    Reading,
    differences,
    read_back,
    read_by_megatron_lm,
    reader_request,
)

pytestmark = pytest.mark.xdist_group("megatron-lm")

SEED = 1
PLANS = 50


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return random_plans(PLANS, seed=SEED)


@pytest.fixture(scope="module")
def readings(plans: list[Plan]) -> list[Reading]:
    return read_by_megatron_lm([request_of(plan) for plan in plans], environment=environment())


@pytest.fixture(scope="module")
def built(plans: list[Plan]) -> list[Mapping[str, Any]]:
    return built_by_megatron_lm([request_of(plan) for plan in plans])


def test_plans_are_of_every_family_and_use_every_value_of_the_target(plans: list[Plan]) -> None:
    strategies = [plan.best.strategy for plan in plans]
    assert {plan.model.name for plan in plans} == set(FAMILIES)
    for name in ("tp", "cp", "pp", "vpp", "ep", "etp"):
        assert max(getattr(strategy, name) for strategy in strategies) > 1, name
    for name in ("axis_order", "schedule", "offload", "cp_kind", "sequence_parallel"):
        assert len({getattr(strategy, name) for strategy in strategies}) == 2, name
    assert {strategy.recompute for strategy in strategies} == {"none", "selective", "full"}
    modules = {name for strategy in strategies for name in strategy.recompute_modules.split("+")}
    assert modules >= {"", *MODULES_OF[False], "moe_act"}
    assert any(1 < one.optim_shard < one.dp * one.cp for one in strategies)


def test_the_target_has_flags_for_every_plan(plans: list[Plan]) -> None:
    """Compares the target's limits with their second version in `random_plans`."""
    target = target_of("megatron-lm-0.19")
    for plan in plans:
        assert list(target.for_job(plan.model, plan.job).refusals(plan.best.strategy)) == []


def test_megatron_lm_reads_the_plan_back(plans: list[Plan], readings: list[Reading]) -> None:
    found = {
        str(plan.best.strategy): differences(plan, reading)
        for plan, reading in zip(plans, readings, strict=True)
    }
    assert {name: each for name, each in found.items() if each} == {}


def test_the_arguments_that_megatron_lm_prints_are_read(plans: list[Plan], readings: list[Reading]) -> None:
    """Every argument after Megatron-LM's validation, in the block that it prints at the start of a run: the
    name, dots up to column 48, the value."""
    for plan, reading in zip(plans, readings, strict=True):
        values = {**reading.arguments, "pipeline_model_parallel_layout": layout_of(plan)}
        lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
        block = "\n".join(lines)
        text = f"{'-' * 24} arguments {'-' * 24}\n{block}\n{'-' * 20} end of arguments {'-' * 21}\n"
        run = IMPORTERS["megatron-lm-0.19"].read(text, devices=plan.cluster.devices, supplied=Supplied())
        experts = run.model.experts
        found = complete(
            run.fields, devices=plan.cluster.devices, layers=run.model.layers,
            experts=None if experts is None else experts.experts, global_batch_size=run.global_batch_size,
        )  # fmt: skip
        order = effective_order(plan.best.strategy, plan.best.strategy.axis_order)
        assert effective_order(found, found.axis_order) == order
        assert replace(found, axis_order=plan.best.strategy.axis_order) == plan.best.strategy
        assert (run.dtype, run.optimizer, run.seq_len) == (
            plan.job.dtype, plan.job.optimizer, plan.job.seq_len,
        )  # fmt: skip
        assert (run.model.vocab, run.model.hidden, run.model.layers) == (
            plan.model.vocab, plan.model.hidden, plan.model.layers,
        )  # fmt: skip
        assert [one for one in run.findings if one.severity != "info"] == []


def layout_of(plan: Plan) -> str | None:
    """The layout, which Megatron-LM prints as it was given."""
    flags = {name: values for name, *values in megatron_lm_flags(plan)}
    return next(iter(flags.get("--pipeline-model-parallel-layout", ())), None)


def test_megatron_lm_builds_as_many_parameters(plans: list[Plan], built: list[Mapping[str, Any]]) -> None:
    for plan, answer in zip(plans, built, strict=True):
        ours = parameters_by_stage(plan)
        extra = parameters_not_in_megatron_lm(plan)
        expected = [count - more for count, more in zip(ours, extra, strict=True)]
        assert answer == {"parameters": expected}, plan.best.strategy


def test_most_plans_have_the_same_parameters_without_a_correction(plans: list[Plan]) -> None:
    assert sum(not any(parameters_not_in_megatron_lm(plan)) for plan in plans) > PLANS * 2 // 3


# Parameters by hand, on each tensor rank. Llama 3.1 70B, tp 8, 20 of 80 layers: q and o 8192 * 8192 / 8 each,
# k and v 1024 * 8192 / 8 each, MLP 3 * 8192 * 28672 / 8, two norms 2 * 8192: 106,971,136 a layer,
# 2,139,422,720 a stage. The first stage also has the embedding, 128,256 * 8192 / 8 = 131,334,144, the last
# the head and a norm of 8192. Mixtral 8x7B, tp 2, ep 8: q and o 4096 * 4096 / 2 each, k and v 1024 * 4096 / 2
# each, one expert 3 * 4096 * 14336, router 8 * 4096, norms 2 * 4096: 197,173,248 a layer, 32 layers.
# Embedding and head have 32,000 * 4096 / 2 each, the last norm 4096.
BY_HAND = {
    "llama-3.1-70b": (
        "tp=8,pp=4,vpp=2,dp=2,zero_stage=1", [2_270_756_864, 2_139_422_720, 2_139_422_720, 2_270_765_056],
    ),
    "mixtral-8x7b": ("tp=2,dp=8,ep=8,etp=1,zero_stage=1", [6_440_620_032]),
}  # fmt: skip


def test_models_of_the_catalogue_have_the_parameters_worked_out_by_hand() -> None:
    named = {name: plan_of_text(name, text) for name, (text, _) in BY_HAND.items()}
    built = built_by_megatron_lm([request_of(plan) for plan in named.values()])
    for (name, plan), answer in zip(named.items(), built, strict=True):
        assert answer == {"parameters": BY_HAND[name][1]}
        assert parameters_by_stage(plan) == BY_HAND[name][1]


def test_empty_ends_are_those_of_the_account_flags() -> None:
    """Our layout for two stages more than layers is the split of `--account-for-*-in-pipeline-split`."""
    plan = small_plan(LLAMA, "tp=1,pp=4,vpp=3,dp=2")
    request = request_of(plan)
    words = list(request.flags)
    at = words.index("--pipeline-model-parallel-layout")
    words[at : at + 2] = [
        "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
        "--num-virtual-stages-per-pipeline-rank", "3",
    ]  # fmt: skip
    asked = [request, replace(request, flags=tuple(words))]
    ours, theirs = read_by_megatron_lm(asked, environment=environment())
    assert differences(plan, ours) == () and theirs.error is None
    assert ours.layers == theirs.layers == ((0, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 0))


NOT_READ_BACK = {
    "--vocab-size": "`--padded-vocab-size` decides the sizes of the tables",
    "--accumulate-allreduce-grads-in-fp32": "bf16 turns it on",
    "--moe-grouped-gemm": "a kernel, which no field of a plan says",
}
"""Flags whose change the comparison need not notice."""


def test_a_broken_flag_is_noticed(plans: list[Plan]) -> None:
    """One changed flag at a time, for every flag of a plan of each family."""
    few = plans[: len(FAMILIES)]
    cases = [(plan, name, flags) for plan in few for name, flags in mutants(megatron_lm_flags(plan))]
    requests = [reader_request(plan, flags) for plan, _, flags in cases]
    readings = read_by_megatron_lm(requests, environment=environment())
    unnoticed = {
        name
        for (plan, name, _), reading in zip(cases, readings, strict=True)
        if not differences(plan, reading)
    }
    assert unnoticed <= set(NOT_READ_BACK)
    assert sum(reading.error is None for reading in readings) > len(cases) // 2


def test_a_smaller_world_is_noticed(plans: list[Plan]) -> None:
    few = [plan for plan in plans if plan.best.strategy.dp > 1][:4]
    requests = [replace(request_of(plan), world_size=plan.cluster.devices // 2) for plan in few]
    for plan, reading in zip(few, read_by_megatron_lm(requests, environment=environment()), strict=True):
        assert "devices" in {difference.field for difference in differences(plan, reading)} or reading.error


def test_a_broken_count_of_parameters_is_noticed(plans: list[Plan]) -> None:
    """One more layer in the flags is one more layer in the model."""
    plan = next(plan for plan in plans if plan.best.strategy.pp == 1)
    flags = tuple(
        (name, str(plan.model.layers + 1)) if name == "--num-layers" else (name, *values)
        for name, *values in megatron_lm_flags(plan)
    )
    (answer,) = built_by_megatron_lm([reader_request(plan, flags)])
    assert answer["parameters"][0] > parameters_by_stage(plan)[0]


TRAPS: dict[str, tuple[str, str, dict[str, Any], tuple[tuple[str, ...], ...], str, bool]] = {
    # A legal strategy; the changed fields that make it wrong; the changed flags; the refused key; whether
    # Megatron-LM's process groups refuse it too.
    "micro-batches that are no multiple of pp": (
        "llama-2-7b", "tp=1,pp=4,vpp=2,dp=2", {"global_batch_size": 12}, (("--global-batch-size", "12"),),
        "best.strategy.vpp", False,
    ),
    "more expert ranks than ranks": (
        "mixtral-8x7b", "tp=1,pp=1,dp=8,ep=8,etp=1", {"etp": 2}, (("--expert-tensor-parallel-size", "2"),),
        "best.strategy.ep", True,
    ),
    "states over a part of a rank": (
        "llama-2-7b", "tp=1,pp=2,dp=4,optim_shard=2", {"optim_shard": 3},
        (("--num-distributed-optimizer-instances", "3"),), "best.strategy.optim_shard", True,
    ),
    "data parallelism last, with context parallelism": (
        "llama-2-7b", "tp=1,pp=2,dp=2,cp=4", {"axis_order": "tp-cp-pp-dp"}, (("--use-tp-pp-dp-mapping",),),
        "best.strategy.axis_order", True,
    ),
    "experts and tensors without sequence parallelism": (
        "mixtral-8x7b", "tp=2,pp=1,dp=8,ep=8,etp=1", {"sequence_parallel": False},
        (("--sequence-parallel",),),
        "best.strategy.sequence_parallel", False,
    ),
    "Muon": ("llama-2-7b", "tp=1,pp=1,dp=8,zero_stage=1", {"optimizer": "muon"}, (("--optimizer", "muon"),),
        "job.optimizer", False,
    ),
}  # fmt: skip
"""Values that Megatron-LM's parser accepts, though they cannot run or do something else than they say."""


def _trapped(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """The plan with changed fields of its job or its strategy, unchecked."""
    of_job = {name: value for name, value in changes.items() if hasattr(plan.job, name)}
    of_strategy = {name: value for name, value in changes.items() if name not in of_job}
    best = replace(plan.best, fields=replace(plan.best.strategy, **of_strategy))
    return replace(plan, best=best, job=replace(plan.job, **of_job))


def _trapped_flags(plan: Plan, changed: tuple[tuple[str, ...], ...]) -> ReaderRequest:
    """The flags of the plan with some changed; a switch that is already there is left out."""
    own = megatron_lm_flags(plan)
    names = {name for name, *_ in changed}
    kept = tuple(flag for flag in own if flag[0] not in names)
    added = tuple(flag for flag in changed if len(flag) > 1 or flag not in own)
    return reader_request(plan, kept + added)


def test_wrong_flags_that_the_parser_accepts_are_refused_by_the_export() -> None:
    plans = {name: plan_of_text(model, text) for name, (model, text, *_) in TRAPS.items()}
    requests = [_trapped_flags(plans[name], trap[3]) for name, trap in TRAPS.items()]
    readings = read_by_megatron_lm(requests, environment=environment())
    built = built_by_megatron_lm(requests)
    for (name, trap), reading, answer in zip(TRAPS.items(), readings, built, strict=True):
        assert reading.error is None, name
        assert ("error" in answer) == trap[5], (name, answer)
        with pytest.raises(ConfigError) as refused:
            megatron_lm_flags(_trapped(plans[name], trap[2]))
        assert refused.value.key == trap[4], name
        assert megatron_lm_flags(plans[name]), "the legal plan is exported"


def test_an_unknown_flag_of_megatron_lm_is_a_one_line_error() -> None:
    plan = plan_of_text("llama-2-7b", "tp=1,pp=1,dp=8")
    request = request_of(plan)
    requests = [
        replace(request, flags=(*request.flags, "--no-such-flag")),
        replace(request, world_size=0),
        request,
    ]
    unknown, empty, known = read_by_megatron_lm(requests, environment=environment())
    assert unknown.error == "megatron-lm: error: unrecognized arguments: --no-such-flag"
    assert empty.error is not None and "\n" not in empty.error
    assert known.error is None and known.layers == ((32,),)
    assert read_back(plan, unknown).differences[0].field == "files"


def test_without_megatron_lm_the_error_says_what_to_install() -> None:
    plan = plan_of_text("llama-2-7b", "tp=1,pp=1,dp=8")
    bare = {**environment(), "PYTHONPATH": environment()["PYTHONPATH"].replace(".cache", "nowhere")}
    with pytest.raises(ConfigError, match=r"cannot be imported.*pip install megatron-core==0.19") as refused:
        read_by_megatron_lm([request_of(plan)], environment=bare)
    assert refused.value.key == "--validate"
    assert read_by_megatron_lm([], environment=bare) == []


def test_experts_are_among_the_families() -> None:
    assert set(EXPERT_FAMILIES) < set(FAMILIES)
