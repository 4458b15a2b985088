"""Boxes of splits, counted by hand; and warm-up and cool-down of schedules."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardwise_verify.nodes import FULL, Box, splits_of
from shardwise_verify.schedules import moments_of, warmup_cooldown_of
from shardwise_verify.space import SpaceDefinition


def space(layers: int, **requested: Any) -> SpaceDefinition:
    plain: dict[str, Any] = {"is_moe": False, "devices": 8, "batch": 8, "is_core": False, "fixed": {}}
    return SpaceDefinition(layers=layers, **(plain | requested))


def counted(layers: int, stages: int, recompute: int, *box: int, **requested: Any) -> int:
    found = splits_of(space(layers, **requested), stages)
    return int(found.count(np.array([recompute]), Box(*(np.array([value]) for value in box)))[0])


def test_two_stages_are_counted_by_the_first() -> None:
    # Five layers: (0, 5) to (5, 0); the fuller stage has 5, 4, 3, 3, 4, 5 layers.
    assert counted(5, 2, 0, 0, 5, 0, 0, 0, 0) == 6
    assert counted(5, 2, FULL, 0, 5, 0, 0, 1, 5) == 5 + 4 + 3 + 3 + 4 + 5
    # First stage 1 to 3, and 4 or 5 layers recomputed: only (1, 4) has a stage of 4.
    assert counted(5, 2, FULL, 1, 3, 0, 0, 4, 5) == 1
    # core has (2, 3) alone, and recomputes all 3 layers of its fuller stage or none.
    assert counted(5, 2, FULL, 1, 3, 0, 0, 3, 4, is_core=True) == 1


def test_three_stages_have_a_range_for_each_end() -> None:
    # Seven layers on three stages: the even split is 2 + 3 + 2, so both ends are 0 to 2, and the stage
    # between them, with 7 - first - last layers, is the fullest.
    assert counted(7, 3, 0, 0, 2, 0, 2, 0, 0) == 9
    between = [7 - first - last for first in range(3) for last in range(3)]
    assert counted(7, 3, FULL, 0, 2, 0, 2, 1, 7) == sum(between)
    # Of (1, 1), (1, 2), (2, 1), (2, 2) it has 5, 4, 4, 3 layers, so 2 + 1 + 1 + 0 times 4 or more.
    assert counted(7, 3, FULL, 1, 2, 1, 2, 4, 7) == 4
    assert counted(7, 3, FULL, 1, 2, 1, 2, 4, 7, fixed={"recompute_layers": 4}) == 3
    assert counted(7, 3, FULL, 1, 2, 1, 2, 4, 7, axes={"first_stage_layers": (2,)}) == 1


def test_warm_up_and_cool_down() -> None:
    # Rank r of 1f1b on 3 ranks does 3 - r forwards before its first backward, and as many backwards after its
    # last forward.
    ramps = warmup_cooldown_of("1f1b", 3, 1, 12)
    assert ramps.warmup_forwards.tolist() == ramps.cooldown_backwards.tolist() == [3, 2, 1]
    assert ramps.first_backward_stage.tolist() == ramps.last_forward_stage.tolist() == [0, 1, 2]
    assert ramps.has_steady_state.all()
    # zb_h1 on 2 ranks, m = 3. Rank 0: F FIW FIW IW, rank 1: FI FIW FIW W.
    ramps = warmup_cooldown_of("zb_h1", 2, 1, 3)
    assert (
        ramps.warmup_forwards.tolist(),
        ramps.cooldown_inputs.tolist(),
        ramps.cooldown_weights.tolist(),
    ) == ([2, 1], [2, 1], [2, 2])
    # All forwards of gpipe come before its first backward.
    ramps = warmup_cooldown_of("gpipe", 2, 1, 3)
    assert ramps.warmup_forwards.tolist() == ramps.cooldown_backwards.tolist() == [3, 3]
    assert not ramps.has_steady_state.any()
    assert [each.tolist() for each in moments_of("1f1b", 3, 1, 12)] == [[[[n], [0]]] for n in (3, 2, 1)]
