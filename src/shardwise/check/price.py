"""From strategies to step times and bytes: the sections of docs/concepts/cost-model.md, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.check.collectives import Fabric, all_gather_s, fabric_of, send_s
from shardwise.check.durations import StageSeconds, stage_times
from shardwise.check.figures import Figures
from shardwise.check.groups import Groups, groups_of, hop_senders, hop_tier
from shardwise.check.layer import AMOUNTS, PHASES, block_amounts, block_shapes
from shardwise.check.memory import Memory, memory_of
from shardwise.check.operators import LocalSizes
from shardwise.check.rows import Column, Family, StrategyRows, distinct, families
from shardwise.check.schedules import table_of
from shardwise.check.sharding import (
    Reduced,
    Shardings,
    gathering_s,
    reduction_s,
    shardings_of,
    traffic_amounts,
)
from shardwise.check.stages import (
    amounts_of_stages,
    kinds_of_stages,
    layers_of_stages,
    on_ranks,
    with_tied_copy,
)
from shardwise.check.step import OptimizerStep, optimizer_step
from shardwise.check.timing import makespan_s

Floats = NDArray[np.float64]

GRID_FIELDS = (
    "tp", "cp", "pp", "dp", "cp_kind", "etp", "ep", "sequence_parallel", "micro_batch_size", "axis_order",
)  # fmt: skip
"""What the amounts of blocks depend on: rows that agree in these are priced once."""

VALUES_PER_BATCH = 1 << 22
"""Stages times rows times blocks priced together, so that the columns stay within some hundred MiB."""

STAGE_NAMES = (*AMOUNTS, *(f"{phase}_traffic_s" for phase in PHASES))


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCosts:
    """All that the rows of one family cost, but for the walk through their table."""

    family: Family
    layers: tuple[Column, ...]
    stages: list[dict[str, Column]]
    times: list[StageSeconds]
    hops_s: tuple[Column, ...]
    end: OptimizerStep
    memory: Memory

    def step_time_s(self, figures: Figures) -> Column:
        """Seconds per step, on the schedule's own table."""
        makespan = makespan_s(table_of(self.family), self.times, self.hops_s, np.maximum)
        return makespan + self.end.total_s + figures.profile.host_step_s


def family_costs(
    figures: Figures, family: Family, blocks: list[dict[str, Column]] | None = None
) -> FamilyCosts:
    """The price of every row of a family; `blocks` are the amounts of `sharded_blocks_of` on its rows, where
    they are known."""
    model, rows = figures.model, family.rows
    fabric = fabric_of(figures.cluster, figures.efficiency)
    groups = groups_of(rows, figures.cluster)
    shardings = _shardings_of(figures, rows, groups)
    if blocks is None:
        blocks = sharded_blocks_of(figures, rows)
    layers = layers_of_stages(len(model.pattern), family)
    kinds = kinds_of_stages(model.pattern, len(model.kinds), layers)
    stages = amounts_of_stages(blocks, kinds, STAGE_NAMES)
    copy = blocks[-2]["dense"] if model.tied_embeddings else 0.0
    dense = with_tied_copy(family, stages, "dense", copy)
    expert = [stage["expert"] for stage in stages]
    is_joint = model.tied_embeddings and family.stages == 1  # both ends, one table, one block
    of_stages = [
        dense,
        expert,
        [stage["dense_blocks"] - is_joint for stage in stages],
        [stage["expert_blocks"] for stage in stages],
    ]
    reduced = Reduced.of(figures, *(np.array(each) for each in of_stages))
    reductions_s = reduction_s(figures, fabric, shardings, reduced)
    gatherings_s = gathering_s(figures, fabric, shardings, reduced)
    sent_s = hops_s(family, rank_hops_s(figures, fabric, groups, rows, family.pp))
    share = figures.profile.pipeline_overlap
    # The last stage sends nothing on, the first nothing back.
    nothing = np.zeros(len(rows))
    waits_s = [nothing, *((1 - share) * hop_s for hop_s in sent_s), nothing]
    times = [
        stage_times(
            figures,
            family,
            stages[number],
            layers[number],
            reductions_s[number],
            gatherings_s[number],
            (waits_s[number + 1], waits_s[number]),
        )
        for number in range(family.stages)
    ]
    of_ranks = on_ranks(family, dense), on_ranks(family, expert)
    return FamilyCosts(
        family=family,
        layers=layers,
        stages=stages,
        times=times,
        hops_s=tuple(share * hop_s for hop_s in sent_s),
        end=optimizer_step(figures, fabric, groups, family, shardings, blocks, *of_ranks),
        memory=memory_of(figures, family, shardings, blocks, stages, layers, *of_ranks),
    )


