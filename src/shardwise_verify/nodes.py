"""Nodes of the proof's branch and bound, and the branching rules that divide them.

A node is a set of candidates that agree in the choices made so far (`ProofNodes`, as columns). A `Box` has
its open ranges: layers of the first and last stage, and recomputed layers. `Splits` counts the candidates in
a box by prefix sums over rows 8 and 9 of docs/reference/space.md. `PipelineContext` has the costs that all
nodes of one pp and schedule share; `LayerBounds` has the fewest layers of each stage of a node. The
`branch_*` functions and `bisected` fix one more choice in every possible way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from shardwise_verify.collectives import Fabric
from shardwise_verify.grids import GridCosts, ShardPairs
from shardwise_verify.layers import SELECTIVE_AMOUNTS
from shardwise_verify.problem import Figures
from shardwise_verify.records import FIELDS, OFFLOADS, RECOMPUTES
from shardwise_verify.schedules import moments_of, warmup_cooldown_of
from shardwise_verify.space import SpaceDefinition
from shardwise_verify.strategy_rows import Chunks, Column, StrategyRows

FULL = RECOMPUTES.index("full")


@dataclass(frozen=True, slots=True)
class Box:
    """Inclusive ranges of the first stage, the last stage and the recomputed layers; each of shape (boxes,).

    Below three stages the last stage follows from the first, and its range is 0 to 0.
    """

    first_low: Column
    first_high: Column
    last_low: Column
    last_high: Column
    layers_low: Column
    layers_high: Column

    def take(self, index: Column) -> Box:
        return Box(*(getattr(self, name)[index] for name in Box.__dataclass_fields__))

    @property
    def is_point(self) -> Column:
        """Whether the first and the last stage are single values."""
        return (self.first_low == self.first_high) & (self.last_low == self.last_high)


@dataclass(frozen=True, slots=True)
class Splits:
    """The splits of `layers` layers over `stages` stages in a space, with their choices of recompute.

    `hulls` [recompute] is the smallest box around all splits with that choice, None where there is none.
    `prefix_sums` [recompute][layers, first, last] counts the splits below both ends that recompute at least
    that many layers. `module_sets` are the sets of modules that selective recomputation may name.
    """

    layers: int
    stages: int
    hulls: tuple[tuple[int, ...] | None, ...]
    prefix_sums: tuple[Column, ...]
    module_sets: tuple[str, ...]

    def choices(self, recompute: int) -> int:
        """Number of sets of modules with this choice of recompute."""
        return len(self.module_sets) if RECOMPUTES[recompute] == "selective" else 1

    def count(self, recompute: Column, box: Box) -> Column:
        """Candidates in each box, with one set of modules: splits times the numbers of recomputed layers that
        they allow."""
        found = np.zeros(len(box.first_low), dtype=np.int64)
        for code, prefix_sums in enumerate(self.prefix_sums):
            at = np.flatnonzero(recompute == code)
            part = box.take(at)
            found[at] = _between(prefix_sums, part.layers_low, part) - _between(
                prefix_sums, part.layers_high + 1, part
            )
        return found


def _between(prefix_sums: Column, layers: Column, box: Box) -> Column:
    first, last = box.first_high + 1, box.last_high + 1
    return (
        prefix_sums[layers, first, last]
        - prefix_sums[layers, box.first_low, last]
        - prefix_sums[layers, first, box.last_low]
        + prefix_sums[layers, box.first_low, box.last_low]
    )


def splits_of(space: SpaceDefinition, stages: int) -> Splits:
    """The splits of the space for this number of stages."""
    ends = _ends(space, stages)
    fullest = np.zeros_like(ends, dtype=np.int64)
    for first, last in np.argwhere(ends):
        fullest[first, last] = space.largest(int(first), _last(space, stages, int(first), int(last)), stages)
    hulls: list[tuple[int, ...] | None] = []
    prefix_sums = []
    for code, recompute in enumerate(RECOMPUTES):
        numbers = range(1, space.layers + 1) if code == FULL else (0,)
        chosen = [
            ends & _allowed_splits(space, recompute, number, fullest)
            if number in numbers
            else np.zeros_like(ends)
            for number in range(space.layers + 2)
        ]
        hulls.append(_hull(np.array(chosen)))
        from_on = np.cumsum(np.array(chosen, dtype=np.int64)[::-1], axis=0)[::-1]
        padded = np.pad(from_on.cumsum(axis=1).cumsum(axis=2), ((0, 1), (1, 0), (1, 0)))
        prefix_sums.append(padded)
    return Splits(space.layers, stages, tuple(hulls), tuple(prefix_sums), space.module_sets)


def _allowed_splits(space: SpaceDefinition, recompute: str, number: int, fullest: Column) -> Column:
    """Which splits, by their fullest stage, allow this choice of recompute."""
    allows_set = bool(space.module_sets) if recompute == "selective" else space.allows(recompute_modules="")
    if not allows_set or not space.allows(recompute=recompute, recompute_layers=number):
        return np.zeros(fullest.shape, dtype=bool)
    if number == 0:
        return np.ones(fullest.shape, dtype=bool)
    return fullest == number if space.is_core else fullest >= number


def _hull(chosen: Column) -> tuple[int, ...] | None:
    """The smallest box around the chosen entries, as the members of a Box; `chosen` is [layers, first,
    last]."""
    if not chosen.any():
        return None
    found: list[int] = []
    for axis in (1, 2, 0):
        others = tuple(other for other in range(3) if other != axis)
        places = np.flatnonzero(chosen.any(axis=others))
        found += [int(places[0]), int(places[-1])]
    return tuple(found)


def _ends(space: SpaceDefinition, stages: int) -> Column:
    """[first, last] that the space allows; below three stages the last follows from the first, and its
    axis has length 1."""
    even_first, even_last = space.even_ends(stages)
    wide = not space.is_core and stages > 1
    if stages <= 2:
        found = np.zeros((space.layers + 1, 1), dtype=bool)
        firsts = range(space.layers + 1) if wide else (even_first,)
        for first in firsts:
            last = _last(space, stages, first, 0)
            found[first, 0] = space.allows(first_stage_layers=first, last_stage_layers=last)
        return found
    found = np.zeros((even_first + 1, even_last + 1), dtype=bool)
    for first in range(even_first + 1) if wide else (even_first,):
        for last in range(even_last + 1) if wide else (even_last,):
            found[first, last] = space.allows(first_stage_layers=first, last_stage_layers=last)
    return found


def _last(space: SpaceDefinition, stages: int, first: int, last: int) -> int:
    """Layers of the last stage of an entry of the table."""
    return {1: first, 2: space.layers - first}.get(stages, last)


EMBEDDING, HEAD = -2, -1
"""Indices of the embedding and the head among the blocks, after the kinds of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofNodes:
    """Nodes as columns, each of shape (nodes,): the grid and the codes of the choices made.

    `recompute` and `offload` are indices into RECOMPUTES and OFFLOADS, `modules` into the sets of modules of
    the space; `pair` is an index into `ShardPairs`. -1 stands for an open choice, 0 in `optim`. `weight`
    counts the candidates for each split and number of recomputed layers.
    """

    grid: Column
    recompute: Column
    modules: Column
    offload: Column
    pair: Column
    optim: Column
    weight: Column
    box: Box

    def __len__(self) -> int:
        return len(self.grid)

    def take(self, index: Column) -> ProofNodes:
        return ProofNodes(**{field.name: _taken(getattr(self, field.name), index) for field in fields(self)})


