"""Curves are recovered from their own times, noise changes them little, and mutants are caught."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shardwise.accuracy.calibration import (
    COLLECTIVES,
    UNSHARDED,
    AttentionSample,
    Collective,
    KernelCurves,
    LinkCurve,
    LinkSample,
    MatmulSample,
    MemorySample,
    OverlapSample,
    attention_curve,
    collective_s,
    hidden_share,
    kernel_curves,
    link_curve,
    matmul_errors,
    with_bidirectional,
)
from shardwise.accuracy.calibration import curves as links
from shardwise.accuracy.calibration.curves import Tiles, coefficients
from shardwise.cluster import AttentionCurve, load_cluster
from shardwise.cost.collectives import collective_model_of
from shardwise.cost.problem import machine_of
from shardwise.errors import ConfigError
from shardwise.strategy import PROFILES

TRUE = KernelCurves(launch_s=8e-6, flop_per_s=6e10, k_half=40.0, memory_bytes_per_s=9e9)
SHAPES = [(m, n, k) for m in (64, 256, 1024) for n in (128, 512) for k in (32, 256, 2048)]


def matmuls(curves: KernelCurves) -> list[MatmulSample]:
    shapes = [MatmulSample(m=m, n=n, k=k, seconds=1.0) for m, n, k in SHAPES]
    return [replace(sample, seconds=curves.matmul_s(sample)) for sample in shapes]


def passes(curves: KernelCurves) -> list[MemorySample]:
    sizes = [MemorySample(nbytes=4.0**power, seconds=1.0) for power in range(6, 16)]
    rate = curves.memory_bytes_per_s
    return [replace(sample, seconds=curves.launch_s + sample.nbytes / rate) for sample in sizes]


def test_the_time_of_a_matmul_by_hand() -> None:
    # 2 * 64 * 128 * 32 flop = 524,288; (32 + 40) / 32 = 2.25 times as long at 6e10 flop/s: 19.6608 us; the
    # bytes are 4 * (2,048 + 4,096 + 8,192) = 57,344 at 9e9 bytes/s: 6.4 us; the launch is 8 us.
    sample = MatmulSample(m=64, n=128, k=32, seconds=1.0)
    assert TRUE.matmul_s(sample) == pytest.approx(27.6608e-6, rel=1e-12)


def test_known_curves_of_kernels_are_recovered() -> None:
    found = kernel_curves(matmuls(TRUE), passes(TRUE))
    for name in ("launch_s", "flop_per_s", "k_half", "memory_bytes_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert matmul_errors(found, matmuls(TRUE))["mean_error"] < 1e-6


def test_times_without_a_prologue_are_not_explained_by_curves_that_have_one() -> None:
    """The mutant without a prologue of k predicts times of short sums far off."""
    mutant = replace(TRUE, k_half=0.0)
    assert matmul_errors(mutant, matmuls(TRUE))["mean_error"] > 0.1


TILED = KernelCurves(
    launch_s=4e-6, flop_per_s=7e14, k_half=300.0, memory_bytes_per_s=2.8e12, number_bytes=2.0,
    tiles=Tiles(tile_m=128, tile_n=256, units=132, small_fraction=0.8),
)  # fmt: skip
LARGE = [(m, n, k) for m in (2000, 8192) for n in (1024, 4096) for k in (512, 4096, 16384)]


def test_the_time_of_a_matmul_in_tiles_by_hand() -> None:
    # 8 x 4 = 32 tiles of 128 x 256 on 132 units: one wave, 32 / 132 of it filled. Tiles of 64 x 128: 16 x 8 =
    # 128, one wave, 128 / 132 filled at 0.8 of the speed: 0.775758, the better one. 2 * 1024^3 flop =
    # 2,147,483,648, over 0.775758 = 2,768,240,640, at 7e14 * 1024 / 1324: 5.113215 us,
    # and 4 us for the launch.
    sample = MatmulSample(m=1024, n=1024, k=1024, seconds=1.0)
    assert TILED.tiles.fill(sample) == pytest.approx(0.8 * 128 / 132, rel=1e-12)
    assert TILED.matmul_s(sample) == pytest.approx(9.113215e-6, rel=1e-6)


def test_known_curves_of_kernels_in_tiles_are_recovered() -> None:
    """The mutant without tiles takes wasted computation for a slower device."""
    shapes = [MatmulSample(m=m, n=n, k=k, seconds=1.0) for m, n, k in LARGE]
    times = [replace(sample, seconds=TILED.matmul_s(sample)) for sample in shapes]
    found = kernel_curves(times, passes(TILED), number_bytes=2.0, tiles=TILED.tiles)
    for name in ("launch_s", "flop_per_s", "k_half", "memory_bytes_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(TILED, name), rel=1e-6), name
    mutant = kernel_curves(times, passes(TILED), number_bytes=2.0)
    assert mutant.flop_per_s < 0.95 * TILED.flop_per_s


def test_noise_moves_the_curves_little() -> None:
    random = np.random.default_rng(7)

    def noisy(samples: Sequence[MatmulSample]) -> list[MatmulSample]:
        return [replace(s, seconds=s.seconds * float(np.exp(0.03 * random.normal()))) for s in samples]

    found = kernel_curves(noisy(matmuls(TRUE)), passes(TRUE))
    assert found.flop_per_s == pytest.approx(TRUE.flop_per_s, rel=0.05)
    assert found.k_half == pytest.approx(TRUE.k_half, rel=0.2)


def test_measurements_that_determine_no_curve_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        kernel_curves(matmuls(TRUE)[:2], passes(TRUE))
    slow = [replace(sample, seconds=sample.seconds * 1e4) for sample in passes(TRUE)]
    with pytest.raises(ConfigError, match="do not separate arithmetic from memory"):
        kernel_curves(matmuls(TRUE), slow)


ATTENTION = AttentionCurve(forward_fraction=0.4, backward_fraction=0.25, seq_half=96.0)


def attention_samples(curve: AttentionCurve, speed: float, launch_s: float) -> list[AttentionSample]:
    samples = []
    for seq_len in (64, 128, 512, 1024):
        work = 2.0 * seq_len * (seq_len / 2) * 8 * 128
        reach = seq_len / (seq_len + curve.seq_half)
        for is_backward, fraction, factor in (
            (False, curve.forward_fraction, 1.0),
            (True, curve.backward_fraction, 2.5),
        ):
            seconds = launch_s + factor * work / (speed * fraction * reach)
            samples.append(
                AttentionSample(seq_len=seq_len, work_flop=work, is_backward=is_backward, seconds=seconds)
            )
    return samples


@pytest.mark.parametrize("seq_half", [0.0, 96.0])
def test_a_known_curve_of_attention_is_recovered(seq_half: float) -> None:
    true = replace(ATTENTION, seq_half=seq_half)
    samples = attention_samples(true, 5e10, 1e-5)
    found = attention_curve(samples, launch_s=1e-5, flop_per_s=5e10)
    assert found.forward_fraction == pytest.approx(true.forward_fraction, rel=1e-6)
    assert found.backward_fraction == pytest.approx(true.backward_fraction, rel=1e-6)
    assert found.seq_half == pytest.approx(true.seq_half, rel=1e-5, abs=1e-6)


LINK = LinkCurve(latency_s=4e-5, startup_s=2e-4, bytes_per_s=2.2e7)


def link_samples(curve: LinkCurve, kinds: Sequence[Collective] = COLLECTIVES) -> list[LinkSample]:
    samples = [
        LinkSample(kind=kind, ranks=2 if kind == "message" else ranks, nbytes=4.0**power, seconds=1.0)
        for kind in kinds
        for ranks in (2, 4, 8)
        for power in (3, 6, 8, 10, 12)
    ]
    return [replace(sample, seconds=collective_s(curve, sample)) for sample in samples]


@pytest.mark.parametrize("kinds", [COLLECTIVES, ("all_reduce",), ("all_gather", "message")])
def test_a_known_curve_of_a_link_is_recovered(kinds: Sequence[Collective]) -> None:
    found = link_curve(link_samples(LINK, kinds))
    for name in ("latency_s", "startup_s", "bytes_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(LINK, name), rel=1e-6), name
    assert max(found.errors(link_samples(LINK, kinds)).values()) < 1e-6


def test_bidirectional_collectives_have_a_share_of_their_own() -> None:
    true = replace(LINK, exchange_fraction=0.6)
    samples = link_samples(true)
    unsharded = link_curve([sample for sample in samples if sample.kind in UNSHARDED])
    assert max(unsharded.errors(samples).values()) > 0.2  # the mutant has no bidirectional collectives
    found = with_bidirectional(unsharded, samples)
    assert found.exchange_fraction == pytest.approx(0.6, rel=1e-6)
    assert max(found.errors(samples).values()) < 1e-6
    # A time below that of the bytes is an error of the clock; without any valid time nothing is known.
    fast = [replace(sample, seconds=sample.seconds / 2) for sample in link_samples(LINK)]
    assert with_bidirectional(unsharded, fast).exchange_fraction == 1.0
    assert with_bidirectional(unsharded, link_samples(true, UNSHARDED)) == unsharded


def test_small_bidirectional_collectives_do_not_determine_the_share() -> None:
    """Half of 4 KiB passes in 20 us at 100 MB/s; a hop of 2.1 ms instead of 1 ms does not mean a share of 2
    %.
    """
    link = LinkCurve(latency_s=1e-3, startup_s=0.0, bytes_per_s=1e8)
    small = LinkSample(kind="all_to_all", ranks=2, nbytes=4096.0, seconds=2.1e-3)
    # Half of 2 MB takes 10 ms at full rate; 20 ms after the hop mean half of the rate.
    large = LinkSample(kind="all_to_all", ranks=2, nbytes=2e6, seconds=21e-3)
    assert with_bidirectional(link, [small, large]).exchange_fraction == pytest.approx(0.5)
    assert with_bidirectional(link, [small]).exchange_fraction == 1.0


def test_late_small_collectives_hardly_change_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All collectives of 4 KiB take three times as long. The mutant, for which all sizes count equally, has
    more than twice the error at 8 MiB.
    """
    samples = [
        LinkSample(kind="all_reduce", ranks=4, nbytes=nbytes, seconds=1.0)
        for nbytes in (4096.0, 2.0**19, 2.0**21, 2.0**23)
    ]
    link = LinkCurve(latency_s=1e-3, startup_s=0.0, bytes_per_s=25e6)
    late = [
        replace(each, seconds=collective_s(link, each) * (3.0 if each.nbytes == 4096.0 else 1.0))
        for each in samples
    ]

    def error_of_largest() -> float:
        return abs(collective_s(link_curve(late), late[-1]) / late[-1].seconds - 1.0)

    weighted = error_of_largest()
    monkeypatch.setattr(links, "_weights", lambda samples: [1.0] * len(samples))
    assert weighted < error_of_largest() / 2.0


