"""Names of frameworks, number formats, models and networks as tables spell them."""

from __future__ import annotations

import re

import pytest

from shardwise.accuracy.spellings import (
    bytes_per_s_of_nodes,
    catalogue_model,
    dtype_named,
    family_named,
    inter_node_bytes_per_s,
    profile_named,
)
from shardwise.strategy import PROFILES


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Megatron-LM", "megatron"),
        ("Megatron-LM (zero-bubble fork)", "megatron"),
        ("Megatron-Bridge (Megatron-Core)", "megatron"),
        ("NeMo 24.07 (Megatron-Core)", "megatron"),
        ("DeepSpeed 3D + Megatron-LM v1.1.5", "deepspeed"),
        ("Megatron-DeepSpeed", "deepspeed"),
        ("NeMo AutoModel (PyTorch FSDP2)", "fsdp2"),
        ("llm-foundry/Composer (PyTorch FSDP, flash attention)", "fsdp"),
        ("OneFlow", "oneflow"),
    ],
)
def test_frameworks_are_known_by_a_word(text: str, kind: str) -> None:
    for year in (2021, 2024, None):
        name = profile_named(text, year)
        assert name is not None and name in PROFILES
        assert re.split(r"-\d", name)[0] == kind


def test_an_unknown_framework_has_no_profile() -> None:
    assert profile_named("a trainer of mine", 2024) is None


def test_the_year_decides_between_generations_and_none_is_the_newest() -> None:
    names = [profile_named("Megatron-LM", year) for year in (2020, 2021, 2022, 2023, 2024)]
    assert names == ["megatron-2021", "megatron-2021", "megatron-2022", "megatron-2024", "megatron-2024"]
    assert profile_named("Megatron-LM", None) == profile_named("Megatron-LM", 9998)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("fp8(amp_fp8)", "fp8"), ("FP8-CS", "fp8-current"), ("fp8-mx", "mxfp8"), ("NVFP4", "nvfp4"),
        ("bfloat16", "bf16"), ("float16", "fp16"), ("int8", None), ("", None),
        ("float8", "fp8"), ("half", "fp16"), ("TF32", "tf32"), ("fp32 (TF32)", "tf32"),
        ("bf16, TF32", "bf16"), ("bf16, W8A8 int8", None), ("mxfp4", None),
    ],
)  # fmt: skip
def test_dtypes_are_known_by_a_word(text: str, dtype: str | None) -> None:
    assert dtype_named(text) == dtype


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("Qwen3_30B_a3B", "qwen3-30b-a3b"),
        ("Qwen3 MoE 30B", "qwen3-30b-a3b"),
        ("DeepSeek V3 671B", "deepseek-v3"),
        ("deepseekv2 (4 layers)", "deepseek-v2"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("LLAMA3.1_405B", "llama-3.1-405b"),
        ("GPT-20B", None),  # not gpt2
        ("llama-2-700b", None),  # not llama-2-70b
        ("mine", None),
    ],
)
def test_models_of_the_catalogue_are_found_within_a_name(text: str, model: str | None) -> None:
    assert catalogue_model(text) == model


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("GPT OSS 120B", "gpt-oss"), ("GPT-39.1B", "gpt"), ("MT-NLG-530B", "mt-nlg"), ("LLAMA3_70B", "llama"),
        ("MPT-7b", "mpt"), ("Kimi_K2", "kimi"), ("Yi-34B", "yi"), ("7B", "7B"), ("", "unnamed"),
    ],
)  # fmt: skip
def test_families(text: str, family: str) -> None:
    assert family_named(text) == family


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        # Eight cards of 200 Gb/s are 8 * 25e9 bytes per second.
        ("NVLink/NVSwitch; 8x200 Gb/s HDR InfiniBand per node (Selene)", 200e9),
        ("NVLink intra; 800 Gb/s inter-node (simulator config)", 100e9),
        ("1600 Gb/s RoCE inter-node", 200e9),
        ("50 Gb/s inter-node, PCIe intra-node", 6.25e9),
        ("NVLink 300 GB/s; 25 GB/s InfiniBand", 25e9),
        ("NVLink 300 GB/s", None),
        ("TPU ICI + DCN between slices", None),
        ("", None),
    ],
)
def test_networks(text: str, rate: float | None) -> None:
    assert inter_node_bytes_per_s(text) == (None if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        # 400 Gb/s are 50e9 bytes per second, of each of eight devices, or of each of four cards.
        ("NVLink; 400 Gb/s InfiniBand per GPU", 400e9),
        ("400 Gb/s/GPU RoCE", 400e9),
        ("InfiniBand NDR 400Gbps for each GPU", 400e9),
        ("1x400 Gb/s InfiniBand per device", 400e9),
        ("400 Gb/s InfiniBand per NIC", 200e9),
        ("400 Gb/s InfiniBand per node", 50e9),
        ("NVLink 900 GB/s per GPU; 400 Gb/s InfiniBand per node", 50e9),
        ("400 Gb/s InfiniBand, shared by the GPUs of a node", 50e9),
    ],
)
def test_rates_per_device_count_for_every_device_of_a_node(text: str, rate: float) -> None:
    assert inter_node_bytes_per_s(text, devices=8, cards=4) == pytest.approx(rate)


def test_rates_of_nodes_are_matched_by_their_devices() -> None:
    text = "10 Gb/s (V100 nodes), 50 Gb/s (T4 node) inter; NVLink 170 Gb/s intra"
    assert bytes_per_s_of_nodes(text, ["V100", "T4"]) == pytest.approx((1.25e9, 6.25e9))
    assert bytes_per_s_of_nodes(text, ["T4", "A100"]) == pytest.approx((6.25e9, 1.25e9))
    assert bytes_per_s_of_nodes("10 Gb/s inter-node", ["V100"]) is None
