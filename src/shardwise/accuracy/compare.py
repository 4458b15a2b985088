"""A measured step held against its plan: the order of actions, and the time of every stage, part by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

from shardwise import search
from shardwise.accuracy.stage_times import StageTimes, action_spans, stage_times
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.sim import Span, Trace, simulate, task_graph, trace_of

COLLECTIVES = ("tensor_communication", "context_communication", "expert_communication", "shard_communication",
               "parameter_gathering", "gradient_reduction")  # fmt: skip
"""Parts of a plan's breakdown in which the device waits for a collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan's step and a measured one. Of each stage: what was predicted, and the mean of its ranks.

    `disorder` says where the first rank left the order of the schedule, None where all kept it.
    `predicted_collectives_s` and `predicted_optimizer_s` are of the busiest stage.
    """

    predicted_s: float
    measured_s: float
    predicted: tuple[StageTimes, ...]
    measured: tuple[StageTimes, ...]
    predicted_collectives_s: float
    predicted_optimizer_s: float
    disorder: str | None
    both: Trace

    @property
    def error(self) -> float:
        """Predicted over measured, minus 1."""
        return self.predicted_s / self.measured_s - 1.0


def compare(plan: Plan, measured: Trace) -> Comparison:
    """`measured`, a trace of one step by `train --trace`, against what `plan` says.

    Raises ConfigError where it is a trace of another plan: other ranks, or other actions.
    """
    stage_of = _stage_of_rank(plan)
    by_rank = _spans_of_ranks(measured, stage_of)
    disorder = _disorder(plan, by_rank, stage_of)
    start_s = min(span.start_s for span in measured.spans)
    finish_s = max(span.finish_s for span in measured.spans)
    times = {rank: stage_times(spans, start_s=start_s, finish_s=finish_s) for rank, spans in by_rank.items()}
    schedule, durations = search.step_durations(plan.model, plan.cluster, plan.job, plan.best.strategy)
    if schedule != plan.schedule:
        raise ConfigError("is not the schedule of the strategy", key="schedule")
    timeline = trace_of(simulate(task_graph(schedule, durations)))
    return Comparison(
        predicted_s=plan.best.step_time_s,
        measured_s=finish_s - start_s,
        predicted=tuple(_predicted(plan, timeline, stage) for stage in range(schedule.pp)),
        measured=tuple(
            _mean([times[rank] for rank in sorted(times) if stage_of[rank] == stage])
            for stage in range(schedule.pp)
        ),
        predicted_collectives_s=sum(plan.best.breakdown[part] for part in COLLECTIVES),
        predicted_optimizer_s=plan.best.breakdown["optimizer"],
        disorder=disorder,
        both=_both(timeline, measured, stage_of, start_s),
    )


def _stage_of_rank(plan: Plan) -> dict[int, int]:
    """The pipeline rank of every rank, by the layout in the plan."""
    pipelines = plan.best.layout.pipelines
    if len(pipelines) != 1:
        raise ConfigError(
            "is not compared", key="best.layout", found=f"{len(pipelines)} pipelines", allowed="one pipeline"
        )
    stage_of: dict[int, int] = {}
    for index, stage in enumerate(pipelines[0].stages):
        stage_of |= dict.fromkeys(stage.rank_numbers, index)
    return stage_of


def _spans_of_ranks(measured: Trace, stage_of: Mapping[int, int]) -> dict[int, list[Span]]:
    by_rank: dict[int, list[Span]] = {}
    for span in measured.spans:
        by_rank.setdefault(span.rank, []).append(span)
    if set(by_rank) != set(stage_of):
        raise ConfigError(
            "is not of this plan: it has other ranks", key="traceEvents", found=f"{len(by_rank)} ranks",
            allowed=f"the plan's {len(stage_of)}",
        )  # fmt: skip
    return by_rank


def _disorder(plan: Plan, by_rank: Mapping[int, Sequence[Span]], stage_of: Mapping[int, int]) -> str | None:
    """Where a rank first left the order of its row; ConfigError where it ran other actions."""
    found = None
    for rank in sorted(by_rank):
        ran = [span.name for span in action_spans(by_rank[rank])]
        asked = [str(action) for action in plan.schedule.ranks[stage_of[rank]]]
        if sorted(ran) != sorted(asked):
            other = sorted(set(ran) ^ set(asked)) or ["an action twice"]
            raise ConfigError(
                "is not of this plan: a rank ran other actions", key="traceEvents",
                found=f"rank {rank}: {', '.join(other[:4])}", allowed="the actions of the plan's schedule",
            )  # fmt: skip
        if found is None and ran != asked:
            place = next(index for index, pair in enumerate(zip(ran, asked, strict=True)) if len({*pair}) > 1)
            found = f"rank {rank} ran {ran[place]} as action {place + 1}, where the plan has {asked[place]}"
    return found


def _predicted(plan: Plan, timeline: Trace, stage: int) -> StageTimes:
    """What the plan's timeline says of a stage, to the end of the step behind it."""
    spans = [span for span in timeline.spans if span.rank == stage]
    times = stage_times(spans, start_s=0.0, finish_s=plan.best.step_time_s)
    return replace(times, collectives_s=None, optimizer_s=None)  # inside actions, and behind the timeline


def _mean(times: Sequence[StageTimes]) -> StageTimes:
    def mean(name: str) -> float:
        return fmean(float(getattr(each, name)) for each in times)

    return StageTimes(**{field.name: mean(field.name) for field in fields(StageTimes)})


def _both(timeline: Trace, measured: Trace, stage_of: Mapping[int, int], start_s: float) -> Trace:
    """One trace: each predicted stage, and below it its measured ranks, all from instant 0."""
    place: dict[tuple[str, int], int] = {}
    names: dict[int, str] = {}
    for stage in sorted(set(stage_of.values())):
        rows = [("predicted", stage)]
        rows += [("measured", rank) for rank in sorted(stage_of) if stage_of[rank] == stage]
        for kind, number in rows:
            place[kind, number] = row = len(place)
            names[row] = f"{kind}: {'stage' if kind == 'predicted' else 'rank'} {number}"
    spans = [replace(span, rank=place["predicted", span.rank]) for span in timeline.spans]
    for span in measured.spans:
        row = place["measured", span.rank]
        shifted = replace(span, start_s=span.start_s - start_s, finish_s=span.finish_s - start_s)
        spans.append(replace(shifted, rank=row))
    return Trace(spans=tuple(spans), names=names)
