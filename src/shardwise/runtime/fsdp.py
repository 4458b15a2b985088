"""Splits a stage over the ranks of its expert and data groups, by PyTorch's own parts."""

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
    """Divide the experts of every layer over `ep` ranks, and each over `etp` ranks along its width."""
    width = {"gate": Shard(1), "up": Shard(1), "down": Shard(2), "gate_bias": Shard(1), "up_bias": Shard(1)}
    for mixture in mixtures(stage):
        mixture.experts.parts = mesh["etp"].size()
        for name, whole in list(mixture.experts.named_parameters()):
            placements = (Shard(0), width.get(name, Replicate()))
            divided = distribute_tensor(whole.detach(), mesh["ep", "etp"], placements, src_data_rank=None)
            setattr(mixture.experts, name, nn.Parameter(divided))


def mixtures(stage: ModelStage) -> list[MixtureOfExperts]:
    """The mixtures of experts among the layers of `stage`."""
    return [layer.mlp for layer in stage.layers.values() if isinstance(layer.mlp, MixtureOfExperts)]


def shard_states(
    stage: ModelStage, mesh: DeviceMesh, expert_mesh: DeviceMesh | None, strategy: Strategy, dtype: str
) -> None:
    """Have the data ranks add up gradients: as `GradientReducer` where they hold the same of a dense model
    and compute in fp32, else wrap layers, experts and stage in `fully_shard` over (`replicate`, `shard`) of
    their mesh, where there is more than one rank or the computation is narrower than the parameters.

    Losses are sums over a rank's tokens divided by the tokens of the whole batch, so gradients are summed,
    not averaged. `param_shard` says over how many ranks parameters stay divided between uses. A table that is
    both embedding and output projection stays gathered through a pass, since both of its ends need it.
    """
    is_narrow = COMPUTE[dtype] != torch.float32
    policy = MixedPrecisionPolicy()
    if is_narrow:
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE[dtype], reduce_dtype=torch.float32)
    is_dense = strategy.cp * strategy.dp > 1 or is_narrow
    data = _data_mesh(mesh)
    if expert_mesh is None and not is_narrow and strategy.optim_shard == 1:
        # `fully_shard` would hold a second copy of the weights, and move gradients into it and out again.
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
        # Dense weights stay as they are; the stage is the root that the pipelining runtime asks for.
        experts = {id(p) for mixture in mixtures(stage) for p in mixture.experts.parameters()}
        dense_parameters = {parameter for parameter in stage.parameters() if id(parameter) not in experts}
        fully_shard(stage, mesh=data, ignored_params=dense_parameters, reshard_after_forward=False)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _blocks_of(stage: ModelStage) -> list[list[nn.Parameter]]:
    """The stage's parameters in blocks, in the order in which a backward pass is done with them. The ends of
    a tied table are one block, done with the embedding."""
    head, embedding = ([] if end is None else list(end.parameters()) for end in (stage.head, stage.embedding))
    if any(parameter is p for parameter in head for p in embedding):
        head, embedding = [], list(dict.fromkeys([*embedding, *head]))
    layers = [list(layer.parameters()) for layer in reversed(list(stage.layers.values()))]
    return [block for block in (head, *layers, embedding) if block]


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that `fully_shard` works on: no copies, no reduction among them."""
    return mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]


def _shard_dense(
    stage: ModelStage, data: DeviceMesh, strategy: Strategy, policy: MixedPrecisionPolicy
) -> None:
    reshard = _reshard(strategy.param_shard, strategy.optim_shard)
    blocks: list[nn.Module] = list(stage.layers.values())
    if not (stage.embedding is not None and stage.head is not None and stage.model.tied_embeddings):
        blocks += [end for end in (stage.embedding, stage.head) if end is not None]
    for block in blocks:
        to_device(block, data.device_type)  # one at a time: before it is divided it is there whole
        fully_shard(block, mesh=data, mp_policy=policy, reshard_after_forward=reshard)
    to_device(stage, data.device_type)
    fully_shard(stage, mesh=data, mp_policy=policy, reshard_after_forward=False)


def _shard_experts(
    stage: ModelStage, data: DeviceMesh, strategy: Strategy, policy: MixedPrecisionPolicy
) -> None:
    param, optim = (expert_degree(strategy, d) for d in (strategy.param_shard, strategy.optim_shard))

    def even(parameter: nn.Parameter) -> Shard:
        """The first dim that the ranks divide evenly: whole experts, or a part of each."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(next((dim for dim in range(local.dim()) if local.shape[dim] % optim == 0), 0))

    for mixture in mixtures(stage):
        to_device(mixture.experts, data.device_type)
        fully_shard(
            mixture.experts, mesh=data, mp_policy=policy, reshard_after_forward=_reshard(param, optim),
            shard_placement_fn=even,
        )  # fmt: skip


def _reshard(param_shard: int, optim_shard: int) -> bool | int:
    """What `fully_shard` does with gathered parameters after a use: keep them, give them back, or keep a
    larger part."""
    return param_shard if 1 < param_shard < optim_shard else param_shard > 1


def synchronise(stage: nn.Module, strategy: Strategy, *, is_last: bool) -> None:
    """Say what the data groups do in the coming backward pass of `stage`: what the plan's degrees ask of
    every microbatch, and with the last one all that is left."""
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
        # Without a pipeline nothing of a microbatch is left behind its backward pass: `fully_shard` forgets
        # the order of its blocks, which else has it gather the last one again.
        stage.set_is_last_backward(is_last or strategy.pp == 1)
