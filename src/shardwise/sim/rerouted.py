"""How long a table of several pipelines takes whose microbatches change between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.schedule import KINDS, ActionKind, Rerouted
from shardwise.sim.dependencies import action_finishes, dependencies
from shardwise.sim.durations import Durations

_KINDS = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
_BACKWARDS = [KINDS.index(ActionKind.BACKWARD), KINDS.index(ActionKind.BACKWARD_INPUT)]


def rerouted_s(table: Rerouted, durations: Durations, across_s: float) -> float:
    """Seconds until all ranks have done their actions and reduced their gradients; semantics as of
    `Durations`, whose case d has the times of pipeline d. A microbatch that changes the pipeline takes
    `across_s` for its hop where its own takes less.

    Raises ConfigError where an action is missing, twice there, on a wrong rank, or waits for itself.
    """
    stage, kind, _, offsets = table.columns
    rank = np.repeat(np.arange(table.pp), np.diff(offsets))
    pipeline = np.array([one for one, _ in table.rank_stages])[rank]
    source, _ = dependencies(table)
    by_kind = np.stack([getattr(durations, name) for name in _KINDS])
    length = by_kind[kind, pipeline, stage]
    hop = np.zeros(len(stage))
    (arriving,) = np.nonzero((source >= 0) & (stage[source] != stage))
    if len(arriving):
        hop[arriving] = _hops(durations, across_s, arriving, source[arriving], (stage, kind, pipeline))
    first = offsets[:-1]
    earliest = np.zeros(len(stage))
    earliest[first] = durations.gather_s[pipeline[first], stage[first]]
    finish = np.array(
        action_finishes(table, source.tolist(), length.tolist(), hop.tolist(), earliest.tolist())
    )
    last = offsets[1:] - 1
    reduced = finish[last] + durations.reduce_s[pipeline[last], stage[last]]
    return float(reduced.max())


Ints = NDArray[np.int64]


def _hops(
    durations: Durations, across_s: float, actions: Ints, sources: Ints, columns: tuple[Ints, Ints, Ints]
) -> NDArray[np.float64]:
    """Seconds from each source to the action that waits for it, of another stage."""
    stage, kind, pipeline = columns
    edge = np.minimum(stage[actions], stage[sources])
    ends = (pipeline[actions], pipeline[sources])
    forward = np.maximum(*(durations.hop_forward_s[end, edge] for end in ends))
    backward = np.maximum(*(durations.hop_backward_s[end, edge] for end in ends))
    own = np.where(np.isin(kind[actions], _BACKWARDS), backward, forward)
    found: NDArray[np.float64] = np.where(ends[0] == ends[1], own, np.maximum(own, across_s))
    return found
