"""The batch timer on a simulated clock; real kernels and links, measured once and briefly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwise.accuracy import (
    COLLECTIVES,
    AttentionSample,
    LinkSample,
    MatmulSample,
    MeasuredStep,
    MemorySample,
    OverlapSample,
    calibration_plans,
    eager_profile,
    with_accelerated_kernels,
)
from shardwise.accuracy.calibration import KernelCurves
from shardwise.accuracy.calibration.steps import predicted_step_s
from shardwise.app.cli import calibrating
from shardwise.app.cli.main import main
from shardwise.cluster import AttentionCurve, Device, find_device, load_cluster
from shardwise.equations import compute
from shardwise.measure import KernelTimes, kernel_times, kernels, link_times, lockstep_s, overlap_times
from shardwise.measure import kernels as accelerator
from shardwise.measure.kernels import BatchTimer
from shardwise.measure.links import lost_s
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, timed_steps
from shardwise.runtime.private import DispatchMode
from shardwise.runtime.timing import TimedSteps
from shardwise.strategy import read_calibration, target_of


class Calls:
    """A call that takes 2 ms on its own clock, and 50 ms more when its number is in `disturbed`."""

    def __init__(self, disturbed: frozenset[int] = frozenset()) -> None:
        self.now_s = 0.0
        self.made = 0
        self._disturbed = disturbed

    def __call__(self) -> None:
        self.made += 1
        self.now_s += 0.002 + 0.05 * (self.made in self._disturbed)

    def now(self) -> float:
        return self.now_s


def test_the_clock_counts_whole_batches() -> None:
    calls = Calls()
    assert BatchTimer(batches=5, batch_s=0.03, now=calls.now).seconds(calls) == pytest.approx(0.002)
    assert calls.made == 2 + 5 * 15  # a call to warm up, one to size batches of 15 x 2 ms


def test_a_disturbed_batch_does_not_count() -> None:
    """Calls 20 and 50 are in the second and the fourth batch; the mean of all batches would be 3.3 ms."""
    calls = Calls(frozenset({20, 50}))
    assert BatchTimer(batches=5, batch_s=0.03, now=calls.now).seconds(calls) == pytest.approx(0.002)


def test_each_kind_of_kernel_is_measured() -> None:
    times = kernel_times(BatchTimer(batches=1, batch_s=1e-4))
    assert len(times.matmuls) == 15 and min(sample.seconds for sample in times.matmuls) > 0.0
    assert [sample.nbytes for sample in times.passes] == sorted(sample.nbytes for sample in times.passes)
    assert {sample.is_backward for sample in times.attentions} == {False, True}
    assert times.bf16_ratio > 0.0


class Flops:
    """The clock of a device with one flop per second, on which all but matrix products take no time."""

    def seconds(self, call: Callable[[], object]) -> float:
        with FlopCounterMode(display=False) as counter:
            call()
        return float(counter.get_total_flops())


def test_a_product_is_timed_in_the_shape_that_is_reported() -> None:
    times = kernel_times(Flops())  # type: ignore[arg-type]
    for sample in times.matmuls:
        assert sample.seconds == 2.0 * sample.m * sample.n * sample.k
    assert times.bf16_ratio == 1.0


def _links(report: Any, groups: list[list[int]]) -> list[LinkSample]:
    return link_times(groups, sizes=(4096, 65536), repeats=1)


def test_links_are_measured_by_kind_and_bytes() -> None:
    with WorkerPool(3) as team:
        samples = team.run(3, _links, [[0, 2]])  # rank 1 is in no group
    assert samples[0] == samples[1] == samples[2]
    assert [(sample.kind, sample.ranks, sample.nbytes) for sample in samples[0]] == [
        (kind, 2, nbytes) for kind in COLLECTIVES for nbytes in (4096.0, 65536.0)
    ]
    assert all(sample.seconds > 0.0 for sample in samples[0])


def _overlap(report: Any, groups: list[list[int]]) -> list[OverlapSample]:
    return overlap_times(groups, repeats=1)


def test_sums_are_measured_during_computation() -> None:
    with WorkerPool(3) as team:
        samples = team.run(3, _overlap, [[0, 2]])  # rank 1 is in no group
    assert samples[0] == samples[1] == samples[2]
    (sample,) = samples[0]
    assert min(sample.communication_s, sample.computation_s, sample.both_s) > 0.0


def _lockstep(report: Any, groups: list[list[int]]) -> float:
    return lockstep_s(groups, repeats=2)


def test_waiting_for_each_other_is_measured_on_all_ranks() -> None:
    with WorkerPool(3) as team:
        found = team.run(3, _lockstep, [[0, 2]])  # rank 1 is in no group
    assert found[0] == found[1] == found[2] >= 0.0


def test_the_time_lost_by_a_group_is_its_common_waiting() -> None:
    """Ranks 0 and 2 wait 3 and 5 ms, each for the other in turn: 3 ms are lost. Rank 3 is always last, so
    rank 1 only waits for a slower rank: nothing is lost."""
    waits_s = [0.003, 0.008, 0.005, 0.0]
    assert lost_s(waits_s, [[0, 2]]) == 0.003
    assert lost_s(waits_s, [[1, 3]]) == 0.0
    assert lost_s(waits_s, [[0, 2], [1, 3]]) == pytest.approx(0.0015)
    assert lost_s([-1e-4, -2e-4], [[0, 1]]) == 0.0  # less than the collective alone took


class Operators(DispatchMode):
    """Records the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Noting:
    """A clock that records the operators of each call."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def seconds(self, call: Callable[[], object]) -> float:
        with Operators() as operators:
            call()
        self.seen.append(operators.names)
        return 1.0


def test_a_memory_pass_writes_into_allocated_memory() -> None:
    """A sum into a new tensor of 32 MiB or more takes five times as long: the system clears its pages
    first."""
    clock = Noting()
    kernels._pass(clock, 256, torch.float32)  # type: ignore[arg-type]
    assert clock.seen == [["aten.add.out"]]


def test_medians_of_rounds_are_those_of_each_kernel() -> None:
    def times(*seconds: float, ratio: float) -> KernelTimes:
        a, b, c = seconds
        return KernelTimes(
            matmuls=(MatmulSample(m=8, n=8, k=8, seconds=a), MatmulSample(m=9, n=8, k=8, seconds=b)),
            passes=(MemorySample(nbytes=12.0, seconds=c),),
            attentions=(AttentionSample(seq_len=8, work_flop=1.0, is_backward=True, seconds=a + b),),
            bf16_ratio=ratio,
        )

    rounds = [
        times(1.0, 6.0, 2.0, ratio=1.0),
        times(3.0, 4.0, 9.0, ratio=3.0),
        times(2.0, 5.0, 1.0, ratio=2.0),
    ]
    assert KernelTimes.typical(rounds) == times(2.0, 5.0, 2.0, ratio=2.0)


def test_calibrate_writes_a_file_that_the_planner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: bool
) -> None:
    """Links alone, added to an existing calibration; with `full` the kernels too (20 CPU seconds)."""
    from tests.unit.app.test_cli_calibrate import written

    out = str(tmp_path / "out.yaml")
    base = () if full else ("--from", written(tmp_path))
    assert main(["calibrate", "--out", out, "--links", "--cluster", "1x2xcpu", *base]) == 0
    assert "links of shared memory" in capsys.readouterr().out
    calibration = read_calibration(out)
    device = calibration.devices["cpu"]
    assert calibration.profile is not None and device.efficiency.is_calibrated
    assert device.scale_up_bytes_per_s != 2e9  # not that of the base calibration
    # Whatever overlap was measured, our runtime exposes the reductions of shared states and those of graph
    # plans.
    assert calibration.profile.state_overlap == 0.0
    assert calibration.profile_without_data_overlap == replace(calibration.profile, data_overlap=0.0)
    if not full:
        assert device.peak_flop_per_s["fp32"] == 7.5e10


# --- CUDA devices ----------------------------------------------------------------------------------------

PEAK, MEMORY = find_device("H100-SXM").peak_flop_per_s["bf16"], find_device("H100-SXM").memory_bytes_per_s
LAUNCH_S = 5e-6
"""Launch time of each kernel of the stand-in; seconds."""

REACHED = {"peak_fraction": 0.7, "k_half": 250.0}


class Accelerator:
    """The clock of a device that is not here: calls run on the meta device, and take what an H100-SXM with
    the efficiency REACHED would take."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()

    def seconds(self, call: Callable[[], object]) -> float:
        spent = OperatorSeconds()
        with spent:
            call()
        self.dtypes |= spent.dtypes
        return spent.seconds


