"""Training through a trace under a policy: what runs in each epoch, and how many steps it makes (`replay`).

A transition is charged in full when it is decided, as time in which the new plan would have run. So an epoch
that is shorter than its transition makes negative steps. A plan that cannot run waits, and starts again from
a checkpoint.

`oracle` is an upper bound for all policies that choose among the considered arrangements: dynamic programming
over the epochs of a known trace. An arrangement may be chosen in epochs near one in which it was considered
(`WINDOW`); the longest-running ones in all epochs. A transition costs the least possible: nothing to
continue, else a regrouping or a restart, plus lost work if a lost node had states that no other node had.
Transfers are free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardwise.cluster import EventTrace, NodeLost, NodeView, Notice
from shardwise.equations import goodput
from shardwise.errors import Infeasible, InternalError
from shardwise.plans import Reliability
from shardwise.replanning.mixed_planner import AnyArrangement, MixedPlanner
from shardwise.replanning.planner import KEEP, MIGRATE, PATCH
from shardwise.replanning.situation import Epoch, Situation, epochs_in_order
from shardwise.replanning.transition import Costs
from shardwise.ties import first_best, is_less

# Policies that do not know the future

WAIT = "wait"

RECENT_EPOCHS = 8
"""Number of past epochs whose mean length is the horizon of the adaptive policy."""


LONG_S = 1e9
"""A horizon, in seconds, over which the cost of a transition is negligible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochChoice:
    """The arrangement of one epoch (None: waiting), its step time, and the seconds of the transition to
    it."""

    decision: str
    arrangement: AnyArrangement | None
    step_s: float | None
    change_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """A policy through a trace: its choice in every epoch, and the steps of each epoch."""

    name: str
    choices: tuple[EpochChoice, ...]
    steps: tuple[float, ...]
    goodput: float

    @property
    def total_steps(self) -> float:
        """Steps over the whole trace."""
        return sum(self.steps)

    @property
    def changes(self) -> int:
        """Number of patches and migrations."""
        return sum(choice.decision not in (KEEP, WAIT) for choice in self.choices[1:])


def run_of(name: str, epochs: Sequence[Epoch], choices: Sequence[EpochChoice]) -> PolicyRun:
    """The run of these choices: steps and goodput (the share of time that is neither waiting nor
    transition)."""
    steps, useful_s = [], 0.0
    for epoch, choice in zip(epochs, choices, strict=True):
        working_s = 0.0 if choice.step_s is None else epoch.length_s - choice.change_s
        steps.append(0.0 if choice.step_s is None else working_s / choice.step_s)
        useful_s += working_s
    total_s = sum(epoch.length_s for epoch in epochs)
    return PolicyRun(
        name=name,
        choices=tuple(choices),
        steps=tuple(steps),
        goodput=max(useful_s, 0.0) / total_s if total_s else 0.0,
    )


def fixed(planner: MixedPlanner, epochs: Sequence[Epoch], arrangement: AnyArrangement) -> list[EpochChoice]:
    """One arrangement throughout: it runs where it can, and waits elsewhere."""
    found: list[EpochChoice] = []
    is_down, has_lost = False, False
    step_time_s = _StepTimes(planner)
    for epoch in epochs:
        step_s = step_time_s.of(arrangement, epoch.situation)
        is_hit = bool(found and epoch.lost) and not is_down and not epoch.lost.isdisjoint(arrangement.nodes)
        has_lost |= is_hit and _loses(arrangement, epoch)
        if step_s is None:
            found.append(EpochChoice(decision=WAIT, arrangement=None, step_s=None, change_s=0.0))
            is_down = True
            continue
        change_s = 0.0
        if is_down or is_hit:
            change_s = planner.started(arrangement, epoch.situation).seconds
            change_s += planner.costs.rework_s if has_lost else 0.0
        found.append(EpochChoice(decision=KEEP, arrangement=arrangement, step_s=step_s, change_s=change_s))
        is_down, has_lost = False, False
    return found


