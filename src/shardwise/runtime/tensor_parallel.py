"""Tensor and sequence parallelism: shards a stage over its tensor-parallel group, as Megatron-LM does.

`split_tensors` applies one `ParallelStyle` per module: column-parallel and row-parallel linear,
vocab-parallel embedding, replicated KV heads and latents.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from shardwise.runtime.attention import GroupedQueryAttention, LatentAttention
from shardwise.runtime.collectives import all_gathered, reduce_over
from shardwise.runtime.gradients import local
from shardwise.runtime.layers import FeedForward
from shardwise.runtime.modules import DecoderLayer, ModelStage
from shardwise.runtime.moe import MixtureOfExperts, Router


def split_tensors(stage: ModelStage, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shard heads, MLP widths and the vocabulary over the one-dimensional `mesh` (Shoeybi et al. 2019).

    With `sequence_parallel`, hidden states between blocks are sharded along the sequence (Korthikanti et al.
    2022); else they are replicated.
    """
    stream = 1 if sequence_parallel else None
    if stage.embedding is not None:
        parallelize_module(stage.embedding, mesh, {"tokens": VocabParallelEmbedding(stream)})
        if stage.embedding.positions is not None:
            _replicate(stage.embedding.positions, mesh, 0 if sequence_parallel else None)
        _replicate_all((stage.embedding.project, stage.embedding.norm), mesh, stream)
    for layer in stage.layers.values():
        parallelize_module(layer, mesh, _layer_styles(layer, stream, mesh.size()))
        if isinstance(layer.attention, LatentAttention):
            _split_latents(layer.attention, mesh, stream)
        else:
            _split_heads(layer.attention, mesh)
        if isinstance(layer.mlp, MixtureOfExperts):
            _distribute_router(layer.mlp.router, mesh)
        _replicate_all(layer.norms, mesh, stream)
    if stage.head is not None:
        _replicate_all((stage.head.norm, stage.head.project), mesh, stream)
        parallelize_module(stage.head.output, mesh, ColumnParallelLinear())
        parallelize_module(stage.head.output, mesh, GatheredInput(stream))
        if stage.embedding is not None and stage.model.tied_embeddings:
            stage.head.output.weight = stage.embedding.tokens.weight


def _layer_styles(layer: DecoderLayer, stream: int | None, ranks: int) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {"attention.out": RowParallelLinear(stream)}
    if isinstance(layer.attention, GroupedQueryAttention):
        styles |= _head_styles(layer.attention, stream, ranks)
    if isinstance(layer.mlp, FeedForward):
        styles |= _mlp_styles("mlp", layer.mlp, stream)
    elif layer.mlp.shared is not None:
        styles |= _mlp_styles("mlp.shared", layer.mlp.shared, stream)
    return styles


def _head_styles(
    attention: GroupedQueryAttention, stream: int | None, ranks: int
) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        "attention": GatheredInput(stream),
        "attention.q": ColumnParallelLinear(),
        "attention.k": ColumnParallelLinear(),
        "attention.v": ColumnParallelLinear(),
    }
    if attention.kv_heads < ranks:
        heads = ReplicatedKvHeads(attention.kv_heads)
        styles |= {"attention.k": heads, "attention.v": heads}
    if attention.q_norm is not None:
        norm = SequenceParallel(sequence_dim=2, use_local_output=True)
        styles |= {"attention.q_norm": norm, "attention.k_norm": norm}
    return styles


def _split_heads(attention: GroupedQueryAttention, mesh: DeviceMesh) -> None:
    """Restrict ALiBi slopes and attention sinks to the heads of this rank."""
    if attention.slopes:
        heads = len(attention.slopes) // mesh.size()
        attention.slopes = attention.slopes[mesh.get_local_rank() * heads :][:heads]
    if attention.sinks is not None:
        divided = distribute_tensor(attention.sinks.detach(), mesh, [Shard(0)], src_data_rank=None)
        attention.sinks = nn.Parameter(divided)


def _split_latents(attention: LatentAttention, mesh: DeviceMesh, stream: int | None) -> None:
    """Shard latent attention: each rank computes the latents of its own tokens, which are all-gathered, and
    its own heads from them."""
    _replicate_all((attention.kv_down, attention.kv_norm), mesh, stream)
    parallelize_module(attention.latents, mesh, GatheredLatents(stream))
    parallelize_module(attention.kv_up, mesh, ColumnParallelLinear())
    if attention.q is not None:
        parallelize_module(attention.q, mesh, ColumnParallelLinear())
        parallelize_module(attention.q, mesh, GatheredInput(stream))
    else:
        _replicate_all((attention.q_down, attention.q_norm), mesh, stream)
        parallelize_module(attention.q_up, mesh, ColumnParallelLinear())


def _distribute_router(router: Router, mesh: DeviceMesh) -> None:
    """Replicate the router's parameters as DTensors; each rank routes its own tokens."""
    for name, whole in list(router.named_parameters()):
        divided = distribute_tensor(whole.detach(), mesh, [Replicate()], src_data_rank=None)
        setattr(router, name, nn.Parameter(divided, requires_grad=whole.requires_grad))


def _mlp_styles(at: str, mlp: FeedForward, stream: int | None) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        at: GatheredInput(stream), f"{at}.up": ColumnParallelLinear(),
        f"{at}.down": RowParallelLinear(stream),
    }  # fmt: skip
    if mlp.gate is not None:
        styles[f"{at}.gate"] = ColumnParallelLinear()
    return styles


class StreamStyle(ParallelStyle):
    """A style for activations that are sharded along dim `stream`, or replicated (None)."""

    def __init__(self, stream: int | None) -> None:
        self._stream = stream


