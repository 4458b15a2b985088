"""Bounds of uneven pipelines hold: no layout is faster than its bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.property.uneven_reference import walked_s

from shardwise.search.hetero import lower_bounds
from shardwise.search.hetero.capacity_relaxation import CapacityRelaxation
from shardwise.search.hetero.lower_bounds import INFINITE_S, StageTable, SuffixRelaxation, layout_figures


def assert_bounds_hold(of: Any, layouts: Any, numbers: range | list[int], seed: int) -> None:
    """Assert that each of `layouts` of the options `of`, evaluated with each of these numbers of
    micro-batches, takes no less than each of its bounds.
    """
    entries = StageTable(of)
    for row, times_s in enumerate(walked_s(of, layouts, numbers)):
        sites, layers = layouts.pools[row], layouts.layers[row]
        of_site = dict(zip(sites.tolist(), layouts.kinds[row].tolist(), strict=True))
        kinds = tuple(of_site.get(at, 0) for at in range(len(of.stages)))
        counts = tuple(int((sites == at).sum()) for at in range(len(of.stages)))
        figures = layout_figures(of, kinds, sites[None], layers[None])
        capacity = CapacityRelaxation(of, np.array([kinds]), np.array([counts]))
        for m, time_s in zip(numbers, times_s.tolist(), strict=True):
            if time_s == float("inf"):
                continue
            within_s = time_s * (1 + 1e-9)
            for most_s in (INFINITE_S, time_s):  # none of its stages takes longer than the pipeline
                relaxation = SuffixRelaxation(entries, [(kinds, counts)], [m], within_s=most_s)
                assert relaxation.bounds()[0] <= within_s, (seed, sites, layers, m)
            # The same with one bound for all pipelines that differ only in how stages are spread.
            together = SuffixRelaxation(entries, [(entries.relaxed_kinds(kinds), counts)], [m])
            assert together.bounds()[0] <= within_s, (seed, sites, layers, m)
            assert lower_bounds.lower_bound_s(figures, m)[0] <= within_s, (seed, sites, layers, m)
            assert capacity.quick_bound(within_s, np.array([m + 1]))[0] >= m, (seed, sites, layers, m)
            assert capacity.can_do(np.array([0]), np.array([m]), within_s)[0], (seed, sites, layers, m)
            assert capacity.microbatches(within_s)[0] >= m, (seed, sites, layers, m)
