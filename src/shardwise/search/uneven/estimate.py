"""What layouts of one pipeline take at least, many at once: the longest way through 1F1B that keeps to a run
of stages.

In steady state k stages in a row do k microbatches in no less than all of their forwards and backwards and
the hops among them, there and back: the first of the run begins microbatch j + k only after one has gone to
the end of the run and come back since it began microbatch j. So with q the place from the end of the run's
first stage, W one microbatch through the whole pipeline and back, and its loop (see `bounds`), m > q
microbatches take the pipeline at least

    W + loop + floor((m - 1 - q) / k) run + ((m - 1 - q) mod k) w.

The loop is at either end: the first backward of the stage, which the first loop ends with, may be later where
a stage behind is not soon done with gathering; and behind the last one's way another stage may have more to
reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.search.uneven.bounds import BY_NODE_SLOT, stage_lower_bound_s
from shardwise.search.uneven.hops import hops_s, node_slots_of
from shardwise.search.uneven.options import StageOptions

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STAGE_FIGURES = ("forward_s", "backward_s", "gather_s", "reduce_s", "end_s")


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """Of layouts, by layout and stage: seconds of a forward, a backward, gathering, reducing and the end of
    the step; and of the hops behind all stages but the last."""

    forward_s: Floats
    backward_s: Floats
    gather_s: Floats
    reduce_s: Floats
    end_s: Floats
    hop_s: Floats


def layout_figures(options: StageOptions, kinds: tuple[int, ...], pools: Ints, layers: Ints) -> LayoutFigures:
    """The figures of layouts, `pools` and `layers` by layout and stage; infinite where a stage does not
    fit."""
    stages = pools.shape[1]
    found = {name: np.empty(pools.shape) for name in STAGE_FIGURES}
    places = np.broadcast_to(np.arange(stages, 0, -1), pools.shape)
    node_slots = node_slots_of(options.hops, kinds, pools)
    for pool, kind in enumerate(kinds):
        mine = pools == pool
        at = (places[mine], (places[mine] == stages).astype(np.int64), layers[mine])
        for name, values in found.items():
            of = getattr(options.stages[pool], name)[kind]
            values[mine] = of[node_slots[mine], *at] if name in BY_NODE_SLOT else of[at]
    return LayoutFigures(**found, hop_s=hops_s(options.hops, kinds, pools))


def lower_bound_s(figures: LayoutFigures, microbatches: int) -> Floats:
    """Seconds of a step of each layout, at least; infinity where a stage does not fit."""
    m = microbatches
    fits = np.all(np.isfinite(figures.backward_s), axis=1)
    back = np.where(fits[:, None], figures.backward_s, 0.0)
    reduce = np.where(fits[:, None], figures.reduce_s, 0.0)
    work = figures.forward_s + back
    stages = work.shape[1]
    through, arrival = np.zeros_like(work), np.zeros_like(work)
    through[:, 1:] = np.cumsum(work[:, :-1] + 2.0 * figures.hop_s, axis=1)
    arrival[:, 1:] = np.cumsum(figures.forward_s[:, :-1] + figures.hop_s, axis=1)
    whole = through[:, -1:] + work[:, -1:]
    loops = whole - through
    begun = np.maximum(arrival + figures.gather_s[:, :1], figures.gather_s)
    first, last = first_and_last_s(arrival, through, begun + loops, loops + reduce)
    drained, ended = np.zeros(len(work)), np.zeros(len(work))
    for s in range(stages):
        place, loop = stages - s, loops[:, s]
        own = stage_lower_bound_s(float(m), work[:, s], back[:, s], loop, place)
        for k in range(1, place + 1):
            if m > place:
                run = through[:, s + k - 1] + work[:, s + k - 1] - through[:, s]
                times, rest = divmod(m - 1 - place, k)
                between = times * run + rest * work[:, s]
                own = np.maximum(own, 2.0 * loop + between)
                ended = np.maximum(ended, first[:, s] + between + last[:, s])
        drained = np.maximum(drained, through[:, s] + own)
        ended = np.maximum(ended, begun[:, s] + own + reduce[:, s])
        steady = max(m - place, 0) * work[:, s] + (min(m, place) - 1) * back[:, s]
        ended = np.maximum(ended, first[:, s] + steady + reduce[:, s])
    ended = np.maximum(ended, figures.gather_s[:, 0] + drained + reduce[:, 0]) + figures.end_s.max(axis=1)
    return np.where(fits, ended, np.inf)


def first_and_last_s(
    arrival_s: Floats, through_s: Floats, looped_s: Floats, reduced_s: Floats
) -> tuple[Floats, Floats]:
    """By layout and stage: seconds from the start of the step until the stage's first backward has ended, and
    from the start of its last forward until it and all stages behind have reduced. `looped_s` is the first by
    the stage's own loop, `reduced_s` the second; `arrival_s` and `through_s` are those of one microbatch on
    its way to each stage, and to it and back."""
    back_s = through_s - arrival_s
    first = np.maximum.accumulate((looped_s + back_s)[:, ::-1], axis=1)[:, ::-1] - back_s
    last = np.maximum.accumulate((reduced_s + arrival_s)[:, ::-1], axis=1)[:, ::-1] - arrival_s
    return first, last
