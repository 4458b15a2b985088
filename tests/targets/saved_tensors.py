"""A child process that counts what Megatron-LM's own layers save: `python -m tests.targets.saved_tensors`.

Each line of the standard input is a request, `{"config": {...}, "modules": [...], "offload": [...]}`: fields
of a TransformerConfig, the modules that selective recomputation names, and those that move what they save to
the host. Each line of the standard output is its answer, `{"elements": 123.4, "moved": 12.3}`: elements of
two bytes that one TransformerLayer keeps on the device for its backward pass per token, without weights, and
those that it copies to the host, of any size; or `{"error": "one line"}`. The layer is built from
Megatron-LM's local modules; its core attention is a stand-in that saves what FlashAttention-2 saves. The
process group is a fake one of one rank; tensors are small and on the CPU.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from tests.targets.model_builder import REFUSALS

SEQUENCE, MICRO_BATCH = 16, 2


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _start()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            offload = request.get("offload", [])
            answer: dict[str, Any] = _elements(request["config"], request["modules"], offload)
        except REFUSALS as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _start() -> None:
    """One rank in a fake process group, with stand-ins for functions of a GPU."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(synchronize=lambda: None))
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: stream
    torch.cuda.stream = lambda _: nullcontext()
    # Checkpoints save and restore the state of the GPU's random numbers.
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    # Names of Transformer Engine in the checkpoints that discard their outputs.
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = lambda **_: nullcontext()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


def _elements(given: dict[str, Any], modules: list[str], offload: list[str]) -> dict[str, float]:
    import torch

    moved = _Moved()
    layer = _layer(given, modules, offload)
    hidden = given["hidden_size"]
    rows = torch.randn(SEQUENCE, MICRO_BATCH, hidden, dtype=torch.bfloat16)
    # The layer before computes the input, so that it is no leaf.
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: list[Any] = []

    def pack(tensor: Any) -> Any:
        kept.append(tensor)
        return tensor

    moved.own = own
    weight = torch.ones(hidden, dtype=torch.bfloat16, requires_grad=True)
    start = rows + weight
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(start, attention_mask=None)
    del output
    by_storage: dict[int, dict[tuple[int, int], int]] = {}
    sizes: dict[int, int] = {}
    for tensor in kept:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in own | moved.released or not storage.nbytes():
            continue  # a weight, or an output that was discarded or moved
        place = (tensor.storage_offset(), tensor.numel())
        by_storage.setdefault(storage.data_ptr(), {})[place] = tensor.numel() * tensor.element_size()
        sizes[storage.data_ptr()] = storage.nbytes()
    nbytes = sum(min(sizes[at], sum(views.values())) for at, views in by_storage.items())
    return {
        name: size / 2 / (SEQUENCE * MICRO_BATCH)
        for name, size in (("elements", nbytes), ("moved", moved.nbytes))
    }


class _Moved:
    """Counts what Megatron-LM's offloading groups save, in the place of its own manager, which needs a GPU:
    bytes that are copied, and storages that it frees on the device by itself."""

    def __init__(self) -> None:
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as module

        self.nbytes, self.own, self.released = 0, set[int](), set[int]()
        self._tensors: list[Any] = []
        interface, hooks = module.FineGrainedActivationOffloadingInterface, []

        def enter(group: Any) -> Any:
            if group.offload:
                hooks.append(_saved_tensors_hooks(self._count))
                hooks[-1].__enter__()
            return group.tensor

        def leave(group: Any, *error: Any) -> None:
            if group.offload:
                hooks.pop().__exit__(*error)

        def commit(
            group: Any, tensor: Any, forced_released_tensors: Any = None, delay_offload: Any = False
        ) -> Any:
            if group.offload:
                freed = [one.untyped_storage() for one in forced_released_tensors or ()]
                self.released |= {storage.data_ptr() for storage in freed}
            return tensor

        interface.__enter__, interface.__exit__, interface.group_offload = enter, leave, commit

    def _count(self, tensor: Any) -> Any:
        self._tensors.append(tensor)  # so that its place is not used again
        if tensor.untyped_storage().data_ptr() not in self.own:
            self.nbytes += tensor.numel() * tensor.element_size()
        return tensor


def _saved_tensors_hooks(pack: Any) -> Any:
    import torch

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def _layer(given: dict[str, Any], modules: list[str], offload: list[str]) -> Any:
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    is_latent = "kv_lora_rank" in given
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=1, hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        add_bias_linear=False, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True, use_cpu_initialization=True, perform_initialization=False,
        normalization="LayerNorm", persist_layer_norm=False, qk_layernorm=is_latent, apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="selective" if modules else None, recompute_modules=modules or None,
        fine_grained_activation_offloading=bool(offload), offload_modules=offload, **given,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        num_experts=given.get("num_moe_experts"), qk_layernorm=is_latent, multi_latent_attention=is_latent,
        normalization="LayerNorm",
    )  # fmt: skip
    spec.submodules.self_attention.submodules.core_attention = _flash_attention()
    layer = build_module(spec, config=config, layer_number=1)
    return layer.to(torch.bfloat16).train()


def _flash_attention() -> Any:
    """A core attention that saves its inputs, its output and the log-sum-exp of each row of scores."""
    import torch

    class Saving(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            rows, batch, heads, _ = query.shape
            output = torch.randn(rows, batch, heads, value.shape[-1], dtype=query.dtype)
            log_sum_exp = torch.zeros(batch, heads, rows, dtype=torch.float32)
            ctx.save_for_backward(query, key, value, output, log_sum_exp)
            return output

        @staticmethod
        def backward(ctx: Any, _: Any) -> Any:
            return (*map(torch.zeros_like, ctx.saved_tensors[:3]),)

    class Core(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
            output = Saving.apply(query, key, value)
            return output.reshape(*output.shape[:2], -1)

    return Core


if __name__ == "__main__":
    main()
