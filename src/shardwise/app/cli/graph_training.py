"""What `train` does with the plan of an operator graph."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from shardwise.app.cli import words
from shardwise.app.cli.launched import TORCHRUN_VARIABLE
from shardwise.app.cli.output import Output, progress, row, talk
from shardwise.app.cli.training import FAILED, write_measured
from shardwise.app.cli.training_run import opened, taken
from shardwise.errors import ConfigError
from shardwise.graph import step_flop
from shardwise.plan import GraphPlan, plan_hash, read_graph_plan

if TYPE_CHECKING:
    from shardwise.runtime import GraphStep


@dataclass(slots=True)
class _GraphRun:
    """The records of a run so far."""

    plan: GraphPlan
    steps: int
    records: list[GraphStep] = field(default_factory=list)

    def line(self) -> str:
        """How the last step went, in one line."""
        last = self.records[-1]
        rate = self.plan.graph.batch / last.step_time_s
        return (
            f"step {last.step:,}/{self.steps:,} · loss {last.loss:.4f} · {rate:,.1f} samples/s"
            f" · MFU {words.percent(self._mfu(last))} · {taken(last.step_time_s, last.exposed_s)},"
            f" predicted {words.seconds(self.plan.step_time_s)}"
        )

    def _mfu(self, record: GraphStep) -> float:
        """The flop of a step over what the peaks of the devices that it is on would do in its time."""
        plan, classes = self.plan, self.plan.cluster.classes
        peak_flop_per_s = sum(
            classes[node.device_class].peak_flop_per_s[plan.job.dtype] * node.speed * node.devices
            for node in plan.cluster.nodes
        )
        return step_flop(plan.graph) / (record.step_time_s * peak_flop_per_s)

    def log_line(self) -> str:
        """The last step as a line of JSON (docs/formats.md)."""
        last = self.records[-1]
        document = {
            "step": last.step,
            "loss": last.loss,
            "gradient_norm": last.gradient_norm,
            "step_time_s": last.step_time_s,
            "exposed_communication_s": last.exposed_s,
            "predicted_s": self.plan.step_time_s,
            "samples": last.samples,
            "samples_per_s": self.plan.graph.batch / last.step_time_s,
            "mfu": self._mfu(last),
        }
        return json.dumps(document) + "\n"


def trained_graph(
    path: str,
    *,
    steps: int,
    lr: float,
    seed: int,
    log: str | None,
    trace: str | None,
    refused: Mapping[str, object],
) -> Output:
    """Train the graph of the plan file at `path` on processes of this machine, on samples of its own. The
    last step goes into the file `trace`, where one is named.

    `refused` are the options that plans of strategies alone have, with what was asked for. ConfigError where
    one of them was, or the plan cannot be run here; exit code 1 where a rank is lost.
    """
    for option, asked in refused.items():
        if asked:
            raise ConfigError(
                "is not there for the plan of an operator graph", key=option, found=str(asked),
                allowed="train without it",
            )  # fmt: skip
    if TORCHRUN_VARIABLE in os.environ:
        raise ConfigError(
            "is not there for the plan of an operator graph", key="torchrun",
            allowed="train, which starts the processes, or shardwise.parallelize in a program",
        )  # fmt: skip
    plan = read_graph_plan(path)
    from shardwise.runtime import (
        RankLost,
        Team,
        check_graph_runnable,
        check_here,
        check_options,
        check_told,
        train_graph,
    )

    check_graph_runnable(plan)
    check_options(plan, is_adaptive=False, is_traced=trace is not None)
    check_here(plan.cluster, plan.devices)
    check_told(plan.graph)
    run = _GraphRun(plan=plan, steps=steps)
    try:
        with _showing(run, log) as report, Team(plan.devices) as team:
            is_traced = trace is not None
            spans = team.run(plan.devices, train_graph, plan, steps, lr, seed, is_traced, report=report)
    except RankLost as error:
        after = f"after step {run.records[-1].step}" if run.records else "before the first step"
        return Output(talk=[f"shardwise: error: {error} {after}; the other ranks were ended"], code=FAILED)
    if trace is not None:
        write_measured([span for rank in spans for span in rank], plan_hash(plan), trace)
    return _summary(run)


@contextlib.contextmanager
def _showing(run: _GraphRun, log: str | None) -> Iterator[Callable[[GraphStep], None]]:
    """Takes records: into the log as they come, and on stderr (a terminal has one line that is renewed, all
    else gets ten lines in all)."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(opened(log)) if log is not None else None
        show = stack.enter_context(progress())

        def report(record: GraphStep) -> None:
            run.records.append(record)
            if file is not None:
                file.write(run.log_line())
                file.flush()
            if show is not None:
                show(run.line())
            elif record.step % max(1, run.steps // 10) == 0:
                talk([run.line()])

        yield report


def _summary(run: _GraphRun) -> Output:
    plan, records = run.plan, run.records
    first, last = records[0], records[-1]
    typical_s = median(record.step_time_s for record in records[len(records) // 4 :])
    return Output(
        lines=[
            row("trained", (f"graph:{plan.graph.name} on {plan.cluster.name}", "value"),
                (f"   {words.counted(last.step, 'step')} of {plan.graph.batch:,} samples", "")),
            row("loss", (f"{first.loss:.4f} to {last.loss:.4f}", "value")),
            row("step time", (words.seconds(typical_s), "time"),
                (f" measured (median), {words.seconds(plan.step_time_s)} predicted", "")),
        ]
    )  # fmt: skip
