"""A child process in which a layer of Megatron-LM computes: `python -m tests.targets.megatron_saved`.

Each line of the standard input is a request, the arguments of a `TransformerConfig` and `tp`. Each line of
the standard output is the number of bytes that the layer saves for its backward pass, per token, in bf16. The
layer is that of Megatron-LM's own modules; norms and attention are stand-ins that save what the kernels of
Transformer Engine save: an RMSNorm its input and one number per row, attention its inputs, its output and the
log-sum-exp.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any
from unittest.mock import MagicMock

import torch
from tests.targets.counting import SavedBytes
from torch.nn import functional

LENGTH, ROWS = 128, 2


class FusedNorm(torch.autograd.Function):  # type: ignore[misc]
    """An RMSNorm in one kernel, as far as saved tensors go."""

    @staticmethod
    def forward(ctx: Any, states: Any, weight: Any, eps: float) -> Any:
        scale = torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + eps)
        states = states.contiguous()
        ctx.save_for_backward(states, weight, scale)
        return (states * scale).to(states.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError


class FusedAttention(torch.nn.Module):  # type: ignore[misc]
    """Causal attention in one kernel, as far as saved tensors go."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None:
        super().__init__()

    def forward(self, query: Any, key: Any, value: Any, _mask: Any, **_options: Any) -> Any:
        # The value is a view of the output of one product. Its copy lets the rest of that output go; measured
        # peaks of Transformer Engine do not have it (`simumax` in docs/accuracy.md).
        return AttentionKernel.apply(query, key, value.clone()).flatten(2)


class AttentionKernel(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.permute(2, 0, 1, 3).contiguous()
        ctx.save_for_backward(query, key, value, out, torch.zeros(query.shape[:3]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _stand_in_for_a_device()
    for line in sys.stdin:
        replies.write(json.dumps(_counted(json.loads(line))) + "\n")
        replies.flush()


def _stand_in_for_a_device() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.Stream = lambda *_: MagicMock()
    cuda.current_stream, cuda.stream = MagicMock(), lambda *_: contextlib.nullcontext()
    tensor: Any = torch.Tensor
    tensor.cuda = lambda own, *_, **__: own
    tracker: Any = CudaRNGStatesTracker
    tracker.fork = lambda *_: contextlib.nullcontext()
    norm: Any = torch.nn.RMSNorm
    norm.forward = lambda own, states: FusedNorm.apply(states, own.weight, own.eps)


def _counted(request: Mapping[str, Any]) -> float:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    settings = dict(request)
    tp = settings.pop("tp", 1)
    torch.distributed.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)
        return _of_layer(_layer(settings, tp))
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _layer(settings: Mapping[str, Any], tp: int) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    is_latent = settings.get("multi_latent_attention", False)
    build = MLATransformerConfig if is_latent else TransformerConfig
    gated = {"activation_func": functional.silu} if settings.get("gated_linear_unit") else {}
    config = build(
        **{
            **settings, **gated, "num_layers": 2, "bf16": True, "params_dtype": torch.bfloat16,
            "pipeline_dtype": torch.bfloat16, "use_cpu_initialization": True,
            "tensor_model_parallel_size": tp,
            "gradient_accumulation_fusion": False, "persist_layer_norm": False, "apply_rope_fusion": False,
            "masked_softmax_fusion": False, "hidden_dropout": 0.0, "bias_activation_fusion": True,
        }
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm,
        multi_latent_attention=is_latent, normalization=config.normalization,
    )  # fmt: skip
    spec.submodules.self_attention.submodules.core_attention = FusedAttention
    return build_module(spec, config=config, layer_number=1).to(torch.bfloat16).train()


def _of_layer(layer: Any) -> float:
    config = layer.config
    hidden = torch.randn(LENGTH, ROWS, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    angles = torch.randn(LENGTH, 1, 1, config.hidden_size // config.num_attention_heads)
    rotary = {} if config.multi_latent_attention else {"rotary_pos_emb": angles}
    saved = SavedBytes(layer)
    return saved.count(lambda: layer(hidden, attention_mask=mask, **rotary)) / (LENGTH * ROWS)


if __name__ == "__main__":
    main()
