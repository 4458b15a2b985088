"""The curve of a link from measured collectives, by the equations of the cost model
(docs/concepts/cost-model.md, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log2, sqrt
from statistics import fmean, geometric_mean, median

from shardwise.accuracy.calibration.samples import Collective, LinkSample, OverlapSample
from shardwise.accuracy.calibration.solve import coefficients
from shardwise.errors import ConfigError

UNSHARDED: tuple[Collective, ...] = ("all_reduce", "message")
"""Collectives of plans that shard nothing, by which a link is measured. Those of the others reach another
share of it over gloo: a reduce-scatter passes twice its bytes, and what two ranks exchange goes now one way,
now the other."""

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message")

_ROUNDS = 20

_LEAST_SHARE = 1e-6
"""Of the longest time, what the bytes of the largest sample take at least where they settle a bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve:
    """`latency_s` of a hop, `startup_s` of a collective, bytes per second and direction of a device; of which
    two that send to each other at once reach `exchange_fraction`; and `lockstep_s` for which ranks wait for
    each other where each comes from a computation of its own, as the samples of collectives do not."""

    latency_s: float
    startup_s: float
    bytes_per_s: float
    exchange_fraction: float = 1.0
    lockstep_s: float = 0.0

    def errors(self, samples: Sequence[LinkSample]) -> Mapping[str, float]:
        """Mean of |predicted / measured - 1| of each kind of collective that was measured."""
        kinds = {kind: [sample for sample in samples if sample.kind == kind] for kind in COLLECTIVES}
        return {
            kind: fmean(abs(collective_s(self, sample) / sample.seconds - 1.0) for sample in of)
            for kind, of in kinds.items()
            if of
        }


def collective_s(curve: LinkCurve, sample: LinkSample) -> float:
    """Seconds that the cost model gives to a collective within one tier."""
    reached = curve.bytes_per_s * (curve.exchange_fraction if is_bidirectional(sample) else 1.0)
    times_s = [
        hops * curve.latency_s + curve.startup_s + tensors * sample.nbytes / reached
        for hops, tensors in _algorithms(sample)
    ]
    return min(times_s)


def is_bidirectional(sample: LinkSample) -> bool:
    """Whether ranks send whole parts to each other, both ways at once."""
    passes = sample.kind in ("all_gather", "reduce_scatter")
    return sample.kind == "all_to_all" or (passes and sample.ranks == 2)


def _algorithms(sample: LinkSample) -> tuple[tuple[float, float], ...]:
    """Hops and whole tensors that pass a device's link, for each algorithm: an all-reduce is a ring, two
    trees, or one trip to a switch that adds up."""
    n = sample.ranks
    through = 1.0 / (sample.inner * sample.share)
    if sample.kind == "message":
        return ((1.0, 1.0 / (sample.share * sample.alone)),)
    if sample.kind == "all_to_all":
        return ((1.0, (n - sample.inner) / n / sample.share),)
    if sample.kind == "all_reduce":
        ring, tree = (2.0 * (n - 1), 2.0 * (n - 1) / n * through), (2.0 * log2(n), 2.0 * through)
        return (ring, tree, (2.0, through)) if sample.reduces_in_switch else (ring, tree)
    return ((float(n - 1), (n - 1) / n * through),)


def with_bidirectional(curve: LinkCurve, samples: Sequence[LinkSample]) -> LinkCurve:
    """`curve` with the share of its pace that exchanges among `samples` reach: the geometric mean of those
    whose bytes take longer than the hops before them; all of it where there are none, or they are faster."""
    shares = []
    for sample in filter(is_bidirectional, samples):
        if sample.kind == "reduce_scatter":  # gloo passes twice its bytes, all other ways
            continue
        ((hops, tensors),) = _algorithms(sample)
        bytes_s = tensors * sample.nbytes / curve.bytes_per_s
        before_s = hops * curve.latency_s + curve.startup_s
        if bytes_s > before_s and sample.seconds > before_s:
            shares.append(bytes_s / (sample.seconds - before_s))
    return replace(curve, exchange_fraction=min(geometric_mean(shares), 1.0)) if shares else curve


