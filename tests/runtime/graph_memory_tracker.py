"""Allocated memory of one rank of a graph plan by PyTorch's memory tracker: a step on fake tensors among fake
ranks."""

from __future__ import annotations

import warnings
from unittest.mock import patch

import torch
from tests.runtime.jobs import of_graph
from tests.runtime.memory_tracker import Host, Tracker, fake_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.plans import Plan
from shardwise.runtime import graph_module, parallelize
from shardwise.runtime.graphs.job import GraphTrainingJob


def allocated_bytes(plan: Plan, rank: int = 0) -> int:
    """Bytes in tensors of `rank` at the peak of its second step (the first creates optimizer states). The
    full batch is on the host; the part that the rank reads is copied and counts, as on an accelerator."""
    fake, there = FakeTensorMode(allow_non_fake_inputs=True), Host()
    with (
        patch.object(
            GraphTrainingJob, "_placed", lambda job, data: data.clone() if there.holds(data) else data
        ),
        fake_ranks(rank, plan.devices),
        fake,
        warnings.catch_warnings(),
        patch.object(torch.Tensor, "__float__", lambda _: 1.0),
    ):
        warnings.simplefilter("ignore")
        job = of_graph(parallelize(graph_module(plan.graph, seed=0), plan))
        batch = {name: torch.zeros(shape) for name, shape in plan.graph.inputs.items()}
        for tensor in batch.values():
            there.take(tensor)
        job.step(batch)
        tracker = Tracker(there)
        tracked_tensors = [each for own in job.store.values() for each in {own.weight, own.owned, own.sums}]
        tracker.track_external(*tracked_tensors, job.optimizer)
        with tracker:
            job.step(batch)
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
