"""Groups of nodes that the links of a cluster's file join more closely than others, in any order of nodes.

`nested_groups` finds them by the widest routes: two racks with a slow link between them are two groups.
`outgoing_bytes_per_s` is what a group can send to others at once, by the links that it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.cluster.cluster import Link, Node


@dataclass(frozen=True, slots=True)
class LinkLevel:
    """A division of all nodes into groups of equal size. `joined_bytes_per_s` is the capacity of the widest
    route between two groups of the next smaller level within one group."""

    groups: tuple[tuple[int, ...], ...]
    joined_bytes_per_s: float


def nested_groups(nodes: Sequence[Node], links: Iterable[Link]) -> list[LinkLevel]:
    """The levels of groups of several whole nodes, from the smallest groups to all nodes together.

    A group has a route between each two of its devices whose narrowest link is wider than that of any route
    out of it. Only divisions into groups with the same number of devices are levels.
    """
    firsts = [*accumulate((node.devices for node in nodes), initial=0)]
    largest = max(node.devices for node in nodes)
    union = _Union()
    levels: list[LinkLevel] = []
    pairs = _both_ways(links)
    for capacity in sorted(set(pairs.values()), reverse=True):
        for (one, other), width in pairs.items():
            if width == capacity:
                union.join(one, other)
        groups: dict[str, list[int]] = {}
        is_whole = True
        for place, node in enumerate(nodes):
            roots = {union.root(f"d{rank}") for rank in range(firsts[place], firsts[place] + node.devices)}
            is_whole = is_whole and len(roots) == 1
            groups.setdefault(min(roots), []).append(place)
        found = tuple(tuple(group) for group in groups.values())
        sizes = {sum(nodes[place].devices for place in group) for group in found}
        if is_whole and len(sizes) == 1 and sizes != {largest} and (not levels or found != levels[-1].groups):
            levels.append(LinkLevel(found, capacity))
        if len(groups) == 1 and is_whole:
            break
    return levels


def _both_ways(links: Iterable[Link]) -> dict[tuple[str, str], float]:
    """The capacity between two vertices that are linked in both directions: that of the narrower one."""
    one_way: dict[tuple[str, str], float] = {}
    for link in links:
        pair = (link.source, link.target)
        one_way[pair] = one_way.get(pair, 0.0) + link.capacity.at(0.0)
    return {
        (a, b): min(rate, one_way[b, a]) for (a, b), rate in one_way.items() if a < b and (b, a) in one_way
    }


class _Union:
    """Sets of vertices that are joined."""

    def __init__(self) -> None:
        self._above: dict[str, str] = {}

    def root(self, vertex: str) -> str:
        while (above := self._above.setdefault(vertex, vertex)) != vertex:
            self._above[vertex] = self._above[above]
            vertex = above
        return vertex

    def join(self, one: str, other: str) -> None:
        self._above[self.root(one)] = self.root(other)


def outgoing_bytes_per_s(links: Iterable[Link], sources: Collection[str], targets: Collection[str]) -> float:
    """The most bytes per second from all `sources` together to all `targets`: a maximum flow, by shortest
    augmenting paths (Edmonds and Karp 1972)."""
    left: dict[str, dict[str, float]] = {}
    for link in links:
        ahead = left.setdefault(link.source, {})
        ahead[link.target] = ahead.get(link.target, 0.0) + link.capacity.at(0.0)
        left.setdefault(link.target, {}).setdefault(link.source, 0.0)
    total = 0.0
    while (path := _augmenting(left, sources, targets)) is not None:
        width = min(left[a][b] for a, b in path)
        for a, b in path:
            left[a][b] -= width
            left[b][a] += width
        total += width
    return total


def _augmenting(
    left: Mapping[str, Mapping[str, float]], sources: Collection[str], targets: Collection[str]
) -> list[tuple[str, str]] | None:
    """The hops of the shortest path with capacity left; None where there is none."""
    before: dict[str, str | None] = dict.fromkeys(sources)
    queue = deque(sources)
    while queue:
        vertex = queue.popleft()
        for following, capacity in left.get(vertex, {}).items():
            if capacity <= 0.0 or following in before:
                continue
            before[following] = vertex
            if following in targets:
                return _hops(before, following)
            queue.append(following)
    return None


def _hops(before: Mapping[str, str | None], last: str) -> list[tuple[str, str]]:
    path: list[tuple[str, str]] = []
    while (previous := before[last]) is not None:
        path.append((previous, last))
        last = previous
    return path


def close_order(nodes: Sequence[Node], levels: Sequence[LinkLevel]) -> list[int]:
    """The indices of the nodes, so that each group of every level has consecutive nodes."""
    group_of = [
        {place: at for at, group in enumerate(level.groups) for place in group} for level in reversed(levels)
    ]
    return sorted(range(len(nodes)), key=lambda place: [of[place] for of in group_of])
