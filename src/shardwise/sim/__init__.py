"""Simulation of a training step: the max-plus evaluator, the event engine, timelines and traces."""

from shardwise.sim.engine import COMMUNICATION, COMPUTE, DATA_PARALLEL, Timeline, simulate
from shardwise.sim.gantt import GANTT_LABELS, gantt
from shardwise.sim.maxplus import Durations, rerouted_s
from shardwise.sim.rank_times import RankTimes, rank_times, union_s
from shardwise.sim.schedule_tasks import activation_bytes, task_graph
from shardwise.sim.steady import makespan_s
from shardwise.sim.traces import (
    BLOCKS,
    OPERATORS,
    TRAFFIC,
    Arrow,
    Counter,
    Span,
    Trace,
    read_trace,
    trace_of,
    write_trace,
)

__all__ = [
    "BLOCKS",
    "COMMUNICATION",
    "COMPUTE",
    "DATA_PARALLEL",
    "GANTT_LABELS",
    "OPERATORS",
    "TRAFFIC",
    "Arrow",
    "Counter",
    "Durations",
    "RankTimes",
    "Span",
    "Timeline",
    "Trace",
    "activation_bytes",
    "gantt",
    "makespan_s",
    "rank_times",
    "read_trace",
    "rerouted_s",
    "simulate",
    "task_graph",
    "trace_of",
    "union_s",
    "write_trace",
]
