"""What `train` does: starts the processes where none were started, shows how it goes, writes the log."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, TextIO

from shardwise.app.cli import words
from shardwise.app.cli.adapting import advisor_for
from shardwise.app.cli.output import Output, progress, row, talk
from shardwise.app.cli.request import writable
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plan import Plan, UnevenFile, is_graph_plan, is_uneven_plan, read_plan, read_uneven_plan
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

    plan: Plan | UnevenFile
    steps: int
    is_adaptive: bool = False
    records: list[StepRecord] = field(default_factory=list)

    def progress(self) -> str:
        """How far it has come, in words."""
        return f"after step {self.records[-1].step}" if self.records else "before the first step"

    def line(self) -> str:
        """How the last step went, in one line."""
        last = self.records[-1]
        return (
            f"step {last.step:,}/{self.steps:,} · loss {last.loss:.4f}"
            f" · {self._tokens_per_s(last):,.0f} tokens/s · MFU {words.percent(self._mfu(last))}"
            f" · {taken(last.step_time_s, last.exposed_s)}, predicted {words.seconds(last.predicted_s)}"
        )

    def _tokens_per_s(self, record: StepRecord) -> float:
        return self.plan.job.global_batch_size * self.plan.job.seq_len / record.step_time_s

    def _mfu(self, record: StepRecord) -> float:
        best = self.plan.best
        return best.mfu * best.step_time_s / record.step_time_s

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

    def log_line(self, record: StepRecord) -> str:
        """A step as a line of JSON (docs/formats.md)."""
        document: dict[str, object] = {
            "step": record.step,
            "loss": record.loss,
            "gradient_norm": record.gradient_norm,
            "step_time_s": record.step_time_s,
            "exposed_communication_s": record.exposed_s,
            "predicted_s": record.predicted_s,
            "tokens": record.tokens,
            "tokens_per_s": self._tokens_per_s(record),
            "mfu": self._mfu(record),
        }
        if record.strategy is not None and self.is_adaptive:
            plan = self.plan
            document["strategy"] = shortest_text(plan.model, plan.cluster, plan.job, record.strategy)
            document["change"] = None if record.change is None else asdict(record.change)
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
    restarts: int = 0,
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
    plan = read_uneven_plan(path) if is_uneven_plan(path) else read_plan(path)
    from shardwise.runtime import (
        RankLost,
        TrainOptions,
        check_named,
        check_options,
        check_unused,
        resumed_options,
        samples_of,
        train_here,
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
    )
    _check_runs(plan)
    check_options(plan, is_adaptive=adaptive, is_traced=trace is not None)
    if adaptive and isinstance(plan, Plan):
        options = replace(options, advisor=advisor_for(plan))
    if weights is not None or export is not None:
        check_named(plan.model)
    _make_folders(checkpoint, export)
    if resume:
        options = resumed_options(options, plan)
    elif checkpoint is not None:
        check_unused(checkpoint)
    samples_of(plan, options).batch(0)
    run = _Run(plan=plan, steps=options.steps, is_adaptive=adaptive)
    if TORCHRUN_VARIABLE in os.environ:
        return _trained_here(run, path, options, log=log, trace=trace, export=export)
    try:
        with _showing(run, log) as out:
            spans = train_here(plan, options, report=out.report, restarts=restarts, on_restart=out.go_back)
    except RankLost as error:
        return Output(talk=_lost(error, run, path, options), code=FAILED)
    if trace is not None:
        _write_trace(trace, [span for rank in spans for span in rank])
    return _ended(run, options, export)


def _check_runs(plan: Plan | UnevenFile) -> None:
    """ConfigError where the runtime does not run `plan`."""
    from shardwise.runtime import check_runnable, check_uneven_runnable

    if isinstance(plan, Plan):
        check_runnable(plan)
        return
    check_uneven_runnable(plan)


def _trained_here(
    run: _Run,
    path: str,
    options: TrainOptions,
    *,
    log: str | None,
    trace: str | None,
    export: str | None,
) -> Output:
    """This process's part of a run that torchrun started: rank 0 speaks and writes for all."""
    from shardwise.runtime import RankLost, losses_of_peers, together, train

    if os.environ["RANK"] != "0":
        try:
            with losses_of_peers():
                spans = train(lambda record: None, run.plan, options)
                if options.is_traced:
                    together(spans)
        except ConfigError:
            return Output(code=REFUSED)  # rank 0 says why
        except RankLost:
            return Output(code=FAILED)
        return Output()
    try:
        with _showing(run, log) as shown, losses_of_peers():
            spans = train(shown.report, run.plan, options)
            if options.is_traced:
                spans = together(spans)
    except RankLost as error:
        return Output(talk=_lost(error, run, path, options), code=FAILED)
    if trace is not None:
        _write_trace(trace, spans)
    return _ended(run, options, export)


