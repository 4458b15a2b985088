"""Cells of a cover: sets of candidates that differ in what is still open, and the amounts that all share."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from shardwise.check.collectives import Fabric
from shardwise.check.figures import Figures
from shardwise.check.grounds import GridCosts, ShardPairs
from shardwise.check.rows import Column
from shardwise.check.splits import Box, Splits
from shardwise.check.turns import in_flight_of, pending_weights_of, warmup_cooldown_of

EMBEDDING, HEAD = -2, -1
"""Places among the blocks, after the kinds of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofNodes:
    """So many cells, each member of shape (cells,): the grid and codes of what is chosen.

    `recompute` and `offload` are places in the records' words; `pair` a place in `ShardPairs`. -1 stands for
    what is open, 0 in `optim`. `weight` counts the candidates for each split and number of recomputed layers.
    """

    grid: Column
    recompute: Column
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
    """All cells of the parts, in order."""
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
class PipelineContext:
    """All grids of one pp under one schedule and number of chunks."""

    figures: Figures
    fabric: Fabric
    grid_costs: GridCosts
    pairs: ShardPairs
    schedule: str
    vpp: int
    splits: Splits

    @property
    def pp(self) -> int:
        return self.grid_costs.pp

    @property
    def stages(self) -> int:
        return self.pp * self.vpp

    @property
    def is_v(self) -> bool:
        return self.schedule in ("zb_v", "dualpipe_v")

    @property
    def splits_backward(self) -> bool:
        return self.schedule in ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")

    @property
    def ends_apart(self) -> bool:
        return self.pp > 1 and not self.is_v

    @cached_property
    def rank_of(self) -> Column:
        """The rank of each stage."""
        stage = np.arange(self.stages)
        return np.minimum(stage, 2 * self.pp - 1 - stage) if self.is_v else stage % self.pp

    def of_ranks(self, of_stages: Column) -> Column:
        """Sums over the stages of each rank: [stages, cells] to [pp, cells]."""
        if self.is_v:
            summed: Column = of_stages[: self.pp] + of_stages[self.pp :][::-1]
            return summed
        return of_stages.reshape(self.vpp, self.pp, -1).sum(axis=0)

    @cached_property
    def up_to(self) -> Column:
        """[kind, layers]: layers of each kind among so many first ones."""
        pattern = np.array(self.figures.model.pattern)
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
        """[kind, layers] each: mixes of kinds, of which one is cheapest among so many neighbouring layers."""
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
        """Of each grid its place in tables of what `warmup_cooldown_of` says, [stage or rank; place]."""
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
        in_flight = [in_flight_of(self.schedule, self.pp, self.vpp, int(value)) for value in values]
        pending_weights = [
            pending_weights_of(self.schedule, self.pp, self.vpp, int(value)) for value in values
        ]
        return place, {
            **tables,
            "in_flight": np.array(in_flight).T,
            "pending_weights": np.array(pending_weights).T,
        }

    def ramp(self, name: str, nodes: ProofNodes) -> Column:
        """[stage or rank; cell] of a table of `ramps`."""
        place, tables = self.ramps
        return tables[name][:, place[nodes.grid]]

    def amount(self, name: str, nodes: ProofNodes) -> Column:
        """[kinds, embedding, head; cell]."""
        return self.grid_costs.amounts[name][:, nodes.grid]

    def with_traffic(self, phase: str, nodes: ProofNodes, *, is_paired: bool) -> Column:
        """Seconds of a phase in each block, with the traffic of sharding where that is chosen."""
        seconds = self.amount(f"{phase}_s", nodes)
        if not is_paired:
            return seconds
        return seconds + self.pairs.traffic[f"{phase}_traffic_s"][:, nodes.pair]


@dataclass(frozen=True, kw_only=True)
class LayerBounds:
    """The least layers of each stage of each cell, `least` [stage, cell], and the mixes of kinds they may be.

    `mixes` are [kind, stage, cell] each: one of them has the least of any amount. Where the split is a point,
    all are what the stages hold. `most_first` are the most layers of the first stage.
    """

    pipeline: PipelineContext
    least: Column
    most_first: Column
    mixes: tuple[Column, ...]

    def summed(self, of_blocks: Column) -> Column:
        """The least sum over the blocks of each stage: [block, cell] to [stage, cell]."""
        found = self.of_layers(of_blocks)
        found[0] += of_blocks[EMBEDDING]
        found[-1] += of_blocks[HEAD]
        return found

    def of_layers(self, of_blocks: Column) -> Column:
        """The same over decoder layers alone."""
        sums = [sum(counts * of_blocks[kind] for kind, counts in enumerate(mix)) for mix in self.mixes]
        found: Column = sums[0]
        for other in sums[1:]:
            found = np.minimum(found, other)
        return found

    def first_stage_upper_bound(self, of_blocks: Column) -> Column:
        """The sum over the blocks of the first stage where it holds most: (cells,)."""
        up_to = self.pipeline.up_to
        found: Column = of_blocks[EMBEDDING] + sum(
            up_to[kind][self.most_first] * of_blocks[kind] for kind in range(len(up_to))
        )
        return found + of_blocks[HEAD] if self.pipeline.stages == 1 else found

    def total(self, of_blocks: Column) -> Column:
        """The sum over the whole model: (cells,)."""
        return self.pipeline.whole_model(of_blocks)


def layer_bounds_of(pipeline: PipelineContext, box: Box) -> LayerBounds:
    """What every split of each box has at least."""
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
    # The ends are known to begin with the first and to end with the last layer of the model.
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
