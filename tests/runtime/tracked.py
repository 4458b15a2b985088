"""Allocated memory of one rank of a plan by PyTorch's memory tracker: a step on fake tensors, among fake
ranks. Nothing is computed or sent, so a rank of 1,024 fits into this process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools import mod_tracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.plan import Plan
from shardwise.runtime import parallelize, reference_module


class Tracker(MemTracker):
    """Counts a step of several microbatches: what PyTorch's notes of a module's last pass is dropped."""

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        if not self._mod_tracker.is_bw:
            self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)


@contextmanager
def fake_ranks(rank: int, ranks: int) -> Iterator[None]:
    """The process group of rank `rank` among `ranks` that are not there."""
    distributed.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


def allocated_bytes(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes in tensors of `rank` at the peak of its second step (the first makes the optimizer's states), by
    the tracker's kinds and in all (`Total`)."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_ranks(rank, plan.cluster.devices):
        with fake:
            module = reference_module(plan.model)
        job = parallelize(module, plan)  # meshes are made of tensors that are there
        with (
            fake,
            warnings.catch_warnings(),
            patch.object(torch.Tensor, "__float__", lambda _: 1.0),
            patch.object(torch.Tensor, "item", lambda _: 1),
            # Where backward passes are of parts, hooks on modules' inputs cannot be: a total needs none.
            patch.object(mod_tracker, "register_multi_grad_hook", lambda *_, **__: None),
        ):
            warnings.simplefilter("ignore")  # of gradients that are gone when the tracker looks for them
            batch = torch.zeros((plan.job.global_batch_size, plan.job.seq_len + 1), dtype=torch.long)
            job.step(batch)
            tracker = Tracker()
            tracker.track_external(*(stage for _, stage in job.stages), job.optimizer)
            for _, stage in job.stages:  # replicas keep the memory of their gradients from step to step
                if stage.replicas is not None:
                    tracker.track_external(*stage.replicas.memory)
            with tracker:
                job.step(batch)
            found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(kind, "value", kind): nbytes for kind, nbytes in found.items()}
