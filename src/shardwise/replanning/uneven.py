"""Uneven plans on the nodes of a cluster: step times and state shards in a situation (`UnevenStepTimes`).

`PlansPerDecision` and `PlansBySize` are sources of uneven plans to migrate to: the best plan on the nodes in
their present state, or on nominal nodes by number of nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Protocol

from shardwise.cluster import (
    Cluster,
    Conditions,
    EventTrace,
    Node,
    NodeState,
    NodeView,
    Tier,
    cluster_of_nodes,
    current_cluster,
    node_runs,
    pools_of,
)
from shardwise.errors import ConfigError, InternalError
from shardwise.plans import Answer, Certificate, Layout, MixedFigures, Plan, Result, Stage, layout_document
from shardwise.replanning.arrangement import Arrangement, nodes_of, running_on
from shardwise.replanning.candidates import in_groups
from shardwise.replanning.pipeline_costs import Prices
from shardwise.replanning.planner import KEEP, PATCH
from shardwise.replanning.situation import Situation, StateRuns, situation_of
from shardwise.replanning.step_times import PROBE_ROUNDS, fastest_shares
from shardwise.replanning.transition import Holdings, StateShard
from shardwise.search import (
    UNEVEN_GAP,
    Question,
    RecordCostModel,
    UnevenSearchResult,
    best_uneven,
    predicted_result,
    relayout,
)
from shardwise.ties import is_less

LayoutKey = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenArrangement:
    """An uneven plan on nodes: the ranks of `result` number the devices of `nodes`, one node after the other.

    Of the result, only its pipelines, micro-batches and times are valid in a situation. Two arrangements are
    equal if the same stages are on the same devices with the same micro-batches, whatever their step times.
    """

    result: Result = field(compare=False)
    nodes: tuple[str, ...]
    layout_key: LayoutKey = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout_key", _layout_key(self.result))

    @property
    def has_unreplicated_states(self) -> bool:
        """Whether optimizer state shards are on a single node each: the states of a layer are sharded over
        its replicas."""
        return len(self.nodes) > 1

    @property
    def shape(self) -> tuple[str, int]:
        """The key that a patch does not change."""
        return "uneven", self.result.micro_batch_size

    @property
    def strategy(self) -> None:
        """None: no strategy describes all stages."""
        return None

    @property
    def slots(self) -> tuple[str, ...]:
        """The nodes: none is missing."""
        return self.nodes

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline."""
        return self.result.microbatches

    @property
    def can_be_saved(self) -> bool:
        """True: a plan file represents every uneven plan."""
        return True

    @property
    def is_rerouted(self) -> bool:
        """False: micro-batches of lost nodes are not re-routed."""
        return False

    @property
    def stage_dp(self) -> int:
        """Largest number of replicas of a stage that are not pipelines of their own."""
        return max(stage.dp for stage in self.result.layout.stages)

    @property
    def document(self) -> dict[str, object]:
        """What runs, as the JSON answers have it."""
        return {
            "strategy": None,
            "uneven": {
                "layout": layout_document(self.result.layout),
                "micro_batch_size": self.result.micro_batch_size,
                "recompute": [list(stages) for stages in self.result.recompute],
                "pipeline_s": list(self.result.pipeline_s),
            },
        }


def _layout_key(result: Result) -> LayoutKey:
    """The key that distinguishes plans. Whether several pipelines are identical depends on the states of
    nodes."""
    is_alike = result.is_alike and len(result.layout.pipelines) == 1
    stages = tuple(
        tuple((stage.ranks, stage.tp, stage.dp, stage.layers) for stage in pipeline.stages)
        for pipeline in result.layout.pipelines
    )
    return stages, result.recompute, result.micro_batch_size, result.microbatches, is_alike


