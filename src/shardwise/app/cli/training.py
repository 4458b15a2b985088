"""What `train` does: starts the processes where none were started, shows how it goes, writes the log."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from shardwise.app.cli import words
from shardwise.app.cli.adapting import advisor_for
from shardwise.app.cli.output import Output, progress, row, talk
from shardwise.app.cli.request import writable
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plan import Plan, is_graph_plan, read_plan
from shardwise.search import shortest_text
from shardwise.sim import Span, Trace, write_trace
from shardwise.units import format_bytes, format_rate

if TYPE_CHECKING:
    from shardwise.runtime import RankLost, StepRecord, TrainOptions

TORCHRUN_VARIABLE = "TORCHELASTIC_RUN_ID"
"""Set in processes that torchrun started."""

FAILED = 1
REFUSED = 2


@dataclass(slots=True)
class _Run:
    """The records of a run so far."""

    plan: Plan
    steps: int
    is_adaptive: bool = False
    records: list[StepRecord] = field(default_factory=list)

    def line(self) -> str:
        """How the last step went, in one line."""
        last, best = self.records[-1], self.plan.best
        rate = self.plan.job.global_batch_size * self.plan.job.seq_len / last.step_time_s
        return (
            f"step {last.step:,}/{self.steps:,} · loss {last.loss:.4f} · {rate:,.0f} tokens/s"
            f" · MFU {words.percent(best.mfu * best.step_time_s / last.step_time_s)}"
            f" · {words.seconds(last.step_time_s)}, predicted {words.seconds(last.predicted_s)}"
        )

    def change_line(self) -> str:
        """What was measured after the last step, and what was done."""
        last = self.records[-1]
        change = last.change
        if change is None:
            return ""
        advice = change.advice
        slowest = min(change.rates, key=lambda name: change.rates[name])
        line = (
            f"after step {last.step:,} ({change.reason}): {slowest} carries"
            f" {format_rate(change.rates[slowest], 'B/s')} · {advice.decision}"
        )
        if not change.moved_s:
            return line
        kept = "nothing" if advice.keep_step_s is None else words.seconds(advice.keep_step_s)
        return (
            f"{line} to {words.degrees_text(advice.strategy)}, predicted {words.seconds(advice.step_s)} a"
            f" step instead of {kept}"
            f" · {format_bytes(change.moved_bytes)} between nodes, {words.seconds(change.moved_s)}"
        )

    def log_line(self) -> str:
        """The last step as a line of JSON (docs/formats.md)."""
        last = self.records[-1]
        document: dict[str, object] = {
            "step": last.step,
            "loss": last.loss,
            "gradient_norm": last.gradient_norm,
            "step_time_s": last.step_time_s,
            "predicted_s": last.predicted_s,
            "tokens": last.tokens,
        }
        if self.is_adaptive:
            plan = self.plan
            document["strategy"] = shortest_text(plan.model, plan.cluster, plan.job, last.strategy)
            document["change"] = None if last.change is None else asdict(last.change)
        return json.dumps(document) + "\n"


def trained(
    path: str,
    *,
    data: str,
    steps: int,
    lr: float,
    seed: int,
    log: str | None,
    trace: str | None,
    checkpoint: str | None,
    checkpoint_every: int,
    resume: bool,
    weights: str | None = None,
    export: str | None = None,
    adaptive: bool = False,
) -> Output:
    """Train under the plan file at `path`, on processes of this machine or on those that torchrun started.

    ConfigError where the plan cannot be run here; exit code 1 where a rank is lost.
    """
    for option, written in (("--log", log), ("--trace", trace)):
        if written is not None:
            writable(option, written, inputs=(path, data))
    if is_graph_plan(path):
        from shardwise.app.cli.graph_training import trained_graph

        asked = {
            "--data": data if data != "synthetic" else None, "--trace": trace, "--checkpoint": checkpoint,
            "--resume": resume, "--weights": weights, "--export": export, "--adaptive": adaptive,
        }  # fmt: skip
        return trained_graph(path, steps=steps, lr=lr, seed=seed, log=log, refused=asked)
    plan = read_plan(path)
    from shardwise.runtime import (
        RankLost,
        Team,
        TrainOptions,
        check_named,
        check_runnable,
        resumed_options,
        samples_of,
        train,
    )

    options = TrainOptions(
        steps=steps,
        data=data,
        lr=lr,
        seed=seed,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        is_traced=trace is not None,
        weights=weights,
        advisor=advisor_for(plan) if adaptive else None,
    )
    check_runnable(plan)
    if weights is not None or export is not None:
        check_named(plan.model)
    if export is not None and checkpoint is None:
        raise ConfigError("needs --checkpoint, from which it is made", key="--export", found=export)
    for option, folder in (("--checkpoint", checkpoint), ("--export", export)):
        if folder is not None:
            _make_folder(option, folder)
    if resume:
        options = resumed_options(options, plan)
    samples_of(plan, options).batch(0)
    run = _Run(plan=plan, steps=options.steps, is_adaptive=adaptive)
    if TORCHRUN_VARIABLE in os.environ:
        if trace is not None:
            raise ConfigError(
                "is not written under torchrun", key="--trace", found=trace, allowed="without torchrun"
            )
        return _trained_here(run, options, log, export)
    try:
        with _showing(run, log) as report, Team(plan.cluster.devices) as team:
            spans = team.run(plan.cluster.devices, train, plan, options, report=report)
    except RankLost as error:
        return Output(talk=_lost(error, run, path, options), code=FAILED)
    if trace is not None:
        _write_trace(trace, [span for rank in spans for span in rank])
    return _ended(run, options, export)


def _trained_here(run: _Run, options: TrainOptions, log: str | None, export: str | None) -> Output:
    """This process's part of a run that torchrun started: rank 0 speaks for all."""
    from shardwise.runtime import train

    if os.environ["RANK"] != "0":
        try:
            train(lambda record: None, run.plan, options)
        except ConfigError:
            return Output(code=REFUSED)  # rank 0 says why
        return Output()
    with _showing(run, log) as report:
        train(report, run.plan, options)
    return _ended(run, options, export)


