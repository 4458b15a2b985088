"""From a question about a mixed cluster to the best uneven plan with its price, layout and certificate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from shardwise.cluster import pools_of
from shardwise.cost import Problem
from shardwise.errors import Infeasible, InternalError
from shardwise.model import model_flop_per_token
from shardwise.plan import (
    PROVEN_GAP,
    Answer,
    Certificate,
    Layout,
    MixedFigures,
    PeakMemory,
    Pipeline,
    Stage,
    UnevenAnswer,
    UnevenResult,
)
from shardwise.search.baselines import (
    MOST_POOLS,
    Baselines,
    answer_of,
    baselines_of,
    figures_of,
    plan_mixed,
)
from shardwise.search.clock import Clock
from shardwise.search.drive import Progress
from shardwise.search.explain import band_of
from shardwise.search.question import Question
from shardwise.search.targets import plan_for
from shardwise.search.uneven.drive import UnevenOutcome, UnevenPipeline, UnevenPlan, search_uneven
from shardwise.search.uneven.hops import groups, most_together
from shardwise.search.uneven.options import Options, Pricing
from shardwise.search.uneven.space import Limits, UnevenSpace
from shardwise.strategy import RECOMPUTES, Target

EVALUATOR = "max-plus, pipeline by pipeline"

EXACT_DEVICES = 16
"""Clusters of up to so many devices are searched until nothing can be better; larger ones until nothing can
be better by more than `GAP`."""

GAP = 0.02


def refusal(question: Question) -> str | None:
    """Why no uneven plan is looked for; None where one is."""
    if question.space != "default" or question.fixed or question.axes:
        return "a space or fields were chosen: only uniform strategies have them"
    if question.frontier or question.exhaustive:
        return "a frontier or every candidate was asked for: only uniform strategies have them"
    if question.model.experts is not None:
        return "uneven plans of mixtures of experts are not searched"
    if len(question.model.kinds) > 1:
        return "uneven plans of models whose layers differ are not searched"
    return None


def plan_pools(
    question: Question, *, target: Target | None = None, progress: Progress | None = None
) -> Answer | UnevenAnswer:
    """The best plan of a mixed cluster: uneven where that is faster than every uniform strategy on a union of
    pools, else the best of these. Among what `target` carries out, where that is given.

    Half of a budget is for uniform strategies. Raises Infeasible where neither fits, and what `plan_for`
    raises.
    """
    why = refusal(question) or _refusal_by(target, question)
    if why is not None:
        return _told(_uniform(question, target, Clock(question.budget_s), progress), why)
    with Clock(question.budget_s).listening() as clock:
        return _of_pools(question, target, clock, progress)


def _refusal_by(target: Target | None, question: Question) -> str | None:
    """Why the target carries out no uneven plan of this question; None where it does."""
    if target is None or question.job.dtype in target.uneven_dtypes:
        return None
    known = f"in {', '.join(target.uneven_dtypes)} only" if target.uneven_dtypes else "not at all"
    return f"{target.command} runs uneven plans {known}: --target any looks for them"


def _uniform(question: Question, target: Target | None, clock: Clock, progress: Progress | None) -> Answer:
    """The best uniform strategy on any union of the pools."""
    if target is None:
        return plan_mixed(question, progress=progress, clock=clock)
    return plan_for(target, question, partial(plan_mixed, clock=clock), progress=progress)


def _of_pools(
    question: Question, target: Target | None, clock: Clock, progress: Progress | None
) -> Answer | UnevenAnswer:
    question.problem()
    half = clock.beside(None if question.budget_s is None else question.budget_s / 2.0)
    if target is not None:
        return _of_target(question, target, half, clock, progress)
    found = baselines_of(question, half, progress)
    if clock.is_interrupted:
        return answer_of(question, found, clock, progress)
    figures = figures_of(question, found)
    uneven, why = _faster(question, figures, clock, progress)
    return uneven or _told(answer_of(question, found, clock, progress), why)


def _of_target(
    question: Question, target: Target, half: Clock, clock: Clock, progress: Progress | None
) -> Answer | UnevenAnswer:
    """The same among what the target carries out; runners-up are found with the best."""
    try:
        answer = _uniform(question, target, half, progress)
    except Infeasible:
        none = Baselines(
            best=None,
            union=pools_of(question.cluster),
            fastest_alone_s=None,
            fastest_alone=None,
            parts=(),
        )
        uneven, _ = _faster(question, figures_of(question, none), clock, progress)
        if uneven is None:
            raise
        return uneven
    if clock.is_interrupted or answer.mixed is None:
        return answer
    uneven, why = _faster(question, answer.mixed, clock, progress)
    return uneven or _told(answer, why)


def _faster(
    question: Question, figures: MixedFigures, clock: Clock, progress: Progress | None
) -> tuple[UnevenAnswer | None, str]:
    """The best uneven plan that is faster than uniform strategies, or why there is none."""
    space = _space_of(question)
    beat_s = float("inf") if figures.uniform_step_time_s is None else figures.uniform_step_time_s
    gap = 0.0 if question.cluster.devices <= EXACT_DEVICES else GAP
    outcome = search_uneven(space, clock=clock, beat_s=beat_s, gap=gap, progress=progress)
    if outcome.plan is None:
        return None, _why_uniform(outcome, beat_s)
    return replace(_answer(space, outcome, figures), is_interrupted=clock.is_interrupted), ""


def _space_of(question: Question) -> UnevenSpace:
    return UnevenSpace(question.model, question.cluster, question.job, Limits(rows=question.stage_dp))


def best_uneven(question: Question, beat_s: float) -> UnevenResult | None:
    """The best uneven plan for the question that takes less than `beat_s`, to within the gap that its cluster
    is allowed; None where there is none, or none is looked for."""
    is_many = len(pools_of(question.cluster)) > MOST_POOLS
    if refusal(question) is not None or question.cluster.links or is_many:
        return None
    space = _space_of(question)
    gap = 0.0 if question.cluster.devices <= EXACT_DEVICES else GAP
    found = search_uneven(space, beat_s=beat_s, gap=gap).plan
    return None if found is None else result_of_uneven(space, found)


def _told(answer: Answer, why: str) -> Answer:
    return replace(answer, mixed=None if answer.mixed is None else replace(answer.mixed, why_uniform=why))


def _why_uniform(outcome: UnevenOutcome, beat_s: float) -> str:
    """What the search that found nothing faster has shown."""
    left = (beat_s - outcome.lower_bound_s) / beat_s
    if left <= PROVEN_GAP:
        return "no uneven plan is faster"
    return f"no uneven plan that is faster was found; none is by more than {left * 100:.1f} %"


def _answer(space: UnevenSpace, outcome: UnevenOutcome, mixed: MixedFigures) -> UnevenAnswer:
    if outcome.plan is None:
        raise InternalError("an answer needs a plan")
    result = result_of_uneven(space, outcome.plan)
    used = {stage.device_class for pipeline in result.layout.pipelines for stage in pipeline.stages}
    idle = tuple(pool.name for pool in space.pools if pool.name not in used)
    return UnevenAnswer(
        best=result, certificate=_certificate(outcome, result), mixed=replace(mixed, idle=idle)
    )


def _certificate(outcome: UnevenOutcome, result: UnevenResult) -> Certificate:
    best_s = result.step_time_s
    return Certificate(
        space="uneven",
        enumerated=outcome.cut + outcome.searched,
        unexplored=outcome.unexplored,
        rejected={},
        cut_by_bound=outcome.cut,
        simulated=outcome.searched,
        best_s=best_s,
        lower_bound_s=outcome.lower_bound_s,
        gap=(best_s - outcome.lower_bound_s) / best_s,
        search_s=outcome.search_s,
        search_cpu_s=outcome.search_cpu_s,
    )


def result_of_uneven(space: UnevenSpace, plan: UnevenPlan) -> UnevenResult:
    """The plan on the devices of the cluster: which ranks each stage takes, and what all of it costs."""
    pricing = Pricing(space)
    options = pricing.options(plan.block)
    job, cluster = space.job, space.cluster
    sizes = _sizes(options, plan)
    ranks = _placed(space, options, plan, sizes)
    used = sum(sizes.values())
    tokens_per_s = job.global_batch_size * job.seq_len / plan.time_s
    problems = {pool: pricing.alone(pool) for pool in plan.block.pools}
    tightest, peak = _peak(options, plan, problems)
    low, high = _band(list(problems.values()))
    return UnevenResult(
        layout=Layout(
            pipelines=tuple(
                Pipeline(
                    stages=tuple(
                        _stage(space, options, plan, place, index, ranks[place, index])
                        for index in range(len(pipeline.stages))
                    )
                )
                for place, pipeline in enumerate(plan.pipelines)
            )
        ),
        micro_batch_size=plan.block.micro_batch_size,
        microbatches=tuple(pipeline.microbatches for pipeline in plan.pipelines),
        pipeline_s=tuple(pipeline.time_s for pipeline in plan.pipelines),
        recompute=tuple(
            tuple(_recompute(options, plan, place, index) for index in range(len(pipeline.stages)))
            for place, pipeline in enumerate(plan.pipelines)
        ),
        step_time_s=plan.time_s,
        band_s=(plan.time_s * low, plan.time_s * high),
        tokens_per_s_per_device=tokens_per_s / cluster.devices,
        mfu=_utilisation(options, plan, problems, tokens_per_s, is_causal=True),
        mfu_full_attention=_utilisation(options, plan, problems, tokens_per_s, is_causal=False),
        peak_memory=peak,
        breakdown=_breakdown(options, plan),
        tightest_rank=ranks[tightest].start,
        idle_devices=cluster.devices - used,
        pools=tuple(space.pools[pool].name for pool in plan.block.pools),
        is_alike=plan.block.is_alike,
        evaluator=EVALUATOR,
    )


Place = tuple[int, int]
"""A pipeline of a plan and a stage of it."""


def _sizes(options: Options, plan: UnevenPlan) -> dict[Place, int]:
    """Devices of every stage."""
    found = {}
    for place, pipeline in enumerate(plan.pipelines):
        for index, (pool, _) in enumerate(pipeline.stages):
            tp, dp = options.stages[pool].kinds[pipeline.kinds[pool]]
            found[place, index] = tp * dp
    return found


def _placed(
    space: UnevenSpace, options: Options, plan: UnevenPlan, sizes: Mapping[Place, int]
) -> dict[Place, range]:
    """Ranks of every stage: groups of stages (see `hops`), the largest first, and those at the same place of
    their pipelines one after the other, each in the first node of its pool with room for it."""
    first, nodes = 0, defaultdict(list)
    for node in space.cluster.nodes:
        pool = next(
            i for i, one in enumerate(space.pools) if replace(node, name="") == replace(one.node, name="")
        )
        nodes[pool].append([first, first + node.devices])
        first += node.devices
    found: dict[Place, range] = {}
    together = [
        (place, group)
        for place, pipeline in enumerate(plan.pipelines)
        for group in _groups(space, options, pipeline, [sizes[place, i] for i in range(len(pipeline.stages))])
    ]
    devices = {(place, group): sum(sizes[place, i] for i in group) for place, group in together}
    for place, group in sorted(together, key=lambda one: (-devices[one], one[1], one[0])):
        pool = options.pools[plan.pipelines[place].stages[group[0]][0]]
        room = next(node for node in nodes[pool] if node[1] - node[0] >= devices[place, group])
        for index in group:
            size = sizes[place, index]
            found[place, index] = range(room[0], room[0] + size)
            room[0] += size
    return found


def _groups(
    space: UnevenSpace, options: Options, pipeline: UnevenPipeline, sizes: Sequence[int]
) -> list[tuple[int, ...]]:
    """Indices of the stages of a pipeline that lie in one node together, in order; `sizes` are theirs."""
    found = []
    for pool, of in enumerate(options.pools):
        mine = [index for index, (on, _) in enumerate(pipeline.stages) if on == pool]
        if mine:
            most = most_together(space.pools[of].node.devices, sizes[mine[0]])
            for size in groups(len(mine), most):
                found.append(tuple(mine[-size:]))
                mine = mine[:-size]
    return found


def _entry(plan: UnevenPlan, place: int, index: int) -> tuple[int, tuple[int, int, int, int]]:
    """The pool of a stage, and where its figures lie in the pool's arrays."""
    pipeline = plan.pipelines[place]
    pool, layers = pipeline.stages[index]
    return pool, (pipeline.kinds[pool], len(pipeline.stages) - index, int(index == 0), layers)


