"""A small job on nodes of two devices, with a planner whose estimates and searches are shared by
all tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from shardwise.cluster import (
    Cluster,
    Conditions,
    EventTrace,
    LinkChange,
    NodeJoined,
    NodeLost,
    NodeView,
    Notice,
    Slowdown,
    link_graph,
    load_cluster,
)
from shardwise.cluster.events import ClusterEvent, first_invalid_event
from shardwise.model import load_model
from shardwise.replanning import (
    Arrangement,
    Costs,
    Planner,
    PlansBySize,
    Prices,
    mixed_planner_of,
    planner_of,
)
from shardwise.replanning.mixed_planner import MixedPlanner
from shardwise.replanning.situation import Situation, situation_of
from shardwise.search import Question, default_job, plan

HOUR_S = 3600.0


class Job:
    """A model on a cluster, its best plan as it runs, and situations after events."""

    def __init__(self, model: str, cluster: Cluster, batch: int, seq_len: int) -> None:
        self.cluster = cluster
        self.model = load_model(model)
        self.job = default_job(self.model, self.cluster, seq_len=seq_len, global_batch_size=batch)
        self.planner: Planner = planner_of(Prices(self.model, self.cluster, self.job), Costs())
        self.mixed: MixedPlanner = mixed_planner_of(self.planner, PlansBySize)
        self.view = NodeView(self.cluster)

    def situation(self, events: Iterable[ClusterEvent] = ()) -> Situation:
        conditions = Conditions.at_start(EventTrace(nodes=len(self.cluster.nodes), events=()))
        for event in events:
            conditions = conditions.after(event)
        return situation_of(self.view, conditions)

    def best(self) -> tuple[Arrangement, float]:
        """The best plan on all nodes, and its step time by the search."""
        question = Question(model=self.model, cluster=self.cluster, job=self.job, top=0)
        answer = plan(question)
        slots = tuple(f"n{index}" for index in range(len(self.cluster.nodes)))
        arrangement = self.planner.steps.balanced(answer.best.strategy, slots, self.situation())
        if arrangement is None:
            raise AssertionError("the best plan does not run")
        return arrangement, answer.best.step_time_s


def trace_at_random(cluster: Cluster, rng: random.Random, hours: float) -> EventTrace:
    """Events of all kinds, some in bursts."""
    nodes = len(cluster.nodes)
    links = [link for link in link_graph(cluster) if link.name.startswith("n") and ">s" in link.name]
    there, now = {f"n{index}" for index in range(nodes)}, 0.0
    events: list[ClusterEvent] = []
    while now < hours * HOUR_S and len(events) < 40:
        now += rng.choice([0.0, 5.0, rng.expovariate(1 / 900.0)])
        gone = sorted({f"n{index}" for index in range(nodes)} - there)
        kind = rng.choice(["lost", "joined", "slow", "link", "notice"])
        if kind == "lost" and there:
            node = rng.choice(sorted(there))
            there.discard(node)
            events.append(NodeLost(time_s=now, node=node))
        elif kind == "joined" and gone:
            node = rng.choice(gone)
            there.add(node)
            events.append(NodeJoined(time_s=now, node=node))
        elif kind == "slow":
            where = f"n{rng.randrange(nodes)}"
            events.append(Slowdown(time_s=now, where=where, speed=rng.choice([1.0, rng.uniform(0.2, 1.0)])))
        elif kind == "notice" and there:
            events.append(Notice(time_s=now, node=rng.choice(sorted(there)), lost_at_s=now + 120.0))
        else:
            link = rng.choice(links)
            rate = link.capacity.at(0.0) * rng.choice([1.0, rng.uniform(0.01, 1.0)])
            events.append(LinkChange(time_s=now, link=link.name, bytes_per_s=rate))
    trace = EventTrace(nodes=nodes, events=tuple(events))
    assert first_invalid_event(trace) is None
    return trace


@cache
def job(model: str, cluster: str, batch: int) -> Job:
    """One job for all tests, which keeps its estimates."""
    return Job(model, load_cluster(cluster), batch, 512)


@cache
def tight_job(memory_bytes: int, count: int = 12) -> Job:
    """`count` nodes of one device each with little memory, and almost none on the host."""
    cluster = load_cluster(f"{count}x1xT4")
    device = replace(cluster.classes["T4"], memory_bytes=memory_bytes)
    nodes = (replace(cluster.nodes[0], host_memory_bytes=1e8),) * count
    return Job("opt-350m", replace(cluster, classes={"T4": device}, nodes=nodes), 24, 512)
