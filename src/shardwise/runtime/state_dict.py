"""What a job holds on one rank: parameters and optimizer states by the names of the whole model.

Gives a divided model its values: of every whole tensor, one at a time, each rank takes what it holds.

What a job under an uneven plan saves and loads, by the names of the whole model.

What a job under the plan of an operator graph saves and loads, by the names of the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.runtime.gradients import local
from shardwise.runtime.graphs import GraphTrainingJob, ShardedParameter
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.private import TensorChunks
from shardwise.runtime.regions import DIMS, LocalRegion, Region, region_of
from shardwise.runtime.uneven import UnevenTrainingJob

STATES = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""What each optimizer keeps per parameter; `step` is a number, all else is like the parameter."""


def named(job: TrainingJob) -> list[tuple[int, str, Any]]:
    """This rank's parameters, as its optimizer has them, with their stages and names."""
    return [
        (index, name, job.owned(p)) for index, stage in job.stages for name, p in stage.named_parameters()
    ]


def whole_name(job: TrainingJob, index: int, name: str) -> str:
    """The name in the whole model: a copy of the embedding at the other end is the embedding."""
    return "embedding.tokens.weight" if job.is_copy(index, name) else name


def make_states(job: TrainingJob) -> None:
    """Give every parameter that is trained optimizer states, as they are before the first step."""
    trained = (p for _, stage in job.stages for p in stage.parameters() if p.requires_grad)
    for parameter in map(job.owned, trained):
        job.optimizer.state[parameter].update(first_states(job.plan.job.optimizer, parameter))


def first_states(optimizer: str, parameter: Tensor) -> dict[str, Tensor]:
    """What the optimizer of this name keeps of `parameter`, as it is before the first step."""
    return {
        # A number of steps is where the fused optimizer has it.
        name: torch.zeros((), device=parameter.device) if name == "step" else torch.zeros_like(parameter)
        for name in STATES[optimizer]
    }


def state_of(job: TrainingJob) -> dict[str, Tensor]:
    """Parameters and optimizer states of this rank by the names of the whole model; the tensors themselves,
    so that loading fills them."""
    state: dict[str, Tensor] = {}
    for index, name, parameter in named(job):
        whole = whole_name(job, index, name)
        state[f"model.{whole}"] = parameter.data
        for key, value in job.optimizer.state[parameter].items():
            if value is not None:
                state[f"optimizer.{whole}.{key}"] = value
    return state


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
