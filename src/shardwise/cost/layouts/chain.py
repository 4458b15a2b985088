"""A graph on a mesh as a chain of choices, and solutions of the chain as layouts with names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2
from typing import Any, Literal, Protocol

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.layouts.block import ROLES, LaidBlock, Role, Sharing, Surroundings, Variable, laid_block
from shardwise.cost.layouts.forms import Placements
from shardwise.cost.layouts.ground import Ground, ground_of
from shardwise.cost.layouts.structure import Structure, structure_of
from shardwise.cost.training import Training
from shardwise.frontier import Chain, Link
from shardwise.graph import BlockLayout, GraphLayout, OpGraph, loans_of, tensor_shapes


class Chosen(Protocol):
    """What one occurrence of a link chose: the place of its mode, and an option of each variable."""

    @property
    def mode(self) -> int: ...

    @property
    def choices(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """All layouts of `graph` on `mesh`: a chain of choices, one link per block, and what its variables are.

    Where blocks share a parameter, to which place it is brought for all of its readers is a hub; so is where
    a tensor lies that a block lends to others.
    """

    graph: OpGraph
    mesh: Mesh
    chain: Chain
    variables: tuple[tuple[Variable, ...], ...]

    @property
    def layouts_per_operator(self) -> dict[str, int]:
        """How many layouts each operator has."""
        return {
            variable.name: len(variable.options)
            for variables in self.variables
            for variable in variables
            if variable.role == "rules"
        }

    def layout(self, solution: Sequence[Chosen]) -> GraphLayout:
        """The layout that a solution of the chain chose, repetitions one by one."""
        return self.layouts([solution])[0]

    def layouts(self, solutions: Sequence[Sequence[Chosen]]) -> list[GraphLayout]:
        """The same of many; blocks that chose alike are told once."""
        places = [place for place, link in enumerate(self.chain) for _ in range(link.repeat)]
        told: dict[tuple[int, int, tuple[int, ...]], BlockLayout] = {}
        found = []
        for solution in solutions:
            stored: dict[str, Placements] = {}
            blocks = []
            for place, chosen in zip(places, solution, strict=True):
                key = (place, chosen.mode, chosen.choices)
                if key not in told:
                    told[key] = self._block(place, chosen)
                block = told[key]
                stored |= {name: form for name, form in block.stored.items() if name in block.used}
                if block.used:
                    shared = {name: stored[name] for name in block.used}
                    block = replace(block, stored={**block.stored, **shared})
                blocks.append(block)
            found.append(GraphLayout(ranks=self.mesh.ranks, blocks=tuple(blocks)))
        return found

    def _block(self, place: int, chosen: Chosen) -> BlockLayout:
        """What one block chose; a parameter that several read is stored where the first of them is."""
        found: dict[Role, dict[str, Any]] = {role: {} for role in ROLES}
        for variable, choice in zip(self.variables[place], chosen.choices, strict=True):
            found[variable.role][variable.name] = variable.options[choice]
        is_kept = self.chain[place].modes[chosen.mode][0] == "kept"
        mode: Literal["kept", "recomputed"] = "kept" if is_kept else "recomputed"
        return BlockLayout(name=self.graph.blocks[place].name, mode=mode, **found)


def layout_chain(graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh) -> LaidOut:
    """Every way to lay `graph` out on `mesh`, priced (docs/tracking.md). ConfigError where the devices lack
    the dtype."""
    ground = ground_of(cluster, mesh, training)
    structures = structures_of(graph, training)
    fixed_s, fixed_bytes = fixed_costs(ground)
    laid: list[LaidBlock] = []
    for place, structure in enumerate(structures):
        is_last = place == len(structures) - 1
        around = Surroundings(
            next_keeps_entry=next_keeps_entry(structures, place),
            shared=sharings(graph, place),
            fixed_s=fixed_s if is_last else 0.0,
            fixed_bytes=fixed_bytes if is_last else 0.0,
        )
        laid.append(laid_block(ground, structure, around))
    return LaidOut(
        graph=graph,
        mesh=mesh,
        chain=tuple(
            Link(block.name, own.modes, block.repeat) for block, own in zip(graph.blocks, laid, strict=True)
        ),
        variables=tuple(own.variables for own in laid),
    )


def shared_across(graph: OpGraph) -> list[str]:
    """The parameters that several blocks read."""
    homes: dict[str, set[str]] = {}
    for block in graph.blocks:
        for op in block.operators:
            for parameter in op.parameters:
                homes.setdefault(parameter.name, set()).add(block.name)
    return [name for name, blocks in homes.items() if len(blocks) > 1]


def sharings(graph: OpGraph, place: int) -> dict[str, Sharing]:
    """The parameters of a block that have several readers, there or elsewhere."""
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
            found[name] = Sharing(len(places), first if home == place else None, is_across)
    return found


def structures_of(graph: OpGraph, training: Training) -> list[Structure]:
    """The structure of each block, one after the other."""
    structures: list[Structure] = []
    loans, shapes = loans_of(graph), tensor_shapes(graph)
    needs_gradient = is_held = False
    there: dict[str, bool] = {}
    for place, block in enumerate(graph.blocks):
        # Repetitions are alike: the first one's entry needs a gradient, and room, where the others' do.
        trains = block.repeat > 1 and any(op.parameters for op in block.operators)
        structure = structure_of(
            block,
            graph.inputs,
            shapes=shapes[place],
            entry_needs_gradient=needs_gradient or trains,
            borrowed={name: there[name] for name in loans.borrowed[place]},
            lent=loans.lent[place],
            entry_is_held=is_held and block.repeat == 1,
            has_next=place < len(graph.blocks) - 1,
            stops_early=training.profile.recompute_stops_early,
        )
        structures.append(structure)
        needs_gradient = structure.result_needs_gradient
        is_held = block.operators[-1].name in structure.lent
        there |= structure.lent
    return structures


def fixed_costs(ground: Ground) -> tuple[float, float]:
    """Seconds and bytes that no layout changes: the host's part of a step, joining the gradients' norm; the
    driver's context, and communicators of the world and of each axis.

    The bytes are beside the allocator's, which holds more than it gives out: so much less of them counts.
    """
    efficiency = ground.machine.efficiency
    devices = ground.turns.stages * ground.mesh.devices
    # A stage and its neighbours are groups of their own.
    axes = sum(size > 1 for size in (*ground.ranks, ground.turns.stages))
    fixed_bytes = efficiency.context_bytes + (1.0 + axes) * efficiency.communicator_bytes
    join_s = 2.0 * log2(devices) * ground.fabric.alphas_s[-1]
    held_bytes = fixed_bytes / (1.0 + efficiency.fragmentation_ratio) + ground.turns.buffer_bytes
    return ground.profile.host_step_s + join_s, held_bytes


def next_keeps_entry(structures: Sequence[Structure], place: int) -> bool:
    """Whether what comes after a block keeps the block's result: its own repetition, or the next block."""
    if structures[place].block.repeat > 1:
        return structures[place].keeps_entry
    return place + 1 < len(structures) and structures[place + 1].keeps_entry