def arrangement_of(plan: Plan, cluster: Cluster) -> Arrangement | UnevenArrangement:
    """The plan on the nodes that it names, or on the first nodes of the cluster that are equal to its own.
    Raises ConfigError if there are none, if a strategy is on nodes of several sizes, or if the plan has
    mixed-pool stages or is that of an operator graph."""
    plan.require_kind("uniform", "uneven", key="PLAN")
    if any(stage.parts for stage in plan.best.layout.stages):
        raise ConfigError(
            "has mixed-pool stages, which are not replanned", key="PLAN", found="a mixed-pool stage",
            allowed="a plan of one strategy, or an uneven plan with stages on one pool each",
        )  # fmt: skip
    if plan.kind == "uniform":
        return running_on(plan, cluster)
    return UnevenArrangement(result=plan.best, nodes=nodes_of(plan, cluster))


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Costs on some nodes in their states, and the pool of each node."""

    prices: RecordCostModel
    pool_of: dict[str, str]


def _with_shares(laid: Result, shares: Sequence[int]) -> Result:
    """The result with these numbers of micro-batches; its times are no longer valid."""
    total = sum(shares)
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(replace(stage, share=share / total) for stage in pipeline.stages),
            microbatches=share,
            rows=share * pipeline.micro_batch_size,
        )
        for pipeline, share in zip(laid.layout.pipelines, shares, strict=True)
    )
    return replace(laid, layout=Layout(pipelines=pipelines))


class UnevenStepTimes:
    """Cached step times of uneven plans, predicted on the nodes that they use in their present state."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self._places = {f"n{place}": place for place in range(len(prices.cluster.nodes))}
        self._pools = NodeView(prices.cluster).pool_of
        self._nodes: dict[tuple[tuple[str, ...], StateRuns], _Nodes] = {}
        self._predicted: dict[tuple[UnevenArrangement, StateRuns], UnevenArrangement | None] = {}
        self._best_shares: dict[tuple[UnevenArrangement, StateRuns], UnevenArrangement | None] = {}
        self._best_layers: dict[tuple[UnevenArrangement, StateRuns], UnevenArrangement | None] = {}

    def step_s(self, one: UnevenArrangement, situation: Situation) -> float | None:
        """Seconds per step; None if a node is gone, or if the plan does not fit any more."""
        predicted = self.predicted(one, situation)
        return None if predicted is None else predicted.result.step_time_s

    def predicted(self, one: UnevenArrangement, situation: Situation) -> UnevenArrangement | None:
        """The plan with its step times in a situation; None if it cannot run."""
        runs = self._runs(one, situation)
        if runs is None:
            return None
        key = one, runs
        if key not in self._predicted:
            nodes = self._nodes_of(one.nodes, runs)
            self._predicted[key] = self._with_times(self._on(one, nodes), nodes, one)
        return self._predicted[key]

    def with_best_shares(self, one: UnevenArrangement, situation: Situation) -> UnevenArrangement | None:
        """Its pipelines with the fastest shares of micro-batches; None if they do not fit, or if there are
        fewer micro-batches than pipelines."""
        return self._once(self._best_shares, one, situation, self._with_shares)

    def with_best_layers(self, one: UnevenArrangement, situation: Situation) -> UnevenArrangement | None:
        """Its pipelines with the fastest layers and shares; None if none fits."""
        return self._once(self._best_layers, one, situation, self._with_layers)

    def stage_nodes(self, one: UnevenArrangement) -> list[list[str]]:
        """The node of every stage, pipeline by pipeline."""
        locate = self._locate(one.nodes)
        return [[locate(stage)[0] for stage in pipeline.stages] for pipeline in one.result.layout.pipelines]

    def without_idle_nodes(self, one: UnevenArrangement) -> UnevenArrangement:
        """The arrangement on only those nodes that its stages use."""
        return self.part(one, range(len(one.result.layout.pipelines)), frozenset(one.nodes))

    def part(self, one: UnevenArrangement, places: Iterable[int], there: Iterable[str]) -> UnevenArrangement:
        """The pipelines at `places`, on their devices, without stages on nodes that are not in `there`."""
        result, locate, chosen, left = one.result, self._locate(one.nodes), list(places), frozenset(there)
        remaining = [
            [
                (stage, *locate(stage))
                for stage in result.layout.pipelines[place].stages
                if locate(stage)[0] in left
            ]
            for place in chosen
        ]
        names = {name for stages in remaining for _, name, _ in stages}
        nodes = tuple(sorted(names, key=self._places.__getitem__))
        starts = self._starts(nodes)
        pipelines = tuple(
            replace(
                result.layout.pipelines[place],
                stages=tuple(
                    _with_first_rank(stage, starts[name] + offset) for stage, name, offset in stages
                ),
            )
            for place, stages in zip(chosen, remaining, strict=True)
        )
        found = replace(result, layout=Layout(pipelines=pipelines))
        return UnevenArrangement(result=found, nodes=nodes)

    def present(self, names: tuple[str, ...], situation: Situation) -> Cluster | None:
        """These nodes in their present states as a cluster, in its order; None if one of them is gone."""
        runs = situation.states_of(names, self.prices.node_bytes_per_s)
        return None if runs is None else self._nodes_of(names, runs).prices.cluster

    def holdings(self, one: UnevenArrangement) -> Holdings:
        """The state shards: the layers of a stage are on its node; states are sharded over the replicas of a
        layer."""
        return _holdings(
            [
                [(sum(stage.layers), name) for stage, name in zip(pipeline.stages, names, strict=True)]
                for pipeline, names in zip(one.result.layout.pipelines, self.stage_nodes(one), strict=True)
            ]
        )

    def swapped(self, one: UnevenArrangement, first: str, second: str) -> UnevenArrangement | None:
        """The arrangement with two of its nodes swapped; None if they are of different pools."""
        if self._pools[first] != self._pools[second]:
            return None
        changed = {first: second, second: first}
        return self.without_idle_nodes(
            replace(one, nodes=tuple(changed.get(name, name) for name in one.nodes))
        )

    def fills_nodes(self, one: UnevenArrangement) -> bool:
        """Whether no device of its nodes is idle."""
        used = sum(stage.devices for stage in one.result.layout.stages)
        return used == sum(self.prices.devices_of(name) for name in one.nodes)

    def as_uniform(self, one: UnevenArrangement) -> Arrangement | None:
        """None: the search of uniform arrangements starts from nothing."""
        return None

    def in_place(
        self, one: UnevenArrangement, situation: Situation, *, has_all: bool
    ) -> Iterator[tuple[str, UnevenArrangement]]:
        """Keep, if its nodes still hold their state (`has_all`), and patches: other shares or layers.

        First the complete pipelines, and those on nominal nodes only, with the best shares. Then the complete
        pipelines with the best layers and shares, if that is faster or the others do not fit; and the same
        with pipelines that lost stages, whose layers the remaining stages take.
        """
        unchanged = self.predicted(one, situation) if has_all else None
        if unchanged is not None:
            yield KEEP, unchanged
        there = frozenset(situation.states)
        whole, sound, broken = [], [], []
        for place, names in enumerate(self.stage_nodes(one)):
            if there.issuperset(names):
                whole.append(place)
                sound += [place] if all(is_nominal(situation.states[name]) for name in names) else []
            elif not there.isdisjoint(names):
                broken.append(place)
        changes = [(self.with_best_shares, whole)]
        changes += [(self.with_best_shares, sound)] if len(sound) < len(whole) else []
        changes += [(self.with_best_layers, whole)]
        changes += [(self.with_best_layers, sorted(whole + broken))] if broken else []
        least_s = float("inf")
        for change, places in changes:
            found = change(self.part(one, places, there), situation) if places else None
            if found is not None and is_less(found.result.step_time_s, least_s):
                least_s = found.result.step_time_s
                yield PATCH, found

    def answer_on(self, one: UnevenArrangement, cluster: Cluster, space: str) -> Answer:
        """The plan alone, estimated on its nodes without events (`cluster`). The certificate covers this plan
        only, whatever the space of its question."""
        everywhere = EventTrace(nodes=len(self.prices.cluster.nodes), events=())
        nominal = situation_of(NodeView(self.prices.cluster), Conditions.at_start(everywhere))
        predicted = self.predicted(one, nominal)
        if predicted is None:
            raise InternalError("the decided plan does not run on the cluster without events")
        step_s = predicted.result.step_time_s
        certificate = Certificate(
            space="uneven", enumerated=1, rejected={}, cut_by_bound=0, simulated=1, best_s=step_s,
            lower_bound_s=step_s, gap=0.0, search_s=0.0, search_cpu_s=0.0, priced_as=cluster.priced_as,
        )  # fmt: skip
        figures = MixedFigures(
            uniform_step_time_s=None, fastest_class_step_time_s=None, fastest_class=None, idle=()
        )
        return Answer(best=predicted.result, runners_up=(), certificate=certificate, mixed=figures)

    def _once(
        self,
        known: dict[tuple[UnevenArrangement, StateRuns], UnevenArrangement | None],
        one: UnevenArrangement,
        situation: Situation,
        found: Callable[[UnevenArrangement, _Nodes], UnevenArrangement | None],
    ) -> UnevenArrangement | None:
        runs = self._runs(one, situation)
        if runs is None:
            return None
        key = one, runs
        if key not in known:
            known[key] = found(one, self._nodes_of(one.nodes, runs))
        return known[key]

    def _runs(self, one: UnevenArrangement, situation: Situation) -> StateRuns | None:
        return situation.states_of(one.nodes, self.prices.node_bytes_per_s)

    def _nodes_of(self, names: tuple[str, ...], runs: StateRuns) -> _Nodes:
        key = names, runs
        if key not in self._nodes:
            every = [state for state, number in runs for _ in range(number)]
            cluster = current_cluster(self.prices.cluster, dict(zip(names, every, strict=True)))
            pools = {replace(pool.node, name=""): pool.name for pool in pools_of(cluster)}
            pool_of = {
                name: pools[replace(node, name="")] for name, node in zip(names, cluster.nodes, strict=True)
            }
            prices = RecordCostModel(self.prices.model, cluster, self.prices.job)
            self._nodes[key] = _Nodes(prices, pool_of)
        return self._nodes[key]

    def _on(self, one: UnevenArrangement, nodes: _Nodes) -> Result:
        """The result with its stages on the pools of their nodes in the present states."""
        pipelines = tuple(
            replace(
                pipeline,
                stages=tuple(
                    replace(stage, device_class=nodes.pool_of[name])
                    for stage, name in zip(pipeline.stages, names, strict=True)
                ),
            )
            for pipeline, names in zip(one.result.layout.pipelines, self.stage_nodes(one), strict=True)
        )
        pools = dict.fromkeys(stage.device_class for pipeline in pipelines for stage in pipeline.stages)
        return replace(one.result, layout=Layout(pipelines=pipelines), pools=tuple(pools))

    def _with_shares(self, one: UnevenArrangement, nodes: _Nodes) -> UnevenArrangement | None:
        laid = self._on(one, nodes)
        pipelines = laid.layout.pipelines
        total = self.prices.job.global_batch_size // laid.micro_batch_size
        if len(pipelines) > total:
            return None
        lower = max(len(pipeline.stages) for pipeline in pipelines)
        upper = lower + PROBE_ROUNDS * lower
        low, high = (
            self._with_times(_with_shares(laid, (count,) * len(pipelines)), nodes, one)
            for count in (lower, upper)
        )
        if low is None or high is None:
            return None
        times = list(zip(low.result.pipeline_s, high.result.pipeline_s, strict=True))
        each_s = [(high_s - low_s) / (upper - lower) for low_s, high_s in times]
        first_s = [low_s - (lower - 1) * more_s for (low_s, _), more_s in zip(times, each_s, strict=True)]
        shares = fastest_shares(first_s, each_s, total, 1, 1)
        if shares is None:
            return None
        return self._with_times(_with_shares(laid, shares), nodes, one)

    def _with_layers(self, one: UnevenArrangement, nodes: _Nodes) -> UnevenArrangement | None:
        found = relayout(self.prices.model, nodes.prices.cluster, self.prices.job, self._on(one, nodes))
        return None if found is None else self._with_times(found, nodes, one)

    def _with_times(self, laid: Result, nodes: _Nodes, one: UnevenArrangement) -> UnevenArrangement | None:
        """The layout on the nodes of `one`, predicted from its record; None if it does not fit."""
        shares, total = laid.microbatches, sum(laid.microbatches)
        kinds = {
            tuple((stage.device_class, stage.tp, stage.dp, stage.layers) for stage in pipeline.stages)
            for pipeline in laid.layout.pipelines
        }
        is_alike = len(kinds) == len(set(laid.recompute)) == 1 and max(shares) - min(shares) <= 1
        is_alike = is_alike and (laid.is_alike or len(shares) > 1)
        result = replace(_with_shares(laid, shares), is_alike=is_alike)
        # Stage costs do not depend on the batch size, so any shares can be tried.
        found = predicted_result(nodes.prices, result, total * laid.micro_batch_size)
        return None if found is None else UnevenArrangement(result=found, nodes=one.nodes)

    def _locate(self, nodes: Sequence[str]) -> Callable[[Stage], tuple[str, int]]:
        """A function from a stage to its node and the index of its first device on the node."""
        starts = self._starts(nodes)

        def found(stage: Stage) -> tuple[str, int]:
            rank = int(stage.ranks.partition("-")[0])
            name = max((name for name in nodes if starts[name] <= rank), key=lambda one: starts[one])
            return name, rank - starts[name]

        return found

    def _starts(self, nodes: Sequence[str]) -> dict[str, int]:
        firsts = accumulate((self.prices.devices_of(name) for name in nodes), initial=0)
        return dict(zip(nodes, firsts, strict=False))


