"""Shapes of pipelines worth considering: what the search finds best on clusters of several sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shardwise.cluster import Cluster, NodeState, uniform_cluster
from shardwise.plan import Value
from shardwise.replan.arrangement import with_dp
from shardwise.replan.prices import Prices
from shardwise.replan.within import ANY, AllowedSpace
from shardwise.search import BranchAndBound, Fastest, Question, WorkLimit
from shardwise.strategy import Strategy

Axes = Mapping[str, tuple[Value, ...]]

RUNNERS_UP = 5
"""Of every size the best strategy and so many more, each of which differs in a degree, the schedule or
recomputation."""

MICRO_BATCH_DIVISORS = (1, 2, 4)
"""Parts of a shape's micro-batch size with which another search begins."""

MAX_PARTS = 48
"""Parts of the space that a search looks at, at most. Where links are slow and far it would take minutes to
prove what is best; what it has found by then is good, and is weighed against keeping like any other."""

POWERS, FACTORS = 4, (3, 5, 7)
"""Numbers of nodes that are searched for a situation: so many powers of two, and one that is one of these
factors times a power of two."""


def sizes_below(nodes: int) -> tuple[int, ...]:
    """Numbers of nodes whose devices divide batches well, the largest powers of two up to `nodes`; and of
    those that leave a factor of 3, 5 or 7 to the stages of a pipeline the largest: fewer nodes are idle."""
    sizes = [1 << exponent for exponent in range(nodes.bit_length())][-POWERS:]
    others = [factor << (nodes // factor).bit_length() - 1 for factor in FACTORS if factor <= nodes]
    return tuple(sorted({*sizes, *([max(others)] if others else [])}))


def _intersected(allowed: Axes, also: Axes) -> dict[str, tuple[Value, ...]]:
    """The values of `also` that are allowed too."""
    return {
        name: tuple(value for value in values if value in allowed.get(name, values))
        for name, values in also.items()
    }


class ShapeSearch:
    """Shapes of pipelines for one model and job, by pool and size; each size is searched once.

    They are searched for on nodes as the cluster has them, or as they are in the state `present`, in the
    space that `allowed_space` allows; of that, with only these values along `axes`.
    """

    def __init__(
        self,
        prices: Prices,
        runners_up: int = RUNNERS_UP,
        *,
        present: NodeState | None = None,
        axes: Mapping[str, tuple[Value, ...]] | None = None,
        allowed_space: AllowedSpace = ANY,
    ) -> None:
        self._prices = prices
        self._runners_up = runners_up
        self._present = present
        self._space, self._fixed = allowed_space.space, allowed_space.fixed
        self._axes = {**allowed_space.axes, **_intersected(allowed_space.axes, axes or {})}
        self._found: dict[tuple[int, int], tuple[Strategy, ...]] = {}

    def of_sizes(self, pool: int, sizes: Iterable[int]) -> list[Strategy]:
        """All distinct shapes that are best on any of so many nodes of the pool."""
        every = list(sizes)
        near: tuple[Strategy, ...] = ()
        for nodes in sorted(every, reverse=True):
            near = self._of_size(pool, nodes, near) or near
        return list(dict.fromkeys(shape for nodes in every for shape in self._found[pool, nodes]))

    def _of_size(self, pool: int, nodes: int, near: Sequence[Strategy]) -> tuple[Strategy, ...]:
        key = pool, nodes
        if key not in self._found:
            state = NodeState(pool=pool) if self._present is None else replace(self._present, pool=pool)
            cluster = uniform_cluster(self._prices.cluster, self._prices.pools[pool], nodes, state)
            self._found[key] = self._best(cluster, near)
        return self._found[key]

    def _best(self, cluster: Cluster, near: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """Shapes that lie on whole nodes, of the best strategies on all devices of a cluster; none where
        nothing fits. Those that are best on other numbers of nodes, `near`, are where the search begins."""
        question = Question(
            model=self._prices.model,
            cluster=cluster,
            job=self._prices.job,
            space=self._space,
            fixed=self._fixed,
            axes=self._axes,
        )
        begin = [one for shape in near for one in _smaller(shape, cluster.devices)]
        goal = Fastest(1 + self._runners_up)
        search = BranchAndBound(
            question.problem(), question.candidates(), goal, warm_start=begin, clock=WorkLimit(MAX_PARTS)
        )
        outcome = search.run()
        shapes = [with_dp(found.table[0], 1) for found in outcome.found]
        return tuple(dict.fromkeys(_ordered(shape) for shape in shapes))


def _ordered(shape: Strategy) -> Strategy:
    """One order of axes for all shapes that need none: a pipeline alone has no data-parallel axis."""
    if shape.pp == 1:
        return replace(shape, axis_order="tp-cp-dp-pp")
    return shape


def _smaller(shape: Strategy, devices: int) -> Iterator[Strategy]:
    """The shape on so many devices, with its micro-batches and with smaller ones, which fit where states are
    divided among fewer devices."""
    width, rest = divmod(devices, shape.tp * shape.cp * shape.pp)
    for size in (
        shape.micro_batch_size // part for part in MICRO_BATCH_DIVISORS if shape.micro_batch_size % part == 0
    ):
        if not rest:
            yield with_dp(replace(shape, micro_batch_size=size), width)
