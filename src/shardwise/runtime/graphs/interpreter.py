"""Runs a laid out graph: every operator on this rank's parts of what it reads, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.graph import REPLICATE
from shardwise.runtime.graphs.bring import TensorSpec, redistribute, redistribute_local_tensor
from shardwise.runtime.graphs.forms import replicated_placements
from shardwise.runtime.graphs.given_back import rematerialize
from shardwise.runtime.graphs.grid import ProcessMesh
from shardwise.runtime.graphs.kernels import KERNELS
from shardwise.runtime.graphs.program import GraphProgram, OperatorStep, Section
from shardwise.runtime.graphs.store import ShardedParameter
from shardwise.runtime.marks import BLOCK, GATHERS, OPERATOR, profiled_range


class Interpreter:
    """The forward pass of a program on this rank of `grid`, with parameters from `store`, of which those that
    travel `parameter_groups` are told. What it reads of the graph's inputs is `placed` where it computes."""

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
        """How the result of the last block lies: for who reads it, or as the loss is made."""
        last = self.program.sections[-1]
        return last.specs.get(last.result, last.steps[-1].work.output)

    def run(self, data: Mapping[str, Tensor], entry: Tensor | None = None) -> Tensor:
        """The result of the last block, which lies as `end` says: the loss, where it is the graph's. `data`
        are the graph's inputs, whole and the same on every rank, wherever they are; `entry` is what the first
        block reads of the one before it, as it lies there."""
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
            raise ValueError("a graph has blocks")
        return result

    def _section(
        self,
        section: Section,
        entry: Tensor | None,
        skip_inputs: Mapping[str, Tensor],
        data: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """One repetition of a block, from where its entry lies to where its result lies: that, and what it
        lends to sections behind."""
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
        """Inside, an operator keeps nothing of parameters that were made for it, which come again in its
        backward pass."""
        made = [
            (parameter, partial(self.store[name].made, spec))
            for name, spec, parameter in zip(step.parameters, step.work.parameters, parameters, strict=True)
            if not self.store[name].is_in(parameter)
        ]
        return rematerialize(made) if made else nullcontext()

    def read_input(self, whole: Tensor, spec: TensorSpec) -> Tensor:
        """What one of its readers reads of an input of the graph: no more of it goes to the device."""
        return self.placed(
            redistribute_local_tensor(
                self.grid, whole.reshape(spec.shape), spec.shape, self.whole, spec.value
            )
        )

    def parameter(self, name: str, used: TensorSpec) -> Tensor:
        """A parameter as one of its readers wants it."""
        param = self.store[name]
        shared = param.stored.used
        if shared is None:
            return param.redistribute(used)
        return redistribute(self.grid, param.redistribute(shared), shared, used, GATHERS)


class _SectionRun:
    """A repetition of a block in the making: `made` are tensors by name that are still to be read, and how
    they lie for readers."""

    def __init__(self, interpreter: Interpreter, section: Section, data: Mapping[str, Tensor]) -> None:
        self.interpreter, self.section, self.data = interpreter, section, data
        self.grid = interpreter.grid
        self.made: dict[str, tuple[Tensor, TensorSpec]] = {}
        self.left = dict(section.readers)
        self.live_outputs = {section.result, *section.skip_outputs}

    def step(self, step: OperatorStep) -> None:
        """One operator: what it reads brought to it, and its result to where several readers want it, or the
        next block."""
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
    """The gradient of `loss` by itself, as ranks hold it: one, of a partial sum one on the first rank."""
    one = torch.ones_like(loss)
    whole = TensorSpec((), (REPLICATE,) * len(grid.counts))
    return redistribute_local_tensor(grid, one, (), whole.value, spec.gradient)
