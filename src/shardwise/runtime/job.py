"""A training job that runs as its plan says: `parallelize` divides a module, `Job.step` takes one step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import record_function

from shardwise.errors import ConfigError
from shardwise.plan import Plan, read_plan
from shardwise.runtime.accumulate import Accumulation
from shardwise.runtime.capability import check_runnable
from shardwise.runtime.divide import engine_of, stages_of, tie_of
from shardwise.runtime.gradients import Tie, scale, settle, square_sum
from shardwise.runtime.loss import loss_context
from shardwise.runtime.mesh import Place, device_mesh, place_of
from shardwise.runtime.modules import Stage
from shardwise.runtime.optimizer import optimizer_of
from shardwise.runtime.pipeline import Pipeline
from shardwise.runtime.trace import OPTIMIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Mean loss per token over the whole batch, and the norm of its gradient before clipping."""

    loss: float
    gradient_norm: float


class Job:
    """A module, its optimizer and its step, divided over the ranks of the running processes."""

    def __init__(
        self,
        *,
        plan: Plan,
        place: Place,
        mesh: DeviceMesh,
        stages: tuple[tuple[int, Stage], ...],
        engine: Accumulation | Pipeline,
        tie: Tie | None,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
    ) -> None:
        self.plan = plan
        self.place = place
        self.mesh = mesh
        self.stages = stages
        self.optimizer = optimizer
        self._engine = engine
        self._tie = tie
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
        tokens, targets = self._own(batch)
        with loss_context(self._tensor_mesh):
            loss = self._engine.run(tokens, targets)
        settle(self.parameters)
        if self._tie is not None:
            self._tie.add_up()
        strategy = self.plan.best.strategy
        ranks = strategy.tp * strategy.cp * strategy.dp
        sums = torch.stack((loss.cpu() / strategy.tp, square_sum(self._counted(), ranks)))
        distributed.all_reduce(sums)
        norm = float(sums[1].sqrt())
        if norm > self.max_norm:
            scale(self.parameters, torch.tensor(self.max_norm / norm))
        return StepResult(loss=float(sums[0]), gradient_norm=norm)

    def update(self) -> None:
        """The part of `step` behind `backward`: the optimizer takes the gradients, and they are gone."""
        with record_function(OPTIMIZER):
            self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def _tensor_mesh(self) -> DeviceMesh | None:
        return self.mesh["tp"] if self.plan.best.strategy.tp > 1 else None

    def _counted(self) -> Iterable[nn.Parameter]:
        """Parameters that belong to the gradient norm: of tied copies the first."""
        for index, stage in self.stages:
            for name, parameter in stage.named_parameters():
                if not self.is_copy(index, name):
                    yield parameter

    def is_copy(self, index: int, name: str) -> bool:
        """Whether parameter `name` of stage `index` is the second copy of a tied weight."""
        is_last = index == self.plan.schedule.stages - 1
        return self._tie is not None and is_last and name == "head.output.weight"

    def _own(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's tokens and targets, each (microbatches, rows, tokens): replica d takes the d-th part of
        the batch, its microbatches one after the other; of a sequence its context rank's places."""
        strategy, job = self.plan.best.strategy, self.plan.job
        if tuple(batch.shape) != (job.global_batch_size, job.seq_len + 1):
            raise ConfigError(
                "is not of the plan's shape", key="batch", found=str(tuple(batch.shape)),
                allowed=f"({job.global_batch_size}, {job.seq_len + 1})",
            )  # fmt: skip
        rows = job.global_batch_size // strategy.dp
        own = batch[self.place.dp * rows : (self.place.dp + 1) * rows]
        own = own.unflatten(0, (-1, strategy.micro_batch_size)).to(self.mesh.device_type)
        places = self.stages[0][1].places(self.plan.job.seq_len)
        return own[..., places].contiguous(), own[..., places + 1].contiguous()


def parallelize(
    module: nn.Module, plan: Plan | str | os.PathLike[str], *, lr: float = 1e-3, max_norm: float = 1.0
) -> Job:
    """`module` divided as `plan` (or the plan file at this path) says, over the running processes.

    Call it on every rank of a process group with as many ranks as the plan has devices; where torchrun
    started the process and there is no group yet, one is made. `module` is the whole model, alike on every
    rank (`reference_module`). Raises ConfigError where the plan cannot be run here.
    """
    plan = plan if isinstance(plan, Plan) else read_plan(os.fspath(plan))
    check_runnable(plan)
    module = _checked(module, plan)
    if not distributed.is_initialized():
        _join_processes()
    strategy = plan.best.strategy
    devices = strategy.tp * strategy.cp * strategy.pp * strategy.dp
    if distributed.get_world_size() != devices:
        raise ConfigError(
            "is for another number of processes than were started", key="plan",
            found=f"{devices} devices", allowed=f"{distributed.get_world_size()}",
        )  # fmt: skip
    place = place_of(strategy, distributed.get_rank())
    mesh = device_mesh(strategy, "cpu")
    stages = stages_of(module, plan, place, mesh)
    return Job(
        plan=plan,
        place=place,
        mesh=mesh,
        stages=stages,
        engine=engine_of(stages, plan, place, mesh),
        tie=tie_of(stages, plan),
        optimizer=optimizer_of(plan.job.optimizer, [stage for _, stage in stages], lr=lr),
        max_norm=max_norm,
    )


def _join_processes() -> None:
    """Make the process group that torchrun's variables describe."""
    try:
        distributed.init_process_group("gloo")
    except (distributed.DistNetworkError, distributed.DistStoreError, ValueError) as error:
        host, port = (os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        why = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"processes cannot meet there: {why}", key="MASTER_PORT", found=f"{host}:{port}",
            allowed="a free port that all of them reach",
        ) from None  # fmt: skip


def _checked(module: nn.Module, plan: Plan) -> Stage:
    """`module` where it is the whole of the plan's model."""
    if not isinstance(module, Stage) or module.embedding is None or module.head is None:
        raise ConfigError(
            "is not a whole reference module",
            key="module",
            found=type(module).__name__,
            allowed="reference_module(plan.model)",
        )
    if module.model != plan.model:
        raise ConfigError(
            "is not the plan's model", key="module", found=module.model.name, allowed=plan.model.name
        )
    return module
