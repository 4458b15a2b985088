"""All layouts of an operator graph, or of one pipeline stage of it, as a chain of factor graphs.

`layout_chain` makes the `LayoutSpace` of a whole graph, `stage_layouts` that of consecutive blocks,
`relaxed_layouts` a relaxation of it whose border tensors are free. `StageTransfer` has the sends between
stages with equal meshes. `LayoutSpace.layout` turns a solution into a layout with names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.collectives import CollectiveModel, collective_model_of
from shardwise.cost.layouts.block import (
    ROLES,
    BlockContext,
    BlockGraphs,
    Role,
    SharedParameter,
    Structure,
    Variable,
    block_graphs,
    structure_of,
)
from shardwise.cost.layouts.context import CostContext, cost_context_of
from shardwise.cost.layouts.redistribute import (
    Placements,
    activation_placements,
    local_elements,
    value_placements,
)
from shardwise.cost.problem import machine_of
from shardwise.cost.stage_formulas import BOUNDARY_BUFFERS
from shardwise.cost.training import StepCounts, Training
from shardwise.errors import ConfigError, InternalError
from shardwise.graph import (
    Block,
    BlockLayout,
    GraphLayout,
    OpGraph,
    StagedLayout,
    skip_tensors_of,
    tensor_shapes,
)
from shardwise.pareto import COLUMNS, Chain, Factor, FactorGraph, Segment
from shardwise.schedule import NAMES, in_flight

# Layouts of a whole graph


class Chosen(Protocol):
    """Choices of a solution in one segment: the index of the mode, and an option of each variable."""

    @property
    def mode(self) -> int: ...

    @property
    def choices(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class LayoutSpace:
    """All layouts of `graph` on `mesh`: a chain with one segment per block, and the variables of each
    segment.

    Where blocks share a parameter, its placement for all readers is a shared variable. So is the placement of
    a skip tensor.
    """

    graph: OpGraph
    mesh: Mesh
    chain: Chain
    variables: tuple[tuple[Variable, ...], ...]

    @property
    def layouts_per_operator(self) -> dict[str, int]:
        """Number of layouts of each operator."""
        return {
            variable.name: len(variable.options)
            for variables in self.variables
            for variable in variables
            if variable.role == "rules"
        }

    def layout(self, solution: Sequence[Chosen]) -> GraphLayout:
        """The layout of one solution of the chain, with repetitions one by one."""
        return self.layouts([solution])[0]

    def layouts(self, solutions: Sequence[Sequence[Chosen]]) -> list[GraphLayout]:
        """The layouts of many solutions; equal choices of a block share one record."""
        places = [place for place, link in enumerate(self.chain) for _ in range(link.repeat)]
        known: dict[tuple[int, int, tuple[int, ...]], BlockLayout] = {}
        found = []
        for solution in solutions:
            stored: dict[str, Placements] = {}
            blocks = []
            for place, chosen in zip(places, solution, strict=True):
                key = (place, chosen.mode, chosen.choices)
                if key not in known:
                    known[key] = self._block(place, chosen)
                block = known[key]
                stored |= {
                    name: placements for name, placements in block.stored.items() if name in block.used
                }
                if block.used:
                    shared = {name: stored[name] for name in block.used}
                    block = replace(block, stored={**block.stored, **shared})
                blocks.append(block)
            found.append(GraphLayout(ranks=self.mesh.ranks, blocks=tuple(blocks)))
        return found

    def _block(self, place: int, chosen: Chosen) -> BlockLayout:
        """The layout of one block; a shared parameter is stored where its first reader is."""
        found: dict[Role, dict[str, Any]] = {role: {} for role in ROLES}
        for variable, choice in zip(self.variables[place], chosen.choices, strict=True):
            found[variable.role][variable.name] = variable.options[choice]
        is_saved = self.chain[place].modes[chosen.mode][0] == "kept"
        mode: Literal["kept", "recomputed"] = "kept" if is_saved else "recomputed"
        return BlockLayout(name=self.graph.blocks[place].name, mode=mode, **found)


def layout_chain(graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh) -> LayoutSpace:
    """Costs of every layout of `graph` on `mesh`. Raises ConfigError where a device class lacks the dtype."""
    context = cost_context_of(cluster, mesh, training)
    structures = structures_of(graph, training)
    fixed_s, fixed_bytes = fixed_columns(context)
    graphs: list[BlockGraphs] = []
    for place, structure in enumerate(structures):
        is_last = place == len(structures) - 1
        block_context = BlockContext(
            next_saves_entry=next_saves_entry(structures, place),
            shared=shared_parameters(graph, place),
            fixed_s=fixed_s if is_last else 0.0,
            fixed_bytes=fixed_bytes if is_last else 0.0,
        )
        graphs.append(block_graphs(context, structure, block_context))
    return LayoutSpace(
        graph=graph,
        mesh=mesh,
        chain=tuple(
            Segment(block.name, own.modes, block.repeat)
            for block, own in zip(graph.blocks, graphs, strict=True)
        ),
        variables=tuple(own.variables for own in graphs),
    )


def shared_across(graph: OpGraph) -> list[str]:
    """The parameters that several blocks read."""
    homes: dict[str, set[str]] = {}
    for block in graph.blocks:
        for op in block.operators:
            for parameter in op.parameters:
                homes.setdefault(parameter.name, set()).add(block.name)
    return [name for name, blocks in homes.items() if len(blocks) > 1]


def shared_parameters(graph: OpGraph, place: int) -> dict[str, SharedParameter]:
    """The parameters of a block that have several readers, in this block or elsewhere."""
    readers: dict[str, list[tuple[int, tuple[int, int]]]] = {}
    for home, block in enumerate(graph.blocks):
        for at, op in enumerate(block.operators):
            for slot, parameter in enumerate(op.parameters):
                readers.setdefault(parameter.name, []).append((home, (at, slot)))
    found = {}
    for name, places in readers.items():
        if len(places) > 1:
            home, first = places[0]
            is_across = len({home for home, _ in places}) > 1
            found[name] = SharedParameter(len(places), first if home == place else None, is_across)
    return found


def structures_of(graph: OpGraph, training: Training) -> list[Structure]:
    """The structure of each block, in order."""
    structures: list[Structure] = []
    skips, shapes = skip_tensors_of(graph), tensor_shapes(graph)
    needs_gradient = is_saved = False
    there: dict[str, bool] = {}
    for place, block in enumerate(graph.blocks):
        # Repetitions are equal: the first one's entry needs a gradient, and memory, if the entries of the
        # others do.
        trains = block.repeat > 1 and any(op.parameters for op in block.operators)
        structure = structure_of(
            block,
            graph.inputs,
            shapes=shapes[place],
            entry_needs_gradient=needs_gradient or trains,
            skip_inputs={name: there[name] for name in skips.skip_inputs[place]},
            skip_outputs=skips.skip_outputs[place],
            entry_is_saved_elsewhere=is_saved and block.repeat == 1,
            has_next=place < len(graph.blocks) - 1,
            stops_early=training.profile.recompute_stops_early,
        )
        structures.append(structure)
        needs_gradient = structure.result_needs_gradient
        is_saved = block.operators[-1].name in structure.skip_outputs
        there |= structure.skip_outputs
    return structures


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """Costs of a step that no layout changes.

    Seconds: the host's part of a step (`host_s`), and the all-reduce of the gradient norm (`norm_s`).
    `context_bytes` are outside the allocator: the driver's context, and communicators of the world and of
    each axis. `buffer_bytes` are send buffers.
    """

    host_s: float
    norm_s: float
    context_bytes: float
    buffer_bytes: float


def fixed_costs(context: CostContext) -> FixedCosts:
    """The fixed costs of a stage, or of a whole graph."""
    efficiency = context.machine.efficiency
    devices = context.counts.stages * context.mesh.devices
    # A stage and its neighbours form a group of their own.
    axes = sum(size > 1 for size in (*context.ranks, context.counts.stages))
    return FixedCosts(
        host_s=context.profile.host_step_s,
        norm_s=float(context.fabric.number_s(devices)),
        context_bytes=efficiency.context_bytes + (1.0 + axes) * efficiency.communicator_bytes,
        buffer_bytes=context.counts.buffer_bytes,
    )


def fixed_columns(context: CostContext) -> tuple[float, float]:
    """(Seconds, bytes) of the fixed costs; bytes outside of the allocator are divided by its fragmentation
    factor.
    """
    fixed = fixed_costs(context)
    reserved = 1.0 + context.machine.efficiency.fragmentation_ratio
    return fixed.host_s + fixed.norm_s, fixed.context_bytes / reserved + fixed.buffer_bytes


def next_saves_entry(structures: Sequence[Structure], place: int) -> bool:
    """Whether the next block (or the next repetition of this one) saves the block's result."""
    if structures[place].block.repeat > 1:
        return structures[place].saves_entry
    return place + 1 < len(structures) and structures[place + 1].saves_entry


