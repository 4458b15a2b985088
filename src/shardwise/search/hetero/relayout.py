"""Relayout: the best layers and shares of an uneven plan whose stages stay on their devices, with their tp
and dp.

The layers and recomputation of each stage and the micro-batches of each pipeline are free; the stages that
are left take the layers of lost ones. The plan found is the fastest of all these. The layers of a pipeline
are found as in the search, with the order of its pools given. Shares are optimal when no micro-batch can move
from the slowest pipeline to another that would then end sooner, because no pipeline gets faster with more
micro-batches. Of equally fast plans, pipelines keep their layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwise.cluster import Cluster
from shardwise.model import Model
from shardwise.plans import Layout, Pipeline, Result
from shardwise.search.hetero.lower_bounds import Order, StageTable
from shardwise.search.hetero.pipeline_search import StagePlacement, best_pipeline_in_order, pipeline_s
from shardwise.search.hetero.placement import NodeLookup, faults_of_spread
from shardwise.search.hetero.space import StageKind, UnevenLimits, UnevenSpace, UnevenSubproblem
from shardwise.search.hetero.stage_costs import StageCostModel, StageOptions
from shardwise.strategy import RECOMPUTES, Job
from shardwise.ties import first_largest, first_least, is_less

MAX_EXPANSIONS = 20_000
"""Partial pipelines of one pipeline that are expanded at most, more than any known case needs."""


@dataclass(frozen=True, slots=True)
class _FixedPipeline:
    """A pipeline without its layers: the kind of its stages on each pool, and the pool of each stage."""

    kinds: tuple[int, ...]
    order: Order


@dataclass(frozen=True, slots=True)
class _Relayout:
    """Layers of every pipeline's stages, micro-batches, and the seconds of the slowest pipeline."""

    options: StageOptions
    stages: tuple[tuple[StagePlacement, ...], ...]
    shares: tuple[int, ...]
    time_s: float
    is_alike: bool


def relayout(model: Model, cluster: Cluster, job: Job, result: Result) -> Result | None:
    """The fastest plan with the same stages on the same devices; its times are still those of `result` and
    must be predicted.

    None where no layout fits, where there are fewer micro-batches than pipelines, or where a pipeline has too
    many stages, several kinds of stages on one pool, or a kind that is not in the space. Also None where
    there are mixed-pool stages, or where lost stages leave nodes of spread stages unfilled.
    """
    if any(stage.parts for pipeline in result.layout.pipelines for stage in pipeline.stages):
        return None
    pipelines = result.layout.pipelines
    rows = max(stage.dp for pipeline in pipelines for stage in pipeline.stages)
    space = UnevenSpace(model, cluster, job, UnevenLimits(stage_dp=rows))
    if any(faults_of_spread(space, pipelines)):
        return None
    names = [pool.name for pool in space.pools]
    union = tuple(sorted(names.index(name) for name in result.pools))
    nodes = NodeLookup(space)
    chains = [_chain(space, nodes, union, result.micro_batch_size, pipeline) for pipeline in pipelines]
    known = [chain for chain in chains if chain is not None]
    if len(known) < len(chains):
        return None
    total = job.global_batch_size // result.micro_batch_size
    if total < len(known):
        return None
    subproblem = UnevenSubproblem(
        pools=union, micro_batch_size=result.micro_batch_size, least=len(known), most=len(known)
    )
    pricing = StageCostModel(space)
    found = [_with_own_layers(pricing.options(subproblem), known, total)]
    if result.is_alike and len(set(known)) == 1:
        found.append(_with_equal_layers(pricing.options(replace(subproblem, is_alike=True)), known, total))
    fitting = [one for one in found if one is not None]
    if not fitting:
        return None
    best = fitting[int(first_least([one.time_s for one in fitting]))]
    return _result(result, known, _prefer_current_layers(best, known, pipelines))


def _chain(
    space: UnevenSpace, nodes: NodeLookup, union: tuple[int, ...], micro_batch_size: int, pipeline: Pipeline
) -> _FixedPipeline | None:
    """The pipeline without its layers; None where it has too many stages, or on one pool several kinds or an
    unknown one."""
    if len(pipeline.stages) > space.most_stages:
        return None
    names = [space.pools[pool].name for pool in union]
    order = tuple(names.index(stage.device_class) for stage in pipeline.stages)
    kinds, stages_per_node = [0] * len(union), dict(nodes.stages_per_node_of(pipeline))
    for place, pool in enumerate(union):
        mine = {
            StageKind(one.tp, one.dp, stages_per_node[one.device_class])
            for one, at in zip(pipeline.stages, order, strict=True)
            if at == place
        }
        known = space.kinds(pool, micro_batch_size)
        if len(mine) > 1 or not mine <= set(known):
            return None
        if mine:
            kinds[place] = known.index(mine.pop())
    return _FixedPipeline(tuple(kinds), order)


