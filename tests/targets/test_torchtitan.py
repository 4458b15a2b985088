"""TorchTitan 0.3.0 reads exported modules: what it parses, divides and shards agrees with the plan, and its
model has the parameters that the cost model counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.targets.random_plans import parameters_by_stage, plan_of_text
from tests.targets.titan import read_by_torchtitan, titan_environment
from tests.targets.titan_mutants import titan_mutants
from tests.targets.titan_plans import TITAN_FAMILIES, random_titan_plans

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import SCHEDULES, layer_counts, target_of
from shardwise.targets.torchtitan import CSV, FILE, schedule_csv, torchtitan_files
from shardwise.targets.torchtitan_read_back import TITAN_READER, titan_read_back, titan_request

pytestmark = pytest.mark.xdist_group("torchtitan")

SEED = 1
PLANS = 50

Answer = dict[str, Any]


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return random_titan_plans(PLANS, seed=SEED)


@pytest.fixture(scope="module")
def answers(plans: list[Plan]) -> list[Answer]:
    return read_by_torchtitan(plans)


def test_plans_are_of_every_family_and_use_every_value_of_the_target(plans: list[Plan]) -> None:
    strategies = [plan.best.strategy for plan in plans]
    assert {plan.model.name for plan in plans} == set(TITAN_FAMILIES)
    assert {strategy.schedule for strategy in strategies} == set(SCHEDULES)
    for name in ("tp", "cp", "pp", "vpp", "dp", "ep", "etp", "param_shard"):
        assert max(getattr(strategy, name) for strategy in strategies) > 1, name
    for name in ("recompute", "sequence_parallel"):
        assert len({getattr(strategy, name) for strategy in strategies}) == 2, name
    assert any(1 < one.optim_shard < one.dp for one in strategies)
    assert any(1 < one.cp <= one.optim_shard < one.dp * one.cp for one in strategies)
    assert any(one.cp > 1 and one.ep > 1 for one in strategies)
    assert any(one.param_shard < one.grad_shard for one in strategies)
    assert any(0 < one.recompute_layers < one.first_stage_layers for one in strategies)
    assert any(plan.model.tied_embeddings for plan in plans)
    assert any(one.last_stage_layers == 0 for one in strategies)


def test_the_target_runs_every_plan(plans: list[Plan]) -> None:
    """Compares the target's limits with their second version in `titan_plans`."""
    target = target_of("torchtitan-0.3")
    for plan in plans:
        assert list(target.for_job(plan.model, plan.job).refusals(plan.best.strategy)) == []


def test_torchtitan_reads_the_plan_back(plans: list[Plan], answers: list[Answer]) -> None:
    found = {
        str(plan.best.strategy): titan_read_back(plan, answer).differences
        for plan, answer in zip(plans, answers, strict=True)
    }
    assert {name: each for name, each in found.items() if each} == {}


def _counted(plan: Plan, name: str, answer: Answer) -> list[int]:
    return [sum(part[name] for part in rank) for rank in answer["parts"]]


def _sharded(plan: Plan, param_shard: int) -> Plan:
    """The plan with other sharded parameters, of which the count of parameters is the elements per rank."""
    return replace(plan, best=replace(plan.best, fields=replace(plan.best.strategy, param_shard=param_shard)))


def test_torchtitan_builds_as_many_parameters(plans: list[Plan], answers: list[Answer]) -> None:
    """Elements on the first rank of each pipeline stage, before data parallelism shards them."""
    for plan, answer in zip(plans, answers, strict=True):
        assert _counted(plan, "parameters", answer) == parameters_by_stage(_sharded(plan, 1)), plan.best


def _has_even_shards(plan: Plan) -> bool:
    """Whether every weight's first dimension divides over the ranks that share it. (FSDP pads others.)"""
    strategy, config = plan.best.strategy, dict[str, Any](plan.model.config)
    shard = strategy.optim_shard
    experts = plan.model.experts
    widths = (plan.model.vocab, config["intermediate_size"])
    is_even = all(width % (strategy.tp * shard) == 0 for width in widths)
    is_even = is_even and config.get("head_dim", 64) % shard == 0
    if experts is None:
        return bool(is_even)
    replicas = strategy.dp * strategy.tp // max(strategy.ep, strategy.etp)
    return bool(is_even) and replicas <= shard and experts.experts % (shard * strategy.tp) == 0


def test_every_rank_holds_its_share_of_the_parameters(plans: list[Plan], answers: list[Answer]) -> None:
    """Elements on the first rank of each pipeline stage between steps: FSDP shards them over optim_shard
    ranks in every plan, also where the forward pass leaves them gathered."""
    compared = 0
    for plan, answer in zip(plans, answers, strict=True):
        if _has_even_shards(plan):
            shard = plan.best.strategy.optim_shard
            assert _counted(plan, "local", answer) == parameters_by_stage(_sharded(plan, shard)), plan.best
            compared += shard > 1
    assert compared > PLANS // 5