# Layouts of a pipeline stage


def entry_shapes(graph: OpGraph) -> tuple[tuple[int, ...] | None, ...]:
    """Shape of the entry of each block, repetitions counted; None where a block has no entry."""
    shapes: list[tuple[int, ...] | None] = []
    for block, own in zip(graph.blocks, tensor_shapes(graph), strict=True):
        shapes += [own[block.entry] if block.entry is not None else None] * block.repeat
    return tuple(shapes)


def transfer_placements(shape: tuple[int, ...], ranks: tuple[int, ...]) -> Placements:
    """Placement of a tensor of `shape` between stages: the first of those with the fewest elements per rank.

    Each rank sends its shard to the rank with the same index in the next stage.
    """
    table = activation_placements(shape, ranks)
    return table.named[int(table.local_elements(table.placements).argmin())]


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
    """Costs of every layout of the blocks in [first, end) of `graph` on `mesh`, repetitions counted.

    Sizes are those of a micro-batch. Raises ConfigError where several blocks read one parameter. Skip tensors
    stay within the stage (`blocks_joined_by_skips`).
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
    """A relaxation of `stage_layouts`: border tensors may have any placement, and sends are free.

    Its frontier is a lower bound of every stage that contains these blocks.
    """
    alone = replace(counts, sent_forward_s=0.0, sent_backward_s=0.0, buffer_bytes=0.0)
    return _RelaxedBuilder(
        cost_context_of(cluster, mesh, training, alone), graph, training, first, end
    ).layout_space()


class _Builder:
    """The segments of a stage."""

    def __init__(
        self, context: CostContext, graph: OpGraph, training: Training, first: int, end: int
    ) -> None:
        if shared := shared_across(graph):
            raise ConfigError(
                "cannot be cut into stages: blocks share a parameter", key="--stages",
                found=", ".join(shared), allowed="a graph in which only one block reads each parameter",
            )  # fmt: skip
        self.shapes = tensor_shapes(graph)
        self.context, self.graph, self.first, self.end = context, graph, first, end
        self.structures = structures_of(graph, training)
        self.blocks = [place for place, block in enumerate(graph.blocks) for _ in range(block.repeat)]
        self.is_cut_before, self.is_cut_after = first > 0, end < len(self.blocks)
        self.known: dict[tuple[int, bool, bool], BlockGraphs] = {}

    def layout_space(self) -> LayoutSpace:
        """The segments of the stage with their variables."""
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
        """Runs of the same block: (block, repetitions, is at the first cut, is at the last cut).

        A repetition at a cut is a run of its own.
        """
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
        """The factor graphs of a block.

        At the last cut the next stage saves a copy of its own. The end of the stage has the costs that belong
        to no operator.
        """
        fixed_s, fixed_bytes = fixed_columns(self.context) if is_end else (0.0, 0.0)
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
        """Whether the readers of a block's result save it in its placement for all of them."""
        return next_saves_entry(self.structures, place) and not is_last

    def cut(self, part: FactorGraph, place: int, *, is_first: bool, is_last: bool) -> FactorGraph:
        """The factor graph of a block whose entry or result crosses a cut."""
        block, shapes = self.graph.blocks[place], self.shapes[place]
        if is_first and part.entry is not None and block.entry is not None:
            crossing = self.crossing(part.entry, shapes[block.entry])
            part = replace(part, factors=(*part.factors, *crossing), entry=None)
        if is_last and part.exit is not None:
            crossing = self.crossing(part.exit, shapes[block.operators[-1].name])
            part = replace(part, factors=(*part.factors, *crossing), exit=None)
        return part

    def crossing(self, variable: int, shape: tuple[int, ...]) -> Sequence[Factor]:
        """A factor that fixes the placement of a tensor of `shape` at a cut; all others have infinite
        cost.
        """
        table = activation_placements(shape, self.context.ranks)
        costs = np.full((len(table), len(COLUMNS)), np.inf)
        costs[table.named.index(transfer_placements(shape, self.context.ranks))] = 0.0
        return (Factor((variable,), costs),)