class _StepTimes:
    """Step times by the objects of arrangements and situations, which epochs share: without the hashes of
    either, which take longer than all else in a long trace."""

    def __init__(self, planner: MixedPlanner) -> None:
        self._planner = planner
        self._known: dict[tuple[int, int], tuple[AnyArrangement, Situation, float | None]] = {}

    def of(self, one: AnyArrangement, situation: Situation) -> float | None:
        """Seconds per step; None where it cannot run."""
        key = id(one), id(situation)
        if key not in self._known:
            # The objects are part of the value, so that no other object gets their addresses.
            self._known[key] = one, situation, self._planner.step_s(one, situation)
        return self._known[key][2]


def _loses(arrangement: AnyArrangement, epoch: Epoch) -> bool:
    """Whether a node of an arrangement leaves without notice at the start of an epoch."""
    return not (epoch.lost - epoch.saved).isdisjoint(arrangement.nodes)


def adaptive(
    planner: MixedPlanner,
    epochs: Iterable[Epoch],
    longest_s: float,
    considered: list[tuple[AnyArrangement, ...]],
    start: AnyArrangement | None = None,
) -> list[EpochChoice]:
    """Decides at every change without knowing the future. The horizon is the mean length of the last epochs,
    at most and initially `longest_s`. `start` runs at first (None: the first decision, without a transition).
    The running and the best evaluated arrangements of each epoch are appended to `considered`."""
    found: list[EpochChoice] = []
    running = start
    has_lost = False
    recent: deque[float] = deque(maxlen=RECENT_EPOCHS)
    shared: dict[AnyArrangement, AnyArrangement] = {}
    for place, epoch in enumerate(epochs):
        horizon_s = min(sum(recent) / len(recent), longest_s) if recent else longest_s
        try:
            decision = planner.replan(
                running,
                epoch.situation,
                horizon_s=max(horizon_s, 1.0),
                saved=epoch.saved,
                returned=epoch.returned,
            )
        except Infeasible:
            found.append(EpochChoice(decision=WAIT, arrangement=None, step_s=None, change_s=0.0))
            has_lost |= running is not None and place > 0 and _loses(running, epoch)
            running = None
            considered.append(())
        else:
            change_s = decision.transition.seconds if place or start is not None else 0.0
            change_s += planner.costs.rework_s if has_lost else 0.0
            has_lost = False
            found.append(
                EpochChoice(
                    decision=decision.decision,
                    arrangement=shared.setdefault(decision.arrangement, decision.arrangement),
                    step_s=decision.step_s,
                    change_s=change_s,
                )
            )
            running = decision.arrangement
            considered.append(tuple(shared.setdefault(one, one) for one in (running, *decision.alternatives)))
        recent.append(epoch.length_s)
    return found


def best_at_first(planner: MixedPlanner, epochs: Iterable[Epoch]) -> AnyArrangement:
    """The best arrangement in the first epoch in which anything runs. Raises Infeasible if there is none."""
    for epoch in epochs:
        try:
            return planner.replan(None, epoch.situation, horizon_s=LONG_S).arrangement
        except Infeasible:
            continue
    raise Infeasible("nothing fits at any time of the trace", reasons={})


def best_of(
    planner: MixedPlanner,
    epochs: Sequence[Epoch],
    arrangements: Sequence[AnyArrangement],
    score: Callable[[PolicyRun], tuple[float, ...]],
) -> AnyArrangement:
    """The fixed arrangement with the best score; of equal ones the first."""
    return first_best(arrangements, lambda one: score(run_of("", epochs, fixed(planner, epochs, one))))


def expected_score(run: PolicyRun) -> tuple[float, ...]:
    """Steps over the whole trace."""
    return (run.total_steps,)


def robust_score(run: PolicyRun) -> tuple[float, ...]:
    """Steps/s in the slowest epoch; ties are broken by the steps over the whole trace."""
    rates = [0.0 if choice.step_s is None else 1.0 / choice.step_s for choice in run.choices]
    return min(rates), run.total_steps


