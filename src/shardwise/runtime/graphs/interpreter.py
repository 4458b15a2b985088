"""Runs an operator graph on one rank under its layout.

`Interpreter` computes the forward pass block by block, each operator on this rank's shards. `rematerialize`
keeps gathered parameters out of the saved tensors: the backward pass gathers them again.

`GraphStage` is one pipeline stage on this rank. It runs the passes of micro-batches and the send/recv with
its neighbours in the order of the schedule table. A graph without stages is one stage with one micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ConfigError
from shardwise.graph import REPLICATE
from shardwise.runtime.graphs.kernels import KERNELS
from shardwise.runtime.graphs.parameters import ShardedParameter, reduce_gradients
from shardwise.runtime.graphs.placements import (
    MeshPlacements,
    ProcessMesh,
    box_of,
    extents,
    replicated_placements,
)
from shardwise.runtime.graphs.program import GraphProgram, OperatorStep, Section
from shardwise.runtime.graphs.redistribute import TensorSpec, redistribute, redistribute_local_tensor
from shardwise.runtime.private import saving_hooks
from shardwise.runtime.profiling import BLOCK, GATHERS, OPERATOR, profiled_range
from shardwise.schedule import Action, ActionKind, Communication, CommunicationKind

# Rematerialization of gathered parameters

Remake = Callable[[], Tensor]
"""Makes a tensor once more, with the same values."""


class _Rematerialized:
    """A tensor that is made at its first read and freed after as many reads as it was saved."""

    def __init__(self, make: Remake) -> None:
        self._make, self._uses_left = make, 0
        self._made: Tensor | None = None

    def keep(self) -> None:
        self._uses_left += 1

    def read(self) -> Tensor:
        made = self._make() if self._made is None else self._made
        self._uses_left -= 1
        self._made = made if self._uses_left > 0 else None
        return made


@dataclass(frozen=True, slots=True)
class _View:
    """A view of a tensor that is made later."""

    of: _Rematerialized
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


@contextmanager
def rematerialize(tensors: Sequence[tuple[Tensor, Remake]]) -> Iterator[None]:
    """Context manager: autograd saves neither these tensors nor their views; the backward pass makes them
    again.

    Tensors that an operator derives from them, such as a copy in another order, are saved. All other tensors
    go to the surrounding hooks for saved tensors, such as those of activation recomputation.
    """
    outer_hooks = saving_hooks()
    later: Mapping[int, _Rematerialized] = {
        id(tensor.untyped_storage()): _Rematerialized(make) for tensor, make in tensors
    }

    def pack(tensor: Tensor) -> Any:
        own = later.get(id(tensor.untyped_storage()))
        if own is None:
            # A saved result must not hold its autograd graph, which would hold the result.
            return tensor.detach() if outer_hooks is None else outer_hooks[0](tensor)
        own.keep()
        return _View(own, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, _View):
            return packed.of.read().as_strided(packed.size, packed.stride, packed.offset)
        found: Tensor = packed if outer_hooks is None else outer_hooks[1](packed)
        return found

    with saved_tensors_hooks(pack, unpack):
        yield


# Forward pass


class Interpreter:
    """The forward pass of a program on this rank of `grid`, with parameters from `store`.

    `placed` moves a graph input to the compute device. `parameter_groups` are the parameters whose
    collectives are batched.
    """

    def __init__(
        self,
        program: GraphProgram,
        grid: ProcessMesh,
        store: Mapping[str, ShardedParameter],
        placed: Callable[[Tensor], Tensor],
    ) -> None:
        self.program, self.grid, self.store, self.placed = program, grid, store, placed
        self.whole = replicated_placements(len(grid.counts))
        self.parameter_groups = [[store[name] for name in names] for names in program.parameter_groups]

    @property
    def end(self) -> TensorSpec:
        """The placements of the last block's result: those of its reader, or those that the loss is computed
        in."""
        last = self.program.sections[-1]
        return last.specs.get(last.result, last.steps[-1].work.output)

    def run(self, data: Mapping[str, Tensor], entry: Tensor | None = None) -> Tensor:
        """The result of the last block, in the placements of `end`: the loss, where the graph has one.

        `data` are the graph's inputs, whole and the same on every rank, on any device. `entry` is the input
        of the first block from the block before it, in that block's placements.
        """
        result = entry
        there: dict[str, Tensor] = {}
        left = Counter(name for section in self.program.sections for name in section.skip_inputs)
        for section in self.program.sections:
            own = {name: there[name] for name in section.skip_inputs}
            if section.layout.mode == "recomputed":
                result, *skip_outputs = checkpoint(
                    self._section, section, result, own, data, use_reentrant=False, preserve_rng_state=False
                )
            else:
                result, *skip_outputs = self._section(section, result, own, data)
            there |= dict(zip(section.skip_outputs, skip_outputs, strict=True))
            left.subtract(section.skip_inputs)
            there = {name: tensor for name, tensor in there.items() if left[name]}
        if result is None:
            raise ValueError("the graph has no blocks")
        return result

    def _section(
        self,
        section: Section,
        entry: Tensor | None,
        skip_inputs: Mapping[str, Tensor],
        data: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """One repetition of a block: its result, then its skip outputs."""
        run = _SectionRun(self, section, data)
        if section.block.entry is not None and entry is not None:
            run.made[section.block.entry] = entry, section.specs[section.block.entry]
        run.made |= {name: (tensor, section.specs[name]) for name, tensor in skip_inputs.items()}
        with profiled_range(BLOCK, section.label):
            for step in section.steps:
                with profiled_range(OPERATOR, step.label):
                    run.step(step)
        return tuple(run.made[name][0] for name in (section.result, *section.skip_outputs))

    def rematerialize(self, step: OperatorStep, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Context manager: an operator does not save parameters that were gathered for it; its backward pass
        gathers them again."""
        made = [
            (parameter, partial(self.store[name].made, spec))
            for name, spec, parameter in zip(step.parameters, step.work.parameters, parameters, strict=True)
            if not self.store[name].is_in(parameter)
        ]
        return rematerialize(made) if made else nullcontext()

    def read_input(self, whole: Tensor, spec: TensorSpec) -> Tensor:
        """One reader's shard of a graph input; only that shard is copied to the device."""
        return self.placed(
            redistribute_local_tensor(
                self.grid, whole.reshape(spec.shape), spec.shape, self.whole, spec.value
            )
        )

    def parameter(self, name: str, used: TensorSpec) -> Tensor:
        """A parameter in the placements of one of its readers."""
        param = self.store[name]
        shared = param.stored.used
        if shared is None:
            return param.redistribute(used)
        return redistribute(self.grid, param.redistribute(shared), shared, used, GATHERS)


