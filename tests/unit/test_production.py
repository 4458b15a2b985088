"""`benchmarks.production`: published large runs, each with its plan and source."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest
from benchmarks.production import OF_ITS_TIME, Run, outcome_of, problem_of, read_runs, with_own_pick

from shardwise.cluster import load_cluster


def named(name: str) -> Run:
    return next(run for run in read_runs() if run.name == name)


def test_every_run_has_a_source_and_a_plan_for_its_devices() -> None:
    runs = read_runs()
    assert len({run.name for run in runs}) == len(runs) >= 12
    for run in runs:
        assert run.source
        degrees = prod(run.strategy.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
        assert degrees == load_cluster(run.cluster).devices, run.name


def test_a_published_rate_is_a_step_time() -> None:
    """The formula of the source: 96 * 2,304 * 2,048 * 80 * 12,288^2 * (1 + 2,048 / (6 * 12,288) + 51,200 /
    (16 * 80 * 12,288)) = 5.6417e18 FLOP with recomputation, at 148 TFLOP/s on each of 1,536 devices."""
    flop = 96 * 2304 * 2048 * 80 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 80 * 12288))
    outcome = outcome_of(named("GPT of 80 layers, 1,536 A100"))
    assert outcome.published_s == pytest.approx(flop / (148e12 * 1536), rel=2e-3)


def test_the_step_of_deepseek_v3_follows_from_its_device_hours() -> None:
    """2.664 M hours on 2,048 devices for 14.8 T tokens in steps of 15,360 * 4,096 tokens."""
    steps = 14.8e12 / (15_360 * 4_096)
    assert named("DeepSeek-V3, 2,048 H800").step_s == pytest.approx(2.664e6 * 3600 / 2048 / steps, rel=3e-3)


def test_states_of_a_large_gpt_by_hand() -> None:
    """1,008 B parameters over tp 8 and pp 64 in fp16: weights 2 bytes, gradients 2, states 12 = 16 bytes of
    1.97 B on each rank = 29 GiB at least; the run fits."""
    outcome = outcome_of(named("GPT of 128 layers, 3,072 A100"))
    assert outcome.fits and outcome.needed_bytes > 16 * 1.008e12 / 512


def test_the_plan_of_deepseek_v3_fits_its_devices() -> None:
    """By hand, on a rank with four layers of experts: 33 micro-batches of a stage of two layers.

    Each layer saves per token, in bytes: its input and the residual 2 * 14,336; latents of queries (1,536)
    and keys (512) in 16 bits, normed in 8 bits; attention's output 2 * 16,384 and 4 * 128; scores of 256
    experts in 32 bits. For 8.8 rows (1.1 times the mean load) the experts' inputs, 7,168, and 2 * 4,096;
    2 * 4,096 + 2,048 of the shared one.
    """
    latent = 3 * (1536 + 512)
    of_experts = 8.8 * (7168 + 2 * 4096) + 2 * 4096 + 2048
    token = 2 * 14_336 + latent + 2 * 16_384 + 4 * 128 + 4 * 256 + of_experts
    outcome = outcome_of(named("DeepSeek-V3, 2,048 H800"))
    assert outcome.fits
    # In addition, 14.3 GiB of states, and less than 7 of a layer that is recomputed, buffers and slack.
    saved = 33 * 2 * 4096 * token + 14.3 * 2**30
    assert saved < outcome.needed_bytes < saved + 7 * 2**30


def test_llama_3_1_405b_needs_no_recomputation() -> None:
    """Published with pp 16 and interleaved stages: all 16 micro-batches of 8 layers of a rank are in flight.

    Per token and layer 6 * 16,384 (norms, queries, attention), 2 * 1,024 (keys and values) and 3 * 53,248
    numbers of two bytes, over tp 8. At the first backward pass the gradients of one layer of 398 M weights on
    a rank are whole, 4 bytes each; those of all 8 layers would not fit.
    """
    layer = 8192 * 2 * (6 * 16_384 + 2 * 1024 + 3 * 53_248) / 8
    weights = (2 * 16_384**2 + 2 * 16_384 * 1024 + 3 * 16_384 * 53_248) / 8
    outcome = outcome_of(named("Llama 3.1 405B, 16,384 H100"))
    known = (16 * 8 - 1) * layer + 8 * weights * 2 + weights * 4
    # Beyond that 1.2 GiB of temporaries, shards, buffers, 4 % of slack, and what is outside of tensors.
    assert outcome.fits and known < outcome.needed_bytes < known + 6 * 2**30
    assert outcome.needed_bytes + 7 * weights * 4 > outcome.device_bytes


def test_a_plan_for_other_devices_is_reported() -> None:
    run = named("Mixtral 8x7B, 64 H100")
    broken = outcome_of(replace(run, strategy={**run.strategy, "dp": 32}))
    assert broken.illegal is not None and "number of devices" in broken.illegal and not broken.fits


def test_sequence_parallelism_is_younger_than_these_runs() -> None:
    """It is of May 2022 (Korthikanti et al.); MT-NLG and the GPT models of Narayanan et al. ran before."""
    for run in read_runs():
        if run.software in OF_ITS_TIME:
            assert not problem_of(run)[1].sequence_parallel and run.strategy["tp"] > 1


@pytest.mark.parametrize("name", ["Mixtral 8x7B, 64 H100", "MT-NLG 530B, 2,800 A100"])
def test_our_pick_is_never_predicted_slower(name: str) -> None:
    """Among plans of the same software: what it does not have is not in the pick. The same question is
    searched once."""
    run, known = named(name), dict[Any, Any]()
    found = with_own_pick(outcome_of(run), known)
    again = with_own_pick(outcome_of(replace(run, name="again")), known)
    assert len(known) == 1 and again.own == found.own
    assert found.own is not None and found.gain is not None and found.gain >= -1e-12
    if run.software in OF_ITS_TIME:
        assert (found.own.recompute, found.own.optim_shard, found.own.cp) == ("full", 1, 1)
        assert not found.own.sequence_parallel and found.own.schedule == "1f1b"
