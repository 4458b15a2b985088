"""Formulas of one stage on numbers that can be computed by hand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from shardwise.cluster import find_device
from shardwise.cost.stage_formulas import (
    StageEnds,
    allocated_bytes,
    allocated_within,
    boundary_bytes,
    communicators,
    device_bytes,
    outside_tensors,
    peak_activation_bytes,
    phases_of,
    recompute_s,
    saved_bytes,
)
from shardwise.cost.stages import Contended, Sums

STAGE = Sums(**{one.name: 0.0 for one in fields(Sums)})
"""A stage without anything."""

EFFICIENCY = replace(
    find_device("H100-SXM").efficiency, fragmentation_ratio=0.25, communicator_bytes=10.0, context_bytes=5.0
)


@pytest.mark.parametrize(
    ("is_selective", "share", "seconds", "nbytes"),
    [
        (False, 0.0, 0.0, 100.0),
        (True, 0.0, 2.0, 70.0),
        (False, 0.5, 4.0, 60.0),  # half of 8 s; half of 100 with half of 20
        (False, 1.0, 8.0, 20.0),
    ],
)
def test_recomputation_takes_time_and_saves_bytes(
    is_selective: bool, share: float, seconds: float, nbytes: float
) -> None:
    stage = replace(
        STAGE, selective_s=2.0, full_s=8.0, saved_bytes=100.0, selective_bytes=70.0, input_bytes=20.0
    )
    assert recompute_s(stage, is_selective, share) == seconds
    assert saved_bytes(stage, is_selective, share) == nbytes


def test_each_pass_has_the_host_and_the_backward_recomputes() -> None:
    stage = replace(STAGE, forward_s=10.0, input_s=12.0, weight_s=8.0)
    phases = phases_of(stage, 0.5, 3.0, (1.0, 2.0))
    # 10 + 0.5 + 1, and 12 + 0.5 + 2 + 3; the weight gradient belongs to the same action.
    assert (phases.forward_s, phases.input_s, phases.weight_s) == (11.5, 17.5, 8.0)
    assert phases.backward_s == 25.5


@pytest.mark.parametrize(
    ("layers", "gather_s", "reduce_s"),
    [
        (2, 7.5, 8.0),  # half of it overlaps: 10 - min(0.5 * 10, 6) / 2, and 10 - min(0.5 * 10, 4) / 2
        (1, 10.0, 10.0),  # one bucket has to wait for the whole pass
        (0, 10.0, 10.0),
    ],
)
def test_gathering_and_reduction_overlap_with_one_pass(layers: int, gather_s: float, reduce_s: float) -> None:
    assert StageEnds(10.0, 10.0, 6.0, 4.0, layers, 0.5).exposed_s == (gather_s, reduce_s)


def test_a_recomputed_forward_uses_the_links_again() -> None:
    assert Contended(3.0, 4.0, 2.0).backward_s(0.5) == 5.0


def test_activations_in_flight_recomputed_and_waiting() -> None:
    assert peak_activation_bytes(100.0, 8.0, 3.0) == 111.0
    assert peak_activation_bytes(100.0, 8.0) == 108.0


def test_bytes_of_a_device() -> None:
    allocated = allocated_bytes(1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 37.0)
    assert allocated == 100.0
    # A quarter more for fragmentation, three communicators of 10, and 5 of the driver.
    assert outside_tensors(EFFICIENCY, allocated, 3.0) == (25.0, 30.0, 5.0)
    assert device_bytes(EFFICIENCY, allocated, 3.0) == 160.0
    assert allocated_within(EFFICIENCY, 160.0, 3.0) == 100.0


def test_buffers_and_communicators_of_the_axes_in_use() -> None:
    assert boundary_bytes(True, 7.0) == 28.0  # two buffers each way
    assert boundary_bytes(True, 7.0, 6.0) == 42.0
    assert boundary_bytes(False, 7.0) == 0.0
    assert communicators(1, 2, 4) == 3.0  # the world and two axes
