"""Replanning during a run: monitors step times, measures links, asks an advisor and migrates the job.

`Advisor` measures and decides, and comes from outside. `Adaptation` carries its advice out: all ranks do so
at the same boundary between two steps. `StepTimeMonitor` notices step times that deviate from the expected
ones. It gets the seconds from its caller and reads no clock.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Protocol

import torch
from torch import distributed

from shardwise.plans import Plan
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.migration import migrate, nodes_of
from shardwise.search import plan_of_strategy
from shardwise.strategy import Strategy

# Step times

RECENT = 3
"""Number of last steps whose median is compared: three, so that one slow step alone does not count."""

DEVIATION = 1.25
"""Factor between the median and the expected step time, either way, above which links are measured."""


class StepTimeMonitor:
    """Compares step times with the expected one. The first step of a plan, which includes setup, is
    ignored."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s: float | None = expected_s
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._is_first = True

    def deviates(self, step_s: float) -> bool:
        """Record a step of `step_s` seconds; whether recent steps deviate from the expected time."""
        if self._is_first:
            self._is_first = False
            return False
        self._recent.append(step_s)
        if len(self._recent) < RECENT:
            return False
        typical_s = median(self._recent)
        if self._expected_s is None:
            self._expected_s = typical_s
        return not 1.0 / DEVIATION <= typical_s / self._expected_s <= DEVIATION

    @property
    def typical_s(self) -> float:
        """Median of the last steps in seconds, or the expected time before there are any."""
        return median(self._recent) if self._recent else self._expected_s or 0.0

    def rebaseline(self) -> None:
        """Keep the plan: the next steps define the expected time."""
        self._expected_s = None
        self._recent.clear()

    def restart(self, expected_s: float) -> None:
        """Start again with another plan of step time `expected_s`."""
        self._expected_s = expected_s
        self._recent.clear()
        self._is_first = True


# Replanning

MEASURED_SHARE = 0.02
"""Share of the run's time that measurements may take while steps are as expected."""

MIGRATION_S = 5.0
"""Assumed seconds of a migration in addition to its transfers, until one was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The decision of an advisor: a reason code, the strategy to continue with and its predicted step time.

    `keep_step_s` is the predicted step time of the running strategy, or None if it cannot continue.
    """

    decision: str
    strategy: Strategy
    step_s: float
    keep_step_s: float | None


class Advisor(Protocol):
    """Measures and decides. Each rank has its own."""

    def measure(self) -> Mapping[str, float]:
        """Current bandwidth of each link by name, in bytes/s. Called by all ranks at once; all get the
        same."""

    def advise(
        self, running: Strategy, rates: Mapping[str, float], *, horizon_s: float, migration_s: float
    ) -> Advice:
        """Advice for the next `horizon_s` seconds. A migration costs `migration_s` in addition to its
        transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanEvent:
    """What the monitor noticed after a step, and what the run did.

    Has the reason of the measurement, the bandwidth of each link in bytes/s and the advice. Also has the
    seconds of measurement and migration, and the bytes sent between nodes.
    """

    reason: str
    rates: Mapping[str, float]
    advice: Advice
    measured_s: float
    moved_s: float
    moved_bytes: int


class Adaptation:
    """Replanning of a run of `steps` steps. Every rank calls it at the same points."""

    def __init__(self, advisor: Advisor, plan: Plan, steps: int) -> None:
        self._advisor = advisor
        self._monitor = StepTimeMonitor(plan.best.step_time_s)
        self._steps = steps
        self._migration_s = MIGRATION_S
        self._measured_at_s = time.perf_counter()
        self._measured_s = 0.0
        self.predicted_s = plan.best.step_time_s

    def after(self, job: TrainingJob, step: int, step_s: float) -> tuple[TrainingJob, ReplanEvent | None]:
        """The job to continue with after `step` steps, and the replan event if links were measured.

        `step_s` is the time of the last step on this rank. Rank 0 decides whether to measure.
        """
        deviates = self._monitor.deviates(step_s)
        since_measured_s = time.perf_counter() - self._measured_at_s
        is_due = since_measured_s * MEASURED_SHARE > self._measured_s
        signal = torch.tensor([2 if deviates else int(is_due)])
        distributed.broadcast(signal, 0)
        if not int(signal) or step == self._steps:
            return job, None
        rates = self._measure()
        running = job.plan.best.strategy
        advice = self._broadcast_advice(running, rates, (self._steps - step) * self._monitor.typical_s)
        moved_s, nbytes = 0.0, 0
        if advice.strategy != running:
            start_s = time.perf_counter()
            old_plan = job.plan
            plan = plan_of_strategy(old_plan.model, old_plan.cluster, old_plan.job, advice.strategy)
            job, sent_bytes = migrate(job, plan)
            moved_s = time.perf_counter() - start_s
            nodes = nodes_of(old_plan.cluster)
            nbytes = sum(each for (one, other), each in sent_bytes.items() if nodes[one] != nodes[other])
            self._migration_s = moved_s
            self._monitor.restart(advice.step_s)
        elif int(signal) == 2:
            self._monitor.rebaseline()
        self.predicted_s = advice.step_s
        return job, ReplanEvent(
            reason="step time" if int(signal) == 2 else "interval",
            rates=rates,
            advice=advice,
            measured_s=self._measured_s,
            moved_s=moved_s,
            moved_bytes=nbytes,
        )

    def _measure(self) -> Mapping[str, float]:
        start_s = time.perf_counter()
        rates = self._advisor.measure()
        self._measured_at_s = time.perf_counter()
        self._measured_s = self._measured_at_s - start_s
        return rates

    def _broadcast_advice(self, running: Strategy, rates: Mapping[str, float], horizon_s: float) -> Advice:
        """Rank 0's advice on every rank, sent as JSON: received data is never unpickled."""
        text = b""
        if distributed.get_rank() == 0:
            advice = self._advisor.advise(running, rates, horizon_s=horizon_s, migration_s=self._migration_s)
            text = json.dumps(asdict(advice)).encode()
        size = torch.tensor([len(text)])
        distributed.broadcast(size, 0)
        received = torch.empty(int(size), dtype=torch.uint8)
        if text:
            received.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        distributed.broadcast(received, 0)
        fields = json.loads(received.numpy().tobytes())
        return Advice(**{**fields, "strategy": Strategy(**fields["strategy"])})
