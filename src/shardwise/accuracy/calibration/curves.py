"""Fits curves of kernels and links to samples of measured times, by the equations of the cost model.

A sample (`MatmulSample`, `MemorySample`, `AttentionSample`, `LinkSample`, `OverlapSample`) is one measured
time. `kernel_curves` and `attention_curve` fit kernels (docs/concepts/cost-model.md, section 7), `link_curve`
fits a link (section 5). `coefficients` solves their non-negative least squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log2, sqrt
from statistics import fmean, geometric_mean, median
from typing import Literal

import numpy as np

from shardwise.cluster import AttentionCurve
from shardwise.equations import compute
from shardwise.errors import ConfigError

# Samples
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSample:
    """A matmul of [m, k] and [k, n] that takes `seconds`."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """A memory-bound kernel that reads and writes `nbytes` in total and takes `seconds`."""

    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSample:
    """Fused causal attention of `seq_len` queries and keys, forward or backward, that takes `seconds`.

    `work_flop` is the work of the forward pass in both cases; causal attention counts half.
    """

    seq_len: int
    work_flop: float
    is_backward: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """A collective of `ranks` ranks that takes `seconds`.

    `nbytes` is the size of the whole tensor: the tensor of each rank in an all-reduce, its output in an
    all-gather, its input in a reduce-scatter and an all-to-all, and the message itself. `inner` is the number
    of ranks of the group that share the links of the tier that it crosses (the ranks of a node; 1 within a
    tier). `share` is the part of a device's links that stay inside the group. `alone` is the bandwidth of a
    device that sends alone over its bandwidth while all devices send. `reduces_in_switch` is true where the
    switch can reduce. `has_two_trees` is true of an all-reduce between two nodes by NCCL: each of its trees
    sends half of the tensor once in each direction.
    """

    kind: Collective
    ranks: int
    nbytes: float
    seconds: float
    inner: int = 1
    share: float = 1.0
    alone: float = 1.0
    reduces_in_switch: bool = False
    has_two_trees: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """Seconds of an all-reduce alone, of a computation alone, and of both overlapped.

    In `both_s` the all-reduce starts before the computation, and the wait for it follows the computation."""

    communication_s: float
    computation_s: float
    both_s: float


# Non-negative least squares
MOST_COLUMNS = 8
"""Most columns of `coefficients`, which solves every subset of them."""


def coefficients(
    columns: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    known_s: Sequence[float] | None = None,
    scale_s: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The c >= 0 that minimise the sum of ((known_s + columns c - seconds) / scale_s)^2, one per column.

    `scale_s` defaults to the measured seconds, so that errors are relative. The optimum is the unconstrained
    least-squares solution on the columns with positive coefficients. So the function solves every subset of
    columns and takes the best solution without negative coefficients. Raises ValueError for more than
    MOST_COLUMNS columns.
    """
    measured = np.asarray(seconds, dtype=float)
    by = measured if scale_s is None else np.asarray(scale_s, dtype=float)
    relative = np.asarray(columns, dtype=float).T / by[:, None]
    target = (measured if known_s is None else measured - np.asarray(known_s, dtype=float)) / by
    count = relative.shape[1]
    if not 1 <= count <= MOST_COLUMNS:
        raise ValueError(f"{count} columns")
    # Columns differ by many powers of ten, so each is scaled to at most 1.
    scale = np.where(np.abs(relative).max(axis=0) > 0.0, np.abs(relative).max(axis=0), 1.0)
    best, least = np.zeros(count), float((target**2).sum())
    for size in range(1, count + 1):
        for subset in combinations(range(count), size):
            found = np.linalg.lstsq(relative[:, subset] / scale[list(subset)], target, rcond=None)
            solution = found[0] / scale[list(subset)]
            loss = float(((relative[:, subset] @ solution - target) ** 2).sum())
            if (solution >= 0.0).all() and loss < least * (1.0 - 1e-12):
                best, least = np.zeros(count), loss
                best[list(subset)] = solution
    return tuple(best.tolist())


