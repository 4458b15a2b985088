"""Curves of links from all measurements of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import pytest

from shardwise.accuracy import Collective, LinkSample, OverlapSample, eager_profile
from shardwise.accuracy.calibration import LinkCurve
from shardwise.accuracy.calibration.curves import collective_s
from shardwise.app.cli.calibrating import _links
from shardwise.app.cli.measuring import LinkMeasurement, Ranks, groups_of, median_samples
from shardwise.cluster import load_cluster

INSIDE = LinkCurve(latency_s=1e-4, startup_s=0.0, bytes_per_s=1e9)
BETWEEN = LinkCurve(latency_s=1e-3, startup_s=0.0, bytes_per_s=25e6)
KINDS: Sequence[Collective] = ("all_reduce", "message")


def sample(kind: Collective, nbytes: float, seconds: float) -> LinkSample:
    return LinkSample(kind=kind, ranks=2, nbytes=nbytes, seconds=seconds)


class FakeRanks:
    """Ranks of 2x2xcpu on which everything takes `factor` times the curves' times; their tasks are recorded
    in `requested`.
    """

    rank, speeds = 0, (1.0,) * 4

    def __init__(self) -> None:
        self.factor = 1.0
        self.requested: list[tuple[int, ...]] = []

    def run_in_group(
        self, task: Any, members: Sequence[Sequence[int]], threads: int, *repeats: int
    ) -> list[Any]:
        self.requested.append(repeats)
        if len(repeats) == 1:  # 1 s of communication and of computation, of which 0.2 s or 0.8 s overlap
            both_s = 1.8 if self.factor == 1.0 else 1.2
            fake_ranks: Any = [asdict(OverlapSample(communication_s=1.0, computation_s=1.0, both_s=both_s))]
        else:
            curve = INSIDE if members == [[0, 1], [2, 3]] else BETWEEN
            empty = [sample(kind, nbytes, 1.0) for kind in KINDS for nbytes in (4096.0, 2.0**19, 2.0**23)]
            found = [replace(each, seconds=self.factor * collective_s(curve, each)) for each in empty]
            fake_ranks = {"samples": [asdict(each) for each in found], "lockstep_s": 0.003 * self.factor}
        return [fake_ranks] * 4


def links_of(fake_ranks: FakeRanks, *, rounds: int = 1) -> LinkMeasurement:
    return LinkMeasurement(cast(Ranks, fake_ranks), load_cluster("2x2xcpu"), threads=1, rounds=rounds)


def test_a_measurement_is_of_a_group_or_of_overlap() -> None:
    """Pairs within nodes, pairs between them, and reductions during computation: 5, 40 and 9 repeats."""
    fake_ranks = FakeRanks()
    links = links_of(fake_ranks)
    assert links.measurements == 3 == len(groups_of(load_cluster("2x2xcpu"))) + 1
    for measurement in range(links.measurements):
        links.measure(measurement)
    assert fake_ranks.requested == [(5, 40), (5, 40), (9,)]
    found = links.found()
    assert [each.tier.is_network for each in found.curves] == [False, True]
    assert [each.curve.bytes_per_s for each in found.curves] == pytest.approx([1e9, 25e6])
    assert [each.curve.lockstep_s for each in found.curves] == [0.003, 0.003]
    assert found.hidden == pytest.approx(0.2)
    names = [f"links of {tier.name}" for tier in load_cluster("2x2xcpu").tiers]
    assert list(found.measured) == names


def test_a_calibration_in_rounds_shares_repeats_out_and_its_medians_count() -> None:
    """One of three rounds is ten times as slow and overlaps 0.8 instead of 0.2 of reductions. Mutants that
    use the last round, or means, find links at a tenth or a fourth of the rate.
    """
    fake_ranks = FakeRanks()
    links = links_of(fake_ranks, rounds=3)
    for factor in (1.0, 1.0, 10.0):
        fake_ranks.factor = factor
        for measurement in range(links.measurements):
            links.measure(measurement)
    assert fake_ranks.requested == [(2, 14), (2, 14), (3,)] * 3  # a third of 5, 40 and 9, rounded up
    found = links.found()
    assert [each.curve.bytes_per_s for each in found.curves] == pytest.approx([1e9, 25e6])
    assert [each.curve.lockstep_s for each in found.curves] == [0.003, 0.003]
    assert found.hidden == pytest.approx(0.2)


def test_measurements_of_some_rounds_only_are_used() -> None:
    """A size is missing in a slow round; kinds and sizes are separate."""
    found = median_samples(
        [
            sample("message", 8.0, 3.0), sample("all_reduce", 8.0, 5.0), sample("message", 16.0, 7.0),
            sample("message", 8.0, 1.0), sample("message", 8.0, 4.0),
        ]
    )  # fmt: skip
    assert found == [
        sample("message", 8.0, 3.0), sample("all_reduce", 8.0, 5.0), sample("message", 16.0, 7.0)
    ]  # fmt: skip


def test_links_are_put_into_a_device_and_its_software() -> None:
    fake_ranks = FakeRanks()
    links = links_of(fake_ranks)
    for measurement in range(links.measurements):
        links.measure(measurement)
    found = links.found()
    device = load_cluster("1x1xcpu").classes["cpu"]
    achieved = found.of_device(device)
    assert achieved.scale_up_bytes_per_s == pytest.approx(1e9)
    assert achieved.scale_out_latency_s == pytest.approx(1e-3)
    assert achieved.peak_flop_per_s == device.peak_flop_per_s
    profile = eager_profile()
    assert found.of_software(profile) == replace(profile, data_overlap=found.hidden) != profile


def test_calibrate_takes_every_measurement_once() -> None:
    """A mutant that leaves a measurement out finds a tier without a curve, or no overlap."""
    fake_ranks = FakeRanks()
    found = _links(load_cluster("2x2xcpu"), cast(Ranks, fake_ranks), 1)
    assert fake_ranks.requested == [(5, 40), (5, 40), (9,)]
    assert len(found.curves) == 2 and found.hidden == pytest.approx(0.2)
