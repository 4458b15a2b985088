"""Models and batches at the sizes of accelerators, with layers like those of known models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import model_from_config
from shardwise.plans import Plan
from shardwise.strategy import MEGATRON_2024, Calibration, Job, complete, parse_fields, target_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and a batch; `strategy` has the fields that differ from plain training."""

    name: str
    config: Mapping[str, Any]
    seq_len: int
    micro_batch_size: int
    global_batch_size: int
    strategy: str = ""
    dtype: str = "bf16"


def gpt(layers: int, hidden: int, heads: int, vocab: int, seq_len: int) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "ffn": 4 * hidden, "heads": heads, "vocab": vocab,
            "seq_len": seq_len, "dropout": 0.0}  # fmt: skip


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq_len: int
) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "max_position_embeddings": seq_len, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip


SHAPES = (
    Shape(name="GPT 24 x 1024", config=gpt(24, 1024, 8, 50304, 1024), seq_len=1024,
          micro_batch_size=32, global_batch_size=64),
    Shape(name="GPT 12 x 1536", config=gpt(12, 1536, 12, 50304, 2048), seq_len=2048,
          micro_batch_size=8, global_batch_size=16),
    Shape(name="GPT 6 x 2048", config=gpt(6, 2048, 16, 50304, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=16),
    Shape(name="GPT 8 x 2048", config=gpt(8, 2048, 16, 32000, 1024), seq_len=1024,
          micro_batch_size=16, global_batch_size=16, strategy="recompute=full"),
    Shape(name="GPT 4 x 4096", config=gpt(4, 4096, 32, 32000, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="GPT 3 x 5120", config=gpt(3, 5120, 40, 32000, 1024), seq_len=1024,
          micro_batch_size=8, global_batch_size=16),
    Shape(name="Llama 8 x 2048", config=llama(8, 2048, 16, 16, 5632, 32000, 2048), seq_len=2048,
          micro_batch_size=8, global_batch_size=16),
    Shape(name="Llama 16 x 2048", config=llama(16, 2048, 16, 4, 8192, 32000, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="Llama 8 x 3072", config=llama(8, 3072, 24, 8, 8192, 32000, 4096), seq_len=4096,
          micro_batch_size=2, global_batch_size=4),
    Shape(name="Llama 4 x 4096", config=llama(4, 4096, 32, 8, 14336, 32000, 4096), seq_len=4096,
          micro_batch_size=2, global_batch_size=4),
    Shape(name="Llama 4 x 4096, long", config=llama(4, 4096, 32, 8, 14336, 32000, 8192), seq_len=8192,
          micro_batch_size=1, global_batch_size=4),
    Shape(name="Llama 3 x 5120", config=llama(3, 5120, 40, 40, 13824, 32000, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="Llama 6 x 3584", config=llama(6, 3584, 28, 4, 18944, 32000, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="Llama 8 x 4096", config=llama(8, 4096, 32, 8, 14336, 32000, 2048), seq_len=2048,
          micro_batch_size=8, global_batch_size=8, strategy="recompute=full"),
    Shape(name="GPT 16 x 1280", config=gpt(16, 1280, 10, 50304, 1024), seq_len=1024,
          micro_batch_size=16, global_batch_size=32),
    Shape(name="GPT 10 x 1792", config=gpt(10, 1792, 14, 32000, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="GPT 5 x 3072", config=gpt(5, 3072, 24, 50304, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="GPT 2 x 6144", config=gpt(2, 6144, 48, 16384, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="GPT 6 x 2560", config=gpt(6, 2560, 20, 50304, 4096), seq_len=4096,
          micro_batch_size=2, global_batch_size=4),
    Shape(name="GPT 12 x 2048", config=gpt(12, 2048, 16, 32000, 512), seq_len=512,
          micro_batch_size=32, global_batch_size=32, strategy="recompute=full"),
    Shape(name="Llama 12 x 1536", config=llama(12, 1536, 12, 12, 4096, 32000, 1024), seq_len=1024,
          micro_batch_size=16, global_batch_size=32),
    Shape(name="Llama 10 x 2560", config=llama(10, 2560, 20, 4, 6912, 49152, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="Llama 2 x 8192", config=llama(2, 8192, 64, 8, 28672, 16384, 2048), seq_len=2048,
          micro_batch_size=2, global_batch_size=4),
    Shape(name="Llama 6 x 4096", config=llama(6, 4096, 32, 8, 14336, 32000, 2048), seq_len=2048,
          micro_batch_size=4, global_batch_size=8),
    Shape(name="Llama 16 x 1024", config=llama(16, 1024, 8, 8, 2816, 32000, 2048), seq_len=2048,
          micro_batch_size=16, global_batch_size=32),
    Shape(name="Llama 4 x 5120", config=llama(4, 5120, 40, 8, 13824, 32000, 4096), seq_len=4096,
          micro_batch_size=2, global_batch_size=4, strategy="recompute=selective"),
)  # fmt: skip
"""Shapes that fit on a device of 80 GB."""


def plan_of(shape: Shape, calibration: Calibration) -> Plan:
    """The plan of a shape for one calibrated device and our runtime."""
    (device,) = calibration.devices
    model = model_from_config(shape.config, name=shape.name)
    strategy = complete(
        {"micro_batch_size": shape.micro_batch_size, **parse_fields(shape.strategy)}, devices=1,
        layers=model.layers, experts=None, global_batch_size=shape.global_batch_size,
    )  # fmt: skip
    profile = calibration.profile_of(shape.dtype, has_experts=False) or MEGATRON_2024
    job = Job(
        seq_len=shape.seq_len, global_batch_size=shape.global_batch_size, dtype=shape.dtype,
        profile=target_of("shardwise").run_by(profile),
    )  # fmt: skip
    cluster = load_cluster(f"1x1x{device}", measured=calibration.devices)
    return search.plan_of_strategy(model, cluster, job, strategy)
