"""Compares plans with recorded runs on an H200 and an H100: `python -m benchmarks.accelerated_record`.

It needs no such device. `benchmarks.accelerated` timed the steps directly after a calibration. Peaks are
PyTorch's `max_memory_allocated` of a step without the two workspaces of cuBLAS (`libraries_bytes`, which the
peaks of shapes without a step time still contain). The H200 shapes are not independent of the cost model: the
cost of copies was chosen with the first fourteen, the launch per kernel with all. The H100 shapes are
independent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accelerated_shapes import SHAPES, Shape, plan_of

from shardwise.strategy import Calibration, read_calibration

_CALIBRATIONS = Path(__file__).parents[1] / "examples" / "calibrations"


@dataclass(frozen=True, slots=True)
class Record:
    """A device's calibration, and the steps that were measured after it."""

    calibrated: Path
    measured: Path

    @property
    def calibration(self) -> Calibration:
        return read_calibration(str(self.calibrated))

    def read(self) -> dict[str, Any]:
        record: dict[str, Any] = json.loads(self.measured.read_text("utf-8"))
        return record


H200, H100 = (
    Record(_CALIBRATIONS / f"{device}.yaml", Path(__file__).with_name(f"accelerated_{name}.json"))
    for device, name in (("H200", "h200"), ("H100-SXM", "h100"))
)


_NAMED = {shape.name: shape for shape in SHAPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A planned and a measured value of a shape."""

    name: str
    planned: float
    measured: float

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1.0


def steps(record: Record) -> list[Compared]:
    """Planned and measured seconds per step of every shape."""
    calibration = record.calibration
    return [
        Compared(
            name=each["name"],
            planned=plan_of(_NAMED[each["name"]], calibration).best.step_time_s,
            measured=each["seconds"],
        )
        for each in record.read()["steps"]
    ]


def peaks(record: Record) -> list[Compared]:
    """Planned and measured peak bytes in tensors, of the timed shapes and of others."""
    calibration, measured = record.calibration, record.read()
    found = [
        Compared(
            name=each["name"],
            planned=plan_of(_NAMED[each["name"]], calibration).best.peak_memory.allocated,
            measured=each["allocated_bytes"],
        )
        for each in measured["steps"]
    ]
    for each in measured.get("peaks", ()):
        fields = {name: each[name] for name in ("config", "seq_len", "micro_batch_size", "global_batch_size")}
        shape = Shape(name=_name_of(each), strategy=each["strategy"], dtype=each["dtype"], **fields)
        found.append(
            Compared(
                name=shape.name,
                planned=plan_of(shape, calibration).best.peak_memory.allocated,
                measured=each["allocated_bytes"] - measured["libraries_bytes"],
            )
        )
    return found


def _name_of(each: dict[str, Any]) -> str:
    config = each["config"]
    layers = config.get("layers") or config["num_hidden_layers"]
    hidden = config.get("hidden") or config["hidden_size"]
    kind = "GPT" if "layers" in config else "Llama"
    batch = f"{each['global_batch_size']} x {each['seq_len']} by {each['micro_batch_size']}"
    return " ".join(filter(None, (f"{kind} {layers} x {hidden}, {batch}", each["dtype"], each["strategy"])))


def main() -> None:
    for record in (H200, H100):
        print(record.read()["machine"])
        for what, unit, by, found in (
            ("step", "ms", 1e-3, steps(record)),
            ("memory", "GiB", 2.0**30, peaks(record)),
        ):
            _report(what, unit, by, found)


def _report(what: str, unit: str, by: float, found: list[Compared]) -> None:
    for one in found:
        print(f"{one.name:48} {one.measured / by:8.2f} {unit} measured {one.planned / by:8.2f} planned "
              f"{one.error:+6.1%}")  # fmt: skip
    error = [abs(one.error) for one in found]
    near = sum(each <= 0.04 for each in error)
    print(
        f"{what}: {len(error)} shapes, mean error {fmean(error):.1%}, at most {max(error):.1%}; "
        f"{near} within 4 %"
    )


if __name__ == "__main__":
    main()
