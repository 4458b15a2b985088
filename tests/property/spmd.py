"""Programs run by all ranks of a small mesh at once, in numpy, with their backward passes.

A value is one array per rank, with named dims. Each step acts on every rank separately, or is a collective,
which is logged. Each step records how a rank computes its gradient from that of the result. So a rank's
gradient comes from its own backward pass and the declared collectives alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

import numpy as np

from shardwise.graph import OpNode, ShardingRule, divided_dims

Dims = tuple[str, ...]
Array = np.ndarray[Any, np.dtype[Any]]
Rank = tuple[int, ...]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Mesh:
    """Ranks of a mesh, and the elements of each dim of an operator on each rank, outer axes first."""

    op: OpNode
    rules: Sequence[ShardingRule]
    counts: tuple[int, ...]

    @property
    def ranks(self) -> list[Rank]:
        return list(product(*map(range, self.counts)))

    def interval(self, dim: str, rank: Rank) -> tuple[int, int]:
        """Elements of `dim` on a rank where a tensor is split by every rule that divides the dim."""
        start, stop = 0, self.op.dims[dim]
        for axis, rule in enumerate(self.rules):
            if dim in divided_dims(self.op, rule):
                start, stop = self.part(axis, dim, start, stop, rank[axis])
        return start, stop

    def part(self, axis: int, dim: str, start: int, stop: int, index: int) -> tuple[int, int]:
        """The part of a range of elements that goes to the rank with this index along `axis`: whole units."""
        units, size = self.rules[axis].units, self.op.dims[dim]
        unit = size // units if size % units == 0 else 1
        parts = np.array_split(np.arange((stop - start) // unit), self.counts[axis])
        before = sum(len(part) for part in parts[:index])
        return start + before * unit, start + (before + len(parts[index])) * unit

    def lines(self, axis: int) -> Iterator[list[Rank]]:
        """The groups of ranks that differ along `axis` only."""
        for rank in self.ranks:
            if rank[axis] == 0:
                yield [(*rank[:axis], index, *rank[axis + 1 :]) for index in range(self.counts[axis])]

    def splits(self, dims: Sequence[str]) -> list[int]:
        """The axes along which one of `dims` is split."""
        return [axis for axis, rule in enumerate(self.rules) if rule.split in dims]


@dataclass
class Value:
    """One array per rank. `back` adds to the gradients of its operands."""

    dims: Dims
    parts: dict[Rank, Array]
    back: Callable[[], None] = lambda: None
    grad: dict[Rank, Array] = field(default_factory=dict)

    def add(self, rank: Rank, gradient: Array) -> None:
        self.grad[rank] = self.grad[rank] + gradient if rank in self.grad else gradient


@dataclass(frozen=True)
class Call:
    """A collective that ran: the most elements that a rank sent or received."""

    collective: str
    axis: int
    direction: Direction
    elements: int


class Spmd:
    """Runs a program on a mesh, records its steps for the backward pass and logs its collectives."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.calls: list[Call] = []
        self._values: list[Value] = []

    # Values

    def value(
        self, dims: Dims, parts: dict[Rank, Array], back: Callable[[Value], None] | None = None
    ) -> Value:
        made = Value(dims, parts)
        if back is not None:
            made.back = lambda: back(made)
        self._values.append(made)
        return made

    def constant(self, dims: Dims, whole: Array) -> Value:
        """A tensor without gradient; each rank has its parts of the dims."""
        return self.value(
            dims,
            {
                rank: whole[tuple(slice(*self.mesh.interval(dim, rank)) for dim in dims)]
                for rank in self.mesh.ranks
            },
        )

    def backward(self, result: Value, gradient: dict[Rank, Array]) -> None:
        """Runs the steps in reverse from the gradient of the result; a value that the result does not depend
        on has none.
        """
        for rank, part in gradient.items():
            result.add(rank, part)
        for value in reversed(self._values):
            if value.grad:
                value.back()

    # Local steps

    def einsum(self, output: Dims, *operands: Value) -> Value:
        dims = [operand.dims for operand in operands]
        parts = {
            rank: contract(dims, output, [operand.parts[rank] for operand in operands])
            for rank in self.mesh.ranks
        }

        def back(made: Value) -> None:
            for rank, gradient in made.grad.items():
                arrays = [operand.parts[rank] for operand in operands]
                for at, operand in enumerate(operands):
                    others = [other for index, other in enumerate(arrays) if index != at]
                    other_dims = [own for index, own in enumerate(dims) if index != at]
                    ones = np.ones(operand.parts[rank].shape)
                    spread = contract(
                        [output, *other_dims, operand.dims], operand.dims, [gradient, *others, ones]
                    )
                    operand.add(rank, spread)

        return self.value(output, parts, back)

    def pointwise(
        self,
        output: Dims,
        function: Callable[..., Array],
        slopes: Sequence[Callable[..., Array]],
        *operands: Value,
    ) -> Value:
        """`function` applied to one element of each operand; `slopes` are its derivatives by each operand."""

        def spread(rank: Rank) -> list[Array]:
            sizes: dict[str, int] = {}
            for operand in operands:
                sizes.update(zip(operand.dims, operand.parts[rank].shape, strict=True))
            for dim in without(output, sizes):
                start, stop = self.mesh.interval(dim, rank)
                sizes[dim] = stop - start
            ones = np.ones([sizes[dim] for dim in output])
            return [
                contract([operand.dims, output], output, [operand.parts[rank], ones]) for operand in operands
            ]

        def back(made: Value) -> None:
            for rank, gradient in made.grad.items():
                arrays = spread(rank)
                for operand, slope in zip(operands, slopes, strict=True):
                    operand.add(rank, contract([output], operand.dims, [gradient * slope(*arrays)]))

        return self.value(output, {rank: function(*spread(rank)) for rank in self.mesh.ranks}, back)

    def each(
        self,
        output: Dims,
        operands: Sequence[Value],
        forward: Callable[[Rank, list[Array]], Array],
        back_of: Callable[[Rank, list[Array], Array], list[Array]],
    ) -> Value:
        """A local step, with the gradients of its operands computed from that of its result."""
        arrays = {rank: [operand.parts[rank] for operand in operands] for rank in self.mesh.ranks}

        def back(made: Value) -> None:
            for rank, gradient in made.grad.items():
                for operand, own in zip(operands, back_of(rank, arrays[rank], gradient), strict=True):
                    operand.add(rank, own)

        return self.value(output, {rank: forward(rank, arrays[rank]) for rank in self.mesh.ranks}, back)

    def stack(self, *operands: Value) -> Value:
        """Tensors of the same dims, stacked along a new first dim `stacked`."""
        return self.each(
            ("stacked", *operands[0].dims),
            operands,
            lambda rank, arrays: np.stack(arrays),
            lambda rank, arrays, gradient: list(gradient),
        )

    def item(self, stacked: Value, index: int, dim: str = "stacked") -> Value:
        """One element of a dim."""
        at = stacked.dims.index(dim)

        def back(rank: Rank, arrays: list[Array], gradient: Array) -> list[Array]:
            whole = np.zeros(arrays[0].shape)
            np.moveaxis(whole, at, 0)[index] = gradient
            return [whole]

        return self.each(
            tuple(own for own in stacked.dims if own != dim),
            [stacked],
            lambda rank, arrays: np.take(arrays[0], index, axis=at),
            back,
        )

    # Collectives

    def _log(self, collective: str, axis: int, direction: Direction, sent: Value) -> None:
        elements = max(part.size for part in sent.parts.values())
        self.calls.append(Call(collective, axis, direction, elements))

    def all_reduce(self, axes: Sequence[int], sent: Value, *, gradients: Literal["summed", "whole"]) -> Value:
        """The sum over the ranks along `axes`. Later steps give each rank a part of the gradient, to be
        `summed` too, or the `whole` of it.
        """
        result = sent
        for axis in axes:
            result = self._all_reduce_along(axis, result, gradients)
        return result

    def _all_reduce_along(self, axis: int, sent: Value, gradients: Literal["summed", "whole"]) -> Value:
        def back(made: Value) -> None:
            gradient = made.grad
            if gradients == "summed":
                self._log("all_reduce", axis, "backward", sent)
                gradient = self._summed(axis, made.grad)
            for rank, part in gradient.items():
                sent.add(rank, part)

        self._log("all_reduce", axis, "forward", sent)
        return self.value(sent.dims, self._summed(axis, sent.parts), back)

    def maximum(self, axes: Sequence[int], sent: Value) -> Value:
        """The largest over the ranks along `axes`, as a constant."""
        parts = sent.parts
        for axis in axes:
            self._log("all_reduce", axis, "forward", sent)
            largest = {}
            for line in self.mesh.lines(axis):
                top = np.max([parts[rank] for rank in line], axis=0)
                largest.update(dict.fromkeys(line, top))
            parts = largest
        return self.value(sent.dims, parts)

    def _summed(self, axis: int, parts: Mapping[Rank, Array]) -> dict[Rank, Array]:
        result = {}
        for line in self.mesh.lines(axis):
            total = sum((parts[rank] for rank in line), start=np.zeros(()))
            result.update(dict.fromkeys(line, total))
        return result

    def all_gather(self, axis: int, sent: Value, dim: str) -> Value:
        """The whole `dim` on every rank along `axis`; gradients are reduce-scattered."""
        at = sent.dims.index(dim)
        parts: dict[Rank, Array] = {}
        for line in self.mesh.lines(axis):
            whole = np.concatenate([sent.parts[rank] for rank in line], axis=at)
            parts.update(dict.fromkeys(line, whole))

        def back(made: Value) -> None:
            self._log("reduce_scatter", axis, "backward", made)
            summed = self._summed(axis, made.grad)
            for line in self.mesh.lines(axis):
                bounds = np.cumsum([sent.parts[rank].shape[at] for rank in line])[:-1]
                for rank, part in zip(line, np.split(summed[line[0]], bounds, axis=at), strict=True):
                    sent.add(rank, part)

        made = self.value(sent.dims, parts, back)
        self._log("all_gather", axis, "forward", made)
        return made

    def own_part(self, axis: int, whole: Value, dim: str) -> Value:
        """The rank's own part of a tensor that all ranks along `axis` have; gradients are gathered."""
        at = whole.dims.index(dim)
        parts = {}
        for line in self.mesh.lines(axis):
            size = whole.parts[line[0]].shape[at]
            for index, rank in enumerate(line):
                start, stop = self.mesh.part(axis, dim, 0, size, index)
                parts[rank] = np.take(whole.parts[rank], range(start, stop), axis=at)

        def back(made: Value) -> None:
            self._log("all_gather", axis, "backward", whole)
            for line in self.mesh.lines(axis):
                gathered = np.concatenate([made.grad[rank] for rank in line], axis=at)
                for rank in line:
                    whole.add(rank, gathered)

        return self.value(whole.dims, parts, back)

    def neighbours(self, axis: int, sent: Value, dim: str, rows: int) -> Value:
        """`rows` further rows of `dim` at either end, from the neighbours along `axis`; zeros beyond the
        ends.
        """
        at = sent.dims.index(dim)

        def widths(before: int, after: int) -> list[tuple[int, int]]:
            return [(before, after) if own == at else (0, 0) for own in range(len(sent.dims))]

        def run(array: Array, start: int, stop: int) -> Array:
            return np.take(array, range(start, stop), axis=at)

        parts: dict[Rank, Array] = {}
        for line in self.mesh.lines(axis):
            whole = np.pad(np.concatenate([sent.parts[rank] for rank in line], axis=at), widths(rows, rows))
            start = 0
            for rank in line:
                length = sent.parts[rank].shape[at]
                parts[rank] = run(whole, start, start + length + 2 * rows)
                start += length

        def back(made: Value) -> None:
            self._log_rows("backward", axis, sent, at, rows)
            for line in self.mesh.lines(axis):
                lengths = [sent.parts[rank].shape[at] for rank in line]
                total = np.zeros(())
                start = 0
                for rank, length in zip(line, lengths, strict=True):
                    total = total + np.pad(made.grad[rank], widths(start, sum(lengths) - start - length))
                    start += length
                start = rows
                for rank, length in zip(line, lengths, strict=True):
                    sent.add(rank, run(total, start, start + length))
                    start += length

        self._log_rows("forward", axis, sent, at, rows)
        return self.value(sent.dims, parts, back)

    def _log_rows(self, direction: Direction, axis: int, sent: Value, at: int, rows: int) -> None:
        for rank in self.mesh.ranks:
            if sent.parts[rank].shape[at] < rows:
                raise AssertionError(f"rank {rank} has fewer than {rows} rows for its neighbour")
        elements = max(part.size // part.shape[at] * rows for part in sent.parts.values())
        self.calls.append(Call("neighbours", axis, direction, elements))


def without(dims: Sequence[str], left_out: Collection[str]) -> Dims:
    """`dims` in their order without those left out."""
    return tuple(dim for dim in dims if dim not in left_out)


def contract(operands: Sequence[Dims], output: Dims, arrays: Sequence[Array]) -> Array:
    """einsum with names of dims."""
    letters: dict[str, str] = {}
    for dims in (*operands, output):
        for dim in dims:
            letters.setdefault(dim, chr(ord("a") + len(letters)))
    text = ",".join("".join(letters[dim] for dim in dims) for dims in operands)
    path = "greedy" if len(operands) > 2 else False
    result = "".join(letters[dim] for dim in output)
    return np.asarray(np.einsum(f"{text}->{result}", *arrays, optimize=path))