def _stage(
    space: UnevenSpace, options: Options, plan: UnevenPlan, place: int, index: int, ranks: range
) -> Stage:
    pool, (kind, _, _, layers) = _entry(plan, place, index)
    tp, dp = options.stages[pool].kinds[kind]
    return Stage(
        devices=len(ranks),
        ranks=f"{ranks.start}-{ranks.stop - 1}" if len(ranks) > 1 else f"{ranks.start}",
        device_class=space.pools[options.pools[pool]].name,
        tp=tp,
        dp=dp,
        layers=(layers,),
        share=plan.pipelines[place].microbatches / options.microbatches,
    )


def _recompute(options: Options, plan: UnevenPlan, place: int, index: int) -> str:
    pool, at = _entry(plan, place, index)
    return RECOMPUTES[int(options.stages[pool].recompute[at])]


def _peak(options: Options, plan: UnevenPlan, problems: Mapping[int, Problem]) -> tuple[Place, PeakMemory]:
    """The stage whose devices are fullest, and what they hold."""
    found: list[tuple[float, Place, PeakMemory]] = []
    for place, pipeline in enumerate(plan.pipelines):
        for index in range(len(pipeline.stages)):
            pool, at = _entry(plan, place, index)
            problem = problems[options.pools[pool]]
            allocated = float(options.stages[pool].allocated_bytes[at])
            peak = PeakMemory(
                allocated=allocated,
                reserved=allocated * (1.0 + problem.efficiency.fragmentation_ratio),
                device=float(options.stages[pool].device_bytes[at]),
                capacity=problem.capacity_bytes,
            )
            found.append((-peak.device / peak.capacity, (place, index), peak))
    _, tightest, peak = min(found, key=lambda one: one[:2])
    return tightest, peak


