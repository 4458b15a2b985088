"""All layouts of one stage of a pipeline: some blocks of a graph in a row, on a mesh of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.layouts.block import BlockContext, BlockGraphs, Variable, block_graphs
from shardwise.cost.layouts.chain import (
    LayoutSpace,
    fixed_costs,
    next_saves_entry,
    shared_across,
    shared_parameters,
    structures_of,
)
from shardwise.cost.layouts.forms import Placements, activation_placements, local_elements
from shardwise.cost.layouts.ground import CostContext, cost_context_of
from shardwise.cost.training import Training
from shardwise.cost.turns import StepCounts
from shardwise.errors import ConfigError
from shardwise.frontier import COLUMNS, Factor, FactorGraph, Segment
from shardwise.graph import Block, OpGraph, tensor_shapes


def entry_shapes(graph: OpGraph) -> tuple[tuple[int, ...] | None, ...]:
    """The shape of the tensor that each block, repetitions counted, reads from the one before it; None where
    it reads none."""
    shapes: list[tuple[int, ...] | None] = []
    for block, own in zip(graph.blocks, tensor_shapes(graph), strict=True):
        shapes += [own[block.entry] if block.entry is not None else None] * block.repeat
    return tuple(shapes)


def transfer_placements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Placements:
    """How a tensor of `shape` lies between stages: of the ways in which ranks hold least, the first, so that
    each rank sends its part to its like one."""
    table = activation_placements(shape, ranks)
    return table.named[int(table.local_elements(table.placements).argmin())]


def transfer_elements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> float:
    """Elements of a rank's part of a tensor between stages."""
    return float(local_elements(shape, ranks, np.array(transfer_placements(shape, ranks))))


def stage_layouts(
    graph: OpGraph,
    cluster: Cluster,
    training: Training,
    mesh: Mesh,
    counts: StepCounts,
    *,
    first: int,
    end: int,
) -> LayoutSpace:
    """Every way to lay the blocks from `first` to before `end` of `graph`, repetitions counted, out on
    `mesh`, sizes being those of a micro-batch (docs/concepts/pareto-search.md).

    ConfigError where a parameter has readers in several blocks. What blocks lend to others stays within the
    stage (`blocks_joined_by_skips`).
    """
    return _Builder(
        cost_context_of(cluster, mesh, training, counts), graph, training, first, end
    ).layout_space()


def relaxed_layouts(
    graph: OpGraph,
    cluster: Cluster,
    training: Training,
    mesh: Mesh,
    counts: StepCounts,
    *,
    first: int,
    end: int,
) -> LayoutSpace:
    """The same where tensors may come and go as they please, and nobody sends them: what no stage that has
    these blocks among others is below."""
    alone = replace(counts, sent_forward_s=0.0, sent_backward_s=0.0, buffer_bytes=0.0)
    return _RelaxedBuilder(
        cost_context_of(cluster, mesh, training, alone), graph, training, first, end
    ).layout_space()


class _Builder:
    """The links of a stage."""

    def __init__(
        self, context: CostContext, graph: OpGraph, training: Training, first: int, end: int
    ) -> None:
        if shared := shared_across(graph):
            raise ConfigError(
                "cannot be cut: blocks share a parameter", key="--stages", found=", ".join(shared),
                allowed="a graph whose parameters each have readers in one block",
            )  # fmt: skip
        self.shapes = tensor_shapes(graph)
        self.context, self.graph, self.first, self.end = context, graph, first, end
        self.structures = structures_of(graph, training)
        self.blocks = [place for place, block in enumerate(graph.blocks) for _ in range(block.repeat)]
        self.is_cut_before, self.is_cut_after = first > 0, end < len(self.blocks)
        self.known: dict[tuple[int, bool, bool], BlockGraphs] = {}

    def layout_space(self) -> LayoutSpace:
        """All links of the stage."""
        links: list[Segment] = []
        variables: list[tuple[Variable, ...]] = []
        blocks: list[Block] = []
        runs = self.runs()
        for number, (place, count, is_first, is_last) in enumerate(runs, start=1):
            graphs = self.graphs(place, is_last=is_last, is_end=number == len(runs))
            modes = tuple(
                (mode, self.cut(part, place, is_first=is_first, is_last=is_last))
                for mode, part in graphs.modes
            )
            links.append(Segment(self.graph.blocks[place].name, modes, count))
            variables.append(graphs.variables)
            blocks.append(replace(self.graph.blocks[place], repeat=count))
        return LayoutSpace(
            graph=replace(self.graph, blocks=tuple(blocks)),
            mesh=self.context.mesh,
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

    def graphs(self, place: int, *, is_last: bool, is_end: bool) -> BlockGraphs:
        """A block with all its layouts. At the last cut nobody keeps its result there; at the end of the
        stage it bears what is nobody's."""
        fixed_s, fixed_bytes = fixed_costs(self.context) if is_end else (0.0, 0.0)
        key = (place, is_last, is_end)
        if key not in self.known:
            block_context = BlockContext(
                next_saves_entry=self.is_saved_after(place, is_last=is_last),
                shared=shared_parameters(self.graph, place),
                fixed_s=fixed_s,
                fixed_bytes=fixed_bytes,
                sent_forward_s=self.context.counts.sent_forward_s if is_end else 0.0,
                sent_backward_s=self.context.counts.sent_backward_s if is_end else 0.0,
            )
            self.known[key] = block_graphs(self.context, self.structures[place], block_context)
        return self.known[key]

    def is_saved_after(self, place: int, *, is_last: bool) -> bool:
        """Whether the result of a block is kept where it lies by who reads it."""
        return next_saves_entry(self.structures, place) and not is_last

    def cut(self, part: FactorGraph, place: int, *, is_first: bool, is_last: bool) -> FactorGraph:
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
        table = activation_placements(shape, self.context.ranks)
        costs = np.full((len(table), len(COLUMNS)), np.inf)
        costs[table.named.index(transfer_placements(shape, self.context.ranks))] = 0.0
        return (Factor((variable,), costs),)


class _RelaxedBuilder(_Builder):
    """The links of some blocks in the middle of a stage."""

    def is_saved_after(self, place: int, *, is_last: bool) -> bool:
        return next_saves_entry(self.structures, place)

    def crossing(self, variable: int, shape: tuple[int, ...]) -> Sequence[Factor]:
        return ()
