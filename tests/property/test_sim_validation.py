"""Steps of the simulator's validation: closed forms of collectives, invariants of any run, and a search for
the largest difference between the estimate of a pipeline and the engine with the same links.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from tests.property.test_sim_network import Job, graph_of, random_jobs

from shardwise.cluster import Capacity
from shardwise.equations import comm
from shardwise.schedule import generate
from shardwise.sim import Durations, Timeline, makespan_s, simulate, task_graph
from shardwise.sim.engine import FlowLink, TaskGraphBuilder
from shardwise.sim.schedule_tasks import Transfers


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("nbytes", [0.0, 1.0, 3e8])
def test_a_ring_all_reduce_takes_alpha_and_beta(ranks: int, nbytes: float) -> None:
    """2 (p - 1) rounds, in each of which every rank sends one of p parts to the next, one round after
    another: alpha and n / p bytes each, so 2 (p - 1) (alpha + n / (p B)) in total, as in the equations.
    """
    alpha_s, rate = 5e-6, 25e9
    builder = TaskGraphBuilder()
    links = [builder.add_link(f"{rank}>", Capacity.constant(rate)) for rank in range(ranks)]
    before: list[int] = []
    for step in range(2 * (ranks - 1)):
        before = [
            builder.add_flow(f"{step} {rank}", nbytes / ranks, [link], latency_s=alpha_s, after=before)
            for rank, link in enumerate(links)
        ]
    expected_s = 2 * (ranks - 1) * (alpha_s + nbytes / ranks / rate)
    assert simulate(builder.build()).makespan_s == pytest.approx(expected_s, rel=1e-9)
    once_s = float(comm.all_gather_s(nbytes, (ranks,), (alpha_s,), (rate,)))
    assert 2.0 * once_s == pytest.approx(expected_s, rel=1e-9)


def longest_path_s(jobs: list[Job], fastest: list[float]) -> float:
    """The critical path: every job alone with its delay, and its bytes at the highest rate of its links."""
    ends: list[float] = []
    for job in jobs:
        moving_s = max((float(job.nbytes) * times / fastest[link] for link, times in job.route), default=0.0)
        ends.append(max((ends[one] for one in job.after), default=0.0) + float(job.delay) + moving_s)
    return max(ends)


def loads(timeline: Timeline, jobs: list[Job]) -> list[tuple[float, dict[int, float]]]:
    """The load of each link from every instant at which a rate changes or a flow ends."""
    rates: dict[int, float] = {}
    changes: dict[float, list[tuple[int, float]]] = defaultdict(list)
    for flow, when, rate in timeline.rates:
        changes[when].append((flow, rate))
    for number, job in enumerate(jobs):
        if job.route:
            changes[float(timeline.finish_s[number])].append((number, 0.0))
    found = []
    for when in sorted(changes):
        for flow, rate in sorted(changes[when], key=lambda one: one[1]):
            is_over = when >= float(timeline.finish_s[flow])
            rates[flow] = 0.0 if is_over else rate
        carried: dict[int, float] = defaultdict(float)
        for flow, rate in rates.items():
            for link, times in jobs[flow].route:
                carried[link] += rate * times
        found.append((when, dict(carried)))
    return found


def test_no_run_beats_its_longest_path_or_its_links() -> None:
    """The makespan is no less than the critical path; no link is above its capacity at any instant."""
    rng = random.Random(51)
    seen = 0
    for _ in range(300):
        jobs, capacities = random_jobs(rng)
        timeline = simulate(graph_of(jobs, capacities), record_rates=True)
        fastest = [max(capacity.bytes_per_s) for capacity in capacities]
        assert timeline.makespan_s >= longest_path_s(jobs, fastest) * (1 - 1e-9)
        for when, carried in loads(timeline, jobs):
            for link, load in carried.items():
                seen += load > 0.0
                assert load <= capacities[link].at(when) * (1 + 1e-9) + 1e-9
    assert seen > 300


Values = dict[str, list[float]]


def random_durations(rng: random.Random, pp: int) -> Values:
    lengths = {
        "forward_s": pp, "backward_s": pp, "gather_s": pp, "reduce_s": pp,
        "hop_forward_s": pp - 1, "hop_backward_s": pp - 1,
    }  # fmt: skip
    return {
        name: [rng.choice([0.5, 1.0, rng.uniform(0.01, 3.0)]) for _ in range(count)]
        for name, count in lengths.items()
    }


def durations_of(pp: int, values: Values) -> Durations:
    columns: dict[str, Any] = dict(values)
    return Durations.of(stages=pp, **columns)


def step_s(name: str, pp: int, microbatches: int, values: Values) -> float:
    durations = durations_of(pp, values)
    counts = np.array([microbatches])
    return float(makespan_s(name, pp=pp, microbatches=counts, vpp=1, durations=durations)[0])


def test_a_step_is_no_shorter_than_its_busiest_rank_and_its_longest_way() -> None:
    rng = random.Random(52)
    for _ in range(200):
        pp, microbatches, values = rng.randint(2, 5), rng.randint(1, 9), random_durations(rng, 5)
        values = random_durations(rng, pp)
        whole_s = step_s(rng.choice(["gpipe", "1f1b"]), pp, microbatches, values)
        works = zip(values["forward_s"], values["backward_s"], strict=True)
        assert whole_s >= max(microbatches * (forward + backward) for forward, backward in works) * (
            1 - 1e-12
        )
        ways = ("forward_s", "backward_s", "hop_forward_s", "hop_backward_s")
        assert whole_s >= sum(sum(values[name]) for name in ways) * (1 - 1e-12)


def test_shorter_actions_make_no_step_longer() -> None:
    """The table fixes the order of actions; a scheduler with a new order could become slower (Graham)."""
    rng = random.Random(53)
    for _ in range(200):
        pp, microbatches = rng.randint(2, 5), rng.randint(1, 9)
        name, values = rng.choice(["gpipe", "1f1b", "zb_h1"]), random_durations(rng, pp)
        changed = rng.choice(sorted(values))
        less = {**values, changed: [one * rng.choice([1.0, rng.random()]) for one in values[changed]]}
        whole_s = step_s(name, pp, microbatches, values)
        assert step_s(name, pp, microbatches, less) <= whole_s * (1 + 1e-12)


def on_links_s(pp: int, microbatches: int, values: Values) -> float:
    """The same 1F1B step with every hop as a message on its own link, one per direction, that carries one
    message in the time of the hop; concurrent messages share it.
    """
    hops = [*values["hop_forward_s"], *values["hop_backward_s"]]
    none = [0.0] * (pp - 1)
    transfers = Transfers(
        links=tuple(FlowLink(f"{place}", Capacity.constant(1.0 / hop)) for place, hop in enumerate(hops)),
        forward_bytes=[1.0] * (pp - 1),
        backward_bytes=[1.0] * (pp - 1),
        forward_routes=[[place] for place in range(pp - 1)],
        backward_routes=[[place] for place in range(pp - 1, 2 * pp - 2)],
    )
    durations = durations_of(pp, {**values, "hop_forward_s": none, "hop_backward_s": none})
    schedule = generate("1f1b", pp=pp, microbatches=microbatches, vpp=1)
    return simulate(task_graph(schedule, durations, transfers=transfers)).makespan_s


def test_messages_shorter_than_actions_cost_the_same_as_on_links() -> None:
    rng = random.Random(54)
    for _ in range(60):
        pp, microbatches = rng.randint(2, 4), rng.randint(1, 8)
        values = random_durations(rng, pp)
        for name in ("forward", "backward"):
            least = min(values[f"{name}_s"])
            values[f"hop_{name}_s"] = [min(hop, least) for hop in values[f"hop_{name}_s"]]
        assert on_links_s(pp, microbatches, values) == pytest.approx(
            step_s("1f1b", pp, microbatches, values), rel=1e-9
        )


@pytest.mark.slow
def test_an_adversary_finds_where_messages_queue() -> None:
    """Hill climbing over durations for the step whose estimate is furthest below the engine's. Messages queue
    where hops take longer than the actions next to them; the estimate lets such hops overlap. 1F1B has at
    most pp of them under way, so the estimate is at most pp times too small.
    """
    rng = random.Random(55)
    pp, microbatches = 4, 12
    worst = 1.0
    for _ in range(4):
        values = random_durations(rng, pp)
        ratio = on_links_s(pp, microbatches, values) / step_s("1f1b", pp, microbatches, values)
        for _ in range(120):
            changed = rng.choice(sorted(values))
            place, factor = rng.randrange(len(values[changed])), rng.choice([0.3, 0.7, 1.5, 4.0])
            tried = {**values, changed: [*values[changed]]}
            tried[changed][place] = min(max(tried[changed][place] * factor, 1e-3), 10.0)
            on_links = on_links_s(pp, microbatches, tried)
            predicted_s = step_s("1f1b", pp, microbatches, tried)
            assert on_links >= predicted_s * (1 - 1e-9)
            if on_links / predicted_s > ratio:
                values, ratio = tried, on_links / predicted_s
        worst = max(worst, ratio)
    assert 1.5 < worst <= pp