# Parameters by hand, on each tensor rank. Llama 3.1 70B, tp 8, 20 of 80 layers: q and o 8192 * 8192 / 8 each,
# k and v 1024 * 8192 / 8 each, MLP 3 * 8192 * 28672 / 8, two norms 2 * 8192: 106,971,136 a layer,
# 2,139,422,720 a stage. The first stage also has the embedding, 128,256 * 8192 / 8 = 131,334,144, the last
# the head and a norm of 8192. With tp 4 and 10 layers: 8192 * 8192 / 2 + 1024 * 8192 / 2 +
# 3 * 8192 * 28672 / 4 + 2 * 8192 = 213,925,888 a layer, 2,139,258,880 a stage; the embedding 262,668,288.
# Mixtral 8x7B, tp 2, ep 8: q and o 4096 * 4096 / 2 each, k and v 1024 * 4096 / 2 each, one expert
# 3 * 4096 * 14336, router 8 * 4096, norms 2 * 4096: 197,173,248 a layer, 32 layers. Embedding and head have
# 32,000 * 4096 / 2 each, the last norm 4096.
BY_HAND = {
    "llama-3.1-70b tp=8,pp=4,vpp=2,dp=2,zero_stage=2": [
        2_270_756_864, 2_139_422_720, 2_139_422_720, 2_270_765_056,
    ],
    "llama-3.1-70b tp=4,pp=8,dp=2,zero_stage=2": [2_401_927_168, *[2_139_258_880] * 6, 2_401_935_360],
    "mixtral-8x7b tp=2,dp=8,ep=8,etp=1,zero_stage=3": [6_440_620_032],
}  # fmt: skip


def test_models_of_the_catalogue_have_the_parameters_worked_out_by_hand() -> None:
    named = {name: plan_of_text(*name.split()) for name in BY_HAND}
    for (name, plan), answer in zip(named.items(), read_by_torchtitan([*named.values()]), strict=True):
        assert _counted(plan, "parameters", answer) == BY_HAND[name]
        assert titan_read_back(plan, answer).differences == ()


NOT_READ_BACK = {
    "flavor": "a name for logs",
    "lr": "not part of a plan",
    "pipeline_parallel_microbatch_size": "no part of a plan without a pipeline",
}
"""Constants whose change the comparison need not notice."""


@pytest.fixture(scope="module")
def few(plans: list[Plan]) -> list[Plan]:
    """A dense plan with a pipeline and some recomputed layers, and one with experts; both with tp."""
    strategies = [(plan, plan.best.strategy) for plan in plans if plan.best.strategy.tp > 1]
    dense = next(plan for plan, one in strategies if one.recompute == "full" and one.pp == 2)
    return [dense, next(plan for plan, one in strategies if one.ep > 1 and one.last_stage_layers)]


def test_a_broken_module_is_noticed(few: list[Plan]) -> None:
    """One changed constant at a time, in a dense plan and one with experts."""
    cases = [(plan, name, text) for plan in few for name, text in titan_mutants(torchtitan_files(plan)[FILE])]
    files = [{**torchtitan_files(plan), FILE: text} for plan, _, text in cases]
    answers = read_by_torchtitan([plan for plan, _, _ in cases], files)
    unnoticed = {
        (name, text)
        for (plan, name, text), answer in zip(cases, answers, strict=True)
        if not titan_read_back(plan, answer).differences
    }
    assert [each for each in unnoticed if each[0] not in NOT_READ_BACK] == []
    assert {"tensor_parallel_degree", "starts", "dim", "theta", "fsdp_reshard_after_forward"} <= {
        name for _, name, _ in cases
    }
    assert sum("error" not in answer for answer in answers) > len(cases) // 3