class _SectionRun:
    """A repetition of a block while it runs: `made` has the tensors with readers left, and their
    placements."""

    def __init__(self, interpreter: Interpreter, section: Section, data: Mapping[str, Tensor]) -> None:
        self.interpreter, self.section, self.data = interpreter, section, data
        self.grid = interpreter.grid
        self.made: dict[str, tuple[Tensor, TensorSpec]] = {}
        self.left = dict(section.readers)
        self.live_outputs = {section.result, *section.skip_outputs}

    def step(self, step: OperatorStep) -> None:
        """Run one operator: redistribute its inputs; redistribute a result with several readers, or of the
        block."""
        work = step.work
        inputs = [
            self._read(operand.source, spec)
            for operand, spec in zip(work.op.inputs, work.inputs, strict=True)
        ]
        parameters = [
            self.interpreter.parameter(name, spec)
            for name, spec in zip(step.parameters, work.parameters, strict=True)
        ]
        with self.interpreter.rematerialize(step, parameters):
            result, spec = KERNELS[work.op.kind](work, inputs, parameters), work.output
        name = work.op.name
        if self.section.readers.get(name, 0) > 1 or name in self.live_outputs:
            there = self.section.specs.get(name, spec)
            result, spec = redistribute(self.grid, result, spec, there), there
        self.made[name] = result, spec

    def _read(self, source: str, spec: TensorSpec) -> Tensor:
        if source not in self.made:
            return self.interpreter.read_input(self.data[source], spec)
        tensor, start = self.made[source]
        self.left[source] -= 1
        if not self.left[source] and source not in self.live_outputs:
            del self.made[source]
        return redistribute(self.grid, tensor, start, spec)