def hidden_share(samples: Sequence[OverlapSample]) -> float:
    """The share of the shorter of communication and computation that passes beside the other: the median."""
    return median(
        min(max((each.communication_s + each.computation_s - each.both_s) / shorter_s, 0.0), 1.0)
        for each in samples
        if (shorter_s := min(each.communication_s, each.computation_s)) > 0.0
    )


def link_curve(samples: Sequence[LinkSample]) -> LinkCurve:
    """The curve whose times are closest to the measured ones, as factors.

    Times of small collectives scatter upwards, by factors: an error counts in relation to the geometric mean
    of both times, so that half and twice are as far off, and for less the fewer the bytes (`_weights`), since
    steps spend their time in large collectives. Linear in the curve's three numbers once that mean
    is known, and which algorithm an all-reduce takes; both are found by turns, from every size up to which
    the algorithm with the fewest hops may be the fastest, and the best of these ends counts.

    Raises ConfigError where the samples do not settle a bandwidth.
    """
    sizes = {sample.nbytes for sample in samples}
    if len(samples) < 3 or len(sizes) < 2:
        raise ConfigError(
            "are too few", key="measurements of links", found=f"{len(samples)} of {len(sizes)} sizes",
            allowed="3 or more, of 2 sizes or more",
        )  # fmt: skip
    has_choice = any(len(_algorithms(sample)) > 1 for sample in samples)
    limits = [0.0, *sorted(sizes)] if has_choice else [0.0]
    found = [curve for limit in limits if (curve := _curve_from(samples, limit)) is not None]
    if not found:
        raise ConfigError("do not grow with the bytes", key="measurements of links")
    return min(found, key=lambda curve: _distance(curve, samples))


def _curve_from(samples: Sequence[LinkSample], limit_bytes: float) -> LinkCurve | None:
    """Where the turns end that begin with the fewest hops up to `limit_bytes`, and the fewest bytes beyond;
    None where they settle no bandwidth."""
    seconds = [sample.seconds for sample in samples]
    chosen = [
        min(_algorithms(s), key=lambda algorithm: algorithm[0 if s.nbytes <= limit_bytes else 1])
        for s in samples
    ]
    weights = _weights(samples)
    scale_s = [each_s / weight for each_s, weight in zip(seconds, weights, strict=True)]
    for _ in range(_ROUNDS):
        latency_s, startup_s, per_byte_s = coefficients(
            (
                [hops for hops, _ in chosen],
                [1.0] * len(samples),
                [tensors * sample.nbytes for (_, tensors), sample in zip(chosen, samples, strict=True)],
            ),
            seconds,
            scale_s=scale_s,
        )
        if per_byte_s * max(sample.nbytes for sample in samples) <= _LEAST_SHARE * max(seconds):
            return None
        curve = LinkCurve(latency_s=latency_s, startup_s=startup_s, bytes_per_s=1.0 / per_byte_s)
        chosen = [_fastest(curve, sample) for sample in samples]
        scale_s = [
            sqrt(sample.seconds * collective_s(curve, sample)) / weight
            for sample, weight in zip(samples, weights, strict=True)
        ]
    return curve


def _weights(samples: Sequence[LinkSample]) -> list[float]:
    """Of the error of each: the fourth root of its bytes over the most, 0.15 for 4 KiB beside 8 MiB."""
    most = max(sample.nbytes for sample in samples)
    return [(sample.nbytes / most) ** 0.25 for sample in samples]


def _distance(curve: LinkCurve, samples: Sequence[LinkSample]) -> float:
    """Sum of squared errors, each in relation to the geometric mean of both times, weighted."""
    ratios = [collective_s(curve, sample) / sample.seconds for sample in samples]
    return sum(
        (weight * (sqrt(ratio) - 1.0 / sqrt(ratio))) ** 2
        for ratio, weight in zip(ratios, _weights(samples), strict=True)
    )


def _fastest(curve: LinkCurve, sample: LinkSample) -> tuple[float, float]:
    return min(
        _algorithms(sample),
        key=lambda algorithm: (
            algorithm[0] * curve.latency_s + algorithm[1] * sample.nbytes / curve.bytes_per_s
        ),
    )