def test_a_smaller_world_is_noticed(few: list[Plan]) -> None:
    requests = [
        {**titan_request(plan, torchtitan_files(plan)), "world_size": plan.cluster.devices // 2}
        for plan in few
    ]
    for plan, answer in zip(
        few, TITAN_READER.answers(requests, environment=titan_environment()), strict=True
    ):
        assert titan_read_back(plan, answer).differences[0].field == "files"


def _edited(plan: Plan, *changes: tuple[str, str]) -> dict[str, str]:
    """The files of the plan with texts of the module replaced."""
    files = torchtitan_files(plan)
    for old, new in changes:
        assert old in files[FILE]
        files[FILE] = files[FILE].replace(old, new)
    return files


def test_wrong_modules_that_torchtitan_accepts_are_noticed_and_refused() -> None:
    """TorchTitan builds each, though it trains something else than it says: the comparison names the field,
    and the export refuses such plans."""
    plain = plan_of_text("llama-2-7b", "tp=1,pp=2,dp=4,zero_stage=2")
    chunks = plan_of_text("llama-2-7b", "tp=1,pp=2,vpp=2,dp=4,zero_stage=2")
    shaped = plan_of_text("llama-2-7b", "tp=1,pp=2,vpp=2,schedule=zb_v,dp=4,zero_stage=2")
    from_csv = ('schedule_csv=""', f'schedule_csv=str(Path(__file__).with_name("{CSV}"))')
    looped = _edited(shaped, ('"ZBVZeroBubble"', '"PipelineScheduleMulti"'), from_csv)
    lost, single, placed = read_by_torchtitan(
        [plain, chunks, shaped],
        [
            _edited(plain, ("[*starts[1:], 32]", "[*starts[1:], 31]")),
            _edited(chunks, ('"Interleaved1F1B"', '"1F1B"')),
            {**looped, CSV: schedule_csv(shaped.best.strategy, 16)},
        ],
    )
    assert "layers of stages" in {each.field for each in titan_read_back(plain, lost).differences}
    assert single["error"] == "ValueError: Schedule1F1B runs 1 of the 2 model parts of a rank"
    assert "strategy.schedule" in {each.field for each in titan_read_back(shaped, placed).differences}
    for plan, fields, key in (
        (plain, {"first_stage_layers": 40}, "best.strategy.first_stage_layers"),
        (chunks, {"schedule": "1f1b"}, "best.strategy.schedule"),
        (shaped, {"schedule": "zb_h1"}, "best.strategy.schedule"),
    ):
        with pytest.raises(ConfigError) as refused:
            torchtitan_files(_with(plan, **fields))
        assert refused.value.key == key


def _with(plan: Plan, **fields: Any) -> Plan:
    """The plan with other fields of its strategy, unchecked."""
    return replace(plan, best=replace(plan.best, fields=replace(plan.best.strategy, **fields)))


def test_an_error_of_torchtitan_is_one_line() -> None:
    plan = plan_of_text("llama-2-7b", "tp=1,pp=1,dp=8")
    files = [
        _edited(plan, ("data_parallel_replicate_degree=8", "data_parallel_replicate_degree=3")),
        _edited(plan, (" seq_len=4096", " seq_length=4096")),
        torchtitan_files(plan),
    ]
    degrees, unknown, known = read_by_torchtitan([plan] * 3, files)
    assert "!= WORLD_SIZE(8)" in degrees["error"] and "\n" not in degrees["error"]
    assert "unexpected keyword argument 'seq_length'" in unknown["error"]
    assert titan_read_back(plan, known).differences == ()


def test_without_torchtitan_the_error_says_what_to_install() -> None:
    plan = plan_of_text("llama-2-7b", "tp=1,pp=1,dp=8")
    bare = {
        **titan_environment(),
        "PYTHONPATH": titan_environment()["PYTHONPATH"].replace(".cache", "nowhere"),
    }
    request = titan_request(plan, torchtitan_files(plan))
    with pytest.raises(ConfigError, match=r"cannot be imported.*pip install torchtitan==0.3") as refused:
        TITAN_READER.answers([request], environment=bare)
    assert refused.value.key == "--validate"


def test_an_empty_stage_is_refused() -> None:
    """TorchTitan's optimizer refuses a model part without weights, and so does the export."""
    plan = plan_of_text("llama-2-7b", "tp=1,pp=4,dp=2,zero_stage=2")
    ends = {"first_stage_layers": 16, "last_stage_layers": 16}
    assert layer_counts(32, 4, 16, 16) == (16, 0, 0, 16)
    with pytest.raises(ConfigError) as refused:
        torchtitan_files(_with(plan, **ends))
    assert refused.value.key == "best.strategy.first_stage_layers"
    (answer,) = read_by_torchtitan([plan], [_edited(plan, ("[0, 8, 16, 24]", "[0, 16, 16, 16]"))])
    assert "matched no parameters" in answer["error"]


def test_a_pipeline_with_empty_ends_is_read_back() -> None:
    """2 x 17 stages for 32 layers: the first has only the embedding, the last only norm and output."""
    plan = plan_of_text("llama-2-7b", "tp=1,pp=2,vpp=17,dp=4,zero_stage=2")
    (answer,) = read_by_torchtitan([plan], [torchtitan_files(plan)])
    assert titan_read_back(plan, answer).differences == ()
    ends = plan.best.strategy.first_stage_layers, plan.best.strategy.last_stage_layers
    assert ends == (0, 0)
