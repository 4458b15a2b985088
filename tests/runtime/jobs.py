"""The job that `parallelize` has built, as the class that its plan is for, and the whole values of graphs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, distributed

from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.graphs.parameters import ShardedParameter
from shardwise.runtime.graphs.redistribute import redistribute_local_tensor, run_alone
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.uniform import UniformTrainingJob


def uniform(job: object) -> UniformTrainingJob:
    assert isinstance(job, UniformTrainingJob)
    return job


def uneven(job: object) -> UnevenTrainingJob:
    assert isinstance(job, UnevenTrainingJob)
    return job


def of_graph(job: object) -> GraphTrainingJob:
    assert isinstance(job, GraphTrainingJob)
    return job


def whole_parameters(job: GraphTrainingJob) -> dict[str, Tensor]:
    """Every parameter, whole, by its name in the graph, in the dtype in which it is updated. A collective:
    every rank calls it at the same point."""

    def whole(param: ShardedParameter) -> Tensor:
        if param.is_copied:
            return whole_of_shares(param, param.owned.detach())
        return _whole(param, param.weight.detach())

    return of_all_stages(job, whole)


def whole_gradients(job: GraphTrainingJob) -> dict[str, Tensor]:
    """Every gradient between `backward` and `update`, whole. A collective, as `whole_parameters` is."""

    def whole(param: ShardedParameter) -> Tensor:
        gradient = param.owned.grad
        if gradient is None:
            return param.owned.new_zeros(param.stored.spec.shape)
        found = whole_of_shares(param, gradient)
        is_buffer = found.untyped_storage() is param.sums.untyped_storage()
        return found.clone() if is_buffer else found  # the buffer is reused

    return of_all_stages(job, whole)


def whole_of_shares(param: ShardedParameter, share: Tensor) -> Tensor:
    """A whole parameter, gradient or state from each rank's share, like that which the optimizer updates."""
    return _whole(param, run_alone(param.grid, param._join_steps(share)))


def _whole(param: ShardedParameter, own: Tensor) -> Tensor:
    shape, start = param.stored.spec.shape, param.stored.spec.value
    everything = start.with_axes_as(range(len(start.by_axis)), "whole")
    return redistribute_local_tensor(param.grid, own, shape, start, everything)


def of_all_stages(job: GraphTrainingJob, whole: Callable[[ShardedParameter], Tensor]) -> dict[str, Tensor]:
    """The value of `whole` for every parameter, broadcast from the stage that holds it, by name."""
    found: dict[str, Tensor] = {}
    for stage, program in enumerate(job._stages):
        for name in program.parameters:
            value = [whole(job.store[name]) if stage == job.grid.mesh else None]
            if job.plan.stages > 1:
                distributed.broadcast_object_list(value, src=job._first_rank_of(stage))
            assert value[0] is not None
            found[name] = value[0]
    return found
