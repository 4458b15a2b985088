"""A child process that counts the bytes of DeepSpeed's engine: `python -m tests.targets.counted_sharding`.

Reads one JSON object from standard input: `zero` (its `zero_optimization`), `gradients` (their dtype) and
`vocabulary`. Trains a small Llama in bf16 with full recomputation on rank 0 of 8 ranks that do not exist
(PyTorch's fake process group), for three steps of two micro-batches. Writes one JSON object: the sizes in
elements of the model, its largest weight, and the peaks in bytes of all tensors in the last step: in forward
passes, in backward passes and in the update.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

import torch
from tests.targets.counting import PeakBytes

RANKS = 8
STEPS = 3


def main() -> None:
    given = json.loads(sys.stdin.read())
    _join()
    import deepspeed

    model = _model(given["vocabulary"])
    with PeakBytes() as mode:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(given))
        peaks = [_step(mode, engine, given["vocabulary"]) for _ in range(STEPS)][-1]
    sizes = [parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()
             for parameter in model.parameters()]  # fmt: skip
    sys.stdout.write(json.dumps({"weights": sum(sizes), "largest": max(sizes), **peaks}) + "\n")


def _join() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(RANKS), "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # read, not used
    torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())


def _model(vocabulary: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256, intermediate_size=768, num_hidden_layers=12, num_attention_heads=4,
            num_key_value_heads=4, vocab_size=vocabulary, tie_word_embeddings=False, use_cache=False,
        )
    )  # fmt: skip
    enable: Any = model.gradient_checkpointing_enable
    enable()
    return model


def _config(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": given["gradients"]},
        "communication_data_type": given["gradients"],
        "zero_optimization": given["zero"],
        # The optimizer on the host and Adam's fused kernel are built on a GPU; PyTorch's stand for them.
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }


def _step(mode: PeakBytes, engine: Any, vocabulary: int) -> dict[str, int]:
    """One optimizer step; the samples have four tokens, so that weights are nearly all bytes."""
    tokens = torch.randint(0, vocabulary, (1, 4))
    peaks = dict.fromkeys(("forward", "backward", "update"), 0)

    def note(name: str) -> None:
        peaks[name] = max(peaks[name], mode.peak)
        gc.collect()
        mode.peak = mode.now

    for _ in range(2):
        note("update")
        loss = engine(tokens, labels=tokens).loss
        note("forward")
        engine.backward(loss)
        del loss
        note("backward")
        engine.step()
    note("update")
    return peaks


if __name__ == "__main__":
    main()