def seed_gradient(grid: ProcessMesh, spec: TensorSpec, loss: Tensor) -> Tensor:
    """The gradient of `loss` by itself: one; of a partial sum, one on the first rank and zero elsewhere."""
    one = torch.ones_like(loss)
    whole = TensorSpec((), (REPLICATE,) * len(grid.counts))
    return redistribute_local_tensor(grid, one, (), whole.value, spec.gradient)


# Pipeline stages

ScheduleStep = Action | Communication

Data = Mapping[str, Tensor]
"""The graph's inputs by name."""

EARLIER, LATER = -1, 1
"""Offsets in stages: to the previous and to the next stage."""


class GraphStage:
    """The stage that `interpreter` computes; the grid has one mesh per stage.

    The loss of each micro-batch counts `weight`. Tensors between stages have `dtype` and are on `device`.
    `trains_before` says whether earlier stages have parameters: then gradients are sent back to them.
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
        """Run all actions of `row`; gradients are then in the parameters. Returns the loss.

        `data` has the inputs of each micro-batch. The loss is summed over micro-batches and whole on every
        rank of the last stage; other stages return zero.
        """
        passes = _Passes(self, data)
        for step in row:
            with record_function(f"PP:{step}"):  # the name in profiles of PyTorch's own pipelines
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
        """The placements of the first block's input from the previous stage."""
        first = self.interpreter.program.sections[0]
        return first.specs[first.block.entry or ""]

    def buffer(self, shape: Sequence[int], placements: MeshPlacements) -> Tensor:
        """A buffer for this rank's shard of a tensor of `shape` that the rank with the same index sends."""
        box = box_of(shape, self.grid.counts, placements, self.grid.here)
        return torch.empty(extents(box), dtype=self.dtype, device=self.device)


class _Passes:
    """A step of a stage while it runs: results that wait for their backward pass, gradients of stage inputs,
    and messages in flight, each by micro-batch."""

    def __init__(self, stage: GraphStage, data: Sequence[Data]) -> None:
        self.stage, self.data = stage, data
        self.entries: dict[int, Tensor] = {}
        self.results: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.losses: list[Tensor] = []
        self.in_flight: dict[tuple[CommunicationKind, int], tuple[distributed.Work | None, Tensor]] = {}

    def act(self, step: ScheduleStep) -> None:
        """Run one action of the schedule table."""
        if step.microbatch is None:  # REDUCE_GRAD, after the last backward pass of the stage
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
            entry = self._wait(CommunicationKind.RECV_F, number).requires_grad_(stage.trains_before)
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
        """The gradient of a result: of the loss, or as received from the next stage."""
        stage = self.stage
        if stage.is_last:
            return stage.weight * seed_gradient(stage.grid, stage.interpreter.end, result)
        gradient = self._wait(CommunicationKind.RECV_B, number)
        self._wait(CommunicationKind.SEND_F, number)  # has arrived: the gradient is the reply
        return gradient.to(result.dtype)

    def _send_result(self, number: int) -> None:
        result = self.results[number]
        if not result.is_floating_point():
            block = self.stage.interpreter.program.sections[-1].block
            raise ConfigError(
                "sends integers to the next stage", key=f"graph.{block.name}", found=str(result.dtype),
                allowed="a floating-point tensor",
            )  # fmt: skip
        self._send(CommunicationKind.SEND_F, number, result.detach().to(self.stage.dtype), LATER)

    def _send_gradient(self, number: int) -> None:
        if self.stage.trains_before:
            for kind, earlier in list(self.in_flight):
                if kind is CommunicationKind.SEND_B:
                    self._wait(kind, earlier)
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

    def _wait(self, kind: CommunicationKind, number: int) -> Tensor:
        """Wait for a message; returns its tensor."""
        work, tensor = self.in_flight.pop((kind, number))
        if work is not None:
            work.wait()
        return tensor

    def finish(self) -> None:
        """Wait for all messages in flight."""
        for kind, number in list(self.in_flight):
            self._wait(kind, number)
