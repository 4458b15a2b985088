"""Proof of optimality: a branch and bound that shows that no candidate of a space beats the plan.

The space is divided into nodes: by grid, schedule, recomputation, offload, sharding of parameters and
gradients, sharding of optimizer states, and at last stage split and recomputed layers, bisected down to
points. At each level a node is closed where it breaks a rule (illegal), where its lower bound of memory does
not fit (out of memory), or where its lower bound of time reaches the cutoff (pruned). The remaining points
are evaluated. So every candidate has exactly one outcome, and their counts must add up to the size of the
space.

`optimal_check` proves the claims of a plan's objective with a `Prover`. `runners_up_checks` checks the
runners-up: legal, fitting, correctly estimated, in order, and of different kinds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from time import monotonic
from types import SimpleNamespace

import numpy as np

from shardwise_verify.checks import TOLERANCE, Check, fits, number_check, same
from shardwise_verify.collectives import fabric_of
from shardwise_verify.estimate import evaluate
from shardwise_verify.grids import GridCosts, breaks_grid_rule, grid_costs_of, grids_of, shard_pairs_of
from shardwise_verify.lower_bounds import memory_lower_bound, time_lower_bound, work_lower_bound
from shardwise_verify.nodes import (
    FULL,
    PipelineContext,
    ProofNodes,
    Splits,
    batches_of,
    bisected,
    branch_offload,
    branch_optim_shard,
    branch_recompute,
    branch_shard_pairs,
    count_of_splits,
    join_nodes,
    root_nodes,
    rows_of_points,
    splits_of,
    widths,
)
from shardwise_verify.peak_errors import fits_probability
from shardwise_verify.problem import Figures, figures_of
from shardwise_verify.records import (
    FIELDS,
    OFFLOADS,
    RECOMPUTES,
    CertificateRecord,
    OptimumRecord,
    PlanRecord,
    RunnerUpRecord,
    StrategyRecord,
)
from shardwise_verify.rules import SCHEDULE_RULES, count, first_broken, is_candidate, wider_of
from shardwise_verify.space import SpaceDefinition, chains_of
from shardwise_verify.strategy_rows import Column, StrategyRows, rows_of
from shardwise_verify.targets import TargetLimits, limits_of, target_limits_of, with_options


class ProofTimeLimitError(Exception):
    """The proof exceeded its time limit."""


@dataclass(slots=True, kw_only=True)
class ProofOutcome:
    """Outcomes of the candidates. `lower_bound_s` is the smallest bound or time of all that fit or may
    fit. `counterexample` is the fastest legal fitting candidate below the cutoff, one row;
    `counterexample_s` and `counterexample_bytes` are its step time and the bytes of its tightest rank."""

    illegal: int = 0
    out_of_memory: int = 0
    pruned: int = 0
    evaluated: int = 0
    lower_bound_s: float = inf
    counterexample: StrategyRows | None = None
    counterexample_s: float = inf
    counterexample_bytes: float = inf

    @property
    def count(self) -> int:
        """Number of all candidates."""
        return self.illegal + self.out_of_memory + self.pruned + self.evaluated


StrategyKind = tuple[object, ...]

KIND_FIELDS = ("tp", "cp", "pp", "dp", "ep", "etp", "schedule", "recompute")
"""Fields that distinguish the kinds of runners-up."""


def runners_up_checks(plan: PlanRecord, figures: Figures) -> Iterator[Check]:
    """Each runner-up by itself, then their order and kinds."""
    if plan.optimum is not None:
        yield from _optimum_checks(plan, plan.optimum, figures)
    for number, runner_up in enumerate(plan.runners_up, start=1):
        yield _runner_up_check(f"runner-up {number}", runner_up, plan, figures)
    if plan.runners_up:
        yield _order_check(plan)
        yield _kinds_check(plan)


def _runner_up_check(name: str, runner_up: RunnerUpRecord, plan: PlanRecord, figures: Figures) -> Check:
    own = _evaluated(runner_up.strategy, plan, figures)
    ok = (
        not isinstance(own, str)
        and same(runner_up.step_time_s, own[0])
        and same(runner_up.device_bytes, own[1])
    )
    return Check(
        name=name,
        ok=ok,
        found=_text(runner_up.step_time_s, runner_up.device_bytes),
        expected=own if isinstance(own, str) else _text(*own),
    )


def _evaluated(strategy: StrategyRecord, plan: PlanRecord, figures: Figures) -> tuple[float, float] | str:
    """Step time and device bytes of a candidate that is legal and fits; else what it should be."""
    proof = plan.proof
    restrictions = proof.space, proof.fixed, proof.axes
    if not is_candidate(figures, strategy, *restrictions, **wider_of(proof)):
        return f"a candidate of the space {proof.space!r}"
    rows = rows_of([strategy])
    broken = str(first_broken(rows, figures)[0])
    if broken:
        return f"a legal strategy; this one breaks {broken}"
    evaluation = evaluate(figures, rows)
    seconds, device, host = (float(column[0]) for column in evaluation)
    if not (fits(device, figures.usable_bytes) and fits(host, figures.host_capacity_bytes)):
        return f"a strategy that fits; this one needs {device!r} B, {host!r} B on its host"
    return seconds, device


def _optimum_checks(plan: PlanRecord, optimum: OptimumRecord, figures: Figures) -> Iterator[Check]:
    """The optimum by itself, and that the recommended strategy is within the tolerance of it."""
    own = _evaluated(optimum.strategy, plan, figures)
    ok = not isinstance(own, str) and same(optimum.step_time_s, own[0])
    expected = own if isinstance(own, str) else f"{own[0]!r} s"
    yield Check(name="optimum", ok=ok, found=f"{optimum.step_time_s!r} s", expected=expected)
    given_up = plan.best.step_time_s / optimum.step_time_s - 1.0
    yield number_check("given up", optimum.given_up, given_up, scale=1.0)
    errors = plan.job.profile.peak_errors
    if optimum.fits_probability is not None and errors is not None and not isinstance(own, str):
        capacity = plan.best.peak_memory_bytes.capacity
        yield number_check(
            "optimum fits", optimum.fits_probability, fits_probability(errors, own[1], capacity), scale=1.0
        )
    tolerance = plan.question.tolerance
    yield Check(
        name="tolerance",
        ok=-TOLERANCE <= given_up <= tolerance + TOLERANCE,
        found=f"{given_up!r} over the optimum",
        expected=f"at least 0, and at most {tolerance!r}",
    )


def _text(seconds: float, nbytes: float) -> str:
    return f"{seconds!r} s, {nbytes!r} B"


def _order_check(plan: PlanRecord) -> Check:
    times = [plan.fastest[1], *(runner_up.step_time_s for runner_up in plan.runners_up)]
    is_sorted = all(b >= a * (1 - TOLERANCE) for a, b in pairwise(times))
    return Check(
        name="runners-up order",
        ok=is_sorted,
        found=", ".join(map(repr, times)),
        expected="ascending step times, the optimum first",
    )


def _kinds_check(plan: PlanRecord) -> Check:
    strategies = [strategy for strategy, _ in _pool(plan)]
    kinds = {kind_of(strategy) for strategy in strategies}
    return Check(
        name="runners-up kinds",
        ok=len(kinds) == len(strategies),
        found=f"{len(kinds)} kinds among {len(strategies)} strategies",
        expected=f"each differs from all others in one of {', '.join(KIND_FIELDS)}",
    )


def _pool(plan: PlanRecord) -> list[tuple[StrategyRecord, float]]:
    """The optimum and the other strategies of the pool of the search, with their step times.

    A recommended strategy is one of them where none of its kind is listed and it is no slower than the last.
    """
    pool = [plan.fastest]
    pool += [(one.strategy, one.step_time_s) for one in plan.runners_up if one.strategy != plan.fastest[0]]
    kinds = {kind_of(strategy) for strategy, _ in pool}
    if kind_of(plan.strategy) not in kinds and plan.best.step_time_s <= pool[-1][1]:
        pool.append((plan.strategy, plan.best.step_time_s))
    return pool


def kind_of(strategy: StrategyRecord) -> StrategyKind:
    """The values of KIND_FIELDS: the kind of a strategy."""
    return tuple(getattr(strategy, name) for name in KIND_FIELDS)


GRIDS_PER_BATCH = 1 << 14
"""Grids of one pp whose costs are computed together."""

VALUES_PER_BATCH = 1 << 15
"""Values (stages x nodes) bounded together. Columns of 256 KiB stay in the CPU caches, and the allocator
reuses them instead of returning them to the system."""

MARGIN = 1e-13
"""Relative rounding of sums in another order; a lower bound counts for this much less."""

NODES_PER_BATCH = 1 << 16
"""Nodes that are branched together."""


Progress = Callable[[str], None]
"""Takes a line of text that says how far a proof is."""


class _CounterexampleError(Exception):
    """Ends the proof early: a counterexample was found."""


@dataclass(kw_only=True)
class Prover:
    """Branch and bound over `space`: no candidate within `usable_bytes` of device memory may be below
    `cutoff_s`.

    `kind_cutoffs_s` are lower cutoffs for candidates of some kinds (values of KIND_FIELDS). `is_out_of_time`
    says when to stop. With `stops_early`, the first candidate below all cutoffs ends the proof.
    """

    figures: Figures
    space: SpaceDefinition
    cutoff_s: float
    usable_bytes: float
    kind_cutoffs_s: Mapping[StrategyKind, float] = field(default_factory=dict)
    is_out_of_time: Callable[[], bool] = lambda: False
    stops_early: bool = True
    outcome: ProofOutcome = field(default_factory=ProofOutcome)

    def run(self) -> ProofOutcome:
        """Run the proof to its end, or until a counterexample ends it. Raises ProofTimeLimitError."""
        try:
            for pp in sorted({pp for _, _, pp, _ in self.space.degrees()}):
                self._run_pp(pp)
        except _CounterexampleError:
            pass
        return self.outcome

    def _run_pp(self, pp: int) -> None:
        splits = {
            stages: splits_of(self.space, stages)
            for stages in sorted({pp * vpp for _, vpp in self._schedules(pp)})
        }
        for rows, multiplicity, is_excluded in grids_of(self.figures, self.space, pp):
            self._run_grids(rows, multiplicity, is_excluded, splits)

    def _run_grids(
        self, rows: StrategyRows, multiplicity: Column, is_excluded: Column, splits: Mapping[int, Splits]
    ) -> None:
        """All candidates of some grids of one pp, each counted `multiplicity` times; excluded ones count
        as illegal."""
        if not len(rows):
            return
        pp = int(rows.pp[0])
        broken = breaks_grid_rule(self.figures, rows) | is_excluded
        every = multiplicity * self._chains_below(rows, lambda ranks: self.space.shards(ranks).count)
        below = multiplicity * self._chains_below(rows, self._chains_within)
        every, below = (each * self.space.offloads().count for each in (every, below))
        in_all = sum(count_of_splits(splits[pp * vpp]) for _, vpp in self._schedules(pp))
        self.outcome.illegal += int(every[broken].sum() + (every - below)[~broken].sum()) * in_all
        legal = np.flatnonzero(~broken)
        if not len(legal):
            return
        for start in range(0, len(legal), GRIDS_PER_BATCH):
            some = legal[start : start + GRIDS_PER_BATCH]
            grid_costs = grid_costs_of(
                self.figures, pp, rows.take(some), multiplicity[some], self.space.module_sets or ("",)
            )
            self._run_grid_costs(grid_costs, below[some], splits)

    def _run_grid_costs(self, grid_costs: GridCosts, below: Column, splits: Mapping[int, Splits]) -> None:
        """All candidates of some grids; `below` counts those of each grid for each split.

        The costs of a grid's shardings are computed only where some schedule keeps the grid.
        """
        needed = np.zeros(len(below), dtype=bool)
        none = shard_pairs_of(self.figures, self.space, grid_costs, needed)
        left = []
        for schedule, vpp in self._schedules(grid_costs.pp):
            if not count_of_splits(splits[grid_costs.pp * vpp]):
                continue
            pipeline = PipelineContext(
                figures=self.figures,
                fabric=fabric_of(self.figures.cluster, self.figures.efficiency, self.figures.backend),
                grid_costs=grid_costs,
                pairs=none,
                pp=grid_costs.pp,
                schedule=schedule,
                vpp=vpp,
                splits=splits[grid_costs.pp * vpp],
            )
            nodes = self._root_nodes(pipeline, below)
            needed[nodes.grid] = True
            left.append((pipeline, nodes))
        if needed.any():
            pairs = shard_pairs_of(self.figures, self.space, grid_costs, needed)
            for pipeline, nodes in left:
                self._run_recomputed(replace(pipeline, pairs=pairs), nodes)

    def _schedules(self, pp: int) -> list[tuple[str, int]]:
        return [
            (schedule, vpp)
            for schedule, vpp in self.space.schedules(pp)
            if self.space.allows(schedule=schedule, vpp=vpp)
        ]

    def _chains_below(self, rows: StrategyRows, count: Callable[[int], int]) -> Column:
        """Number of shardings of each row, by `count` of its ranks."""
        ranks, of = np.unique(rows.dp * rows.cp, return_inverse=True)
        counts = [count(int(number)) for number in ranks]
        return np.array(counts, dtype=np.int64)[of]

    def _chains_within(self, ranks: int) -> int:
        """Number of shardings over this many ranks that the target allows."""
        if not self.space.target_limits.shards:
            return self.space.shards(ranks).count
        return sum(map(len, chains_of(self.space, ranks).values()))

    def _root_nodes(self, pipeline: PipelineContext, below: Column) -> ProofNodes:
        """The root nodes of one schedule, one per grid, that may contain a faster candidate; `below`
        counts the candidates of each grid for each split."""
        count = count_of_splits(pipeline.splits)
        broken = self._breaks_schedule_rule(pipeline)
        self.outcome.illegal += int(below[broken].sum()) * count
        grid = np.flatnonzero(~broken & (below > 0))
        if not self._has_cutoff:
            return root_nodes(pipeline, grid, below[grid])
        # The bound for all schedules comes first: it is one number per grid, whatever the stages.
        seconds = work_lower_bound(pipeline)[grid]
        grid = grid[self._unpruned(seconds, below[grid] * count, self.cutoff_s)]
        nodes = root_nodes(pipeline, grid, below[grid])
        found = [nodes.take(np.arange(0))]
        for part in batches_of(nodes, VALUES_PER_BATCH // pipeline.stages):
            if self.is_out_of_time():
                raise ProofTimeLimitError
            seconds = time_lower_bound(pipeline, part, is_paired=False, is_sharded=False)
            # all splits with all choices of recompute
            found.append(part.take(self._unpruned(seconds, part.weight * count, self.cutoff_s)))
        return join_nodes(found)

    def _breaks_schedule_rule(self, pipeline: PipelineContext) -> Column:
        rows = pipeline.grid_costs.rows
        grid = SimpleNamespace(**{name: getattr(rows, name) for name in FIELDS})
        grid.schedule, grid.vpp = pipeline.schedule, pipeline.vpp
        found = np.zeros(len(rows), dtype=bool)
        for rule in SCHEDULE_RULES.values():
            found |= np.asarray(rule(grid, self.figures.limits, self.figures.job))
        return found

    def _run_recomputed(self, pipeline: PipelineContext, nodes: ProofNodes) -> None:
        """Branch on recomputation."""
        for part in batches_of(nodes, NODES_PER_BATCH):
            found = branch_recompute(pipeline, part)
            if pipeline.stages == 2:
                # With all splits, neither of two stages has a layer for certain; after bisection one stage
                # has half of them.
                found = bisected(found)
            left = self._surviving(pipeline, found, is_paired=False, is_sharded=False)
            self._run_offloads(pipeline, left)

    def _run_offloads(self, pipeline: PipelineContext, nodes: ProofNodes) -> None:
        """Branch on offload."""
        kinds = self.space.offloads().values["offload"]
        found = branch_offload(nodes, [place for place, kind in enumerate(OFFLOADS) if kind in kinds])
        self._run_pairs(pipeline, self._surviving(pipeline, found, is_paired=False, is_sharded=False))

    def _run_pairs(self, pipeline: PipelineContext, nodes: ProofNodes) -> None:
        """Branch on the sharding of parameters and gradients."""
        pairs = pipeline.pairs
        for part in batches_of(nodes, NODES_PER_BATCH // max(int(pairs.number.max()), 1)):
            found = branch_shard_pairs(pipeline, part)
            left = self._surviving(pipeline, found, is_paired=True, is_sharded=False)
            self._run_chains(pipeline, left)

    def _run_chains(self, pipeline: PipelineContext, nodes: ProofNodes) -> None:
        """Branch on the sharding of optimizer states."""
        for part in batches_of(nodes, NODES_PER_BATCH // 8):
            left = self._surviving(
                pipeline, branch_optim_shard(pipeline, part), is_paired=True, is_sharded=True
            )
            self._run_bisection(pipeline, left)

    def _run_bisection(self, pipeline: PipelineContext, nodes: ProofNodes) -> None:
        """Bisect the boxes of splits and recomputed layers until they are points; evaluate the points."""
        waiting = deque(batches_of(nodes, NODES_PER_BATCH))
        while waiting:
            part = waiting.pop()
            is_point = widths(part.box).max(axis=0) == 0
            self._evaluate(pipeline, part.take(np.flatnonzero(is_point)))
            undecided = part.take(np.flatnonzero(~is_point))
            if len(undecided):
                left = self._surviving(pipeline, bisected(undecided), is_paired=True, is_sharded=True)
                waiting.extend(batches_of(left, NODES_PER_BATCH))

    def _surviving(
        self, pipeline: PipelineContext, nodes: ProofNodes, *, is_paired: bool, is_sharded: bool
    ) -> ProofNodes:
        """The nodes that may contain a faster candidate that fits; the others are counted."""
        nodes = nodes.take(np.flatnonzero(pipeline.splits.count(nodes.recompute, nodes.box) > 0))
        found = [nodes.take(np.arange(0))]
        for part in batches_of(nodes, VALUES_PER_BATCH // pipeline.stages):
            if self.is_out_of_time():
                raise ProofTimeLimitError
            part = self._fitting(pipeline, part, is_paired=is_paired)
            if not self._has_cutoff:
                found.append(part)
                continue
            counts = part.weight * pipeline.splits.count(part.recompute, part.box)
            seconds = time_lower_bound(pipeline, part, is_paired=is_paired, is_sharded=is_sharded)
            cutoff_s = self._cutoff_s(pipeline, part)
            found.append(part.take(self._unpruned(seconds, counts, cutoff_s)))
        return join_nodes(found)

    def _cutoff_s(self, pipeline: PipelineContext, nodes: ProofNodes) -> Column:
        """The cutoff of each node; a kind's own cutoff where the kind is fixed."""
        found = np.full(len(nodes), self.cutoff_s)
        rows = pipeline.grid_costs.rows
        for (*degrees, schedule, recompute), cutoff_s in self.kind_cutoffs_s.items():
            if schedule == pipeline.schedule:
                is_listed = nodes.recompute == RECOMPUTES.index(str(recompute))
                for name, degree in zip(KIND_FIELDS, degrees, strict=False):
                    is_listed = is_listed & (getattr(rows, name)[nodes.grid] == degree)
                found[is_listed] = cutoff_s
        return found

    @property
    def _has_cutoff(self) -> bool:
        """Whether there is a cutoff; else no lower bound of time is computed."""
        return self.cutoff_s < inf or bool(self.kind_cutoffs_s)

    def _unpruned(self, seconds: Column, counts: Column, cutoff_s: Column | float) -> Column:
        """Indices of the nodes whose lower bound of time is below the cutoff; the others are counted as
        pruned."""
        is_left = seconds * (1 - MARGIN) < cutoff_s
        if not is_left.all():
            self.outcome.pruned += int(counts[~is_left].sum())
            self.outcome.lower_bound_s = min(self.outcome.lower_bound_s, float(seconds[~is_left].min()))
        return np.flatnonzero(is_left)

    def _fitting(self, pipeline: PipelineContext, nodes: ProofNodes, *, is_paired: bool) -> ProofNodes:
        """The nodes that may fit, without the numbers of recomputed layers that are too small; the others
        are counted as out of memory."""
        fits = self._may_fit(pipeline, nodes, nodes.box.layers_high, is_paired=is_paired)
        self._count_out_of_memory(pipeline, nodes.take(np.flatnonzero(~fits)))
        nodes = nodes.take(np.flatnonzero(fits))
        low, high = nodes.box.layers_low, nodes.box.layers_high
        at = np.flatnonzero((nodes.recompute == FULL) & (high > low))
        if not len(at):
            return nodes
        some = nodes.take(at)
        # The least number that may fit is in (too_few, enough].
        too_few, enough = some.box.layers_low - 1, some.box.layers_high
        while (enough - too_few > 1).any():
            middle = (too_few + enough) // 2
            may_fit = self._may_fit(pipeline, some, np.maximum(middle, 1), is_paired=is_paired)
            may_fit |= middle == too_few
            enough = np.where(may_fit & (middle > too_few), middle, enough)
            too_few = np.where(may_fit, too_few, middle)
        out = replace(some, box=replace(some.box, layers_high=too_few))
        self._count_out_of_memory(pipeline, out.take(np.flatnonzero(too_few >= some.box.layers_low)))
        least = low.copy()
        least[at] = enough
        nodes = replace(nodes, box=replace(nodes.box, layers_low=least))
        # A box may have lost its last candidate.
        return nodes.take(np.flatnonzero(pipeline.splits.count(nodes.recompute, nodes.box) > 0))

    def _may_fit(
        self, pipeline: PipelineContext, nodes: ProofNodes, most: Column, *, is_paired: bool
    ) -> Column:
        device, host = memory_lower_bound(pipeline, nodes, most, is_paired=is_paired)
        fits: Column = (device * (1 - MARGIN) <= self.usable_bytes) & (
            host * (1 - MARGIN) <= self.figures.host_capacity_bytes
        )
        return fits

    def _count_out_of_memory(self, pipeline: PipelineContext, nodes: ProofNodes) -> None:
        if len(nodes):
            counts = nodes.weight * pipeline.splits.count(nodes.recompute, nodes.box)
            self.outcome.out_of_memory += int(counts.sum())

    def _evaluate(self, pipeline: PipelineContext, nodes: ProofNodes) -> None:
        """The leaves: each is one candidate, and those of equal cost."""
        if not len(nodes):
            return
        if self.is_out_of_time():
            raise ProofTimeLimitError
        rows = rows_of_points(pipeline, nodes)
        found = evaluate(self.figures, rows)
        fits = found.device_bytes <= self.usable_bytes
        fits &= found.host_bytes <= self.figures.host_capacity_bytes
        self.outcome.out_of_memory += int(nodes.weight[~fits].sum())
        self.outcome.evaluated += int(nodes.weight[fits].sum())
        if fits.any():
            seconds = np.where(fits, found.step_time_s, inf)
            place = int(seconds.argmin())
            self.outcome.lower_bound_s = min(self.outcome.lower_bound_s, float(seconds[place]))
            below_cutoff = np.flatnonzero(
                seconds < np.minimum(self._cutoff_s(pipeline, nodes), self.outcome.counterexample_s)
            )
            if len(below_cutoff):
                place = int(below_cutoff[seconds[below_cutoff].argmin()])
                self.outcome.counterexample, self.outcome.counterexample_s = (
                    rows.take([place]),
                    float(seconds[place]),
                )
                self.outcome.counterexample_bytes = float(found.device_bytes[place])
                if self.stops_early and self.outcome.counterexample_s < min(
                    self.kind_cutoffs_s.values(), default=self.cutoff_s
                ):
                    raise _CounterexampleError


