"""A training job that runs an operator graph as its plan lays it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, distributed, nn
from torch.profiler import record_function

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph
from shardwise.plan import GraphPlan
from shardwise.runtime.dtypes import COMPUTE
from shardwise.runtime.graphs.bring import moved
from shardwise.runtime.graphs.captured import captured
from shardwise.runtime.graphs.grid import Grid
from shardwise.runtime.graphs.interpreter import Interpreter, seed_gradient
from shardwise.runtime.graphs.kernels import KERNELS
from shardwise.runtime.graphs.module import GraphModule, first_readers, is_weight
from shardwise.runtime.graphs.program import Settings, program_of
from shardwise.runtime.graphs.store import Held, held_parameters, square_sum
from shardwise.runtime.optimizer import optimizer_of_parameters
from shardwise.runtime.result import StepResult
from shardwise.runtime.trace import OPTIMIZER


class GraphJob:
    """A graph, its parameters and its optimizer, laid out over the ranks of the running processes.

    `values` are the whole parameters by their names in the graph, the same on every rank; `matrices` those
    whose weights decay. `data` makes the inputs of the graph of a batch. A job in bf16 computes with copies
    of the parameters and has their gradients in the parameters' own dtype; it lies on devices of
    `device_type`.
    """

    def __init__(
        self,
        plan: GraphPlan,
        grid: Grid,
        values: Mapping[str, Tensor],
        *,
        matrices: frozenset[str],
        settings: Mapping[int, Settings],
        data: Callable[[Any], Mapping[str, Tensor]],
        device_type: str,
        lr: float,
        max_norm: float,
    ) -> None:
        self.plan, self.grid, self._max_norm, self._data = plan, grid, max_norm, data
        self._device_type = device_type
        self._dtype = None if plan.job.dtype == "fp32" else COMPUTE[plan.job.dtype]
        program = program_of(plan.graph, plan.layout, grid, settings)
        placed = {name: value.to(device_type) for name, value in values.items()}
        self.store: dict[str, Held] = held_parameters(grid, program.parameters, placed, self._dtype)
        self._interpreter = Interpreter(program, grid, self.store)
        owned = [(held.owned, held.name in matrices) for held in self.store.values()]
        self.optimizer = optimizer_of_parameters(plan.job.optimizer, owned, lr=lr)

    def step(self, batch: Any) -> StepResult:
        """One optimizer step on `batch`, whole and the same on every rank: what the module's forward is
        called with, or for a `graph_module` the graph's inputs by name."""
        result = self.backward(batch)
        self.update()
        return result

    def backward(self, batch: Any) -> StepResult:
        """The part of `step` before the optimizer: loss, and clipped gradients in the parameters."""
        loss, lie = self._interpreter.loss(self._placed(self._checked(self._data(batch))))
        loss.backward(seed_gradient(self.grid, lie, loss))
        for held in self.store.values():
            held.settle()
        value = moved(self.grid, loss.detach(), (), lie.value, self._interpreter.whole)
        squares = square_sum(self.store.values())
        if len(self.grid.ranks) > 1:
            distributed.all_reduce(squares)
        norm = float(squares.sqrt())
        if norm > self._max_norm:
            for held in self.store.values():
                if held.owned.grad is not None:
                    held.owned.grad.mul_(self._max_norm / norm)
        return StepResult(loss=float(value), gradient_norm=norm)

    def update(self) -> None:
        """The part of `step` behind `backward`: the optimizer takes the gradients, and they are gone."""
        with record_function(OPTIMIZER):
            self.optimizer.step()
            for held in self.store.values():
                held.publish()
        self.optimizer.zero_grad()

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter, whole, by its name in the graph; every rank must ask at the same point."""
        return {name: held.whole() for name, held in self.store.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Every gradient between `backward` and `update`, whole; every rank must ask at the same point."""
        return {name: held.whole_gradient() for name, held in self.store.items()}

    def _placed(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Where the job computes, numbers in the dtype that it computes with."""
        return {
            name: tensor.to(self._device_type, self._dtype if tensor.is_floating_point() else None)
            for name, tensor in batch.items()
        }

    def _checked(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name, shape in self.plan.graph.inputs.items():
            found = batch.get(name)
            if found is None or found.numel() != prod(shape):
                raise ConfigError(
                    "is not of the plan's shape", key=f"batch.{name}",
                    found="nothing" if found is None else str(tuple(found.shape)), allowed=str(tuple(shape)),
                )  # fmt: skip
        return batch


def laid_job(
    module: nn.Module,
    plan: GraphPlan,
    inputs: Sequence[Any] | Mapping[str, Any] | None,
    *,
    device_type: str,
    lr: float,
    max_norm: float,
) -> GraphJob:
    """`module`, the whole of the plan's graph, laid out over the running processes, of which there are as
    many as the plan has devices, and which compute on devices of `device_type`. `inputs` are what its
    forward is called with, of the whole batch."""
    if not isinstance(module, GraphModule):
        return _captured_job(module, plan, inputs, device_type=device_type, lr=lr, max_norm=max_norm)
    if module.graph != plan.graph:
        raise ConfigError(
            "is not the plan's graph", key="module", found=module.graph.name, allowed=plan.graph.name
        )
    check_kinds(plan.graph)
    readers = first_readers(plan.graph)
    return GraphJob(
        plan,
        Grid(plan.mesh.ranks),
        {name: parameter.detach() for name, parameter in module.named_parameters()},
        matrices=frozenset(name for name, (op, slot) in readers.items() if is_weight(op, slot)),
        settings={},
        data=lambda batch: batch,
        device_type=device_type,
        lr=lr,
        max_norm=max_norm,
    )


def _captured_job(
    module: nn.Module,
    plan: GraphPlan,
    inputs: Sequence[Any] | Mapping[str, Any] | None,
    *,
    device_type: str,
    lr: float,
    max_norm: float,
) -> GraphJob:
    if inputs is None:
        raise ConfigError(
            "is needed to see what the module computes", key="inputs", found="nothing",
            allowed="what its forward is called with, of the whole batch",
        )  # fmt: skip
    check_kinds(plan.graph)
    own = captured(module, inputs, plan.graph)
    return GraphJob(
        plan, Grid(plan.mesh.ranks), own.values, matrices=own.matrices, settings=own.settings, data=own.data,
        device_type=device_type, lr=lr, max_norm=max_norm,
    )  # fmt: skip


def check_kinds(graph: OpGraph) -> None:
    """ConfigError by the name of the first operator of a kind that is not carried out."""
    for block in graph.blocks:
        for op in block.operators:
            if op.kind not in KERNELS:
                raise ConfigError(
                    f"of operator {op.name} is not run by this runtime", key=f"graph.{block.name}.kind",
                    found=op.kind, allowed=", ".join(KERNELS),
                )  # fmt: skip
