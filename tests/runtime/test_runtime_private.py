"""What `runtime/private.py` assumes of PyTorch's private parts: an upgrade that changes them fails here."""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.runtime.equality import divided, single_process
from tests.runtime.plans import make_plan
from tests.runtime.recorded_collectives import COLLECTIVE_OPERATORS
from torch import distributed, nn
from torch.distributed import DeviceMesh, checkpoint, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.runtime import WorkerPool
from shardwise.runtime.private import (
    ChunkLoadPlanner,
    ChunkSavePlanner,
    LocalAdamW,
    TensorChunks,
    chunk_of,
    destroy_groups,
    forget_meshes,
    is_profiled,
    multiply_all,
    offloaded_shards,
    process_groups,
    profiled_events,
    saving_hooks,
    with_layout_of,
)
from shardwise.runtime.workers import Report
from shardwise.schedule import NAMES, generate, lower, to_text


@pytest.mark.parametrize("name", NAMES)
def test_actions_as_text_are_pytorchs(name: str) -> None:
    vpp = 2 if name in ("interleaved_1f1b", "zb_v", "dualpipe_v") else 1
    schedule = generate(name, pp=2, microbatches=4, vpp=vpp)
    for row in lower(schedule).ranks:
        assert [str(_Action.from_str(str(step))) for step in row] == [str(step) for step in row]
    assert to_text(schedule)


def test_the_runtime_takes_actions_with_communication() -> None:
    parameters = inspect.signature(_PipelineScheduleRuntime._prepare_schedule_with_comms).parameters
    assert list(parameters) == ["self", "actions", "format"]
    assert "compute_comms" in str(parameters["format"].annotation)
    source = inspect.getsource(_PipelineScheduleRuntime.__init__)
    assert "self.unsharded_stages = set()" in source


def test_tensors_are_scaled_in_place() -> None:
    tensors = [torch.ones(2), torch.full((2, 2), 3.0)]
    places = [tensor.data_ptr() for tensor in tensors]
    multiply_all(tensors, 0.5)
    multiply_all([], 0.5)
    assert [tensor.data_ptr() for tensor in tensors] == places
    assert tensors[0].tolist() == [0.5, 0.5] and tensors[1].tolist() == [[1.5, 1.5]] * 2


def test_collectives_have_the_operands_that_their_bytes_are_counted_by() -> None:
    """Operators have either the output first and the input second, or the input first."""
    given_second = {"all_gather": "input", "reduce_scatter": "input", "all_to_all": "input"}
    names = {}
    for operator, kind, whole in COLLECTIVE_OPERATORS:
        first, second = (argument.name for argument in operator._schema.arguments[:2])
        names[operator._schema.name] = first, second
        if whole == "second":
            assert first.startswith("output") and second.startswith(given_second[kind]), operator
        elif whole == "first" and kind == "all_gather":
            assert first.startswith("output") and second.startswith("input"), operator
        else:
            assert first in ("input", "tensors"), operator
    assert len(names) == len(COLLECTIVE_OPERATORS)


def test_a_profile_has_the_time_when_it_started() -> None:
    """Events have microseconds since a start, which is in nanoseconds on the machine's clock."""
    before = time.time()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("something"):
        pass
    (found,) = (event for event in profiled_events(profiler) if event[0] == "something")
    assert before - 1 <= found[1] <= found[2] <= time.time() + 1


def test_a_profile_has_the_numbers_of_autograds_nodes() -> None:
    """A node has the sequence number that was the next one when its operator began, and nodes run from the
    last to the first. Nodes that accumulate gradients have no number."""
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert not is_profiled()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert is_profiled()
        (torch.sin(x) * torch.cos(y)).sum().backward()
    events = list(profiled_events(profiler))
    forward = {event.name: event.node for event in reversed(events) if not event.is_backward}
    backward = {event.name: event.node for event in events if event.is_backward}
    for name in ("sin", "cos", "mul", "sum"):
        assert forward[f"aten::{name}"] == backward[f"{name.capitalize()}Backward0"] >= 0
    computed = [event for event in events if event.is_backward and event.name.endswith("Backward0")]
    computed.sort(key=lambda event: event.start_s)
    assert [event.node for event in computed] == sorted((event.node for event in computed), reverse=True)
    assert backward["torch::autograd::AccumulateGrad"] == -1