PROVEN_GAP = 1e-12
"""Relative difference up to which two step times, or two memory sizes, count as equal."""

PROOF_BUDGET_S = 600.0
"""Default time limit of a proof, seconds; a proof that takes longer is left open."""

LARGEST_SPACE = 1 << 62
"""Candidates that the proof counts without overflow of 64-bit integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """No legal candidate within `usable_bytes` takes less than `cutoff_s` seconds, or of the kinds in
    `kind_cutoffs_s` less than the cutoff of the kind. `text` states the claim."""

    cutoff_s: float
    usable_bytes: float
    text: str
    kind_cutoffs_s: Mapping[StrategyKind, float] = field(default_factory=dict)


def optimal_check(
    plan: PlanRecord, figures: Figures, budget_s: float, progress: Progress | None = None
) -> Check:
    """The claims of the plan's objective, proven within `budget_s` seconds, or open."""
    proof = plan.proof
    space = space_of(figures, proof, target_limits_of(limits_of(plan), figures.model, plan.job))
    all_of = count(figures, proof.space, proof.fixed, proof.axes, **wider_of(proof))
    return _proven("optimal", figures, space, claims_of(plan, figures), all_of, budget_s, progress)


def nothing_faster_check(
    plan: PlanRecord, other: CertificateRecord, budget_s: float, progress: Progress | None = None
) -> Check:
    """That no strategy with other options of the software takes less time than the certificate about them
    says, and that this is no less than that of the fastest; proven within `budget_s` seconds, or open."""
    name = " ".join(("optimal with", *(f"{key} {value}" for key, value in other.options.items())))
    with_them, best_s, bound_s = with_options(plan, other), plan.fastest[1], other.lower_bound_s
    is_lower = bound_s < best_s * (1 - PROVEN_GAP) and not other.unexplored
    if plan.model is None or is_lower:
        return Check(name=name, ok=False, found=f"no step time below {bound_s!r} s", expected=f"{best_s!r} s")
    figures = figures_of(plan.model.layers, plan.cluster, with_them.job)
    limits = target_limits_of(limits_of(with_them), figures.model, with_them.job)
    all_of = count(figures, other.space, other.fixed, other.axes, **wider_of(other))
    usable = figures.usable_bytes * (1 - TOLERANCE)
    claim = _time_claim(bound_s, usable, f"no step time below {bound_s!r} s")
    space = space_of(figures, other, limits)
    return _proven(name, figures, space, [claim], all_of, budget_s, progress)


