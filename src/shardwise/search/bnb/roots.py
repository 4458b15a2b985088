"""Root nodes of the search: the legal grids of a space with their lower bounds, and their batches.

`list_roots` rejects the candidates that break a rule or a limit of the target (`CandidateCounts` counts them
without listing them), merges grids that symmetry makes equal, and bounds the others for any micro-batch size.
`batches_of` divides the root nodes of a round into batches, the same for any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost import (
    Problem,
    alike_grids,
    any_micro_batch_compute_bound_s,
    any_micro_batch_lower_bound_s,
    distinct_rows,
)
from shardwise.search.bnb.incumbent import Goal
from shardwise.search.bnb.ledger import DEGREES, OUTCOME_INDEX, CandidateLedger
from shardwise.search.space import Degrees, Space, Variants, expanded
from shardwise.strategy import GRID_RULES, SCHEDULE_RULES, TARGET_LIMIT, Limits, StrategyTable, first_broken


class CandidateCounts:
    """Counts candidates below the grids of a table of shapes, each of which stands for `orders` grids (axis
    orders). `of_shape` has the index of the degrees of each shape: grids with the same degrees have equally
    many candidates."""

    def __init__(self, limits: Limits, space: Space, table: StrategyTable) -> None:
        self._limits, self._space = limits, space
        first, self.of_shape = distinct_rows([getattr(table, name) for name in DEGREES])
        self._few = table.take(first)
        self._below, self._orders = space.count_below_grids(self._few), space.count_orders(self._few)
        self._reason = first_broken(table, limits, GRID_RULES)
        self._orders_within = self._count_orders_within(table)

    def _count_orders_within(self, table: StrategyTable) -> NDArray[np.int64]:
        """Axis orders of each shape within the limits; all of them for a shape that breaks a rule."""
        each = self._orders[self.of_shape]
        if self._space.limits:
            legal = np.flatnonzero(self._reason < 0)
            row, _ = self._space.with_orders(table.take(legal))
            each[legal] = np.bincount(row, minlength=len(legal))
        return each

    @cached_property
    def _below_within(self) -> NDArray[np.int64]:
        """Candidates below a grid, by degrees, whose sharding degrees are within the limits."""
        ranks = self._few.dp * self._few.cp
        each = self._below // np.maximum(self._space.count_all_shards(ranks), 1)
        return np.asarray(each * self._space.count_shards(ranks))

    @cached_property
    def legal(self) -> NDArray[np.intp]:
        """Indices of the shapes that break no rule, are within the limits and have candidates."""
        has_some = (self._below_within > 0)[self.of_shape] & (self._orders_within > 0)
        return np.flatnonzero((self._reason < 0) & has_some)

    @cached_property
    def _illegal(self) -> dict[str, NDArray[np.int64]]:
        """Candidates below a legal grid, by degrees, whose schedule breaks a rule, by reason code."""
        few, below = self._few, 0 * self._below
        counts = {rule.code: below.copy() for rule in SCHEDULE_RULES}
        states = self._space.count_shards(few.dp * few.cp) * len(self._space.offloads)
        used = np.unique(self.of_shape[self.legal])
        pairs, of_pair = distinct_rows([few.dp[used], few.pp[used]])
        for index, row in enumerate(used[pairs].tolist()):
            same = used[of_pair == index]
            grid = few.take(slice(row, row + 1))
            for code, count in _illegal_schedules(self._space, self._limits, grid).items():
                counts[code][same] = count * states[same]
        return counts

    @property
    def candidates(self) -> NDArray[np.int64]:
        """Candidates with a legal schedule below each grid of each legal shape."""
        of_legal = self.of_shape[self.legal]
        return (self._below_within - sum(self._illegal.values()))[of_legal]

    @property
    def orders(self) -> NDArray[np.int64]:
        """Grids that each legal shape stands for."""
        return self._orders_within[self.legal]

    def reject(self, ledger: CandidateLedger) -> None:
        """Counts in the ledger the candidates that break a rule or a limit of the target."""
        rules = len(GRID_RULES) + 1
        is_legal = self._reason < 0
        within = np.bincount(self.of_shape[is_legal], self._orders_within[is_legal], len(self._below))
        broken = self.of_shape * rules + self._reason + 1
        shapes = np.bincount(broken, minlength=len(self._below) * rules).reshape(-1, rules)
        for row, degrees in enumerate(self._degrees):
            orders, below, mine = int(self._orders[row]), int(self._below[row]), ledger.entry(degrees)
            for rule, count in zip(GRID_RULES, shapes[row, 1:].tolist(), strict=True):
                mine[OUTCOME_INDEX[rule.code]] += count * orders * below
            grids, below_within = int(within[row]), int(self._below_within[row])
            mine[OUTCOME_INDEX[TARGET_LIMIT]] += int(shapes[row, 0]) * orders * below - grids * below_within
            for code, counts in self._illegal.items():
                mine[OUTCOME_INDEX[code]] += grids * int(counts[row])

    @property
    def _degrees(self) -> Iterator[Degrees]:
        few = self._few
        yield from zip(few.tp.tolist(), few.cp.tolist(), few.dp.tolist(), few.pp.tolist(), strict=True)


def _illegal_schedules(space: Space, limits: Limits, grid: StrategyTable) -> dict[str, int]:
    """Choices of micro-batch size, schedule, split and recomputed layers that break a rule, by the code of
    the first rule broken, at the dp and pp of `grid` (a table of one row)."""
    counts: dict[str, int] = {}
    pp = int(grid.pp[0])
    sizes = space.micro_batch_sizes(int(grid.dp[0]))["micro_batch_size"]
    variants = space.variants(pp)
    rows = grid.take(np.zeros(len(sizes) * len(variants), dtype=np.intp)).replaced(
        micro_batch_size=np.repeat(sizes, len(variants)),
        schedule=np.tile(variants.schedule, len(sizes)),
        vpp=np.tile(variants.vpp, len(sizes)),
    )
    reason = first_broken(rows, limits, SCHEDULE_RULES)
    for index in np.unique(reason[reason >= 0]).tolist():
        few = Variants(rows.schedule[reason == index], rows.vpp[reason == index])
        code = SCHEDULE_RULES[index].code
        counts[code] = sum(space.count_variants(few, pp, int(kind)) for kind in space.recomputes)
    return counts


# Root nodes

Bound = Callable[[Problem, StrategyTable], Any]
"""Lower bound in seconds of each grid, for all micro-batch sizes up to the row's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootNodes:
    """Legal grids by increasing lower bound. Grid i stands for `weights[i]` grids of equal cost, which have
    `candidates[i]` candidates together."""

    table: StrategyTable
    weights: NDArray[np.int64]
    lower_bound_s: NDArray[np.float64]
    candidates: NDArray[np.int64]

    @staticmethod
    def joined(parts: Sequence[RootNodes]) -> RootNodes:
        """The grids of all parts, by increasing lower bound."""
        lower_bound_s = np.concatenate([part.lower_bound_s for part in parts])
        whole = RootNodes(
            table=StrategyTable.joined([part.table for part in parts]),
            weights=np.concatenate([part.weights for part in parts]),
            lower_bound_s=lower_bound_s,
            candidates=np.concatenate([part.candidates for part in parts]),
        )
        return whole.take(np.argsort(lower_bound_s, kind="stable"))

    def take(self, rows: Any) -> RootNodes:
        """The selected grids."""
        return RootNodes(
            table=self.table.take(rows),
            weights=self.weights[rows],
            lower_bound_s=self.lower_bound_s[rows],
            candidates=self.candidates[rows],
        )

    def pruned(self, goal: Goal, ledger: CandidateLedger) -> RootNodes:
        """The grids that may improve on the incumbents; the others count as pruned."""
        keep = goal.may_improve(self.lower_bound_s)
        ledger.add_below("cut_degrees", self.table, ~keep, self.candidates[~keep])
        return self.take(keep)

    def with_micro_batches(self, space: Space) -> tuple[StrategyTable, NDArray[np.int64]]:
        """The grids with every micro-batch size, and the number of grids that each row stands for."""
        parent, table = expanded(self.table, [self.table.dp], space.micro_batch_sizes)
        return table, self.weights[parent]