def _ended(run: _Run, options: TrainOptions, folder: str | None) -> Output:
    """The summary; the parameters too, where a folder is named for them."""
    from shardwise.runtime import export

    if folder is not None and options.checkpoint is not None:
        export(run.plan, options.checkpoint, folder)
    return _summary(run)


@contextlib.contextmanager
def _showing(run: _Run, log: str | None) -> Iterator[Callable[[StepRecord], None]]:
    """Takes records: into the log as they come, and on stderr (a terminal has one line that is renewed, all
    else gets ten lines in all)."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(opened(log)) if log is not None else None
        show = stack.enter_context(progress())

        def report(record: StepRecord) -> None:
            run.records.append(record)
            if file is not None:
                file.write(run.log_line())
                file.flush()
            if record.change is not None:
                talk([run.change_line()])
            if show is not None:
                show(run.line())
            elif record.step % max(1, run.steps // 10) == 0:
                talk([run.line()])

        yield report


def opened(path: str) -> contextlib.AbstractContextManager[Any]:
    """The file at `path`, to be written from its beginning."""
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be written: {why}", file=printable(path), key="--log") from None


def _write_trace(path: str, spans: Sequence[Span]) -> None:
    """The spans of all ranks, from the first on, in the form that `simulate --trace` writes."""
    origin_s = min(span.start_s for span in spans)
    shifted = (
        replace(span, start_s=span.start_s - origin_s, finish_s=span.finish_s - origin_s) for span in spans
    )
    write_trace(Trace(spans=tuple(shifted)), path)


def _make_folder(option: str, path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be made: {why}", file=printable(path), key=option) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError("cannot be written to", file=printable(path), key=option)


def _lost(error: RankLost, run: _Run, path: str, options: TrainOptions) -> list[str]:
    after = f"after step {run.records[-1].step}" if run.records else "before the first step"
    lines = [f"shardwise: error: {error} {after}; the other ranks were ended"]
    if options.checkpoint is not None:
        words_again = ("shardwise", "train", path, "--data", options.data, "--steps", str(options.steps),
                       "--lr", f"{options.lr:g}", "--checkpoint", options.checkpoint,
                       "--checkpoint-every", str(options.checkpoint_every), "--resume")  # fmt: skip
        lines.append(f"  to go on from the last checkpoint: {shlex.join(words_again)}")
    if os.environ.get("SHARDWISE_DEBUG") and error.details:
        lines.append(error.details)
    return lines


def _summary(run: _Run) -> Output:
    plan, records = run.plan, run.records
    first, last = records[0], records[-1]
    typical_s = median(record.step_time_s for record in records[len(records) // 4 :])
    best = plan.best
    return Output(
        lines=[
            row("trained", (f"{plan.model.name} on {plan.cluster.name}", "value"),
                (f"   {words.counted(last.step, 'step')} of {last.tokens // last.step:,} tokens", "")),
            row("strategy", (words.degrees_text(best.strategy), "")),
            row("loss", (f"{first.loss:.4f} to {last.loss:.4f}", "value")),
            row("step time", (words.seconds(typical_s), "time"),
                (f" measured (median), {words.seconds(best.step_time_s)} predicted", "")),
        ]
    )  # fmt: skip
