"""Activations of every rank at its peak, counted action by action in the table of the schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import brick_model, cluster, problem, table

from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind, costs_of_all_stages, costs_of_peak_stages, rank_bytes
from shardwise.cost.moments import Moments, moments_of
from shardwise.model import load_model
from shardwise.schedule import generate
from shardwise.search import default_job
from shardwise.strategy import StrategyTable, complete, layer_counts

PATTERN = (1, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0)
"""Kinds of thirteen layers."""

LAYERS = len(PATTERN)

SAVED, INPUT = 300, 100
"""Bytes of a layer of either kind: the product's input (100 B) and what the norm saves (200 B); its input."""

WAITING = (200, 300)
"""Bytes of a layer that waits: the product's input, and the gradient of its output, 5 x 10 numbers of two
bytes or 5 x 20."""

KEPT = (450, 550)
"""The same where the graph stays: all that it saves, that gradient, and that of the norm's output. The norm
moves 100 B in its forward pass, half of them its output."""

LOGITS = 5 * 20 * 4
"""Bytes of a micro-batch's logits. Half of them waits: the gradient of the head's output in 16 bits."""

CASES = [
    *(f"pp={pp},schedule={name}" for name in ("1f1b", "gpipe", "zb_h1", "zb_h2") for pp in (2, 4)),
    *(f"pp=4,schedule={name},vpp=2" for name in ("interleaved_1f1b", "zb_v", "dualpipe_v")),
    "pp=4,schedule=interleaved_1f1b,vpp=3",
    "pp=2,schedule=interleaved_1f1b,vpp=4",
    "pp=2,schedule=dualpipe_v,vpp=2",
]

ENDS = ["", ",first_stage_layers=1,last_stage_layers=3", ",first_stage_layers=4,last_stage_layers=1"]
RECOMPUTES = [
    "",
    ",recompute=full,recompute_layers=1",
    ",recompute=full,recompute_layers=2",
    ",recompute=full",
]


def ends_of(text: str) -> list[str]:
    """Splits of the layers; two stages have no layers between the ends."""
    return ENDS if "pp=4" in text or "vpp" in text else ENDS[:1]


def given(batch: int, *, keeps_graphs: bool = False) -> Problem:
    found = problem(brick_model(PATTERN), cluster(2), batch=batch)
    profile = replace(found.profile, keeps_split_graphs=keeps_graphs)
    return replace(found, job=replace(found.job, profile=profile))