class OperatorSeconds(DispatchMode):
    """Seconds of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        self.dtypes |= {each.dtype for each in tensors}
        name = func.__name__
        if name == "mm.default":
            (m, k), n = tensors[0].shape, tensors[1].shape[1]
            matmul = find_device("H100-SXM").efficiency.matmul
            share = compute.matmul_efficiency(
                m, n, k, **REACHED, tile_m=matmul.tile_m, tile_n=matmul.tile_n, units=matmul.units,
                small_tile_fraction=matmul.small_tile_fraction,
            )  # fmt: skip
            self.seconds += LAUNCH_S + 2.0 * m * n * k / (PEAK * float(share))
        elif name == "add.out":
            self.seconds += LAUNCH_S + 6.0 * tensors[0].numel() / (0.8 * MEMORY)
        elif name == "bmm.default":  # unfused attention; causal, so half of the flop count
            (batch, m, k), n = tensors[0].shape, tensors[1].shape[2]
            self.seconds += batch * m * n * k / (0.5 * PEAK)
        elif "softmax" in name:
            self.seconds += LAUNCH_S
        return result


def imitated_device() -> Device:
    """The H100-SXM that the stand-in imitates."""
    known = find_device("H100-SXM")
    curves = KernelCurves(
        launch_s=LAUNCH_S, flop_per_s=REACHED["peak_fraction"] * PEAK, k_half=REACHED["k_half"],
        memory_bytes_per_s=0.8 * MEMORY,
    )  # fmt: skip
    attention = AttentionCurve(forward_fraction=0.5, backward_fraction=0.625, seq_half=0.0)
    return with_accelerated_kernels(known, curves, attention, dtype="bf16")


def test_a_cuda_device_is_recorded_with_the_efficiency_of_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver's name identifies the device; the file has the fractions of the peaks that its kernels
    reach."""
    clock = Accelerator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(accelerator, "BatchTimer", lambda **_: clock)
    on_cuda = kernel_times
    monkeypatch.setattr(
        accelerator, "kernel_times", lambda clock, device, sizes: on_cuda(clock, device="meta", sizes=sizes)
    )
    software = replace(eager_profile(), pointwise_passes=3.0, host_step_s=4e-3, dispatch_s=6e-5)

    def taken(plans: Sequence[Plan], large: int) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
        """Steps of this software on a device with the efficiency above."""
        own = target_of("shardwise").run_by(software)
        queued = replace(own, dispatch_s=0.0)
        steps = [
            MeasuredStep(
                plan=plan, seconds=predicted_step_s(plan, imitated_device(), queued if place < large else own)
            )
            for place, plan in enumerate(plans)
        ]
        return steps[:large], steps[large:]

    monkeypatch.setattr(calibrating, "_taken", taken)
    out = str(tmp_path / "h100.yaml")
    assert main(["calibrate", "--devices", "cuda", "--out", out]) == 0
    assert "bf16" in capsys.readouterr().out
    profile = read_calibration(out).profile
    assert profile is not None and profile.name == "shardwise"
    for name in ("pointwise_passes", "host_step_s", "dispatch_s"):
        assert getattr(profile, name) == pytest.approx(getattr(software, name), rel=1e-4), name
    device = read_calibration(out).devices["H100-SXM"]
    efficiency, known = device.efficiency, find_device("H100-SXM")
    assert torch.bfloat16 in clock.dtypes
    assert device.peak_flop_per_s == known.peak_flop_per_s
    for name, reached in REACHED.items():
        assert getattr(efficiency.matmul, name) == pytest.approx(reached, rel=1e-6), name
    assert efficiency.matmul.units == known.efficiency.matmul.units
    assert efficiency.memory.fraction == pytest.approx(0.8, rel=1e-6)
    assert efficiency.launch_s == pytest.approx(LAUNCH_S, rel=1e-6)
    assert efficiency.attention["flash-2"].forward_fraction == pytest.approx(0.5, rel=1e-6)
    # Unfused: four products backward, two forward. A fused kernel counts 2.5 times the forward flop: 0.5 *
    # 2.5 / 2.
    assert efficiency.attention["flash-2"].backward_fraction == pytest.approx(0.625, rel=1e-6)
    assert efficiency.is_calibrated
    # Where too few of the plans fit, only kernels are reported.
    monkeypatch.setattr(calibrating, "MIN_PLANS", 100)
    assert main(["calibrate", "--devices", "cuda", "--out", out]) == 0
    assert read_calibration(out).profile is None


def test_steps_of_a_plan_are_timed_one_by_one() -> None:
    """On the host, where allocated bytes are unknown."""
    plan = calibration_plans(load_cluster("1x1xcpu"), eager_profile())[3]
    with WorkerPool(1) as team:
        (found,) = team.run(1, _timed, plan)
    assert len(found.seconds) == 2 and min(found.seconds) > 0.0
    assert found.allocated_bytes is None


def _timed(report: object, plan: Plan) -> TimedSteps:
    return timed_steps(plan, steps=2, warming_up=1)


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ((), "shardwise: error: --devices: finds no CUDA device on this machine"),
        (("--links",), "shardwise: error: --links: cannot be combined with --devices cuda"),
        (("--from", "steps.jsonl"), "shardwise: error: --from: cannot be combined with --devices cuda"),
        (("--devices", "tpu"), "shardwise: error: --devices: cannot be measured"),
    ],
)
def test_a_failed_measurement_is_a_one_line_error(
    options: tuple[str, ...], reported: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out.yaml"
    assert main(["calibrate", "--devices", "cuda", "--out", str(out), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(reported) and error.count("\n") == 1
    assert not out.exists()