def _breakdown(options: Options, plan: UnevenPlan) -> dict[str, float]:
    """Of the slowest pipeline: its busiest stage at work, waiting, and the end of the step."""
    place = max(range(len(plan.pipelines)), key=lambda one: plan.pipelines[one].time_s)
    pipeline = plan.pipelines[place]
    entries = [_entry(plan, place, index) for index in range(len(pipeline.stages))]
    works = [float(options.stages[pool].work_s[at]) for pool, at in entries]
    end_s = max(float(options.stages[pool].end_s[at]) for pool, at in entries)
    busy_s = pipeline.microbatches * max(works)
    return {
        "busiest_stage": busy_s,
        "pipeline_and_gradients": pipeline.time_s - busy_s - end_s,
        "end_of_step": end_s,
    }


def _utilisation(
    options: Options,
    plan: UnevenPlan,
    problems: Mapping[int, Problem],
    tokens_per_s: float,
    *,
    is_causal: bool,
) -> float:
    """Model arithmetic per second over the dense peaks of all devices that are used."""
    problem = next(iter(problems.values()))
    flop = model_flop_per_token(problem.model, problem.job.seq_len, causal_half=is_causal)
    peaks = 0.0
    for (place, index), size in _sizes(options, plan).items():
        pool, _ = _entry(plan, place, index)
        device = problems[options.pools[pool]].device
        peaks += size * device.peak_flop_per_s[problem.recipe.matmul]
    return flop * tokens_per_s / peaks


def _band(problems: list[Problem]) -> tuple[float, float]:
    """The widest band of any pool that is used."""
    bands = np.array([band_of(problem) for problem in problems])
    return float(bands[:, 0].min()), float(bands[:, 1].max())