def _ended(run: _Run, options: TrainOptions, folder: str | None) -> Output:
    """The summary; the parameters too, where a folder is named for them."""
    from shardwise.runtime import export

    if folder is not None and options.checkpoint is not None:
        export(run.plan, options.checkpoint, folder)
    return _summary(run)


@dataclass(slots=True, kw_only=True)
class _Shown:
    """Takes records: into the log as they come, and on stderr (a terminal has one line that is renewed, all
    else gets ten lines in all)."""

    run: _Run
    file: TextIO | None
    show: Callable[[str], None] | None

    def report(self, record: StepRecord) -> None:
        run = self.run
        run.records.append(record)
        self._log([record])
        if record.change is not None:
            talk([run.change_line()])
        if self.show is not None:
            self.show(run.line())
        elif record.step % max(1, run.steps // 10) == 0:
            talk([run.line()])

    def go_back(self, error: RankLost, step: int) -> None:
        """The run goes on behind `step`: what was done after it did not count, in the log neither."""
        run = self.run
        talk(
            [f"{error} {run.progress()}; all start again from {f'step {step}' if step else 'the beginning'}"]
        )
        run.records = [record for record in run.records if record.step <= step]
        if self.file is not None:
            self.file.seek(0)
            self.file.truncate()
            self._log(run.records)

    def _log(self, records: Sequence[StepRecord]) -> None:
        if self.file is not None:
            self.file.writelines(map(self.run.log_line, records))
            self.file.flush()


@contextlib.contextmanager
def _showing(run: _Run, log: str | None) -> Iterator[_Shown]:
    """What takes the records of `run`, with the file `log` open."""
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(opened(log)) if log is not None else None
        yield _Shown(run=run, file=file, show=stack.enter_context(progress()))


def taken(step_s: float, exposed_s: float | None) -> str:
    """What a step took, and what of it was waiting for other ranks."""
    exposed = "" if exposed_s is None else f" ({words.percent(exposed_s / step_s)} exposed communication)"
    return words.seconds(step_s) + exposed


def opened(path: str) -> contextlib.AbstractContextManager[TextIO]:
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


def _make_folders(checkpoint: str | None, export: str | None) -> None:
    if export is not None and checkpoint is None:
        raise ConfigError("needs --checkpoint, from which it is made", key="--export", found=export)
    for option, folder in (("--checkpoint", checkpoint), ("--export", export)):
        if folder is not None:
            _make_folder(option, folder)


def _make_folder(option: str, path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be made: {why}", file=printable(path), key=option) from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError("cannot be written to", file=printable(path), key=option)


def _lost(error: RankLost, run: _Run, path: str, options: TrainOptions) -> list[str]:
    lines = [f"shardwise: error: {error} {run.progress()}; the other ranks were ended"]
    if options.checkpoint is not None:
        lines.append(f"  to go on from {_again(run, path, options)}")
    if os.environ.get("SHARDWISE_DEBUG") and error.details:
        lines.append(error.details)
    return lines


def _again(run: _Run, path: str, options: TrainOptions) -> str:
    """The command that goes on with the run, and from where."""
    from shardwise.runtime import last_options

    words_again = ["shardwise", "train", path, "--data", options.data, "--steps", str(options.steps),
                   "--lr", f"{options.lr:g}", "--checkpoint", str(options.checkpoint),
                   "--checkpoint-every", str(options.checkpoint_every)]  # fmt: skip
    if run.is_adaptive:
        words_again.append("--adaptive")
    last = last_options(options, run.plan)
    if last.resumed is not None:
        return f"the last checkpoint: {shlex.join([*words_again, '--resume'])}"
    words_again += ["--seed", str(options.seed)]
    if options.weights is not None:
        words_again += ["--weights", options.weights]
    return f"the beginning: {shlex.join(words_again)}"


def _summary(run: _Run) -> Output:
    plan, records = run.plan, run.records
    first, last = records[0], records[-1]
    typical_s = median(record.step_time_s for record in records[len(records) // 4 :])
    best = plan.best
    return Output(
        lines=[
            row("trained", (f"{plan.model.name} on {plan.cluster.name}", "value"),
                (f"   {words.counted(last.step, 'step')} of {last.tokens // last.step:,} tokens", "")),
            row(*_described(plan)),
            row("loss", (f"{first.loss:.4f} to {last.loss:.4f}", "value")),
            row("step time", (words.seconds(typical_s), "time"),
                (f" measured (median), {words.seconds(best.step_time_s)} predicted", "")),
        ]
    )  # fmt: skip


def _described(plan: Plan | UnevenFile) -> tuple[str, tuple[str, str]]:
    """The plan in a few words, under what they are."""
    if isinstance(plan, Plan):
        return "strategy", (words.degrees_text(plan.best.strategy), "")
    pipelines = words.counted(len(plan.best.layout.pipelines), "pipeline")
    shares = " + ".join(map(str, plan.best.microbatches))
    return "plan", (f"uneven: {pipelines}, {shares} microbatches", "")
