"""Decisions for uneven plans: keep, go on with the pipelines that are whole, or move.

A patch leaves pipelines where they lie: all whose nodes are there, with the shares by which they end soonest;
or with the layers in each stage and the shares by which they do, pipelines that lost some of their stages
among them.
A move is to the best uneven plan of the nodes that are there, as they are, or to the best uniform
arrangement. Pure, as the decisions for uniform plans are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from shardwise.cluster import Cluster, pools_of, present_cluster
from shardwise.errors import ConfigError, Infeasible
from shardwise.plan import Layout, Pipeline, Stage, UnevenFile, UnevenResult
from shardwise.replan.arrangement import Arrangement
from shardwise.replan.decide import ENOUGH, KEEP, MOVE, PATCH, RESTARTS, Change, Planner
from shardwise.replan.holdings import Holdings, Piece
from shardwise.replan.running import nodes_like
from shardwise.replan.shares import fastest_shares
from shardwise.replan.situation import Situation
from shardwise.replan.steps import PROBE
from shardwise.replan.transition import NOTHING, Transition
from shardwise.search import Question, best_uneven, priced_again, relaid


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenArrangement:
    """An uneven plan on nodes: the ranks of `result` count the devices of `nodes`, one node after the other.
    Of the result its pipelines, their microbatches and times are what holds now."""

    result: UnevenResult
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenDecision(Change):
    """What runs then, an uneven plan or a uniform strategy, and the nodes that it uses."""

    arrangement: UnevenArrangement | Arrangement
    used: frozenset[str]


def uneven_running_on(plan: UnevenFile, cluster: Cluster) -> UnevenArrangement:
    """The plan on the first nodes of the cluster that are like those it was made for. ConfigError where it
    has none such, or the plan has stages on two pools."""
    if any(stage.parts for pipeline in plan.best.layout.pipelines for stage in pipeline.stages):
        raise ConfigError(
            "is not replanned", key="best.layout", found="a stage on two pools",
            allowed="stages on one pool each",
        )  # fmt: skip
    nodes = nodes_like(plan.cluster, cluster, (None,) * len(plan.cluster.nodes))
    return UnevenArrangement(result=plan.best, nodes=nodes)


def replan_uneven(
    planner: Planner,
    running: UnevenArrangement,
    situation: Situation,
    *,
    horizon_s: float,
    saved: frozenset[str] = frozenset(),
    returned: frozenset[str] = frozenset(),
) -> UnevenDecision:
    """What is best over the horizon from here, as `Planner.replan` has it. Raises Infeasible where nothing
    can run."""
    if not situation.states:
        raise Infeasible("no node is left", reasons={})
    there = _There(planner, situation)
    before = there.holdings(running)
    left = frozenset(situation.states) - returned

    def change(after: Holdings, *, is_patch: bool) -> Transition:
        return planner.transitions.between_holdings(before, after, situation, left, saved, is_patch=is_patch)

    found: list[tuple[str, UnevenArrangement | Arrangement, float, Transition]] = []
    kept = there.kept(running) if returned.isdisjoint(there.nodes_of(running)) else None
    if kept is not None:
        found.append((KEEP, kept, kept.result.step_time_s, NOTHING))
    for patched in there.patched(running):
        moved = change(there.holdings(patched), is_patch=True)
        found.append((PATCH, patched, patched.result.step_time_s, moved))
    try:
        uniform = planner.replan(None, situation, horizon_s=horizon_s)
    except Infeasible:
        pass
    else:
        moved = change(planner.transitions.holdings_of(uniform.arrangement), is_patch=False)
        found.append((MOVE, uniform.arrangement, uniform.step_s, moved))
    better = there.best(running, min((step_s for _, _, step_s, _ in found), default=float("inf")))
    if better is not None:
        moved = change(there.holdings(better), is_patch=False)
        found.append((MOVE, better, better.result.step_time_s, moved))
    if not found:
        raise Infeasible(f"nothing fits on the {len(situation.states)} nodes that are left", reasons={})
    if kept is None:
        horizon_s = max(horizon_s, RESTARTS * planner.transitions.costs.restart_s)
    every = [
        UnevenDecision(
            decision=decision,
            arrangement=arrangement,
            used=there.nodes_of(arrangement),
            step_s=step_s,
            keep_step_s=None if kept is None else kept.result.step_time_s,
            transition=transition,
            horizon_s=horizon_s,
            considered=len(found),
        )
        for decision, arrangement, step_s, transition in found
    ]
    best = every[0]
    for one in every[1:]:
        if one.steps > best.steps * (1.0 + ENOUGH):
            best = one
    return best


class _There:
    """The nodes that are there, as a cluster, and uneven plans on it."""

    def __init__(self, planner: Planner, situation: Situation) -> None:
        self._prices = planner.steps.prices
        self._names = tuple(situation.states)
        runs = situation.states_of(self._names, self._prices.node_bytes_per_s) or ()
        every = [state for state, number in runs for _ in range(number)]
        self._cluster = present_cluster(self._prices.cluster, dict(zip(self._names, every, strict=True)))
        keys = {replace(pool.node, name=""): pool.name for pool in pools_of(self._cluster)}
        self._pool_of = {
            name: keys[replace(node, name="")]
            for name, node in zip(self._names, self._cluster.nodes, strict=True)
        }

    def kept(self, running: UnevenArrangement) -> UnevenArrangement | None:
        """What runs, as it is; None where it cannot go on."""
        every = range(len(running.result.layout.pipelines))
        if not self.nodes_of(running) <= set(self._names):
            return None
        return self._priced(self._laid(running, every), running.result.microbatches)

    def patched(self, running: UnevenArrangement) -> Iterator[UnevenArrangement]:
        """Its whole pipelines with the shares by which they end soonest; where that is sooner still or they
        do not fit so, with the layers too by which they do; and the same beside those that have lost stages,
        whose layers the stages that are left take."""
        locate = self._locate(running.nodes)
        whole, broken = [], []
        for place, pipeline in enumerate(running.result.layout.pipelines):
            is_there = [locate(stage)[0] in self._pool_of for stage in pipeline.stages]
            if all(is_there):
                whole.append(place)
            elif any(is_there):
                broken.append(place)
        total, least_s = sum(running.result.microbatches), float("inf")
        if 0 < len(whole) <= total:
            shared = self._shared(self._laid(running, whole), total)
            if shared is not None:
                least_s = shared.result.step_time_s
                yield shared
        for places in (whole, sorted(whole + broken)) if broken else (whole,):
            found = self._relayered(self._laid(running, places)) if places else None
            if found is not None and found.result.step_time_s < least_s * (1.0 - ENOUGH):
                least_s = found.result.step_time_s
                yield found

    def _shared(self, laid: UnevenResult, total: int) -> UnevenArrangement | None:
        """These pipelines with the shares by which they end soonest; None where they do not fit."""
        pipelines = laid.layout.pipelines
        lower = max(len(pipeline.stages) for pipeline in pipelines)
        upper = lower + PROBE * lower
        ends = [self._priced(laid, (count,) * len(pipelines)) for count in (lower, upper)]
        low, high = ends
        if low is None or high is None:
            return None
        times = list(zip(low.result.pipeline_s, high.result.pipeline_s, strict=True))
        each_s = [(high_s - low_s) / (upper - lower) for low_s, high_s in times]
        first_s = [low_s - (lower - 1) * more_s for (low_s, _), more_s in zip(times, each_s, strict=True)]
        shares = fastest_shares(first_s, each_s, total, 1, 1)
        return None if shares is None else self._priced(laid, tuple(shares))

    def _relayered(self, laid: UnevenResult) -> UnevenArrangement | None:
        """These pipelines with the layers and shares by which they end soonest."""
        found = relaid(self._prices.model, self._cluster, self._prices.job, laid)
        return None if found is None else self._priced(found, found.microbatches)

    def best(self, running: UnevenArrangement, beat_s: float) -> UnevenArrangement | None:
        """The best uneven plan that takes less than `beat_s`, with as many replicas in a stage at most as
        what runs has."""
        prices = self._prices
        stage_dp = max(stage.dp for pipeline in running.result.layout.pipelines for stage in pipeline.stages)
        question = Question(model=prices.model, cluster=self._cluster, job=prices.job, stage_dp=stage_dp)
        result = best_uneven(question, beat_s)
        return None if result is None else UnevenArrangement(result=result, nodes=self._names)

    def nodes_of(self, arrangement: UnevenArrangement | Arrangement) -> frozenset[str]:
        """The nodes that its stages lie on."""
        if isinstance(arrangement, Arrangement):
            return frozenset(arrangement.nodes)
        locate = self._locate(arrangement.nodes)
        pipelines = arrangement.result.layout.pipelines
        return frozenset(locate(stage)[0] for pipeline in pipelines for stage in pipeline.stages)

    def holdings(self, arrangement: UnevenArrangement) -> Holdings:
        """Every stage's layers lie on its node; states are split over the replicas of a layer."""
        locate = self._locate(arrangement.nodes)
        return _holdings(
            [
                [(sum(stage.layers), locate(stage)[0]) for stage in pipeline.stages]
                for pipeline in arrangement.result.layout.pipelines
            ]
        )

    def _locate(self, nodes: Sequence[str]) -> Callable[[Stage], tuple[str, int]]:
        """Where a stage lies: its node, and which of the node's devices is its first."""
        starts = self._starts(nodes)

        def found(stage: Stage) -> tuple[str, int]:
            rank = int(stage.ranks.partition("-")[0])
            name = max((name for name in nodes if starts[name] <= rank), key=lambda one: starts[one])
            return name, rank - starts[name]

        return found

    def _starts(self, nodes: Sequence[str]) -> Mapping[str, int]:
        firsts = accumulate((self._prices.devices_of(name) for name in nodes), initial=0)
        return dict(zip(nodes, firsts, strict=False))

    def _laid(self, running: UnevenArrangement, places: Iterable[int]) -> UnevenResult:
        """Some pipelines of what runs, as ranks and pools of the nodes that are there; stages that are gone
        are left out."""
        result, locate, starts = running.result, self._locate(running.nodes), self._starts(self._names)
        chosen = list(places)

        def moved(stage: Stage) -> Stage:
            name, offset = locate(stage)
            first = starts[name] + offset
            last = first + stage.devices - 1
            ranks = f"{first}-{last}" if stage.devices > 1 else f"{first}"
            return replace(stage, ranks=ranks, device_class=self._pool_of[name])

        left = [
            [
                (moved(stage), way)
                for stage, way in zip(
                    result.layout.pipelines[place].stages, result.recompute[place], strict=True
                )
                if locate(stage)[0] in starts
            ]
            for place in chosen
        ]
        pipelines = tuple(Pipeline(stages=tuple(stage for stage, _ in stages)) for stages in left)
        stages = [stage for pipeline in pipelines for stage in pipeline.stages]
        return replace(
            result,
            layout=Layout(pipelines=pipelines),
            recompute=tuple(tuple(way for _, way in stages) for stages in left),
            pools=tuple(dict.fromkeys(stage.device_class for stage in stages)),
            idle_devices=self._cluster.devices - sum(stage.devices for stage in stages),
        )

    def _priced(self, laid: UnevenResult, shares: tuple[int, ...]) -> UnevenArrangement | None:
        """What is laid with these microbatches, priced from its record; None where it does not fit."""
        total = sum(shares)
        kinds = {
            tuple((stage.device_class, stage.tp, stage.dp, stage.layers) for stage in pipeline.stages)
            for pipeline in laid.layout.pipelines
        }
        is_alike = laid.is_alike and len(kinds) == 1 and max(shares) - min(shares) <= 1
        pipelines = tuple(
            Pipeline(stages=tuple(replace(stage, share=share / total) for stage in pipeline.stages))
            for pipeline, share in zip(laid.layout.pipelines, shares, strict=True)
        )
        result = replace(laid, layout=Layout(pipelines=pipelines), microbatches=shares, is_alike=is_alike)
        # Stages cost the same whatever the batch is, so that shares can be tried.
        job = replace(self._prices.job, global_batch_size=total * laid.micro_batch_size)
        again = priced_again(self._prices.model, self._cluster, job, result)
        if again.faults or again.device_bytes > again.usable_bytes:
            return None
        result = replace(result, pipeline_s=again.pipeline_s, step_time_s=max(again.pipeline_s))
        return UnevenArrangement(result=result, nodes=self._names)


def _holdings(pipelines: Sequence[Sequence[tuple[int, str]]]) -> Holdings:
    """Of pipelines told by the layers and the node of each stage. The embedding lies on the first stage, the
    head on the last; each run of units that no pipeline cuts has its own pieces."""
    spans: list[list[tuple[int, int, str]]] = []
    for stages in pipelines:
        ends = [1 + below for below in accumulate(layers for layers, _ in stages)]
        ends[-1] += 1
        spans.append([(*span, node) for span, (_, node) in zip(pairwise([0, *ends]), stages, strict=True)])
    cuts = sorted({cut for stages in spans for first, last, _ in stages for cut in (first, last)})
    weights: list[tuple[Piece, ...]] = []
    states: list[tuple[Piece, ...]] = []
    for low, high in pairwise(cuts):
        on = [node for stages in spans for first, last, node in stages if first <= low < last]
        weights.append((Piece(low, high, 0.0, 1.0, tuple(dict.fromkeys(on))),))
        states.append(
            tuple(
                Piece(low, high, place / len(on), (place + 1) / len(on), (node,))
                for place, node in enumerate(on)
            )
        )
    return Holdings(weights=tuple(weights), states=tuple(states))
