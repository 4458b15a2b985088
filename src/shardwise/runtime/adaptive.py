"""A run that re-plans: it watches its steps, has links measured, asks for advice and moves.

What is measured and how it is decided comes from outside (`Advisor`); here it is carried out, by all ranks at
the same boundary between two steps.

Notices when steps take another time than they should. Pure: it is told the seconds and reads no clock.
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

RECENT = 3
"""Steps whose median counts: one that is slow by itself is no change."""

DEVIATION = 1.25
"""Factor by which the median is off, either way, before it is looked into."""


class StepTimeMonitor:
    """Holds steps against what is expected of them; the first step of a plan, which sets things up, does not
    count."""

    def __init__(self, expected_s: float) -> None:
        self._expected_s: float | None = expected_s
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._is_first = True

    def deviates(self, step_s: float) -> bool:
        """Whether steps are off, now that another one took so long."""
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
        """The median of the last steps; what is expected where there are none."""
        return median(self._recent) if self._recent else self._expected_s or 0.0

    def rebaseline(self) -> None:
        """It was looked into and stays: what the next steps take is what is expected from then on."""
        self._expected_s = None
        self._recent.clear()

    def restart(self, expected_s: float) -> None:
        """Another plan runs from now on."""
        self._expected_s = expected_s
        self._recent.clear()
        self._is_first = True


MEASURED_SHARE = 0.02
"""Of the time at most goes into measuring while steps are as expected."""

MIGRATION_S = 5.0
"""What a move is taken to cost beside its bytes, until one was timed. An assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What an advisor decided (a word), the strategy to go on under, and the step times that it predicts for
    that and for the one that runs (None: it cannot go on)."""

    decision: str
    strategy: Strategy
    step_s: float
    keep_step_s: float | None


class Advisor(Protocol):
    """Measures and decides; each rank has its own."""

    def measure(self) -> Mapping[str, float]:
        """What links carry now, by their names, in bytes/s; all ranks at a time, with the same answer."""

    def advise(
        self, running: Strategy, rates: Mapping[str, float], *, horizon_s: float, migration_s: float
    ) -> Advice:
        """What to do for the next `horizon_s` seconds, where any move costs `migration_s` beside its
        bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanEvent:
    """What was noticed after a step and what was done: why links were measured, what they carry, the advice,
    the seconds that measuring and moving took, and the bytes that went between nodes."""

    reason: str
    rates: Mapping[str, float]
    advice: Advice
    measured_s: float
    moved_s: float
    moved_bytes: int


class Adaptation:
    """The adaptive side of a run of `steps` steps; every rank calls it at the same points."""

    def __init__(self, advisor: Advisor, plan: Plan, steps: int) -> None:
        self._advisor = advisor
        self._monitor = StepTimeMonitor(plan.best.step_time_s)
        self._steps = steps
        self._migration_s = MIGRATION_S
        self._measured_at_s = time.perf_counter()
        self._measured_s = 0.0
        self.predicted_s = plan.best.step_time_s

    def after(self, job: TrainingJob, step: int, step_s: float) -> tuple[TrainingJob, ReplanEvent | None]:
        """The job to go on with after `step` steps, the last of which took `step_s` here; and what happened,
        where links were measured. Rank 0's clock decides whether."""
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
        """Rank 0's advice, on every rank: as text, since nothing that is received is unpickled."""
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
