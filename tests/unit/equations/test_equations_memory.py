"""Bytes of one rank on numbers that can be computed by hand."""

from __future__ import annotations

import pytest

from shardwise.equations import memory


def test_an_even_share_of_a_state() -> None:
    assert memory.sharded_bytes(1000, 2.0, 4) == 500.0  # 1000 * 2 / 4
    assert memory.sharded_bytes(1000, 2.0, 1) == 2000.0


@pytest.mark.parametrize(
    ("shard", "expected"),
    [(1, 0.0), (2, 4000.0), (64, 4000.0)],  # two layers of 1000 elements of 2 bytes, whole
)
def test_whole_copies_of_sharded_layers(shard: int, expected: float) -> None:
    assert memory.gathered_bytes(1000, 2.0, shard, 2.0) == expected


@pytest.mark.parametrize(
    ("recomputed", "layers", "expected"),
    [(0, 4, 0.0), (3, 4, 0.75), (4, 4, 1.0), (5, 4, 1.0), (1, 1, 1.0), (1, 0, 0.0)],
)
def test_share_of_a_stage_that_is_recomputed(recomputed: int, layers: int, expected: float) -> None:
    assert memory.recomputed_share(recomputed, layers) == expected


@pytest.mark.parametrize(("share", "expected"), [(0.0, 100.0), (0.5, 55.0), (1.0, 10.0)])
def test_saved_activations(share: float, expected: float) -> None:
    assert memory.saved_activation_bytes(100.0, 10.0, share) == expected  # 100 - share * 90


@pytest.mark.parametrize(
    ("at_work", "weights_freed", "expected"),
    [
        (100.0, 0, 140.0),  # 100 of temporaries with 40 of gradients; 80 sent with 40 is less
        (70.0, 0, 120.0),  # 80 sent with 40, more than 110
        (70.0, 1, 110.0),  # the weights' 40 are freed before
        (30.0, 1, 80.0),
    ],
)
def test_gradients_of_a_block_during_its_work_or_its_reduction(
    at_work: float, weights_freed: int, expected: float
) -> None:
    assert memory.block_reduction_bytes(at_work, 40.0, 80.0, weights_freed) == expected


def test_what_the_allocator_holds() -> None:
    assert memory.reserved_bytes(100.0, 0.25) == 125.0