class _RelaxedBuilder(_Builder):
    """The segments of some blocks in the middle of a stage."""

    def is_saved_after(self, place: int, *, is_last: bool) -> bool:
        return next_saves_entry(self.structures, place)

    def crossing(self, variable: int, shape: tuple[int, ...]) -> Sequence[Factor]:
        return ()


# Sends between stages


@dataclass(frozen=True, slots=True, eq=False)
class StageTransfer:
    """Sends between pipeline stages of a graph.

    `nbytes` is a rank's shard of each block's entry, repetitions counted. `tiers` is the tier between the
    ranks of each stage and those of the next with the same index; `senders` ranks of a group below that tier
    send at once. The share `overlap` of a send overlaps with computation.
    """

    fabric: CollectiveModel
    nbytes: tuple[float, ...]
    tiers: tuple[int, ...]
    senders: tuple[int, ...]
    overlap: float

    def sent_s(self, stage: int, block: int) -> float:
        """Seconds of a send from `stage` to the next, which begins with `block`, or back."""
        return float(self.fabric.send_s(self.nbytes[block], self.tiers[stage], self.senders[stage]))

    def hop_s(self, stage: int, block: int) -> float:
        """Seconds of that send that overlap with computation on both ranks."""
        return self.overlap * self.sent_s(stage, block)

    def counts(
        self, stage: int, first: int, end: int, microbatches: int, *, schedule: str = "1f1b"
    ) -> StepCounts:
        """Step counts of a stage with the blocks in [first, end), under a schedule with one stage per
        rank.
        """
        stages = len(self.tiers) + 1
        blocked = 1.0 - self.overlap
        code = NAMES.index(schedule)
        there_s = blocked * self.sent_s(stage, end) if stage < stages - 1 else 0.0
        back_s = blocked * self.sent_s(stage - 1, first) if stage else 0.0
        out_bytes = self.nbytes[end] if stage < stages - 1 else 0.0
        return StepCounts(
            microbatches=microbatches,
            in_flight=int(in_flight(code, stages, microbatches, 1, stage)),
            stages=stages,
            sent_forward_s=there_s,
            sent_backward_s=back_s,
            buffer_bytes=BOUNDARY_BUFFERS * max(self.nbytes[first] if stage else 0.0, out_bytes),
        )


