"""Mutants of the runtime, each with one mechanism replaced: an equality test has to reject it, or a test has
to see that the run does not follow its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor

from shardwise.runtime.collectives import _local_chunk
from shardwise.runtime.context_parallel import _all_to_all
from shardwise.runtime.fsdp import shard_states, split_experts, synchronise
from shardwise.runtime.gradients import local
from shardwise.runtime.loss import batch_share_loss
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.moe import GroupedExperts
from shardwise.runtime.offload import ActivationOffload
from shardwise.runtime.private import with_layout_of
from shardwise.runtime.rope import rotation_of
from shardwise.runtime.uniform import UniformTrainingJob
from shardwise.schedule import Schedule, generate, lower


def nothing(*_: Any, **__: Any) -> None:
    """Replaces a mechanism by nothing."""


def _loss_of_all_microbatches_twice(tokens: int, vocab: int, mesh: Any) -> Any:
    return batch_share_loss(tokens // 2, vocab, mesh)


def _averaging(stage: ModelStage, mesh: Any, experts: Any, strategy: Any, dtype: str) -> None:
    shard_states(stage, mesh, experts, strategy, dtype)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


def _own_rows_of_replica_0(self: UniformTrainingJob, batch: torch.Tensor) -> Any:
    rows = self.plan.job.global_batch_size // self.plan.best.strategy.dp
    own = batch[:rows].unflatten(0, (-1, self.plan.best.strategy.micro_batch_size))
    places = self.stages[0][1].places(self.plan.job.seq_len)
    return own[..., places].contiguous(), own[..., places + 1].contiguous()


def _one_place_off(rope: Any, positions: torch.Tensor) -> Any:
    return rotation_of(rope, positions * 2)


def _stay(self: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors


def _one_after_the_other(self: Any, tokens: int) -> torch.Tensor:
    return torch.arange(tokens).chunk(2)[torch.distributed.get_rank()]


def _back_in_another_order(x: torch.Tensor, split: int, joined: int, group: Any) -> torch.Tensor:
    received = _all_to_all(x, split, joined, group)
    return received.flip(1) if joined == 1 else received


def _first_head(self: Any, rank: int, ranks: int) -> int:
    return 0


def _own_input_gradients(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return grads[0] if ctx.dim is None else _local_chunk(grads[0], ctx.dim, ctx.group), None, None


def _like_the_weight(self: Any, parameter: Any, place: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return place
    return DTensor.from_local(
        place, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def _as_they_come(counts: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(int(counts.sum())), torch.arange(int(counts.sum()))


def _own_part(rows: torch.Tensor, group: Any) -> torch.Tensor:
    return rows.chunk(torch.distributed.get_world_size(group))[torch.distributed.get_rank(group)].clone()


def _own_gradients(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ranks = torch.distributed.get_world_size(ctx.group)
    return torch.cat([grads[0]] * ranks, ctx.dim), None, None


def _never_all(stage: ModelStage, strategy: Any, *, is_last: bool) -> None:
    synchronise(stage, strategy, is_last=is_last)
    for module in stage.modules():
        if isinstance(module, GroupedExperts) and isinstance(module, FSDPModule):
            module.set_requires_all_reduce(False)


def _never_between_groups(stage: ModelStage, strategy: Any, *, is_last: bool) -> None:
    synchronise(stage, strategy, is_last=is_last)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(False)


def _all_but_the_first(self: PipelineStage, number: int, last_backward: bool = False) -> None:
    if number > 0:
        PipelineStage.backward_weight_one_chunk(self, number, last_backward)


def _nothing_again(strategy: Any, layers: int) -> tuple[str, ...]:
    return ("none",) * layers


def _cut_alike(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    return (layers // stages,) * stages


def _all_forward_first(schedule: Schedule, *, unshard: bool) -> Any:
    forward_first = generate("gpipe", pp=len(schedule.ranks), microbatches=schedule.microbatches, vpp=1)
    return lower(forward_first, unshard=unshard)


def _as_they_were(self: Any, number: int) -> Any:
    return None, [
        with_layout_of(torch.zeros_like(local(each.own)), each.own) for each in self._chunks[number]
    ]


def _not_yet(self: Any, block: Any) -> None:
    for buffer in filter(None, (each() for each in block.buffers)):
        if buffer.on_device is None:
            buffer.on_device = torch.zeros_like(buffer.on_host)


_pack = ActivationOffload.pack


def _one_for_all(self: Any, tensor: torch.Tensor) -> Any:
    packed = _pack(self, tensor)
    if isinstance(packed, torch.Tensor):
        return packed
    first = next(iter(self._block.by_memory.values()))
    return replace(packed, buffer=first) if first.on_host.numel() >= packed.buffer.on_host.numel() else packed


def _slopes_of_the_first_heads(attention: Any, mesh: Any) -> None:
    attention.slopes = attention.slopes[: len(attention.slopes) // mesh.size()]


def _as_it_is(self: Any, module: Any, mesh: Any) -> Any:
    return module


def _every_part_adds_its_bias(stage: ModelStage, mesh: Any) -> None:
    split_experts(stage, mesh)
    for module in stage.modules():
        if isinstance(module, GroupedExperts):
            module.parts = 1


MUTANTS: dict[str, tuple[str, Any]] = {
    "updates stay on the host": ("shardwise.runtime.offload.OptimizerOffload._send_weights", nothing),
    "gradients stay on the device": (
        "shardwise.runtime.offload.OptimizerOffload._fetch_gradients",
        _as_they_were,
    ),
    "activations are used before they are back": (
        "shardwise.runtime.offload.ActivationOffload._reload",
        _not_yet,
    ),
    "all views of memory are its first": (
        "shardwise.runtime.offload.ActivationOffload.pack",
        _one_for_all,
    ),
    "all tensor ranks have the slopes of the first heads": (
        "shardwise.runtime.tensor_parallel._split_heads",
        _slopes_of_the_first_heads,
    ),
    "latents of a part of the tokens train their projections alone": (
        "shardwise.runtime.tensor_parallel.ReplicatedLinear._apply",
        _as_it_is,
    ),
    "every part of an expert adds its bias": (
        "shardwise.runtime.uniform.split_experts",
        _every_part_adds_its_bias,
    ),
    "no sum over tensor ranks": ("shardwise.runtime.uniform.reduce_partial_gradients", nothing),
    "no tie": ("shardwise.runtime.gradients.TiedWeights.add_up", nothing),
    "gradients averaged over data ranks": ("shardwise.runtime.uniform.shard_states", _averaging),
    "no clipping": ("shardwise.runtime.gradients.scale", nothing),
    "loss over half of the batch": (
        "shardwise.runtime.uniform.batch_share_loss",
        _loss_of_all_microbatches_twice,
    ),
    "all replicas take the same rows": (
        "shardwise.runtime.uniform.UniformTrainingJob._local_batch",
        _own_rows_of_replica_0,
    ),
    "keys stay where they are": ("shardwise.runtime.context_parallel.RingAttention.ring_shift", _stay),
    "parts of the sequence one after the other": (
        "shardwise.runtime.context_parallel.RingAttention.positions",
        _one_after_the_other,
    ),
    "heads are not exchanged back": (
        "shardwise.runtime.context_parallel._all_to_all",
        _back_in_another_order,
    ),
    "all tensor ranks take the first key-value head": (
        "shardwise.runtime.tensor_parallel.ReplicatedKvHeads.head_of",
        _first_head,
    ),
    "tensor ranks keep their inputs' gradients": (
        "shardwise.runtime.collectives._AllGather.backward",
        staticmethod(_own_input_gradients),
    ),
    "replicas take partial sums for whole ones": (
        "shardwise.runtime.gradients.GradientReducer._as_dtensor",
        _like_the_weight,
    ),
    "tokens stay in the order of their senders": ("shardwise.runtime.moe._by_expert", _as_they_come),
    "parts of experts are not added up": ("shardwise.runtime.moe.reduce_scatter_rows", _own_part),
    "tensor ranks keep their tokens' gradients": (
        "shardwise.runtime.collectives._Split.backward",
        staticmethod(_own_gradients),
    ),
    "replicas of experts are not added up": ("shardwise.runtime.uniform.synchronise", _never_all),
    "groups of replicas are not added up": ("shardwise.runtime.uniform.synchronise", _never_between_groups),
    "passes of weights are lost": (
        "shardwise.runtime.private.SynchronisedStage.backward_weight_one_chunk",
        _all_but_the_first,
    ),
    "positions twice as far": ("shardwise.runtime.modules.rotation_of", _one_place_off),
}
"""Mutants by name: the dotted name that is patched, and its replacement."""


def _policy_of_one_dtype(param_dtype: Any = None, reduce_dtype: Any = None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=param_dtype)


HALF_MUTANTS: dict[str, tuple[str, Any]] = {
    "gradients are added up in bf16": ("shardwise.runtime.fsdp.MixedPrecisionPolicy", _policy_of_one_dtype),
}
"""Mutants that only runs in bf16 can show."""

ALIKE: dict[str, tuple[str, Any]] = {
    "nothing goes to the host": ("shardwise.runtime.uniform.OFFLOADS_ACTIVATIONS", ()),
    "nothing is computed again": ("shardwise.runtime.uniform.recompute_kinds", _nothing_again),
    "both halves compute again each time": ("shardwise.runtime.uniform.SPLIT_NAMES", ()),
    "all stages have as many layers": ("shardwise.runtime.uniform.layer_counts", _cut_alike),
    "another order of actions": ("shardwise.runtime.pipeline.lower", _all_forward_first),
}
"""Mutants that change no number: the run does other than its plan, with equal results."""
