"""One measured time each: of a matmul, a pass through memory, attention, a collective.

Least squares of relative errors, with coefficients that are not negative.

Curves of kernels from their measured times, by the equations that the cost model uses
(docs/concepts/cost-model.md, section 7).

The curve of a link from measured collectives, by the equations of the cost model
(docs/concepts/cost-model.md, section 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log2, sqrt
from statistics import fmean, geometric_mean, median
from typing import Literal, TypeVar

import numpy as np

from shardwise.cluster import AttentionCurve
from shardwise.equations import compute
from shardwise.errors import ConfigError

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulSample:
    """[m, k] x [k, n] in `seconds`."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """A kernel that reads and writes `nbytes` in all, and computes next to nothing, in `seconds`."""

    nbytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSample:
    """Fused causal attention of `seq_len` queries on as many keys, forward or backward, in `seconds`.

    `work_flop` is that of the forward pass, causal counted half, in both.
    """

    seq_len: int
    work_flop: float
    is_backward: bool
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """A collective of `ranks` ranks in `seconds`.

    `nbytes` is the whole tensor: what each rank has of an all-reduce, its output of an all-gather, its input
    of a reduce-scatter and of an all-to-all; what is sent of a message. `inner` neighbours of the group share
    their ways out through the tier that it crosses (the ranks of a node; 1 within a tier). `share` is what
    the links inside the group are of all that a device has, `alone` what one device that sends alone reaches
    over what each does while all send. `reduces_in_switch` says whether the switch can add up.
    """

    kind: Collective
    ranks: int
    nbytes: float
    seconds: float
    inner: int = 1
    share: float = 1.0
    alone: float = 1.0
    reduces_in_switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """Seconds of an all-reduce alone, of computation alone, and of the computation with the all-reduce begun
    before it and waited for behind it."""

    communication_s: float
    computation_s: float
    both_s: float


MOST_COLUMNS = 8
"""All subsets of the columns are looked at."""


def coefficients(
    columns: Sequence[Sequence[float]],
    seconds: Sequence[float],
    *,
    known_s: Sequence[float] | None = None,
    scale_s: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """The c >= 0 with the least sum of ((known_s + columns c - seconds) / scale_s)^2; one column per
    coefficient. The scale is the measured seconds where it is not given: errors count in relation to them.

    The best coefficients are the plain least squares on the columns whose coefficient is not 0, so the best
    subset whose plain solution is nowhere negative is the answer.
    """
    measured = np.asarray(seconds, dtype=float)
    by = measured if scale_s is None else np.asarray(scale_s, dtype=float)
    relative = np.asarray(columns, dtype=float).T / by[:, None]
    target = (measured if known_s is None else measured - np.asarray(known_s, dtype=float)) / by
    count = relative.shape[1]
    if not 1 <= count <= MOST_COLUMNS:
        raise ValueError(f"{count} columns")
    # Columns differ by many powers of ten: solved each at its own scale.
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


FLOAT_BYTES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """What outputs are computed in: waves of `units` tiles, or of tiles of half the sides at `small_fraction`
    of the speed. Processors of general purpose have none that count."""

    tile_m: int = 1
    tile_n: int = 1
    units: int = 1
    small_fraction: float = 1.0

    def fill(self, sample: MatmulSample) -> float:
        """Share of the machine that computes wanted output, in (0, 1]."""
        m, n, tile_m, tile_n = sample.m, sample.n, self.tile_m, self.tile_n
        whole = float(compute.tile_fill(m, n, tile_m, tile_n, self.units))
        half = float(compute.tile_fill(m, n, tile_m / 2.0, tile_n / 2.0, self.units))
        return max(whole, self.small_fraction * half)


NO_TILES = Tiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCurves:
    """What plain kernels take: `launch_s` each, matmuls that fill all tiles at `flop_per_s * k / (k +
    k_half)`, and `memory_bytes_per_s` for what moves; numbers have `number_bytes`."""

    launch_s: float
    flop_per_s: float
    k_half: float
    memory_bytes_per_s: float
    number_bytes: float = FLOAT_BYTES
    tiles: Tiles = NO_TILES

    def matmul_s(self, sample: MatmulSample) -> float:
        """Seconds of a matmul: limited by arithmetic or by memory, and the launch."""
        work_s = filled_work(sample, self.tiles) / self.flop_per_s * (sample.k + self.k_half) / sample.k
        traffic_s = traffic_bytes(sample, self.number_bytes) / self.memory_bytes_per_s
        return self.launch_s + max(work_s, traffic_s)

    def memory_s(self, sample: MemorySample) -> float:
        return self.launch_s + sample.nbytes / self.memory_bytes_per_s


def traffic_bytes(sample: MatmulSample, number_bytes: float) -> float:
    """Both operands and the result, once."""
    m, n, k = sample.m, sample.n, sample.k
    return number_bytes * (m * k + k * n + m * n)


def filled_work(sample: MatmulSample, tiles: Tiles) -> float:
    """The flop of a matmul with what its last tiles and wave compute in vain."""
    return float(compute.matmul_work(sample.m, sample.n, sample.k)) / tiles.fill(sample)


def kernel_curves(
    matmuls: Sequence[MatmulSample],
    passes: Sequence[MemorySample],
    *,
    number_bytes: float = FLOAT_BYTES,
    tiles: Tiles = NO_TILES,
) -> KernelCurves:
    """The curves whose times are closest to the measured ones, in the squares of relative errors.

    A matmul takes launch + 2 m n k / speed + 2 m n k_half / speed, which is linear in the three; so is a pass
    in launch and bytes. The launch is that of the passes: matmuls tell it less well. A matmul that is limited
    by memory says nothing about the speed of arithmetic, and is left out.
    """
    if len(passes) < 2 or len(matmuls) < 3:
        raise ConfigError("are too few", key="measurements", allowed="3 matmuls and 2 passes or more")
    launch_s, per_byte_s = coefficients(
        ([1.0] * len(passes), [sample.nbytes for sample in passes]), [sample.seconds for sample in passes]
    )
    bound = [s for s in matmuls if s.seconds > launch_s + 1.5 * per_byte_s * traffic_bytes(s, number_bytes)]
    if len(bound) < 2 or per_byte_s <= 0.0:
        raise ConfigError(
            "do not tell arithmetic from memory", key="measurements",
            found=f"{len(bound)} matmuls that memory does not limit", allowed="2 or more, and passes",
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
"""The arithmetic of a fused backward pass over that of the forward pass (Dao 2023)."""


def attention_curve(
    samples: Sequence[AttentionSample], *, launch_s: float, flop_per_s: float
) -> AttentionCurve:
    """Fractions of `flop_per_s` that fused attention reaches, and the length at which it reaches half of it.

    Seconds are launch + work / (fraction * speed) * (1 + seq_half / s), linear in 1 / fraction and
    seq_half / fraction. `seq_half` is that of the forward pass.
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
    # Times that do not level off at all within the lengths measured: half is reached beyond the longest.
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


Sample = TypeVar("Sample", MatmulSample, MemorySample)


def mean_error(predicted: Callable[[Sample], float], samples: Iterable[Sample]) -> float:
    """Mean of |predicted / measured - 1|."""
    return fmean(abs(predicted(sample) / sample.seconds - 1.0) for sample in samples)


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
