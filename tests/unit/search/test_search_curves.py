"""Curves of time against memory and the picks of the modes, compared with candidates enumerated one
by one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from tests.property.search_space_reference import SpaceTwin, first_reason

from shardwise.cluster import Cluster, load_cluster, part_of, part_sizes
from shardwise.cost import peaks_of
from shardwise.errors import Infeasible
from shardwise.model import model_from_config
from shardwise.plans import Idle
from shardwise.search import (
    Curve,
    Point,
    Question,
    Reference,
    StrategyCurve,
    StrategyCurves,
    answer_at,
    chosen,
    curves_for,
    evaluate,
    points_of,
    smallest,
)
from shardwise.search.bnb.solver import Progress
from shardwise.search.curves import doubled
from shardwise.search.step_times import step_times_s
from shardwise.search.strategy_curves import margin_between
from shardwise.strategy import Job, Strategy, StrategyTable

LAYERS, BATCH = 4, 6
MODEL = model_from_config(
    {
        "layers": LAYERS,
        "hidden": 3072,
        "ffn": 12288,
        "heads": 12,
        "kv_heads": 6,
        "vocab": 50_257,
        "seq_len": 4096,
    }
)
CLUSTER = load_cluster("2x3xA100-40G")
JOB = Job(seq_len=1536, global_batch_size=BATCH, dtype="bf16")
QUESTION = Question(model=MODEL, cluster=CLUSTER, job=JOB, space="core")
SIZES = part_sizes(CLUSTER)

Own = tuple[float, float, int]
"""Seconds, bytes, devices."""


def enumerated(devices: int) -> tuple[Own, ...]:
    """Every legal candidate that fits on a part of the cluster."""
    usable = QUESTION.problem().usable_bytes
    return tuple(point for point in every(devices) if point[1] <= usable)


@cache
def every(devices: int) -> tuple[Own, ...]:
    """Every legal candidate, whether it fits or not."""
    problem = replace(QUESTION, cluster=part_of(CLUSTER, devices)).problem()
    twin = SpaceTwin(core=True, devices=devices, layers=LAYERS, moe=False, batch=BATCH)
    table = StrategyTable.of([s for s in twin.candidates() if first_reason(s, problem.limits) is None])
    times_s, nbytes = step_times_s(problem, table), peaks_of(problem, table).device_bytes
    rows = zip(times_s.tolist(), nbytes.tolist(), strict=True)
    return tuple((time_s, resident, devices) for time_s, resident in rows)


def undominated(points: Sequence[Own]) -> list[Own]:
    """The non-dominated candidates by the quadratic definition, one of equals."""
    return sorted(
        {
            point
            for point in points
            if not any(
                other[:2] != point[:2] and other[0] <= point[0] and other[1] <= point[1] for other in points
            )
        }
    )


def own(points: Sequence[Point[Strategy]]) -> list[Own]:
    return [(point.time_s, point.memory_bytes, point.devices) for point in points]


def test_the_parts_are_those_of_the_cluster() -> None:
    assert StrategyCurves(QUESTION).sizes == SIZES == (1, 2, 3, 6)
    assert doubled(SIZES, 6) == (1, 2, 6)
    assert doubled((1, 2, 3, 4, 6, 8), 8) == (1, 2, 4, 8)
    assert doubled((3, 6), 8) == ()


@pytest.mark.parametrize("devices", SIZES)
def test_a_curve_is_the_frontier_of_all_candidates(devices: int) -> None:
    curve = StrategyCurves(QUESTION).curve(part_of(CLUSTER, devices))
    expected = undominated(enumerated(devices))
    assert own(curve.points) == [pytest.approx(point, rel=1e-12) for point in expected]
    assert len(curve.points) > 3
    assert (curve.devices, curve.epsilon) == (devices, 0.0)
    ledger = curve.outcome.ledger
    assert curve.outcome.enumerated == sum(ledger.rejected.values()) + ledger.pruned + ledger.simulated
    # A part keeps the price of its node: 3 devices cost as much per hour as 1.
    per_second = part_of(CLUSTER, devices).price_usd_per_hour
    assert per_second is not None
    for point in curve.points:
        assert point.cost_usd == pytest.approx(point.time_s * per_second / 3600, rel=1e-12)
        assert point.device_s == devices * point.time_s
        cluster = part_of(CLUSTER, devices)
        assert evaluate(MODEL, cluster, JOB, point.layout).step_time_s == pytest.approx(
            point.time_s, rel=1e-12
        )


def limits() -> list[float]:
    """No limit, limits between points, on points, and just below the smallest of each count."""
    found = [inf]
    for devices in SIZES:
        resident = sorted(nbytes for _, nbytes, _ in undominated(enumerated(devices)))
        found += [
            resident[0],
            resident[0] * (1 - 1e-9),
            resident[len(resident) // 2],
            (resident[0] + resident[1]) / 2,
            resident[-1],
        ]
    return found


def by_definition(mode: str, limit_bytes: float, sizes: Sequence[int]) -> Own | None:
    """The pick from all candidates, not only those of the frontier."""
    fitting = [
        (time_s, resident, devices)
        for size in sizes
        for time_s, resident, devices in enumerated(size)
        if resident <= limit_bytes
    ]
    if not fitting:
        return None
    if mode == "devices":
        fewest = min(devices for *_, devices in fitting)
        fitting = [point for point in fitting if point[2] == fewest]
    return min(fitting)


def picked(mode: str, limit_bytes: float, sizes: tuple[int, ...] | None) -> Own | None:
    curves = curves_for(CURVES, mode=mode, sizes=sizes, limit_bytes=limit_bytes)
    pick = chosen(points_of(curves, weighs_cost=False), mode=mode, limit_bytes=limit_bytes)
    return None if pick is None else own([pick])[0]


class _Remembered:
    """Curves that are searched once per question."""

    cluster, sizes = CLUSTER, SIZES

    def __init__(self) -> None:
        self._curves: dict[int, StrategyCurve] = {}

    def parts(self, devices: int | None) -> tuple[Cluster, ...]:
        return (CLUSTER if devices is None else part_of(CLUSTER, devices),)

    def idle_of(self, part: Cluster) -> Idle:
        raise AssertionError

    def require(self, sizes: Sequence[int] | None) -> None:
        assert set(sizes or ()) <= set(SIZES)

    def curve(
        self, part: Cluster, *, epsilon: float = 0.0, progress: Progress | None = None
    ) -> StrategyCurve:
        if part.devices not in self._curves:
            self._curves[part.devices] = StrategyCurves(QUESTION).curve(part)
        return self._curves[part.devices]

    def references(self, part: Cluster) -> tuple[Reference[Strategy], ...]:
        raise AssertionError

    def nothing_fits(self, curve: Curve[Strategy]) -> Infeasible:
        raise AssertionError

    def closest(self, curve: Curve[Strategy]) -> Point[Strategy] | None:
        raise AssertionError


CURVES = _Remembered()


@pytest.mark.parametrize("mode", ["time", "devices"])
def test_the_picks_are_the_best_of_all_candidates(mode: str) -> None:
    wrong_without_limit = 0
    for limit_bytes in limits():
        for sizes in (None, SIZES, (2, 3)):
            counts = sizes or (SIZES[-1:] if mode == "time" else SIZES)
            expected = by_definition(mode, limit_bytes, counts)
            found = picked(mode, limit_bytes, sizes)
            assert found == (None if expected is None else pytest.approx(expected, rel=1e-12))
            # The mutant: without the limit, some pick differs.
            points = points_of(curves_for(CURVES, mode=mode, sizes=sizes, limit_bytes=inf), weighs_cost=False)
            without_limit = chosen(points, mode=mode, limit_bytes=inf)
            wrong_without_limit += without_limit is not None and own([without_limit])[0] != found
    assert wrong_without_limit > 3


def test_the_mode_devices_stops_where_something_fits() -> None:
    least = min(resident for _, resident, _ in enumerated(1))
    assert [curve.devices for curve in curves_for(CURVES, mode="devices", sizes=None, limit_bytes=least)] == [
        1
    ]
    tighter = curves_for(CURVES, mode="devices", sizes=None, limit_bytes=least * 0.99)
    assert len(tighter) > 1 and picked("devices", least * 0.99, None) is not None
    whole = curves_for(CURVES, mode="devices", sizes=SIZES, limit_bytes=inf)
    assert [curve.devices for curve in whole] == list(SIZES)


def test_the_mode_profile_makes_no_choice() -> None:
    curves = curves_for(CURVES, mode="profile", sizes=None, limit_bytes=inf)
    assert [curve.devices for curve in curves] == [1, 2, 6]
    points = points_of(curves, weighs_cost=False)
    assert chosen(points, mode="profile", limit_bytes=inf) is None
    assert len(points) == sum(len(curve.points) for curve in curves)
    assert own([smallest(points)])[0][1] == min(resident for _, resident, _ in own(points))


def test_cost_compares_device_counts() -> None:
    curves = curves_for(CURVES, mode="profile", sizes=SIZES, limit_bytes=inf)
    points = points_of(curves, weighs_cost=False)

    def figures(point: Point[Strategy]) -> tuple[float, float, float]:
        assert point.cost_usd is not None
        return point.time_s, point.memory_bytes, point.cost_usd

    expected = [
        point
        for place, point in enumerate(points)
        if not any(
            figures(other) != figures(point)
            and all(a <= b for a, b in zip(figures(other), figures(point), strict=True))
            for other in points
        )
        and figures(point) not in [figures(other) for other in points[:place]]
    ]
    assert list(points_of(curves, weighs_cost=True)) == expected
    # One device of a node costs as much as three, so three are better in everything; six cost more, and stay.
    assert 3 <= len(expected) < len(points)
    assert {point.devices for point in expected} == {3, 6}
    # With one device count, cost is proportional to time: nothing changes.
    (curve,) = curves_for(CURVES, mode="profile", sizes=(3,), limit_bytes=inf)
    assert points_of([curve], weighs_cost=True) == curve.points


@pytest.mark.parametrize("seed", range(200))
def test_a_margin_separates_two_sizes(seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.uniform(1e9, 2e11)
    larger = capacity * rng.uniform(0.01, 1.0)
    nbytes = larger * (1 - 10.0 ** -rng.uniform(0.05, 8.0))
    margin = margin_between(nbytes, larger, capacity)
    assert 0.0 <= margin < 1.0
    assert nbytes <= capacity * (1.0 - margin) < larger


def test_a_margin_has_few_digits() -> None:
    # 40 of 100 may be used, 50 not: 0.59 is the largest two-digit margin that leaves a little more than 40.
    assert margin_between(40.0, 50.0, 100.0) == 0.59
    # 40.02 would just fit under a margin of 0.5998.
    assert margin_between(40.01, 40.02, 100.0) == 0.59989


def test_each_point_is_the_answer_to_a_question_of_its_own() -> None:
    curve = StrategyCurves(QUESTION).curve(part_of(CLUSTER, 3))
    for place, point in enumerate(curve.points):
        question, answer = answer_at(curve, place)
        usable = question.problem().usable_bytes
        fastest = min(one for one in enumerated(3) if one[1] <= usable)
        assert answer.best.step_time_s == pytest.approx(fastest[0], rel=1e-12)
        assert answer.best.strategy == point.layout
        assert answer.is_proven
        assert (question.job.memory_margin == JOB.memory_margin) == (place == 0)


def test_a_frontier_without_a_fitting_point_has_its_reasons() -> None:
    classes = {name: replace(device, memory_bytes=2**30) for name, device in CLUSTER.classes.items()}
    tiny = StrategyCurves(replace(QUESTION, cluster=replace(CLUSTER, classes=classes)))
    curve = tiny.curve(part_of(tiny.cluster, 2))
    assert curve.points == () and curve.knee is None
    assert curve.outcome.enumerated == sum(curve.outcome.ledger.rejected.values())
    assert "memory binds" in tiny.nothing_fits(curve).message
    closest = tiny.closest(curve)
    assert closest is not None and closest.devices == 2
    assert closest.memory_bytes == pytest.approx(min(resident for _, resident, _ in every(2)), rel=1e-12)