# Oracle

WINDOW = 8
"""Epochs before and after one that considered an arrangement, in which the oracle may choose it."""


@dataclass(frozen=True, slots=True)
class _Label:
    """The most steps by the end of an epoch with an arrangement (None: waiting), the label of the epoch
    before, and the seconds of the transition.

    Labels that no path goes through any more are freed: most paths of a long trace share all but their last
    epochs."""

    steps: float
    arrangement: AnyArrangement | None
    before: _Label | None
    change_s: float


_Labels = dict[AnyArrangement | None, _Label]
_Shapes = dict[AnyArrangement, Hashable]


def oracle(
    epochs: Sequence[Epoch],
    considered: Sequence[Sequence[AnyArrangement]],
    always: Sequence[AnyArrangement],
    planner: MixedPlanner,
) -> list[EpochChoice]:
    """The best choice in every epoch of a known trace. `considered` are the arrangements of each epoch, and
    `always` those for all epochs."""
    every = dict.fromkeys([*always, *(one for some in considered for one in some)])
    shapes: _Shapes = {one: one.shape for one in every}
    same = {one: one for one in every}
    considered = [tuple(same[one] for one in some) for some in considered]
    sharded = {one for one in every if one.has_unreplicated_states}
    labels: _Labels = {}
    step_time_s = _StepTimes(planner)
    for place, epoch in enumerate(epochs):
        near = considered[max(place - WINDOW, 0) : place + WINDOW + 1]
        rates = _rates(dict.fromkeys([*always, *(one for some in near for one in some)]), epoch, step_time_s)
        labels = (
            _first(rates, epoch)
            if place == 0
            else _next(labels, rates, epoch, shapes=shapes, sharded=sharded, costs=planner.costs)
        )
    return _traced(epochs, labels, planner, shapes)


def _rates(
    arrangements: Iterable[AnyArrangement], epoch: Epoch, step_time_s: _StepTimes
) -> dict[AnyArrangement, float]:
    """Steps per second of the arrangements that run."""
    found = {}
    for one in arrangements:
        step_s = step_time_s.of(one, epoch.situation)
        if step_s is not None:
            found[one] = 1.0 / step_s
    return found


def _first(rates: dict[AnyArrangement, float], epoch: Epoch) -> _Labels:
    labels: _Labels = {one: _Label(rate * epoch.length_s, one, None, 0.0) for one, rate in rates.items()}
    labels[None] = _Label(0.0, None, None, 0.0)
    return labels


def _next(
    before: _Labels,
    rates: dict[AnyArrangement, float],
    epoch: Epoch,
    *,
    shapes: _Shapes,
    sharded: set[AnyArrangement],
    costs: Costs,
) -> _Labels:
    """The labels after one more epoch. Of all previous arrangements, only the best of each shape, with and
    without lost work, can be optimal sources of a transition."""
    hit = epoch.lost - epoch.saved
    sources: dict[tuple[Hashable, bool], tuple[float, AnyArrangement | None]] = {}
    for one, label in before.items():
        has_lost = one in sharded and not hit.isdisjoint(one.nodes) if one is not None else False
        key = (None if one is None else shapes[one], has_lost)
        if key not in sources or is_less(sources[key][0], label.steps):
            sources[key] = label.steps, one
    overall: dict[bool, tuple[float, AnyArrangement | None]] = {}
    for (_, has_lost), source in sources.items():
        if has_lost not in overall or is_less(overall[has_lost][0], source[0]):
            overall[has_lost] = source
    rework_s = costs.checkpoint_interval_s / 2.0
    labels: _Labels = {None: _waiting(before)}
    for one, rate in rates.items():
        options: list[_Label] = []
        if one in before and epoch.lost.isdisjoint(one.nodes):
            options.append(_Label(before[one].steps + rate * epoch.length_s, one, before[one], 0.0))
        for has_lost, lost_s in ((False, 0.0), (True, rework_s)):
            alike = sources.get((shapes[one], has_lost))
            for origin, least_s in ((alike, costs.regroup_s), (overall.get(has_lost), costs.restart_s)):
                if origin is not None:
                    change_s = least_s + lost_s
                    made = origin[0] + rate * (epoch.length_s - change_s)
                    options.append(_Label(made, one, before[origin[1]], change_s))
        labels[one] = first_best(options, lambda label: (label.steps,))
    return labels


