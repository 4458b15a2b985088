"""Measured values of a row: seconds per step, given or computed by the stated convention, and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from shardwise.accuracy.predict import Prediction
from shardwise.accuracy.rows import Row
from shardwise.cost import Problem
from shardwise.errors import ConfigError
from shardwise.model import (
    active_matmul_parameters,
    attention_flop_per_token,
    model_flop_per_token,
    mtp_parameters,
)

HALVED: Final = ("megatron-bridge", "automodel")
"""Frameworks whose tables count causal attention half; all others count it in full.

Rows that give both a step time and an arithmetic rate show the convention."""

_MEMORY_WORDS: Final[tuple[tuple[str, str], ...]] = (
    ("nvidia-smi", "device"), ("dlperf", "device"), ("max_memory_reserved", "reserved"),
    ("torchtitan", "reserved"), ("alloc", "allocated"),
)  # fmt: skip
"""Words of a row's id, notes, source and framework with the kind of memory they imply; the first found
counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds per step and peak bytes of a row, and the assumptions.

    A value is None where the row neither gives it nor has the columns to compute it. `memory_kind` is
    `allocated` (bytes in tensors), `reserved` (by the allocator) or `device` (by the driver)."""

    step_time_s: float | None
    peak_bytes: float | None
    memory_kind: str
    assumed: tuple[str, ...]


def measured_of(row: Row, problem: Problem) -> Measured:
    """The measured values of `row`. ConfigError where it has no value that can be compared."""
    kind, of_memory = _memory_kind(row)
    peak_bytes = None if row.peak_mem_gib is None else row.peak_mem_gib * 2.0**30
    try:
        step_time_s, of_time = _step_time_s(row, problem)
    except ConfigError:
        if peak_bytes is None:
            raise
        step_time_s, of_time = None, ()
    assumed = of_time if peak_bytes is None else (*of_time, *of_memory)
    return Measured(step_time_s=step_time_s, peak_bytes=peak_bytes, memory_kind=kind, assumed=assumed)


def predicted_bytes(prediction: Prediction, kind: str) -> float:
    """The predicted peak of a kind of memory, as in `Measured`."""
    peaks: Mapping[str, float] = {
        "allocated": prediction.allocated_bytes,
        "reserved": prediction.reserved_bytes,
        "device": prediction.device_bytes,
    }
    return peaks[kind]


def _memory_kind(row: Row) -> tuple[str, tuple[str, ...]]:
    text = " ".join((row.id, row.notes, row.source, row.framework)).casefold()
    for word, kind in _MEMORY_WORDS:
        if word in text:
            return kind, ()
    return "allocated", ("peak_mem_gib: bytes in tensors",)


def _step_time_s(row: Row, problem: Problem) -> tuple[float, tuple[str, ...]]:
    """The step time and its assumptions: given, else from tokens per second, else from an arithmetic rate."""
    if row.step_time_s is not None:
        return row.step_time_s, ()
    tokens = problem.job.global_batch_size * problem.job.seq_len / problem.cluster.devices
    if row.tokens_per_s_per_gpu is not None:
        return tokens / row.tokens_per_s_per_gpu, ("measured time: from tokens per second",)
    peak = problem.device.peak_flop_per_s[problem.recipe.matmul]
    rates: list[tuple[str, float | None, Callable[[], float]]] = [
        ("tflops_per_gpu", _scaled(row.tflops_per_gpu, 1e12), lambda: _flop_by_convention(row, problem)),
        ("mfu_pct", _scaled(row.mfu_pct, peak / 100), lambda: _model_flop(row, problem)),
        ("hfu_pct", _scaled(row.hfu_pct, peak / 100), lambda: _hardware_flop(row, problem)),
    ]
    for name, rate, flop_per_token in rates:
        if rate is not None:
            how = f"measured time: from {name}, attention counted {'half' if _is_halved(row) else 'in full'}"
            return tokens * flop_per_token() / rate, (how,)
    raise ConfigError("is not given and cannot be computed from other columns", key="step_time_s")


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _is_halved(row: Row) -> bool:
    return any(word in row.framework.casefold() for word in HALVED)


def _flop_by_convention(row: Row, problem: Problem) -> float:
    """Flop per token by the row's `tflops_convention`; model flop where it has none."""
    convention = row.tflops_convention.casefold()
    if convention not in ("", "model", "hardware"):
        raise ConfigError(
            "is not a convention", key="tflops_convention", found=repr(convention), allowed="model, hardware"
        )
    return _hardware_flop(row, problem) if convention == "hardware" else _model_flop(row, problem)


def _model_flop(row: Row, problem: Problem) -> float:
    """Model flop per token: 6 N plus attention, without recomputation."""
    return model_flop_per_token(problem.model, problem.job.attention_len, causal_half=_is_halved(row))


def _hardware_flop(row: Row, problem: Problem) -> float:
    """Hardware flop per token: model flop plus recomputation.

    Selective recomputation repeats scores and values, full recomputation the forward pass of the layers.
    ConfigError where the row does not state the recomputation."""
    model, words = problem.model, row.recompute.casefold().split()
    flop = _model_flop(row, problem)
    if not words:
        raise ConfigError("is not given, and a time from hardware flop needs it", key="recompute")
    if words[0] == "none":
        return flop
    recomputed = attention_flop_per_token(model, problem.job.attention_len, causal_half=_is_halved(row))
    if words[0] == "full":
        end_flop = 2.0 * (model.vocab * model.hidden + mtp_parameters(model))
        recomputed += 2.0 * active_matmul_parameters(model) - end_flop
    return flop + recomputed
