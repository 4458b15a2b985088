"""Metamorphic relations between the answers to related questions, or of several commands about one
question."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isclose, log2
from typing import Any

from tests.relations.commands import Answer, Commands
from tests.relations.questions import Question

from shardwise.cluster import find_device

REL_TOL = 1e-9
"""Relative difference up to which values are equal."""

Check = Callable[[Question, Commands], None]
Applies = Callable[[Question], bool]


@dataclass(frozen=True)
class Relation:
    """A relation by name: the questions it applies to, and a check that raises AssertionError if it fails."""

    name: str
    group: str
    applies: Applies
    check: Check


RELATIONS: dict[str, Relation] = {}
"""All relations, in the order of their modules."""


def relation(applies: Applies) -> Callable[[Check], Check]:
    """Registers a function as a relation on the questions to which it `applies`."""

    def add(check: Check) -> Check:
        group = check.__module__.rpartition(".")[2]
        RELATIONS[check.__name__] = Relation(check.__name__, group, applies, check)
        return check

    return add


def is_plan(question: Question) -> bool:
    return not question.is_graph


def is_mixed(question: Question) -> bool:
    return question.cluster.is_mixed


def is_mixed_plan(question: Question) -> bool:
    return is_plan(question) and is_mixed(question)


def is_uniform_plan(question: Question) -> bool:
    return is_plan(question) and not is_mixed(question)


def has_network(question: Question) -> bool:
    return question.cluster.node_count > 1


def require(holds: bool, what: str, *answers: Answer) -> None:
    """Raises AssertionError with the commands unless it holds."""
    if not holds:
        raise AssertionError(" || ".join((what, *(answer.text for answer in answers))))


def require_same(one: Answer, other: Answer, *, what: str, figures: Callable[[Answer], Any]) -> None:
    """Both answers have the same figures."""
    found = difference(figures(one), figures(other))
    require(found is None, f"{what}: {found}", one, other)


def require_equivalent(one: Answer, other: Answer, *, what: str) -> None:
    """Both answers have the same figures.

    Two frontiers are equal if each point is matched by a point of the other, up to the epsilon to which both
    are proven. Answers with a gap may differ, but neither may be below the other's lower bound.
    """
    if one.fits and other.fits and "points" in one.document:
        allowed = 1.0 + one.gap + other.gap + REL_TOL
        for some, others in ((figures(one), figures(other)), (figures(other), figures(one))):
            for time_s, nbytes in some:
                is_there = any(a <= time_s * allowed and b <= nbytes * allowed for a, b in others)
                found = f"{what}: {time_s!r} s with {nbytes!r} bytes is in one alone"
                require(is_there, found, one, other)
    elif max(one.gap, other.gap) > REL_TOL and one.fits == other.fits:
        require_not_slower(one, other, what=what)
        require_not_slower(other, one, what=what)
    else:
        require_same(one, other, what=what, figures=figures)


def require_not_slower(better: Answer, worse: Answer, *, what: str, bound_s: float = 0.0) -> None:
    """The best plan of `better` is not slower than that of `worse`, apart from its gap and `bound_s`."""
    limit_s = worse.step_time_s * (1.0 + REL_TOL) + bound_s
    found = (
        f"{what}: {better.step_time_s!r} s (at least {better.lower_bound_s!r}) over {worse.step_time_s!r} s"
    )
    require(better.lower_bound_s <= limit_s, found, better, worse)


def idle_norm_s(question: Question, answer: Answer) -> float:
    """The most by which the estimate of an uneven plan may be too high because of idle devices; 0 for other
    plans.

    The gradient norm takes 2 log2(n) latencies of the outermost tier for n devices. For an uneven plan, n
    counts all devices of its pools, used or not (`cost.lone_stage`), at most those of the cluster.
    """
    is_uneven = answer.fits and not question.is_graph and answer.best["strategy"] is None
    if not is_uneven:
        return 0.0
    latencies = [tier.latency_s for tier in question.cluster.tiers]
    latencies += [find_device(run.device).scale_out_latency_s for run in question.cluster.nodes]
    return 2.0 * log2(2.0 * question.cluster.devices) * max(latencies)


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """The first place where two documents differ by more than rounding; None if there is none."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys((*one, *other)):
            if key not in one or key not in other:
                return f"{place}.{key} is in one alone"
            found = difference(one[key], other[key], f"{place}.{key}")
            if found is not None:
                return found
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return f"{place} has {len(one)} and {len(other)} entries"
        pairs = enumerate(zip(one, other, strict=True))
        return next(
            (found for at, (a, b) in pairs if (found := difference(a, b, f"{place}[{at}]")) is not None), None
        )
    if isinstance(one, float) or isinstance(other, float):
        is_same = (
            one is not None and other is not None and isclose(one, other, rel_tol=REL_TOL, abs_tol=1e-300)
        )
    else:
        is_same = one == other
    return None if is_same else f"{place or 'it'} is {one!r} and {other!r}"


EFFORT = frozenset(
    {
        "search_s",
        "search_cpu_s",
        "rejected",
        "cut_by_bound",
        "simulated",
        "evaluated",
        "partitions",
        "layouts",
    }
)
"""Keys of a certificate about how the answer was found."""

TEXTS = frozenset(
    {"assumptions", "provenance", "sources", "name", "plan_hash", "why", "next", "plans", "part"}
)
"""Keys that name things or give sources."""


def whole(answer: Answer) -> Any:
    """The whole answer without names, the cluster's record, and the search effort."""
    ignored = EFFORT | TEXTS | {"cluster", "device_class", "fastest_class"}
    return _without(answer.document, ignored)


def figures(answer: Answer) -> Any:
    """Times and bytes of the best plan, the runners-up or the points, and what is proven about them."""
    document = answer.document
    if not document:
        return None
    if "points" in document:
        return [(point["time_s"], point["memory_bytes"]) for point in document["points"]]
    return {
        "best": _time_and_bytes(document["best"]),
        "runners_up": [_time_and_bytes(one) for one in document["runners_up"]],
        "is_proven": document["is_proven"],
        "gap": round(answer.gap, 9),
        "devices_used": document["devices_used"],
    }


def _time_and_bytes(result: Mapping[str, Any]) -> tuple[float, float]:
    return result["step_time_s"], result["peak_memory_bytes"]["device"]


def _without(value: Any, ignored: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(each, ignored) for key, each in value.items() if key not in ignored}
    if isinstance(value, list):
        return [_without(each, ignored) for each in value]
    return value
