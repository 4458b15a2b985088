"""A child process in which TorchTitan's exported models compute: `python -m tests.targets.titan_logits`.

Each line of the standard input is a request, `{"files": {...}, "module": "...", "config": "...", "model":
{...}}`, with the Hugging Face config of the model. Each line of the standard output is `{"error": E,
"missing": [...], "unexpected": [...]}`: the largest difference of the logits from those of Transformers with
the same weights, relative to the largest logit, and the weights that only one of both has.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.targets.torchtitan_reader import _folder_of, _import

LENGTH = 64


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _import()
    for line in sys.stdin:
        replies.write(json.dumps(_compared(json.loads(line))) + "\n")
        replies.flush()


def _compared(request: Mapping[str, Any]) -> dict[str, Any]:
    import torch
    import transformers
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    torch.manual_seed(0)
    settings = dict(request["model"])
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._attn_implementation = "eager"
    build: Any = transformers.AutoModelForCausalLM.from_config
    expected = build(config).eval()
    with torch.no_grad():
        for weight in expected.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)  # norms away from 1, biases from 0
    tokens = torch.randint(0, config.vocab_size, (2, LENGTH))
    with _folder_of(request["files"], request["module"]), torch.no_grad():
        spec, model = _built(request)
        _compute_experts_in_fp32()
        adapter = (spec.state_dict_adapter or Qwen3StateDictAdapter)(spec.model, None)
        weights = dict(_in_checkpoints(expected.state_dict()))
        biases = {name: weights.pop(name) for name in [*weights] if name.endswith(".bias")}
        missing, unexpected = model.load_state_dict(adapter.from_hf(weights), strict=False)
        _set_biases(model, biases, config.num_key_value_heads)
        positions = torch.arange(LENGTH).expand(2, LENGTH)
        found = model(tokens, positions, model.get_attention_masks(positions))
        right = expected(tokens).logits
    return {
        "error": float((found - right).abs().max() / right.abs().max()),
        # Biases are set above; expert_bias_E is 0, and trained by no gradient.
        "missing": [name for name in missing if not name.endswith((".bias", ".expert_bias_E"))],
        "unexpected": list(unexpected),
    }


def _compute_experts_in_fp32() -> None:
    """TorchTitan's experts compute in bf16, which can change the experts that later layers choose."""
    import torch
    from torch.nn import functional
    from torchtitan.models.common.moe import GroupedExperts

    def in_fp32(self: Any, states: Any, counts: Any) -> Any:
        parts = []
        for expert, rows in enumerate(states.split([int(count) for count in counts])):
            gated = functional.silu(rows @ self.w1_EFD[expert].T) * (rows @ self.w3_EFD[expert].T)
            parts.append(gated @ self.w2_EDF[expert].T)
        return torch.cat(parts)

    GroupedExperts.forward = in_fp32


def _in_checkpoints(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The weights as checkpoints have them: expert by expert, where Transformers holds all in one tensor."""
    for name, value in state.items():
        prefix, found, kind = name.rpartition(".experts.")
        if not found:
            yield name, value.clone()
        for expert, weight in enumerate(value) if found else ():
            start = f"{prefix}.experts.{expert}"
            if kind == "gate_up_proj":
                gate, up = weight.chunk(2)
                yield f"{start}.gate_proj.weight", gate.clone()
                yield f"{start}.up_proj.weight", up.clone()
            else:
                yield f"{start}.down_proj.weight", weight.clone()


def _set_biases(model: Any, biases: Mapping[str, Any], heads: int) -> None:
    """Biases of queries, keys and values, which TorchTitan keeps in one tensor: by key-value head, its query
    heads, then its key, then its value."""
    import torch

    for index, layer in model.layers.items() if biases else ():
        parts = [biases[f"model.layers.{index}.self_attn.{kind}_proj.bias"].view(heads, -1) for kind in "qkv"]
        layer.attention.qkv_linear.wqkv.bias.copy_(torch.cat(parts, dim=1).flatten())


def _built(request: Mapping[str, Any]) -> tuple[Any, Any]:
    """TorchTitan's specification of the model, and the model on this CPU."""
    from torchtitan.config import ConfigManager
    from torchtitan.distributed.utils import set_spmd_backend

    config = ConfigManager().parse_args(["--module", request["module"], "--config", request["config"]])
    set_spmd_backend(config.parallelism.spmd_backend)
    config.model_spec.model.update_from_config(config=config)
    return config.model_spec, config.model_spec.model.build()


if __name__ == "__main__":
    main()