def _with_first_rank(stage: Stage, first: int) -> Stage:
    last = first + stage.devices - 1
    return replace(stage, ranks=f"{first}-{last}" if stage.devices > 1 else f"{first}")


def _holdings(pipelines: Sequence[Sequence[tuple[int, str]]]) -> Holdings:
    """The state shards of pipelines, given as layers and node of each stage. The embedding is on the first
    stage, the head on the last. Each run of units that no pipeline cuts has its own shards."""
    spans: list[list[tuple[int, int, str]]] = []
    for stages in pipelines:
        ends = [1 + below for below in accumulate(layers for layers, _ in stages)]
        ends[-1] += 1
        spans.append([(*span, node) for span, (_, node) in zip(pairwise([0, *ends]), stages, strict=True)])
    cuts = sorted({cut for stages in spans for first, last, _ in stages for cut in (first, last)})
    weights: list[tuple[StateShard, ...]] = []
    states: list[tuple[StateShard, ...]] = []
    for low, high in pairwise(cuts):
        on = [node for stages in spans for first, last, node in stages if first <= low < last]
        weights.append((StateShard(low, high, 0.0, 1.0, tuple(dict.fromkeys(on))),))
        states.append(
            tuple(
                StateShard(low, high, place / len(on), (place + 1) / len(on), (node,))
                for place, node in enumerate(on)
            )
        )
    return Holdings(weights=tuple(weights), states=tuple(states))