def test_the_stage_is_queried_before_each_backward_pass() -> None:
    parameters = inspect.signature(PipelineStage.backward_maybe_with_nosync).parameters
    assert list(parameters) == ["self", "backward_type", "bwd_kwargs", "last_backward"]
    source = inspect.getsource(PipelineStage.backward_maybe_with_nosync)
    for key in ("stage_output", "output_grads", "input_values"):
        assert f'bwd_kwargs["{key}"]' in source
    assert list(inspect.signature(stage_backward).parameters)[:3] == [
        "stage_output",
        "output_grads",
        "input_values",
    ]


def test_the_stage_requests_transfers_and_uses_their_results() -> None:
    """`ReshardingStage` replaces these methods; receive buffers are stored by micro-batch."""
    names = {
        "get_fwd_recv_ops": "fwd_chunk_id", "get_bwd_recv_ops": "bwd_chunk_id",
        "get_fwd_send_ops": "fwd_chunk_id", "get_bwd_send_ops": "bwd_chunk_id",
        "_retrieve_recv_activations": "fwd_chunk_id", "_retrieve_recv_grads": "bwd_chunk_id",
    }  # fmt: skip
    for name, chunk in names.items():
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters) == ["self", chunk]
    for name, expected_text in (
        ("get_fwd_recv_ops", "self.args_recv_info[fwd_chunk_id]"),
        ("get_bwd_recv_ops", "self.grad_recv_info[bwd_chunk_id]"),
        ("get_fwd_send_ops", "self.fwd_cache[fwd_chunk_id]"),
        ("get_bwd_send_ops", "self.bwd_cache.pop(bwd_chunk_id)"),
    ):
        assert expected_text in inspect.getsource(getattr(PipelineStage, name))
    votes = inspect.getsource(_PipelineScheduleRuntime._warmup_p2p)
    assert "_warmup_forward_vote" in votes and "_warmup_backward_result" in votes
    assert "if result.item() == 1" in votes


@pytest.fixture
def third_of_four() -> Iterator[None]:
    """This process as rank 2 of four fake ranks."""
    distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("third_of_four")
def test_a_chunk_of_a_tensor_is_identified_by_its_offset() -> None:
    # 10 rows in four shards: 3, 3, 3 and 1; the third starts at row 6.
    mesh = init_device_mesh("cpu", (4,))
    divided = DTensor.from_local(
        torch.zeros(3, 5), mesh, [Shard(0)], shape=torch.Size((10, 5)), stride=(5, 1)
    )
    assert chunk_of(divided) == ((6, 0), (3, 5))
    assert chunk_of(torch.zeros(2, 3)) == ((0, 0), (2, 3))


