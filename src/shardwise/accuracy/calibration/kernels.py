"""Curves of kernels from their measured times, by the equations that the cost model uses
(docs/concepts/cost-model.md, section 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from shardwise.accuracy.calibration.samples import AttentionSample, MatmulSample, MemorySample
from shardwise.accuracy.calibration.solve import coefficients
from shardwise.cluster import AttentionCurve
from shardwise.equations import compute
from shardwise.errors import ConfigError

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
