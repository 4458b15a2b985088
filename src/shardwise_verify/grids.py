"""Root level of the proof: the grids of a space, with those of equal cost merged, and the costs of their
blocks.

A grid fixes the degrees, axis order, cp_kind, sequence parallelism and micro-batch size. Schedule, stage
split, recomputation, sharding and offload are open. Two axis orders whose groups cross the same tiers in the
same way cost the same under every further choice; `multiplicity` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from shardwise_verify.collectives import Fabric, Groups, Sizes, fabric_of, groups_of
from shardwise_verify.estimate import rank_hops_s
from shardwise_verify.layers import AMOUNTS, SELECTIVE_AMOUNTS, block_amounts, block_shapes
from shardwise_verify.problem import Figures
from shardwise_verify.records import CP_KINDS, FIELDS
from shardwise_verify.rules import ATTENTION_RULES, BATCH_RULES, EXPERT_RULES, Rule
from shardwise_verify.sharding import Shardings, shardings_of, traffic_amounts
from shardwise_verify.space import SpaceDefinition, chains_of, divisors
from shardwise_verify.strategy_rows import Column, Family, StrategyRows, distinct
from shardwise_verify.targets import GRID_FIELDS, ORDER_FIELDS
from shardwise_verify.times import tied_s

GRID_RULES: Mapping[str, Rule] = {**ATTENTION_RULES, **EXPERT_RULES, **BATCH_RULES}
"""The rules that need no schedule."""

DEGREES_PER_BATCH = 1 << 12
"""Combinations of degrees and axis order expanded together; each has up to a hundred grids."""

STACKED = (*AMOUNTS, "largest_bytes", "logits_bytes")

PLAIN = {
    "vpp": 1, "param_shard": 1, "grad_shard": 1, "optim_shard": 1, "micro_batch_size": 1, "schedule": "1f1b",
    "sequence_parallel": False, "recompute": "none", "recompute_modules": "",
    "recompute_layers": 0, "offload": "none",
    "first_stage_layers": 0, "last_stage_layers": 0, "cp_kind": "ring", "etp": 1, "ep": 1,
    "axis_order": "tp-cp-dp-pp",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GridCosts:
    """Legal grids of one pp: their rows, the number of equal grids that each represents (`multiplicity`), and
    their costs.

    `amounts` by name are [kinds, embedding, head; grid]. `selective` has those of SELECTIVE_AMOUNTS under
    each set of recomputed modules of the space: [set; kinds, embedding, head; grid]. `hops_s` are [pipeline
    rank; grid]: to the next rank, and between the first and the last one. `tied_s` is by whether the first
    and the last stage are on different ranks.
    """

    pp: int
    rows: StrategyRows
    multiplicity: Column
    microbatches: Column
    groups: Groups
    amounts: Mapping[str, Column]
    selective: Mapping[str, Column]
    replicated: Column
    hops_s: Column
    tied_s: Mapping[bool, Column]
    has_instances: bool
    has_whole_stages: bool

    @property
    def ranks(self) -> Column:
        """Number of ranks over which dense weights can be sharded."""
        return self.rows.dp * self.rows.cp

    def shardings(self, grid: Column, param: Column, grad: Column, optim: Column) -> Shardings:
        """The shardings for these degrees; experts count only where a block has them."""
        degrees, groups = (param, grad, optim), groups_at(self.groups, grid)
        return shardings_of(
            degrees,
            groups,
            has_experts=True,
            by_instance=self.has_instances,
            once=self.has_whole_stages,
        )


def plain_rows(**columns: Column) -> StrategyRows:
    """Rows with these fields; all others have their defaults."""
    length = len(columns["tp"])
    found = {name: columns[name] if name in columns else np.full(length, PLAIN[name]) for name in FIELDS}
    return StrategyRows(**found)


def groups_at(groups: Groups, index: Column) -> Groups:
    """The groups of some rows."""

    def at(value: Sizes | Column) -> Sizes | Column:
        return tuple(size[index] for size in value) if isinstance(value, tuple) else value[index]

    return Groups(**{name: at(getattr(groups, name)) for name in Groups.__dataclass_fields__})


def grids_of(
    figures: Figures, space: SpaceDefinition, pp: int
) -> Iterator[tuple[StrategyRows, Column, Column]]:
    """In batches: one row for all grids of this pp with equal cost, the number of these grids, and whether
    the target excludes them."""
    rows = _axes_of(space, pp)
    is_excluded = np.zeros(len(rows), dtype=bool)
    if space.target_limits.orders:
        found = [space.target_limits.excludes_order(values) for values in _values(rows, *ORDER_FIELDS)]
        is_excluded = np.array(found, dtype=bool)
    groups = groups_of(rows, figures.cluster)
    keys = [is_excluded, *(getattr(rows, name) for name in ("tp", "cp", "dp", "etp", "ep"))]
    for name in Groups.__dataclass_fields__:
        value = getattr(groups, name)
        keys += list(value) if isinstance(value, tuple) else [value]
    first, of = distinct(keys)
    multiplicity = np.bincount(of, minlength=len(first))
    for start in range(0, len(first), DEGREES_PER_BATCH):
        some = slice(start, start + DEGREES_PER_BATCH)
        listed, index = _with_choices(space, rows.take(first[some]))
        excluded_here = is_excluded[first[some]][index]
        if space.target_limits.grid:
            found = [space.target_limits.excludes_grid(values) for values in _values(listed, *GRID_FIELDS)]
            excluded_here = excluded_here | np.array(found, dtype=bool)
        yield listed, multiplicity[some][index], excluded_here


def _values(rows: StrategyRows, *names: str) -> Iterator[Mapping[str, object]]:
    """These fields of every row."""
    columns = [getattr(rows, name).tolist() for name in names]
    return (dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True))


def _axes_of(space: SpaceDefinition, pp: int) -> StrategyRows:
    """Rows 1, 3 and 4 of the space."""
    found = [
        (tp, cp, pp, dp, etp, ep, order)
        for tp, cp, own, dp in space.degrees()
        if own == pp
        for etp, ep in _expert_pairs(space, tp, cp, dp)
        for order in sorted(map(str, space.axis_orders(tp > 1, cp > 1, dp > 1, pp > 1).values["axis_order"]))
    ]
    names = ("tp", "cp", "pp", "dp", "etp", "ep", "axis_order")
    columns = zip(*found, strict=True) if found else ((),) * len(names)
    return plain_rows(
        **{
            name: np.array(column, dtype="U16" if name == "axis_order" else np.int64)
            for name, column in zip(names, columns, strict=True)
        }
    )


def _expert_pairs(space: SpaceDefinition, tp: int, cp: int, dp: int) -> Iterator[tuple[int, int]]:
    width = tp * cp * dp
    if not space.is_moe:
        pairs = [(1, 1)]
    elif space.is_core:
        pairs = [(tp, 1)]
    else:
        pairs = [(etp, ep) for etp in divisors(width) for ep in divisors(width // etp)]
    return (pair for pair in pairs if space.allows(etp=pair[0], ep=pair[1]))


def _with_choices(space: SpaceDefinition, rows: StrategyRows) -> tuple[StrategyRows, Column]:
    """Each row with all choices of rows 2, 5 and 6 of the space, and the index of the row that each is of."""
    _, of = distinct([rows.dp, rows.tp > 1, rows.cp > 1])
    places, columns = [], []
    for number in range(int(of.max(initial=-1)) + 1):
        at = np.flatnonzero(of == number)
        tp, cp, dp = (int(getattr(rows, name)[at[0]]) for name in ("tp", "cp", "dp"))
        kinds = [kind for kind in (CP_KINDS if cp > 1 else CP_KINDS[:1]) if space.allows(cp_kind=kind)]
        flags = [
            flag for flag in ((False, True) if tp > 1 else (False,)) if space.allows(sequence_parallel=flag)
        ]
        sizes = sorted(int(size) for size in space.micro_batch_sizes(dp).values["micro_batch_size"])
        choices = [(kind, flag, size) for kind in kinds for flag in flags for size in sizes]
        places.append(np.repeat(at, len(choices)))
        columns.append(choices * len(at))
    index = np.concatenate([np.empty(0, dtype=np.intp), *places])
    kinds_, flags_, sizes_ = list(zip(*(row for part in columns for row in part), strict=True)) or (
        (),
        (),
        (),
    )
    fields = {name: getattr(rows, name)[index] for name in FIELDS}
    fields["cp_kind"] = np.array(kinds_, dtype="U12")
    fields["sequence_parallel"] = np.array(flags_, dtype=bool)
    fields["micro_batch_size"] = np.array(sizes_, dtype=np.int64)
    return StrategyRows(**fields), index


def breaks_grid_rule(figures: Figures, rows: StrategyRows) -> Column:
    """Whether each row breaks some rule that needs no schedule."""
    grid = SimpleNamespace(**{name: getattr(rows, name) for name in FIELDS})
    found = np.zeros(len(rows), dtype=bool)
    for rule in GRID_RULES.values():
        found |= np.asarray(rule(grid, figures.limits, figures.job))
    return found


def grid_costs_of(
    figures: Figures, pp: int, rows: StrategyRows, multiplicity: Column, module_sets: Sequence[str] = ("",)
) -> GridCosts:
    """The costs of legal grids of one pp, for these sets of recomputed modules."""
    fabric = fabric_of(figures.cluster, figures.efficiency, figures.backend)
    groups = groups_of(rows, figures.cluster)
    blocks = [block_amounts(figures, fabric, groups, rows, shape) for shape in block_shapes(figures.model)]
    of_sets = [blocks]
    if tuple(module_sets) != ("",):
        of_sets = [
            [block_amounts(figures, fabric, groups, one, shape) for shape in block_shapes(figures.model)]
            for modules in module_sets
            for one in (replace(rows, recompute_modules=np.full(len(rows), modules)),)
        ]
    microbatches = rows.microbatches(figures.job.global_batch_size)
    flat = Family(schedule="1f1b", pp=pp, vpp=1, microbatches=1, rows=rows)
    v_shaped = Family(schedule="zb_v", pp=pp, vpp=2, microbatches=1, rows=rows)
    return GridCosts(
        pp=pp,
        rows=rows,
        multiplicity=multiplicity,
        microbatches=microbatches,
        groups=groups,
        amounts={name: np.array([block[name] + np.zeros(len(rows)) for block in blocks]) for name in STACKED},
        selective={
            name: np.array([[block[name] + np.zeros(len(rows)) for block in one] for one in of_sets])
            for name in SELECTIVE_AMOUNTS
        },
        replicated=np.array([block["replicated"] for block in blocks]),
        hops_s=np.array(rank_hops_s(figures, fabric, groups, rows, pp)),
        tied_s={
            family.ends_apart: tied_s(figures, fabric, groups, family, blocks) for family in (flat, v_shaped)
        },
        has_instances=figures.profile.shards_experts_by_instance,
        has_whole_stages=figures.profile.whole_in_pipelines and pp > 1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPairs:
    """Every choice of param_shard and grad_shard of every grid.

    The pairs of a grid are `number[grid]` entries from `start[grid]` on. `chains` is the number of
    optim_shard degrees allowed with each pair; `optims` lists them by ranks, param_shard and grad_shard.
    `traffic` by phase is [block; pair].
    """

    start: Column
    number: Column
    param: Column
    grad: Column
    chains: Column
    traffic: Mapping[str, Column]
    optims: Mapping[tuple[int, int, int], tuple[int, ...]]


def shard_pairs_of(
    figures: Figures, space: SpaceDefinition, grid_costs: GridCosts, needed: Column
) -> ShardPairs:
    """The pairs of the grids that are `needed` (a mask); the other grids have none."""
    fabric: Fabric = fabric_of(figures.cluster, figures.efficiency, figures.backend)
    of_ranks = {int(ranks): chains_of(space, int(ranks)) for ranks in np.unique(grid_costs.ranks)}
    optims = {
        (ranks, *pair): tuple(values) for ranks, chains in of_ranks.items() for pair, values in chains.items()
    }
    number = np.array([len(of_ranks[int(ranks)]) for ranks in grid_costs.ranks], dtype=np.intp) * needed
    grid = np.repeat(np.arange(len(number)), number)
    listed = [pair for ranks in grid_costs.ranks[needed].tolist() for pair in of_ranks[ranks]]
    param, grad = (np.array([pair[side] for pair in listed], dtype=np.int64) for side in (0, 1))
    chains = np.array(
        [len(values) for ranks in grid_costs.ranks[needed].tolist() for values in of_ranks[ranks].values()],
        dtype=np.int64,
    )
    shardings = grid_costs.shardings(grid, param, grad, grid_costs.ranks[grid])
    traffic: dict[str, list[Column]] = {}
    for block in range(len(grid_costs.amounts["dense"])):
        amounts = {name: values[block][grid] for name, values in grid_costs.amounts.items()}
        for name, seconds in traffic_amounts(figures, fabric, shardings, amounts).items():
            traffic.setdefault(name, []).append(seconds)
    return ShardPairs(
        start=np.cumsum(number) - number,
        number=number,
        param=param,
        grad=grad,
        chains=chains,
        traffic={name: np.array(seconds) for name, seconds in traffic.items()},
        optims=optims,
    )
