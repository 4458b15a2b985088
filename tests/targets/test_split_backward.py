"""What waits between the two passes of a split backward, counted on layers of our own runtime.

Where PyTorch keeps the graph, the count is of its own functions (`stage_backward_input` of
torch.distributed.pipelining). Where software stores what the weight gradients need, as Megatron-LM's
zero-bubble branch does, the count is of a product that stores its input and the gradient of its output.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input
from torch.nn import functional

from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind, costs_of_all_stages
from shardwise.model import model_from_config
from shardwise.search import default_job
from shardwise.strategy import StrategyTable, complete

TOKENS, BATCH = 64, 2

HIDDEN, HEADS = 64, 4

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {
        "model_type": "gpt2", "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "vocab_size": 128,
        "n_positions": TOKENS, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    },
    "llama": {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": 128,
        "max_position_embeddings": TOKENS,
    },
}  # fmt: skip


class FusedNorm(torch.autograd.Function):  # type: ignore[misc]
    """An RMSNorm that saves its input alone, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.rms_norm(x, (HIDDEN,), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            found = torch.autograd.grad(functional.rms_norm(inputs[0], (HIDDEN,), inputs[1]), inputs, grad)
        return found[0], found[1]


class Norm(nn.Module):  # type: ignore[misc]
    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.bias = nn.Parameter(torch.zeros(HIDDEN)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return FusedNorm.apply(x, self.weight)
        return functional.layer_norm(x, (HIDDEN,), self.weight, self.bias)


class FusedGate(torch.autograd.Function):  # type: ignore[misc]
    """A gated activation that saves its two inputs alone, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            inputs = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            found = torch.autograd.grad(functional.silu(inputs[0]) * inputs[1], inputs, grad)
        return found[0], found[1]


class Layer(nn.Module):  # type: ignore[misc]
    """A decoder layer of `gpt` or `llama` with fused attention; `product` is how it multiplies."""

    def __init__(self, name: str, product: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.is_gated, self.product = name == "llama", product
        ffn = 160 if self.is_gated else 4 * HIDDEN
        self.norms = nn.ModuleList(Norm(not self.is_gated) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(HIDDEN, width, bias=False) for width in (HIDDEN,) * 3)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, ffn, bias=False)
        self.gate = nn.Linear(HIDDEN, ffn, bias=False) if self.is_gated else None
        self.down = nn.Linear(ffn, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            self.product(one, normed).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.product(self.out, mixed.transpose(1, 2).flatten(-2))
        normed = self.norms[1](x)
        up = self.product(self.up, normed)
        if self.gate is None:
            return x + self.product(self.down, functional.gelu(up))
        return x + self.product(self.down, FusedGate.apply(self.product(self.gate, normed), up))


def storages(tensors: Iterator[Tensor] | list[Tensor], layers: nn.Module) -> dict[int, int]:
    """Bytes by storage, without weights and numbers per row (statistics of norms, log-sum-exp)."""
    own = {parameter.untyped_storage().data_ptr() for parameter in layers.parameters()}
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.nbytes() >= BATCH * TOKENS * HIDDEN // 2 * 2:
            found[storage.data_ptr()] = storage.nbytes()
    return found


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def counted_graph_bytes(name: str) -> float:
    """Bytes of a layer that live after PyTorch's backward pass of the inputs: saved tensors and gradients."""
    layers = nn.Sequential(*(Layer(name, lambda linear, x: linear(x)) for _ in range(2))).bfloat16()
    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
        outputs = [layers(x)]
    gradients = [torch.randn_like(outputs[0])]
    groups = stage_backward_input(outputs, gradients, [x], layers.parameters())[1]
    del outputs, gradients
    gc.collect()
    live = [box.tensor for box in (reference() for reference in boxes) if box is not None]
    grads = [grad for group in groups for each in group["grads"] for grad in each if grad is not None]
    of_weights = {tuple(reversed(p.shape)) for p in layers.parameters() if p.dim() == 2}
    # The gradient of a product with a transposed weight is that of the weight itself, at once.
    rows = [grad for grad in grads if tuple(grad.shape) not in of_weights or grad.dim() == 3]
    return sum({**storages(live, layers), **storages(rows, layers)}.values()) / 2


class StoringProduct(torch.autograd.Function):  # type: ignore[misc]
    """A product whose backward pass gives the gradient of its input, and stores the rest for later."""

    store: list[Tensor] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        StoringProduct.store += [x, grad]
        return grad @ weight, None


@contextmanager
def storing() -> Iterator[list[Tensor]]:
    StoringProduct.store = []
    yield StoringProduct.store
    StoringProduct.store = []


def counted_stored_bytes(name: str) -> float:
    """Bytes of a layer in the store after the backward pass of the inputs."""
    product = lambda linear, x: StoringProduct.apply(x, linear.weight)  # noqa: E731
    layers = nn.Sequential(*(Layer(name, product) for _ in range(2))).bfloat16()
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with storing() as store:
        layers(x).backward(torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.bfloat16))
        # A gradient that is a view of a larger one is counted with its own bytes.
        sizes = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in store}
        return float(sum(sizes.values())) / 2


def problem_of(name: str, *, keeps_graphs: bool) -> Problem:
    model, cluster = model_from_config(SIZES[name], name=name), load_cluster("1x8xH100-SXM")
    job = default_job(model, cluster, seq_len=TOKENS, global_batch_size=8 * BATCH, dtype="bf16")
    profile = replace(job.profile, keeps_split_graphs=keeps_graphs, applies_dropout=False)
    return bind(model, cluster, replace(job, profile=profile))


def predicted_bytes(name: str, *, keeps_graphs: bool) -> float:
    """Bytes of a layer that wait, by the cost model."""
    problem = problem_of(name, keeps_graphs=keeps_graphs)
    strategy = complete(
        {"dp": 8, "micro_batch_size": BATCH}, devices=8, layers=2, experts=None, global_batch_size=8 * BATCH
    )
    costs = costs_of_all_stages(problem, StrategyTable.of([strategy]))
    return float(costs.partitions.grid.kinds[0].waiting_bytes[0])


@pytest.mark.parametrize("name", SIZES)
def test_software_that_stores_inputs_and_gradients(name: str) -> None:
    assert predicted_bytes(name, keeps_graphs=False) == pytest.approx(counted_stored_bytes(name), rel=0.02)


@pytest.mark.parametrize("name", SIZES)
def test_pytorch_keeps_the_graph_between_the_two_passes(name: str) -> None:
    assert predicted_bytes(name, keeps_graphs=True) == pytest.approx(counted_graph_bytes(name), rel=0.02)
