"""How many microbatches each pipeline does, so that the slowest ends as early as can be."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


def even_shares(pipelines: int, total: int, unit: int, least: int) -> list[int] | None:
    """`total` microbatches over alike pipelines, in multiples of `unit`, none with fewer than `least`; None
    where that cannot be."""
    if total % unit:
        return None
    base, rest = divmod(total // unit, pipelines)
    if base * unit < least:
        return None
    return [(base + (place < rest)) * unit for place in range(pipelines)]


def fastest_shares(
    first_s: Sequence[float], each_s: Sequence[float], total: int, unit: int, least: int
) -> list[int] | None:
    """Microbatches of pipelines that take `first_s` for `least` and `each_s` more for every further one:
    those by which the last ends soonest. None where there are too few."""
    pipelines = len(first_s)
    if total % unit or pipelines * least > total:
        return None
    # How many each does by a time, found by halving; then one by one to whoever ends soonest with it.
    low_s, high_s = min(first_s), max(first_s) + total * max(each_s)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2.0
        if sum(_done(first_s, each_s, middle_s, unit, least)) <= total:
            low_s = middle_s
        else:
            high_s = middle_s
    done = _done(first_s, each_s, low_s, unit, least)
    if sum(done) > total:
        done = [least] * pipelines
    heap = [
        (first_s[place] + (done[place] + unit - least) * each_s[place], place) for place in range(pipelines)
    ]
    heapify(heap)
    for _ in range((total - sum(done)) // unit):
        ends_s, place = heap[0]
        done[place] += unit
        heapreplace(heap, (ends_s + unit * each_s[place], place))
    return done


def _done(first_s: Sequence[float], each_s: Sequence[float], by_s: float, unit: int, least: int) -> list[int]:
    return [
        least + max(int((by_s - first) / (each * unit)), 0) * unit if each > 0.0 else least
        for first, each in zip(first_s, each_s, strict=True)
    ]
