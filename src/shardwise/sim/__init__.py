"""How long a training step takes, instant by instant: max-plus, the event engine, timelines and traces."""

from shardwise.sim.engine import (
    COMMUNICATION,
    COMPUTE,
    DATA_PARALLEL,
    FlowLink,
    Speed,
    TaskGraph,
    TaskGraphBuilder,
    Timeline,
    max_min_rates,
    simulate,
)
from shardwise.sim.event_traces import links_over_time, speeds_over_time
from shardwise.sim.gantt import gantt
from shardwise.sim.maxplus import ActionTimes, CompiledSchedule, Durations, compile_schedule, rerouted_s
from shardwise.sim.ring_order import RingOrder, ring_order
from shardwise.sim.schedule_tasks import Transfers, activation_bytes, task_graph
from shardwise.sim.steady import compiled_schedule, makespan_s
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
