"""State dicts of jobs: parameters and optimizer states by the names of the whole model or graph.

- Uniform plans: `state_of`, with the tensors themselves; loading fills them.
- Uneven plans: `uneven_state_copies` and `uneven_load_targets`, as chunks of the full tensors.
- Operator graphs: `graph_state_copies` and `graph_load_targets`, by the graph's names.

`fill_parameters` sets initial values, one full tensor at a time, of which each rank takes its part.
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

# Uniform plans

STATES = {"adamw": ("step", "exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""Optimizer states per parameter. `step` is a scalar; others have the parameter's shape."""


def named(job: TrainingJob) -> list[tuple[int, str, Any]]:
    """This rank's parameters as its optimizer has them, each with its stage and name."""
    return [
        (index, name, job.owned(p)) for index, stage in job.stages for name, p in stage.named_parameters()
    ]


def whole_name(job: TrainingJob, index: int, name: str) -> str:
    """Name in the whole model: the second copy of tied embeddings has the embedding's name."""
    return "embedding.tokens.weight" if job.is_copy(index, name) else name


def make_states(job: TrainingJob) -> None:
    """Create optimizer states, as before the first step, for every trained parameter."""
    trained = (p for _, stage in job.stages for p in stage.parameters() if p.requires_grad)
    for parameter in map(job.owned, trained):
        job.optimizer.state[parameter].update(first_states(job.plan.job.optimizer, parameter))


def first_states(optimizer: str, parameter: Tensor) -> dict[str, Tensor]:
    """States of optimizer `optimizer` for `parameter`, as before the first step."""
    return {
        # The fused optimizer needs the step count on the parameter's device.
        name: torch.zeros((), device=parameter.device) if name == "step" else torch.zeros_like(parameter)
        for name in STATES[optimizer]
    }


def state_of(job: TrainingJob) -> dict[str, Tensor]:
    """Parameters and optimizer states of this rank by their names in the whole model; not copies, so that
    loading fills them."""
    state: dict[str, Tensor] = {}
    for index, name, parameter in named(job):
        whole = whole_name(job, index, name)
        state[f"model.{whole}"] = parameter.data
        for key, value in job.optimizer.state[parameter].items():
            if value is not None:
                state[f"optimizer.{whole}.{key}"] = value
    return state


# Initial values

ParameterValue = Callable[[str, torch.Size], Tensor]
"""Value of a parameter by its name in the whole model and its full shape, in fp32 on the host."""


def fill_parameters(job: TrainingJob | UnevenTrainingJob, whole: ParameterValue) -> None:
    """Set every parameter of `job` to its part of the value from `whole`. Call it on every rank."""
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
    """Write the values into the ranks' optimizer shards, and from there into the weights."""
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
    """The values at `region` of a full tensor."""
    bounds = tuple((0, size) for size in value.shape) + ((0, 1),) * (DIMS - value.dim())
    return LocalRegion(bounds, {"": value}).view("", region)


# Uneven plans

MODEL = "model"

StateDict = dict[str, Tensor | TensorChunks]
"""State by name: parameters as `model.NAME`, optimizer states as `optimizer.NAME.KIND`. Sharded tensors are
chunks of the full tensor; each step count is a scalar."""


def uneven_state_copies(job: UnevenTrainingJob) -> StateDict:
    """Copies of the state that this rank saves. The ranks together save every element of the parameters and
    optimizer states once. Call it on every rank, between steps."""
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
    """Set the state of `job` from the targets of `uneven_load_targets` after a checkpoint has filled them.
    Call it on every rank."""
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
    """Load targets for all state that this rank holds, as a state dict, and the same by kind and region."""
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
    """Collects regions of full tensors with their values."""

    def __init__(self, job: UnevenTrainingJob) -> None:
        self._names = job.names
        self._found: dict[str, tuple[nn.Parameter, dict[tuple[int, ...], Tensor]]] = {}

    def add(self, kind: str, parameter: nn.Parameter, region: Region, values: Tensor) -> None:
        """Add the flat `values` of a region of the parameter itself, or of an optimizer state of it."""
        _, chunks = self._found.setdefault(_key(kind, self._names[parameter]), (parameter, {}))
        bounds = region[: parameter.dim()]
        chunks[tuple(start for start, _ in bounds)] = values.view([stop - start for start, stop in bounds])

    def by_name(self) -> StateDict:
        return {
            name: TensorChunks(parameter.shape, chunks) for name, (parameter, chunks) in self._found.items()
        }


def _shares(job: UnevenTrainingJob) -> dict[str, list[Tensor]]:
    """This rank's optimizer shards of the weights and of each optimizer state."""
    shares: dict[str, list[Tensor]] = {MODEL: [own.detach() for own, _ in job.owned.parameters]}
    for kind in STATES[job.plan.job.optimizer]:
        if kind != "step":
            shares[kind] = [state[kind] for state in _states(job)]
    return shares


def _states(job: UnevenTrainingJob) -> Iterator[dict[str, Tensor]]:
    if job.optimizer is not None:
        yield from (job.optimizer.state[own] for own, _ in job.owned.parameters)


def _steps(job: UnevenTrainingJob) -> dict[str, Tensor]:
    """Optimizer steps taken, equal for all parameters, by the name of each parameter on this rank."""
    step = next((state["step"] for state in _states(job) if "step" in state), None)
    return {} if step is None else {_key("step", name): step for name in job.names.values()}


def _key(kind: str, name: str) -> str:
    return f"model.{name}" if kind == MODEL else f"optimizer.{name}.{kind}"


# Operator graphs

STEP = "step"


def graph_state_copies(job: GraphTrainingJob) -> StateDict:
    """Copies of the state that this rank saves. The ranks together save every element of the parameters and
    optimizer states once. Call it between steps."""
    saved: StateDict = {}
    for param in job.store.values():
        for name, kind, own in _named_states(job, param):
            if kind == STEP:
                saved[name] = own.to("cpu", copy=True)
            elif param.is_first_copy:
                saved[name] = _tensor_chunks(param, own.to("cpu", copy=True))
    return saved


def graph_load_targets(job: GraphTrainingJob) -> StateDict:
    """Load targets for all state that this rank holds, including replicas: the job's own tensors."""
    return {
        name: own if kind == STEP else _tensor_chunks(param, own)
        for param in job.store.values()
        for name, kind, own in _named_states(job, param)
    }


def _named_states(job: GraphTrainingJob, param: ShardedParameter) -> Iterator[tuple[str, str, Tensor]]:
    """The parameter that the optimizer updates and its states, each with name and kind. Creates the states
    before the first step."""
    yield f"model.{param.name}", "model", param.owned.detach()
    states = job.optimizer.state[param.owned]
    if not states:
        states.update(first_states(job.plan.job.optimizer, param.owned))
    for kind, own in states.items():
        yield f"optimizer.{param.name}.{kind}", kind, own


def _tensor_chunks(param: ShardedParameter, own: Tensor) -> TensorChunks:
    return TensorChunks(param.stored.spec.shape, param.chunks(own))
