"""Links that flows share max-min fairly, kept up to date flow by flow.

Max-min fair: no link carries more than its capacity, and every flow crosses a saturated link on which no
other flow is faster. Progressive filling finds these rates: all rates grow alike until a link is full; its
flows stay as they are, the rest grow on (Bertsekas and Gallager, Data Networks, section 6.5.2).

Only what can have changed is filled again, and flows of one route, which are equally fast, are filled as one
*lane*. A link is *loose* while its lanes cannot fill it even if each had the narrowest link of its route for
itself; a loose link never limits anyone, so that lanes which meet only there do not concern each other. The
lanes to fill are those that are connected, over tight links, to a link where a flow came or went or whose
capacity changed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

Route = tuple[tuple[int, int], ...]

# A link counts as tight a little before it is, so that rounding in `_potential` cannot hide a tight one.
_TIGHT_SHARE = 1.0 - 1e-9


class Network:
    """The flows now under way and their rates.

    `routes[f]` are flow f's links and how often it crosses each; `capacities` are bytes per second. `join`,
    `leave` and `set_capacity` note in `changed` the links where rates may change at an instant; `reshare`
    then finds the new rates, `rates[f]` (-1 before flow f joins). `rate_changes` counts the changes of rate
    of flows that were under way; `rate_log`, if it is a list, collects (flow, instant, rate).
    """

    def __init__(self, routes: Sequence[Route], nbytes: Sequence[float], capacities: Sequence[float]) -> None:
        class_of_route: dict[Route, int] = {}
        self._class_of_flow = [class_of_route.setdefault(route, len(class_of_route)) for route in routes]
        self._routes = list(class_of_route)
        self._links_of = [tuple(link for link, _ in route) for route in self._routes]
        self._members: list[dict[int, None]] = [{} for _ in self._routes]
        self._solo_rate = [0.0] * len(self._routes)
        self._capacity = list(capacities)
        self._limit = [capacity * _TIGHT_SHARE for capacity in capacities]
        self._classes_on: list[dict[int, int]] = [{} for _ in capacities]
        self._crossings = [0] * len(capacities)
        self._potential = [0.0] * len(capacities)
        self._is_tight = [False] * len(capacities)
        self._left = list(nbytes)
        self._since = [0.0] * len(routes)
        self.changed: list[int] = []
        self.rates = [-1.0] * len(routes)
        self.rate_changes = 0
        self.rate_log: list[tuple[int, float, float]] | None = None

    def join(self, flow: int, now_s: float) -> None:
        """`flow` begins to move its bytes."""
        self._since[flow] = now_s
        flow_class = self._class_of_flow[flow]
        members = self._members[flow_class]
        if not members:
            self._open(flow_class)
        members[flow] = None
        for link, times in self._routes[flow_class]:
            self._crossings[link] += times
            if self._is_tight[link]:
                self.changed.append(link)

    def leave(self, flow: int) -> None:
        """`flow` has moved its last byte."""
        self._left[flow] = 0.0
        flow_class = self._class_of_flow[flow]
        members = self._members[flow_class]
        del members[flow]
        for link, times in self._routes[flow_class]:
            self._crossings[link] -= times
            if self._is_tight[link] and self._crossings[link]:
                self.changed.append(link)
        if not members:
            self._close(flow_class)

    def _open(self, flow_class: int) -> None:
        solo_rate = self._solo_rate[flow_class] = self._narrowest(flow_class)
        for link, times in self._routes[flow_class]:
            self._classes_on[link][flow_class] = times
            self._potential[link] += solo_rate * times
            self._is_tight[link] = self._potential[link] >= self._limit[link]

    def _close(self, flow_class: int) -> None:
        solo_rate = self._solo_rate[flow_class]
        for link, times in self._routes[flow_class]:
            flow_classes = self._classes_on[link]
            del flow_classes[flow_class]
            self._potential[link] = self._potential[link] - solo_rate * times if flow_classes else 0.0
            self._is_tight[link] = self._potential[link] >= self._limit[link]

    def _narrowest(self, flow_class: int) -> float:
        """The rate of a flow that has the links of `flow_class` for itself."""
        return min(self._capacity[link] / times for link, times in self._routes[flow_class])

    def set_capacity(self, link: int, bytes_per_s: float) -> None:
        """`link` carries `bytes_per_s` from now on."""
        affected = sorted(
            {link, *(other for flow_class in self._classes_on[link] for other in self._links_of[flow_class])}
        )
        # A link beside it that turns loose with it must be looked at, too: it may have limited someone.
        self.changed += [other for other in affected if self._is_tight[other]]
        self._capacity[link] = bytes_per_s
        self._limit[link] = bytes_per_s * _TIGHT_SHARE
        for flow_class in self._classes_on[link]:
            self._solo_rate[flow_class] = self._narrowest(flow_class)
        for other in affected:
            self._potential[other] = sum(
                self._solo_rate[flow_class] * times for flow_class, times in self._classes_on[other].items()
            )
            self._is_tight[other] = self._potential[other] >= self._limit[other]
        self.changed.append(link)

    def reshare(self, now_s: float) -> list[tuple[int, float]]:
        """The flows whose rate is new at `now_s`, and when each will end (infinity if it stands still)."""
        seen: set[int] = set()
        updated: list[tuple[int, float]] = []
        members = self._members
        for link in self.changed:
            flow_classes = [flow_class for flow_class in self._classes_on[link] if flow_class not in seen]
            if not flow_classes:
                continue
            links = self._connected(flow_classes, seen)
            if len(flow_classes) == 1:
                flow_class = flow_classes[0]
                self._set_rate(
                    members[flow_class],
                    self._solo_rate[flow_class] / len(members[flow_class]),
                    now_s,
                    updated,
                )
            else:
                for flow_class, rate in self._progressive_filling(flow_classes, links):
                    self._set_rate(members[flow_class], rate, now_s, updated)
        self.changed.clear()
        return updated

    def _connected(self, flow_classes: list[int], seen: set[int]) -> dict[int, None]:
        """Add to `flow_classes` (and `seen`) all that are connected to them over tight links; these links."""
        links_of, classes_on, is_tight = self._links_of, self._classes_on, self._is_tight
        seen.update(flow_classes)
        links: dict[int, None] = {}
        for flow_class in flow_classes:
            for link in links_of[flow_class]:
                if is_tight[link] and link not in links:
                    links[link] = None
                    for neighbour in classes_on[link]:
                        if neighbour not in seen:
                            seen.add(neighbour)
                            flow_classes.append(neighbour)
        return links

    def _progressive_filling(
        self, flow_classes: list[int], links: dict[int, None]
    ) -> list[tuple[int, float]]:
        """Rates of the flows of `flow_classes` by progressive filling, where only `links` can be full."""
        capacity, classes_on, routes, members = self._capacity, self._classes_on, self._routes, self._members
        residual = {link: capacity[link] for link in links}
        crossings = {link: self._crossings[link] for link in links}
        levels = [(residual[link] / crossings[link], link) for link in links]
        heapify(levels)
        unsettled = set(flow_classes)
        rates: list[tuple[int, float]] = []
        while unsettled:
            level, link = heappop(levels)
            times = crossings[link]
            if not times:
                continue
            # Levels only rise as slower flows settle, so an outdated one is put back with what it is now.
            rising = residual[link] / times
            if rising > level and levels and rising > levels[0][0]:
                heappush(levels, (rising, link))
                continue
            rising = max(rising, level)  # rounding must not make a level fall
            for flow_class in classes_on[link]:
                if flow_class in unsettled:
                    unsettled.remove(flow_class)
                    rates.append((flow_class, rising))
                    flows = len(members[flow_class])
                    for other, often in routes[flow_class]:
                        if other in residual:
                            residual[other] -= rising * often * flows
                            crossings[other] -= often * flows
        return rates

    def _set_rate(
        self, flows: dict[int, None], rate: float, now_s: float, updated: list[tuple[int, float]]
    ) -> None:
        rates, lefts, since = self.rates, self._left, self._since
        for flow in flows:
            old = rates[flow]
            if rate == old:
                continue
            left = lefts[flow]
            if old >= 0.0:
                left -= old * (now_s - since[flow])
                if left < 0.0:
                    left = 0.0
                lefts[flow] = left
                since[flow] = now_s
                self.rate_changes += 1
            rates[flow] = rate
            if self.rate_log is not None:
                self.rate_log.append((flow, now_s, rate))
            if left == 0.0:
                updated.append((flow, now_s))
            else:
                updated.append((flow, now_s + left / rate if rate > 0.0 else math.inf))


def max_min_rates(routes: Sequence[Route], capacities: Sequence[float]) -> list[float]:
    """The max-min fair rates of flows over `routes` on links of `capacities`, in bytes per second.

    A route is pairs of a link and how often the flow crosses it.
    """
    network = Network(routes, [1.0] * len(routes), capacities)
    for flow in range(len(routes)):
        network.join(flow, 0.0)
    network.reshare(0.0)
    return network.rates
