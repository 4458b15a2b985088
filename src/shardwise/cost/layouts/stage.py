"""All layouts of one stage of a pipeline: some blocks of a graph in a row, on a mesh of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.layouts.block import LaidBlock, Surroundings, Variable, laid_block
from shardwise.cost.layouts.chain import (
    LaidOut,
    fixed_costs,
    next_keeps_entry,
    shared_across,
    sharings,
    structures_of,
)
from shardwise.cost.layouts.forms import Placements, local_elements, tensor_forms
from shardwise.cost.layouts.ground import Ground, ground_of
from shardwise.cost.training import Training
from shardwise.cost.turns import Turns
from shardwise.errors import ConfigError
from shardwise.frontier import COLUMNS, Factor, Link, Part
from shardwise.graph import Block, OpGraph, tensor_shapes


def border_shapes(graph: OpGraph) -> tuple[tuple[int, ...] | None, ...]:
    """The shape of the tensor that each block, repetitions counted, reads from the one before it; None where
    it reads none."""
    shapes: list[tuple[int, ...] | None] = []
    for block, own in zip(graph.blocks, tensor_shapes(graph), strict=True):
        shapes += [own[block.entry] if block.entry is not None else None] * block.repeat
    return tuple(shapes)


def handed_over(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Placements:
    """How a tensor of `shape` lies between stages: of the ways in which ranks hold least, the first, so that
    each rank sends its part to its like one."""
    forms = tensor_forms(shape, ranks)
    return forms.named[int(forms.local_elements(forms.placements).argmin())]


def handed_elements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> float:
    """Elements of a rank's part of a tensor between stages."""
    return float(local_elements(shape, ranks, np.array(handed_over(shape, ranks))))


def stage_layouts(
    graph: OpGraph,
    cluster: Cluster,
    training: Training,
    mesh: Mesh,
    turns: Turns,
    *,
    first: int,
    end: int,
) -> LaidOut:
    """Every way to lay the blocks from `first` to before `end` of `graph`, repetitions counted, out on
    `mesh`, sizes being those of a micro-batch (docs/tracking.md).

    ConfigError where a parameter has readers in several blocks. What blocks lend to others stays within the
    stage (`joined_by_loans`).
    """
    return _Builder(ground_of(cluster, mesh, training, turns), graph, training, first, end).laid_out()


def open_layouts(
    graph: OpGraph,
    cluster: Cluster,
    training: Training,
    mesh: Mesh,
    turns: Turns,
    *,
    first: int,
    end: int,
) -> LaidOut:
    """The same where tensors may come and go as they please, and nobody sends them: what no stage that has
    these blocks among others is below."""
    alone = replace(turns, sent_forward_s=0.0, sent_backward_s=0.0, buffer_bytes=0.0)
    return _OpenBuilder(ground_of(cluster, mesh, training, alone), graph, training, first, end).laid_out()


class _Builder:
    """The links of a stage."""

    def __init__(self, ground: Ground, graph: OpGraph, training: Training, first: int, end: int) -> None:
        if shared := shared_across(graph):
            raise ConfigError(
                "cannot be cut: blocks share a parameter", key="--stages", found=", ".join(shared),
                allowed="a graph whose parameters each have readers in one block",
            )  # fmt: skip
        self.shapes = tensor_shapes(graph)
        self.ground, self.graph, self.first, self.end = ground, graph, first, end
        self.structures = structures_of(graph, training)
        self.blocks = [place for place, block in enumerate(graph.blocks) for _ in range(block.repeat)]
        self.is_cut_before, self.is_cut_after = first > 0, end < len(self.blocks)
        self.known: dict[tuple[int, bool, bool], LaidBlock] = {}

    def laid_out(self) -> LaidOut:
        """All links of the stage."""
        links: list[Link] = []
        variables: list[tuple[Variable, ...]] = []
        blocks: list[Block] = []
        runs = self.runs()
        for number, (place, count, is_first, is_last) in enumerate(runs, start=1):
            laid = self.laid(place, is_last=is_last, is_end=number == len(runs))
            modes = tuple(
                (mode, self.cut(part, place, is_first=is_first, is_last=is_last)) for mode, part in laid.modes
            )
            links.append(Link(self.graph.blocks[place].name, modes, count))
            variables.append(laid.variables)
            blocks.append(replace(self.graph.blocks[place], repeat=count))
        return LaidOut(
            graph=replace(self.graph, blocks=tuple(blocks)),
            mesh=self.ground.mesh,
            chain=tuple(links),
            variables=tuple(variables),
        )

    def runs(self) -> Sequence[tuple[int, int, bool, bool]]:
        """Runs of the same block: its place, repetitions, and whether the run is at the first or the last
        cut; a repetition at a cut is a run of its own."""
        found: list[tuple[int, int, bool, bool]] = []
        for at in range(self.first, self.end):
            place = self.blocks[at]
            is_first = at == self.first and self.is_cut_before
            is_last = at == self.end - 1 and self.is_cut_after
            if found and not is_first and not is_last and found[-1][0] == place and not found[-1][2]:
                found[-1] = (place, found[-1][1] + 1, False, False)
            else:
                found.append((place, 1, is_first, is_last))
        return found

    def laid(self, place: int, *, is_last: bool, is_end: bool) -> LaidBlock:
        """A block with all its layouts. At the last cut nobody keeps its result there; at the end of the
        stage it bears what is nobody's."""
        fixed_s, fixed_bytes = fixed_costs(self.ground) if is_end else (0.0, 0.0)
        key = (place, is_last, is_end)
        if key not in self.known:
            around = Surroundings(
                next_keeps_entry=self.is_kept_after(place, is_last=is_last),
                shared=sharings(self.graph, place),
                fixed_s=fixed_s,
                fixed_bytes=fixed_bytes,
                sent_forward_s=self.ground.turns.sent_forward_s if is_end else 0.0,
                sent_backward_s=self.ground.turns.sent_backward_s if is_end else 0.0,
            )
            self.known[key] = laid_block(self.ground, self.structures[place], around)
        return self.known[key]

    def is_kept_after(self, place: int, *, is_last: bool) -> bool:
        """Whether the result of a block is kept where it lies by who reads it."""
        return next_keeps_entry(self.structures, place) and not is_last

    def cut(self, part: Part, place: int, *, is_first: bool, is_last: bool) -> Part:
        """A part whose entry or result crosses a cut."""
        block, shapes = self.graph.blocks[place], self.shapes[place]
        if is_first and part.entry is not None and block.entry is not None:
            crossing = self.crossing(part.entry, shapes[block.entry])
            part = replace(part, factors=(*part.factors, *crossing), entry=None)
        if is_last and part.exit is not None:
            crossing = self.crossing(part.exit, shapes[block.operators[-1].name])
            part = replace(part, factors=(*part.factors, *crossing), exit=None)
        return part

    def crossing(self, variable: int, shape: tuple[int, ...]) -> Sequence[Factor]:
        """How a tensor of `shape` lies at a cut: one way, all others cannot be."""
        forms = tensor_forms(shape, self.ground.ranks)
        costs = np.full((len(forms), len(COLUMNS)), np.inf)
        costs[forms.named.index(handed_over(shape, self.ground.ranks))] = 0.0
        return (Factor((variable,), costs),)


class _OpenBuilder(_Builder):
    """The links of some blocks in the middle of a stage."""

    def is_kept_after(self, place: int, *, is_last: bool) -> bool:
        return next_keeps_entry(self.structures, place)

    def crossing(self, variable: int, shape: tuple[int, ...]) -> Sequence[Factor]:
        return ()
