"""Bytes that unfused attention of Transformers saves per score, counted on its own module.

The bytes that a layer saves are a + b s + c s^2 over the sequence length s; c is per score of all heads.
Dropout is off: its mask has one byte on a GPU, and two on a CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

HEADS = 8
LENGTHS = (32, 64, 128)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": HEADS, "vocab_size": 50,
    "max_position_embeddings": 128, "intermediate_size": 128, "num_key_value_heads": 4,
    "attn_implementation": "eager",
}  # fmt: skip


def saved_bytes(model: Any, length: int) -> float:
    """Bytes of the distinct storages that a forward pass saves, without parameters and buffers."""
    known = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.zeros((1, length), dtype=torch.int64))
    return float(sum(found.values()))


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", 4.0 + 2.0), ("float32", 4.0)])
def test_modules_of_transformers_save_an_fp32_softmax_and_its_copy(dtype: str, expected: float) -> None:
    config = transformers.LlamaConfig(**SIZES, attention_dropout=0.0)
    model = transformers.LlamaModel(config).to(getattr(torch, dtype)).train()
    first, second, third = (saved_bytes(model, length) for length in LENGTHS)
    # The second divided difference of a + b s + c s^2 at 32, 64 and 128 is c.
    curve = ((third - second) / 64 - (second - first) / 32) / 96
    assert curve / HEADS == pytest.approx(expected, rel=1e-9)
