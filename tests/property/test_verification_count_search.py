"""The checker counts the space that the search enumerates: two programs, equal numbers."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.search.space import Space
from shardwise_verify import count_space

Fixed = dict[str, int | str | bool]

FIXED: dict[str, st.SearchStrategy[int | str | bool]] = {
    **{name: st.integers(1, 8) for name in ("tp", "pp", "cp", "dp", "vpp", "etp", "ep", "micro_batch_size")},
    **{name: st.integers(1, 8) for name in ("param_shard", "grad_shard", "optim_shard")},
    **{name: st.integers(1, 4) for name in ("dp_shard", "dp_replicate")},
    **{name: st.integers(0, 5) for name in ("first_stage_layers", "last_stage_layers", "recompute_layers")},
    "zero_stage": st.integers(0, 3),
    "cp_kind": st.sampled_from(["ring", "all_to_all"]),
    "schedule": st.sampled_from(
        ["1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "dualpipe_v"]
    ),
    "sequence_parallel": st.booleans(),
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "offload": st.sampled_from(["none", "optimizer", "activations", "both"]),
    "axis_order": st.permutations(["tp", "cp", "dp", "pp"]).map("-".join),
}


@st.composite
def fixed_fields(draw: st.DrawFn) -> Fixed:
    names = draw(st.lists(st.sampled_from(sorted(FIXED)), max_size=3, unique=True))
    return {name: draw(FIXED[name]) for name in names}


def searched(layers: int, experts: bool, devices: int, batch: int, space: str, fixed: Fixed) -> int:
    """Candidates below all root nodes of the search."""
    tree = Space(space, devices, layers, experts, batch, fixed)
    return int(tree.count_below_grids(tree.grids(tree.degrees())).sum())


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 20),
    st.booleans(),
    st.integers(1, 36),
    st.integers(1, 48),
    st.sampled_from(["core", "default"]),
    fixed_fields(),
)
@example(32, False, 16, 64, "default", {})
@example(24, True, 48, 96, "default", {})
@example(7, False, 12, 36, "default", {"zero_stage": 2, "dp_replicate": 3})
def test_two_counts_of_one_space(
    layers: int, experts: bool, devices: int, batch: int, space: str, fixed: Fixed
) -> None:
    counted = count_space(
        model_layers=layers,
        experts=8 if experts else None,
        devices=devices,
        global_batch_size=batch,
        space=space,
        fixed=fixed,
    )
    assert counted.count == searched(layers, experts, devices, batch, space, fixed)


def test_a_difference_of_one_rule_is_caught() -> None:
    """The mutant counts a dense model as a mixture of experts."""
    dense = count_space(
        model_layers=8, experts=None, devices=8, global_batch_size=8, space="default", fixed={}
    )
    assert dense.count != searched(8, True, 8, 8, "default", {})
    assert dense.count == searched(8, False, 8, 8, "default", {})


@pytest.mark.parametrize("axis", ["tp", "schedule", "micro_batch_size", "axis_order"])
def test_axes_list_the_values_that_the_search_enumerates(axis: str) -> None:
    """Fixing a field at a listed value leaves candidates in the search; all values together give the whole
    space.
    """
    answer = count_space(
        model_layers=6, experts=None, devices=12, global_batch_size=24, space="default", fixed={}
    )
    values = [int(text) if text.isdigit() else text for text in answer.axes[axis]]
    parts = [searched(6, False, 12, 24, "default", {axis: value}) for value in values]
    assert min(parts) > 0
    assert sum(parts) == answer.count