def _taken(value: Column | Box, index: Column) -> Column | Box:
    return value.take(index) if isinstance(value, Box) else value[index]


def join_nodes(parts: list[ProofNodes]) -> ProofNodes:
    """All nodes of the parts, in order."""
    boxes = Box(
        *(np.concatenate([getattr(part.box, name) for part in parts]) for name in Box.__dataclass_fields__)
    )
    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(ProofNodes)
        if field.name != "box"
    }
    return ProofNodes(**columns, box=boxes)


@dataclass(frozen=True, kw_only=True)
class PipelineContext(Chunks):
    """All grids of one pp under one schedule and number of chunks."""

    figures: Figures
    fabric: Fabric
    grid_costs: GridCosts
    pairs: ShardPairs
    splits: Splits

    @cached_property
    def rank_of(self) -> Column:
        """The rank of each stage."""
        stage = np.arange(self.stages)
        return np.minimum(stage, 2 * self.pp - 1 - stage) if self.is_v else stage % self.pp

    def of_ranks(self, of_stages: Column) -> Column:
        """Sums over the stages of each rank: [stages, nodes] to [pp, nodes]."""
        if self.is_v:
            summed: Column = of_stages[: self.pp] + of_stages[self.pp :][::-1]
            return summed
        return of_stages.reshape(self.vpp, self.pp, -1).sum(axis=0)

    @cached_property
    def up_to(self) -> Column:
        """[kind, n]: number of layers of each kind among the first n layers."""
        pattern = np.array(self.figures.model.layer_kinds)
        each = np.arange(len(self.figures.model.kinds))[:, None] == pattern[None, :]
        return np.pad(each.cumsum(axis=1), ((0, 0), (1, 0)))

    def whole_model(self, of_blocks: Column) -> Column:
        """The sum over all blocks of the model: [block, ...] to [...]."""
        found: Column = of_blocks[EMBEDDING] + of_blocks[HEAD]
        for kind, numbers in enumerate(self.up_to):
            found = found + numbers[-1] * of_blocks[kind]
        return found

    @cached_property
    def windows(self) -> tuple[Column, ...]:
        """[kind, n] each: mixes of kinds, one of which is cheapest among all runs of n consecutive layers."""
        kinds, length = self.up_to.shape[0], self.up_to.shape[1]
        layers = np.arange(length)
        if kinds == 1:
            return (layers[None, :],)
        if kinds > 2:
            return tuple(np.where(np.arange(kinds)[:, None] == kind, layers, 0) for kind in range(kinds))
        counts = [self.up_to[1][width:] - self.up_to[1][: length - width] for width in range(length)]
        fewest, most = (np.array([edge(count) for count in counts]) for edge in (np.min, np.max))
        return tuple(np.array([layers - second, second]) for second in (fewest, most))

    @cached_property
    def ramps(self) -> tuple[Column, dict[str, Column]]:
        """Index of each grid into the tables, and the tables [stage or rank; index]: the fields of
        `warmup_cooldown_of`."""
        values, place = np.unique(self.grid_costs.microbatches, return_inverse=True)
        found = [warmup_cooldown_of(self.schedule, self.pp, self.vpp, int(value)) for value in values]
        names = (
            "warmup_forwards",
            "cooldown_backwards",
            "cooldown_inputs",
            "cooldown_weights",
            "first_backward_stage",
            "last_forward_stage",
            "has_steady_state",
        )
        tables = {name: np.array([getattr(ramps, name) for ramps in found]).T for name in names}
        return place, tables

    def moments(self, nodes: ProofNodes) -> Iterator[tuple[Column, tuple[Column, ...]]]:
        """The nodes with each number of micro-batches, and what `moments_of` has for them."""
        values, place = np.unique(self.grid_costs.microbatches, return_inverse=True)
        counts = [moments_of(self.schedule, self.pp, self.vpp, int(value)) for value in values]
        of_node = place[nodes.grid]
        for number in np.unique(of_node):
            yield np.flatnonzero(of_node == number), counts[number]

    def ramp(self, name: str, nodes: ProofNodes) -> Column:
        """[stage or rank; node] of a table of `ramps`."""
        place, tables = self.ramps
        return tables[name][:, place[nodes.grid]]

    def amount(self, name: str, nodes: ProofNodes) -> Column:
        """[kinds, embedding, head; node]."""
        if name in SELECTIVE_AMOUNTS:
            found: Column = self.grid_costs.selective[name][nodes.modules, :, nodes.grid].T
            return found
        return self.grid_costs.amounts[name][:, nodes.grid]

    def with_traffic(self, phase: str, nodes: ProofNodes, *, is_paired: bool) -> Column:
        """Seconds of a phase in each block, with the communication of sharding where the pair is fixed."""
        seconds = self.amount(f"{phase}_s", nodes)
        if not is_paired:
            return seconds
        return seconds + self.pairs.traffic[f"{phase}_traffic_s"][:, nodes.pair]


