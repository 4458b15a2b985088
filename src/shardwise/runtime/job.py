"""`TrainingJob`: what the training loop, checkpoints and `parallelize` know of a job, whatever its plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from shardwise.plans import Plan
from shardwise.runtime.gradients import StepResult
from shardwise.runtime.modules import checked_stage
from shardwise.runtime.state_dict import ParameterValue, StateDict


class TrainingJob(ABC):
    """A network, its optimizer and its training step, distributed over the running processes under `plan`.

    Every rank has one, and calls its methods at the same points. Tensors of a rank are on its device of type
    `device_type`. Gradients are clipped to the norm `max_norm`.
    """

    @staticmethod
    def source_of(
        module: nn.Module, plan: Plan, inputs: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> Any:
        """What the constructor takes of `module`, the whole network of `plan`: a reference module, unless the
        plan is of a graph. ConfigError if it is another.

        `inputs` are the arguments of the module's forward pass for the whole batch, for modules from which
        the plan's graph was captured.
        """
        return checked_stage(module, plan.model)

    @abstractmethod
    def __init__(self, source: Any, plan: Plan, *, device_type: str, lr: float, max_norm: float) -> None:
        """Distributes `source` over the running processes, one for each device of the plan's cluster.

        Parameters on the meta device get memory on the ranks that hold them, but no values (see `fill`).
        """
        self.plan = plan
        self.device_type = device_type
        self.max_norm = max_norm

    def step(self, batch: Any) -> StepResult:
        """One optimizer step on `batch`, which is whole and the same on every rank. ConfigError if it has not
        the plan's shape."""
        result = self.backward(batch)
        self.update()
        return result

    @abstractmethod
    def backward(self, batch: Any) -> StepResult:
        """First part of `step`: the loss, and clipped gradients in what the optimizer updates."""

    @abstractmethod
    def update(self) -> None:
        """Second part of `step`: the optimizer applies the gradients and clears them."""

    @abstractmethod
    def fill(self, whole: ParameterValue) -> None:
        """Set every parameter to this rank's part of the value from `whole`."""

    @abstractmethod
    def saved_state(self) -> StateDict:
        """Copies on the host of the state that this rank saves. The ranks together save every element of the
        parameters and optimizer states."""

    @abstractmethod
    def load(self, read: Callable[[StateDict], None]) -> None:
        """Set the state of this rank from a checkpoint: `read` fills tensors, by their names there."""