def _proven(
    name: str,
    figures: Figures,
    space: SpaceDefinition,
    claims: Sequence[Claim],
    all_of: int,
    budget_s: float,
    progress: Progress | None,
) -> Check:
    """Whether the claims hold for all candidates of the space, of which there are `all_of`."""
    started_s = monotonic()
    # Candidates that fit only by rounding are not part of the claim: the planner may reject them.
    figures = replace(figures, host_capacity_bytes=figures.host_capacity_bytes * (1 - TOLERANCE))
    found = "; ".join(claim.text for claim in claims)
    if all_of > LARGEST_SPACE:
        return _open_check(name, found, f"not proven: {all_of} candidates")
    covers: list[ProofOutcome] = []
    for claim in claims:
        decided = ProofOutcome()

        def is_out_of_time(decided: ProofOutcome = decided) -> bool:
            spent_s = monotonic() - started_s
            if progress is not None:
                part = len(covers) * all_of + decided.count
                progress(progress_text(name, part, len(claims) * all_of, spent_s))
            return spent_s > budget_s

        prover = Prover(
            figures=figures,
            space=space,
            cutoff_s=claim.cutoff_s,
            usable_bytes=claim.usable_bytes,
            kind_cutoffs_s=claim.kind_cutoffs_s,
            is_out_of_time=is_out_of_time,
            outcome=decided,
        )
        try:
            outcome = prover.run()
        except ProofTimeLimitError:
            return _open_check(name, found, f"not proven within {budget_s:g} s")
        if outcome.counterexample is not None:
            return Check(
                name=name,
                ok=False,
                found=found,
                expected=_counterexample_text(outcome, outcome.counterexample, claim),
            )
        covers.append(outcome)
    return Check(
        name=name,
        ok=all(outcome.count == all_of for outcome in covers),
        found=found,
        expected="; ".join(_outcome_text(outcome, all_of) for outcome in covers),
    )