@dataclass(frozen=True, kw_only=True)
class LayerBounds:
    """The fewest layers of each stage of each node, `least` [stage, node], and the possible mixes of kinds.

    `mixes` are [kind, stage, node] each; for any amount, one of them gives the least sum. Where the split is
    a point, all mixes are the actual layers. `most_first` is the largest number of layers of the first stage.
    """

    pipeline: PipelineContext
    least: Column
    most_first: Column
    mixes: tuple[Column, ...]

    def summed(self, of_blocks: Column) -> Column:
        """Lower bound of the sum over the blocks of each stage: [block, node] to [stage, node]."""
        found = self.of_layers(of_blocks)
        found[0] += of_blocks[EMBEDDING]
        found[-1] += of_blocks[HEAD]
        return found

    def of_layers(self, of_blocks: Column) -> Column:
        """The same over decoder layers only."""
        sums = [sum(counts * of_blocks[kind] for kind, counts in enumerate(mix)) for mix in self.mixes]
        found: Column = sums[0]
        for other in sums[1:]:
            found = np.minimum(found, other)
        return found

    def first_stage_upper_bound(self, of_blocks: Column) -> Column:
        """Upper bound of the sum over the blocks of the first stage: (nodes,)."""
        up_to = self.pipeline.up_to
        found: Column = of_blocks[EMBEDDING] + sum(
            up_to[kind][self.most_first] * of_blocks[kind] for kind in range(len(up_to))
        )
        return found + of_blocks[HEAD] if self.pipeline.stages == 1 else found

    def total(self, of_blocks: Column) -> Column:
        """The sum over the whole model: (nodes,)."""
        return self.pipeline.whole_model(of_blocks)


