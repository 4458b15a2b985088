"""Allocated memory of one rank of a plan by PyTorch's memory tracker: a step on fake tensors among fake
ranks. Nothing is computed or sent, so a rank of 1,024 fits into this process."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from tests.runtime.jobs import uniform
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import mod_tracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.plans import Plan
from shardwise.runtime import offload, parallelize, reference_module
from shardwise.runtime.gradients import local
from shardwise.runtime.uniform import UniformTrainingJob


class Host:
    """Memory of the host, kept apart from the device's: here both are CPU tensors."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}
        self._is_making = False
        self._allocate = offload.host_buffer_like

    def host_buffer_like(
        self, tensor: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Replaces the runtime's own function."""
        self._is_making = True
        buffer = self._allocate(tensor, shape, dtype)
        self._is_making = False
        self.take(buffer)
        return buffer

    def take(self, tensor: torch.Tensor) -> None:
        """Counts this tensor as on the host."""
        storage = local(tensor).untyped_storage()
        self._references[id(storage)] = weakref.ref(storage)

    def holds(self, tensor: torch.Tensor | None) -> bool:
        if tensor is None:
            return False
        storage = local(tensor).untyped_storage()
        reference = self._references.get(id(storage))
        return self._is_making or (reference is not None and reference() is storage)


class Tracker(MemTracker):
    """Counts a step of several micro-batches: the records of a module's previous pass are dropped. Tensors of
    `host` do not count."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def _track(self, reftype: Any, tensor: torch.Tensor) -> None:
        if not self._host.holds(tensor):
            super()._track(reftype, tensor)

    def _update_and_maybe_create_winfos(self, tensor: Any, *arguments: Any) -> Any:
        if self._host.holds(tensor):
            return set()
        return super()._update_and_maybe_create_winfos(tensor, *arguments)

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)


@contextmanager
def fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """The process group of rank `rank` among `ranks` fake ranks."""
    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def allocated_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes in tensors of `rank` on its device at the peak of its second step (the first creates optimizer
    states), by the tracker's kinds and in all (`Total`)."""
    fake, there = FakeTensorMode(allow_non_fake_inputs=True), Host()
    with (
        fake_ranks(rank, plan.cluster.devices),
        patch.object(offload, "host_buffer_like", there.host_buffer_like),
    ):
        with fake:
            module = reference_module(plan.model)
        job = uniform(parallelize(module, plan))  # meshes need real tensors
        with (
            fake,
            warnings.catch_warnings(),
            patch.object(torch.Tensor, "__float__", lambda _: 1.0),
            patch.object(torch.Tensor, "item", lambda _: 1),
            # Split backward passes allow no hooks on modules' inputs; the total needs none.
            patch.object(mod_tracker, "register_multi_grad_hook", lambda *_, **__: None),
        ):
            warnings.simplefilter("ignore")  # about gradients freed before the tracker reads them
            batch = torch.zeros((plan.job.global_batch_size, plan.job.seq_len + 1), dtype=torch.long)
            job.step(batch)
            tracker = Tracker(there)
            tracker.track_external(*(stage for _, stage in job.stages), *_tracking(job, there))
            with tracker:
                job.step(batch)
            found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(kind, "value", kind): nbytes for kind, nbytes in found.items()}


def _tracking(job: UniformTrainingJob, there: Host) -> Iterator[Any]:
    """Tracks what the device holds from step to step in addition to parameters."""
    for _, stage in job.stages:
        if stage.replicas is not None:
            yield from stage.replicas.memory
    if job.host is None:
        yield job.optimizer
        return
    for states in job.optimizer.state.values():
        for value in states.values():
            there.take(value)
    yield from job.host.arrived