# Kernels
FLOAT_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Output tiles of matmuls: waves of `units` tiles, or tiles of half the sides at `small_fraction` of the
    speed.

    The defaults suit CPUs, where tiles do not matter."""

    tile_m: int = 1
    tile_n: int = 1
    units: int = 1
    small_fraction: float = 1.0

    def fill(self, sample: MatmulSample) -> float:
        """Share of the computed tiles that is output of the matmul, in (0, 1]."""
        m, n, tile_m, tile_n = sample.m, sample.n, self.tile_m, self.tile_n
        whole = float(compute.tile_fill(m, n, tile_m, tile_n, self.units))
        half = float(compute.tile_fill(m, n, tile_m / 2.0, tile_n / 2.0, self.units))
        return max(whole, self.small_fraction * half)


NO_TILES = Tiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCurves:
    """Curves of matmuls and memory-bound kernels.

    Every kernel takes `launch_s`. A matmul that fills all tiles runs at `flop_per_s * k / (k + k_half)`, and
    memory traffic at `memory_bytes_per_s`. An element has `number_bytes`."""

    launch_s: float
    flop_per_s: float
    k_half: float
    memory_bytes_per_s: float
    number_bytes: float = FLOAT_BYTES
    tiles: Tiles = NO_TILES

    def matmul_s(self, sample: MatmulSample) -> float:
        """Seconds of a matmul: the launch, and the longer of arithmetic and memory traffic."""
        work_s = filled_work(sample, self.tiles) / self.flop_per_s * (sample.k + self.k_half) / sample.k
        traffic_s = traffic_bytes(sample, self.number_bytes) / self.memory_bytes_per_s
        return self.launch_s + max(work_s, traffic_s)


def traffic_bytes(sample: MatmulSample, number_bytes: float) -> float:
    """Bytes of both operands and the result, each counted once."""
    m, n, k = sample.m, sample.n, sample.k
    return number_bytes * (m * k + k * n + m * n)


def filled_work(sample: MatmulSample, tiles: Tiles) -> float:
    """The flop of a matmul, with the waste of its partial tiles and its last wave."""
    return float(compute.matmul_work(sample.m, sample.n, sample.k)) / tiles.fill(sample)


def kernel_curves(
    matmuls: Sequence[MatmulSample],
    passes: Sequence[MemorySample],
    *,
    number_bytes: float = FLOAT_BYTES,
    tiles: Tiles = NO_TILES,
) -> KernelCurves:
    """Fits the curves by least squares of relative errors.

    A matmul takes launch + 2 m n k / speed + 2 m n k_half / speed, which is linear in three coefficients. A
    memory pass is linear in launch and bytes. The launch comes from the passes, since matmuls determine it
    less well. Memory-bound matmuls do not show the speed of arithmetic and are left out. Raises ConfigError
    where the samples do not determine the curves.
    """
    if len(passes) < 2 or len(matmuls) < 3:
        raise ConfigError("are too few", key="measurements", allowed="3 matmuls and 2 passes or more")
    launch_s, per_byte_s = coefficients(
        ([1.0] * len(passes), [sample.nbytes for sample in passes]), [sample.seconds for sample in passes]
    )
    bound = [s for s in matmuls if s.seconds > launch_s + 1.5 * per_byte_s * traffic_bytes(s, number_bytes)]
    if len(bound) < 2 or per_byte_s <= 0.0:
        raise ConfigError(
            "do not separate arithmetic from memory traffic", key="measurements",
            found=f"{len(bound)} matmuls that are not memory-bound",
            allowed="2 or more, and passes whose time grows with the bytes",
        )  # fmt: skip
    work_flop = [filled_work(sample, tiles) for sample in bound]
    per_flop_s, per_output_s = coefficients(
        (work_flop, [flop / sample.k for flop, sample in zip(work_flop, bound, strict=True)]),
        [sample.seconds - launch_s for sample in bound],
    )
    if per_flop_s <= 0.0:
        raise ConfigError("do not grow with the inner dimension", key="measurements of matmuls")
    return KernelCurves(
        launch_s=launch_s,
        flop_per_s=1.0 / per_flop_s,
        k_half=per_output_s / per_flop_s,
        memory_bytes_per_s=1.0 / per_byte_s,
        number_bytes=number_bytes,
        tiles=tiles,
    )


BACKWARD_WORK = 2.5
"""Flop of a fused backward pass over flop of the forward pass (Dao 2023, FlashAttention-2)."""


def attention_curve(
    samples: Sequence[AttentionSample], *, launch_s: float, flop_per_s: float
) -> AttentionCurve:
    """Fits the fractions of `flop_per_s` that fused attention reaches, and `seq_half`, the sequence length at
    which it reaches half of its fraction.

    Seconds are launch + work / (fraction * speed) * (1 + seq_half / s), which is linear in 1 / fraction and
    seq_half / fraction. `seq_half` comes from the forward pass. Raises ConfigError for too few samples.
    """

    def part(is_backward: bool) -> list[AttentionSample]:
        return [s for s in samples if s.is_backward is is_backward and s.seconds > launch_s]

    forward, backward = part(False), part(True)
    if len(forward) < 2 or not backward:
        raise ConfigError("are too few", key="measurements of attention", allowed="2 forward, 1 backward")
    ideal_s = [sample.work_flop / flop_per_s for sample in forward]
    whole, by_length = coefficients(
        (ideal_s, [ideal / sample.seq_len for ideal, sample in zip(ideal_s, forward, strict=True)]),
        [sample.seconds - launch_s for sample in forward],
    )
    # Where the speed still grows in proportion to the length, seq_half is far beyond the longest sample.
    longest = max(sample.seq_len for sample in forward)
    seq_half = by_length / whole if whole > 0.0 else 1e3 * longest
    inverse = whole if whole > 0.0 else by_length / seq_half
    ideal_backward_s = [
        BACKWARD_WORK * sample.work_flop / flop_per_s * (1.0 + seq_half / sample.seq_len)
        for sample in backward
    ]
    (inverse_backward,) = coefficients(
        (ideal_backward_s,), [sample.seconds - launch_s for sample in backward]
    )
    return AttentionCurve(
        forward_fraction=1.0 / inverse, backward_fraction=1.0 / inverse_backward, seq_half=seq_half
    )


def matmul_errors(curves: KernelCurves, matmuls: Sequence[MatmulSample]) -> Mapping[str, float]:
    """The number of `matmuls`, and the mean absolute relative error of their predicted times."""
    errors = [abs(curves.matmul_s(sample) / sample.seconds - 1.0) for sample in matmuls]
    return {"times": len(errors), "mean_error": fmean(errors)}


# Links
UNSHARDED: tuple[Collective, ...] = ("all_reduce", "message")
"""Collectives of plans without sharding; a link is measured with them.