def counted(p: Problem, text: str, waiting: tuple[int, ...]) -> dict[int, int]:
    """The most bytes of activations and further losses on each rank, action by action."""
    strategy = table(p, text)[0]
    m = p.job.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    schedule = generate(strategy.schedule, pp=strategy.pp, microbatches=m, vpp=strategy.vpp)
    stages = strategy.pp * strategy.vpp
    counts = layer_counts(LAYERS, stages, strategy.first_stage_layers, strategy.last_stage_layers)
    starts = [sum(counts[:stage]) for stage in range(stages)]
    again = [0] * stages
    if strategy.recompute == "full":
        again = [min(strategy.recompute_layers, count) for count in counts]
    saved = [count * SAVED - few * (SAVED - INPUT) for count, few in zip(counts, again, strict=True)]
    waits = [
        sum(waiting[kind] for kind in PATTERN[start : start + count])
        for start, count in zip(starts, counts, strict=True)
    ]
    waits[-1] += LOGITS // 2
    most = {}
    for rank, row in enumerate(schedule.ranks):
        now = peak = heads = 0
        for action in row:
            is_head = action.stage == stages - 1
            now += {"F": saved, "B": saved, "I": saved, "W": waits}[action.kind][action.stage] * (
                1 if action.kind == "F" else -1
            )
            now += waits[action.stage] if action.kind == "I" else 0
            heads += is_head * {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            peak = max(peak, now + max(heads - 1, 0) * LOGITS)
        most[rank] = peak + (SAVED - INPUT) * (strategy.recompute == "full")
    return most


def activations(p: Problem, text: str) -> tuple[dict[int, float], float]:
    """Our bytes of activations and temporaries of each rank; and the most of any, from few moments."""
    rows = table(p, text)
    costs = costs_of_all_stages(p, rows)
    memory = rank_bytes(p, rows, costs)
    work = memory.activations + memory.temporaries
    ranks = costs.partition.moments.rank[:, 0]
    few = rank_bytes(p, rows, costs_of_peak_stages(p, rows))
    of_ranks = {rank: float(work[ranks == rank, 0].max()) for rank in range(int(rows.pp[0]))}
    return of_ranks, float((few.activations + few.temporaries)[:, 0].max())


TEMPORARIES = 2 * 200 + 2 * 210
"""The largest tensor (the logits too take 400 B) with its gradient, and 210 weights of the wide layer."""


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("batch", [48, 96])
@pytest.mark.parametrize("keeps_graphs", [False, True])
def test_activations_are_those_counted_action_by_action(text: str, batch: int, keeps_graphs: bool) -> None:
    p = given(batch, keeps_graphs=keeps_graphs)
    for ends in ends_of(text):
        for recompute in RECOMPUTES:
            whole = text + ends + recompute
            expected = counted(p, whole, KEPT if keeps_graphs else WAITING)
            found, most = activations(p, whole)
            assert found == pytest.approx({rank: each + TEMPORARIES for rank, each in expected.items()}), (
                whole
            )
            assert most == pytest.approx(max(found.values())), whole


def test_dualpipe_v_has_the_loss_of_one_micro_batch() -> None:
    """The first rank has both ends: 2 pp micro-batches of stage 0, and one of the last stage at a time."""
    p = given(96)
    moments = moments_of(p, table(p, "pp=4,schedule=dualpipe_v,vpp=2"), of_every_rank=True)
    first = moments.rank[:, 0] == 0
    assert moments.first[first, 0].max() == 8
    assert moments.last[first, 0].max() == moments.waits_last[first, 0].max() == 1


def listed(moments: Moments, row: int) -> set[tuple[Any, ...]]:
    names = ("rank", "first", "last", "waits_first", "waits_last", "low", "high", "waits", "rank_layers")
    columns = np.concatenate([np.atleast_2d(getattr(moments, name)[..., row]) for name in names])
    return set(map(tuple, columns.T.tolist()))


def test_rows_of_a_table_have_the_moments_that_they_have_alone() -> None:
    p = given(96)
    texts = [text + ends for text in CASES for ends in ends_of(text)]
    together = moments_of(p, table(p, *texts), of_every_rank=True)
    for row, text in enumerate(texts):
        assert listed(together, row) == listed(moments_of(p, table(p, text), of_every_rank=True), 0), text


def waiting_of_deepseek_v3(dtype: str, **software: Any) -> list[float]:
    """Bytes per token that wait of a dense layer, of one with experts, and of the head."""
    model, on = load_model("deepseek-v3"), load_cluster("1x8xH100-SXM")
    job = default_job(model, on, seq_len=4096, global_batch_size=8, dtype=dtype, expert_imbalance=1.0)
    p = bind(model, on, replace(job, profile=replace(job.profile, **software)))
    fields = {"dp": 8, "ep": 8, "etp": 1, "micro_batch_size": 1}
    strategy = complete(fields, devices=8, layers=61, experts=256, global_batch_size=8)
    grid = costs_of_all_stages(p, StrategyTable.of([strategy])).partitions.grid
    return [float(block.waiting_bytes[0]) / 4096 for block in (*grid.kinds, grid.head)]


HIDDEN = 7168

LATENT_INPUTS = HIDDEN + 1536 + 512 + 128 * 128
"""Numbers per token that the products of latent attention read: the normed input, the normed latents of
queries and of keys and values, and the output of attention."""

LATENT_GRADIENTS = 1536 + 128 * 192 + 576 + 128 * 256 + HIDDEN
"""And those of their outputs: both latents (that of keys with 64 rotary ones), queries, keys and values, and
the output."""

EXPERT_INPUTS = HIDDEN + 8 * (HIDDEN + 2048) + 2048
"""What router, eight experts and the shared expert read. Router and shared expert read the same."""

EXPERT_GRADIENTS = 256 + 8 * (2 * 2048 + HIDDEN) + 2 * 2048 + HIDDEN


def test_what_waits_of_latent_attention_and_experts() -> None:
    dense, experts, head = waiting_of_deepseek_v3("bf16")
    mlp = HIDDEN + 18_432 + 2 * 18_432 + HIDDEN
    assert dense == pytest.approx(2 * (LATENT_INPUTS + LATENT_GRADIENTS + mlp))
    of_experts = EXPERT_INPUTS + EXPERT_GRADIENTS
    assert experts == pytest.approx(2 * (LATENT_INPUTS + LATENT_GRADIENTS + of_experts))
    # In 8 bits (and a scale of 32 for each block of 128) all of it is cast, but for attention's output, which
    # is saved in 16.
    in_8_bits, is_wide = waiting_of_deepseek_v3("fp8-block"), 128 * 128
    assert in_8_bits[1] == pytest.approx((1 + 4 / 128) * (experts / 2 - is_wide) + 2 * is_wide)
    # Logits of the model and of its prediction module, in 16 bits in both.
    assert head > in_8_bits[2] > 2 * 2 * 129_280


def test_unfused_scores_do_not_wait() -> None:
    assert waiting_of_deepseek_v3("bf16", attention=()) == pytest.approx(waiting_of_deepseek_v3("bf16"))
