"""Everything that uses private names of PyTorch. No other module does; test_runtime_private.py tests the
assumptions.

Contents: collective operators, attention on a part of the keys, pipeline stages and their runtime, profiles,
checkpoint chunks, AdamW on local tensors, offloaded shards of `fully_shard`, and process groups.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode


class ProfiledEvent(NamedTuple):
    """An event of a profile, in seconds of the machine's clock.

    For a backward event, `node` is the number of the autograd node that it computes; else it is the number of
    the next node to be created. It is -1 if unknown.
    """

    name: str
    start_s: float
    finish_s: float
    node: int = -1
    is_backward: bool = False


__all__ = [
    "ALL_TO_ALL",
    "ChunkLoadPlanner",
    "ChunkSavePlanner",
    "DispatchMode",
    "LocalAdamW",
    "OffloadedShard",
    "PeerSlice",
    "ReshardingStage",
    "SynchronisedStage",
    "TensorChunks",
    "all_to_all_rows",
    "arrived",
    "attention_part",
    "attention_part_backward",
    "chunk_of",
    "destroy_groups",
    "executed_actions",
    "forget_meshes",
    "is_profiled",
    "multiply_all",
    "offloaded_shards",
    "pipeline_runtime",
    "process_groups",
    "profiled_events",
    "saving_hooks",
    "with_layout_of",
]

LossFunction = Callable[[Tensor, Tensor], Tensor]

PeerSlice = tuple[int, tuple[slice, ...]]
"""A rank, and the part of this rank's hidden states that is sent to it or received from it."""

ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
"""All-to-all as an operator that returns its result, so that selective recomputation can save it."""


def all_to_all_rows(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """All-to-all of rows: `sent` rows go to each rank of `group`, `received` rows come from each."""
    result = ALL_TO_ALL(rows.contiguous(), received, sent, group.group_name)
    return arrived(result)


def arrived(result: Tensor) -> Tensor:
    """The result of `ALL_TO_ALL` after the collective has completed; before that, its memory is undefined."""
    there: Tensor = torch.ops._c10d_functional.wait_tensor(result)
    return there


# Tensors and attention


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply every one of `tensors` in place by `factor`, in few kernels."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def attention_part(
    q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q on a part of its keys, each (batch, heads, tokens, elements).

    Also returns the log-sum-exp of the scores in fp32 (batch, heads, tokens), by which parts are merged.
    """
    if q.device.type == "cpu":
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
    else:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[
            :2
        ]
    return out, sums


def attention_part_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for a part of the keys; `out` and `sums` are those of attention on all keys."""
    if q.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, sums, 0.0, is_causal, scale=scale
        )
    else:
        seed = torch.zeros(2, dtype=torch.int64, device=q.device)  # of dropout, which is off
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, sums.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, is_causal,
            seed, seed, scale=scale,
        )  # fmt: skip
    return dq, dk, dv


# Pipeline stages


class SynchronisedStage(PipelineStage):
    """A pipeline stage whose full backward passes do the data-parallel reductions that `before_backward` set.

    PyTorch's stage leaves all-gathers to actions of the schedule, and all reductions to the end of the step.
    Here, `fully_shard` gathers a block when it is used and reduces its gradients when they are complete. A
    split backward pass bypasses `fully_shard`'s hooks: its gradients are reduced at the end, where `reduce`
    is called too.
    """

    def __init__(
        self,
        *arguments: Any,
        before_backward: Callable[[bool], None],
        reduce: Callable[[], None],
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._before_backward = before_backward
        self._reduce = reduce

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        self._reduce()

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "full":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        self._before_backward(last_backward)
        inputs = stage_backward(
            bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]
        )
        return inputs, None


