"""Mutants of the runtime of uneven plans, each with one mechanism replaced; the equality test has to reject
each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, distributed

from shardwise.runtime.uneven import (
    _gradient,
    _peer_slices,
    _weight_region_of,
    engine_of,
    local_samples,
    stage_of,
)


def _mean_of_pipelines(stage: Any, plan: Any, coordinates: Any, mesh: Any) -> Any:
    """Each pipeline takes the mean over its own tokens, as if all had equal shares."""
    own = plan.best.microbatches[coordinates.pipeline] * plan.best.micro_batch_size
    many = len(plan.best.microbatches)
    return engine_of(
        stage, replace(plan, job=replace(plan.job, global_batch_size=own * many)), coordinates, mesh
    )


def _none_of_the_last_rank(weight_region: Any) -> Tensor:
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    return _gradient(weight_region) * (0.0 if is_last else 1.0)


def _upside_down_on_rank_0(weight_region: Any) -> Tensor:
    gradient = _gradient(weight_region)
    return gradient.flip(0) if distributed.get_rank() == 0 else gradient


def _none_of_the_head(weight_region: Any) -> Tensor:
    is_head = distributed.get_rank() == distributed.get_world_size() - 1 and weight_region.local_region[
        0
    ] == (0, 96)
    return _gradient(weight_region) * (0.0 if is_head else 1.0)


def _whole_weight(same: Any, region: Any, weight: float, saves: bool) -> Any:
    return _weight_region_of(same, region, 1.0, saves)


def _from_the_first(plan: Any, pipeline: int) -> int:
    return 0


def _first_rows(plan: Any, coordinates: Any, batch: Tensor) -> Tensor:
    return local_samples(plan, replace(coordinates, row=0), batch)


def _other_way_round(plan: Any, coordinates: Any, neighbour: int) -> Any:
    slices_of_peers = _peer_slices(plan, coordinates, neighbour)
    places = [place for _, place in slices_of_peers]
    return tuple((rank, place) for (rank, _), place in zip(slices_of_peers, reversed(places), strict=True))


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces a mechanism by nothing."""


MUTANTS: dict[str, tuple[str, Any]] = {
    "shares are not weighed": ("shardwise.runtime.uneven.engine_of", _mean_of_pipelines),
    "a pipeline's gradients are left out": ("shardwise.runtime.uneven._gradient", _none_of_the_last_rank),
    "pieces upside down": ("shardwise.runtime.uneven._gradient", _upside_down_on_rank_0),
    "the tied head is left out": ("shardwise.runtime.uneven._gradient", _none_of_the_head),
    "every tensor rank counts": ("shardwise.runtime.uneven._weight_region_of", _whole_weight),
    "all pipelines take the first samples": (
        "shardwise.runtime.uneven.first_sequence",
        _from_the_first,
    ),
    "all replicas take the first rows": ("shardwise.runtime.uneven.local_samples", _first_rows),
    "hidden states change places": ("shardwise.runtime.uneven._peer_slices", _other_way_round),
    "no sum over tensor ranks": ("shardwise.runtime.uneven.reduce_partial_gradients", _nothing),
    "no clipping": ("shardwise.runtime.gradients.scale", _nothing),
    "weights stay": ("shardwise.runtime.uneven.OptimizerShards.sync_weights", _nothing),
}
"""Mutants by name: the dotted name that is patched, and its replacement."""


def _rounded_sum(weight_region: Any) -> Tensor:
    return _gradient(weight_region).bfloat16().float()


def _rounded_stage(*of: Any) -> Any:
    return stage_of(*of).bfloat16().float()


HALF_MUTANTS: dict[str, tuple[str, Any]] = {
    "gradients are added up in bf16": ("shardwise.runtime.uneven._gradient", _rounded_sum),
    "weights are owned in bf16": ("shardwise.runtime.uneven.stage_of", _rounded_stage),
    "weights compute in fp32": ("shardwise.runtime.uneven.to_compute_dtype", _nothing),
}
"""Mutants that only runs in bf16 can show."""
