"""Binding a model, a cluster and a job: figures of the slowest device, divisibility, and required figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.cost.hand_made import (
    IDEAL,
    SOFTWARE,
    brick_model,
    cluster,
    device,
    node,
    operator_model,
    problem,
    table,
    with_software,
)

from shardwise.cluster import Cluster
from shardwise.cost import RECIPES, Problem, bind, find_recipe
from shardwise.cost import recipe as recipe_module
from shardwise.errors import ConfigError
from shardwise.model import Experts, model_from_config
from shardwise.operators import Attention, Extent, GroupedMatmul, Matmul, Weight
from shardwise.search.step_times import step_times_s


def mixed_cluster() -> Cluster:
    """A node of slow devices with much memory and a node of fast ones with little."""
    slow = device(name="slow", peak_flop_per_s={"bf16": 400.0, "fp32": 300.0}, memory_bytes=7000)
    fast = device(
        name="fast",
        peak_flop_per_s={"bf16": 900.0, "fp32": 200.0},
        memory_bytes=5000,
        memory_bytes_per_s=600.0,
    )
    unused = device(
        name="unused", peak_flop_per_s={"bf16": 1.0, "fp32": 1.0}, memory_bytes=1, memory_bytes_per_s=1.0
    )
    plain = cluster(2)
    return replace(
        plain,
        classes={"unused": unused, "slow": slow, "fast": fast},
        nodes=(
            node("slow", speed=1.0, host_memory_bytes=400.0, host_link_bytes_per_s=70.0),
            node("fast", speed=0.5, host_memory_bytes=800.0, host_link_bytes_per_s=60.0),
        ),
    )


def test_every_rank_keeps_the_pace_of_the_slowest() -> None:
    p = problem(on=mixed_cluster())
    assert p.device.name == "slow"
    assert p.matmul_flop_per_s == 200.0  # the slowest class at the slowest node's speed
    assert p.other_flop_per_s == 200.0
    assert p.memory_bytes_per_s == 300.0  # 600 * 0.5
    assert p.capacity_bytes == 5000.0
    assert p.host_bytes_per_device == 100.0  # 400 / 4
    assert p.host_link_bytes_per_s == 60.0


def test_the_slowest_device_depends_on_the_matmul_dtype() -> None:
    p = problem(on=mixed_cluster(), dtype="fp32")
    assert p.device.name == "fast"
    assert p.matmul_flop_per_s == 100.0


def test_matmuls_of_low_precision_reach_less_of_their_peak() -> None:
    curve = replace(IDEAL.matmul, fp8_fraction=0.75, fp4_fraction=0.5)
    peaks = {"bf16": 1000.0, "fp8": 2000.0, "fp4": 4000.0, "fp32": 500.0}
    of = device(replace(IDEAL, matmul=curve), peak_flop_per_s=peaks)
    expected = {
        "bf16": 1000.0,
        "fp8": 1500.0,
        "fp8-block": 1500.0,
        "mxfp8": 1500.0,
        "nvfp4": 2000.0,
        "fp32": 500.0,
    }
    for dtype, flop_per_s in expected.items():
        p = problem(on=cluster(1, of=of), dtype=dtype)
        assert p.matmul_flop_per_s == flop_per_s
        assert p.other_flop_per_s == (500.0 if dtype == "fp32" else 1000.0)


def test_software_decides_the_dtype_of_gradients() -> None:
    p = problem()
    assert p.recipe.gradient_bytes == 4.0
    narrow = with_software(p, reduce_in_fp32=False)
    assert narrow.recipe == replace(p.recipe, gradient_bytes=2.0, reduced_bytes=2.0)
    cast = with_software(p, reduce_in_fp32=False, accumulates_in_fp32=True)
    assert cast.recipe == replace(p.recipe, reduced_bytes=2.0)
    wide = with_software(problem(dtype="fp32"), reduce_in_fp32=False).recipe
    assert wide.gradient_bytes == wide.reduced_bytes == 4.0


def test_software_that_applies_no_dropout_trains_a_model_that_has_none() -> None:
    config = {"layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 100, "seq_len": 32}
    model, none = (model_from_config({**config, "dropout": rate}) for rate in (0.1, 0.0))
    of_config = problem(model=model)
    drops_nothing = with_software(of_config, applies_dropout=False)
    bound = bind(model, drops_nothing.cluster, drops_nothing.job)
    assert bound.model.kinds == none.kinds and bound.model.embedding == none.embedding
    assert of_config.model is model


def test_rows_of_columns_are_all_distinct() -> None:
    p = problem()
    columns = [np.array([1, 1, 2, 1]), np.array([3, 3, 3, 3])]
    rows, of_row = p.distinct(columns)
    assert len(rows) == 2 and columns[0][rows[of_row]].tolist() == [1, 1, 2, 1]
    rows, of_row = replace(p, is_columnar=True).distinct(columns)
    assert rows.tolist() == of_row.tolist() == [0, 1, 2, 3]


def test_numbers_may_be_columns() -> None:
    """A row of a columnar problem costs the same as with its own numbers as scalars."""
    texts = ("dp=4", "dp=4", "pp=2,tp=2,zero_stage=1", "pp=4,recompute=full")
    fractions, passes = np.array([0.5, 0.9, 0.7, 0.7]), np.array([1.0, 1.5, 0.5, 2.0])
    starts, shares = np.array([0.0, 0.1, 0.2, 0.3]), np.array([1.0, 0.5, 0.0, 0.25])

    def changed(fraction: Any, often: Any, startup_s: Any, share: Any, *, is_columnar: bool) -> Problem:
        efficiency = replace(
            IDEAL,
            memory=replace(IDEAL.memory, fraction=fraction),
            scale_up=replace(IDEAL.scale_up, startup_s=startup_s),
        )
        profile = replace(SOFTWARE, pointwise_passes=often, pipeline_overlap=share, dispatch_s=startup_s)
        job = replace(problem().job, profile=profile)
        return bind(brick_model(), cluster(1, of=device(efficiency)), job, is_columnar=is_columnar)

    together = changed(fractions, passes, starts, shares, is_columnar=True)
    found = step_times_s(together, table(together, *texts))
    for row, numbers in enumerate(zip(fractions, passes, starts, shares, strict=True)):
        alone = changed(*(float(number) for number in numbers), is_columnar=False)
        assert found[row] == pytest.approx(float(step_times_s(alone, table(alone, texts[row]))[0]), rel=1e-13)


def test_a_margin_stays_free() -> None:
    assert problem(memory_margin=0.05).usable_bytes == pytest.approx(95_000.0)


@pytest.mark.parametrize("dtype", ["fp16", "nvfp4"])
def test_a_dtype_that_a_device_lacks_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError) as caught:
        problem(dtype=dtype)
    assert caught.value.key == "dtype"
    assert "bf16" in str(caught.value.allowed)


def test_an_unknown_dtype_names_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        find_recipe("bf17")
    assert caught.value.key == "dtype"
    assert str(caught.value.allowed) == ", ".join(RECIPES)


def test_recipes_of_low_precision_keep_sixteen_bits() -> None:
    made = [recipe_module._sixteen("bf16"), recipe_module._sixteen("bf16", "fp8", 1.0)]
    assert made == [find_recipe("bf16"), find_recipe("fp8")]  # the table equals the result of its rule
    for name in ("bf16", "fp16", "fp8", "fp8-current", "fp8-block", "mxfp8", "nvfp4"):
        recipe = find_recipe(name)
        stored = (recipe.activation_bytes, recipe.weight_bytes, recipe.gradient_bytes, recipe.master_bytes)
        assert stored == (2.0, 2.0, 4.0, 4.0)
    assert {name: (r.matmul, r.other) for name, r in RECIPES.items()} == {
        "fp32": ("fp32", "fp32"),
        "tf32": ("tf32", "fp32"),
        "fp16": ("fp16", "fp16"),
        "bf16": ("bf16", "bf16"),
        "fp8": ("fp8", "bf16"),
        "fp8-current": ("fp8", "bf16"),
        "fp8-block": ("fp8", "bf16"),
        "mxfp8": ("fp8", "bf16"),
        "nvfp4": ("fp4", "bf16"),
    }


def test_optimizer_states_per_parameter() -> None:
    assert {name: cost.state_bytes for name, cost in recipe_module.OPTIMIZERS.items()} == {
        "adamw": 8.0,  # two fp32 moments
        "adafactor": 0.0,
        "sgd": 4.0,  # one
        "muon": 4.0,
    }
    # Five Newton-Schulz steps of three products of 2 * hidden flop per parameter.
    assert recipe_module.OPTIMIZERS["muon"].work_flop_per_hidden == 5 * 3 * 2
    assert recipe_module.OPTIMIZERS["adamw"].work_flop_per_hidden == 0.0


def test_limits_are_those_common_to_all_device_kinds() -> None:
    def core(heads: int, kv_heads: int) -> Attention:
        extents = Extent(heads, "heads"), Extent(kv_heads, "kv_heads")
        return Attention(name="a", heads=extents[0], kv_heads=extents[1], qk_dim=2, v_dim=2)

    def split(size: int, role: str) -> Matmul | GroupedMatmul:
        if role == "expert_ffn":
            n = Extent(size, "expert_ffn")
            weight = Weight(name="w", shape=(Extent(10), n), experts=6)
            return GroupedMatmul(name="g", experts=6, k=Extent(10), n=n, weights=(weight,))
        n = Extent(size, "ffn")
        return Matmul(name="m", k=Extent(10), n=n, weights=(Weight(name="w", shape=(Extent(10), n)),))

    model = operator_model(
        (
            core(12, 6),
            core(8, 4),
            split(36, "ffn"),
            split(24, "ffn"),
            split(30, "expert_ffn"),
            split(20, "expert_ffn"),
        ),
        experts=Experts(experts=6, top_k=2),
    )
    limits = problem(model, seq_len=7, batch=9).limits
    assert (limits.heads, limits.kv_heads) == (4, 2)
    assert (limits.ffn_splits, limits.expert_ffn, limits.experts) == (12, 10, 6)
    assert (limits.layers, limits.seq_len, limits.global_batch_size) == (2, 7, 9)


def test_parts_that_a_model_lacks_limit_nothing() -> None:
    limits = problem(brick_model()).limits
    assert (limits.heads, limits.experts, limits.expert_ffn) == (0, 0, 0)
