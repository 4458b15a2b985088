"""Least sums along a chain, and outside parts of it, compared with all paths under each choice of the shared
variables.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from tests.property.pareto_instances import chain_with_shared, without_peaks
from tests.property.test_search_pareto import at_the_first

from shardwise.pareto import Chain, shared_sizes
from shardwise.search.pareto import weighted_sums, weighted_sums_numba
from shardwise.search.pareto.state import orders_of

Values = npt.NDArray[np.float64]

WEIGHTS = np.array([[3.0, 2.0, 1.0, 0.0, 0.0], [0.0, 1.0, 4.0, 0.0, 0.0]])


def chain_and_sums(seed: int) -> tuple[Chain, weighted_sums.ChainSums]:
    chain = chain_with_shared(seed)
    return chain, weighted_sums.chain_sums(chain, orders_of(chain), without_peaks(chain, WEIGHTS))


def tables_of(chain: Chain, shared: dict[str, int]) -> list[Values]:
    """The least sum of each occurrence of a segment, (entry, exit, weights), under these choices of the
    shared variables; all choices of its other variables are enumerated.
    """
    found = []
    for segment in chain:
        _, first = segment.modes[0]
        entries, exits = (1 if end is None else first.sizes[end] for end in (first.entry, first.exit))
        table = np.full((entries, exits, len(WEIGHTS)), np.inf)
        for _, part in segment.modes:
            for choices in product(*(range(size) for size in part.sizes)):
                if any(choices[variable] != shared[name] for name, variable in part.shared):
                    continue
                costs = sum(
                    factor.costs[tuple(choices[variable] for variable in factor.variables)]
                    for factor in part.factors
                )
                cell = tuple(0 if end is None else choices[end] for end in (part.entry, part.exit))
                if np.isfinite(costs).all():
                    table[cell] = np.minimum(table[cell], WEIGHTS @ costs)
        found += [table] * segment.repeat
    return found


def through(tables: list[Values]) -> Values:
    """The least sum through all tables in order, from each entry of the first: (start, end, weights)."""
    least = tables[0]
    for table in tables[1:]:
        least = (least[:, :, None] + table[None]).min(axis=1)
    return least


def is_as_defined(seed: int) -> bool:
    """Whether prefix, suffix and outside sums are the minimum over all shared variables except those that
    stay variables of the result.
    """
    chain, found = chain_and_sums(seed)
    sizes = shared_sizes(chain)
    combinations = [dict(zip(sizes, each, strict=True)) for each in product(*map(range, sizes.values()))]
    tables = [tables_of(chain, shared) for shared in combinations]
    count = len(tables[0])
    least = np.min([through(own).min(axis=(0, 1)) for own in tables], axis=0)
    is_right = bool((found.least == least).all())
    nothing = np.zeros((1, 1, len(WEIGHTS)))
    shared_left = list(sizes)[: seed % (len(sizes) + 1)]
    spans = [range(at, at + 1 + seed % 2) for at in range(count - seed % 2)][: 1 + seed % 3]
    if any(_end_sizes(tables[0], span) != _end_sizes(tables[0], spans[0]) for span in spans):
        spans = spans[:1]
    if not spans:
        return is_right
    outside = found.borders.min_marginal(found.outside(spans, shared_left), shared_left)
    for chosen in product(*(range(sizes[name]) for name in shared_left)):
        expected = np.inf
        for shared, own in zip(combinations, tables, strict=True):
            if [shared[name] for name in shared_left] != list(chosen):
                continue
            for span in spans:
                before = through([nothing, *own[: span.start]])[0]
                after = through([*own[span.stop :], nothing])[:, 0]
                expected = np.minimum(expected, before[:, None] + after[None])
        is_right &= bool((outside[chosen] == expected).all())
    return is_right


def _end_sizes(tables: list[Values], span: range) -> tuple[int, int]:
    return tables[span.start].shape[0], tables[span.stop - 1].shape[1]


@pytest.mark.slow
def test_sums_are_the_minimum_over_all_paths() -> None:
    """Small whole numbers, so that sums are exact."""
    assert all(is_as_defined(seed) for seed in range(60))


def test_shared_variables_fixed_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighted_sums, "_without", at_the_first)
    assert not all(is_as_defined(seed) for seed in range(60))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["extended_sums", "least_outside"])
def test_loops_that_confuse_shared_variables_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = getattr(weighted_sums_numba, name)

    def confused(one: Values, other: Values, *rows: npt.NDArray[np.intp]) -> None:
        own(one, other, np.zeros_like(rows[0]), *rows[1:])

    monkeypatch.setattr(weighted_sums_numba, name, confused)
    assert not all(is_as_defined(seed) for seed in range(60))
