"""Which target is recommended, and the table of all of them, with answers by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise import search
from shardwise.errors import Infeasible
from shardwise.plans import UNEVEN_SPACE, Answer
from shardwise.questions import planning, target_table
from shardwise.questions.request import OWN_TARGET, JobArguments, Request, request_of
from shardwise.questions.target_table import (
    RECOMMENDED_WITHIN,
    TargetAnswer,
    answers_of_targets,
    recommended_target,
    table_of,
    targets_in_order,
    targets_that_run,
)
from shardwise.search import Question
from shardwise.search.bnb.incumbent import Tradeoff
from shardwise.strategy import Target, newest_target, target_of

MEGATRON, TITAN, FSDP2 = (newest_target(name) for name in ("megatron-lm", "torchtitan", "fsdp2"))
JOB = JobArguments(model="llama-2-7b", cluster="1x8xA100-80G", seq_len=4096, global_batch_size=64)


@pytest.fixture(scope="module")
def request_() -> Request:
    return request_of(JOB)


@pytest.fixture(scope="module")
def answer() -> Answer:
    """A real answer, whose step time the tests replace."""
    plan = sw.plan(
        "llama-2-7b", cluster="1x8xA100-80G", seq_len=4096, global_batch_size=64, target="any", space="core"
    )
    assert plan.answer is not None
    return plan.answer


def question_of(request: Request) -> Question:
    return Question(model=request.model, cluster=request.cluster, job=request.job)


def with_time(answer: Answer, seconds: float, space: str = "default") -> Answer:
    certificate = replace(answer.certificate, space=space)
    return replace(answer, best=replace(answer.best, step_time_s=seconds), certificate=certificate)


def found(
    request: Request,
    answer: Answer,
    times_s: Mapping[str, float],
    *,
    any_s: float,
    any_space: str = "default",
) -> tuple[TargetAnswer, list[TargetAnswer]]:
    """The answer for any target, and those for every target that is asked: with these times, else none."""
    of_any = TargetAnswer(None, request, question_of(request), with_time(answer, any_s, any_space))

    def ask(target: Target | None, own: Request) -> tuple[Question, Answer]:
        assert target is not None
        if target.name not in times_s:
            raise Infeasible("nothing", reasons={})
        return question_of(own), with_time(answer, times_s[target.name])

    return of_any, answers_of_targets(request, of_any, ask)


@pytest.mark.parametrize(
    ("times_s", "recommended"),
    [
        # 1.03 times 100 is 103: the first in order that is at most that.
        ({MEGATRON: 103.0, TITAN: 100.0}, MEGATRON),
        ({MEGATRON: 103.1, TITAN: 100.0}, TITAN),
        ({MEGATRON: 110.0, TITAN: 102.0, FSDP2: 100.0}, TITAN),
        ({FSDP2: 100.0}, FSDP2),
        # Our own runtime is the fastest, and recommended only without the others.
        ({FSDP2: 100.0, OWN_TARGET: 50.0}, FSDP2),
        ({OWN_TARGET: 50.0}, OWN_TARGET),
    ],
)
def test_the_first_target_near_the_fastest_is_recommended(
    request_: Request, answer: Answer, times_s: Mapping[str, float], recommended: str
) -> None:
    assert RECOMMENDED_WITHIN == 0.03
    _, rows = found(request_, answer, times_s, any_s=90.0)
    best = recommended_target(rows)
    assert best is not None and best.name == recommended


def test_the_table_has_every_target_and_its_distance_to_any(request_: Request, answer: Answer) -> None:
    of_any, rows = found(request_, answer, {MEGATRON: 99.0, TITAN: 81.0}, any_s=90.0)
    table = {row.target: row for row in table_of(rows, of_any)}
    assert list(table) == [*(target.name for target in targets_in_order()), "any"]
    assert table[MEGATRON].over_any == pytest.approx(0.1)  # 99 / 90 - 1
    assert table[TITAN].over_any == pytest.approx(-0.1)  # 81 / 90 - 1: its software is faster
    assert table["any"].over_any == 0.0
    assert table[FSDP2].reason == "nothing that fits" and table[FSDP2].step_time_s is None


def test_each_target_is_asked_with_its_own_software(request_: Request, answer: Answer) -> None:
    names = {}

    def ask(target: Target | None, own: Request) -> tuple[Question, Answer]:
        assert target is not None
        names[target.name] = own.job.profile.name
        return question_of(own), answer

    of_any = TargetAnswer(None, request_, question_of(request_), answer)
    answers_of_targets(request_, of_any, ask)
    assert names == {target.name: target.profile for target in targets_in_order()}
    assert len(set(names.values())) > 2


def test_our_own_runtime_is_asked_for_uneven_plans(request_: Request, answer: Answer) -> None:
    _, rows = found(request_, answer, {MEGATRON: 99.0, OWN_TARGET: 95.0}, any_s=90.0, any_space=UNEVEN_SPACE)
    assert rows[-1].name == OWN_TARGET and rows[-1].answer is not None
    _, rows = found(request_, answer, {MEGATRON: 99.0, OWN_TARGET: 95.0}, any_s=90.0)
    assert OWN_TARGET not in [row.name for row in rows]


def test_a_target_that_cannot_train_the_model_says_why(answer: Answer) -> None:
    request = request_of(replace(JOB, model="opt-350m"))
    of_any, rows = found(request, answer, {}, any_s=90.0)
    (row,) = (row for row in table_of(rows, of_any) if row.target == MEGATRON)
    assert row.reason is not None and "opt" in row.reason


def test_an_interrupted_search_ends_the_table(request_: Request, answer: Answer) -> None:
    of_any = TargetAnswer(None, request_, question_of(request_), answer)

    def ask(target: Target | None, own: Request) -> tuple[Question, Answer]:
        return question_of(own), replace(answer, is_interrupted=True)

    assert len(answers_of_targets(request_, of_any, ask)) == 1


def test_a_target_without_an_answer_in_time_ends_the_table(request_: Request, answer: Answer) -> None:
    of_any = TargetAnswer(None, request_, question_of(request_), answer)

    def ask(target: Target | None, own: Request) -> tuple[Question, Answer]:
        assert target is not None
        if target.name == TITAN:
            raise KeyboardInterrupt
        return question_of(own), answer

    rows = answers_of_targets(request_, of_any, ask)
    assert [row.name for row in rows] == [MEGATRON, TITAN] and rows[-1].is_interrupted
    best = recommended_target(rows)
    assert best is not None and best.name == MEGATRON
    assert table_of(rows, of_any)[1].reason == "interrupted before a plan was found"


@pytest.mark.parametrize(("option", "searches"), [("frontier", 1), ("exhaustive", 1)])
def test_only_the_recommended_target_has_a_frontier_or_is_searched_exhaustively(
    monkeypatch: pytest.MonkeyPatch, option: str, searches: int
) -> None:
    found: list[bool] = []

    def searched(question: Question, problem: Any, goal: Any, **options: Any) -> Any:
        found.append(question.exhaustive if option == "exhaustive" else isinstance(goal, Tradeoff))
        return search_of(question, problem, goal, **options)

    search_of = search.answer.search
    for module in (search.answer, search.targets):
        monkeypatch.setattr(module, "search", searched)
    given: dict[str, Any] = {"seq_len": 1024, "global_batch_size": 8, "space": "core", option: True}
    best = sw.plan("gpt2", cluster="1x2xA100-80G", **given)
    assert found.count(True) == searches and len(found) > 3
    assert best.answer is not None and (best.answer.frontier is not None) == (option == "frontier")


def test_another_order_is_noticed(request_: Request, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_table, "ORDER", tuple(reversed(target_table.ORDER)))
    _, rows = found(request_, answer, {MEGATRON: 100.0, TITAN: 100.0}, any_s=90.0)
    best = recommended_target(rows)
    assert best is not None and best.name == TITAN


LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000,
    "max_position_embeddings": 2048,
}  # fmt: skip


@pytest.mark.parametrize("given", [{}, {"use_all": True}, {"objective": "devices"}, {"top": 3}], ids=str)
def test_the_recommended_target_has_the_answer_that_it_has_when_it_is_named(given: dict[str, Any]) -> None:
    """Also its runners-up, although only the rows of the table were searched on every part."""
    asked = {
        "cluster": "2x2xA100-80G", "seq_len": 2048, "global_batch_size": 8, "space": "core",
        "fix": {"tp": 2}, **given,
    }  # fmt: skip
    table = sw.plan(LLAMA, **asked)
    named = sw.plan(LLAMA, **asked, target=table.target)
    least = 1 if "objective" in given else 3  # two devices allow one other kind
    assert least <= len(table.runners_up) <= given.get("top", 8)
    assert table.runners_up == named.runners_up
    assert (table.best, table.optimum, table.cluster) == (named.best, named.optimum, named.cluster)
    first, second = table.proof, named.proof
    assert (first.enumerated, first.rejected, first.best_s) == (
        second.enumerated, second.rejected, second.best_s
    )  # fmt: skip
    assert (table.idle, table.question) == (named.idle, named.question)


def test_runners_up_that_time_does_not_reach_leave_the_row_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {"cluster": "1x2xA100-80G", "seq_len": 1024, "global_batch_size": 8}
    whole = sw.plan("gpt2", **asked, space="core")

    def ended(self: Any, row: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(planning._Asker, "with_runners_up", ended)
    found = sw.plan("gpt2", **asked, space="core", tolerance=0)
    assert found.answer is not None and found.answer.is_interrupted and not found.runners_up
    assert found.optimum_s == whole.optimum_s and found.target == whole.target


def test_our_runtime_is_asked_for_its_uneven_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the best plan is uneven, its uniform strategies are not searched: they took 38 of 43 s for 405B
    on 512 devices."""
    asked: dict[str, Any] = {"cluster": "1x2xA100-80G+1x2xV100-32G", "seq_len": 1024, "dtype": "fp32"}
    named = sw.plan("gpt2-xl", **asked, global_batch_size=16, target=OWN_TARGET)
    searched: list[str] = []

    def spy(question: Question, *given: Any, **options: Any) -> Any:
        searched.append(question.job.profile.name)
        return search_of(question, *given, **options)

    search_of = search.answer.search
    monkeypatch.setattr(search.answer, "search", spy)
    table = sw.plan("gpt2-xl", **asked, global_batch_size=16)
    assert table.target == OWN_TARGET and table.kind == "uneven" and table.best == named.best
    (row,) = (row for row in table.targets if row.target == OWN_TARGET)
    assert row.strategy is None and row.step_time_s == named.step_time_s
    own = target_of(OWN_TARGET).own_profile.name
    assert searched and own not in searched


