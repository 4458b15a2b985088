"""What a job under an uneven plan saves and loads, by the names of the whole model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor, nn

from shardwise.runtime.private import TensorChunks
from shardwise.runtime.state import STATES
from shardwise.runtime.transfers import Region
from shardwise.runtime.uneven import UnevenTrainingJob

MODEL = "model"

StateDict = dict[str, Tensor | TensorChunks]
"""Parameters as `model.NAME`, optimizer states as `optimizer.NAME.KIND`."""


def uneven_state_copies(job: UnevenTrainingJob) -> StateDict:
    """Copies of what this rank saves: over all ranks every element of the model and of each of its states is
    there once. Call it on every rank, between steps."""
    chunks = _ChunkBuilder(job)
    for kind, shares in _shares(job).items():
        for owned_region, values in zip(job.owned.regions, job.owned.gathered_regions(shares), strict=True):
            parameter, region, saves = owned_region
            if saves:
                chunks.add(kind, parameter, region, values.to("cpu", copy=True))
    return chunks.by_name() | {name: step.to("cpu", copy=True) for name, step in _steps(job).items()}


def restore_uneven_state(
    job: UnevenTrainingJob, saved: StateDict, values: Mapping[str, Sequence[Tensor]]
) -> None:
    """Give `job` what a checkpoint has put into `wanted_of`'s. Call it on every rank."""
    steps = [step for step in saved.values() if isinstance(step, Tensor)]
    with torch.no_grad():
        for kind, regions in values.items():
            for (own, _), share in zip(job.owned.parameters, job.owned.scattered(regions), strict=True):
                if kind == MODEL:
                    own.copy_(share)
                elif job.optimizer is not None:
                    job.optimizer.state[own][kind] = share.clone()
                    if steps:
                        job.optimizer.state[own]["step"] = steps[0].clone()
    job.owned.sync_weights()


def uneven_load_targets(job: UnevenTrainingJob) -> tuple[StateDict, dict[str, list[Tensor]]]:
    """What a checkpoint fills for this rank, all that it holds; and the same by kind, region after region."""
    chunks, values = _ChunkBuilder(job), defaultdict[str, list[Tensor]](list)
    states = STATES[job.plan.job.optimizer]
    for kind in (MODEL, *(state for state in states if state != "step")):
        for parameter, region, _ in job.owned.regions:
            elements = prod(stop - start for start, stop in region)
            values[kind].append(torch.empty(elements, device=job.device_type))
            chunks.add(kind, parameter, region, values[kind][-1])
    steps = (
        {_key("step", name): torch.zeros((), device=job.device_type) for name in job.names.values()}
        if "step" in states
        else {}
    )
    return chunks.by_name() | steps, values


class _ChunkBuilder:
    """Regions of the whole model's tensors with their values, as they are added."""

    def __init__(self, job: UnevenTrainingJob) -> None:
        self._names = job.names
        self._found: dict[str, tuple[nn.Parameter, dict[tuple[int, ...], Tensor]]] = {}

    def add(self, kind: str, parameter: nn.Parameter, region: Region, values: Tensor) -> None:
        """Of the parameter itself or of a state of it; `values` lie one after the other."""
        _, chunks = self._found.setdefault(_key(kind, self._names[parameter]), (parameter, {}))
        bounds = region[: parameter.dim()]
        chunks[tuple(start for start, _ in bounds)] = values.view([stop - start for start, stop in bounds])

    def by_name(self) -> StateDict:
        return {
            name: TensorChunks(parameter.shape, chunks) for name, (parameter, chunks) in self._found.items()
        }


def _shares(job: UnevenTrainingJob) -> dict[str, list[Tensor]]:
    """This rank's shares of the weights and of each state that there is."""
    shares: dict[str, list[Tensor]] = {MODEL: [own.detach() for own, _ in job.owned.parameters]}
    for kind in STATES[job.plan.job.optimizer]:
        if kind != "step":
            shares[kind] = [state[kind] for state in _states(job)]
    return shares


def _states(job: UnevenTrainingJob) -> Iterator[dict[str, Tensor]]:
    if job.optimizer is not None:
        yield from (job.optimizer.state[own] for own, _ in job.owned.parameters)


def _steps(job: UnevenTrainingJob) -> dict[str, Tensor]:
    """How many steps the optimizer has taken, which is the same for all, for each name that is here."""
    step = next((state["step"] for state in _states(job) if "step" in state), None)
    return {} if step is None else {_key("step", name): step for name in job.names.values()}


def _key(kind: str, name: str) -> str:
    return f"model.{name}" if kind == MODEL else f"optimizer.{name}.{kind}"
