"""Replay of a trace under all policies, on one set of plans and prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.cluster import EventTrace, NodeLost, NodeView, Notice
from shardwise.equations import goodput
from shardwise.plan import Reliability
from shardwise.replan.epochs import Epoch, epochs_of
from shardwise.replan.mixed import AnyArrangement, MixedPlanner
from shardwise.replan.oracle import oracle
from shardwise.replan.policies import (
    PolicyRun,
    adaptive,
    best_at_first,
    best_of,
    expected_score,
    fixed,
    robust_score,
    run_of,
)
from shardwise.replan.transition import Costs
from shardwise.replan.uneven import UnevenArrangement

POLICIES = ("static", "robust", "expected", "adaptive", "oracle")

LONGEST_S = 3600.0
"""What the adaptive policy expects of an epoch before it has seen any, and at most."""

MAX_CANDIDATES = 24
"""Arrangements that robust and expected choose from: those that the adaptive policy ran for longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """All runs, by policy, over the same epochs; a step trains `tokens_per_step`. Checkpoints leave
    `working_share` of the time of every policy alike."""

    epochs: tuple[Epoch, ...]
    runs: tuple[PolicyRun, ...]
    tokens_per_step: int
    working_share: float

    def tokens(self, run: PolicyRun) -> float:
        """Tokens trained over the whole trace; never less than none."""
        return max(run.total_steps, 0.0) * self.tokens_per_step * self.working_share

    def goodput(self, run: PolicyRun) -> float:
        """The share of time that is progress: not standing still, changing, or saving."""
        return run.goodput * self.working_share

    def run(self, name: str) -> PolicyRun:
        """The run of a policy."""
        return next(run for run in self.runs if run.name == name)


def replay(
    planner: MixedPlanner,
    trace: EventTrace,
    *,
    end_s: float,
    start: AnyArrangement | None = None,
    policies: Sequence[str] = POLICIES,
) -> Replay:
    """Training from 0 to `end_s` of the trace. The static policy runs `start` all the way, and the adaptive
    one begins with it (None: what is best at first). Raises Infeasible where nothing can ever run."""
    job = planner.prices.job
    view = NodeView(planner.prices.cluster)
    epochs = epochs_of(trace, view, end_s)
    if isinstance(start, UnevenArrangement):
        start = planner.uneven.without_idle_nodes(start)  # what becomes of nodes that idle changes nothing
    first = start if start is not None else best_at_first(planner, epochs)
    considered: list[tuple[AnyArrangement, ...]] = []
    adapting = run_of("adaptive", epochs, adaptive(planner, epochs, LONGEST_S, considered, start))
    runs = {"adaptive": adapting, "static": run_of("static", epochs, fixed(planner, epochs, first))}
    candidates = _longest(epochs, adapting, first)
    for name, score in (("robust", robust_score), ("expected", expected_score)):
        if name in policies:
            runs[name] = run_of(
                name, epochs, fixed(planner, epochs, best_of(planner, epochs, candidates, score))
            )
    if "oracle" in policies:
        choices = oracle(epochs, considered, candidates, planner)
        runs["oracle"] = run_of("oracle", epochs, choices)
    return Replay(
        epochs=tuple(epochs),
        runs=tuple(runs[name] for name in POLICIES if name in policies),
        tokens_per_step=job.global_batch_size * job.seq_len,
        working_share=working_share(trace, end_s, planner.costs),
    )


def losses(trace: EventTrace, end_s: float) -> int:
    """Instants before `end_s` at which nodes go without notice."""
    noticed: set[str] = set()
    times: set[float] = set()
    for event in trace.events:
        if isinstance(event, Notice):
            noticed.add(event.node)
        if isinstance(event, NodeLost) and event.time_s < end_s:
            if event.node not in noticed:
                times.add(event.time_s)
            noticed.discard(event.node)
    return len(times)


def best_interval_s(trace: EventTrace, end_s: float) -> float | None:
    """The work between checkpoints that loses least on this trace; None where no node goes without notice."""
    count = losses(trace, end_s)
    stall_s = Reliability().checkpoint_stall_s
    return float(goodput.optimal_interval_s(stall_s, end_s / count)) if count else None


def working_share(trace: EventTrace, end_s: float, costs: Costs) -> float:
    """What checkpoints leave of the time until `end_s`; all, where there is nothing to fear."""
    if not losses(trace, end_s):
        return 1.0
    stall_s = Reliability().checkpoint_stall_s
    return 1.0 - float(goodput.checkpoint_fraction(costs.checkpoint_interval_s, stall_s))


def _longest(epochs: Sequence[Epoch], run: PolicyRun, first: AnyArrangement) -> list[AnyArrangement]:
    """The arrangements of a run, those that ran for longest first, after `first`."""
    seconds: dict[AnyArrangement, float] = {}
    for epoch, choice in zip(epochs, run.choices, strict=True):
        if choice.arrangement is not None:
            seconds[choice.arrangement] = seconds.get(choice.arrangement, 0.0) + epoch.length_s
    ordered = sorted(seconds, key=lambda one: -seconds[one])
    return list(dict.fromkeys([first, *ordered]))[:MAX_CANDIDATES]