@pytest.mark.parametrize(
    ("model", "cluster", "strategy", "names"),
    [
        # Optimizer states over all ranks: the distributed optimizer, and ZeRO-1 of DeepSpeed; TorchTitan and
        # FSDP2 have stages 2 and 3 alone.
        (
            "llama-2-7b",
            "1x8xH100-SXM",
            "dp=8,zero_stage=1",
            ("megatron-lm-0.19", "deepspeed-0.19", "megatron-fsdp-0.19"),
        ),
        # Of these only TorchTitan has the schedule.
        ("llama-2-7b", "1x8xH100-SXM", "pp=4,dp=2,schedule=zb_h1,zero_stage=1", ()),
        ("llama-2-7b", "1x8xH100-SXM", "pp=4,dp=2,schedule=zb_h1,zero_stage=3", ("torchtitan-0.3",)),
        # Three different degrees: nobody.
        ("llama-2-7b", "1x8xH100-SXM", "dp=8,param_shard=2,grad_shard=4,optim_shard=8", ()),
        # A family that Megatron-LM's flags cannot say.
        ("gemma-2-9b", "1x8xH200-SXM", "dp=8,zero_stage=1", ("deepspeed-0.19",)),
    ],
)
def test_targets_that_run_a_strategy(model: str, cluster: str, strategy: str, names: tuple[str, ...]) -> None:
    plan = sw.evaluate(model, cluster=cluster, seq_len=1024, global_batch_size=64, strategy=strategy)
    assert targets_that_run(plan) == names
