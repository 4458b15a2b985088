"""A run of `train` in progress: what it trains, its records, log, and progress lines.

`TrainingRun` has the records; `StepReporter` writes them to the log and to stderr. A resumed run keeps the
lines of the log up to its checkpoint (`resumed_log_bytes`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TextIO

from shardwise.app.cli import words
from shardwise.app.cli.activity import progress
from shardwise.app.cli.output import print_notes
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import Plan
from shardwise.search import plan_of_strategy, shortest_text
from shardwise.units import format_bytes, format_rate

if TYPE_CHECKING:
    from shardwise.runtime import RankLost, StepRecord, TrainedNetwork


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArguments:
    """The options of `train`, parsed; `path` is the plan file."""

    path: str
    data: str = "synthetic"
    steps: int
    lr: float
    seed: int | None
    """None: 0, or the seed of the checkpoint that the run resumes from."""
    log: str | None = None
    trace: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 100
    resume: bool = False
    restarts: int = 0
    weights: str | None = None
    export: str | None = None
    adaptive: bool = False


@dataclass(slots=True)
class TrainingRun:
    """The records of a run so far."""

    arguments: TrainArguments
    plan: Plan
    records: list[StepRecord] = field(default_factory=list)
    network: TrainedNetwork = field(init=False)

    def __post_init__(self) -> None:
        from shardwise.runtime import network_of

        self.network = network_of(self.plan)

    def progress(self) -> str:
        """The last step that was completed, as text."""
        return f"after step {self.records[-1].step}" if self.records else "before the first step"

    def line(self) -> str:
        """One line about the last step."""
        last, network = self.records[-1], self.network
        return (
            f"step {last.step:,}/{self.arguments.steps:,} · loss {last.loss:.4f}"
            f" · {network.per_step / last.step_time_s:,.{network.decimals}f} {network.unit}/s"
            f" · MFU {words.percent(network.peak_s / last.step_time_s)}"
            f" · {time_text(last.step_time_s, last.exposed_s)}, predicted {words.seconds(last.predicted_s)}"
        )

    def change_line(self) -> str:
        """One line about the measurement and the decision after the last step; empty without one."""
        last = self.records[-1]
        change = last.change
        if change is None:
            return ""
        advice = change.advice
        slowest = min(change.rates, key=lambda name: change.rates[name])
        line = (
            f"after step {last.step:,} ({change.reason}): {slowest} has"
            f" {format_rate(change.rates[slowest], 'B/s')} · {advice.decision}"
        )
        if not change.moved_s:
            return line
        unchanged = "nothing" if advice.keep_step_s is None else words.seconds(advice.keep_step_s)
        return (
            f"{line} to {words.degrees_text(advice.strategy)}, predicted {words.seconds(advice.step_s)} per"
            f" step instead of {unchanged}"
            f" · {format_bytes(change.moved_bytes)} between nodes, {words.seconds(change.moved_s)}"
        )

    def changes(self) -> list[int]:
        """The steps after which the strategy changed."""
        steps = zip(self.records, self.records[1:], strict=False)
        return [before.step for before, after in steps if before.strategy != after.strategy]

    def last_plan(self) -> Plan:
        """The plan of the last step: after a change, that of the new strategy."""
        plan, strategy = self.plan, self.records[-1].strategy
        if strategy is None or strategy == plan.strategy:
            return plan
        return plan_of_strategy(plan.model, plan.cluster, plan.job, strategy)

    def log_line(self, record: StepRecord) -> str:
        """A step as a line of JSON (docs/reference/formats.md)."""
        plan, network = self.plan, self.network
        document: dict[str, object] = {
            "step": record.step,
            "loss": record.loss,
            "gradient_norm": record.gradient_norm,
            "step_time_s": record.step_time_s,
            "exposed_communication_s": record.exposed_s,
            "predicted_s": record.predicted_s,
            network.unit: record.step * network.per_step,
            f"{network.unit}_per_s": network.per_step / record.step_time_s,
            "mfu": network.peak_s / record.step_time_s,
        }
        if record.strategy is not None and self.arguments.adaptive:
            document["strategy"] = shortest_text(plan.model, plan.cluster, plan.job, record.strategy)
            document["change"] = None if record.change is None else asdict(record.change)
        return json.dumps(document) + "\n"


@dataclass(slots=True, kw_only=True)
class StepReporter:
    """Writes records to the log, after the `resumed_bytes` of a resumed run, and to stderr: one updated line
    on a terminal, else ten lines per run."""

    run: TrainingRun
    file: TextIO | None
    resumed_bytes: int
    show: Callable[[str], None] | None

    def report(self, record: StepRecord) -> None:
        """Add the record of a step."""
        run = self.run
        run.records.append(record)
        self._log([record])
        if record.change is not None:
            print_notes([run.change_line()])
        if self.show is not None:
            self.show(run.line())
        elif record.step % max(1, run.arguments.steps // 10) == 0:
            print_notes([run.line()])

    def roll_back(self, error: RankLost, step: int) -> None:
        """Roll back to `step` after a lost rank: drop later records, also from the log."""
        run = self.run
        where = f"step {step}" if step else "the beginning"
        print_notes([f"{error} {run.progress()}; all ranks restart from {where}"])
        run.records = [record for record in run.records if record.step <= step]
        if self.file is not None:
            self.file.seek(self.resumed_bytes)
            self.file.truncate()
            self._log(run.records)

    def _log(self, records: Sequence[StepRecord]) -> None:
        if self.file is not None:
            self.file.writelines(map(self.run.log_line, records))
            self.file.flush()


@contextlib.contextmanager
def step_reporter(run: TrainingRun, start: int) -> Iterator[StepReporter]:
    """The reporter of `run`, which starts after step `start`, with its log open."""
    log = run.arguments.log
    with contextlib.ExitStack() as stack:
        resumed_bytes = 0 if log is None or not run.arguments.resume else resumed_log_bytes(log, start)
        file = stack.enter_context(opened(log, resumed_bytes)) if log is not None else None
        yield StepReporter(
            run=run, file=file, resumed_bytes=resumed_bytes, show=stack.enter_context(progress())
        )


def time_text(step_s: float, exposed_s: float | None) -> str:
    """The step time, and the share of exposed communication in it."""
    exposed = "" if exposed_s is None else f" ({words.percent(exposed_s / step_s)} exposed communication)"
    return words.seconds(step_s) + exposed


def opened(path: str, resumed_bytes: int = 0) -> contextlib.AbstractContextManager[TextIO]:
    """The file at `path`, open for writing after its first `resumed_bytes` bytes."""
    try:
        if resumed_bytes:
            os.truncate(path, resumed_bytes)
        return open(path, "a" if resumed_bytes else "w", encoding="utf-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be written: {why}", file=printable(path), key="--log") from None


def resumed_log_bytes(path: str, start: int) -> int:
    """Length in bytes of the log at `path` up to step `start`. A resumed run keeps this part and repeats
    later steps. ConfigError where the file is no log."""
    resumed_bytes = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n") or _step_of(line, path, number) > start:
                    break  # an incomplete line, or a step after the checkpoint
                resumed_bytes += len(line)
    except FileNotFoundError:
        return 0
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be read: {why}", file=printable(path), key="--log") from None
    return resumed_bytes


def _step_of(line: bytes, path: str, number: int) -> int:
    try:
        record = json.loads(line)
        step = record["step"] if isinstance(record, dict) else None
    except (ValueError, KeyError):
        step = None
    if not isinstance(step, int):
        raise ConfigError(
            "is not a log of train that --resume can continue", file=printable(path), key="--log",
            found=f"line {number} without a step", allowed="the log of this run, or a new file",
        )  # fmt: skip
    return step
