"""A graph on a mesh as a chain of choices, and solutions of the chain as layouts with names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Protocol

from shardwise.cluster import Cluster, Mesh
from shardwise.cost.layouts.block import ROLES, LaidBlock, Role, Surroundings, Variable, laid_block
from shardwise.cost.layouts.ground import Ground, ground_of
from shardwise.cost.layouts.structure import Structure, structure_of
from shardwise.cost.training import Training
from shardwise.errors import ConfigError
from shardwise.frontier import Chain, Link
from shardwise.graph import BlockLayout, GraphLayout, OpGraph


class Chosen(Protocol):
    """What one occurrence of a link chose: the place of its mode, and an option of each variable."""

    @property
    def mode(self) -> int: ...

    @property
    def choices(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, eq=False)
class LaidOut:
    """All layouts of `graph` on `mesh`: a chain of choices, one link per block, and what its variables are.

    `layouts_per_operator` are the numbers of ways to lay out each operator of each block.
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
        places = [place for place, link in enumerate(self.chain) for _ in range(link.repeat)]
        return GraphLayout(
            blocks=tuple(self._block(place, chosen) for place, chosen in zip(places, solution, strict=True))
        )

    def _block(self, place: int, chosen: Chosen) -> BlockLayout:
        found: dict[Role, dict[str, Any]] = {role: {} for role in ROLES}
        for variable, choice in zip(self.variables[place], chosen.choices, strict=True):
            found[variable.role][variable.name] = variable.options[choice]
        is_kept = self.chain[place].modes[chosen.mode][0] == "kept"
        name = self.graph.blocks[place].name
        return BlockLayout(name=name, mode="kept" if is_kept else "recomputed", **found)


def layout_chain(graph: OpGraph, cluster: Cluster, training: Training, mesh: Mesh) -> LaidOut:
    """Every way to lay `graph` out on `mesh`, priced (docs/tracking.md). ConfigError where the devices lack
    the dtype."""
    _refuse_shared(graph)
    ground = ground_of(cluster, mesh, training)
    structures = structures_of(graph, training)
    fixed_s, fixed_bytes = fixed_costs(ground)
    laid: list[LaidBlock] = []
    for structure, following in zip(structures, [*structures[1:], None], strict=True):
        around = Surroundings(
            next_keeps_entry=_keeps_entry(structure, following),
            fixed_s=fixed_s if following is None else 0.0,
            fixed_bytes=fixed_bytes if following is None else 0.0,
        )
        laid.append(laid_block(ground, structure, around))
    links = (Link(block.name, own.modes, block.repeat) for block, own in zip(graph.blocks, laid, strict=True))
    return LaidOut(graph, mesh, tuple(links), tuple(own.variables for own in laid))


def _refuse_shared(graph: OpGraph) -> None:
    seen: set[str] = set()
    for op in (op for block in graph.blocks for op in block.operators):
        for parameter in op.parameters:
            if parameter.name in seen:
                raise ConfigError(
                    "is read by several operators, which layouts do not price", key=op.name,
                    found=parameter.name, allowed="parameters with one reader each",
                )  # fmt: skip
            seen.add(parameter.name)


def structures_of(graph: OpGraph, training: Training) -> list[Structure]:
    """The structure of each block, one after the other."""
    structures: list[Structure] = []
    needs_gradient = False
    for place, block in enumerate(graph.blocks):
        # Repetitions are alike: the first one's entry needs a gradient where the others' do.
        trains = block.repeat > 1 and any(op.parameters for op in block.operators)
        structure = structure_of(
            block,
            graph.inputs,
            entry_needs_gradient=needs_gradient or trains,
            has_next=place < len(graph.blocks) - 1,
            stops_early=training.profile.recompute_stops_early,
        )
        structures.append(structure)
        needs_gradient = structure.result_needs_gradient
    return structures


def fixed_costs(ground: Ground) -> tuple[float, float]:
    """Seconds and bytes that no layout changes: the host's part of a step, joining the gradients' norm; the
    driver's context, and communicators of the world and of each axis.

    The bytes are beside the allocator's, which holds more than it gives out: so much less of them counts.
    """
    efficiency = ground.machine.efficiency
    devices = ground.mesh.devices
    axes = sum(size > 1 for size in ground.ranks)
    fixed_bytes = efficiency.context_bytes + (1.0 + axes) * efficiency.communicator_bytes
    join_s = 2.0 * log2(devices) * ground.fabric.alphas_s[-1]
    return ground.profile.host_step_s + join_s, fixed_bytes / (1.0 + efficiency.fragmentation_ratio)


def _keeps_entry(structure: Structure, following: Structure | None) -> bool:
    """Whether what comes after a block keeps the block's result: its own repetition, or the next block."""
    if structure.block.repeat > 1:
        return structure.keeps_entry
    return following is not None and following.keeps_entry