def test_overlap_is_a_share_of_the_shorter() -> None:
    def sample(both_s: float, communication_s: float = 2.0) -> OverlapSample:
        return OverlapSample(communication_s=communication_s, computation_s=1.0, both_s=both_s)

    # 2 + 1 - 2.25 = 0.75 of the second of computation; with 0.5 s of communication, 0.5 + 1 - 1.25 is half of
    # it.
    assert hidden_share([sample(2.25)]) == pytest.approx(0.75)
    assert hidden_share([sample(1.25, 0.5)]) == pytest.approx(0.5)
    # Slower than one after the other, and faster than the longer one: errors of the clock.
    assert hidden_share([sample(3.5)]) == 0.0
    assert hidden_share([sample(1.5)]) == 1.0
    assert hidden_share([sample(2.25), sample(3.5), sample(2.5)]) == pytest.approx(0.5)  # the median


def test_a_mutant_that_takes_a_shard_for_the_whole_tensor_is_caught() -> None:
    """The bytes of an all-gather are those of its output; the mutant is off by the number of ranks."""
    wrong = [
        replace(s, nbytes=s.nbytes / s.ranks) if s.kind == "all_gather" else s for s in link_samples(LINK)
    ]
    found = link_curve(wrong)
    assert max(found.errors(wrong).values()) > 0.2


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("nbytes", [16.0, 1e6])
@pytest.mark.parametrize("exchange_fraction", [1.0, 0.5])
def test_a_collective_takes_the_predicted_time(ranks: int, nbytes: float, exchange_fraction: float) -> None:
    """The same collectives, predicted by the fabric of a cluster with these figures."""
    plain = load_cluster(f"1x{ranks}xcpu")
    of = plain.classes["cpu"].efficiency
    curve, tier = replace(of.scale_up, exchange_fraction=exchange_fraction), plain.tiers[0]
    device = replace(plain.classes["cpu"], efficiency=replace(of, scale_up=curve))
    cluster = replace(plain, classes={"cpu": device})
    link = LinkCurve(
        latency_s=tier.latency_s,
        startup_s=curve.startup_s,
        bytes_per_s=curve.fraction * tier.bytes_per_s,
        exchange_fraction=exchange_fraction,
    )
    fabric = collective_model_of(machine_of(cluster, "fp32", "adamw", PROFILES["fsdp2"]))
    sizes = tuple(map(np.array, (ranks,)))
    expected_s = {
        "all_reduce": fabric.all_reduce_s(nbytes, sizes),
        "all_gather": fabric.all_gather_s(nbytes, sizes),
        "reduce_scatter": fabric.all_gather_s(nbytes, sizes),
        "all_to_all": fabric.all_to_all_s(nbytes, sizes),
        "message": fabric.send_s(nbytes, np.array(0)),
    }
    for kind in COLLECTIVES:
        sample = LinkSample(kind=kind, ranks=ranks, nbytes=nbytes, seconds=1.0)
        assert collective_s(link, sample) == pytest.approx(float(expected_s[kind]), rel=1e-12), kind


def test_measurements_of_links_that_determine_no_curve_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        link_curve(link_samples(LINK)[:2])
    constant = [replace(sample, seconds=1e-3) for sample in link_samples(LINK, ("message",))]
    with pytest.raises(ConfigError, match="do not grow with the bytes"):
        link_curve(constant)


def test_coefficients_are_never_negative_and_the_best_of_those() -> None:
    """Compared with a grid: t = 3 x - 1 has no better coefficient for the constant than 0."""
    xs = [1.0, 2.0, 5.0]
    ts = [3.0 * x - 1.0 for x in xs]
    constant, slope = coefficients(([1.0] * 3, xs), ts)
    assert constant == 0.0

    def loss(c: float, s: float) -> float:
        return sum(((c + s * x - t) / t) ** 2 for x, t in zip(xs, ts, strict=True))

    grid = [(c, s) for c in np.linspace(0, 2, 41) for s in np.linspace(0, 4, 401)]
    assert loss(constant, slope) <= min(loss(c, s) for c, s in grid) + 1e-12
