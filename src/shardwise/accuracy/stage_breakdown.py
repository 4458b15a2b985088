"""Breaks the time of a step on one stage into parts, in the same way for predicted and measured steps.

`stage_breakdown` splits the step of a pipeline stage into forward, backward, waiting and the time after the
last action. `predicted_parts` and `measured_parts` split the step of an operator graph into PARTS, and
`predicted_passes` and `measured_passes` give the time of single operators. PARTS are the parts of the plan's
breakdown with two differences: `optimizer` includes the gradient norm, and `rest` includes host time, sends
and waiting, which a measured step does not separate.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.cost import LayoutEstimate
from shardwise.graph import OpGraph, block_labels, operator_label
from shardwise.search import TRAFFIC_PARTS
from shardwise.sim import COMMUNICATION, COMPUTE, OPERATORS, TRAFFIC, Span

# Stages of a pipeline
_ACTION = re.compile(r"\d+([FBIW])\d+")
_RECEIVE = re.compile(r"(\d+)RECV_([FB])(\d+)")
_TRANSFERS = frozenset({"send", "recv"})
_OPTIMIZER = "optimizer"
_COPIES = frozenset({"to host", "from host"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBreakdown:
    """Seconds of one step on one stage; the first four parts sum to the step time.

    `forward_s` and `backward_s` are the times of actions without the wait for their inputs. `waiting_s` is
    the other time up to the end of the last action, and `after_s` the time from there to the end of the step.
    The last three overlap with these parts: `collectives_s` during collectives, `copies_s` during copies of
    offloaded tensors to and from the host (outside the optimizer), and `optimizer_s` in the optimizer. They
    are None where the stage's spans do not show them.

    Another division of the step is computation alone, communication and idle time. `communication_s` is the
    time during collectives and copies, hidden or not, without messages between stages: a receive is under way
    from the moment when it is posted. In `idle_s` the rank neither runs an action that has its input, nor the
    optimizer, nor communicates. Both are None where they are unknown.
    """

    forward_s: float
    backward_s: float
    waiting_s: float
    after_s: float
    collectives_s: float | None = None
    copies_s: float | None = None
    optimizer_s: float | None = None
    communication_s: float | None = None
    idle_s: float | None = None

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.waiting_s + self.after_s


def action_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans that are actions of the schedule, in the order of their start."""
    actions = (span for span in spans if span.track == COMPUTE and _ACTION.fullmatch(span.name))
    return sorted(actions, key=lambda span: span.start_s)


def stage_breakdown(spans: Sequence[Span], *, start_s: float, finish_s: float) -> StageBreakdown:
    """The breakdown of a rank with these `spans` in a step from `start_s` to `finish_s`.

    The time that an action waits for its input counts as waiting.
    """
    actions = action_spans(spans)
    arrivals = _arrivals(spans)
    own = {"F": 0.0, "B": 0.0, "I": 0.0, "W": 0.0}
    working = []
    for action in actions:
        ready_s = min(max(arrivals.get(action.name, 0.0), action.start_s), action.finish_s)
        own[_kind(action)] += action.finish_s - ready_s
        working.append(replace(action, start_s=ready_s))
    last_s = max(action.finish_s for action in actions)
    worked_s = sum(own.values())
    updates = [span for span in spans if span.name == _OPTIMIZER]
    collectives = [
        s for s in spans
        if s.track == COMMUNICATION and s.name not in _TRANSFERS and s.name.isidentifier()
    ]  # fmt: skip
    every_copy = [span for span in spans if span.name in _COPIES]
    copies = (
        span for span in every_copy if not any(one.start_s <= span.start_s < one.finish_s for one in updates)
    )
    communication = [*collectives, *every_copy]
    norms = [span for span in spans if span.track == COMPUTE and span.name in _UPDATE]
    return StageBreakdown(
        forward_s=own["F"],
        backward_s=worked_s - own["F"],
        waiting_s=last_s - start_s - worked_s,
        after_s=finish_s - last_s,
        collectives_s=covered_s(collectives),
        copies_s=covered_s(copies),
        optimizer_s=sum(span.finish_s - span.start_s for span in updates),
        communication_s=covered_s(communication),
        idle_s=finish_s - start_s - covered_s([*working, *norms, *communication]),
    )