def stage_transfer_of(
    graph: OpGraph,
    cluster: Cluster,
    training: Training,
    mesh: Mesh,
    stages: int,
    layout: StagedLayout | None = None,
) -> StageTransfer:
    """The sends between `stages` consecutive stages, each on `mesh.devices` devices of the cluster.

    Tensors have the placements of `layout` at its cuts; without one, those with the fewest elements
    (`transfer_placements`).
    """
    machine = machine_of(cluster, training.dtype, training.optimizer, training.profile)
    element_bytes = machine.recipe.activation_bytes
    shapes = entry_shapes(graph)
    if layout is None:
        elements = [
            0.0
            if shape is None
            else float(local_elements(shape, mesh.ranks, np.array(transfer_placements(shape, mesh.ranks))))
            for shape in shapes
        ]
    else:
        elements = [0.0] * len(shapes)
        blocks = [block for block in graph.blocks for _ in range(block.repeat)]
        for cut in layout.cuts:
            shape, name = shapes[cut], blocks[cut].entry
            if shape is None or name is None:
                raise InternalError(f"block {blocks[cut].name} has no entry tensor from the stage before it")
            placements = value_placements(np.array(layout.blocks[cut].tensors[name]))
            elements[cut] = float(local_elements(shape, mesh.ranks, placements))
    spans = [tier.span for tier in cluster.tiers]
    tiers = []
    for stage in range(stages - 1):
        begin, size = stage * mesh.devices, mesh.devices
        pairs = [(rank, rank + size) for rank in range(begin, begin + size)]
        tiers.append(
            next(place for place, span in enumerate(spans) if all(a // span == b // span for a, b in pairs))
        )
    return StageTransfer(
        fabric=collective_model_of(machine),
        nbytes=tuple(element_bytes * count for count in elements),
        tiers=tuple(tiers),
        senders=tuple(min(mesh.devices, 1 if tier == 0 else spans[tier - 1]) for tier in tiers),
        overlap=training.profile.pipeline_overlap,
    )
