"""Speed of the simulator, per CPU second of one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from shardwise.cluster import Capacity
from shardwise.schedule import NAMES, generate
from shardwise.schedule.legality import illegal_reason
from shardwise.sim import Durations, makespan_s, simulate, task_graph
from shardwise.sim.engine import FlowLink, TaskGraph, TaskGraphBuilder
from shardwise.sim.maxplus import compile_schedule
from shardwise.sim.schedule_tasks import Transfers
from shardwise.sim.steady import steady_schedule

_SECONDS = 1.0


def figures() -> dict[str, float]:
    """Rates per CPU second, and CPU milliseconds, by name."""
    return {**max_plus_figures(), **long_step_figures(), **engine_figures()}


def cpu_s(work: Callable[[], object], seconds: float = _SECONDS) -> float:
    """Mean CPU seconds of the calls within `seconds`, after one warm-up call."""
    work()
    calls = 0
    start = time.process_time()
    while time.process_time() - start < seconds:
        work()
        calls += 1
    return (time.process_time() - start) / calls


def random_durations(stages: int, batch: int, seed: int = 1) -> Durations:
    """Random durations: all stages and hops differ."""
    rng = np.random.default_rng(seed)

    def rows(width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return rng.uniform(0.5, 2.0, (batch, width))

    return Durations(
        forward_s=rows(stages),
        backward_s=rows(stages),
        backward_input_s=rows(stages),
        backward_weight_s=rows(stages),
        gather_s=rows(stages),
        reduce_s=rows(stages),
        hop_forward_s=rows(stages - 1),
        hop_backward_s=rows(stages - 1),
    )


def different_tables(count: int) -> list[tuple[str, int, int, int]]:
    """`count` different schedules with pp 2 to 16, up to 64 micro-batches and vpp 1 to 4; deterministic."""
    rng = random.Random(5)
    tables: dict[tuple[str, int, int, int], None] = {}
    while len(tables) < count:
        name, pp, vpp = rng.choice(NAMES), rng.randint(2, 16), rng.randint(1, 4)
        table = (name, pp, rng.randint(1, 64), vpp)
        if illegal_reason(*table) is None:
            tables[table] = None
    return list(tables)


def max_plus_figures() -> dict[str, float]:
    """Speed of max-plus evaluation: one table for 512 cases at once, and 50 tables that are generated,
    compiled and evaluated for 1 case and for 20 cases.
    """
    compiled = compile_schedule(generate("1f1b", pp=16, microbatches=64, vpp=1))
    batch = random_durations(16, 512)
    tables = different_tables(50)
    found = {"max_plus_batched_steps_per_s": 512 / cpu_s(lambda: compiled.makespan_s(batch))}
    for cases in (1, 20):
        durations = [random_durations(pp * vpp, cases) for _, pp, _, vpp in tables]

        def evaluated(durations: list[Durations] = durations) -> None:
            for (name, pp, microbatches, vpp), rows in zip(tables, durations, strict=True):
                compile_schedule(generate(name, pp=pp, microbatches=microbatches, vpp=vpp)).makespan_s(rows)

        found[f"max_plus_50_tables_of_{cases}_steps_per_s"] = 50 * cases / cpu_s(evaluated)
    return found


def long_step_figures() -> dict[str, float]:
    """Time of 1F1B with pp 8 and 1536 micro-batches: compiled in full, and by its steady state with warm and
    with cold caches.
    """
    one = random_durations(8, 1)

    def cold() -> None:
        steady_schedule.cache_clear()
        warm()

    def warm() -> None:
        makespan_s("1f1b", pp=8, microbatches=1536, vpp=1, durations=one)

    table = generate("1f1b", pp=8, microbatches=1536, vpp=1)
    return {
        "max_plus_compile_24576_actions_ms": 1e3 * cpu_s(lambda: compile_schedule(table).rows),
        "max_plus_1536_microbatches_ms": 1e3 * cpu_s(warm),
        "max_plus_1536_microbatches_cold_ms": 1e3 * cpu_s(cold),
    }


def engine_figures() -> dict[str, float]:
    """Events per CPU second: without shared links, with hops over shared links, with rings over shared
    network cards, and with random traffic."""
    graphs = {
        "pipeline": pipeline_graph(shared=False),
        "shared_hops": pipeline_graph(shared=True),
        "shared_rings": ring_graph(),
        "random_traffic": random_traffic_graph(),
    }
    return {f"engine_{name}_events_per_s": events_per_s(graph) for name, graph in graphs.items()}


def events_per_s(graph: TaskGraph) -> float:
    """Events (starts and ends of tasks, changes of rates) per CPU second."""
    return simulate(graph).events / cpu_s(lambda: simulate(graph))


def pipeline_graph(*, shared: bool) -> TaskGraph:
    """1F1B with pp 16 and 64 micro-batches. Where links are `shared`, hops use one of four network cards per
    direction and end."""
    schedule = generate("1f1b", pp=16, microbatches=64, vpp=1)
    durations = random_durations(16, 1)
    if not shared:
        return task_graph(schedule, durations)
    transfers = Transfers(
        links=tuple(FlowLink(f"card {number}", Capacity.constant(10.0)) for number in range(8)),
        forward_bytes=[8.0] * 15,
        backward_bytes=[8.0] * 15,
        forward_routes=[[edge % 4, 4 + (edge + 1) % 4] for edge in range(15)],
        backward_routes=[[4 + edge % 4, (edge + 1) % 4] for edge in range(15)],
    )
    return task_graph(schedule, durations, transfers=transfers)


def ring_graph() -> TaskGraph:
    """8 concurrent rings through 8 nodes, each with 60 consecutive collectives of random size."""
    rng = random.Random(6)
    builder = TaskGraphBuilder()
    cards = [
        builder.add_link(f"node {node} {direction}", 50.0) for node in range(8) for direction in ("out", "in")
    ]
    for round_index in range(60):
        for ring in range(8):
            nbytes = rng.uniform(10.0, 100.0)
            builder.add_flow(
                f"ring {ring}, {round_index}", nbytes, cards, latency_s=0.1, rank=ring, stream="communication"
            )
    return builder.build()


def random_traffic_graph() -> TaskGraph:
    """64 hosts below 8 switches with 4:1 oversubscription, and 2,000 random flows, 32 at a time."""
    rng = random.Random(7)
    builder = TaskGraphBuilder()
    host = [
        [builder.add_link(f"host {number} {direction}", 10.0) for number in range(64)]
        for direction in ("up", "down")
    ]
    switch = [
        [builder.add_link(f"switch {number} {direction}", 20.0) for number in range(8)]
        for direction in ("up", "down")
    ]
    for flow in range(2000):
        source, target = rng.sample(range(64), 2)
        route = [host[0][source], host[1][target]]
        if source // 8 != target // 8:
            route += [switch[0][source // 8], switch[1][target // 8]]
        nbytes = rng.uniform(1.0, 20.0)
        builder.add_flow(
            f"flow {flow}", nbytes, route, latency_s=0.01, rank=flow % 32, stream="communication"
        )
    return builder.build()