def progress_text(name: str, done: int, total: int, spent_s: float) -> str:
    """How far a proof is: candidates decided, and the time that the rest takes at the same rate."""
    text = f"{name}: {done:,} of {total:,} candidates decided"
    if not done:
        return text
    left_s = spent_s * (total - done) / done
    return f"{text}, about {f'{left_s / 60:.0f} min' if left_s >= 100 else f'{left_s:.0f} s'} left"


def _open_check(name: str, found: str, expected: str) -> Check:
    return Check(name=name, ok=False, is_open=True, found=found, expected=expected)


def space_of(figures: Figures, proof: CertificateRecord, target_limits: TargetLimits) -> SpaceDefinition:
    """The space of the certificate, with the limits of the target."""
    return SpaceDefinition(
        layers=figures.limits.layers,
        is_moe=figures.model.experts is not None,
        devices=figures.cluster.devices,
        batch=figures.job.global_batch_size,
        is_core=proof.space == "core",
        fixed=proof.fixed,
        axes=proof.axes,
        target_limits=target_limits,
        **wider_of(proof),
    )


def claims_of(plan: PlanRecord, figures: Figures) -> list[Claim]:
    """The claims to prove; after a search that ended early only its lower bound."""
    proof, usable = plan.proof, figures.usable_bytes * (1 - TOLERANCE)
    is_whole = proof.unexplored == 0 and proof.lower_bound_s >= proof.best_s * (1 - PROVEN_GAP)
    if not is_whole:
        bound_s = proof.lower_bound_s
        return [_time_claim(bound_s, usable, f"no step time below {bound_s!r} s")]
    results = _pool(plan)
    own = evaluate(figures, rows_of([strategy for strategy, _ in results]))
    # The stated and the recomputed times differ by rounding; no candidate may be below either.
    times_s = [min(stated, float(found)) for (_, stated), found in zip(results, own.step_time_s, strict=True)]
    best_s = times_s[0]
    if plan.question.objective == "memory":
        nbytes = min(plan.best.peak_memory_bytes.device, float(own.device_bytes[0]))
        return [
            Claim(cutoff_s=inf, usable_bytes=nbytes * (1 - PROVEN_GAP), text=f"minimum memory {nbytes!r} B"),
            _time_claim(
                best_s,
                min(nbytes * (1 + PROVEN_GAP), usable),
                f"minimum step time {best_s!r} s at this memory",
            ),
        ]
    # A plan file has only the part of the cluster that the plan uses.
    here = "" if plan.question.objective == "time" else " on these devices"
    claim = _time_claim(max(times_s), usable, f"minimum step time {best_s!r} s{here}")
    if len(results) == 1:
        return [claim]
    kind_cutoffs_s = {
        kind_of(strategy): seconds * (1 - PROVEN_GAP)
        for (strategy, _), seconds in zip(results, times_s, strict=True)
    }
    return [replace(claim, kind_cutoffs_s=kind_cutoffs_s, text=f"{claim.text}, then the runners-up")]