def _with_own_layers(options: StageOptions, chains: Sequence[_FixedPipeline], total: int) -> _Relayout | None:
    """Each pipeline with its own layers and its own share."""
    entries = StageTable(options)
    layouts: dict[tuple[_FixedPipeline, int], tuple[tuple[StagePlacement, ...], float]] = {}

    def best_layout(chain: _FixedPipeline, microbatches: int) -> tuple[tuple[StagePlacement, ...], float]:
        key = chain, microbatches
        if key not in layouts:
            found = best_pipeline_in_order(
                options, entries, chain.kinds, chain.order, microbatches, MAX_EXPANSIONS
            )
            layouts[key] = ((), float("inf")) if found is None else (found.stages, found.time_s)
        return layouts[key]

    if any(not best_layout(chain, 1)[0] for chain in set(chains)):
        return None
    shares = _shares(chains, total, lambda chain, microbatches: best_layout(chain, microbatches)[1])
    every = [best_layout(chain, share) for chain, share in zip(chains, shares, strict=True)]
    stages = tuple(one for one, _ in every)
    return _Relayout(options, stages, tuple(shares), max(time_s for _, time_s in every), False)


def _with_equal_layers(
    options: StageOptions, chains: Sequence[_FixedPipeline], total: int
) -> _Relayout | None:
    """Pipelines with the same layers, whose shares differ by at most one."""
    base, more = divmod(total, len(chains))
    most, chain = base + (more > 0), chains[0]
    found = best_pipeline_in_order(
        options, StageTable(options), chain.kinds, chain.order, most, MAX_EXPANSIONS
    )
    if found is None:
        return None
    shares = tuple(base + (place < more) for place in range(len(chains)))
    return _Relayout(options, (found.stages,) * len(chains), shares, found.time_s, True)


def _shares(
    chains: Sequence[_FixedPipeline], total: int, time_s: Callable[[_FixedPipeline, int], float]
) -> list[int]:
    """The shares with which the slowest pipeline is fastest: initial shares as if every micro-batch took
    equally long, then moved one micro-batch at a time."""
    near = max(total // len(chains), 1)
    each_s = [(time_s(chain, 2 * near) - time_s(chain, near)) / near for chain in chains]
    before_s = [time_s(chain, near) - near * more_s for chain, more_s in zip(chains, each_s, strict=True)]
    shares = _initial_shares(before_s, each_s, total)
    places = range(len(chains))

    def fastest_next() -> int:
        return int(first_least([time_s(chains[place], shares[place] + 1) for place in places]))

    def slowest() -> int:
        can = [place for place in places if shares[place] > 1] or list(places)
        return can[int(first_largest([time_s(chains[place], shares[place]) for place in can]))]

    while sum(shares) < total:
        shares[fastest_next()] += 1
    while sum(shares) > total:
        shares[slowest()] -= 1
    while True:
        last = int(first_largest([time_s(chains[place], shares[place]) for place in places]))
        other = fastest_next()
        with_more_s = time_s(chains[other], shares[other] + 1)
        if shares[last] == 1 or not is_less(with_more_s, time_s(chains[last], shares[last])):
            return shares
        shares[last] -= 1
        shares[other] += 1


def _initial_shares(before_s: Sequence[float], each_s: Sequence[float], total: int) -> list[int]:
    """Shares with which all pipelines end at about the same time, if they take `before_s` plus `each_s` per
    micro-batch; one for pipelines that would not have done one by then."""
    places = list(range(len(each_s)))
    while True:
        left = total - (len(each_s) - len(places))
        ready = sum(before_s[place] / each_s[place] for place in places)
        ends_s = (left + ready) / sum(1.0 / each_s[place] for place in places)
        in_time = [place for place in places if before_s[place] + each_s[place] <= ends_s]
        if not in_time or len(in_time) == len(places):
            break
        places = in_time
    shares = [1] * len(each_s)
    for place in places:
        shares[place] = max(int((ends_s - before_s[place]) / each_s[place]), 1)
    return shares


def _prefer_current_layers(
    best: _Relayout, chains: Sequence[_FixedPipeline], pipelines: Sequence[Pipeline]
) -> _Relayout:
    """Keeps the current layers of each pipeline that is not slower with them than the slowest pipeline."""
    stages = list(best.stages)
    for place, (chain, pipeline) in enumerate(zip(chains, pipelines, strict=True)):
        had = tuple(
            (pool, sum(stage.layers)) for pool, stage in zip(chain.order, pipeline.stages, strict=True)
        )
        if sum(layers for _, layers in had) < best.options.layers:
            continue  # a stage of it is gone
        if not is_less(best.time_s, pipeline_s(best.options, chain.kinds, had, best.shares[place])):
            stages[place] = had
    if best.is_alike and len(set(stages)) > 1:
        return best
    return replace(best, stages=tuple(stages))


def _result(result: Result, chains: Sequence[_FixedPipeline], best: _Relayout) -> Result:
    total = sum(best.shares)
    pipelines = []
    for pipeline, chain, stages, share in zip(
        result.layout.pipelines, chains, best.stages, best.shares, strict=True
    ):
        own = []
        for index, (stage, (pool, layers)) in enumerate(zip(pipeline.stages, stages, strict=True)):
            at = chain.kinds[pool], len(stages) - index, int(index == 0), layers
            recompute = RECOMPUTES[int(best.options.stages[pool].recompute[at])]
            own.append(replace(stage, layers=(layers,), share=share / total, recompute=recompute))
        rows = share * pipeline.micro_batch_size
        pipelines.append(replace(pipeline, stages=tuple(own), microbatches=share, rows=rows))
    return replace(result, layout=Layout(pipelines=tuple(pipelines)), is_alike=best.is_alike)