def layer_bounds_of(pipeline: PipelineContext, box: Box) -> LayerBounds:
    """The layer bounds of the splits of each box."""
    layers, stages = pipeline.splits.layers, pipeline.stages
    least = np.empty((stages, len(box.first_low)), dtype=np.int64)
    least[0] = box.first_low
    if stages == 2:
        least[1] = layers - box.first_high
    elif stages > 2:
        between = layers - box.first_high - box.last_high
        least[1:-1] = (between + np.arange(stages - 2)[:, None]) // (stages - 2)
        least[-1] = box.last_low
    return LayerBounds(
        pipeline=pipeline,
        least=least,
        most_first=box.first_high,
        mixes=_mixes(pipeline, least, box),
    )


def _mixes(pipeline: PipelineContext, least: Column, box: Box) -> tuple[Column, ...]:
    windows, up_to = pipeline.windows, pipeline.up_to
    if len(up_to) == 1:
        return (least[None],)
    # The first stage has the first layers of the model, the last stage the last ones.
    first = up_to[:, least[0]]
    last = up_to[:, -1:] - up_to[:, up_to.shape[1] - 1 - least[-1]]
    points = np.flatnonzero(box.is_point)
    ends = least[:, points].cumsum(axis=0)
    exact = up_to[:, ends] - up_to[:, ends - least[:, points]]
    found = []
    for window in windows:
        mix = window[:, least]
        mix[:, 0] = first
        if pipeline.stages > 1:
            mix[:, -1] = last
        mix[:, :, points] = exact
        found.append(mix)
    return tuple(found)


def branch_recompute(pipeline: PipelineContext, nodes: ProofNodes) -> ProofNodes:
    """Branching rule: every choice of recomputation."""
    found = [
        replace(
            nodes,
            recompute=np.full(len(nodes), recompute),
            modules=np.full(len(nodes), modules),
            box=_box(hull, len(nodes)),
        )
        for recompute, hull in enumerate(pipeline.splits.hulls)
        if hull is not None
        for modules in range(pipeline.splits.choices(recompute))
    ]
    return join_nodes(found)


