"""Axes restricted to some values, counted and checked, compared with a filtered enumeration."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
from tests.property.search_space_reference import SpaceTwin

from shardwise.search.space import Space
from shardwise.strategy import FIELDS, Strategy
from shardwise_verify import InputError, count_space

DEVICES, LAYERS, BATCH = 4, 5, 4
Axes = Mapping[str, tuple[int | str | bool, ...]]


@cache
def candidates(core: bool, moe: bool, module_sets: tuple[str, ...] = ("",)) -> tuple[Strategy, ...]:
    twin = SpaceTwin(core=core, devices=DEVICES, layers=LAYERS, moe=moe, batch=BATCH, module_sets=module_sets)
    return tuple(twin.candidates())


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("space", ["core", "default"])
@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"tp": (1, 2)},
        {"tp": (1, 3)},
        {"tp": (3,)},
        {"schedule": ("1f1b", "zb_v"), "vpp": (1, 2)},
        {"recompute_layers": (0, 2, 5)},
        {"recompute": ("full",), "recompute_layers": (1, 5)},
        {"first_stage_layers": (0, 1, 2), "last_stage_layers": (1, 3)},
        {"param_shard": (1,), "optim_shard": (2, 4)},
        {"sequence_parallel": (True,), "offload": ("none", "both"), "micro_batch_size": (1, 4)},
        {"axis_order": ("tp-cp-dp-pp", "cp-dp-tp-pp"), "ep": (1, 2), "etp": (1, 2)},
        {"recompute_modules": ("", "mlp", "core_attn+mlp"), "tp": (1, 2)},
        {"recompute_modules": ("mlp",), "pp": (1, 2)},
        {"recompute_modules": ("", "mlp"), "recompute": ("none", "selective"), "recompute_layers": (0,)},
    ],
)
def test_counts_are_those_of_an_enumeration(space: str, moe: bool, axes: Axes) -> None:
    sets = tuple(modules for modules in map(str, axes.get("recompute_modules", ())) if modules)
    expected = [
        s
        for s in candidates(space == "core", moe, sets or ("",))
        if all(getattr(s, name) in values for name, values in axes.items())
    ]
    counted = count_space(
        model_layers=LAYERS, experts=4 if moe else None, devices=DEVICES, global_batch_size=BATCH,
        space=space, fixed={}, axes=axes,
    )  # fmt: skip
    assert counted.count == len(expected)
    named = counted.axes.get("recompute_modules", ())
    assert set(named) | {""} == {s.recompute_modules for s in expected} | {""}
    for field in set(FIELDS) - {"recompute_modules"}:
        assert len(counted.axes[field]) == len({getattr(s, field) for s in expected})
    tree = Space(space, DEVICES, LAYERS, moe, BATCH, {}, axes)
    assert int(tree.count_below_grids(tree.grids(tree.degrees())).sum()) == len(expected)


@pytest.mark.slow
def test_axes_and_fixed_values_both_count() -> None:
    counted = count_space(
        model_layers=LAYERS, experts=None, devices=DEVICES, global_batch_size=BATCH, space="default",
        fixed={"tp": 2, "zero_stage": 1}, axes={"tp": (1, 2), "pp": (1,)},
    )  # fmt: skip
    expected = [
        s
        for s in candidates(False, False)
        if (s.tp, s.pp, s.param_shard, s.grad_shard, s.optim_shard) == (2, 1, 1, 1, s.dp * s.cp)
    ]
    assert counted.count == len(expected) > 0


def test_an_axis_that_is_no_field_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        count_space(
            model_layers=1, experts=None, devices=1, global_batch_size=1, space="core", fixed={},
            axes={"zero_stage": (1,)},
        )  # fmt: skip
    assert caught.value.key == "axes"
