"""The training job that runs an operator graph under its plan: `GraphTrainingJob`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.profiler import record_function

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, StagedLayout, loss_weight, samples_dim, scaled
from shardwise.plans import Plan
from shardwise.runtime.devices import COMPUTE, placed
from shardwise.runtime.gradients import StepResult
from shardwise.runtime.graphs.interpreter import GraphStage, Interpreter
from shardwise.runtime.graphs.kernels import KERNELS
from shardwise.runtime.graphs.modules import Captured, GraphModule, captured, first_readers, is_weight
from shardwise.runtime.graphs.parameters import ShardedParameter, publish, shard_parameters, square_sum
from shardwise.runtime.graphs.placements import ProcessMesh
from shardwise.runtime.graphs.program import GraphProgram, program_of
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.optimizer import optimizer_of_parameters
from shardwise.runtime.private import TensorChunks
from shardwise.runtime.profiling import NORM, OPTIMIZER
from shardwise.runtime.state_dict import MODEL, STEP, ParameterValue, StateDict, first_states, state_name
from shardwise.schedule import generate, lower


class GraphTrainingJob(TrainingJob):
    """A job of an operator graph.

    A bf16 job computes with copies of the parameters; gradients have the dtype of the parameters. With
    stages, `store` holds the parameters of this rank's stage only.
    """

    def __init__(self, source: Captured, plan: Plan, *, device_type: str, lr: float, max_norm: float) -> None:
        super().__init__(source, plan, device_type=device_type, lr=lr, max_norm=max_norm)
        self._data = source.data
        self._dtype = None if plan.job.dtype == "fp32" else COMPUTE[plan.job.dtype]
        self.grid = ProcessMesh(plan.mesh.ranks, meshes=plan.stages)
        of_one = scaled(plan.graph, plan.graph.batch // plan.microbatches)
        program = program_of(of_one, plan.operators, self.grid, source.settings)
        self._stages: list[GraphProgram] = [program.part(first, end) for first, end in _spans(plan)]
        own = self._stages[self.grid.mesh]
        here = {name: placed(source.values[name], device_type) for name in own.parameters}
        self.store: dict[str, ShardedParameter] = shard_parameters(self.grid, own, here, self._dtype)
        dtypes = [source.values[name].dtype for name in program.parameters]
        self._stage = GraphStage(
            Interpreter(own, self.grid, self.store, self._placed),
            weight=loss_weight(plan.graph, plan.microbatches),
            dtype=self._dtype or next(iter(dtypes), torch.float32),
            trains_before=any(part.parameters for part in self._stages[: self.grid.mesh]),
            device=device_type,
        )
        schedule = plan.operators.schedule if isinstance(plan.operators, StagedLayout) else "1f1b"
        table = generate(schedule, pp=plan.stages, microbatches=plan.microbatches, vpp=1)
        self._row = lower(table, unshard=False).ranks[self.grid.mesh]
        owned = [(param.owned, param.name in source.matrices) for param in self.store.values()]
        self.optimizer = optimizer_of_parameters(plan.job.optimizer, owned, lr=lr)

    @staticmethod
    def source_of(
        module: nn.Module, plan: Plan, inputs: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> Captured:
        """`module` as the plan's graph has it; a `graph_module` needs no `inputs`. ConfigError also where
        this runtime does not run one of the operators."""
        _check_kinds(plan.graph)
        if not isinstance(module, GraphModule):
            if inputs is None:
                raise ConfigError(
                    "is needed to capture the module", key="inputs", found="nothing",
                    allowed="the arguments of its forward for the whole batch",
                )  # fmt: skip
            return captured(module, inputs, plan.graph)
        if module.graph != plan.graph:
            raise ConfigError(
                "is not the plan's graph", key="module", found=module.graph.name, allowed=plan.graph.name
            )
        readers = first_readers(plan.graph)
        return Captured(
            settings={},
            values={name: parameter.detach() for name, parameter in module.named_parameters()},
            matrices=frozenset(name for name, (op, slot) in readers.items() if is_weight(op, slot)),
            data=_by_name,
        )

    def backward(self, batch: Any) -> StepResult:
        """As in `TrainingJob`; `batch` has the arguments of the module's forward, or the graph's inputs by
        name for a `graph_module`."""
        shares = self._microbatches(self._checked(self._data(batch)))
        for param in self.store.values():
            param.reset_gradient()
        value = self._stage.run(self._row, shares).double()
        if self.plan.stages > 1:
            distributed.broadcast(value, src=self._first_rank_of(self.plan.stages - 1))
        with record_function(NORM):
            squares = square_sum(self.store.values(), self.device_type)
        if self.plan.devices > 1:
            distributed.all_reduce(squares)
        norm = float(squares.sqrt())
        if norm > self.max_norm:
            with record_function(NORM):
                for param in self.store.values():
                    if param.owned.grad is not None:
                        param.owned.grad.mul_(self.max_norm / norm)
        return StepResult(loss=float(value), gradient_norm=norm)

    def update(self) -> None:
        with record_function(OPTIMIZER):
            self.optimizer.step()
            self.sync_weights()
        self.optimizer.zero_grad()

    def sync_weights(self) -> None:
        """Copy the optimizer's weights to those that ranks compute with, after the former were written to."""
        for block in self._stage.interpreter.parameter_groups:
            publish(self.grid, block)

    def fill(self, whole: ParameterValue) -> None:
        with torch.no_grad():
            for param in self.store.values():
                value = whole(param.name, torch.Size(param.stored.spec.shape))
                for start, box in param.chunks(param.owned.detach()).items():
                    sizes = zip(start, box.shape, strict=True)
                    box.copy_(value[tuple(slice(first, first + size) for first, size in sizes)])
        self.sync_weights()

    def saved_state(self) -> StateDict:
        saved: StateDict = {}
        for param in self.store.values():
            for kind, own in self._states_of(param):
                if kind == STEP or param.is_first_copy:
                    saved |= _state_part(param, kind, own.to("cpu", copy=True))
        return saved

    def load(self, read: Callable[[StateDict], None]) -> None:
        read(self.load_targets())
        self.sync_weights()

    def load_targets(self) -> StateDict:
        """All state that this rank holds, including replicas: the job's own tensors."""
        found: StateDict = {}
        for param in self.store.values():
            for kind, own in self._states_of(param):
                found |= _state_part(param, kind, own)
        return found

    def _states_of(self, param: ShardedParameter) -> Iterator[tuple[str, Tensor]]:
        """What the optimizer updates of a parameter, and its states, by kind. Creates the states before the
        first step."""
        yield MODEL, param.owned.detach()
        states = self.optimizer.state[param.owned]
        if not states:
            states.update(first_states(self.plan.job.optimizer, param.owned))
        yield from states.items()

    def _first_rank_of(self, stage: int) -> int:
        """The first rank of a stage."""
        return stage * self.plan.mesh.devices

    def _microbatches(self, batch: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The inputs of this rank's stage, by micro-batch.

        Inputs with several readers are copied to the compute device here; of the others, each reader copies
        its shard.
        """
        shares: list[dict[str, Tensor]] = [{} for _ in range(self.plan.microbatches)]
        for name, readers in sorted(self._stages[self.grid.mesh].data.items()):
            tensor = self._placed(batch[name]) if readers > 1 else batch[name]
            for share, part in zip(shares, self._split_microbatches(name, tensor), strict=True):
                share[name] = part
        return shares

    def _placed(self, data: Tensor) -> Tensor:
        """`data` on the compute device; floating-point tensors in the compute dtype."""
        return data.to(self.device_type, self._dtype if data.is_floating_point() else None)

    def _split_microbatches(self, name: str, tensor: Tensor) -> Sequence[Tensor]:
        """An input of the graph by micro-batch: its samples, or the whole input if no dim grows with the
        batch."""
        count = self.plan.microbatches
        dim = samples_dim(self.plan.graph, name)
        if count == 1 or dim is None:
            return [tensor] * count
        return tensor.reshape(self.plan.graph.inputs[name]).chunk(count, dim)

    def _checked(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for name, shape in self.plan.graph.inputs.items():
            found = batch.get(name)
            if found is None or found.numel() != prod(shape):
                raise ConfigError(
                    "does not have the plan's shape", key=f"batch.{name}",
                    found="nothing" if found is None else str(tuple(found.shape)), allowed=str(tuple(shape)),
                )  # fmt: skip
        return batch


def _spans(plan: Plan) -> Sequence[tuple[int, int]]:
    """The first block of each stage, and the block after its last."""
    layout = plan.operators
    return layout.spans if isinstance(layout, StagedLayout) else ((0, len(layout.blocks)),)


def _by_name(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The inputs of a graph that are given by name."""
    return batch


def _state_part(param: ShardedParameter, kind: str, own: Tensor) -> StateDict:
    """A state of a parameter by its name in a state dict."""
    chunks = TensorChunks(param.stored.spec.shape, param.chunks(own)) if kind != STEP else own
    return {state_name(kind, param.name): chunks}


def _check_kinds(graph: OpGraph) -> None:
    """ConfigError with the name of the first operator whose kind this runtime does not run."""
    for block in graph.blocks:
        for op in block.operators:
            if op.kind not in KERNELS:
                raise ConfigError(
                    f"of operator {op.name} is not run by this runtime", key=f"graph.{block.name}.kind",
                    found=op.kind, allowed=", ".join(KERNELS),
                )  # fmt: skip