def _waiting(before: _Labels) -> _Label:
    best = first_best(before, lambda one: (before[one].steps,))
    return _Label(before[best].steps, None, before[best], 0.0)


def _traced(
    epochs: Sequence[Epoch],
    last: _Labels,
    planner: MixedPlanner,
    shapes: _Shapes,
) -> list[EpochChoice]:
    label: _Label | None = last[first_best(last, lambda each: (last[each].steps,))]
    last.clear()
    found: list[EpochChoice] = []
    for epoch in reversed(epochs):
        if label is None:
            raise InternalError("a path of the oracle that is shorter than its trace")
        one, before = label.arrangement, label.before
        found.append(
            EpochChoice(
                decision=_decision(one if before is None else before.arrangement, one, shapes),
                arrangement=one,
                step_s=None if one is None else planner.step_s(one, epoch.situation),
                change_s=label.change_s,
            )
        )
        label = before
    return found[::-1]


def _decision(before: AnyArrangement | None, one: AnyArrangement | None, shapes: _Shapes) -> str:
    if one is None:
        return WAIT
    if one == before:
        return KEEP
    return PATCH if before is not None and shapes[before] == shapes[one] else MIGRATE


# Replay of all policies

POLICIES = ("static", "robust", "expected", "adaptive", "oracle")

LONGEST_S = 3600.0
"""Horizon in seconds of the adaptive policy before it has seen an epoch, and its largest horizon."""

MAX_CANDIDATES = 24
"""Number of longest-running arrangements of the adaptive policy that robust and expected choose from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The runs of all policies over the same epochs; a step trains `tokens_per_step`. `working_share` is the
    share of time not spent on checkpoints, the same for every policy. `requested_s` is the length that the
    replay was to have; it is shorter where it had no time to decide further."""

    epochs: tuple[Epoch, ...]
    runs: tuple[PolicyRun, ...]
    tokens_per_step: int
    working_share: float
    requested_s: float

    @property
    def length_s(self) -> float:
        """The replayed length in seconds."""
        return self.epochs[-1].end_s

    @property
    def is_whole(self) -> bool:
        """Whether the whole requested length was replayed."""
        return self.length_s >= self.requested_s

    def tokens(self, run: PolicyRun) -> float:
        """Tokens trained over the whole trace; at least 0."""
        return max(run.total_steps, 0.0) * self.tokens_per_step * self.working_share

    def goodput(self, run: PolicyRun) -> float:
        """The share of time that is progress: neither waiting, nor transitions, nor checkpoints."""
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
    has_time: Callable[[], bool] = lambda: True,
    progress: Callable[[str], None] | None = None,
) -> Replay:
    """Training from 0 to `end_s` of the trace. The static policy runs `start` throughout, and the adaptive
    one begins with it (None: the best arrangement at first). Raises Infeasible if nothing can ever run.

    `has_time` is called before each decision but the first: where it returns False, the replay ends there
    for all policies. `progress` is called with a text that says how far the replay is.
    """
    job = planner.prices.job
    view = NodeView(planner.prices.cluster)
    show = progress or (lambda _: None)
    if start is not None:
        start = planner.without_idle_nodes(start)  # the states of idle nodes do not matter
    first = start
    if first is None:
        first = _first_arrangement(planner, trace, view, end_s, has_time)
    epochs: list[Epoch] = []
    considered: list[tuple[AnyArrangement, ...]] = []
    decided = _in_time(
        epochs_in_order(trace, view, end_s), epochs, has_time, lambda at_s: show(_so_far(at_s, end_s))
    )
    choices = adaptive(planner, decided, LONGEST_S, considered, start)
    adapting = run_of("adaptive", epochs, choices)
    runs = {"adaptive": adapting, "static": run_of("static", epochs, fixed(planner, epochs, first))}
    candidates = _longest(epochs, adapting, first)
    for name, score in (("robust", robust_score), ("expected", expected_score)):
        if name in policies:
            show(f"policy {name}")
            runs[name] = run_of(
                name, epochs, fixed(planner, epochs, best_of(planner, epochs, candidates, score))
            )
    if "oracle" in policies:
        show("policy oracle")
        runs["oracle"] = run_of("oracle", epochs, oracle(epochs, considered, candidates, planner))
    return Replay(
        epochs=tuple(epochs),
        runs=tuple(runs[name] for name in POLICIES if name in policies),
        tokens_per_step=job.global_batch_size * job.seq_len,
        working_share=working_share(trace, epochs[-1].end_s, planner.costs),
        requested_s=end_s,
    )


