"""Runs a laid out graph: every operator on this rank's parts of what it reads, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.graph import WHOLE
from shardwise.runtime.graphs.bring import Lie, brought, moved
from shardwise.runtime.graphs.forms import whole_form
from shardwise.runtime.graphs.given_back import given_back
from shardwise.runtime.graphs.grid import Grid
from shardwise.runtime.graphs.kernels import KERNELS
from shardwise.runtime.graphs.program import Program, Section, Step
from shardwise.runtime.graphs.store import Held
from shardwise.runtime.marks import BLOCK, GATHERS, OPERATOR, marked


class Interpreter:
    """The forward pass of a program on this rank of `grid`, with parameters from `store`, of which those that
    travel `together` are told. What it reads of the graph's inputs is `placed` where it computes."""

    def __init__(
        self,
        program: Program,
        grid: Grid,
        store: Mapping[str, Held],
        placed: Callable[[Tensor], Tensor],
    ) -> None:
        self.program, self.grid, self.store, self.placed = program, grid, store, placed
        self.whole = whole_form(len(grid.counts))
        self.together = [[store[name] for name in names] for names in program.together]

    @property
    def end(self) -> Lie:
        """How the result of the last block lies: for who reads it, or as the loss is made."""
        last = self.program.sections[-1]
        return last.lies.get(last.result, last.steps[-1].work.output)

    def run(self, data: Mapping[str, Tensor], entry: Tensor | None = None) -> Tensor:
        """The result of the last block, which lies as `end` says: the loss, where it is the graph's. `data`
        are the graph's inputs, whole and the same on every rank, wherever they are; `entry` is what the first
        block reads of the one before it, as it lies there."""
        result = entry
        there: dict[str, Tensor] = {}
        left = Counter(name for section in self.program.sections for name in section.borrowed)
        for section in self.program.sections:
            own = {name: there[name] for name in section.borrowed}
            if section.layout.mode == "recomputed":
                result, *lent = checkpoint(
                    self._section, section, result, own, data, use_reentrant=False, preserve_rng_state=False
                )
            else:
                result, *lent = self._section(section, result, own, data)
            there |= dict(zip(section.lent, lent, strict=True))
            left.subtract(section.borrowed)
            there = {name: tensor for name, tensor in there.items() if left[name]}
        if result is None:
            raise ValueError("a graph has blocks")
        return result

    def _section(
        self,
        section: Section,
        entry: Tensor | None,
        borrowed: Mapping[str, Tensor],
        data: Mapping[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """One repetition of a block, from where its entry lies to where its result lies: that, and what it
        lends to sections behind."""
        run = _Run(self, section, data)
        if section.block.entry is not None and entry is not None:
            run.made[section.block.entry] = entry, section.lies[section.block.entry]
        run.made |= {name: (tensor, section.lies[name]) for name, tensor in borrowed.items()}
        with marked(BLOCK, section.label):
            for step in section.steps:
                with marked(OPERATOR, step.label):
                    run.step(step)
        return tuple(run.made[name][0] for name in (section.result, *section.lent))

    def given_back(self, step: Step, parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Inside, an operator keeps nothing of parameters that were made for it, which come again in its
        backward pass."""
        made = [
            (parameter, partial(self.store[name].made, lie))
            for name, lie, parameter in zip(step.parameters, step.work.parameters, parameters, strict=True)
            if not self.store[name].is_in(parameter)
        ]
        return given_back(made) if made else nullcontext()

    def given(self, whole: Tensor, lie: Lie) -> Tensor:
        """What one of its readers reads of an input of the graph: no more of it goes to the device."""
        return self.placed(moved(self.grid, whole.reshape(lie.shape), lie.shape, self.whole, lie.value))

    def parameter(self, name: str, used: Lie) -> Tensor:
        """A parameter as one of its readers wants it."""
        held = self.store[name]
        shared = held.stored.used
        if shared is None:
            return held.brought(used)
        return brought(self.grid, held.brought(shared), shared, used, GATHERS)


class _Run:
    """A repetition of a block in the making: `made` are tensors by name that are still to be read, and how
    they lie for readers."""

    def __init__(self, interpreter: Interpreter, section: Section, data: Mapping[str, Tensor]) -> None:
        self.interpreter, self.section, self.data = interpreter, section, data
        self.grid = interpreter.grid
        self.made: dict[str, tuple[Tensor, Lie]] = {}
        self.left = dict(section.readers)
        self.staying = {section.result, *section.lent}

    def step(self, step: Step) -> None:
        """One operator: what it reads brought to it, and its result to where several readers want it, or the
        next block."""
        work = step.work
        inputs = [
            self._read(operand.source, lie) for operand, lie in zip(work.op.inputs, work.inputs, strict=True)
        ]
        parameters = [
            self.interpreter.parameter(name, lie)
            for name, lie in zip(step.parameters, work.parameters, strict=True)
        ]
        with self.interpreter.given_back(step, parameters):
            result, lie = KERNELS[work.op.kind](work, inputs, parameters), work.output
        name = work.op.name
        if self.section.readers.get(name, 0) > 1 or name in self.staying:
            there = self.section.lies.get(name, lie)
            result, lie = brought(self.grid, result, lie, there), there
        self.made[name] = result, lie

    def _read(self, source: str, lie: Lie) -> Tensor:
        if source not in self.made:
            return self.interpreter.given(self.data[source], lie)
        tensor, start = self.made[source]
        self.left[source] -= 1
        if not self.left[source] and source not in self.staying:
            del self.made[source]
        return brought(self.grid, tensor, start, lie)


def seed_gradient(grid: Grid, lie: Lie, loss: Tensor) -> Tensor:
    """The gradient of `loss` by itself, as ranks hold it: one, of a partial sum one on the first rank."""
    one = torch.ones_like(loss)
    whole = Lie((), (WHOLE,) * len(grid.counts))
    return moved(grid, one, (), whole.value, lie.gradient)