def _time_claim(seconds: float, usable: float, text: str) -> Claim:
    return Claim(cutoff_s=seconds * (1 - PROVEN_GAP), usable_bytes=usable, text=text)


def _outcome_text(outcome: ProofOutcome, all_of: int) -> str:
    least = f"{outcome.lower_bound_s!r} s" if outcome.lower_bound_s < inf else "none"
    return (
        f"{outcome.illegal} illegal + {outcome.out_of_memory} out of memory + {outcome.pruned} pruned "
        f"+ {outcome.evaluated} evaluated = {all_of}; lower bound {least}"
    )


def _counterexample_text(outcome: ProofOutcome, row: StrategyRows, claim: Claim) -> str:
    best_s = min(claim.kind_cutoffs_s.values(), default=claim.cutoff_s)
    what = "" if outcome.counterexample_s < best_s else "a better runner-up: "
    return f"{what}{outcome.counterexample_s!r} s, {outcome.counterexample_bytes!r} B: {row_text(row)}"


def row_text(row: StrategyRows) -> str:
    """All fields of the one strategy of `row`."""
    values = {name: getattr(row, name)[0] for name in FIELDS}
    return ",".join(
        f"{name}={str(bool(value)).lower() if isinstance(value, np.bool_) else value}"
        for name, value in values.items()
    )