# Sources of uneven plans

DIGITS = 4
"""Numbers of nodes that are searched have this many values between a power of two and the next."""

Alike = tuple[tuple[tuple[Node, int], ...], tuple[Tier, ...]]
"""The key of equal parts of a cluster: their nodes without names, and their tiers."""


class UnevenPlanSource(Protocol):
    """A source of uneven plans to migrate to."""

    def on(self, situation: Situation, rows: int, cutoff_s: float) -> Iterator[UnevenArrangement]:
        """Plans on present nodes, with up to `rows` replicas per stage. Plans whose step takes `cutoff_s` or
        more may be left out."""


class PlansPerDecision:
    """The best plan on all present nodes in their states: one search for each decision."""

    def __init__(self, steps: UnevenStepTimes) -> None:
        self._steps = steps

    def on(self, situation: Situation, rows: int, cutoff_s: float) -> Iterator[UnevenArrangement]:
        """The plan whose step takes less than `cutoff_s`, within the gap that a search is allowed; none if
        there is none, or if none is searched."""
        names = tuple(situation.states)
        cluster = self._steps.present(names, situation)
        if cluster is None:
            return
        found = best_uneven(_question(self._steps, cluster, rows), cutoff_s)
        if found.result is not None:
            yield self._steps.without_idle_nodes(UnevenArrangement(result=found.result, nodes=names))


