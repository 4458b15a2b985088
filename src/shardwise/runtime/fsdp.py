"""Data-parallel and expert-parallel sharding of a stage with `fully_shard` (FSDP2), DTensor and gradient
reducers."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
)

from shardwise.runtime.devices import COMPUTE, to_device
from shardwise.runtime.gradients import GradientReducer
from shardwise.runtime.mesh import expert_degree, expert_ranks
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.moe import GroupedExperts, MixtureOfExperts
from shardwise.strategy import Strategy


def split_experts(stage: ModelStage, mesh: DeviceMesh) -> None:
    """Shard the experts of every layer over `ep` ranks, and each expert over `etp` ranks along its width."""
    width = {"gate": Shard(1), "up": Shard(1), "down": Shard(2), "gate_bias": Shard(1), "up_bias": Shard(1)}
    for mixture in mixtures(stage):
        mixture.experts.parts = mesh["etp"].size()
        for name, whole in list(mixture.experts.named_parameters()):
            placements = (Shard(0), width.get(name, Replicate()))
            divided = distribute_tensor(whole.detach(), mesh["ep", "etp"], placements, src_data_rank=None)
            setattr(mixture.experts, name, nn.Parameter(divided))


def mixtures(stage: ModelStage) -> list[MixtureOfExperts]:
    """The mixture-of-experts modules among the layers of `stage`."""
    return [layer.mlp for layer in stage.layers.values() if isinstance(layer.mlp, MixtureOfExperts)]


def shard_states(
    stage: ModelStage, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, strategy: Strategy, dtype: str
) -> None:
    """Set up the gradient reduction and sharding of `stage` over its data-parallel ranks.

    Replicated dense fp32 weights get a `GradientReducer`. Everything else (layers, experts, stage) is wrapped
    in `fully_shard` over (`replicate`, `shard`) if there are several ranks, or the compute dtype differs from
    the parameters'.

    Losses are divided by the tokens of the whole batch, so gradients are summed, not averaged. `param_shard`
    is the sharding degree of parameters between uses. Tied embeddings stay gathered throughout a pass, since
    both ends of the stage use them.
    """
    is_narrow = COMPUTE[dtype] != torch.float32
    policy = MixedPrecisionPolicy()
    if is_narrow:
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE[dtype], reduce_dtype=torch.float32)
    is_dense = strategy.cp * strategy.dp > 1 or is_narrow
    data = _data_mesh(mesh)
    if expert_mesh is None and not is_narrow and strategy.optim_shard == 1:
        # `fully_shard` would hold a second copy of the weights and copy gradients into and out of it.
        to_device(stage, mesh.device_type)
        if is_dense:
            stage.replicas = GradientReducer(_blocks_of(stage), mesh["replicate"].get_group())
        return
    is_routed = bool(mixtures(stage)) and (is_dense or expert_ranks(strategy) > 1)
    if not is_dense:
        to_device(stage, mesh.device_type)
    if is_routed and expert_mesh is not None:
        _shard_experts(stage, _data_mesh(expert_mesh), strategy, policy)
    if is_dense:
        _shard_dense(stage, data, strategy, policy)
    elif is_routed:
        # Dense weights stay unwrapped. The pipelining runtime requires the stage to be the FSDP root.
        experts = {id(p) for mixture in mixtures(stage) for p in mixture.experts.parameters()}
        dense_parameters = {parameter for parameter in stage.parameters() if id(parameter) not in experts}
        fully_shard(stage, mesh=data, ignored_params=dense_parameters, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _blocks_of(stage: ModelStage) -> list[list[nn.Parameter]]:
    """The stage's parameters in blocks, in the order in which the backward pass completes them. Tied
    embeddings are one block, completed with the embedding."""
    head, embedding = ([] if end is None else list(end.parameters()) for end in (stage.head, stage.embedding))
    if any(parameter is p for parameter in head for p in embedding):
        head, embedding = [], list(dict.fromkeys([*embedding, *head]))
    layers = [list(layer.parameters()) for layer in reversed(list(stage.layers.values()))]
    return [block for block in (head, *layers, embedding) if block]


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Mesh for `fully_shard`: (`replicate`, `shard`), or `shard` alone if there are no replicas."""
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


def _shard_dense(
    stage: ModelStage, data: DeviceMesh, strategy: Strategy, policy: MixedPrecisionPolicy
) -> None:
    reshard = _reshard(strategy.param_shard, strategy.optim_shard)
    blocks: list[nn.Module] = list(stage.layers.values())
    if not (stage.embedding is not None and stage.head is not None and stage.model.tied_embeddings):
        blocks += [end for end in (stage.embedding, stage.head) if end is not None]
    for block in blocks:
        to_device(block, data.device_type)  # one block at a time, since it is whole until it is sharded
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=reshard)
    to_device(stage, data.device_type)
    fully_shard(stage, mesh=data, mp_policy=policy, reshard_after_forward=False)


def _shard_experts(
    stage: ModelStage, data: DeviceMesh, strategy: Strategy, policy: MixedPrecisionPolicy
) -> None:
    param, optim = (expert_degree(strategy, d) for d in (strategy.param_shard, strategy.optim_shard))

    def even(parameter: nn.Parameter) -> Shard:
        """The first dim that the ranks divide evenly: experts, or a dim of each expert."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(next((dim for dim in range(local.dim()) if local.shape[dim] % optim == 0), 0))

    for mixture in mixtures(stage):
        to_device(mixture.experts, data.device_type)
        fully_shard(
            mixture.experts, mesh=data, mp_policy=policy, reshard_after_forward=_reshard(param, optim),
            shard_placement_fn=even,
        )  # fmt: skip


def _reshard(param_shard: int, optim_shard: int) -> bool | int:
    """`reshard_after_forward` of `fully_shard`: keep gathered parameters (False), reshard them (True), or
    reshard them to a smaller group (its size)."""
    return param_shard if 1 < param_shard < optim_shard else param_shard > 1


def synchronise(stage: nn.Module, strategy: Strategy, *, is_last: bool) -> None:
    """Set which data-parallel reductions the next backward pass of `stage` does: after every micro-batch as
    the plan's degrees require, and all that remain after the last one."""
    if isinstance(stage, ModelStage) and stage.replicas is not None and is_last:
        stage.replicas.expect_last_backward()
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            param, grad = strategy.param_shard, strategy.grad_shard
            if isinstance(module, GroupedExperts):
                param, grad = expert_degree(strategy, param), expert_degree(strategy, grad)
            module.set_requires_gradient_sync(is_last or grad > 1, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)
            module.set_reshard_after_backward(is_last or param > 1, recurse=False)
    if isinstance(stage, FSDPModule):
        # Without a pipeline, this resets the order of blocks after each micro-batch. Otherwise `fully_shard`
        # would prefetch the last block again.
        stage.set_is_last_backward(is_last or strategy.pp == 1)
