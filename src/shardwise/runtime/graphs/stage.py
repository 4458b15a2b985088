"""One stage of a pipeline on this rank: passes of micro-batches and messages to its neighbours, in the order
of the schedule's table. A graph without stages is one stage, whose one micro-batch is the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed
from torch.profiler import record_function

from shardwise.errors import ConfigError
from shardwise.runtime.graphs.bring import TensorSpec, redistribute_local_tensor
from shardwise.runtime.graphs.forms import MeshPlacements, box_of, extents
from shardwise.runtime.graphs.interpreter import Interpreter, seed_gradient
from shardwise.runtime.graphs.store import reduce_gradients
from shardwise.schedule import Action, ActionKind, Communication, CommunicationKind

ScheduleStep = Action | Communication

Data = Mapping[str, Tensor]
"""What the graph reads, by name."""

EARLIER, LATER = -1, 1
"""The stage before and the one behind, in stages."""


class GraphStage:
    """The stage that `interpreter` computes, one of as many in a row as its grid has meshes.

    Losses of micro-batches count `weight` each. What comes and goes is in `dtype`, on the `device`; gradients
    go back to the stage before where there are parameters before this one (`trains_before`).
    """

    def __init__(
        self, interpreter: Interpreter, *, weight: float, dtype: torch.dtype, trains_before: bool, device: str
    ) -> None:
        self.interpreter, self.grid = interpreter, interpreter.grid
        self.weight, self.dtype, self.device = weight, dtype, device
        self.trains_before = trains_before
        self.trains = trains_before or bool(interpreter.store)
        self.is_first, self.is_last = self.grid.mesh == 0, self.grid.mesh == self.grid.meshes - 1

    def run(self, row: Sequence[ScheduleStep], data: Sequence[Data]) -> Tensor:
        """All actions of `row` on micro-batches, each with its `data`: gradients are then in the parameters.
        The loss of them all, whole on every rank of the last stage; zero elsewhere."""
        passes = _Passes(self, data)
        for step in row:
            with record_function(f"PP:{step}"):  # as profiles tell it of PyTorch's own pipelines
                passes.act(step)
        passes.finish()
        if not self.is_last:
            return torch.zeros((), device=self.device)
        loss = torch.stack(passes.losses).sum()
        return redistribute_local_tensor(
            self.grid, loss, (), self.interpreter.end.value, self.interpreter.whole
        )

    @property
    def begin(self) -> TensorSpec:
        """How what the first block reads of the stage before lies."""
        first = self.interpreter.program.sections[0]
        return first.specs[first.block.entry or ""]

    def buffer(self, shape: Sequence[int], placements: MeshPlacements) -> Tensor:
        """Room for this rank's part of a tensor of `shape` that a like rank sends."""
        box = box_of(shape, self.grid.counts, placements, self.grid.here)
        return torch.empty(extents(box), dtype=self.dtype, device=self.device)


class _Passes:
    """A step of a stage in the making, by micro-batch: what waits for its backward pass, gradients of what
    the stage read, and what is on its way."""

    def __init__(self, stage: GraphStage, data: Sequence[Data]) -> None:
        self.stage, self.data = stage, data
        self.entries: dict[int, Tensor] = {}
        self.results: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.losses: list[Tensor] = []
        self.in_flight: dict[tuple[CommunicationKind, int], tuple[distributed.Work | None, Tensor]] = {}

    def act(self, step: ScheduleStep) -> None:
        """One action of the table."""
        if step.microbatch is None:  # the last backward pass of the stage is behind it
            interpreter = self.stage.interpreter
            for block in interpreter.parameter_groups:
                reduce_gradients(interpreter.grid, block)
            return
        {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            CommunicationKind.SEND_F: self._send_result,
            CommunicationKind.RECV_F: self._receive_entry,
            CommunicationKind.SEND_B: self._send_gradient,
            CommunicationKind.RECV_B: self._receive_gradient,
        }[step.kind](step.microbatch)

    def _forward(self, number: int) -> None:
        stage = self.stage
        entry = None
        if not stage.is_first:
            entry = self._passed(CommunicationKind.RECV_F, number).requires_grad_(stage.trains_before)
            self.entries[number] = entry
        result = stage.interpreter.run(self.data[number], entry)
        self.results[number] = result
        if stage.is_last:
            self.losses.append(stage.weight * result.detach())

    def _backward(self, number: int) -> None:
        stage, result = self.stage, self.results.pop(number)
        gradient = self._gradient(number, result) if stage.trains else None
        if gradient is not None and result.requires_grad:
            result.backward(gradient)
        entry = self.entries.pop(number, None)
        if entry is not None and stage.trains_before:
            self.gradients[number] = torch.zeros_like(entry) if entry.grad is None else entry.grad

    def _gradient(self, number: int, result: Tensor) -> Tensor:
        """The gradient of a result: of the loss, or what the stage behind says."""
        stage = self.stage
        if stage.is_last:
            return stage.weight * seed_gradient(stage.grid, stage.interpreter.end, result)
        gradient = self._passed(CommunicationKind.RECV_B, number)
        self._passed(CommunicationKind.SEND_F, number)  # long there, for this is the answer
        return gradient.to(result.dtype)

    def _send_result(self, number: int) -> None:
        result = self.results[number]
        if not result.is_floating_point():
            block = self.stage.interpreter.program.sections[-1].block
            raise ConfigError(
                "hands whole numbers to the next stage", key=f"graph.{block.name}", found=str(result.dtype),
                allowed="numbers with fractions",
            )  # fmt: skip
        self._send(CommunicationKind.SEND_F, number, result.detach().to(self.stage.dtype), LATER)

    def _send_gradient(self, number: int) -> None:
        if self.stage.trains_before:
            for kind, earlier in list(self.in_flight):
                if kind is CommunicationKind.SEND_B:
                    self._passed(kind, earlier)
            self._send(CommunicationKind.SEND_B, number, self.gradients.pop(number), EARLIER)

    def _receive_entry(self, number: int) -> None:
        begin = self.stage.begin
        buffer = self.stage.buffer(begin.shape, begin.value)
        self._receive(CommunicationKind.RECV_F, number, buffer, EARLIER)

    def _receive_gradient(self, number: int) -> None:
        if self.stage.trains:
            end = self.stage.interpreter.end
            buffer = self.stage.buffer(end.shape, end.gradient)
            self._receive(CommunicationKind.RECV_B, number, buffer, LATER)

    def _send(self, kind: CommunicationKind, number: int, tensor: Tensor, stages: int) -> None:
        tensor = tensor.contiguous()
        self.in_flight[kind, number] = distributed.isend(tensor, self.stage.grid.peer_rank(stages)), tensor

    def _receive(self, kind: CommunicationKind, number: int, buffer: Tensor, stages: int) -> None:
        self.in_flight[kind, number] = distributed.irecv(buffer, self.stage.grid.peer_rank(stages)), buffer

    def _passed(self, kind: CommunicationKind, number: int) -> Tensor:
        """A message, once it is there."""
        work, tensor = self.in_flight.pop((kind, number))
        if work is not None:
            work.wait()
        return tensor

    def finish(self) -> None:
        """Wait for what is still on its way."""
        for kind, number in list(self.in_flight):
            self._passed(kind, number)
