"""Where the time of a step goes on the stages of a pipeline: the same parts of a predicted and of a measured
step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.sim import COMMUNICATION, COMPUTE, Span

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