def blocks_of(figures: Figures, fabric: Fabric, rows: StrategyRows) -> list[dict[str, Column]]:
    """The amounts of each kind of layer, of the embedding and of the head, on every row."""
    first, of = distinct([getattr(rows, name) for name in GRID_FIELDS])
    grids = rows.take(first)
    groups = groups_of(grids, figures.cluster)
    return [
        {name: amount[of] for name, amount in block_amounts(figures, fabric, groups, grids, shape).items()}
        for shape in block_shapes(figures.model)
    ]


def sharded_blocks_of(figures: Figures, rows: StrategyRows) -> list[dict[str, Column]]:
    """The same with what sharding adds to each, which no schedule changes."""
    fabric = fabric_of(figures.cluster, figures.efficiency)
    shardings = _shardings_of(figures, rows, groups_of(rows, figures.cluster))
    return [
        block | traffic_amounts(figures, fabric, shardings, block)
        for block in blocks_of(figures, fabric, rows)
    ]


def _shardings_of(figures: Figures, rows: StrategyRows, groups: Groups) -> Shardings:
    degrees = (rows.param_shard, rows.grad_shard, rows.optim_shard)
    return shardings_of(degrees, groups, has_experts=figures.model.experts is not None)


def rank_hops_s(
    figures: Figures, fabric: Fabric, groups: Groups, rows: StrategyRows, pp: int
) -> list[Column]:
    """Seconds of one message from each of `pp` pipeline ranks to the next, from the last one to the first: a
    share from each tensor rank, joined again behind the hop where the sequence is not split. 0 without a
    pipeline."""
    nbytes = LocalSizes(figures=figures, rows=rows, experts=None).hidden_bytes("tokens")
    if pp == 1:
        return [0.0 * nbytes]
    joined = np.where(
        rows.sequence_parallel | (rows.tp == 1), 0.0, all_gather_s(fabric, nbytes, groups.tensor)
    )
    pairs = [*((rank, rank + 1) for rank in range(pp - 1)), (0, pp - 1)]
    tiers = [hop_tier(groups, *pair) for pair in pairs]
    return [send_s(fabric, nbytes / rows.tp, tier, hop_senders(groups, tier)) + joined for tier in tiers]


def hops_s(family: Family, of_ranks: Sequence[Column]) -> tuple[Column, ...]:
    """Seconds of a message from each stage to the next; a V turns round on one rank for nothing."""
    pp, stages = family.pp, range(family.stages - 1)
    if not family.is_v:
        return tuple(of_ranks[stage % pp] for stage in stages)
    one_way = of_ranks[: pp - 1]
    return (*one_way, 0.0 * of_ranks[0], *one_way[::-1])


class Evaluation(NamedTuple):
    """Of every row: seconds per step, bytes of the tightest rank on its device, bytes on the host."""

    step_time_s: Floats
    device_bytes: Floats
    host_bytes: Floats


def evaluate(figures: Figures, rows: StrategyRows) -> Evaluation:
    """The figures that decide between strategies, for legal rows of any schedules."""
    found = Evaluation(*(np.empty(len(rows)) for _ in Evaluation._fields))
    blocks = len(figures.model.kinds) + 2
    most = max(VALUES_PER_BATCH // (blocks * len(STAGE_NAMES)), 1)
    for start in range(0, len(rows), most):
        of_part = Evaluation(*(column[start : start + most] for column in found))
        _evaluate(figures, rows.take(slice(start, start + most)), of_part)
    return found


def _evaluate(figures: Figures, rows: StrategyRows, found: Evaluation) -> None:
    """Puts the figures of all rows into `found`. Blocks are priced for all schedules together."""
    blocks = sharded_blocks_of(figures, rows)
    for places, family in families(rows, figures.job.global_batch_size):
        length = max(VALUES_PER_BATCH // (family.stages * (len(blocks) + 16)), 1)
        for part, some in family.slices(length):
            own = [{name: amount[places[part]] for name, amount in block.items()} for block in blocks]
            costs = family_costs(figures, some, own)
            found.step_time_s[places[part]] = costs.step_time_s(figures)
            found.device_bytes[places[part]] = costs.memory.device_bytes
            found.host_bytes[places[part]] = costs.memory.host_bytes


def fitting(figures: Figures, found: Evaluation) -> tuple[Column, Column]:
    """Which rows fit on their devices, and which on their hosts."""
    return found.device_bytes <= figures.usable_bytes, found.host_bytes <= figures.host_capacity_bytes
