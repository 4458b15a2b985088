"""Shapes of pipelines worth considering: what the search finds best on clusters of several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardwise.cluster import Cluster, NodeState, alike_cluster
from shardwise.plan import Value
from shardwise.replan.arrangement import at_width
from shardwise.replan.prices import Prices
from shardwise.search import Fastest, Question, Search
from shardwise.strategy import Strategy

RUNNERS_UP = 5
"""Of every size the best strategy and so many more, each of which differs in a degree, the schedule or
recomputation."""

SIZES = 6
"""Numbers of nodes that are searched for a situation."""


def sizes_below(nodes: int) -> tuple[int, ...]:
    """The largest powers of two up to `nodes`: numbers of nodes whose devices divide batches well."""
    powers = [1 << exponent for exponent in range(nodes.bit_length()) if 1 << exponent <= nodes]
    return tuple(powers[-SIZES:])


class Shapes:
    """Shapes of pipelines for one model and job, by pool and size; each size is searched once.

    They are searched for on nodes as the cluster has them, or as they are in the state `present`; of the
    space, what has only these values along `axes`.
    """

    def __init__(
        self,
        prices: Prices,
        runners_up: int = RUNNERS_UP,
        *,
        present: NodeState | None = None,
        axes: Mapping[str, tuple[Value, ...]] | None = None,
    ) -> None:
        self._prices = prices
        self._runners_up = runners_up
        self._present = present
        self._axes = axes or {}
        self._found: dict[tuple[int, int], tuple[Strategy, ...]] = {}

    def of_sizes(self, pool: int, sizes: Iterable[int]) -> list[Strategy]:
        """All distinct shapes that are best on any of so many nodes of the pool."""
        found: dict[Strategy, None] = {}
        for nodes in sizes:
            found.update(dict.fromkeys(self._of_size(pool, nodes)))
        return list(found)

    def _of_size(self, pool: int, nodes: int) -> tuple[Strategy, ...]:
        key = pool, nodes
        if key not in self._found:
            state = NodeState(pool=pool) if self._present is None else replace(self._present, pool=pool)
            cluster = alike_cluster(self._prices.cluster, self._prices.pools[pool], nodes, state)
            self._found[key] = self._best(cluster)
        return self._found[key]

    def _best(self, cluster: Cluster) -> tuple[Strategy, ...]:
        """Shapes that lie on whole nodes, of the best strategies on all devices of a cluster; none where
        nothing fits."""
        question = Question(model=self._prices.model, cluster=cluster, job=self._prices.job, axes=self._axes)
        outcome = Search(question.problem(), question.candidates(), Fastest(1 + self._runners_up)).run()
        shapes = [at_width(found.table[0], 1) for found in outcome.found]
        return tuple(dict.fromkeys(_ordered(shape) for shape in shapes))


def _ordered(shape: Strategy) -> Strategy:
    """One order of axes for all shapes that need none: a pipeline alone has no data-parallel axis."""
    if shape.pp == 1:
        return replace(shape, axis_order="tp-cp-dp-pp")
    return shape
