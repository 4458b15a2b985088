"""Accuracy of predictions on this machine's CUDA device: `python -m benchmarks.accelerated [CALIBRATION]`.

It calibrates the device where no calibration is given. Then it trains models of many shapes with our runtime
and compares step time and allocated memory with the plan. It fails where an error exceeds its limit, or where
there is no CUDA device. Nothing else should use the device at the same time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from benchmarks.accelerated_shapes import SHAPES, Shape, plan_of

from shardwise.app.cli.main import main as shardwise
from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, timed_steps
from shardwise.runtime.workers import Report
from shardwise.strategy import Calibration, read_calibration

STEPS, WARMING_UP = 10, 4
LEAST_SHAPES = 12
TIME_WITHIN, MEMORY_WITHIN = 0.04, 0.05
"""Largest relative errors of step time and memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Predicted and measured step time and memory of a shape."""

    name: str
    predicted_s: float
    measured_s: float
    planned_bytes: float
    allocated_bytes: int

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0

    @property
    def memory_error(self) -> float:
        return self.planned_bytes / self.allocated_bytes - 1.0


def _timed(report: Report, plan: Plan) -> tuple[float, int]:
    found = timed_steps(plan, steps=STEPS, warming_up=WARMING_UP)
    return median(found.seconds), found.allocated_bytes or 0


def compared(shape: Shape, calibration: Calibration, team: WorkerPool) -> Comparison:
    plan = plan_of(shape, calibration)
    seconds, nbytes = team.run(1, _timed, plan)[0]
    return Comparison(
        name=shape.name,
        predicted_s=plan.best.step_time_s,
        measured_s=seconds,
        planned_bytes=plan.best.peak_memory.allocated,
        allocated_bytes=nbytes,
    )


def _line(one: Comparison) -> str:
    return (
        f"{one.name:24} {1e3 * one.measured_s:8.1f} ms measured {1e3 * one.predicted_s:8.1f} predicted "
        f"{one.time_error:+6.1%}   {one.allocated_bytes / 2**30:6.2f} GiB allocated "
        f"{one.planned_bytes / 2**30:6.2f} planned {one.memory_error:+6.1%}"
    )


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = arguments[0] if arguments else str(Path(folder) / "calibration.yaml")
        if not arguments and (code := shardwise(["calibrate", "--devices", "cuda", "--out", path])):
            return code
        calibration = read_calibration(path)
    print(calibration.machine)
    found = []
    with WorkerPool(1) as team:
        for shape in SHAPES:
            found.append(compared(shape, calibration, team))
            print(_line(found[-1]), flush=True)
    slow = [one.name for one in found if abs(one.time_error) > TIME_WITHIN]
    large = [one.name for one in found if abs(one.memory_error) > MEMORY_WITHIN]
    times, sizes = (
        [abs(x) for x in of] for of in zip(*((o.time_error, o.memory_error) for o in found), strict=True)
    )
    print(f"{len(found)} shapes: mean error of step time {fmean(times):.1%}, at most {max(times):.1%} "
          f"(limit 4 %); of memory {fmean(sizes):.1%}, at most {max(sizes):.1%} (limit 5 %)")  # fmt: skip
    print(json.dumps([asdict(one) for one in found]))
    for what, names in (("step time", slow), ("memory", large)):
        if names:
            print(f"missed: {what} of {', '.join(names)}")
    return int(bool(slow or large) or len(found) < LEAST_SHAPES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
