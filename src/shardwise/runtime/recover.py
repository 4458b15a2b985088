"""Trains on processes of this machine, and goes on from the last checkpoint where one of them was ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.plan import AnyPlan
from shardwise.runtime.devices import check_local_devices
from shardwise.runtime.manifest import finished
from shardwise.runtime.team import RankLost, RankTask, WorkerPool
from shardwise.runtime.train import StepRecord, TrainOptions, resumed_options, train
from shardwise.sim import Span


def train_locally(
    plan: AnyPlan,
    options: TrainOptions,
    *,
    report: Callable[[StepRecord], None],
    restarts: int = 0,
    on_restart: Callable[[RankLost, int], None] | None = None,
    work: RankTask = train,
) -> list[tuple[Span, ...]]:
    """What `work` (`train`, but in tests) returns on each of the plan's ranks, which are processes of this
    machine.

    A rank that is ended from outside, up to `restarts` times, ends the others, and all start again from the
    newest checkpoint, or from the beginning where there is none yet; `on_restart` gets the loss and the steps
    that are done there, and after it `report` gets the steps behind them again. Raises ConfigError where the
    plan's devices are not all here, RankLost where a rank fails by itself, where nothing is saved, and after
    the last restart.
    """
    ranks = plan.cluster.devices
    check_local_devices(plan.cluster, ranks)
    with WorkerPool(ranks) as team:
        while True:
            try:
                return team.run(ranks, work, plan, options, report=report)
            except RankLost as error:
                if not (error.was_ended and options.checkpoint is not None and restarts):
                    raise
                restarts -= 1
                options = restart_options(options, plan)
                if on_restart is not None:
                    on_restart(error, options.start)


def restart_options(options: TrainOptions, plan: AnyPlan) -> TrainOptions:
    """`options` to go on from the newest checkpoint of the run that had them; from its beginning where it has
    saved none yet."""
    if options.checkpoint is None or not finished(options.checkpoint):
        return replace(options, resumed=None, start=0)
    return resumed_options(options, plan)