Over gloo the other collectives reach another share of the link. A reduce-scatter sends twice its bytes, and
two ranks that send to each other use one direction at a time."""

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message")

_ROUNDS = 20
"""Iterations of a link fit between coefficients and choice of algorithms."""

_LEAST_SHARE = 1e-6
"""Least time of the bytes of the largest sample, as a share of the longest time, for which a bandwidth is
determined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCurve:
    """Curve of a link.

    `latency_s` is per hop and `startup_s` per collective. `bytes_per_s` is the bandwidth of a device in one
    direction, and `exchange_fraction` the share of it that bidirectional collectives reach. `lockstep_s` is
    the time that ranks wait for each other before a collective that follows a computation; samples of
    collectives alone do not contain it."""

    latency_s: float
    startup_s: float
    bytes_per_s: float
    exchange_fraction: float = 1.0
    lockstep_s: float = 0.0

    def errors(self, samples: Sequence[LinkSample]) -> Mapping[str, float]:
        """Mean absolute relative error of each kind of collective that was measured."""
        kinds = {kind: [sample for sample in samples if sample.kind == kind] for kind in COLLECTIVES}
        return {
            kind: fmean(abs(collective_s(self, sample) / sample.seconds - 1.0) for sample in of)
            for kind, of in kinds.items()
            if of
        }


def collective_s(curve: LinkCurve, sample: LinkSample) -> float:
    """Seconds that the cost model predicts for a collective within one tier: its fastest algorithm."""
    reached = curve.bytes_per_s * (curve.exchange_fraction if is_bidirectional(sample) else 1.0)
    times_s = [
        hops * curve.latency_s + curve.startup_s + tensors * sample.nbytes / reached
        for hops, tensors in _algorithms(sample)
    ]
    return min(times_s)


def is_bidirectional(sample: LinkSample) -> bool:
    """Whether a collective is bidirectional: ranks send to each other, both directions at once."""
    passes = sample.kind in ("all_gather", "reduce_scatter")
    return sample.kind == "all_to_all" or (passes and sample.ranks == 2)