def branch_offload(nodes: ProofNodes, offloads: Sequence[int]) -> ProofNodes:
    """Branching rule: these choices of offload."""
    found = [
        replace(nodes, offload=np.full(len(nodes), offload), weight=nodes.weight // len(offloads))
        for offload in offloads
    ]
    return join_nodes(found)


def branch_shard_pairs(pipeline: PipelineContext, nodes: ProofNodes) -> ProofNodes:
    """Branching rule: every sharding of parameters and gradients."""
    pairs = pipeline.pairs
    number = pairs.number[nodes.grid]
    index = np.repeat(np.arange(len(nodes)), number)
    first = np.repeat(np.cumsum(number) - number, number)
    pair = pairs.start[nodes.grid][index] + np.arange(len(index)) - first
    weight = pipeline.grid_costs.multiplicity[nodes.grid][index] * pairs.chains[pair]
    return replace(nodes.take(index), pair=pair, weight=weight)


def count_of_splits(splits: Splits) -> int:
    """Number of splits of the table with all their choices of recompute."""
    return sum(
        splits.choices(recompute) * int(prefix_sums[0, -1, -1])
        for recompute, prefix_sums in enumerate(splits.prefix_sums)
    )


def _box(hull: tuple[int, ...], length: int) -> Box:
    return Box(*(np.full(length, value) for value in hull))


def root_nodes(pipeline: PipelineContext, grid: Column, weight: Column) -> ProofNodes:
    """One root node for each grid; all other choices are open."""
    hulls = np.array([hull for hull in pipeline.splits.hulls if hull is not None])
    least, most = hulls.min(axis=0), hulls.max(axis=0)
    hull = tuple(int(value) for value in np.where([True, False] * 3, least, most))
    undecided = np.full(len(grid), -1)
    return ProofNodes(
        grid=grid,
        recompute=undecided,
        modules=np.zeros(len(grid), dtype=np.int64),
        offload=undecided,
        pair=undecided,
        optim=np.zeros(len(grid), dtype=np.int64),
        weight=weight,
        box=_box(hull, len(grid)),
    )


def branch_optim_shard(pipeline: PipelineContext, nodes: ProofNodes) -> ProofNodes:
    """Branching rule: every sharding of the optimizer states."""
    pairs, ranks = pipeline.pairs, pipeline.grid_costs.ranks
    listed = [
        pairs.optims[int(ranks[grid]), int(pairs.param[pair]), int(pairs.grad[pair])]
        for grid, pair in zip(nodes.grid, nodes.pair, strict=True)
    ]
    index = np.repeat(np.arange(len(nodes)), [len(optims) for optims in listed])
    optim = np.array([value for optims in listed for value in optims], dtype=np.int64)
    return replace(nodes.take(index), optim=optim, weight=pipeline.grid_costs.multiplicity[nodes.grid][index])


def batches_of(nodes: ProofNodes, length: int) -> Iterator[ProofNodes]:
    """The nodes in batches of at most `length`."""
    length = max(length, 1)
    for start in range(0, len(nodes), length):
        yield nodes.take(slice(start, start + length))


def widths(box: Box) -> Column:
    """[axis, box]: number of values of each range minus one."""
    return np.array(
        [
            box.first_high - box.first_low,
            box.last_high - box.last_low,
            box.layers_high - box.layers_low,
        ]
    )


def bisected(nodes: ProofNodes) -> ProofNodes:
    """Branching rule: both halves of every box, along its widest range."""
    widest = widths(nodes.box).argmax(axis=0)
    lower, upper = {}, {}
    for axis, name in enumerate(("first", "last", "layers")):
        low, high = getattr(nodes.box, f"{name}_low"), getattr(nodes.box, f"{name}_high")
        middle = (low + high) // 2
        lower[f"{name}_low"], upper[f"{name}_high"] = low, high
        lower[f"{name}_high"] = np.where(widest == axis, middle, high)
        upper[f"{name}_low"] = np.where(widest == axis, middle + 1, low)
    return join_nodes([replace(nodes, box=Box(**lower)), replace(nodes, box=Box(**upper))])


def rows_of_points(pipeline: PipelineContext, nodes: ProofNodes) -> StrategyRows:
    """The strategies of nodes that are single candidates."""
    grids = pipeline.grid_costs.rows.take(nodes.grid)
    fields = {name: getattr(grids, name) for name in FIELDS}
    first = nodes.box.first_low
    last = nodes.box.last_low
    if pipeline.stages <= 2:
        last = first if pipeline.stages == 1 else pipeline.splits.layers - first
    fields |= {
        "schedule": np.full(len(nodes), pipeline.schedule),
        "vpp": np.full(len(nodes), pipeline.vpp),
        "first_stage_layers": first,
        "last_stage_layers": last,
        "recompute": np.array(RECOMPUTES)[nodes.recompute],
        "recompute_modules": np.where(
            nodes.recompute == RECOMPUTES.index("selective"),
            np.array([*pipeline.splits.module_sets, ""])[nodes.modules],
            "",
        ),
        "recompute_layers": nodes.box.layers_low,
        "offload": np.array(OFFLOADS)[nodes.offload],
        "param_shard": pipeline.pairs.param[nodes.pair],
        "grad_shard": pipeline.pairs.grad[nodes.pair],
        "optim_shard": nodes.optim,
    }
    return StrategyRows(**fields)
