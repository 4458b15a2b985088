"""How long a training step takes, instant by instant: max-plus, the event engine, timelines and traces."""

from shardwise.sim.durations import Durations
from shardwise.sim.engine import Timeline, simulate
from shardwise.sim.gantt import gantt
from shardwise.sim.maxplus import ActionTimes, CompiledSchedule, compile_schedule
from shardwise.sim.network import max_min_rates
from shardwise.sim.over_time import links_over_time, speeds_over_time
from shardwise.sim.pipeline import Transfers, activation_bytes, task_graph
from shardwise.sim.read_trace import read_trace
from shardwise.sim.rerouted import rerouted_s
from shardwise.sim.ring_order import RingOrder, ring_order
from shardwise.sim.spans import BLOCKS, OPERATORS, TRAFFIC, Arrow, Counter, Span, Trace, trace_of
from shardwise.sim.steady import compiled_schedule, makespan_s
from shardwise.sim.task_graph import (
    COMMUNICATION,
    COMPUTE,
    DATA_PARALLEL,
    FlowLink,
    Speed,
    TaskGraph,
    TaskGraphBuilder,
)
from shardwise.sim.trace import write_trace

__all__ = [
    "BLOCKS",
    "COMMUNICATION",
    "COMPUTE",
    "DATA_PARALLEL",
    "OPERATORS",
    "TRAFFIC",
    "ActionTimes",
    "Arrow",
    "CompiledSchedule",
    "Counter",
    "Durations",
    "FlowLink",
    "RingOrder",
    "Span",
    "Speed",
    "TaskGraph",
    "TaskGraphBuilder",
    "Timeline",
    "Trace",
    "Transfers",
    "activation_bytes",
    "compile_schedule",
    "compiled_schedule",
    "gantt",
    "links_over_time",
    "makespan_s",
    "max_min_rates",
    "read_trace",
    "rerouted_s",
    "ring_order",
    "simulate",
    "speeds_over_time",
    "task_graph",
    "trace_of",
    "write_trace",
]
