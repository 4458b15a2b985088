"""The answer card: every figure at its place, within the columns of the terminal, for any answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from shardwise.app.cli import words
from shardwise.app.cli.alternatives import INDISTINGUISHABLE
from shardwise.app.cli.card import Shown, answer_card, brief_line, evaluation_card
from shardwise.app.cli.output import plain_text
from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.plans import Answer, MixedFigures, Result, usd_per_billion_tokens
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
def answer(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> Answer:
    monkeypatch.setenv("COLUMNS", "80")
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
    assert card[2].endswith("16 devices · 64 × 4,096 = 262,144 tokens a step")
    assert card[3] == " bf16 · adamw"
    assert row(card, "strategy") == "tp 8 · pp 2"
    assert row(card, "layout") == "2 × [8 A100-80G, 16 layers]"
    # The band is 0.9 and 1.2 times 12.5 s.
    assert row(card, "step time") == "12.500 s   80 % band 11.2 s to 15.0 s"
    # 262,144 / 12.5 / 16 = 1,310.72 per device, 20,971.52 in all.
    assert row(card, "throughput") == "1,311 tokens/s per device   20,972 tokens/s in all"
    assert row(card, "MFU") == "45.6 %   50.0 % counting attention in full"
    fits = "60.0 of 80.0 GiB (57 to 67; 0.93 likely to fit)"
    assert row(card, "peak memory") == f"{fits}   75 % rank 3"
    assert row(card, "host memory") == "nothing is offloaded; 256.0 GiB per rank"
    # The runners-up take 13.0 and 12.5 s: the second is as fast, the first 4 % slower.
    assert row(card, "how sure") == "2 plans are within 0.00 %: indistinguishable"
    assert row(card, "proof") == "optimal among 1,234 candidates of the space 'default'"
    text = "\n".join(card)
    assert "lower bound 12.500 s, gap 0, found in 12.3 ms (11.9 ms of CPU)" in text
    assert "rejected" not in text


def test_the_parts_of_the_card_come_in_the_order_in_which_they_are_asked(answer: Answer) -> None:
    """The plan in the words of its target, time, memory, how sure, where both go, alternatives, proof."""
    shown = Shown(target="megatron-lm-0.19", target_words=("--tensor-model-parallel-size 8",))
    card = card_of(answer, shown=shown)
    starts = (
        "target", "settings", "strategy", "layout", "step time", "peak memory", "host memory", "how sure",
        "where the time goes", "alternatives", "proof", "assumptions",
    )  # fmt: skip
    places = [
        next(place for place, line in enumerate(card) if line.startswith(f" {start}")) for start in starts
    ]
    assert places == sorted(places)
    assert row(card, "settings") == "--tensor-model-parallel-size 8"


def test_everything_has_the_counts_and_the_reasons_in_words(answer: Answer) -> None:
    text = "\n".join(card_of(answer, shown=Shown(is_verbose=True)))
    assert "1,000  rejected, too large for the memory of the device" in text
    assert "  200  rejected, not met: tp divides the attention heads" in text
    assert "   30  pruned by the bound" in text and "    4  evaluated" in text
    assert "heads_tp" not in text


def test_one_line_has_the_plan_its_time_and_its_memory(answer: Answer) -> None:
    text = plain_text([brief_line(answer.best, "megatron-lm-0.19", answer)])
    assert text == (
        "megatron-lm-0.19: tp 8 · pp 2, micro-batch size 1; 12.500 s a step (11.2 s to 15.0 s); "
        "60.0 of 80.0 GiB, 0.93 likely to fit; optimal\n"
    )
    gap = replace(answer.certificate, gap=0.0123)
    text = plain_text([brief_line(answer.best, None, replace(answer, certificate=gap))])
    assert text.startswith("any: ") and text.endswith("; not proven: gap 1.23 %\n")


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ((1.005, 1.01, 1.05), "3 plans are within 1.0 %: indistinguishable"),
        ((0.995, 1.0155), "at least 3 plans are within 1.6 %: indistinguishable"),
        ((1.03, 1.2), "the next plan is 3.0 % slower"),
        ((0.97, 1.2), "the next plan is 3.0 % faster"),
    ],
)
def test_how_sure_counts_the_plans_that_cannot_be_told_apart(
    answer: Answer, factors: tuple[float, ...], text: str
) -> None:
    assert INDISTINGUISHABLE == 0.02
    found = [replace(answer.best, step_time_s=12.5 * factor) for factor in factors]
    assert row(card_of(replace(answer, runners_up=tuple(found))), "how sure") == text


def test_time_and_memory_are_bars_largest_first(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    card = card_of(answer)
    # 60 of 80 GiB is 75 %: 10.5 of 14 columns.
    assert row(card, "peak memory").endswith("   75 % ██████████▌░░░ rank 3")
    start = next(index for index, line in enumerate(card) if "where the time goes" in line)
    lines = card[start + 1 : start + 5]
    assert [line[1:20].strip() for line in lines] == ["backward", "forward", "pipeline bubble", ""]
    # 6.25 of 12.5 s; the largest bar has 8 columns, half of it 4.
    assert "██████" in lines[0] and "6.250 s 50 %" in lines[0]
    assert "████ " in lines[1] and "3.125 s 25 %" in lines[1]
    right = card[start].index("where the memory goes")
    names = [line[right : right + 20].strip() for line in lines]
    assert names == ["activations", "parameters", "gradients", "context"]
    assert "25.0 GiB 42 %" in lines[0]


def test_a_small_peak_and_its_band_have_one_unit(answer: Answer) -> None:
    """256 of 1,024 MiB, between 192 and 320."""
    mib = 2.0**20
    peak = replace(answer.best.peak_memory, device=256 * mib, capacity=1024 * mib)
    best = replace(answer.best, peak_memory=peak, memory_band_bytes=(192 * mib, 320 * mib))
    text = row(card_of(replace(answer, best=best)), "peak memory")
    assert text.startswith("256 MiB of 1.0 GiB (192 to 320 MiB; 0.93 likely to fit)   25 %")


def test_an_uneven_plan_is_as_sure_as_the_best_uniform_one_is_slower(answer: Answer) -> None:
    """14 s are 12 % more than 12.5 s."""
    mixed = MixedFigures(
        uniform_step_time_s=14.0, fastest_class_step_time_s=None, fastest_class=None, idle=()
    )
    best = replace(answer.best, fields=None)
    card = card_of(replace(answer, best=best, runners_up=(), mixed=mixed))
    assert row(card, "how sure") == "the best uniform strategy is 12.0 % slower"


def test_small_terms_share_a_line_unless_everything_is_shown(answer: Answer) -> None:
    """0.5 % of 12.5 s are 62.5 ms: 40 and 50 ms are less, and 90 ms together."""
    breakdown = {"matmul": 12.31, "optimizer": 0.1, "host_actions": 0.04, "bubble": 0.05, "none": 0.0}
    best = replace(answer.best, breakdown=breakdown)
    text = " ".join(" ".join(card_of(replace(answer, best=best))).split())
    assert " 2 other terms 90 ms 1 % " in text and "host actions" not in text
    text = " ".join(" ".join(card_of(replace(answer, best=best), shown=Shown(is_verbose=True))).split())
    assert " host actions 40 ms 0 % " in text and "other term" not in text


@pytest.mark.parametrize("columns", [40, 60, 80, 99, 120, 500])
def test_the_card_is_as_wide_as_the_terminal(
    answer: Answer, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = card_of(answer)
    rule = next(line for line in lines if line.startswith("───"))
    assert max(map(len, lines)) == len(rule) == min(max(columns, 60), 120)


def test_every_part_that_the_cost_model_names_is_spelt_out(answer: Answer) -> None:
    """The longest is `memory-bound operators`, 22 columns; then a space, and the seconds."""
    names = ("memory_bound", "context_communication", "tensor_communication")
    best = replace(answer.best, breakdown=dict.fromkeys(names, 1000.0))
    text = "\n".join(card_of(replace(answer, best=best)))
    assert "…" not in text
    assert " memory-bound operators  1,000.0 s 33 % " in text


def test_a_mixture_of_experts_has_its_facts_within_the_card(answer: Answer) -> None:
    job = replace(JOB, global_batch_size=1536, optimizer="adafactor")
    lines = card_of(answer, model=load_model("mixtral-8x7b"), job=job)
    assert any("12.9 billion active" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_runners_up_say_how_much_slower_and_what_differs(answer: Answer) -> None:
    card = card_of(answer)
    start = next(index for index, line in enumerate(card) if line.startswith(" alternatives"))
    second = card[start + 1]
    assert second.startswith("  2  tp 4 · pp 2 · dp 2")
    # tp 4 and full recompute: 13 s, 4 % more than 12.5 s.
    assert "13.000 s" in second and "+4.0 %" in second and second.endswith("60.0 GiB   0.93")
    text = " ".join(" ".join(card[start + 1 :]).split())
    assert "gpipe" in text and "recompute 16 layers in full" in text


def test_runners_up_of_one_kind_share_a_line(answer: Answer) -> None:
    best, other = answer.best, answer.runners_up[0]
    strategy = other.strategy

    def slower(result: Result, factor: float, **values: Any) -> Result:
        return replace(
            result, step_time_s=best.step_time_s * factor, fields=replace(result.strategy, **values)
        )

    found = [
        slower(best, 1.01, micro_batch_size=2),
        slower(other, 1.02),
        slower(other, 1.03, micro_batch_size=4),
        slower(other, 1.05, micro_batch_size=8),
        slower(best, 1.06, micro_batch_size=4),
        *(slower(other, 1.07, tp=2**power, dp=2**power) for power in (4, 5, 6, 7)),
    ]
    many = replace(answer, runners_up=tuple(found))
    rows = numbered(card_of(many))
    assert list(rows) == ["3", "7", "8", "9"]  # the first of each other kind, by its place among all
    assert "+2.0 %" in rows["3"] and "2 more like it, to +5.0 %" in rows["3"]
    assert strategy.recompute == "full" and "recompute 16 layers in full" in rows["3"]
    assert "1 plan of 1 more kind (--verbose)" in rows["9"]
    assert "2 plans like the recommended one, to +6.0 % (--verbose)" in rows["9"]
    rows = numbered(card_of(many, shown=Shown(is_verbose=True)))
    assert list(rows) == ["2", "3", "7", "8", "9", "10"]
    assert "+1.0 %" in rows["2"] and rows["2"].endswith("1 more like it, to +6.0 %")


def numbered(card: list[str]) -> dict[str, str]:
    """The alternatives by their number, each with all of its lines."""
    rows: dict[str, str] = {}
    start = next(index for index, line in enumerate(card) if line.startswith(" alternatives"))
    for line in card[start + 1 : card.index("", start)]:
        if (number := line[:4].strip()).isdigit():
            rows[number] = line
        else:
            rows[next(reversed(rows))] += f" {line.strip()}"
    return rows


def test_a_gap_is_not_called_optimal(answer: Answer) -> None:
    certificate = replace(answer.certificate, gap=0.0123, lower_bound_s=12.5 * (1 - 0.0123))
    card = card_of(replace(answer, certificate=certificate))
    assert row(card, "proof") == "not proven: gap 1.23 %"
    assert any(line.strip() == "1,234 of 1,234 candidates of the space 'default' decided" for line in card)
    assert any("lower bound 12.346 s, gap 1.23 %" in line for line in card)
    assert not any("optimal" in line for line in card)


def test_the_card_fits_80_columns_for_long_names_and_many_parts(answer: Answer) -> None:
    parts = {f"a_part_with_quite_a_long_name_{index}": 1.0 + index for index in range(12)}
    best = replace(answer.best, breakdown=parts, memory={name: 2.0**33 for name in parts})
    rejected = {f"reason_code_{index}": 10**9 for index in range(20)}
    certificate = replace(answer.certificate, rejected=rejected, enumerated=20 * 10**9 + 34)
    long = replace(
        answer, best=best, certificate=certificate, runners_up=(*answer.runners_up, *answer.runners_up)
    )
    lines = card_of(long)
    assert max(map(len, lines)) <= 80


def test_one_device_has_no_parallelism_and_no_runners_up(answer: Answer) -> None:
    plain = complete({}, devices=1, layers=32, experts=None, global_batch_size=64)
    alone = replace(answer, best=replace(answer.best, fields=plain), runners_up=())
    card = card_of(alone)
    assert row(card, "strategy") == "no parallelism"
    single = plain_text(
        answer_card(replace(answer, runners_up=()), model=MODEL, cluster=load_cluster("1xH100-SXM"), job=JOB)
    )
    assert " · 1 device · " in single
    assert not any("alternatives" in line or "how sure" in line for line in card)


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
    shown = Shown(next_commands=("one", "two"), is_verbose=True)
    lines = evaluation_card(answer.best, model=MODEL, cluster=cluster, job=JOB, shown=shown)
    card = plain_text(lines).splitlines()
    assert row(card, "assumptions") == "between nodes 200 Gb/s, default (--inter-node)"
    text = "\n".join(card)
    assert "5 % of device memory kept free (--memory-margin)" in text
    assert "bf16 (--dtype), adamw (--optimizer)" in text and "evaluated by max-plus" in text
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
