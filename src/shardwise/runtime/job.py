"""A training job that runs as its plan says: `divided_job` divides a module, `TrainingJob.step` takes one
step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from shardwise.errors import ConfigError
from shardwise.model import Model
from shardwise.plan import Plan
from shardwise.runtime.accumulate import GradientAccumulation
from shardwise.runtime.data import check_batch
from shardwise.runtime.divide import engine_of, stages_of, tie_of
from shardwise.runtime.dtypes import COMPUTE
from shardwise.runtime.gradients import TiedWeights, clip, reduce_partial_gradients, square_sum
from shardwise.runtime.host_states import OFFLOADS_STATES, OptimizerOffload
from shardwise.runtime.mesh import RankCoordinates, coordinates_of, device_mesh
from shardwise.runtime.modules import ModelStage
from shardwise.runtime.optimizer import optimizer_of
from shardwise.runtime.pipeline import PipelineRunner
from shardwise.runtime.result import StepResult
from shardwise.runtime.trace import OPTIMIZER


class TrainingJob:
    """A module, its optimizer and its step, divided over the ranks of the running processes."""

    def __init__(
        self,
        *,
        plan: Plan,
        place: RankCoordinates,
        mesh: DeviceMesh,
        stages: tuple[tuple[int, ModelStage], ...],
        engine: GradientAccumulation | PipelineRunner,
        tie: TiedWeights | None,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        host: OptimizerOffload | None,
    ) -> None:
        """`optimizer` has the parameters of `host` where that keeps them."""
        self.plan = plan
        self.place = place
        self.mesh = mesh
        self.stages = stages
        self.optimizer = optimizer
        self._engine = engine
        self._tie = tie
        self.host = host
        self.max_norm = max_norm

    @property
    def executed(self) -> tuple[str, ...]:
        """The actions that a step runs on this rank, in order."""
        return self._engine.executed

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, tied copies included."""
        return [parameter for _, stage in self.stages for parameter in stage.parameters()]

    def step(self, batch: Tensor) -> StepResult:
        """One optimizer step on `batch`: token ids of shape (global_batch_size, seq_len + 1), the same on
        every rank."""
        result = self.backward(batch)
        self.update()
        return result

    def backward(self, batch: Tensor) -> StepResult:
        """The part of `step` before the optimizer: loss, and clipped gradients in the parameters."""
        tokens, targets = self._local_batch(batch)
        replicas = [stage.replicas for _, stage in self.stages if stage.replicas is not None]
        for each in replicas:
            each.start()
        loss = self._engine.run(tokens, targets)
        for each in replicas:
            each.finish()
        reduce_partial_gradients(self.parameters)
        if self._tie is not None:
            self._tie.add_up()
        strategy = self.plan.best.strategy
        ranks = strategy.tp * strategy.cp * strategy.dp
        squares = square_sum(self._norm_parameters(), ranks, device=self.mesh.device_type)
        return clip(loss / strategy.tp, squares, self.parameters, self.max_norm)

    def update(self) -> None:
        """The part of `step` behind `backward`: the optimizer takes the gradients, and they are gone."""
        with record_function(OPTIMIZER):
            if self.host is not None:
                self.host.step(self.optimizer)
            else:
                self.optimizer.step()
        self.optimizer.zero_grad()

    def owned(self, parameter: nn.Parameter) -> nn.Parameter:
        """What the optimizer has of `parameter`: itself, or in its place the host's."""
        return parameter if self.host is None else self.host.parameters[parameter]

    def sync_weights(self) -> None:
        """Have what ranks compute with be what the optimizer has now, after that was written to."""
        if self.host is not None:
            self.host.sync_weights()

    def _norm_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that belong to the gradient norm: of tied copies the first."""
        for index, stage in self.stages:
            for name, parameter in stage.named_parameters():
                if not self.is_copy(index, name):
                    yield parameter

    def is_copy(self, index: int, name: str) -> bool:
        """Whether parameter `name` of stage `index` is the second copy of a tied weight."""
        is_last = index == self.plan.schedule.stages - 1
        return self._tie is not None and is_last and name == "head.output.weight"

    def _local_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's tokens and targets, each (microbatches, rows, tokens): replica d takes the d-th part of
        the batch, its microbatches one after the other; of a sequence its context rank's places."""
        strategy, job = self.plan.best.strategy, self.plan.job
        check_batch(batch, job)
        rows = job.global_batch_size // strategy.dp
        own = batch[self.place.dp * rows : (self.place.dp + 1) * rows]
        own = own.unflatten(0, (-1, strategy.micro_batch_size)).to(self.mesh.device_type)
        places = self.stages[0][1].places(self.plan.job.seq_len)
        return own[..., places].contiguous(), own[..., places + 1].contiguous()


def divided_job(
    module: ModelStage, plan: Plan, *, device_type: str, lr: float, max_norm: float
) -> TrainingJob:
    """`module`, a whole reference module, divided as `plan` says over the running processes, of which there
    are as many as it has devices; each computes on its device of this type."""
    strategy = plan.best.strategy
    place = coordinates_of(strategy, distributed.get_rank())
    mesh = device_mesh(strategy, device_type)
    stages = stages_of(module, plan, place, mesh)
    parameters = [parameter for _, stage in stages for parameter in stage.parameters()]
    host = None
    if strategy.offload in OFFLOADS_STATES:
        host = OptimizerOffload(
            [stage for _, stage in stages], device_type=device_type, dtype=COMPUTE[plan.job.dtype],
            keeps_shards=strategy.param_shard > 1,
        )  # fmt: skip
        parameters = [host.parameters[parameter] for parameter in parameters]
    return TrainingJob(
        plan=plan,
        place=place,
        mesh=mesh,
        stages=stages,
        engine=engine_of(stages, plan, place, mesh),
        tie=tie_of(stages, plan),
        optimizer=optimizer_of(plan.job.optimizer, parameters, lr=lr),
        max_norm=max_norm,
        host=host,
    )


def checked_stage(module: nn.Module, model: Model) -> ModelStage:
    """`module` where it is the whole of `model`, which is the plan's."""
    if not isinstance(module, ModelStage) or module.embedding is None or module.head is None:
        raise ConfigError(
            "is not a whole reference module",
            key="module",
            found=type(module).__name__,
            allowed="reference_module(plan.model)",
        )
    if module.model != model:
        raise ConfigError(
            "is not the plan's model", key="module", found=module.model.name, allowed=model.name
        )
    return module
