"""Where the time of a step of an operator graph goes: the same parts of a predicted and of a measured step.

Parts are those of the plan's breakdown, but that the norm counts with the optimizer, and that what the host
adds, sends and waiting are one `rest`: a measured step does not tell them apart.

Where the time of a step goes on the stages of a pipeline: the same parts of a predicted and of a measured
step.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.cost import LayoutEstimate
from shardwise.graph import OpGraph, block_labels, operator_label
from shardwise.search import TRAFFIC_PARTS
from shardwise.sim import COMMUNICATION, COMPUTE, OPERATORS, TRAFFIC, Span

_ACTION = re.compile(r"\d+([FBIW])\d+")
_RECEIVE = re.compile(r"(\d+)RECV_([FB])(\d+)")
_TRANSFERS = frozenset({"send", "recv"})
_OPTIMIZER = "optimizer"
_COPIES = frozenset({"to host", "from host"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBreakdown:
    """Seconds of one step on one stage; the first four parts sum to the step.

    `forward_s` and `backward_s` are the actions without the waiting for their inputs, `waiting_s` is all else
    up to the end of the last action, `after_s` from there to the end of the step. Of these, `collectives_s`
    pass while some collective is under way, `copies_s` while what is offloaded goes to the host or comes back
    (but in the optimizer), and `optimizer_s` in the optimizer; all None where not told apart by stage.
    """

    forward_s: float
    backward_s: float
    waiting_s: float
    after_s: float
    collectives_s: float | None = None
    copies_s: float | None = None
    optimizer_s: float | None = None

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.waiting_s + self.after_s


def action_spans(spans: Iterable[Span]) -> list[Span]:
    """Those of `spans` that are actions of the schedule, in the order in which they start."""
    actions = (span for span in spans if span.track == COMPUTE and _ACTION.fullmatch(span.name))
    return sorted(actions, key=lambda span: span.start_s)


def stage_breakdown(spans: Sequence[Span], *, start_s: float, finish_s: float) -> StageBreakdown:
    """The times of one rank whose `spans` lie in a step from `start_s` to `finish_s`.

    An action whose input is still on its way waits: that is not its own time.
    """
    actions = action_spans(spans)
    arrivals = _arrivals(spans)
    own = {"F": 0.0, "B": 0.0, "I": 0.0, "W": 0.0}
    for action in actions:
        ready_s = min(max(arrivals.get(action.name, 0.0), action.start_s), action.finish_s)
        own[_kind(action)] += action.finish_s - ready_s
    last_s = max(action.finish_s for action in actions)
    worked_s = sum(own.values())
    updates = [span for span in spans if span.name == _OPTIMIZER]
    collectives = (
        s for s in spans
        if s.track == COMMUNICATION and s.name not in _TRANSFERS and s.name.isidentifier()
    )  # fmt: skip
    copies = (
        span
        for span in spans
        if span.name in _COPIES and not any(one.start_s <= span.start_s < one.finish_s for one in updates)
    )
    return StageBreakdown(
        forward_s=own["F"],
        backward_s=worked_s - own["F"],
        waiting_s=last_s - start_s - worked_s,
        after_s=finish_s - last_s,
        collectives_s=covered_s(collectives),
        copies_s=covered_s(copies),
        optimizer_s=sum(span.finish_s - span.start_s for span in updates),
    )


def _kind(action: Span) -> str:
    match = _ACTION.fullmatch(action.name)
    return match[1] if match else ""


def covered_s(spans: Iterable[Span]) -> float:
    """Seconds in which some of `spans` is under way."""
    covered_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted((span.start_s, span.finish_s) for span in spans):
        covered_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return covered_s


def _arrivals(spans: Sequence[Span]) -> dict[str, float]:
    """When the input of an action was there, by the action's name, where it came from another rank.

    A `RECV` of the schedule only posts: what it posted are the transfers that start while it lasts, and they
    end when the action has taken them.
    """
    transfers = [span for span in spans if span.track == COMMUNICATION and span.name == "recv"]
    arrivals: dict[str, float] = {}
    for post in spans:
        if match := _RECEIVE.fullmatch(post.name):
            own = [s.finish_s for s in transfers if post.start_s <= s.start_s <= post.finish_s]
            stage, kind, microbatch = match.groups()
            for name in ("F",) if kind == "F" else ("B", "I"):
                arrivals[f"{stage}{name}{microbatch}"] = max(own, default=0.0)
    return arrivals


PARTS = ("forward", "backward", "recomputation", "exchanges", "conversions", "gathers", "gradients",
         "optimizer", "rest")  # fmt: skip
"""Parts of a step, in the order in which they are told; they sum to it."""

_GRAPH_ACTION = re.compile(r"\d+([FB])(\d+)")
_REDUCTION = re.compile(r"\d+REDUCE_GRAD")
_PASS = re.compile(r"([FBR])\d+ (.+)", re.DOTALL)
_UPDATE = frozenset({"norm", "optimizer"})

Passes = Mapping[tuple[str, str], float]
"""Seconds of a step by pass (`forward` or `backward`, recomputation included) and operator."""


def predicted_parts(estimate: LayoutEstimate, step_s: float) -> dict[str, float]:
    """What a stage does in a step of `step_s`, by its price."""
    seconds = estimate.seconds
    parts = {name: seconds.get(name, 0.0) for name in PARTS}
    parts["optimizer"] += seconds.get("norm", 0.0)
    parts["rest"] = seconds.get("host", 0.0) + seconds.get("sends", 0.0) + step_s - estimate.time_s
    return parts


def measured_parts(spans: Sequence[Span], *, start_s: float, finish_s: float) -> dict[str, float]:
    """What a rank, whose `spans` lie in a step from `start_s` to `finish_s`, did in it.

    What is computed again has its own traffic in it; of actions that wait for their input what comes later
    counts; the gradients that are summed behind the last action count as long as that takes.
    """
    times = stage_breakdown(spans, start_s=start_s, finish_s=finish_s)
    recomputed = _recomputed_spans(spans)
    traffic = [span for span in spans if span.track == TRAFFIC and not recomputed.has(span)]
    sums = _Row(span for span in spans if _REDUCTION.fullmatch(span.name))
    forward, backward = (_Row(span for span in spans if _graph_action_kind(span) == kind) for kind in "FB")
    update = _Row(span for span in spans if span.track == COMPUTE and span.name in _UPDATE)

    def within(row: _Row) -> float:
        return covered_s(span for span in traffic if row.has(span))

    parts = dict.fromkeys(PARTS, 0.0)
    for part in TRAFFIC_PARTS:
        parts[part] = covered_s(span for span in traffic if span.name == part and not sums.has(span))
    parts["gradients"] += covered_s(sums.spans)
    parts["recomputation"] = covered_s(recomputed.spans)
    parts["forward"] = times.forward_s - within(forward)
    parts["backward"] = times.backward_s - within(backward) - parts["recomputation"]
    parts["optimizer"] = covered_s(update.spans) - within(update)
    parts["rest"] = finish_s - start_s - sum(parts.values())
    return parts


def predicted_passes(graph: OpGraph, estimate: LayoutEstimate, microbatches: int) -> Passes:
    """What all passes of each operator of a stage take in a step, traffic included, by its price."""
    labels = block_labels(graph)
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for charge in estimate.charges:
        if charge.place is not None and charge.when != "step":
            block, operator = charge.place
            name = operator_label(labels[block], operator)
            found[charge.when, name] += microbatches * charge.seconds
    return found


def measured_passes(spans: Sequence[Span]) -> Passes:
    """What all passes of each operator took on a rank. What is computed again is its own operator's, though
    it lies in the backward pass of another."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    recomputed = _recomputed_spans(spans)
    for span in spans:
        match = _PASS.fullmatch(span.name) if span.track == OPERATORS else None
        if match is None:
            continue
        seconds = span.finish_s - span.start_s
        if match[1] == "B":
            seconds -= covered_s(recomputed.inside(span))
        found["forward" if match[1] == "F" else "backward", match[2]] += seconds
    return found


class _Row:
    """Spans of a rank that come one after the other."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.start_s)
        self.starts = [span.start_s for span in self.spans]

    def has(self, span: Span) -> bool:
        """Whether the middle of `span` lies in one of them: ends are rounded in a file."""
        place = bisect_right(self.starts, _middle_s(span)) - 1
        return place >= 0 and _middle_s(span) <= self.spans[place].finish_s

    def inside(self, whole: Span) -> Sequence[Span]:
        """Those that begin in `whole`."""
        return self.spans[bisect_left(self.starts, whole.start_s) : bisect_left(self.starts, whole.finish_s)]


def _middle_s(span: Span) -> float:
    return (span.start_s + span.finish_s) / 2.0


def _recomputed_spans(spans: Iterable[Span]) -> _Row:
    """What is computed again."""
    return _Row(span for span in spans if span.track == OPERATORS and span.name.startswith("R"))


def _graph_action_kind(span: Span) -> str:
    match = _GRAPH_ACTION.fullmatch(span.name) if span.track == COMPUTE else None
    return match[1] if match else ""
