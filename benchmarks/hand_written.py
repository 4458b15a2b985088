"""The layouts of `benchmarks.overhead`, written by hand with PyTorch.

The model is a Llama of PyTorch's modules; its parameters have the names of the runtime's reference module.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[Tensor], float]
"""A training step: takes a batch (rows, tokens + 1), the same on every rank, and returns the mean loss."""


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_dim = hidden // heads
        self.q, self.k, self.v, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            each.view(*each.shape[:2], -1, self.head_dim).transpose(1, 2)
            for each in (self.q(x), self.k(x), self.v(x))
        )
        found = functional.scaled_dot_product_attention(
            rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True
        )
        return self.out(found.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Mlp(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(hidden, eps=1e-6) for _ in range(2))
        self.attention = Attention(hidden, config["num_attention_heads"])
        self.mlp = Mlp(hidden, config["intermediate_size"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens)


class Head(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.output = nn.Linear(hidden, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Llama(nn.Module):
    def __init__(self, config: dict[str, Any], tokens: int) -> None:
        super().__init__()
        vocab, hidden = config["vocab_size"], config["hidden_size"]
        self.embedding: Embedding | None = Embedding(vocab, hidden)
        count = config["num_hidden_layers"]
        self.layers = nn.ModuleDict({str(index): Layer(config) for index in range(count)})
        self.head: Head | None = Head(vocab, hidden)
        dims = hidden // config["num_attention_heads"]
        rates = config["rope_theta"] ** -(torch.arange(0, dims, 2).float() / dims)
        angles = torch.arange(tokens).float()[:, None] * rates
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.cos, self.sin)
        return x if self.head is None else self.head(x)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def own_rows(batch: Tensor) -> Tensor:
    return batch.chunk(distributed.get_world_size())[distributed.get_rank()]


def _trained(
    module: nn.Module,
    lr: float,
    *,
    rows: Callable[[Tensor], Tensor],
    context: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Step:
    optimizer = optimizer_of(module, lr)

    def step(batch: Tensor) -> float:
        mine = rows(batch)
        with context():
            loss = mean_loss(module(mine[:, :-1]), mine[:, 1:])
            loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return mean_over_ranks(loss.detach())

    return step


def mean_over_ranks(loss: Tensor) -> float:
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    distributed.all_reduce(whole)
    return float(whole) / distributed.get_world_size()


def ddp(module: Llama, lr: float) -> Step:
    return _trained(DistributedDataParallel(module), lr, rows=own_rows)


def fsdp2(module: Llama, lr: float) -> Step:
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in (module.embedding, *module.layers.values(), module.head):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return _trained(module, lr, rows=own_rows)


def tensor(module: Llama, lr: float) -> Step:
    """Tensor and sequence parallelism, with the loss on sharded logits."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    parts, whole = Shard(1), Replicate()
    end_styles = {
        "embedding.tokens": RowwiseParallel(input_layouts=whole, output_layouts=parts),
        "head.norm": SequenceParallel(),
        "head.output": ColwiseParallel(input_layouts=parts, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, mesh, end_styles)
    for layer in module.layers.values():
        styles = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(parts, None, None), desired_input_layouts=(whole, None, None)
            ),
            **{f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")},
            "attention.out": RowwiseParallel(output_layouts=parts),
            "mlp_norm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,)),
            **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
            "mlp.down": RowwiseParallel(output_layouts=parts),
        }
        parallelize_module(layer, mesh, styles)
    return _trained(module, lr, rows=lambda batch: batch, context=loss_parallel)


def pipeline(module: Llama, lr: float, *, microbatches: int) -> Step:
    """1F1B with one stage per rank."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    count = len(module.layers) // ranks
    stage_layers = range(rank * count, (rank + 1) * count)
    module.layers = nn.ModuleDict({str(index): module.layers[str(index)] for index in stage_layers})
    if rank > 0:
        module.embedding = None
    if rank < ranks - 1:
        module.head = None
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=mean_loss)
    optimizer = optimizer_of(module, lr)

    def step(batch: Tensor) -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch[:, :-1].contiguous(), return_outputs=False)
        else:
            schedule.step(target=batch[:, 1:].contiguous(), losses=losses, return_outputs=False)
        sums = torch.stack(
            (
                torch.stack(losses).mean().detach() if losses else torch.zeros(()),
                sum((p.grad.square().sum() for p in module.parameters()), torch.zeros(())),
            )
        )
        distributed.all_reduce(sums)
        scale = torch.clamp(1.0 / (sums[1].sqrt() + 1e-6), max=1.0)
        for parameter in module.parameters():
            parameter.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        return float(sums[0])

    return step