class GatheredInput(StreamStyle):
    """A module whose input is all-gathered along dim `stream`, or replicated already (None). Input gradients
    are reduce-scattered or all-reduced."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return all_gathered(inputs[0], self._stream, group), *inputs[1:]

        module.register_forward_pre_hook(gather)
        return module


class GatheredLatents(StreamStyle):
    """Latents of all tokens on every rank, all-gathered along dim `stream` in one collective, or replicated
    already (None). Gradients are reduce-scattered or all-reduced."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def joined(*parts: Tensor) -> tuple[Tensor, ...]:
            together = all_gathered(torch.cat(parts, dim=-1), self._stream, group)
            return together.split([part.shape[-1] for part in parts], dim=-1)

        module.forward = joined
        return module


class ColumnParallelLinear(ParallelStyle):
    """Column-parallel linear layer (Megatron-LM): every rank computes a part of the outputs from the whole
    input.

    Parameters are DTensors, but products use their local tensors: DTensor's overhead per operator would take
    an eighth of a step of two processes. `RowParallelLinear` does the same.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(module)
        _divide(linear, device_mesh, Shard(0), Shard(0))

        def own_columns(x: Tensor) -> Tensor:
            return functional.linear(
                x, local(linear.weight), None if linear.bias is None else local(linear.bias)
            )

        linear.forward = own_columns
        return linear


class RowParallelLinear(StreamStyle):
    """Row-parallel linear layer (Megatron-LM): every rank has a part of the inputs. Outputs are all-reduced,
    or reduce-scattered along dim `stream`."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, group = _linear(module), device_mesh.get_group()
        _divide(linear, device_mesh, Shard(1), Replicate())
        of_bias = None if self._stream is None else [Partial()]

        def own_rows(x: Tensor) -> Tensor:
            summed = reduce_over(functional.linear(x, local(linear.weight)), self._stream, group)
            if linear.bias is None:
                return summed
            return summed + linear.bias.to_local(grad_placements=of_bias)

        linear.forward = own_rows
        return linear


def _linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(type(module).__name__)
    return module


def _divide(linear: nn.Linear, mesh: DeviceMesh, weight: Placement, bias: Placement) -> None:
    """Shard the parameters of `linear`."""
    for name, placement in (("weight", weight), ("bias", bias)):
        whole = getattr(linear, name)
        if whole is not None:
            divided = distribute_tensor(whole.detach(), mesh, [placement], src_data_rank=None)
            setattr(linear, name, nn.Parameter(divided))


class VocabParallelEmbedding(StreamStyle):
    """Vocab-parallel embedding (Megatron-LM): every rank has a part of the rows and looks up its own tokens.
    Results are all-reduced, or reduce-scattered along dim `stream`. DTensor's embedding would compute the
    gradient of the whole table on every rank."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise TypeError(type(module).__name__)
        whole = module.weight.detach()
        divided = distribute_tensor(whole, device_mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(divided)
        first = device_mesh.get_local_rank() * -(-len(whole) // device_mesh.size())

        def own_rows(tokens: Tensor) -> Tensor:
            rows = module.weight.to_local()
            places = tokens - first
            is_here = (places >= 0) & (places < len(rows))
            if len(rows):
                found = functional.embedding(places.where(is_here, 0), rows)
            else:  # more ranks than rows
                found = rows.sum().expand(*tokens.shape, rows.shape[1])
            return reduce_over(found.where(is_here[..., None], 0.0), self._stream, device_mesh.get_group())

        module.forward = own_rows
        return module


class ReplicatedKvHeads(ParallelStyle):
    """Key or value projection with fewer heads than ranks: every rank computes all heads and keeps the one
    that it needs. Gradients are partial sums over the ranks."""

    def __init__(self, heads: int) -> None:
        self._heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(module)
        head = self.head_of(device_mesh.get_local_rank(), device_mesh.size())
        _divide(linear, device_mesh, Replicate(), Replicate())

        def own_head(x: Tensor) -> Tensor:
            weight, bias = (
                None if each is None else each.to_local(grad_placements=[Partial()])
                for each in (linear.weight, linear.bias)
            )
            heads = functional.linear(x, weight, bias).chunk(self._heads, dim=-1)
            return heads[head]

        linear.forward = own_head
        return linear

    def head_of(self, rank: int, ranks: int) -> int:
        """The head that rank `rank` of `ranks` keeps."""
        return rank * self._heads // ranks


class ReplicatedLinear(ParallelStyle):
    """Replicated linear layer on a rank's own tokens (sequence parallelism). Gradients are partial sums over
    the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _linear(module)
        _divide(linear, device_mesh, Replicate(), Replicate())

        def own_tokens(x: Tensor) -> Tensor:
            weight, bias = (
                None if each is None else each.to_local(grad_placements=[Partial()])
                for each in (linear.weight, linear.bias)
            )
            return functional.linear(x, weight, bias)

        linear.forward = own_tokens
        return linear


def _replicate_all(modules: Iterable[nn.Module | None], mesh: DeviceMesh, stream: int | None) -> None:
    for module in modules:
        if module is not None:
            _replicate(module, mesh, stream)


def _replicate(module: nn.Module, mesh: DeviceMesh, split_dim: int | None) -> None:
    """Replicate the parameters of `module`. If its input is sharded along `split_dim`, their gradients are
    partial sums over the ranks; if not (None), all ranks compute equal gradients."""
    if split_dim is None:
        return
    style: ParallelStyle = ReplicatedLinear()
    if not isinstance(module, nn.Linear):
        style = SequenceParallel(sequence_dim=split_dim, use_local_output=True)
    parallelize_module(module, mesh, style)
