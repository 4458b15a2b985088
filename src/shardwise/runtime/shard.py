"""Splits a stage over the ranks of its tensor group and of its data group, by PyTorch's own parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardwise.runtime.modules import Layer, Stage
from shardwise.strategy import Strategy

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def split_tensors(stage: Stage, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Divide heads, MLP widths and the vocabulary over the one-dimensional `mesh` (Shoeybi et al. 2019).

    With `sequence_parallel` hidden states between the blocks are divided along the sequence (Korthikanti et
    al. 2022), else whole on every rank.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    if stage.embedding is not None:
        tokens = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        parallelize_module(stage.embedding, mesh, {"tokens": tokens})
        if stage.embedding.positions is not None:
            _replicate(stage.embedding.positions, mesh, 0 if sequence_parallel else None)
    for layer in stage.layers.values():
        parallelize_module(layer, mesh, _layer_styles(layer, stream, mesh.size()))
        for norm in (layer.attention_norm, layer.mlp_norm):
            if norm is not None:
                _replicate(norm, mesh, 1 if sequence_parallel else None)
    if stage.head is not None:
        output = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1))
        parallelize_module(stage.head, mesh, {"output": output})
        if stage.head.norm is not None:
            _replicate(stage.head.norm, mesh, 1 if sequence_parallel else None)
        if stage.embedding is not None and stage.model.tied_embeddings:
            stage.head.output.weight = stage.embedding.tokens.weight


def _layer_styles(layer: Layer, stream: Shard | Replicate, ranks: int) -> dict[str, ParallelStyle]:
    whole = Replicate()
    styles: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(whole, None)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=stream),
        "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=stream),
    }
    if layer.attention.kv_heads < ranks:
        heads = SharedHeads(layer.attention.kv_heads)
        styles |= {"attention.k": heads, "attention.v": heads}
    if layer.mlp.gate is not None:
        styles["mlp.gate"] = ColwiseParallel()
    if layer.attention.q_norm is not None:
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        styles |= {"attention.q_norm": norm, "attention.k_norm": norm}
    return styles


class SharedHeads(ParallelStyle):
    """Keys or values of which several ranks need the same head: every rank computes all heads and keeps its
    own, and gradients are sums over the ranks."""

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def own_head(_: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            heads = output.to_local(grad_placements=[Partial()]).chunk(self._heads, dim=-1)
            return heads[mesh.get_local_rank() * self._heads // mesh.size()]

        return distribute_module(module, device_mesh, output_fn=own_head)


def _replicate(module: nn.Module, mesh: DeviceMesh, split_dim: int | None) -> None:
    """Keep `module`'s parameters whole on every rank. Where its input is divided along `split_dim`, their
    gradients are sums over the ranks; where it is not (None), all ranks compute the same gradients."""
    if split_dim is not None:
        style = SequenceParallel(sequence_dim=split_dim, use_local_output=True)
        parallelize_module(module, mesh, style)


def shard_states(stage: Stage, mesh: DeviceMesh, strategy: Strategy, dtype: str) -> None:
    """Wrap layers and stage in `fully_shard` over (`replicate`, `shard`), where there is more than one rank
    or the computation is narrower than the parameters.

    Losses are sums over a rank's tokens divided by the tokens of the whole batch, so gradients are summed,
    not averaged. `param_shard` says over how many ranks parameters stay divided between uses. A table that is
    both embedding and output projection stays gathered through a pass, since both of its ends need it.
    """
    if mesh["replicate"].size() * mesh["shard"].size() == 1 and dtype not in _DTYPES:
        return
    compute = _DTYPES.get(dtype)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    reshard: bool | int = strategy.param_shard > 1
    if 1 < strategy.param_shard < strategy.optim_shard:
        reshard = strategy.param_shard
    data = mesh["replicate", "shard"]
    blocks: list[nn.Module] = list(stage.layers.values())
    if not (stage.embedding is not None and stage.head is not None and stage.model.tied_embeddings):
        blocks += [end for end in (stage.embedding, stage.head) if end is not None]
    for block in blocks:
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(stage, mesh=data, mp_policy=policy, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def synchronise(stage: nn.Module, strategy: Strategy, *, is_last: bool) -> None:
    """Say what the data group does in the coming backward pass of `stage`: what the plan's degrees ask of
    every microbatch, and with the last one all that is left."""
    if isinstance(stage, FSDPModule):
        stage.set_is_last_backward(is_last)
        stage.set_requires_gradient_sync(is_last or strategy.grad_shard > 1)
        stage.set_requires_all_reduce(is_last)
        stage.set_reshard_after_backward(is_last or strategy.param_shard > 1)
