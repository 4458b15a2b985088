"""A training job under an uneven plan: pipelines side by side that differ in stages, tensor degree, share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardwise.plan import UnevenFile
from shardwise.runtime.accumulate import GradientAccumulation
from shardwise.runtime.data import check_batch
from shardwise.runtime.dtypes import COMPUTE
from shardwise.runtime.gradients import clip, reduce_partial_gradients
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.optimizer import optimizer_of_parameters
from shardwise.runtime.owned import OptimizerShards
from shardwise.runtime.pipeline import PipelineRunner
from shardwise.runtime.result import StepResult
from shardwise.runtime.trace import OPTIMIZER
from shardwise.runtime.uneven_stages import (
    UnevenCoordinates,
    engine_of,
    local_samples,
    own_coordinates,
    stage_of,
    tensor_mesh,
    tensor_ranks_by_rank,
    to_compute_dtype,
)

TABLE = "embedding.tokens.weight"


class UnevenTrainingJob:
    """A module, its optimizer and its step, divided over the running processes as an uneven plan says.

    A rank has one stage of one pipeline, or none where the plan leaves it idle. Optimizer states (ZeRO-1),
    and where the computation is narrower the weights in fp32, are divided over all ranks that hold the same
    part of a weight. `names` are those of the rank's parameters in the whole model.
    """

    def __init__(
        self,
        *,
        plan: UnevenFile,
        coordinates: UnevenCoordinates | None,
        stage: ModelStage | None,
        engine: GradientAccumulation | PipelineRunner | None,
        owned: OptimizerShards,
        optimizer: torch.optim.Optimizer | None,
        max_norm: float,
        names: Mapping[nn.Parameter, str],
        device_type: str,
    ) -> None:
        self.plan = plan
        self.device_type = device_type
        self.coordinates = coordinates
        self.stage = stage
        self.owned = owned
        self.optimizer = optimizer
        self.max_norm = max_norm
        self.names = names
        self._engine = engine

    @property
    def executed(self) -> tuple[str, ...]:
        """The actions that a step runs on this rank, in order."""
        return () if self._engine is None else self._engine.executed

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, tied copies included."""
        return [] if self.stage is None else list(self.stage.parameters())

    def step(self, batch: Tensor) -> StepResult:
        """One optimizer step on `batch`: token ids of shape (global_batch_size, seq_len + 1), the same on
        every rank."""
        result = self.backward(batch)
        self.update()
        return result

    def backward(self, batch: Tensor) -> StepResult:
        """The part of `step` before the optimizer: loss, and clipped gradients in `owned.parameters`."""
        check_batch(batch, self.plan.job)
        loss = torch.zeros((), device=self.device_type)
        if self.coordinates is not None and self._engine is not None:
            own = local_samples(self.plan, self.coordinates, batch).to(self.device_type)
            loss = self._engine.run(own[..., :-1].contiguous(), own[..., 1:].contiguous())
            stages = self.plan.best.layout.pipelines[self.coordinates.pipeline].stages
            loss = loss / stages[self.coordinates.stage].tp  # all tensor ranks have it
        reduce_partial_gradients(self.parameters)
        self.owned.reduce()
        shares = [own for own, _ in self.owned.parameters]
        squares = torch.zeros((), device=self.device_type)
        for own in shares:
            if own.grad is not None:
                squares += own.grad.square().sum()
        return clip(loss, squares, shares, self.max_norm)

    def update(self) -> None:
        """The part of `step` behind `backward`: the optimizer takes the gradients, and they are gone."""
        if self.optimizer is not None:
            with record_function(OPTIMIZER):
                self.optimizer.step()
            self.optimizer.zero_grad()
        self.owned.sync_weights()


def uneven_job(
    module: ModelStage, plan: UnevenFile, *, device_type: str, lr: float, max_norm: float
) -> UnevenTrainingJob:
    """`module`, a whole reference module, divided as `plan` says over the running processes, of which there
    are as many as its cluster has devices; each computes on its device of this type."""
    names = [name for name, _ in module.named_parameters()]
    coordinates = own_coordinates(plan)
    mesh = tensor_mesh(plan, device_type)
    stage = None if coordinates is None else stage_of(module, plan, coordinates, mesh, device_type)
    engine = None if coordinates is None or stage is None else engine_of(stage, plan, coordinates, mesh)
    named = [] if stage is None else [(_whole_name(name, names), p) for name, p in stage.named_parameters()]
    owned = OptimizerShards(named, names, tensor_ranks_by_rank(plan))
    if stage is not None and plan.job.dtype != "fp32":
        to_compute_dtype(stage, COMPUTE[plan.job.dtype])
    optimizer = None
    if owned.parameters:
        optimizer = optimizer_of_parameters(plan.job.optimizer, owned.parameters, lr=lr)
    return UnevenTrainingJob(
        plan=plan, coordinates=coordinates, stage=stage, engine=engine, owned=owned, optimizer=optimizer,
        max_norm=max_norm,
        names={parameter: name for name, parameter in named}, device_type=device_type,
    )  # fmt: skip


def _whole_name(name: str, names: list[str]) -> str:
    """The name in the whole model: the output projection of tied ends is the embedding."""
    return name if name in names else TABLE
