"""Computation, communication, overlap and idle time of a step on its critical rank: `StepParts`.

Communication inside of an action is hidden as the cost model hides it. Gathers, reductions and messages have
intervals in the step's timeline, and are hidden while other work of the rank covers them.
docs/concepts/cost-model.md, section 15.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shardwise.cost import (
    EndParts,
    Problem,
    TableCosts,
    costs_of_all_stages,
    end_parts,
    host_waits_s,
    offload_traffic_s,
    offloaded_optimizer_s,
    stage_times,
    step_end,
    traffic_of,
    without_overlap,
    without_slowdown,
)
from shardwise.plans import MECHANISMS, CommunicationTime, StepParts
from shardwise.schedule import Schedule, generate
from shardwise.search.result import ranks_of_stage
from shardwise.search.step_times import durations_of, microbatches_of, step_times_s
from shardwise.sim import Durations, RankTimes, rank_times, union_s
from shardwise.strategy import Strategy, StrategyTable
from shardwise.ties import PROVEN_TIE, first_largest, is_less

Seconds = dict[str, float]

MOST_ACTIONS = 1 << 18
"""Actions of a step up to which its timeline is simulated whole. Of a longer one, two shorter timelines are
continued: every further micro-batch adds the same work to a rank."""


@dataclass(frozen=True, slots=True)
class RankWork:
    """A rank over the pipeline's part of a step: seconds in its actions without sends, and in gathers,
    reductions and messages as far as none of those before covers them; all seconds of its messages; and the
    number of its actions."""

    actions_s: float
    gathers_s: float
    reductions_s: float
    messages_s: float
    sent_s: float
    actions: float

    @staticmethod
    def of(times: RankTimes) -> RankWork:
        """The work in these intervals."""
        covered = (times.actions, times.gathers, times.reductions, times.messages)
        lengths_s = [float((one[:, 1] - one[:, 0]).sum()) for one in covered]
        unions_s = [0.0, *(union_s(covered[: number + 1]) for number in range(len(covered)))]
        actions_s, gathers_s, reductions_s, messages_s = np.clip(np.diff(unions_s), 0.0, lengths_s).tolist()
        return RankWork(
            actions_s=actions_s,
            gathers_s=gathers_s,
            reductions_s=reductions_s,
            messages_s=messages_s,
            sent_s=lengths_s[-1],
            actions=float(len(times.actions)),
        )

    def continued(self, longer: RankWork, factor: float) -> RankWork:
        """This work plus `factor` times what `longer` has more."""
        pairs = {f.name: (getattr(self, f.name), getattr(longer, f.name)) for f in fields(RankWork)}
        return RankWork(
            **{name: max(own + factor * (more - own), 0.0) for name, (own, more) in pairs.items()}
        )

    @property
    def busy_s(self) -> float:
        """Seconds in which the rank works or communicates."""
        return self.actions_s + self.gathers_s + self.reductions_s + self.messages_s


@dataclass(frozen=True, slots=True)
class TimedPipeline:
    """A pipeline with its schedule; `durations` are those of its actions (batch of one), of which sends block
    `blocked_s` seconds at the end of the (forward, backward) of each stage."""

    schedule: str
    pp: int
    vpp: int
    durations: Durations
    blocked_s: tuple[Any, Any]

    def work(self, rank: int, microbatches: int) -> RankWork:
        """The work of pipeline rank `rank` in a step of `microbatches`."""
        most = max(MOST_ACTIONS // (3 * self.pp * self.vpp), 8 * self.pp)
        if microbatches <= most:
            return self._simulated(rank, microbatches)
        # Interleaved schedules take micro-batches in groups of pp.
        few = most - self.pp
        few -= (few - microbatches) % self.pp
        work, longer = (self._simulated(rank, number) for number in (few, few + self.pp))
        return work.continued(longer, (microbatches - few) / self.pp)

    def _simulated(self, rank: int, microbatches: int) -> RankWork:
        schedule: Schedule = generate(self.schedule, pp=self.pp, microbatches=microbatches, vpp=self.vpp)
        return RankWork.of(rank_times(schedule, self.durations, rank, self.blocked_s))


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Communication of one rank in the actions of a micro-batch, by mechanism: all seconds, the exposed ones,
    and the seconds by which it slows computation down; and all seconds of its gathers and reductions once per
    step."""

    total_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    slowdown_s: float
    gathering_s: float
    reduction_s: float


@dataclass(frozen=True, slots=True)
class EndSeconds:
    """The end of the step: communication by mechanism, none of it hidden; computation; and the host."""

    communication: Mapping[str, float]
    computation_s: float
    host_s: float

    @staticmethod
    def of(end: EndParts) -> EndSeconds:
        """The end of the step of one row."""
        communication = {name: number(seconds) for name, seconds in end.communication.items()}
        return EndSeconds(communication, number(end.computation_s), number(end.host_s))


