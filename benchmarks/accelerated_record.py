"""What was measured on an H200, held against plans of today: `python -m benchmarks.accelerated_record`.

Needs no such device: steps were timed by `benchmarks.accelerated`, right behind the calibration, and peaks
are PyTorch's `max_memory_allocated` of a step without the two workspaces of cuBLAS (`libraries_bytes`, which
still are in those of shapes that were not timed). When they were measured the price was as it is, but all
shapes had been measured before: by the first fourteen the price of copies was written, and all were at hand
when it was chosen to keep the launch that kernels alone tell.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.accelerated_shapes import SHAPES, Shape, plan_of

from shardwise.strategy import Calibration, read_calibration

RECORD = Path(__file__).with_name("accelerated_h200.json")
CALIBRATION = Path(__file__).parents[1] / "examples" / "calibrations" / "H200.yaml"


_NAMED = {shape.name: shape for shape in SHAPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A figure as planned over the same as measured, of a shape."""

    name: str
    planned: float
    measured: float

    @property
    def off(self) -> float:
        return self.planned / self.measured - 1.0


def steps(calibration: Calibration) -> list[Compared]:
    """Seconds of a step of every shape."""
    return [
        Compared(
            name=each["name"],
            planned=plan_of(_NAMED[each["name"]], calibration).best.step_time_s,
            measured=each["seconds"],
        )
        for each in _record()["steps"]
    ]


def peaks(calibration: Calibration) -> list[Compared]:
    """Bytes in tensors at the peak of a step, of the same shapes and of others."""
    record = _record()
    found = [
        Compared(
            name=each["name"],
            planned=plan_of(_NAMED[each["name"]], calibration).best.peak_memory.allocated,
            measured=each["allocated_bytes"],
        )
        for each in record["steps"]
    ]
    for each in record["peaks"]:
        asked = {name: each[name] for name in ("config", "seq_len", "micro_batch_size", "global_batch_size")}
        shape = Shape(name=_called(each), strategy=each["strategy"], dtype=each["dtype"], **asked)
        found.append(
            Compared(
                name=shape.name,
                planned=plan_of(shape, calibration).best.peak_memory.allocated,
                measured=each["allocated_bytes"] - record["libraries_bytes"],
            )
        )
    return found


def _called(each: dict[str, Any]) -> str:
    config = each["config"]
    layers = config.get("layers") or config["num_hidden_layers"]
    hidden = config.get("hidden") or config["hidden_size"]
    kind = "GPT" if "layers" in config else "Llama"
    batch = f"{each['global_batch_size']} x {each['seq_len']} by {each['micro_batch_size']}"
    return " ".join(filter(None, (f"{kind} {layers} x {hidden}, {batch}", each["dtype"], each["strategy"])))


def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORD.read_text("utf-8"))
    return record


def main() -> None:
    calibration = read_calibration(str(CALIBRATION))
    print(_record()["machine"])
    for what, unit, by, found in (
        ("step", "ms", 1e-3, steps(calibration)),
        ("memory", "GiB", 2.0**30, peaks(calibration)),
    ):
        for one in found:
            print(f"{one.name:48} {one.measured / by:8.2f} {unit} measured {one.planned / by:8.2f} planned "
                  f"{one.off:+6.1%}")  # fmt: skip
        off = [abs(one.off) for one in found]
        near = sum(each <= 0.04 for each in off)
        print(
            f"{what}: {len(off)} shapes, off by {fmean(off):.1%}, at most {max(off):.1%}; {near} within 4 %"
        )


if __name__ == "__main__":
    main()
