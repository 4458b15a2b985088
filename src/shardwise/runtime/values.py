"""Gives a divided model its values: of every whole tensor, one at a time, each rank takes what it holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.runtime.gradients import local
from shardwise.runtime.holdings import DIMS, LocalRegion, region_of
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.state import named, whole_name
from shardwise.runtime.transfers import Region
from shardwise.runtime.uneven import UnevenTrainingJob

ParameterValue = Callable[[str, torch.Size], Tensor]
"""The value of a parameter, by its name in the whole model and its shape there; on the host, in fp32."""


def fill_parameters(job: TrainingJob | UnevenTrainingJob, whole: ParameterValue) -> None:
    """Have every parameter of `job` be its part of what `whole` says. Call it on every rank."""
    with torch.no_grad():
        if isinstance(job, UnevenTrainingJob):
            _fill_shares(job, whole)
            return
        for index, name, parameter in named(job):
            own = local(parameter)
            if own.numel():
                value = whole(whole_name(job, index, name), parameter.shape)
                own.copy_(_part(value, region_of(parameter)).reshape(own.shape))
        job.sync_weights()


def _fill_shares(job: UnevenTrainingJob, whole: ParameterValue) -> None:
    """Values go to the shares that ranks own, and from there to the weights."""
    places: dict[nn.Parameter, list[tuple[int, Region]]] = defaultdict(list)
    for place, (parameter, region, _) in enumerate(job.owned.regions):
        places[parameter].append((place, region))
    values: dict[int, Tensor] = {}
    for parameter, regions in places.items():
        value = whole(job.names[parameter], parameter.shape)
        values |= {place: _part(value, region).flatten() for place, region in regions}
    shares = job.owned.scattered([values[place] for place in range(len(values))])
    for (own, _), share in zip(job.owned.parameters, shares, strict=True):
        own.copy_(share)
    job.owned.sync_weights()


def _part(value: Tensor, region: Region) -> Tensor:
    """What lies at `region` of a whole tensor."""
    bounds = tuple((0, size) for size in value.shape) + ((0, 1),) * (DIMS - value.dim())
    return LocalRegion(bounds, {"": value}).view("", region)