def stepped(_report: Report, mutant: str | None) -> tuple[float, list[bool]]:
    """Three steps over a sharded, a replicated and a plain tensor: the largest difference from PyTorch's own
    AdamW over whole tensors, and whether states are laid out like their parameters.

    Each rank has two of four rows of the replicated tensor's gradient and zeros for the others, as a partial
    sum.
    """
    rank, mesh = distributed.get_rank(), init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn((4, 3), generator=generator).requires_grad_() for _ in range(3)]
    layouts = [[Shard(0)], [Replicate()]]
    own = [
        distribute_tensor(each.detach().clone(), mesh, layout)
        for each, layout in zip(whole, layouts, strict=False)
    ]
    own = [each.requires_grad_() for each in (*own, whole[2].detach().clone())]
    plain = torch.optim.AdamW(whole, lr=0.1, fused=True)
    local = LocalAdamW(own, lr=0.1, fused=True)
    with patch(*(mutant, lambda grad, _: grad)) if mutant else nullcontext():
        for _ in range(3):
            for each in whole:
                each.grad = torch.randn((4, 3), generator=generator)
            rows = (torch.arange(4) // 2 == rank)[:, None]
            own[0].grad = distribute_tensor(whole[0].grad, mesh, [Shard(0)])
            own[1].grad = DTensor.from_local(whole[1].grad * rows, mesh, [Partial()])
            own[2].grad = whole[2].grad.clone()
            plain.step()
            local.step()
    ends = [each.full_tensor() if isinstance(each, DTensor) else each for each in own]
    return (
        max(float((a - b).abs().max()) for a, b in zip(ends, whole, strict=True)),
        [local.state[each]["exp_avg"].placements == each.placements for each in own[:2]],
    )


def test_steps_over_local_parts_are_those_over_whole_tensors(team: WorkerPool) -> None:
    for error, is_laid_out in team.run(2, stepped, None):
        assert error == 0.0 and all(is_laid_out)


def test_an_optimizer_step_without_reductions_is_caught(team: WorkerPool) -> None:
    for error, _ in team.run(2, stepped, "shardwise.runtime.private._redistributed_like"):
        assert error > 0.01


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_boxes_of_a_tensor_are_saved_and_filled(tmp_path: Path) -> None:
    """A tensor of 4 x 2 elements is saved in two boxes of two rows, and its last three rows are loaded as one
    box; with it a plain tensor."""
    whole = torch.arange(8.0).reshape(4, 2)
    saved = TensorChunks((4, 2), {(0, 0): whole[:2].clone(), (2, 0): whole[2:].clone()})
    checkpoint.save(
        {"x": saved, "y": torch.ones(3)}, checkpoint_id=tmp_path, planner=ChunkSavePlanner(), no_dist=True
    )
    rows, plain = torch.zeros(3, 2), torch.zeros(3)
    required = {"x": TensorChunks((4, 2), {(1, 0): rows}), "y": plain}
    checkpoint.load(required, checkpoint_id=tmp_path, planner=ChunkLoadPlanner(), no_dist=True)
    assert torch.equal(rows, whole[1:]) and torch.equal(plain, torch.ones(3))


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the only rank."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("keeps", [False, True])
def test_an_offloaded_weight_is_gathered_from_the_host(keeps: bool) -> None:
    """In the dtype in which it is sent; its gradients keep theirs."""
    stage = nn.Sequential(nn.Linear(8, 4, bias=False))
    right = torch.randn(4, 8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(stage, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    ((parameter, shard),) = offloaded_shards(stage).items()
    shard.offload(right.bfloat16(), keeps=keeps)
    empty = parameter.detach().to_local()
    assert empty.untyped_storage().nbytes() == 4  # of one element
    with pytest.raises(RuntimeError, match="single memory location"):
        empty.mul_(2.0)
    x = torch.randn(2, 8)
    for scale in (1.0, 3.0):
        shard.device_buffer().copy_(scale * right.bfloat16().flatten())
        out = stage(x)
        assert torch.equal(out, nn.functional.linear(x.bfloat16(), scale * right.bfloat16()))
        assert (shard.device_part is not None) == keeps
        out.float().sum().backward()
        assert parameter.grad is not None and parameter.grad.shape == (4, 8)
        assert parameter.grad.dtype == torch.float32
        parameter.grad = None
    if not keeps:  # the weight is read from the host each time
        assert torch.equal(stage(x), nn.functional.linear(x.bfloat16(), right.bfloat16()))


@pytest.mark.usefixtures("third_of_four")
def test_a_part_with_the_layout_of_another_may_be_on_another_device() -> None:
    whole = distribute_tensor(torch.zeros(8, 3), init_device_mesh("cpu", (4,)), [Shard(0)])
    part = with_layout_of(torch.ones(2, 3), whole)
    assert isinstance(part, DTensor) and part.placements == whole.placements and part.shape == (8, 3)
    assert chunk_of(part) == chunk_of(whole)
    assert with_layout_of(torch.ones(2), torch.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.usefixtures("third_of_four")
def test_groups_are_those_that_were_made_until_they_end() -> None:
    before = process_groups()
    group = distributed.new_group([0, 2])
    assert process_groups() - before == {group}
    destroy_groups([group])
    assert process_groups() == before


@pytest.mark.usefixtures("third_of_four")
def test_meshes_are_forgotten() -> None:
    mesh = init_device_mesh("cpu", (4,))
    distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    assert _gen_transform_infos.cache_info().currsize > 0
    forget_meshes()
    assert _gen_transform_infos.cache_info().currsize == 0


def live_meshes(report: Report) -> int:
    return sum(type(found) is DeviceMesh for found in gc.get_objects())


@pytest.mark.parametrize(
    "text", ["tp=2,sequence_parallel=true", "tp=2,dp=2", "dp=2,zero_stage=3", "pp=2,dp=2,zero_stage=1"]
)
def test_a_run_leaves_no_groups(team: WorkerPool, text: str) -> None:
    """Each gloo group has three threads, one of which wakes often: a hundred runs would keep a machine
    busy."""
    plan, whole = make_plan(text), make_plan("tp=1")
    team.run(plan.cluster.devices, divided, plan, single_process(whole, seed=3, steps=1), 3, None)
    assert set(team.run(plan.cluster.devices, live_meshes)) == {0}


def test_hooks_of_saved_tensors_are_the_innermost() -> None:
    assert saving_hooks() is None
    outer, inner = ((torch.neg, torch.neg), (torch.clone, torch.clone))
    with torch.autograd.graph.saved_tensors_hooks(*outer):
        with torch.autograd.graph.saved_tensors_hooks(*inner):
            assert saving_hooks() == inner
        assert saving_hooks() == outer
