"""Max-min fairness is certified, and the engine with it equals a simple exact one.

`--full` runs 10,000 random graphs instead of 1,000.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import NamedTuple

import pytest

from shardwise.cluster import Capacity
from shardwise.sim import simulate
from shardwise.sim.engine import Network, Route, Speed, TaskGraph, TaskGraphBuilder, max_min_rates

EXACT = 1e-9

GRAPHS, FULL_GRAPHS = 1_000, 10_000

FULL_SPEED = Speed((0.0,), (1.0,))


def random_route(rng: random.Random, links: int) -> Route:
    chosen = rng.sample(range(links), rng.randint(1, min(links, 4)))
    return tuple(sorted((link, rng.choice([1, 1, 1, 2, 3])) for link in chosen))


def random_capacity(rng: random.Random) -> float:
    return rng.choice([1.0, 2.0, 10.0, 1e9, rng.uniform(0.1, 30.0)])


def check_certificate(routes: list[Route], capacities: list[float], rates: list[float]) -> None:
    """No link is above its capacity, and every flow crosses a full link on which none is faster: the rates
    are max-min fair.
    """
    load = [0.0] * len(capacities)
    fastest = [0.0] * len(capacities)
    for route, rate in zip(routes, rates, strict=True):
        for link, times in route:
            load[link] += rate * times
            fastest[link] = max(fastest[link], rate)
    assert all(used <= residual * (1 + EXACT) for used, residual in zip(load, capacities, strict=True))
    for route, rate in zip(routes, rates, strict=True):
        assert any(
            load[link] >= capacities[link] * (1 - EXACT) and rate >= fastest[link] * (1 - EXACT)
            for link, _ in route
        )


def test_thousands_of_random_networks_are_max_min_fair() -> None:
    rng = random.Random(20)
    for _ in range(3000):
        links = rng.randint(1, 9)
        capacities = [random_capacity(rng) for _ in range(links)]
        routes = [random_route(rng, links) for _ in range(rng.randint(1, 14))]
        check_certificate(routes, capacities, max_min_rates(routes, capacities))


def test_the_certificate_can_fail() -> None:
    routes: list[Route] = [((0, 1),), ((0, 1),)]
    for wrong in ([4.0, 4.0], [6.0, 6.0], [4.0, 6.0]):  # slack, overloaded, unfair
        with pytest.raises(AssertionError):
            check_certificate(routes, [10.0], wrong)


def test_rates_stay_fair_while_flows_start_and_end() -> None:
    """Only rates that can have changed are computed again; the others must still be right."""
    rng = random.Random(21)
    for _ in range(500):
        links = rng.randint(1, 8)
        capacities = [random_capacity(rng) for _ in range(links)]
        flows = 24
        some_routes = [random_route(rng, links) for _ in range(rng.randint(1, 10))]
        routes = [rng.choice(some_routes) for _ in range(flows)]
        network = Network(routes, [1e12] * flows, capacities)
        fresh, alive = list(range(flows)), []
        for instant in range(12):
            for _ in range(rng.randint(1, 4)):
                choice = rng.random()
                if choice < 0.5 and fresh:
                    alive.append(fresh.pop())
                    network.join(alive[-1], float(instant))
                elif choice < 0.75 and alive:
                    network.leave(alive.pop(rng.randrange(len(alive))))
                else:
                    link = rng.randrange(links)
                    capacities[link] = random_capacity(rng)
                    network.set_capacity(link, capacities[link])
            network.reshare(float(instant))
            check_certificate(
                [routes[flow] for flow in alive], capacities, [network.rates[flow] for flow in alive]
            )


class Job(NamedTuple):
    """A task of the exact engine: a delay or, with bytes, a flow after it. A `stream` does one job at a time,
    in order (-1: none). Its delays pass at the `speed` of its device, latencies of flows do not.
    """

    delay: Fraction
    nbytes: Fraction
    route: Route
    after: tuple[int, ...]
    stream: int = -1
    speed: Speed = FULL_SPEED

    def pace(self, now: Fraction) -> Fraction:
        """Seconds of the delay that pass in a second."""
        began = max(place for place, start in enumerate(self.speed.times_s) if start <= now)
        return Fraction(1) if self.route else Fraction(self.speed.factors[began])


def exact_rates(jobs: list[Job], moving: list[int], capacities: list[Fraction]) -> dict[int, Fraction]:
    """Progressive filling in fractions, from scratch."""
    rates: dict[int, Fraction] = {}
    residual = list(capacities)
    while len(rates) < len(moving):
        shares = []
        for link in range(len(residual)):
            weight = sum(
                times for job in moving if job not in rates for on, times in jobs[job].route if on == link
            )
            if weight:
                shares.append((residual[link] / weight, link))
        share, full = min(shares)
        for job in moving:
            if job not in rates and any(on == full for on, _ in jobs[job].route):
                rates[job] = share
                for on, times in jobs[job].route:
                    residual[on] -= share * times
    return rates


def can_run(jobs: list[Job], job: int, ends: dict[int, Fraction]) -> bool:
    """Whether all its dependencies have ended, and all earlier jobs of its stream."""
    earlier = (one for one in range(job) if jobs[one].stream == jobs[job].stream >= 0)
    return all(one in ends for one in (*jobs[job].after, *earlier))


def next_change_s(capacity: Capacity, time_s: float) -> float | None:
    """Time of the first change after `time_s`, or None."""
    return next((change_s for change_s in capacity.times_s if change_s > time_s), None)


def exact_finishes(jobs: list[Job], capacities: list[Capacity]) -> list[float]:
    """Event by event in fractions, with all rates computed again at each event."""
    now = Fraction(0)
    ends: dict[int, Fraction] = {}
    waiting = {job: jobs[job].delay for job in range(len(jobs))}
    left = {job: jobs[job].nbytes for job in range(len(jobs))}
    while len(ends) < len(jobs):
        running = [j for j in range(len(jobs)) if j not in ends and can_run(jobs, j, ends)]
        done = [j for j in running if waiting[j] == 0 and left[j] == 0]
        if done:
            ends.update(dict.fromkeys(done, now))
            continue
        delayed = [j for j in running if waiting[j] > 0]
        moving = [j for j in running if waiting[j] == 0]
        levels = [Fraction(capacity.at(float(now))) for capacity in capacities]
        rates = exact_rates(jobs, moving, levels)
        paces = {j: jobs[j].pace(now) for j in delayed}
        steps = [waiting[j] / paces[j] for j in delayed if paces[j] > 0]
        steps += [left[j] / rates[j] for j in moving if rates[j] > 0]
        changes = (next_change_s(capacity, float(now)) for capacity in capacities)
        steps += [Fraction(change) - now for change in changes if change is not None]
        slowing = (Fraction(start) for j in delayed for start in jobs[j].speed.times_s)
        steps += [start - now for start in slowing if start > now]
        step = min(steps)
        now += step
        for j in delayed:
            waiting[j] -= step * paces[j]
        for j in moving:
            left[j] -= rates[j] * step
    return [float(ends[job]) for job in range(len(jobs))]


def random_jobs(rng: random.Random) -> tuple[list[Job], list[Capacity]]:
    """Small dyadic numbers, so that event times are the same in fractions and in floats."""
    links = rng.randint(1, 4)
    capacities = []
    for _ in range(links):
        changes = rng.randint(0, 3)
        times = (0.0, *sorted(rng.sample([0.5, 1.0, 2.0, 3.5, 4.0, 6.0], changes)))
        values = [rng.choice([0.0, 1.0, 2.0, 3.0, 8.0]) for _ in range(changes)]
        capacities.append(Capacity(times, (*(values), rng.choice([1.0, 2.0, 5.0]))))
    speeds = []
    for _ in range(2):
        times = (0.0, *sorted(rng.sample([0.5, 1.0, 2.0, 3.5], rng.randint(0, 2))))
        slowed = [rng.choice([0.0, 0.25, 0.5, 1.0]) for _ in times[1:]]
        speeds.append(Speed(times, (*slowed, rng.choice([0.5, 1.0]))))
    jobs: list[Job] = []
    for number in range(rng.randint(1, 9)):
        after = tuple(sorted(rng.sample(range(number), rng.randint(0, min(2, number)))))
        delay = Fraction(rng.choice([0, 0, 1, 2, 3]), 2)
        is_flow = rng.random() < 0.75
        route = random_route(rng, links) if is_flow else ()
        nbytes = Fraction(rng.choice([0, 1, 2, 5, 8, 16])) if is_flow else Fraction(0)
        stream = rng.choice([-1, -1, 0, 1])
        speed = speeds[stream] if stream >= 0 else FULL_SPEED
        jobs.append(Job(delay, nbytes, route, after, stream, speed))
    return jobs, capacities


def graph_of(jobs: list[Job], capacities: list[Capacity]) -> TaskGraph:
    builder = TaskGraphBuilder()
    for number, capacity in enumerate(capacities):
        builder.add_link(f"link {number}", capacity)
    for job in jobs:
        builder.set_speed(0, f"stream {job.stream}", job.speed)
    for number, job in enumerate(jobs):
        stream = f"stream {job.stream}" if job.stream >= 0 else ""
        rank = 0 if stream else -1
        delay_s = float(job.delay)
        if job.route:
            route = [link for link, times in job.route for _ in range(times)]
            builder.add_flow(
                f"{number}", float(job.nbytes), route, latency_s=delay_s, rank=rank, stream=stream,
                after=job.after,
            )  # fmt: skip
        else:
            builder.add_task(f"{number}", delay_s, rank=rank, stream=stream, after=job.after)
    return builder.build()


@pytest.mark.slow
def test_the_engine_equals_an_exact_one(full: bool) -> None:
    rng = random.Random(22)
    for _ in range(FULL_GRAPHS if full else GRAPHS):
        jobs, capacities = random_jobs(rng)
        timeline = simulate(graph_of(jobs, capacities))
        expected = exact_finishes(jobs, capacities)
        assert timeline.finish_s.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_bytes_in_are_bytes_out() -> None:
    rng = random.Random(23)
    for _ in range(300):
        jobs, capacities = random_jobs(rng)
        timeline = simulate(graph_of(jobs, capacities), record_rates=True)
        segments: dict[int, list[tuple[float, float]]] = {}
        for flow, when, rate in timeline.rates:
            segments.setdefault(flow, []).append((when, rate))
        for number, job in enumerate(jobs):
            parts = segments.get(number, [])
            ends = [*(when for when, _ in parts[1:]), float(timeline.finish_s[number])]
            moved = sum(rate * (end - when) for (when, rate), end in zip(parts, ends, strict=False))
            assert moved == pytest.approx(float(job.nbytes), rel=1e-9, abs=1e-9)


def test_the_same_graph_gives_the_same_run() -> None:
    rng = random.Random(24)
    for _ in range(50):
        jobs, capacities = random_jobs(rng)
        hashes = {simulate(graph_of(jobs, capacities)).trace_hash for _ in range(3)}
        assert len(hashes) == 1


def test_twice_the_capacity_is_half_the_time() -> None:
    """Where only bytes take time and capacities are constant."""
    rng = random.Random(25)
    for _ in range(100):
        jobs, _ = random_jobs(rng)
        jobs = [job._replace(delay=Fraction(0)) for job in jobs]
        values = [rng.uniform(1.0, 9.0) for _ in range(4)]
        slow = simulate(graph_of(jobs, [Capacity.constant(value) for value in values]))
        fast = simulate(graph_of(jobs, [Capacity.constant(2 * value) for value in values]))
        assert (fast.finish_s * 2).tolist() == pytest.approx(slow.finish_s.tolist(), rel=1e-12)