def joined(
    place: tuple[int, int, int],
    work: RankWork,
    traffic: RankTraffic,
    microbatches: int,
    *,
    host_s: float,
    end: EndSeconds,
    step_time_s: float,
) -> StepParts:
    """The parts of a step on the rank at `place` (pipeline, stage, first global rank); `host_s` are its waits
    for the host in all actions."""
    total = dict.fromkeys(MECHANISMS, 0.0)
    exposed = dict.fromkeys(MECHANISMS, 0.0)
    for name, seconds in traffic.total_s.items():
        total[name] += microbatches * seconds
        exposed[name] += microbatches * traffic.exposed_s[name]
    in_actions_s = sum(exposed.values())
    for name, all_s, alone_s in (
        ("parameter_gathering", traffic.gathering_s, work.gathers_s),
        ("gradient_reduction", traffic.reduction_s, work.reductions_s),
        ("pipeline", work.sent_s, work.messages_s),
        *((name, seconds, seconds) for name, seconds in end.communication.items()),
    ):
        total[name] += all_s
        exposed[name] += alone_s
    pipeline, stage, rank = place
    end_s = end.computation_s + end.host_s + sum(end.communication.values())
    return StepParts(
        pipeline=pipeline,
        stage=stage,
        rank=rank,
        computation_s=work.actions_s - in_actions_s - host_s + end.computation_s,
        slowdown_s=max(microbatches * traffic.slowdown_s, 0.0),
        bubble_s=_remaining_s(step_time_s, end_s + work.busy_s),
        host_s=host_s + end.host_s,
        communication={
            name: CommunicationTime(
                total_s=total[name], hidden_s=_remaining_s(total[name], max(exposed[name], 0.0))
            )
            for name in MECHANISMS
        },
    )


def _remaining_s(whole_s: float, used_s: float) -> float:
    """`whole_s` without `used_s`; 0 where they differ by rounding only."""
    return whole_s - used_s if is_less(used_s, whole_s, PROVEN_TIE) else 0.0


# Uniform strategies


def uniform_parts(problem: Problem, strategy: Strategy) -> StepParts:
    """The parts of a step of one legal strategy."""
    table = StrategyTable.of([strategy])
    costs = costs_of_all_stages(problem, table)
    times, places = stage_times(problem, table, costs), costs.partition.places
    backward_s = times.backward_s
    if costs.partition.is_split[0]:
        backward_s = times.backward_input_s + times.backward_weight_s
    ranks = places.rank[:, 0]
    rank = int(first_largest(np.bincount(ranks, weights=(times.forward_s + backward_s)[:, 0])))
    mine = np.flatnonzero(ranks == rank)
    pipeline = TimedPipeline(
        strategy.schedule,
        strategy.pp,
        strategy.vpp,
        durations_of(times, strategy.pp, strategy.vpp, np.arange(1)),
        (costs.partition.blocked_on_s[:, 0], costs.partition.blocked_back_s[:, 0]),
    )
    microbatches = int(microbatches_of(problem, table)[0])
    work = pipeline.work(rank, microbatches)
    end = end_parts(
        problem,
        step_end(problem, table, costs),
        problem.cluster.devices,
        offloaded_optimizer_s(problem, table, costs),
    )
    waits_s = microbatches * _host_waits_s(costs, mine)
    return joined(
        (0, rank, ranks_of_stage(table, rank)[0]),
        work,
        _uniform_traffic(problem, table, costs, mine),
        microbatches,
        host_s=waits_s + work.actions * problem.profile.host_action_s,
        end=EndSeconds.of(end),
        step_time_s=float(step_times_s(problem, table)[0]),
    )


def _uniform_traffic(problem: Problem, table: StrategyTable, costs: TableCosts, mine: Any) -> RankTraffic:
    """The communication of the stages `mine`."""

    def summed(columns: Mapping[str, Any]) -> Seconds:
        return {name: float(np.sum(np.asarray(column)[mine, 0])) for name, column in columns.items()}

    alone, undisturbed = without_overlap(problem), without_slowdown(problem)
    alone_costs, undisturbed_costs = (costs_of_all_stages(each, table) for each in (alone, undisturbed))
    total = summed(
        {
            **traffic_of(alone, table, alone_costs),
            "offload": offload_traffic_s(problem, table, costs),
        }
    )
    exposed = summed(traffic_of(undisturbed, table, undisturbed_costs))
    slowed = summed(traffic_of(problem, table, costs))
    ends = dict(
        zip(("gathers", "reductions"), stage_times(alone, table, alone_costs).ends.exposed_s, strict=True)
    )
    once = summed(ends)
    return RankTraffic(
        total_s=total,
        exposed_s=exposed,
        slowdown_s=sum(slowed.values()) - sum(exposed.values()),
        gathering_s=once["gathers"],
        reduction_s=once["reductions"],
    )


def _host_waits_s(costs: TableCosts, mine: Any) -> float:
    """Seconds of a micro-batch in which the stages `mine` wait for the host to launch kernels."""
    places, grid = costs.partition.places, costs.partitions.grid
    layers, ends = places.layers[..., 0], (places.has_embedding[:, 0], places.has_head[:, 0])
    return sum(
        number(host_waits_s(grid, (*layers[:, place], *(end[place] for end in ends)))) for place in mine
    )


def number(value: Any) -> float:
    """The number in columns of one row."""
    return float(np.asarray(value).ravel()[0])
