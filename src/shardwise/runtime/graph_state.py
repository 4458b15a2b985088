"""What a job under the plan of an operator graph saves and loads, by the names of the graph."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from shardwise.runtime.graphs import GraphTrainingJob, ShardedParameter
from shardwise.runtime.private import TensorChunks
from shardwise.runtime.state import first_states

StateDict = dict[str, Tensor | TensorChunks]
"""Parameters as `model.NAME`, optimizer states as `optimizer.NAME.KIND`: boxes of the whole, but for the
number of steps, which is one number for each."""

STEP = "step"


def graph_state_copies(job: GraphTrainingJob) -> StateDict:
    """Copies of what this rank saves: over all ranks every element of each parameter and of its states is
    there once. Call it between steps."""
    saved: StateDict = {}
    for param in job.store.values():
        for name, kind, own in _named_states(job, param):
            if kind == STEP:
                saved[name] = own.to("cpu", copy=True)
            elif param.is_first_copy:
                saved[name] = _tensor_chunks(param, own.to("cpu", copy=True))
    return saved


def graph_load_targets(job: GraphTrainingJob) -> StateDict:
    """All that this rank holds, copies too, in the job's own memory: what is put there the optimizer has."""
    return {
        name: own if kind == STEP else _tensor_chunks(param, own)
        for param in job.store.values()
        for name, kind, own in _named_states(job, param)
    }


def _named_states(job: GraphTrainingJob, param: ShardedParameter) -> Iterator[tuple[str, str, Tensor]]:
    """What the optimizer updates of a parameter and keeps of it, each with its name and kind; states are made
    where there was no step yet."""
    yield f"model.{param.name}", "model", param.owned.detach()
    states = job.optimizer.state[param.owned]
    if not states:
        states.update(first_states(job.plan.job.optimizer, param.owned))
    for kind, own in states.items():
        yield f"optimizer.{param.name}.{kind}", kind, own


def _tensor_chunks(param: ShardedParameter, own: Tensor) -> TensorChunks:
    return TensorChunks(param.stored.spec.shape, param.chunks(own))