class PlansBySize:
    """The best plans on some numbers of nominal nodes of each pool, each searched once, placed on the best
    present nodes. For replays with thousands of decisions."""

    def __init__(self, steps: UnevenStepTimes) -> None:
        self._steps = steps
        self._found: dict[tuple[Alike, int], UnevenSearchResult] = {}

    def on(self, situation: Situation, rows: int, cutoff_s: float) -> Iterator[UnevenArrangement]:
        """Plans on all present nodes, and on the nominal ones. If their nodes are not nominal, with the
        fastest shares, and with the fastest layers and shares."""
        for names in self._sets(situation):
            result = self.found(names, rows).result
            if result is None:
                continue
            arrangement = self._steps.without_idle_nodes(UnevenArrangement(result=result, nodes=names))
            if all(is_nominal(situation.states[name]) for name in arrangement.nodes):
                yield arrangement
                continue
            for one in (
                self._steps.with_best_shares(arrangement, situation),
                self._steps.with_best_layers(arrangement, situation),
            ):
                if one is not None:
                    yield one

    def found(self, names: tuple[str, ...], rows: int) -> UnevenSearchResult:
        """The search result on these nodes, in the order of the cluster, in their nominal state."""
        prices = self._steps.prices
        part = cluster_of_nodes(prices.cluster, [int(name[1:]) for name in names])
        alike = tuple(node_runs(tuple(replace(node, name="") for node in part.nodes))), part.tiers
        if (alike, rows) not in self._found:
            question = _question(self._steps, part, rows)
            self._found[alike, rows] = best_uneven(question, gap=UNEVEN_GAP)
        return self._found[alike, rows]

    def _sets(self, situation: Situation) -> Iterator[tuple[str, ...]]:
        states = situation.states
        whole = [name for name, state in states.items() if is_nominal(state)]
        chosen = [self._rounded(some, situation) for some in (list(states), whole) if some]
        yield from dict.fromkeys(chosen)

    def _rounded(self, names: Sequence[str], situation: Situation) -> tuple[str, ...]:
        """The best nodes of each pool, their number rounded down so that few numbers occur."""
        by_pool: dict[int, list[str]] = {}
        for name in names:
            by_pool.setdefault(situation.states[name].pool, []).append(name)
        selected: list[str] = []
        for pool in sorted(by_pool):
            ordered = in_groups(by_pool[pool], situation, lambda name: _sort_key(name, situation))
            selected += ordered[: rounded(len(ordered))]
        return tuple(sorted(selected, key=lambda name: int(name[1:])))


def is_nominal(state: NodeState) -> bool:
    """Whether nothing slows the node."""
    return state == NodeState(pool=state.pool)


def _sort_key(name: str, situation: Situation) -> tuple[float, ...]:
    state = situation.states[name]
    return -state.speed, -state.network, int(name[1:])


def rounded(count: int) -> int:
    """The largest number up to `count` that is searched: from 8 on every second, from 16 on every fourth, and
    so on."""
    step = max((1 << count.bit_length()) // (2 * DIGITS), 1)
    return count // step * step


def _question(steps: UnevenStepTimes, cluster: Cluster, rows: int) -> Question:
    prices = steps.prices
    return Question(model=prices.model, cluster=cluster, job=prices.job, stage_dp=rows)
