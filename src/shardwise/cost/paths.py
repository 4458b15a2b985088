"""Paths through the schedules of a block: what everything in it takes at least.

Every term is the length of a path through the schedule's graph of actions, or a mean of such lengths, so it
can never exceed the evaluated time. (docs/bounds.md)
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from shardwise.cost.block_time import added_s, end_s, pass_s
from shardwise.cost.blocks import Block, Lie
from shardwise.cost.keeping import ACTIVATIONS, FULL, SELECTIVE
from shardwise.cost.nodes import Sums
from shardwise.cost.problem import Problem
from shardwise.cost.totals import Totals, Traffic
from shardwise.equations import compute
from shardwise.schedule import in_flight
from shardwise.strategy import SCHEDULES

ONE_F_ONE_B = SCHEDULES.index("1f1b")
GPIPE = SCHEDULES.index("gpipe")
INTERLEAVED = SCHEDULES.index("interleaved_1f1b")


def least_s(problem: Problem, block: Block, lie: Lie, totals: Totals, traffic: Traffic) -> Any:
    """Seconds that everything in a block takes at least; `totals` and `traffic` are of its grid."""
    paths = Paths(problem, block, lie, totals, traffic)
    return np.maximum(paths.whole_s, paths.ranks_s) + end_s(problem, block, totals)


class Paths:
    """Paths through the actions of a block's schedules, drained: without what comes before the first forward
    and after the last backward."""

    def __init__(self, problem: Problem, block: Block, lie: Lie, totals: Totals, traffic: Traffic) -> None:
        self._problem, self._block, self._lie = problem, block, lie
        self._totals, self._traffic = totals, traffic
        whole, stages = totals.whole, block.stages
        self._is_full, self._is_selective = block.recompute == FULL, block.recompute == SELECTIVE
        self._moves = block.offload >= ACTIVATIONS
        self._recomputes, self._offloads = bool(np.any(self._is_full)), bool(np.any(self._moves))
        self._host_s = problem.profile.host_action_s
        self._is_loop, self._is_turning = block.schedule == ONE_F_ONE_B, block.schedule == INTERLEAVED
        added = added_s(problem, block, totals, *self._recomputed())
        way_s = whole.forward_s + whole.input_s + added + traffic.ways_s + 2.0 * stages * self._host_s
        self._work_s = way_s + whole.weight_s + traffic.scatters_s
        # Along the ranks once for every chunk; from the last of them on to the first between two, but in a V.
        along_s = block.vpp * (block.pp - 1) * totals.mean_hop_s
        hops_s = along_s + np.where(lie.is_v, 0, block.vpp - 1) * totals.hop_s
        self._through_s = np.where(lie.is_split, way_s, self._work_s) + 2.0 * hops_s

    def _recomputed(self) -> tuple[Any, Any]:
        """The share of the layers that is recomputed in full, at least and at most."""
        if not self._recomputes:
            return 0.0, 0.0
        least = self._recomputed_share(self._block.recompute_layers)
        return least, np.maximum(np.minimum(self._most_recomputed(), 1.0), least)

    def _recomputed_share(self, each: Any) -> Any:
        """The share of the model's forward work that recomputing so many layers of each stage repeats at
        least."""
        lie, split = self._lie, self._block.split
        count = np.maximum(self._block.stages - 2, 0) * np.minimum(each, lie.least)
        count = count + np.minimum(each, split.first)
        count = count + np.where(lie.is_single, 0, np.minimum(each, split.last))
        least = np.minimum(each / np.maximum(split.largest, 1), 1.0)
        full_s = self._totals.layer.full_s.of(count) / self._totals.whole.full_s
        return np.maximum(least, np.minimum(full_s, 1.0))

    def _most_recomputed(self) -> Any:
        """The share of layers that are recomputed at most."""
        return self._block.stages * self._block.recompute_most / self._problem.model.layers

    @property
    def whole_s(self) -> Any:
        """What the work of the whole model demands, however it is spread.

        One microbatch through all stages and back (1F1B: once for every pp of them). All work over all ranks:
        m W / p on average; where a rank's last action is followed by the way back (1F1B, GPipe), stages that
        shrink by (m-1)/m balance waiting and working, and W / (1 - (1 - 1/m)^p) is the least of max_s
        (sum_{k<s} w_k + m w_s). Interleaved: the mean over the ranks of `_turning_s`.
        """
        block, work_s, m, pp = self._block, self._work_s, self._block.microbatches, self._block.pp
        loops_s = np.where(self._is_loop, -(-m // pp), 1) * self._through_s
        tapered_s = work_s / (1.0 - (1.0 - 1.0 / m) ** pp)
        spread_s = np.where(self._is_loop | (block.schedule == GPIPE), tapered_s, m * work_s / pp)
        longest_s = np.maximum(spread_s, loops_s)
        if not np.any(self._is_turning):
            return longest_s
        return np.maximum(longest_s, np.where(self._is_turning & (m > pp), self._mean_turn_s(), 0.0))

    def _mean_turn_s(self) -> Any:
        """A mean of `_turning_s` over all ranks, where only the whole of their work is known.

        The first chunk of rank r < (p-1)/2 counts p-2r-1 times less, at most; the last one of rank r >
        (p-1)/2 counts 2r+1-p times more, and r times more what lies behind lower ranks' last chunks, at
        least.
        """
        block, totals, lie, split = self._block, self._totals, self._lie, self._block.split
        pp, m, layers = block.pp, block.microbatches, self._problem.model.layers
        head_s = pass_s(totals.head) + self._traffic.head_s + 2.0 * self._host_s
        if np.all(pp == 2) and totals.layer.are_alike:
            return self._mean_turn_of_two_s(head_s)
        turns = pp * pp // 4
        first_s = self._most_s(np.minimum(layers // block.stages, split.largest))
        less_s = (pp - 1) * first_s + (turns - (pp - 1)) * self._most_s(split.largest)
        least_s = self._stage_s(lie.least, None, 0.0)
        more_s = (turns - (pp - 1) + (pp - 1) * (pp - 2) / 2.0) * least_s + 2 * (pp - 1) * head_s
        mean_s = (more_s - less_s) / pp + (pp - 1) * totals.hop_s
        return self._through_s + (m - pp) * self._work_s / pp + mean_s

    def _mean_turn_of_two_s(self, head_s: Any) -> Any:
        """The same of two ranks, weighted so that the first stage's work x does not count.

        With W of the whole, S the way through, y the last stage's work and c a hop, the ranks' own w_0 + w_1
        = W and w_0 - w_1 >= x - y (stages between share evenly, the later ones more): T_0 = S + 2 c + y +
        (m-2) w_0 - x and T_1 = S + (m-2) w_1 + y; so with the weight a of T_0 a T_0 + (1-a) T_1 >= S + (m-2)
        W/2 + (a - 1/2)(m-2)(x-y) + y + 2 a c - a x. At a = (m-2) / (2m-6) x drops out: S + (m-2) W/2 + (1-a)
        y + 2 a c.
        """
        m = self._block.microbatches
        weight = (m - 2) / np.maximum(2 * m - 6, 1)
        mean_s = (m - 2) * self._work_s / 2.0 + (1.0 - weight) * head_s + 2.0 * weight * self._totals.hop_s
        return np.where(m > 3, self._through_s + mean_s, 0.0)

    def _most_s(self, layers: Any) -> Any:
        """A stage of so many layers with the embedding takes at most what is left of the whole where all
        other layers and the head take their least."""
        head_s = pass_s(self._totals.head) + self._traffic.head_s
        others = self._problem.model.layers - layers
        return self._work_s - self._layers_s(others, None, self._block.stages) - head_s

    def _layers_s(self, layers: Any, end: Sums | None, stages: Any = 1) -> Any:
        """One microbatch forth and back through so many layers on so many stages, and an end, at least,
        without full recomputation and the end's own work."""
        costs = self._totals.layer
        work_s = costs.work_s.of(layers) + layers * self._traffic.layer_s
        if np.any(self._is_selective):
            work_s = work_s + np.where(self._is_selective, costs.selective_s.of(layers), 0.0)
        if self._offloads:
            work_s = work_s + np.where(self._moves, self._moved_s(layers, end, stages), 0.0)
        return work_s

    def _moved_s(self, layers: Any, end: Sums | None, stages: Any) -> Any:
        """What moving activations exposes at least: the fewest bytes beside the most computation."""
        costs, most, block = self._totals.layer, self._totals.most, self._block
        again = np.where(self._is_full, np.minimum(stages * block.recompute_most, layers), 0)
        nbytes = costs.kept_bytes.of(layers - again) + costs.input_bytes.of(again)
        nbytes = np.where(self._is_selective, costs.selective_bytes.of(layers), nbytes)
        forward_s, input_s = layers * most.forward_compute_s, layers * most.input_compute_s
        if end is not None:
            nbytes = nbytes + end.kept_bytes
            forward_s, input_s = forward_s + end.forward_compute_s, input_s + end.input_compute_s
        moved_s, slowdown = (
            nbytes / self._problem.host_link_bytes_per_s,
            self._problem.efficiency.overlap_slowdown,
        )
        there_s = compute.exposed_s(moved_s, forward_s, 1.0, slowdown)
        return there_s + compute.exposed_s(moved_s, input_s, 1.0, slowdown)

    def _stage_s(self, layers: Any, end: Sums | None, end_s: Any) -> Any:
        """One microbatch forth and back through a stage of so many layers, at least; `end_s` is the work of
        its end."""
        stage_s = self._layers_s(layers, end) + 2.0 * self._host_s + end_s
        return stage_s + self._again_s(layers) if self._recomputes else stage_s

    def _again_s(self, layers: Any) -> Any:
        """Recomputing a stage's layers in full, as many as are recomputed at least."""
        again = np.minimum(self._block.recompute_layers, layers)
        return np.where(self._is_full, self._totals.layer.full_s.of(again), 0.0)

    def _stages_s(self, stages: Any, layers: Any) -> Any:
        """So many stages between the ends with so many layers together, `least` on each."""
        stages_s = self._layers_s(layers, None, stages) + stages * 2.0 * self._host_s
        return stages_s + stages * self._again_s(self._lie.least) if self._recomputes else stages_s

    @property
    def ranks_s(self) -> Any:
        """What the work of single ranks demands: of the first, the second, the last but one and the last;
        after the way there, and before the way back where that ends every path."""
        block, lie, split, totals = self._block, self._lie, self._block.split, self._totals
        pp, vpp, m = block.pp, block.vpp, block.microbatches
        embedding_s = pass_s(totals.embedding) + self._traffic.embedding_s
        head_s = pass_s(totals.head) + self._traffic.head_s
        single = lie.is_single
        first_s = self._stage_s(split.first, totals.embedding, embedding_s)
        if np.any(single):
            first_s = np.where(single, first_s + head_s - self._single_slack_s(), first_s)
        if np.all(single):
            return m * first_s
        last_s = self._stage_s(split.last, totals.head, head_s)
        inner_s = self._stage_s(lie.least, None, 0.0)
        if np.any(lie.is_v):
            more_first_s = np.where(lie.is_v, last_s, self._stages_s(vpp - 1, lie.on_first - split.first))
        else:
            more_first_s = self._stages_s(vpp - 1, lie.on_first - split.first)
        more_first_s = np.where(single, 0.0, more_first_s)
        between = lie.on_last - np.where(lie.is_v, 0, split.last)
        on_last_s = self._stages_s(np.where(lie.is_v, 2, vpp - 1), between) + np.where(lie.is_v, 0.0, last_s)
        way_s, step_s = self._ways_s(first_s, inner_s)
        last_way_s = np.where(pp > 2, way_s + np.maximum(pp - 2, 0) * step_s, way_s)
        longest_s = np.maximum(
            m * (first_s + more_first_s), np.where(single, 0.0, last_way_s + m * on_last_s)
        )
        ends = (first_s, more_first_s, on_last_s, last_s)
        has_middle = bool(np.any(pp > 2))
        middle_s = (
            (self._stages_s(vpp, lie.on_second), self._stages_s(vpp, lie.on_third)) if has_middle else None
        )
        if middle_s is not None:
            third_way_s = way_s + np.maximum(pp - 3, 0) * step_s
            between_s = np.maximum(way_s + m * middle_s[0], third_way_s + m * middle_s[1])
            longest_s = np.maximum(longest_s, np.where(pp > 2, between_s, 0.0))
        is_resuming = lie.is_split & ~lie.is_v
        if np.any(is_resuming):
            resumed_s = self._resumed_s(0 * pp, split.first, totals.embedding, first_s)
            if has_middle:
                inner = self._resumed_s(np.minimum(1, pp - 2), lie.least, None, inner_s)
                resumed_s = np.maximum(resumed_s, np.where(pp > 2, inner, 0.0))
            longest_s = np.maximum(longest_s, np.where(is_resuming & ~single, resumed_s, 0.0))
        is_turning = self._is_loop | self._is_turning
        if np.any(is_turning):
            turned_s = self._turned_s(ends, inner_s, middle_s)
            longest_s = np.maximum(longest_s, np.where(is_turning & ~single, turned_s, 0.0))
        return longest_s

    def _turned_s(
        self, ends: tuple[Any, Any, Any, Any], inner_s: Any, middle_s: tuple[Any, Any] | None
    ) -> Any:
        """The longest of `_turning_s` over the first, the second, the last but one and the last rank."""
        lie, pp = self._lie, self._block.pp
        first_s, more_first_s, on_last_s, last_s = ends
        behind = (last_s, inner_s + 2.0 * self._totals.hop_s)
        chunked = self._block.vpp > 1
        full_s = np.where(chunked, self._stage_s(lie.full_first, None, 0.0), first_s)
        turned_s = self._turning_s(0 * pp, first_s, more_first_s, full_s, behind)
        own_s = np.where(chunked, inner_s, last_s)
        others_s = np.where(chunked, on_last_s - inner_s, 0.0)
        ended_s = np.where(chunked, np.maximum(last_s, self._longest_back_s()), last_s)
        turned_s = np.maximum(turned_s, self._turning_s(pp - 1, own_s, others_s, ended_s, behind))
        if middle_s is None:
            return turned_s
        fullest = (lie.full_second, lie.full_third)
        for rank, rank_s, layers in zip((np.minimum(1, pp - 2), pp - 2), middle_s, fullest, strict=True):
            full_s = self._stage_s(layers, None, 0.0)
            between_s = self._turning_s(rank, inner_s, rank_s - inner_s, full_s, behind)
            turned_s = np.maximum(turned_s, np.where(pp > 2, between_s, 0.0))
        return turned_s

    def _single_slack_s(self) -> Any:
        """On a single stage, activations may hide beside the head too."""
        if not self._offloads:
            return 0.0
        head = self._totals.head
        return np.where(self._moves, head.forward_compute_s + head.input_compute_s, 0.0)

    def _ways_s(self, first_s: Any, inner_s: Any) -> tuple[Any, Any]:
        """What lies before and behind a rank's work: past the first stage, and past one between."""
        lie, totals, host_s = self._lie, self._totals, self._host_s
        forward_s = totals.layer.forward_s
        there_s = totals.embedding.forward_s + forward_s.of(self._block.split.first) + host_s
        hops_s = np.where(lie.is_split, 1.0, 2.0) * totals.hop_s
        way_s = np.where(lie.is_split, there_s, first_s) + hops_s
        return way_s, np.where(lie.is_split, forward_s.of(lie.least) + host_s, inner_s) + hops_s

    def _longest_back_s(self) -> Any:
        """The backward of the fullest stage between the ends, at least."""
        middle = np.maximum(self._block.stages - 2, 1)
        layers = -(-self._block.split.between // middle)
        return self._input_s(layers, None) + self._totals.layer.weight_s.of(layers)

    def _resumed_s(self, rank: Any, layers: Any, end: Sums | None, stage_s: Any) -> Any:
        """Where backwards are split: the first microbatch's way to the rank's first backward, and all the
        work that is left then. No more forwards can have been done before than the rank holds in flight."""
        block, lie, totals, host_s = self._block, self._lie, self._totals, self._host_s
        pp, m = block.pp, block.microbatches
        there_s = totals.whole.forward_s + pp * host_s + (pp - 1) * totals.mean_hop_s
        inner_s = self._input_s(lie.least, None)
        back_s = np.maximum(pp - 2 - rank, 0) * inner_s + self._input_s(block.split.last, totals.head)
        back_s = back_s + (pp - 1 - rank) * totals.hop_s
        held = np.minimum(in_flight(block.schedule, pp, m, block.vpp, rank), m)
        left_s = self._input_s(layers, end) + totals.layer.weight_s.of(layers)
        left_s = left_s + (end.weight_s if end is not None else 0.0)
        return there_s + back_s + (m - held) * stage_s + held * left_s

    def _input_s(self, layers: Any, end: Sums | None) -> Any:
        """The input's gradient of one microbatch on a stage, at least, with what is recomputed for it."""
        costs = self._totals.layer
        input_s = costs.input_s.of(layers) + self._host_s + (end.input_s if end is not None else 0.0)
        if np.any(self._is_selective):
            input_s = input_s + np.where(self._is_selective, costs.selective_s.of(layers), 0.0)
        return input_s + self._again_s(layers) if self._recomputes else input_s

    @property
    def is_v(self) -> Any:
        """Whether the last stage lies on the first rank."""
        return self._lie.is_v

    @cached_property
    def _first_ways_s(self) -> tuple[Any, Any]:
        embedding_s = pass_s(self._totals.embedding) + self._traffic.embedding_s
        first_s = self._stage_s(self._block.split.first, self._totals.embedding, embedding_s)
        return self._ways_s(first_s, self._stages_of_turns[2])

    def way_s(self, rank: Any) -> Any:
        """What lies before the work of ranks, and behind it where their last action is their first stage's
        backward; nothing for the first rank."""
        way_s, step_s = self._first_ways_s
        return np.where(rank > 0, way_s + (rank - 1) * step_s, 0.0)

    @property
    def turns(self) -> bool:
        """Whether any of the schedules turns: `turn_budget_s` is finite."""
        return bool(np.any(self._is_loop | self._is_turning))

    @cached_property
    def _stages_of_turns(self) -> tuple[Any, Any, Any]:
        """What the last stage, the last of a turn and a stage between take at least."""
        block, head_s = self._block, pass_s(self._totals.head) + self._traffic.head_s
        last_s = self._stage_s(block.split.last, self._totals.head, head_s)
        ended_s = np.maximum(last_s, np.where(block.vpp > 1, self._longest_back_s(), 0.0))
        return last_s, ended_s, self._stage_s(self._lie.least, None, 0.0)

    def turn_budget_s(self, rank: Any, limit_s: Any) -> Any:
        """How long a microbatch's work on all stages of ranks may take for `_turning_s` to stay within a
        limit; infinite where the schedule does not turn."""
        block, hop_s, layers = self._block, self._totals.hop_s, self._problem.model.layers
        pp, m = block.pp, block.microbatches
        last_s, ended_s, inner_s = self._stages_of_turns
        count = pp - 1 - rank
        ways_s = np.maximum(count - 1, 0) * (inner_s + 2.0 * hop_s) + last_s + 2.0 * hop_s
        left_s = limit_s - self._through_s - np.where(count > 0, ways_s, 0.0)
        less, more = np.maximum(pp - 2 * rank - 1, 0), np.maximum(2 * rank + 1 - pp, 0)
        turned_s = left_s - more * np.where(count == 0, ended_s, inner_s)
        most = block.split.largest
        fullest = np.where(rank == 0, np.minimum(layers // block.stages, most), most)
        turned_s = turned_s + less * self._most_s(fullest)
        turned_s = np.where(self._is_turning & (m > pp), turned_s / np.maximum(m - pp, 1), np.inf)
        if not np.any(self._is_loop):
            return turned_s
        rounds = m - pp + rank
        looped_s = np.where(rounds > 0, left_s / np.maximum(rounds, 1), np.inf)
        return np.where(self._is_loop & (pp > 1), looped_s, turned_s)

    def _turning_s(self, rank: Any, first_s: Any, others_s: Any, last_s: Any, behind: tuple[Any, Any]) -> Any:
        """A rank's own order between its first backward and its last forward, which the first microbatch's
        way to the one and the last microbatch's way from the other enclose.

        Until its first backward a rank has done as many forwards as it holds in flight, and as many backwards
        remain after its last forward; the rest of its work lies between. With p ranks, m microbatches, s_c
        the time of its chunk c, W of the whole model: W + 2 (n-1) hops + the ways behind its last chunk +
        1F1B: (m - p + r) s; interleaved: (m - p) sum(s) - (p-2r-1)+ s_first + (2r+1-p)+ s_last. On the last
        rank, s_last may be any stage's backward instead: the path leaves the rank's order with the last group
        of p microbatches, whose first one leads to that stage, where the others' backwards follow.
        """
        m, pp = self._block.microbatches, self._block.pp
        count = pp - 1 - rank
        end_s, inner_s = behind
        ways_s = np.maximum(count - 1, 0) * inner_s + end_s + 2.0 * self._totals.hop_s
        less, more = np.maximum(pp - 2 * rank - 1, 0), np.maximum(2 * rank + 1 - pp, 0)
        own_s = (m - pp - less) * first_s + (m - pp) * others_s + more * last_s
        own_s = np.where(self._is_loop, (m - pp + rank) * first_s, own_s)
        is_turned = np.where(self._is_loop, m > pp - rank, (m - pp >= less) & ((m > pp) | (more > 0)))
        return np.where(is_turned, self._through_s + np.where(count > 0, ways_s, 0.0) + own_s, 0.0)
