"""Steps of small plans on every rank at a time: what software costs, and how fast machines are by now."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from shardwise.app.cli.calibrating_ranks import Ranks
from shardwise.errors import ConfigError
from shardwise.plan import Plan

STEPS = 3
"""Of a plan at a time, the first to warm up."""


class StepMeasurement:
    """Seconds of steps of `plans`, of one device each, which all `ranks` begin together: as in training they
    do alike things at like times, for which two that share a core wait for each other. ConfigError where no
    rank's device has speed 1."""

    def __init__(self, ranks: Ranks, plans: Sequence[Plan], *, threads: int) -> None:
        self.plans = plans
        self._ranks, self._threads = ranks, threads
        self._seconds: list[list[list[float]]] = [[[] for _ in plans] for _ in ranks.speeds]
        self._nominal_ranks = [rank for rank, speed in enumerate(ranks.speeds) if speed == 1.0]
        if not self._nominal_ranks:
            raise ConfigError(
                "has no device of speed 1, which a calibration is of", key="--cluster",
                found=f"speeds up to {max(ranks.speeds):g}", allowed="a node whose speed is 1",
            )  # fmt: skip

    def measure(self, number: int) -> None:
        """Some steps of one of the plans; every rank calls this."""
        found = self._ranks.run_separately(_steps_s, self.plans[number], self._threads)
        for own, seconds in zip(self._seconds, found, strict=True):
            own[number] += seconds

    def medians(self, rank: int) -> list[float]:
        """Of one rank, a step of each plan."""
        return [median(of) for of in self._seconds[rank]]

    def slowest(self) -> list[float]:
        """A step of each plan, the median of what the slowest rank took each time, of those whose device has
        speed 1: now it is one, now another, and ranks that train together wait for it."""
        of_nominal = (
            [self._seconds[rank][number] for rank in self._nominal_ranks] for number in range(len(self.plans))
        )
        return [median(map(max, zip(*of_ranks, strict=True))) for of_ranks in of_nominal]

    def median_rank(self) -> int:
        """The rank in the middle, of those whose device has speed 1."""
        return sorted(self._nominal_ranks, key=lambda rank: sum(self.medians(rank)))[
            len(self._nominal_ranks) // 2
        ]


def _steps_s(report: object, plan: Plan, threads: int) -> list[float]:
    from shardwise.measure import use_threads
    from shardwise.runtime import StepRecord, TrainOptions, train

    use_threads(threads)
    records: list[StepRecord] = []
    train(records.append, plan, TrainOptions(steps=STEPS))
    return [record.step_time_s for record in records[1:]]