def list_roots(
    problem: Problem,
    space: Space,
    degrees: Sequence[Degrees],
    goal: Goal,
    *,
    merges_symmetric: bool,
    prunes: bool = True,
    most: int | None = None,
) -> tuple[RootNodes, CandidateLedger]:
    """The legal grids with these degrees that may improve on the goal's incumbents, and a ledger of the
    others.

    Without `prunes`, all legal grids; with `most`, only that many, those with the least bounds. With
    `merges_symmetric`, one grid stands for all of equal cost. Candidates with an illegal schedule are
    rejected here too. Grids are first pruned by computation alone, which is cheap, so that few remain to be
    compared by symmetry.
    """
    shapes, ledger = space.shapes(degrees), CandidateLedger()
    counts = CandidateCounts(problem.limits, space, shapes)
    counts.reject(ledger)
    shapes, candidates = shapes.take(counts.legal), counts.candidates
    lower_bound_s = _lower_bounds_s(problem, space, shapes, any_micro_batch_compute_bound_s)
    if prunes:
        keep = goal.may_improve(lower_bound_s)
        ledger.add_below("cut_degrees", shapes, ~keep, (counts.orders * candidates)[~keep])
        shapes, candidates, lower_bound_s = shapes.take(keep), candidates[keep], lower_bound_s[keep]
    shape, table = space.with_orders(shapes)
    weights = np.ones(len(table), dtype=np.int64)
    grids = RootNodes(
        table=table, weights=weights, lower_bound_s=lower_bound_s[shape], candidates=candidates[shape]
    )
    if merges_symmetric and len(grids.table):
        rows, alike = alike_grids(problem, grids.table)
        weights = np.bincount(alike).astype(np.int64)
        grids = grids.take(rows)
        grids = replace(grids, weights=weights, candidates=grids.candidates * weights)
    grids = _bounded(problem, space, grids, goal, len(grids.table) if most is None else most)
    return (grids.pruned(goal, ledger) if prunes else grids), ledger