class ReshardingStage(SynchronisedStage):
    """A pipeline stage that reshards hidden states between stages that are sharded differently.

    `earlier` and `later` are the ranks of the neighbouring stages, each with the slices of this rank's hidden
    states that both have. PyTorch's stage has one peer per neighbouring stage and asks it once whether shapes
    are known; here they are known.
    """

    def __init__(
        self, *arguments: Any, earlier: Sequence[PeerSlice], later: Sequence[PeerSlice], **named: Any
    ) -> None:
        # The name of a group follows from the number of groups. With a second stage like this one it might
        # clash.
        alone = distributed.new_group([distributed.get_rank()], use_local_synchronization=True)
        super().__init__(*arguments, group=alone, **named)
        distributed.destroy_process_group(alone)
        self.group, self.group_rank, self.group_size = None, self.stage_index, self.num_stages
        self._earlier, self._later = earlier, later
        self._arriving: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}

    def _warmup_forward_vote(self, *_: Any, **__: Any) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, *_: Any, **__: Any) -> Tensor:
        return torch.ones(1, dtype=torch.int32)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        infos = self.args_recv_info[fwd_chunk_id]
        return [] if self.is_first else self._receives("F", fwd_chunk_id, infos[0].buffer, self._earlier)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        infos = self.grad_recv_info[bwd_chunk_id]
        return [] if self.is_last else self._receives("B", bwd_chunk_id, infos[0].buffer, self._later)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[distributed.P2POp]:
        outputs, _ = self.fwd_cache[fwd_chunk_id]
        return [] if self.is_last else _sends(outputs[0].detach(), self._later)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[distributed.P2POp]:
        gradient = self.bwd_cache.pop(bwd_chunk_id)[0]
        return [] if self.is_first or gradient is None else _sends(gradient, self._earlier)

    def _receives(
        self, kind: str, chunk: int, whole: Tensor, peer_slices: Sequence[PeerSlice]
    ) -> list[distributed.P2POp]:
        places = [whole.detach()[place] for _, place in peer_slices]
        arriving = [
            (place, torch.empty_like(place, memory_format=torch.contiguous_format)) for place in places
        ]
        self._arriving[kind, chunk] = arriving
        return [
            distributed.P2POp(distributed.irecv, peer_tensor, peer)
            for (peer, _), (_, peer_tensor) in zip(peer_slices, arriving, strict=True)
        ]

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._put("F", fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._put("B", bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    def _put(self, kind: str, chunk: int) -> None:
        """Copy received slices to their places."""
        for place, peer_tensor in self._arriving.pop((kind, chunk)):
            place.copy_(peer_tensor)


def _sends(whole: Tensor, peer_slices: Sequence[PeerSlice]) -> list[distributed.P2POp]:
    return [
        distributed.P2POp(distributed.isend, whole[place].contiguous(), peer) for peer, place in peer_slices
    ]


def pipeline_runtime(
    stages: Sequence[PipelineStage],
    *,
    microbatches: int,
    loss: LossFunction,
    rows: Sequence[Sequence[str]],
) -> Any:
    """PyTorch's pipelining runtime for exactly the actions in `rows`, rank by rank, including communication.

    Actions are text (`2F0`, `1SEND_F0`, `0REDUCE_GRAD`). Gradients are not scaled: `loss` is one
    micro-batch's share of the loss of the whole batch. The rows do not gather parameters (`fully_shard`
    does), so all stages count as unsharded.
    """
    runtime = _PipelineScheduleRuntime(list(stages), microbatches, loss_fn=loss, scale_grads=False)
    actions = {rank: [_Action.from_str(text) for text in row] for rank, row in enumerate(rows)}
    runtime._prepare_schedule_with_comms(actions, format="compute_comms")
    runtime.unsharded_stages.update(stage.stage_index for stage in stages)
    return runtime


def executed_actions(runtime: Any, rank: int) -> list[str]:
    """Actions of pipeline rank `rank` in `runtime`, in order, as text."""
    return [str(action) for action in runtime.pipeline_order_with_comms[rank]]


# Profiles

_BACKWARD_FUNCTION = 1
"""Scope of backward functions in a profile (at::RecordScope::BACKWARD_FUNCTION)."""


def profiled_events(profiler: Any) -> Iterator[ProfiledEvent]:
    """Every event of a finished profile."""
    origin_s = profiler.profiler.kineto_results.trace_start_ns() * 1e-9
    for event in profiler.events():
        yield ProfiledEvent(
            event.name,
            origin_s + event.time_range.start * 1e-6,
            origin_s + event.time_range.end * 1e-6,
            event.sequence_nr,
            event.scope == _BACKWARD_FUNCTION,
        )


def is_profiled() -> bool:
    """Whether this thread is being profiled."""
    return bool(torch.autograd._profiler_enabled())


# Checkpoints


def chunk_of(tensor: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """Offsets and sizes of this rank's part of `tensor` in the full tensor, as PyTorch's checkpoints see
    it."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets), tuple(chunk.sizes)


class TensorChunks:
    """Chunks of a tensor of `shape`, by their offsets, with the methods by which PyTorch's checkpoints list
    the chunks of DTensors."""

    def __init__(self, shape: Sequence[int], chunks: Mapping[tuple[int, ...], Tensor]) -> None:
        self._shape = torch.Size(shape)
        self._chunks = chunks

    def size(self) -> torch.Size:
        return self._shape

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(start), box.shape) for start, box in self._chunks.items()]

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._chunks[tuple(chunk.offsets)]),
                    size=self._shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def at(self, index: MetadataIndex) -> Tensor:
        return self._chunks[tuple(index.offset or ())]


class ChunkSavePlanner(DefaultSavePlanner):
    """A planner that also saves `TensorChunks`."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, TensorChunks) else super().lookup_object(index)


class ChunkLoadPlanner(DefaultLoadPlanner):
    """A planner that also loads into `TensorChunks`. It does not flatten the state dict: PyTorch's planner
    would look for nested values and replace `TensorChunks` by None."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.at(index) if isinstance(found, TensorChunks) else super().lookup_tensor(index)


# Optimizer and offload


class LocalAdamW(torch.optim.AdamW):
    """AdamW that updates the local tensors of DTensors, while its states stay DTensors.

    The results are equal element by element. DTensor's own dispatch computes placements for one operator on
    all parameters, which takes two fifths of the first three steps of a small model (tp 2, dp 2, ZeRO stage
    3).
    """

    def _init_group(self, group: Any, params: Any, grads: Any, *states: Any) -> bool:
        has_complex = bool(super()._init_group(group, params, grads, *states))
        grads[:] = [_redistributed_like(grad, param) for grad, param in zip(grads, params, strict=True)]
        for tensors in (params, grads, *states):
            tensors[:] = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return has_complex


class OffloadedShard(FSDPParam):
    """A parameter of `fully_shard` whose weight is on the host. On the device it has its shape, layout and
    gradients; what is gathered is `device_part`, the content of `device_buffer`."""

    device_part: Tensor | None
    _sent: Tensor
    _keeps: bool

    def offload(self, sent: Tensor, *, keeps: bool) -> None:
        """Free the rank's shard on the device. It will be copied from the host's `sent`, in whose dtype it is
        gathered. Unless the device `keeps` the copy, it is freed by the all-gather."""
        local = self._sharded_local_tensor
        self.device_part, self._sent, self._keeps = None, sent, keeps
        self.param_dtype = None  # the gathered shard already has the compute dtype
        # An expanded scalar: it takes no memory, and cannot be written to.
        empty = local.new_zeros(()).expand(local.shape)
        self.sharded_param._local_tensor = empty
        self._sharded_param_data = empty.new_empty(0)

    def device_buffer(self) -> Tensor:
        """The flat buffer on the device that holds the rank's shard until it is gathered."""
        own = self._sent.numel()
        if self.device_part is None:
            size = self.padded_sharded_param_size.numel()
            self.device_part = self._sharded_local_tensor.new_empty(size, dtype=self._sent.dtype)
            self.device_part[own:].zero_()
        return self.device_part[:own]

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        if self.sharded_state != ShardedState.SHARDED:
            return super().all_gather_inputs
        if self.device_part is None:  # gathered again without a step in between
            self.device_buffer().copy_(self._sent.view(-1), non_blocking=True)
        device_part = self.device_part
        if device_part is None:
            raise AssertionError("device_buffer allocates device_part")
        if not self._keeps:
            self.device_part = None
            if device_part.device.type != "cpu":  # the all-gather has its own stream
                device_part.record_stream(torch.accelerator.current_stream())
        return [device_part]


def offloaded_shards(stage: nn.Module) -> dict[nn.Parameter, OffloadedShard]:
    """Shards of all parameters of `stage` that `fully_shard` shards, changed so that they can be offloaded.
    `stage` must be fully wrapped and must not have run yet."""
    if not isinstance(stage, FSDPModule):
        return {}
    state = stage._get_fsdp_state()
    state._lazy_init()  # records the parameters; later it would record the empty ones
    found = {}
    for each in state._state_ctx.all_states:
        group = each._fsdp_param_group
        for param in [] if group is None else group.fsdp_params:
            param.__class__ = OffloadedShard
            found[param.sharded_param] = param
    return found


def with_layout_of(local: Tensor, like: Tensor) -> Tensor:
    """`local` as the local tensor of a DTensor with the layout of `like`, or as it is if `like` is no
    DTensor."""
    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local


def _redistributed_like(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient with its parameter's placements, so that partial sums are reduced."""
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements)
    return grad


# Process groups and hooks


def process_groups() -> set[ProcessGroup]:
    """The process groups of this rank, without the default group."""
    return set(distributed.distributed_c10d._world.pg_map) - {distributed.group.WORLD}


def destroy_groups(groups: Iterable[ProcessGroup]) -> None:
    """Destroy these process groups."""
    for group in groups:
        distributed.destroy_process_group(group)
    forget_meshes()


def forget_meshes() -> None:
    """Clear DTensor's caches, which take meshes of the same ranks for equal even if the groups of one were
    destroyed.

    Also collects reference cycles that keep such groups alive: each gloo group has three threads, one of
    which wakes a hundred times a second.
    """
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    gc.collect()


def saving_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The pack and unpack hooks of the innermost `saved_tensors_hooks`, None if there are none."""
    found: tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None = (
        torch._C._autograd._top_saved_tensors_default_hooks(False)  # ignore_is_tracing
    )
    return found
