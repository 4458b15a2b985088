"""How a plan was chosen for a trace of events: kept with the plan, so that it says what it is the best of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, short_repr

TRACE_POLICIES = ("now", "expected", "worst")
"""Best in the first epoch of a trace; over all of it; in its slowest epoch."""

DECISION = "decision"
"""What `replan` decided on behind all events of a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceChoice:
    """The policy and the trace that a plan was chosen by, and what it does there, never changed.

    `trace` is the SHA-256 of the trace in its canonical form, `source` where that is from. `nodes` are the
    cluster's nodes in the places of the plan's. Over `length_s` it makes `steps`; `now_step_time_s` is its
    step time in the first epoch and `worst_step_time_s` in the slowest (None: it stands still). `considered`
    arrangements were weighed in `situations` distinct ones; what the policy counts is at most `gap` below
    what any plan on the sets of nodes that were looked at makes.

    Of a decision both step times are those behind all events, the length is its horizon, and `gap` is None:
    nothing is proven of what it weighed. Nor is there a gap where the plan's certificate says that something
    else was priced than what was given."""

    policy: str
    source: str
    trace: str
    nodes: tuple[str, ...]
    length_s: float
    steps: float
    now_step_time_s: float | None
    worst_step_time_s: float | None
    situations: int
    considered: int
    gap: float | None


def read_for_trace(fields: Fields, priced_as: Sequence[str]) -> TraceChoice:
    """The record from the file of a plan that is `priced_as` something else. ConfigError for what is none."""
    nodes = fields.sequence("nodes", low=1, high=1_000_000)
    for name in nodes:
        if not isinstance(name, str) or name[:1] != "n" or not name[1:].isdigit() or len(name) > 9:
            raise fields.error(
                "nodes", "is not a list of nodes", found=short_repr(name), allowed="n0, n1, ..."
            )
    if len(set(nodes)) < len(nodes):
        raise fields.error("nodes", "names a node twice")
    policy, gap = fields.choice("policy", (*TRACE_POLICIES, DECISION)), _number(fields, "gap", high=1.0)
    if (gap is None) != (policy == DECISION or bool(priced_as)):
        allowed = "null" if gap is not None else "a number from 0 to 1"
        why = "priced_as" if priced_as else f"the policy {policy}"
        raise fields.error("gap", f"does not go with {why}", found=short_repr(gap), allowed=allowed)
    found = TraceChoice(
        policy=policy,
        source=fields.text("source", max_length=10_000),
        trace=fields.text("trace"),
        nodes=tuple(map(str, nodes)),
        length_s=fields.number("length_s"),
        steps=fields.number("steps"),
        now_step_time_s=_number(fields, "now_step_time_s"),
        worst_step_time_s=_number(fields, "worst_step_time_s"),
        situations=fields.integer("situations", low=1),
        considered=fields.integer("considered", low=1),
        gap=gap,
    )
    fields.finish()
    return found


def check_for_trace(found: TraceChoice | None, cluster: Cluster, file: str | None) -> None:
    """ConfigError unless it names a node for each of the plan's `cluster`."""
    if found is not None and len(found.nodes) != len(cluster.nodes):
        raise ConfigError(
            "is not one for each node of the plan's cluster", file=file, key="for_trace.nodes",
            found=str(len(found.nodes)), allowed=str(len(cluster.nodes)),
        )  # fmt: skip


def _number(fields: Fields, name: str, high: float = 1e30) -> float | None:
    """A number, or null."""
    return None if fields.any(name, default=None) is None else fields.number(name, high=high)