def _bounded(problem: Problem, space: Space, grids: RootNodes, goal: Goal, most: int) -> RootNodes:
    """The `most` grids with the least bounds, bounded with communication where they may improve.

    Bounds without communication are lower: a grid that exceeds the `most`-th best by them alone is not among
    the result.
    """
    lower_bound_s = grids.lower_bound_s.copy()
    matters = np.flatnonzero(goal.may_improve(lower_bound_s))
    first, rest = np.split(matters[np.argsort(lower_bound_s[matters], kind="stable")], [most])
    for rows in (first, rest):
        contenders = (
            rows if rows is first else rows[lower_bound_s[rows] <= lower_bound_s[first].max(initial=0.0)]
        )
        lower_bound_s[contenders] = _lower_bounds_s(
            problem, space, grids.table.take(contenders), any_micro_batch_lower_bound_s
        )
    order = np.argsort(lower_bound_s, kind="stable")[:most]
    return replace(grids, lower_bound_s=lower_bound_s).take(np.sort(order))


def _lower_bounds_s(
    problem: Problem, space: Space, table: StrategyTable, least_s: Bound
) -> NDArray[np.float64]:
    """Lower bound in seconds of each grid, for any micro-batch size."""
    dps, of_dp = np.unique(table.dp, return_inverse=True)
    most = [space.micro_batch_sizes(int(dp))["micro_batch_size"].max(initial=1) for dp in dps]
    table = table.replaced(micro_batch_size=np.array(most, dtype=np.int64)[of_dp])
    return np.array(least_s(problem, table)) if len(table) else np.zeros(0)


# Batches of a round

LISTING_BATCHES, DEGREES_PER_BATCH = 4, 32
"""Batches in which grids are listed, at most, and choices of (tp, cp, dp) per batch, at least."""

ONE_BATCH_NODES, ONE_BATCH_HEURISTIC_NODES = 1 << 12, 1 << 9
"""Grids with micro-batch sizes up to which a round is a single batch: in the search, and in a primal
heuristic."""

MEMORY_NODE_WEIGHT = 64
"""Factor on the work of a node where memory is part of the objective."""

LARGE_SHARE, LARGE_SHARE_WITH_MEMORY = 0.2, 0.08
"""Share of a round's work above which the grids of one pp are two batches. It is less where memory is part of
the objective, because `_work` underestimates deep pipelines there."""


def listing_batches(degrees: list[Degrees]) -> list[list[Degrees]]:
    """The degrees in batches whose grids are listed by one worker each."""
    batches = max(min(len(degrees) // DEGREES_PER_BATCH, LISTING_BATCHES), 1)
    return [degrees[batch::batches] for batch in range(batches)]


def heuristic_batches(space: Space, grids: RootNodes, *, weighs_memory: bool) -> list[RootNodes]:
    """The batches of a primal heuristic's round. Grids are dealt out in turn, so that each batch has good
    ones: its result depends on the first incumbents."""
    batches = 1 if _is_one_batch(space, grids, ONE_BATCH_HEURISTIC_NODES, weighs_memory) else 2
    return [grids.take(slice(batch, None, batches)) for batch in range(batches)]


def batches_of(space: Space, grids: RootNodes, *, weighs_memory: bool) -> list[RootNodes]:
    """The batches of a round, most work first: one for each pp, because pipelines of different depth are
    bounded apart, and two for a pp that is a large share of the round."""
    if _is_one_batch(space, grids, ONE_BATCH_NODES, weighs_memory):
        return [grids]
    rows = space.count_micro_batches(grids.table.dp)
    depths = [np.flatnonzero(grids.table.pp == pp) for pp in np.unique(grids.table.pp)]
    works = [_work(rows[same], grids.candidates[same]) for same in depths]
    large_work = (LARGE_SHARE_WITH_MEMORY if weighs_memory else LARGE_SHARE) * sum(works)
    batches: list[tuple[float, RootNodes]] = []
    for same, work in zip(depths, works, strict=True):
        number = 2 if work > large_work and len(same) > 1 else 1
        batches += [(work / number, grids.take(same[batch::number])) for batch in range(number)]
    return [batch for _, batch in sorted(batches, key=lambda each: -each[0])]


def _is_one_batch(space: Space, grids: RootNodes, most_nodes: int, weighs_memory: bool) -> bool:
    """Whether the grids are too few to be divided."""
    rows = int(space.count_micro_batches(grids.table.dp).sum())
    return rows * (MEMORY_NODE_WEIGHT if weighs_memory else 1) <= most_nodes


def _work(rows: NDArray[np.int64], candidates: NDArray[np.int64]) -> float:
    """Estimate of the work on grids of one pp, in no unit: proportional to the nodes, and slowly growing with
    the candidates below them."""
    return float(rows.sum() * float(candidates.sum()) ** 0.125)