def _kind(action: Span) -> str:
    match = _ACTION.fullmatch(action.name)
    return match[1] if match else ""


def covered_s(spans: Iterable[Span]) -> float:
    """Seconds that at least one of `spans` covers."""
    covered_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted((span.start_s, span.finish_s) for span in spans):
        covered_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return covered_s


def _arrivals(spans: Sequence[Span]) -> dict[str, float]:
    """The arrival time of the input of each action that receives it from another rank, by the action's name.

    A `RECV` of the schedule only posts a receive. Its transfers are those that start during the `RECV`, and
    they end when the action has the input.
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


# Operator graphs
PARTS = ("forward", "backward", "recomputation", "exchanges", "conversions", "gathers", "gradients",
         "optimizer", "rest")  # fmt: skip
"""Parts of a step, in the order of reports; they sum to the step time."""

_GRAPH_ACTION = re.compile(r"\d+([FB])(\d+)")
_REDUCTION = re.compile(r"\d+REDUCE_GRAD")
_PASS = re.compile(r"([FBR])\d+ (.+)", re.DOTALL)
_UPDATE = frozenset({"norm", "optimizer"})

Passes = Mapping[tuple[str, str], float]
"""Seconds of a step by pass (`forward` or `backward`, recomputation included) and operator."""


def predicted_parts(estimate: LayoutEstimate, step_s: float) -> dict[str, float]:
    """The PARTS of a stage in a step of `step_s`, from its estimate."""
    seconds = estimate.seconds
    parts = {name: seconds.get(name, 0.0) for name in PARTS}
    parts["optimizer"] += seconds.get("norm", 0.0)
    parts["rest"] = seconds.get("host", 0.0) + seconds.get("sends", 0.0) + step_s - estimate.time_s
    return parts


def measured_parts(spans: Sequence[Span], *, start_s: float, finish_s: float) -> dict[str, float]:
    """The PARTS of a rank with these `spans` in a step from `start_s` to `finish_s`.

    Recomputation includes its communication. An action counts from the arrival of its input. Gradient
    reductions after the last action count in full.
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
    """Seconds of all passes of each operator of a stage in a step, communication included, from its
    estimate."""
    labels = block_labels(graph)
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for charge in estimate.charges:
        if charge.place is not None and charge.when != "step":
            block, operator = charge.place
            name = operator_label(labels[block], operator)
            found[charge.when, name] += microbatches * charge.seconds
    return found


def measured_passes(spans: Sequence[Span]) -> Passes:
    """Measured seconds of all passes of each operator on a rank.

    Recomputation of an operator counts for that operator, although it happens in the backward pass of
    another."""
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
    """Spans of a rank that do not overlap, in the order of their start."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.start_s)
        self.starts = [span.start_s for span in self.spans]

    def has(self, span: Span) -> bool:
        """Whether the middle of `span` is in one of these spans; the middle, since files round the ends."""
        place = bisect_right(self.starts, _middle_s(span)) - 1
        return place >= 0 and _middle_s(span) <= self.spans[place].finish_s

    def inside(self, whole: Span) -> Sequence[Span]:
        """The spans that start during `whole`."""
        return self.spans[bisect_left(self.starts, whole.start_s) : bisect_left(self.starts, whole.finish_s)]


def _middle_s(span: Span) -> float:
    return (span.start_s + span.finish_s) / 2.0


def _recomputed_spans(spans: Iterable[Span]) -> _Row:
    """The spans of recomputation."""
    return _Row(span for span in spans if span.track == OPERATORS and span.name.startswith("R"))


def _graph_action_kind(span: Span) -> str:
    match = _GRAPH_ACTION.fullmatch(span.name) if span.track == COMPUTE else None
    return match[1] if match else ""
