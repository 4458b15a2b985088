"""Collectives between the ranks of a cluster, piece by piece, and what all pieces tell of its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from statistics import median
from typing import Any

from shardwise import accuracy
from shardwise.accuracy import Collective, LinkSample, OverlapSample, TierCurve
from shardwise.app.cli.calibrating_ranks import Ranks
from shardwise.cluster import Cluster, Device
from shardwise.strategy import Profile

REPEATS, LOCKSTEP_REPEATS, OVERLAP_REPEATS = 5, 40, 9
"""Of each collective and size, of waits for each other, and of sums beside computation in a calibration."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """`curves` of the tiers, the share of sums of gradients that passes beside computation (`hidden`), and
    how well curves explain what was `measured`."""

    curves: Sequence[TierCurve]
    hidden: float
    measured: Mapping[str, object]

    def of_device(self, device: Device) -> Device:
        """`device` with these links."""
        return accuracy.with_links(device, self.curves)

    def of_software(self, profile: Profile) -> Profile:
        """`profile` with what passes beside computation here."""
        return replace(profile, data_overlap=self.hidden)


class LinkMeasurement:
    """What collectives take between the ranks of `cluster`.

    A round is each of `measurements` once: one for each of the groups, and one for what passes beside
    computation between the ranks that are furthest apart. A calibration of so many `rounds` has about as many
    repeats as one that measures all of a piece at once: so many of each in a round, rounded up."""

    def __init__(self, ranks: Ranks, cluster: Cluster, *, threads: int, rounds: int = 1) -> None:
        self._ranks, self._cluster, self._threads = ranks, cluster, threads
        self._repeats = [ceil(each / rounds) for each in (REPEATS, LOCKSTEP_REPEATS, OVERLAP_REPEATS)]
        self._groups = groups_of(cluster)
        self._samples: list[list[LinkSample]] = [[] for _ in self._groups]
        self._lockstep_s: list[list[float]] = [[] for _ in self._groups]
        self._overlap: list[OverlapSample] = []

    @property
    def measurements(self) -> int:
        return len(self._groups) + 1

    def measure(self, measurement: int) -> None:
        """Measure the piece of this number; every rank calls this."""
        repeats, lockstep_repeats, overlap_repeats = self._repeats
        if measurement == len(self._groups):
            _, members = self._groups[-1]
            measured_values = self._ranks.run_in_group(_overlap, members, self._threads, overlap_repeats)[0]
            self._overlap += [OverlapSample(**each) for each in measured_values]
            return
        _, members = self._groups[measurement]
        measured_values = self._ranks.run_in_group(
            _link_times, members, self._threads, repeats, lockstep_repeats
        )[0]
        self._samples[measurement] += [LinkSample(**each) for each in measured_values["samples"]]
        self._lockstep_s[measurement].append(measured_values["lockstep_s"])

    def found(self) -> LinkResult:
        """The curve of each tier, by medians over the rounds so far."""
        curves, measured = [], {}
        for place, tier in enumerate(self._cluster.tiers):
            here = [number for number, (at, _) in enumerate(self._groups) if at == place]
            of = [sample for number in here for sample in median_samples(self._samples[number])]
            if of:
                unsharded = accuracy.link_curve([each for each in of if each.kind in accuracy.UNSHARDED])
                without_exchanges = accuracy.with_bidirectional(unsharded, of)
                curve = replace(without_exchanges, lockstep_s=median(self._lockstep_s[here[0]]))
                curves.append(TierCurve(tier=tier, curve=curve))
                measured[f"links of {tier.name}"] = dict(curve.errors(of))
        return LinkResult(curves, accuracy.hidden_share(self._overlap), measured)


def median_samples(samples: Sequence[LinkSample]) -> list[LinkSample]:
    """The median of each collective and size."""
    of: dict[tuple[Collective, int, float], list[LinkSample]] = {}
    for sample in samples:
        of.setdefault((sample.kind, sample.ranks, sample.nbytes), []).append(sample)
    return [replace(each[0], seconds=median(one.seconds for one in each)) for each in of.values()]


def groups_of(cluster: Cluster) -> list[tuple[int, list[list[int]]]]:
    """Tier, and disjoint groups of as many ranks each that cross it and no tier beyond: pairs, and the
    largest."""
    groups: list[tuple[int, list[list[int]]]] = []
    inner = 1
    for place, tier in enumerate(cluster.tiers):
        width = tier.span // inner
        for size in sorted({2, width}):
            if width >= size > 1:
                starts = range(0, cluster.devices - tier.span + 1, tier.span)
                members = [
                    [start + offset + inner * (first + step) for step in range(size)]
                    for start in starts
                    for offset in range(inner)
                    for first in range(0, width - size + 1, size)
                ]
                groups.append((place, members))
        inner = tier.span
    return groups


def _link_times(
    report: object, members: Sequence[Sequence[int]], threads: int, repeats: int, lockstep_repeats: int
) -> dict[str, Any]:
    from shardwise.measure import link_times, lockstep_s, use_threads

    use_threads(threads)
    samples = link_times(members, repeats=repeats)
    return {
        "samples": [asdict(each) for each in samples],
        "lockstep_s": lockstep_s(members, repeats=lockstep_repeats),
    }


def _overlap(
    report: object, members: Sequence[Sequence[int]], threads: int, repeats: int
) -> list[dict[str, Any]]:
    from shardwise.measure import overlap_times, use_threads

    use_threads(threads)
    return [asdict(each) for each in overlap_times(members, repeats=repeats)]