def _first_arrangement(
    planner: MixedPlanner, trace: EventTrace, view: NodeView, end_s: float, has_time: Callable[[], bool]
) -> AnyArrangement:
    """The best arrangement in the first epoch in which anything runs, as far as there is time to look."""
    seen: list[Epoch] = []
    try:
        return best_at_first(planner, _in_time(epochs_in_order(trace, view, end_s), seen, has_time))
    except Infeasible:
        if seen[-1].end_s >= end_s:
            raise
        raise Infeasible(
            f"nothing fits in the first {seen[-1].end_s:,.0f} s of the trace; there was no time for more",
            reasons={},
        ) from None


def _so_far(at_s: float, end_s: float) -> str:
    return f"decisions at {at_s / end_s * 100:.0f} % of the trace"


def _in_time(
    epochs: Iterable[Epoch],
    seen: list[Epoch],
    has_time: Callable[[], bool],
    show: Callable[[float], None] = lambda _: None,
) -> Iterator[Epoch]:
    """The first epoch, and those after it while there is time; appends each to `seen`, and shows every
    `EPOCHS_SHOWN` of them where they start."""
    for epoch in epochs:
        if seen and not has_time():
            return
        seen.append(epoch)
        if len(seen) % EPOCHS_SHOWN == 1:
            show(epoch.start_s)
        yield epoch


EPOCHS_SHOWN = 16
"""Epochs between two reports of progress; the decisions of so many take less than a second."""


def losses(trace: EventTrace, end_s: float) -> int:
    """Number of instants before `end_s` at which nodes leave without notice."""
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
    """The checkpoint interval in seconds that loses least on this trace; None if no node leaves without
    notice."""
    count = losses(trace, end_s)
    stall_s = Reliability().checkpoint_stall_s
    return float(goodput.optimal_interval_s(stall_s, end_s / count)) if count else None


def working_share(trace: EventTrace, end_s: float, costs: Costs) -> float:
    """The share of time until `end_s` that is not spent on checkpoints; 1 if no node leaves without
    notice."""
    if not losses(trace, end_s):
        return 1.0
    stall_s = Reliability().checkpoint_stall_s
    return 1.0 - float(goodput.checkpoint_fraction(costs.checkpoint_interval_s, stall_s))


def _longest(epochs: Sequence[Epoch], run: PolicyRun, first: AnyArrangement) -> list[AnyArrangement]:
    """`first`, then the arrangements of a run by descending duration."""
    seconds: dict[AnyArrangement, float] = {}
    for epoch, choice in zip(epochs, run.choices, strict=True):
        if choice.arrangement is not None:
            seconds[choice.arrangement] = seconds.get(choice.arrangement, 0.0) + epoch.length_s
    ordered = sorted(seconds, key=lambda one: -seconds[one])
    return list(dict.fromkeys([first, *ordered]))[:MAX_CANDIDATES]
