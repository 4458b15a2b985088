"""The answer card: every figure at its place, within 100 columns, for any answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from shardwise.app.cli import words
from shardwise.app.cli.card import answer_card, evaluation_card
from shardwise.app.cli.output import WIDTH, plain_text
from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.plans import Answer, usd_per_billion_tokens
from shardwise.strategy import Job, Strategy, complete

if TYPE_CHECKING:
    from tests.unit.app.conftest import Planner

MODEL = load_model("llama-3.1-8b")
CLUSTER = load_cluster("2x8xA100-80G")
JOB = Job(seq_len=4096, global_batch_size=64, dtype="bf16")


class Question:
    """A question with the objects that the planner reads from it."""

    model, cluster, job, space, top = MODEL, CLUSTER, JOB, "default", 2


@pytest.fixture
def answer(planner: Planner) -> Answer:
    return planner.plan(Question())


def card_of(answer: Answer, **changes: object) -> list[str]:
    parts = {"model": MODEL, "cluster": CLUSTER, "job": JOB, **changes}
    return plain_text(answer_card(answer, **parts)).splitlines()  # type: ignore[arg-type]


def row(card: list[str], label: str) -> str:
    (line,) = (line for line in card if line.startswith(f" {label:<14}") and line.strip())
    return line[15:]


def test_the_rows_of_the_card_show_the_answer(answer: Answer) -> None:
    card = card_of(answer)
    assert card[1] == " llama-3.1-8b on 2x8xA100-80G"
    # 64 x 4096 = 262,144 tokens.
    assert "16 devices · 64 × 4,096 = 262,144 tokens a step · bf16 · adamw" in card[2]
    assert row(card, "strategy") == "tp 8 · pp 2"
    assert row(card, "layout") == "2 × [8 A100-80G, 16 layers]"
    # The band is 0.9 and 1.2 times 12.5 s.
    assert row(card, "step time") == "12.500 s   80 % band 11.250 s to 15.000 s"
    # 262,144 / 12.5 / 16 = 1,310.72 per device, 20,971.52 in all.
    assert row(card, "throughput") == "1,311 tokens/s per device   20,972 tokens/s in all"
    assert row(card, "MFU") == "45.6 %   50.0 % counting attention in full"
    # 60 of 80 GiB is 75 %: 10.5 of 14 columns.
    assert row(card, "peak memory") == "60.0 of 80.0 GiB   75 % ██████████▌░░░ on rank 3, the tightest"
    assert row(card, "proof") == "optimal among 1,234 candidates of the space 'default'"
    text = "\n".join(card)
    assert "1,200 rejected · 30 pruned by the bound · 4 evaluated" in text
    assert "rejected by memory 1,000 · heads_tp 200" in text
    assert "lower bound 12.500 s, gap 0, found in 12.3 ms (11.9 ms of CPU)" in text


def test_time_and_memory_are_bars_largest_first(answer: Answer) -> None:
    card = card_of(answer)
    start = next(index for index, line in enumerate(card) if "where the time goes" in line)
    lines = card[start + 1 : start + 5]
    assert [line[1:20].strip() for line in lines] == ["backward", "forward", "pipeline bubble", ""]
    # 6.25 of 12.5 s; the largest bar has 8 columns, half of it 4.
    assert "████████" in lines[0] and "6.250 s  50 %" in lines[0]
    assert "████ " in lines[1] and "3.125 s  25 %" in lines[1]
    assert [line[51:71].strip() for line in lines] == ["activations", "parameters", "gradients", "context"]
    assert "25.0 GiB  42 %" in lines[0]


def test_every_part_that_the_cost_model_names_is_spelt_out(answer: Answer) -> None:
    """The longest is `memory-bound operators`, 22 columns; then a space, and the bar."""
    names = ("memory_bound", "context_communication", "tensor_communication")
    best = replace(answer.best, breakdown=dict.fromkeys(names, 1000.0))
    text = "\n".join(card_of(replace(answer, best=best)))
    assert "…" not in text
    assert " memory-bound operators ████████ 1,000.0 s  33 % " in text


def test_a_mixture_of_experts_has_its_facts_within_the_card(answer: Answer) -> None:
    job = replace(JOB, global_batch_size=1536, optimizer="adafactor")
    lines = card_of(answer, model=load_model("mixtral-8x7b"), job=job)
    assert any("12.9 billion active" in line for line in lines)
    assert max(map(len, lines)) <= WIDTH


def test_runners_up_say_how_much_slower_and_what_differs(answer: Answer) -> None:
    card = card_of(answer)
    start = next(index for index, line in enumerate(card) if line.startswith(" runners-up"))
    second = card[start + 1]
    assert second.startswith("  2  tp 4 · pp 2 · dp 2")
    # tp 4 and full recompute: 13 s, 4 % more than 12.5 s.
    assert "13.000 s" in second and "+4.0 %" in second and "60.0 GiB" in second
    text = " ".join(" ".join(card[start + 1 :]).split())
    assert "gpipe" in text and "recompute 16 layers in full" in text


def test_a_gap_is_not_called_optimal(answer: Answer) -> None:
    certificate = replace(answer.certificate, gap=0.0123, lower_bound_s=12.5 * (1 - 0.0123))
    card = card_of(replace(answer, certificate=certificate))
    assert row(card, "proof").startswith("not proven: gap 1.23 %   1,234 of 1,234 candidates")
    assert any("lower bound 12.346 s, gap 1.23 %" in line for line in card)
    assert not any("optimal" in line for line in card)


def test_the_card_fits_100_columns_for_long_names_and_many_parts(answer: Answer) -> None:
    parts = {f"a_part_with_quite_a_long_name_{index}": 1.0 + index for index in range(12)}
    best = replace(answer.best, breakdown=parts, memory={name: 2.0**33 for name in parts})
    rejected = {f"reason_code_{index}": 10**9 for index in range(20)}
    certificate = replace(answer.certificate, rejected=rejected, enumerated=20 * 10**9 + 34)
    long = replace(
        answer, best=best, certificate=certificate, runners_up=(*answer.runners_up, *answer.runners_up)
    )
    lines = card_of(long)
    assert max(map(len, lines)) <= WIDTH


def test_one_device_has_no_parallelism_and_no_runners_up(answer: Answer) -> None:
    plain = complete({}, devices=1, layers=32, experts=None, global_batch_size=64)
    alone = replace(answer, best=replace(answer.best, fields=plain), runners_up=())
    card = card_of(alone)
    assert row(card, "strategy") == "no parallelism"
    single = plain_text(
        answer_card(replace(answer, runners_up=()), model=MODEL, cluster=load_cluster("1xH100-SXM"), job=JOB)
    )
    assert " · 1 device · " in single
    assert not any("runners-up" in line for line in card)


def test_cost_is_shown_where_all_prices_are_known(answer: Answer) -> None:
    nodes = tuple(replace(node, price_usd_per_hour=36.0) for node in CLUSTER.nodes)
    with_prices = replace(CLUSTER, nodes=nodes)
    # 2 nodes at 36 USD/h are 0.02 USD/s; 1e9 tokens take 12.5 s * 1e9 / 262,144 = 47,683.7 s: 953.67 USD.
    assert usd_per_billion_tokens(with_prices, JOB, 12.5) == pytest.approx(953.674, abs=1e-3)
    assert row(card_of(answer, cluster=with_prices), "cost") == "$953.67 per billion tokens"
    free = replace(CLUSTER, nodes=(nodes[0], replace(nodes[1], price_usd_per_hour=None)))
    assert usd_per_billion_tokens(free, JOB, 12.5) is None
    assert not any(line.startswith(" cost ") for line in card_of(answer, cluster=free))


def test_assumptions_and_next_commands_close_the_card(answer: Answer) -> None:
    cluster = replace(CLUSTER, assumptions=("between nodes 200 Gb/s, default",))
    lines = evaluation_card(answer.best, model=MODEL, cluster=cluster, job=JOB, next_commands=("one", "two"))
    card = plain_text(lines).splitlines()
    assert "bf16, adamw, 5 % of device memory kept free" in row(card, "assumptions")
    assert any("between nodes 200 Gb/s, default" in line for line in card)
    assert any("evaluated by max-plus" in line for line in card)
    assert row(card, "next") == "one"
    assert card[-2].strip() == "two"


def strategy(**fields: object) -> Strategy:
    return complete(fields, devices=64, layers=32, experts=None, global_batch_size=64)


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (strategy(tp=8), "states replicated"),
        (strategy(tp=8, zero_stage=1), "ZeRO-1 over 8 ranks"),
        (strategy(tp=8, zero_stage=2), "ZeRO-2 over 8 ranks"),
        (strategy(tp=8, zero_stage=3), "ZeRO-3 over 8 ranks"),
        (strategy(tp=8, optim_shard=4), "ZeRO: parameters / gradients / optimizer sharded over 1 / 1 / 4"),
        (strategy(tp=64), ""),
    ],
)
def test_sharding_in_words(chosen: Strategy, text: str) -> None:
    assert words.sharding_text(chosen) == text


def test_every_non_default_field_of_a_strategy_is_shown() -> None:
    chosen = strategy(
        tp=4, pp=4, cp=2, cp_kind="all_to_all", micro_batch_size=2, schedule="interleaved_1f1b", vpp=2,
        recompute="full", recompute_layers=2, offload="both", first_stage_layers=3, axis_order="cp-tp-dp-pp",
    )  # fmt: skip
    # dp is 64 / (4 * 4 * 2) = 2, so 64 / (2 * 2) = 16 micro-batches.
    assert words.detail_texts(chosen, JOB, 32) == [
        "micro-batch size 2, 16 micro-batches", "interleaved_1f1b × 2", "states replicated",
        "recompute 2 layers in full",
        "sequence parallel", "cp by all_to_all", "offload both", "ends of 3 and 4 layers", "axes cp-tp-dp-pp",
    ]  # fmt: skip


def test_one_layer_is_written_in_the_singular() -> None:
    chosen = strategy(tp=2, pp=32, recompute="full", recompute_layers=1)
    assert "recompute 1 layer in full" in words.detail_texts(chosen, JOB, 32)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.3456, "12.346 s"),
        (123.456, "123.5 s"),
        (0.0123456, "12.35 ms"),
        (0.999, "999 ms"),
        (4567.89, "4,567.9 s"),
    ],
)
def test_seconds_in_words(value: float, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.0, ""), (1.0, "████"), (0.5, "██"), (0.53125, "██▏"), (2.0, "████"), (-1.0, "")]
)
def test_bars_have_eighths_of_a_column(fraction: float, text: str) -> None:
    assert words.bar(fraction, 4) == text
