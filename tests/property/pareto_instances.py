"""Small random chains of factor graphs, and their frontiers by definition: every solution is evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.pareto import Chain, Factor, FactorGraph, Segment
from shardwise.search.pareto.solution import Solution
from shardwise.search.pareto.weighted_sums import ChainWeights

SHAPES = ("series", "parallel", "residual", "dense", "shared", "tree")
"""How the operators of a segment are joined: in series; in parallel between two; in series with skips; each
with each; all with one shared variable in addition; at random.
"""

Costs = npt.NDArray[np.float64]
Columns = tuple[float, float, float, float, float]
Choices = tuple[tuple[int, tuple[int, ...]], ...]
"""For each occurrence of a segment: the mode, and the choice of each variable."""


def chain_of(seed: int, *, operators: int = 8, layouts: int = 4, repeat: int = 2) -> Chain:
    """A chain of one to three segments with at most `operators` operators in all, repetitions counted (a
    segment occurs once or `repeat` times). Costs are small whole numbers, some of them infinite; half of
    the chains have no communication to hide.
    """
    random = np.random.default_rng(seed)
    segments = int(random.integers(1, 4))
    repeats = [
        repeat if 0 < place < segments - 1 and random.random() < 0.6 else 1 for place in range(segments)
    ]
    borders = [1, *(int(random.integers(1, layouts + 1)) for _ in range(segments - 1)), 1]
    for place, repeat in enumerate(repeats):
        if repeat > 1:
            borders[place + 1] = borders[place]
    is_hiding = random.random() < 0.5
    most = max(1, operators // sum(repeats) - 1)
    chain = []
    for place, repeat in enumerate(repeats):
        modes = []
        for mode in range(int(random.integers(1, 3))):
            sizes = [int(random.integers(1, layouts + 1)) for _ in range(int(random.integers(1, most + 1)))]
            entry = leaving = None
            if place > 0:
                entry = len(sizes)
                sizes.append(borders[place])
            if place < segments - 1:
                leaving = len(sizes)
                sizes.append(borders[place + 1])
            shape = SHAPES[int(random.integers(len(SHAPES)))]
            factors = [
                Factor(variables, _costs(random, tuple(sizes[v] for v in variables), is_hiding))
                for variables in _joins(random, shape, len(sizes))
            ]
            names = tuple(f"v{v}" for v in range(len(sizes)))
            modes.append((f"mode {mode}", FactorGraph(names, tuple(sizes), tuple(factors), entry, leaving)))
        chain.append(Segment(f"link {place}", tuple(modes), repeat))
    return tuple(chain)


def starting_with(seed: int, seeds: Iterable[int]) -> list[int]:
    """The seeds, first the one at which a mutant is known to be noticed; the others follow in case that has
    changed.
    """
    return sorted(seeds, key=lambda each: each != seed)


def long_chain(seed: int) -> Chain:
    """A chain with a segment that occurs up to seven times, and costs that are not whole numbers."""
    chain = chain_of(seed, operators=8 + 2 * (seed % 8), layouts=2 + seed % 2, repeat=4 + seed % 4)
    random = np.random.default_rng(seed)
    return tuple(
        replace(
            segment,
            modes=tuple(
                (name, replace(part, factors=tuple(_uneven(random, each) for each in part.factors)))
                for name, part in segment.modes
            ),
        )
        for segment in chain
    )


def chain_with_shared(seed: int) -> Chain:
    """A chain with one or two shared variables, each in some of its segments and joined to any of their
    variables.
    """
    random = np.random.default_rng(seed)
    chain = list(chain_of(seed, operators=6, layouts=3))
    is_hiding = random.random() < 0.5
    for number in range(int(random.integers(1, 3))):
        name, size = f"shared {number}", int(random.integers(1, 4))
        for place, segment in enumerate(chain):
            if random.random() < 0.7:
                modes = tuple(
                    (mode, _with_shared(random, part, name, size, is_hiding)) for mode, part in segment.modes
                )
                chain[place] = replace(segment, modes=modes)
    return tuple(chain)


def _with_shared(
    random: np.random.Generator, part: FactorGraph, name: str, size: int, is_hiding: bool
) -> FactorGraph:
    """A segment with a shared variable joined to one of its variables."""
    shared_variable, other = len(part.sizes), int(random.integers(len(part.sizes)))
    own = (
        Factor((shared_variable,), _costs(random, (size,), is_hiding)),
        Factor((shared_variable, other), _costs(random, (size, part.sizes[other]), is_hiding)),
    )
    return replace(
        part, names=(*part.names, name), sizes=(*part.sizes, size), factors=(*part.factors, *own),
        shared=(*part.shared, (name, shared_variable)),
    )  # fmt: skip


def equal_layers(seed: int, layers: int = 3) -> FactorGraph:
    """Equal layers in series, each of an operator that reads a tensor which all layers share, and of two that
    depend on it.
    """
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 4))
    costs = [_costs(random, (size, size), True) for _ in range(5)]
    factors = []
    for layer in range(layers):
        before, own, branch, twig, after = (1 + 4 * layer + place for place in range(5))
        joins = ((before, own), (own, after), (0, own), (own, branch), (branch, twig))
        factors += [Factor(variables, each) for variables, each in zip(joins, costs, strict=True)]
    count = 4 * layers + 2
    names = tuple(f"v{variable}" for variable in range(count))
    return FactorGraph(names, (size,) * count, tuple(factors), 0, count - 1)


def complete_graph(seed: int) -> FactorGraph:
    """Five variables of up to nine choices, each with a cost with every other one; some choices are
    incompatible.
    """
    random = np.random.default_rng(seed)
    sizes = tuple(random.integers(1, 10, 5).tolist())
    factors = []
    for variables in combinations(range(5), 2):
        costs = _costs(random, tuple(sizes[variable] for variable in variables), True)
        costs[random.random(costs.shape[:-1]) < 0.2] = np.inf
        factors.append(Factor(variables, costs))
    return FactorGraph(tuple(f"v{variable}" for variable in range(5)), sizes, tuple(factors), 0, 4)


def _uneven(random: np.random.Generator, factor: Factor) -> Factor:
    return Factor(factor.variables, factor.costs * random.uniform(0.5, 1.5, factor.costs.shape))


def _joins(random: np.random.Generator, shape: str, count: int) -> Iterator[tuple[int, ...]]:
    """The variables of each factor: every variable alone, and pairs according to the shape."""
    yield from ((variable,) for variable in range(count))
    order = random.permutation(count).tolist()
    if shape == "dense":
        yield from combinations(order, 2)
    elif shape == "parallel":
        yield from ((end, inner) for inner in order[2:] for end in order[:2])
        yield from combinations(order[:2], 2)
    elif shape == "tree":
        yield from ((order[place], order[int(random.integers(place))]) for place in range(1, count))
    else:
        yield from pairwise(order)
        if shape == "residual":
            yield from ((order[place], order[place + 2]) for place in range(0, count - 2, 2))
        if shape == "shared" and count > 2:
            yield from ((order[-1], order[place]) for place in random.integers(0, count - 1, 2).tolist())


def _costs(random: np.random.Generator, sizes: tuple[int, ...], is_hiding: bool) -> Costs:
    costs = random.integers(0, 10, (*sizes, 5)).astype(np.float64)
    if not is_hiding:
        costs[..., 1] = 0.0
    costs[random.random(sizes) < 0.08] = np.inf
    return costs


def costs_of(part: FactorGraph, choices: tuple[int, ...]) -> Columns:
    """The five cost columns of a segment, factor by factor."""
    return _costs_of(_tables_of(part), choices)


def _tables_of(part: FactorGraph) -> list[tuple[tuple[int, ...], Any]]:
    """Factors as nested lists, which are faster to index than arrays."""
    return [(factor.variables, factor.costs.tolist()) for factor in part.factors]


def _costs_of(tables: list[tuple[tuple[int, ...], Any]], choices: tuple[int, ...]) -> Columns:
    hidden_s = exposed_s = resident = recomputed = peak = 0.0
    for variables, cost in tables:
        for variable in variables:
            cost = cost[choices[variable]]
        hidden_s += cost[0]
        exposed_s += cost[1]
        resident += cost[2]
        recomputed += cost[3]
        peak = max(peak, cost[4])
    return hidden_s, exposed_s, resident, recomputed, peak


def plain(solution: Solution) -> Choices:
    return tuple((choice.mode, choice.choices) for choice in solution)


def measure_of(chain: Chain, choices: Choices) -> tuple[float, float]:
    """Seconds and bytes by the definition of the columns (docs/concepts/pareto-search.md)."""
    parts = [segment for segment in chain for _ in range(segment.repeat)]
    columns = [
        costs_of(segment.modes[mode][1], chosen)
        for segment, (mode, chosen) in zip(parts, choices, strict=True)
    ]
    hidden_s, exposed_s, resident = (sum(each[column] for each in columns) for column in range(3))
    return max(hidden_s, exposed_s), resident + max(each[3] + each[4] for each in columns)


def frontier_by_definition(chain: Chain) -> list[tuple[float, float]]:
    """The non-dominated points among all solutions, each once."""
    sizes = {name: part.sizes[v] for segment in chain for _, part in segment.modes for name, v in part.shared}
    points = {
        point
        for chosen in product(*(range(size) for size in sizes.values()))
        for point in _points(chain, dict(zip(sizes, chosen, strict=True)))
    }
    frontier: list[tuple[float, float]] = []
    for point in sorted(points):
        if not frontier or point[1] < frontier[-1][1]:
            frontier.append(point)
    return frontier


def _points(chain: Chain, shared: dict[str, int]) -> set[tuple[float, float]]:
    """The points of all solutions with these choices of the shared variables."""
    reached: dict[int, set[tuple[float, float, float, float]]] = {0: {(0.0, 0.0, 0.0, 0.0)}}
    for segment in [each for each in chain for _ in range(each.repeat)]:
        onward: dict[int, set[tuple[float, float, float, float]]] = {}
        for _, part in segment.modes:
            tables = _tables_of(part)
            for choices in product(*(range(size) for size in part.sizes)):
                hidden_s, exposed_s, resident, recomputed, peak = _costs_of(tables, choices)
                if hidden_s == np.inf or any(
                    choices[variable] != shared[name] for name, variable in part.shared
                ):
                    continue
                before = reached.get(0 if part.entry is None else choices[part.entry], set())
                after = onward.setdefault(0 if part.exit is None else choices[part.exit], set())
                after |= {
                    (a + hidden_s, b + exposed_s, c + resident, max(d, recomputed + peak))
                    for a, b, c, d in before
                }
        reached = onward
    return {(max(a, b), c + d) for states in reached.values() for a, b, c, d in states}


def without_peaks(chain: Chain, weights: Costs) -> ChainWeights:
    """Weights of all columns but the peak's."""
    none = tuple(((),) * len(segment.modes) for segment in chain)
    return ChainWeights(weights, np.zeros((len(chain), len(weights))), none)
