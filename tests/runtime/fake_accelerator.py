"""A stand-in accelerator that computes nothing, in PyTorch's slot for unknown devices (PrivateUse1).

The slot is taken for the rest of the process, so this runs in its own (`python -m
tests.runtime.fake_accelerator`). Tensors are fake, as in `tracked`, and PyTorch refuses operators whose
tensors are on several devices: a step that ends has every tensor on the right device. Prints as JSON what
steps under `PLANS` did."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from tests.runtime.recorded_collectives import record_collectives
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.model import model_from_config
from shardwise.plans import Plan
from shardwise.runtime import fsdp, gradients, reference_module, uniform
from shardwise.runtime.devices import LOCAL_RANK
from shardwise.runtime.distribute import divided
from shardwise.runtime.gradients import local
from shardwise.runtime.private import TensorChunks
from shardwise.runtime.uniform import UniformTrainingJob as Running
from shardwise.strategy import MEGATRON_2024, Job, complete, parse_fields, target_of

NAME = "standin"

DENSE = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
    "max_position_embeddings": 512,
}  # fmt: skip

PLANS = {
    "replicas": ("dp=4", "fp32"),
    "shards": ("dp=4,zero_stage=3", "fp32"),
    "narrow": ("dp=4,zero_stage=1", "bf16"),
    "tensors": ("tp=4,micro_batch_size=4", "fp32"),
    "sequence": ("tp=2,dp=2,sequence_parallel=true,micro_batch_size=2", "bf16"),
    "stages": ("pp=2,tp=2,micro_batch_size=2", "bf16"),
    "sharded stages": ("pp=2,dp=2,zero_stage=1", "fp32"),
    "ring": ("cp=4,cp_kind=ring,micro_batch_size=4", "bf16"),
    "heads": ("cp=4,cp_kind=all_to_all,micro_batch_size=4", "fp32"),
}
"""Strategy and dtype, each on four devices."""


class Idle:
    """A stream or an event of the stand-in: there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: Idle()


class Accelerator(_DummyBackendModule):
    """The functions of a device module that `fully_shard` calls."""

    Stream = Event = Idle

    def current_stream(self, *_: Any) -> Idle:
        return Idle()

    def set_device(self, _: int) -> None: ...

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, *_: Any, **__: Any) -> None: ...

    @contextlib.contextmanager
    def stream(self, _: Idle) -> Iterator[None]:
        yield


class Fake(FakeTensorMode):
    """Creates tensors as fake ones from the start, never on the device first."""

    avoid_device_init = True


def plan_of(text: str, dtype: str, device: str) -> Plan:
    """The plan for four devices of a class."""
    model = model_from_config(DENSE, name="dense")
    strategy = complete(parse_fields(text), devices=4, layers=model.layers, experts=None, global_batch_size=8)
    profile = target_of("shardwise").run_by(MEGATRON_2024)
    requested = Job(seq_len=64, global_batch_size=4, dtype=dtype, optimizer="adamw", profile=profile)
    return search.plan_of_strategy(model, load_cluster(f"1x4x{device}"), requested, strategy)


def _on_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **named: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **named)

    return called


@contextlib.contextmanager
def fakes() -> Iterator[None]:
    """Inside, tensors are fake, except the rank numbers of meshes and groups."""
    on_real = [
        (uniform, "device_mesh"), (uniform, "coordinates_of"), (uniform, "expert_mesh"),
        (uniform, "rank_grid"), (uniform, "chunk_of"), (uniform, "_context_of"), (uniform, "tie_of"),
        *((DeviceMesh, name) for name, each in vars(DeviceMesh).items() if isinstance(each, FunctionType)),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(Fake(allow_non_fake_inputs=True))
        for owner, name in on_real:
            stack.enter_context(patch.object(owner, name, _on_real_tensors(getattr(owner, name))))
        stack.enter_context(patch.object(torch.Tensor, "__float__", lambda _: 1.0))
        stack.enter_context(patch.object(torch.Tensor, "item", lambda _: 1))
        stack.enter_context(patch.object(torch.accelerator, "current_stream", lambda *_: Idle()))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(patch.dict("os.environ", {LOCAL_RANK: "0"}))  # one host per rank
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def ranks(rank: int, count: int) -> Iterator[None]:
    """The process group of a rank among fake ranks, for tensors on the host and on the device."""
    backend = f"cpu:fake,{NAME}:fake"
    distributed.init_process_group(backend, rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def reported(plan: Plan, rank: int) -> dict[str, Any]:
    """The devices of one rank's tensors after a step, and the collectives of that step."""
    with ranks(rank, plan.cluster.devices), fakes():
        with torch.device("meta"):
            module = reference_module(plan.model)
        running = divided(module, plan)
        assert isinstance(running, Running)
        batch = torch.zeros((plan.job.global_batch_size, plan.job.seq_len + 1), dtype=torch.long)
        with record_collectives() as sent:
            running.step(batch)
        return {
            "held": sorted({tensor.device.type for tensor in _local_tensors(running)}),
            "saved": sorted({tensor.device.type for tensor in _saved(running)}),
            "sent": sorted([one.kind, one.nbytes, count] for one, count in sent.counts.items()),
        }


def _local_tensors(running: Running) -> Iterator[Tensor]:
    """Parameters and optimizer states."""
    for parameter in running.parameters:
        yield local(parameter)
        yield from (local(value) for value in running.optimizer.state[parameter].values())


def _saved(running: Running) -> Iterator[Tensor]:
    """The tensors that a checkpoint is written from."""
    for name, value in running.saved_state().items():
        if isinstance(value, TensorChunks):
            yield from (value.at(item.index) for item in value.__create_write_items__(name, None))
        else:
            yield value


@contextlib.contextmanager
def weights_left_on_the_host() -> Iterator[None]:
    with patch.object(fsdp, "to_device", lambda *_: None):
        yield


@contextlib.contextmanager
def norm_on_the_host() -> Iterator[None]:
    summed = gradients.square_sum
    with patch.object(uniform, "square_sum", lambda own, count, device: summed(own, count, device="cpu")):
        yield


@contextlib.contextmanager
def checkpoint_left_on_the_device() -> Iterator[None]:
    with patch.object(uniform, "_copied", lambda tensor: local(tensor).clone()):
        yield


BROKEN = (weights_left_on_the_host, norm_on_the_host, checkpoint_left_on_the_device)
"""Mutants that lack one step each."""


def report_of(mutant: Callable[[], contextlib.AbstractContextManager[None]], plan: Plan) -> str:
    """The error that a mutant causes; empty where nothing notices it."""
    with mutant():
        try:
            found = reported(plan, rank=3)
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return "" if found["saved"] == ["cpu"] else f"saved from {found['saved']}"


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME, Accelerator())
    done = {
        name: {device: reported(plan_of(text, dtype, device), rank=3) for device in ("cpu", "H100-SXM")}
        for name, (text, dtype) in PLANS.items()
    }
    plan = plan_of(*PLANS["replicas"], "H100-SXM")
    broken = {mutant.__name__: report_of(mutant, plan) for mutant in BROKEN}
    json.dump({"done": done, "broken": broken}, sys.stdout)


if __name__ == "__main__":
    main()
