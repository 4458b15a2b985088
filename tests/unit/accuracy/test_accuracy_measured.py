"""Stated times, and times computed from other stated values, by hand."""

from __future__ import annotations

import pytest
from tests.unit.accuracy.tables import case_of

from shardwise.accuracy.measured import measured_of, predicted_bytes
from shardwise.accuracy.predict import predicted
from shardwise.errors import ConfigError
from shardwise.model import active_matmul_parameters

TOKENS = 64 * 2048 / 16
"""Tokens per device and step of the plain row."""


def time_s(**changes: str) -> float:
    case = case_of(**{"step_time_s": "", **changes})
    measured = measured_of(case.row, case.problem)
    assert measured.step_time_s is not None
    return measured.step_time_s


def flop_per_token(*, attention: float) -> float:
    """6 N, and `attention` times the full square: 12 l h s for the three passes."""
    model = case_of().problem.model
    return 6 * active_matmul_parameters(model) + attention * 12 * 24 * 2304 * 2048


def test_a_given_time_is_used() -> None:
    assert time_s(step_time_s="2.5", tokens_per_s_per_gpu="1") == 2.5


def test_tokens_per_second() -> None:
    # 64 * 2048 tokens on 16 devices at 4096 each: 2 s.
    assert time_s(tokens_per_s_per_gpu="4096", tflops_per_gpu="1") == pytest.approx(2.0)


def test_a_model_rate_counts_attention_in_full() -> None:
    found = time_s(tflops_per_gpu="100", tflops_convention="model")
    assert found == pytest.approx(TOKENS * flop_per_token(attention=1.0) / 100e12)
    assert time_s(tflops_per_gpu="100") == found


def test_some_frameworks_count_causal_attention_half() -> None:
    found = time_s(tflops_per_gpu="100", tflops_convention="model", framework="Megatron-Bridge", year="2026")
    assert found == pytest.approx(TOKENS * flop_per_token(attention=0.5) / 100e12)


def test_utilisation_is_of_the_dense_peak() -> None:
    # fp16 on A100: 312 TFLOP/s.
    assert time_s(mfu_pct="40") == pytest.approx(TOKENS * flop_per_token(attention=1.0) / (0.4 * 312e12))


def test_a_hardware_rate_counts_recomputation() -> None:
    model = case_of().problem.model
    layers = active_matmul_parameters(model) - 51200 * 2304
    square = 4 * 24 * 2304 * 2048  # forward: two products of 2 h s per layer
    whole = flop_per_token(attention=1.0)
    for recompute, recomputed in (("none", 0.0), ("selective", square), ("full", 2 * layers + square)):
        expected = TOKENS * (whole + recomputed) / 100e12
        given = {"tflops_per_gpu": "100", "tflops_convention": "hardware", "recompute": recompute}
        assert time_s(**given) == pytest.approx(expected), recompute
        assert time_s(hfu_pct="50", recompute=recompute) == pytest.approx(expected * 100 / 156), recompute


def test_computed_times_are_listed_as_assumptions() -> None:
    case = case_of(step_time_s="", mfu_pct="40")
    assert measured_of(case.row, case.problem).assumed == (
        "measured time: from mfu_pct, attention counted in full",
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "step_time_s: is not given and cannot be computed from other columns"),
        (
            {"hfu_pct": "50", "recompute": ""},
            "recompute: is not given, and a time from hardware flop needs it",
        ),
        ({"tflops_per_gpu": "50", "tflops_convention": "mine"}, "tflops_convention: is not a convention"),
    ],
)
def test_no_time_is_a_reason(change: dict[str, str], words: str) -> None:
    case = case_of(**{"step_time_s": "", **change})
    with pytest.raises(ConfigError) as caught:
        measured_of(case.row, case.problem)
    assert words in str(caught.value)


def test_memory_alone_is_enough() -> None:
    case = case_of(step_time_s="", peak_mem_gib="20")
    measured = measured_of(case.row, case.problem)
    assert (measured.step_time_s, measured.peak_bytes) == (None, 20 * 2**30)


@pytest.mark.parametrize(
    ("change", "kind", "is_assumed"),
    [
        ({}, "allocated", True),
        ({"notes": "max alloc of PyTorch"}, "allocated", False),
        ({"notes": "by nvidia-smi"}, "device", False),
        ({"id": "dlperf-gpt-001"}, "device", False),
        ({"source": "OneFlow DLPerf"}, "device", False),
        ({"framework": "torchtitan"}, "reserved", False),
    ],
)
def test_the_kind_of_measured_memory(change: dict[str, str], kind: str, is_assumed: bool) -> None:
    case = case_of(**{**change, "peak_mem_gib": "20"})
    measured = measured_of(case.row, case.problem)
    assert measured.memory_kind == kind
    assert (measured.assumed == ("peak_mem_gib: bytes in tensors",)) == is_assumed
    prediction = predicted(case)
    assert predicted_bytes(prediction, kind) == getattr(prediction, f"{kind}_bytes")
