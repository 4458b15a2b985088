"""A small job on nodes of two devices, with a planner that has priced and searched it once for all tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from shardwise.cluster import Cluster, ClusterEvent, Conditions, EventTrace, NodeView, load_cluster
from shardwise.model import load_model
from shardwise.replan import Arrangement, Costs, Planner, Prices, Situation, planner_of, situation_of
from shardwise.search import Question, default_job, plan


class Job:
    """A model on a cluster, its best plan as it runs, and situations after events."""

    def __init__(self, model: str, cluster: Cluster, batch: int, seq_len: int) -> None:
        self.cluster = cluster
        self.model = load_model(model)
        self.job = default_job(self.model, self.cluster, seq_len=seq_len, global_batch_size=batch)
        self.planner: Planner = planner_of(Prices(self.model, self.cluster, self.job), Costs())
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


@cache
def job(model: str, cluster: str, batch: int) -> Job:
    """The same for all tests: what it has priced stays."""
    return Job(model, load_cluster(cluster), batch, 512)


@cache
def tight_job(memory_bytes: int, count: int = 12) -> Job:
    """So many nodes of one device each with little memory, and next to none on the host."""
    cluster = load_cluster(f"{count}x1xT4")
    device = replace(cluster.classes["T4"], memory_bytes=memory_bytes)
    nodes = (replace(cluster.nodes[0], host_memory_bytes=1e8),) * count
    return Job("opt-350m", replace(cluster, classes={"T4": device}, nodes=nodes), 24, 512)