def _algorithms(sample: LinkSample) -> tuple[tuple[float, float], ...]:
    """Number of hops, and traffic of a device's link in units of the whole tensor, for each algorithm.

    An all-reduce is a ring, a double binary tree, or one trip to a switch that reduces."""
    n = sample.ranks
    through = 1.0 / (sample.inner * sample.share)
    if sample.kind == "message":
        return ((1.0, 1.0 / (sample.share * sample.alone)),)
    if sample.kind == "all_to_all":
        return ((1.0, (n - sample.inner) / n / sample.share),)
    if sample.kind == "all_reduce":
        trees = 1.0 if sample.has_two_trees else 2.0
        ring, tree = (2.0 * (n - 1), 2.0 * (n - 1) / n * through), (2.0 * log2(n), trees * through)
        return (ring, tree, (2.0, through)) if sample.reduces_in_switch else (ring, tree)
    return ((float(n - 1), (n - 1) / n * through),)


def with_bidirectional(curve: LinkCurve, samples: Sequence[LinkSample]) -> LinkCurve:
    """`curve` with `exchange_fraction`, the share of the bandwidth that bidirectional `samples` reach.

    It is the geometric mean over samples whose bytes take longer than their hops, at most 1. Without such
    samples the curve does not change."""
    shares = []
    for sample in filter(is_bidirectional, samples):
        if sample.kind == "reduce_scatter":  # gloo sends twice its bytes, on other routes
            continue
        ((hops, tensors),) = _algorithms(sample)
        bytes_s = tensors * sample.nbytes / curve.bytes_per_s
        before_s = hops * curve.latency_s + curve.startup_s
        if bytes_s > before_s and sample.seconds > before_s:
            shares.append(bytes_s / (sample.seconds - before_s))
    return replace(curve, exchange_fraction=min(geometric_mean(shares), 1.0)) if shares else curve


def hidden_share(samples: Sequence[OverlapSample]) -> float:
    """Median share of the shorter of communication and computation that overlaps with the other."""
    return median(
        min(max((each.communication_s + each.computation_s - each.both_s) / shorter_s, 0.0), 1.0)
        for each in samples
        if (shorter_s := min(each.communication_s, each.computation_s)) > 0.0
    )


def link_curve(samples: Sequence[LinkSample]) -> LinkCurve:
    """Fits the curve of a link by weighted least squares.

    Times of small collectives scatter upwards by factors. So an error is relative to the geometric mean of
    the predicted and the measured time: half and twice the time are equally wrong. Small collectives weigh
    less (`_weights`), since steps spend their time in large ones.

    The times are linear in the curve's three numbers once that mean and the algorithm of each all-reduce are
    known. The fit alternates between the two. It starts once for each size up to which the algorithm with the
    fewest hops may be the fastest, and returns the best result.

    Raises ConfigError where the samples do not determine a bandwidth.
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


MOST_BYTES_TIME = 10.0
"""Most time of the bytes of a collective over that of its hops and its start by which it shows these."""


def shows_latency(samples: Sequence[LinkSample], known: LinkCurve) -> bool:
    """Whether a collective among the samples is small enough to show the latency of hops.

    The time of its bytes, at the rate of the largest samples, may be MOST_BYTES_TIME times the `known` time
    of its hops and start. Larger ones show both only as a remainder that is less than their scatter.
    """
    bytes_per_s = rate_of_largest(samples, known)
    return any(
        tensors * sample.nbytes / bytes_per_s <= MOST_BYTES_TIME * (hops * known.latency_s + known.startup_s)
        for sample in samples
        for hops, tensors in [min(_algorithms(sample))]
    )


def rate_of_largest(samples: Sequence[LinkSample], known: LinkCurve) -> float:
    """The bandwidth with which the largest samples take their measured times, by the latency and the start
    that `known` has: the median of them."""
    most = max(sample.nbytes for sample in samples)
    rates = [
        min(
            tensors * sample.nbytes / max(sample.seconds - hops * known.latency_s - known.startup_s, 1e-12)
            for hops, tensors in _algorithms(sample)
        )
        for sample in samples
        if sample.nbytes == most
    ]
    return median(rates)


def _curve_from(samples: Sequence[LinkSample], limit_bytes: float) -> LinkCurve | None:
    """The curve after _ROUNDS iterations; None where the samples do not determine a bandwidth.

    Initially samples up to `limit_bytes` take the algorithm with the fewest hops, larger ones that with the
    fewest bytes."""
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
    """Weight of each sample's error: the fourth root of its bytes over the most bytes. 4 KiB weigh 0.15 where
    the largest sample has 8 MiB."""
    most = max(sample.nbytes for sample in samples)
    return [(sample.nbytes / most) ** 0.25 for sample in samples]


def _distance(curve: LinkCurve, samples: Sequence[LinkSample]) -> float:
    """Weighted sum of squared errors, each relative to the geometric mean of both times."""
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
