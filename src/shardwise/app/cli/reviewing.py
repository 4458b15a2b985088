"""The command `review`: the card of a configuration file, or its JSON document."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise import api
from shardwise.app.cli import card, documents, request, words
from shardwise.app.cli.activity import progress
from shardwise.app.cli.output import LABEL, Line, Output, columns, row
from shardwise.inputs import printable
from shardwise.questions import Review, ReviewChange
from shardwise.units import format_seconds

_STYLES = {"error": "bad", "warning": "warn", "info": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewOptions:
    """The options of `review`, as given; None where an option was left out."""

    cluster: str
    model: str | None
    trainer: str | None
    measured: str | None
    seq_len: str | None
    global_batch_size: str | None
    fix: str
    inter_node: str | None
    calibration: str | None
    software: str | None
    memory_margin: str
    expert_imbalance: str
    mean_sample_len: str | None
    workers: str
    budget: str | None

    def arguments(self) -> Mapping[str, Any]:
        """The arguments of `api.review`. ConfigError with the first option that is no number."""
        return {
            "cluster": self.cluster,
            "model": self.model,
            "trainer": self.trainer,
            "measured": None
            if self.measured is None
            else request.duration("--measured", self.measured, low="1ms", high="30d", bare=True),
            "seq_len": None if self.seq_len is None else request.count("--seq-len", self.seq_len),
            "global_batch_size": None
            if self.global_batch_size is None
            else request.count("--global-batch-size", self.global_batch_size),
            "fix": self.fix,
            "inter_node": self.inter_node,
            "calibration": self.calibration,
            "software": self.software,
            "memory_margin": request.fraction(
                "--memory-margin", self.memory_margin, default=0.05, low=0.0, high=0.9
            ),
            "expert_imbalance": request.fraction(
                "--expert-imbalance", self.expert_imbalance, default=1.1, low=1.0, high=100.0
            ),
            "mean_sample_len": None
            if self.mean_sample_len is None
            else request.count("--mean-sample-len", self.mean_sample_len),
            "workers": request.workers(self.workers),
            "budget": request.budget(self.budget),
        }


def reviewed(file: str, options: ReviewOptions, *, is_json: bool) -> Output:
    """The answer of `review` about the configuration in `file`."""
    with progress() as show:
        found = api.review(file, **options.arguments(), progress=show)
    if is_json:
        return Output(document=documents.review(found))
    return Output(lines=review_card(found, printable(file)))


def review_card(found: Review, file: str) -> list[Line]:
    """The card: verdict, findings, changes, then the layout and where time and memory go."""
    question = found.request
    lines = [
        *card.question_lines(question.model, question.cluster, question.job),
        row("file", (file, ""), (f"   {found.target}", "dim")),
        *_verdict(found),
        *_findings(found),
        *_changes(found),
    ]
    if found.result is not None:
        shown = card.result_lines(found.result, question.model, question.cluster, question.job)
        lines += [(), *_scaled(found), *shown]
    return [*lines, ()]


def _verdict(found: Review) -> Iterator[Line]:
    result = found.result
    if result is None or found.step_time_s is None:
        yield row("verdict", ("is not a legal configuration", "bad"))
        return
    needed, usable = result.peak_memory.device, found.usable_bytes
    of = f"   {words.memory(needed)} of {words.memory(usable)} usable"
    free = words.memory(abs(usable - needed))
    verdict = ("fits", "good") if found.fits else ("does not fit", "bad")
    yield row("verdict", verdict, (f"{of}, {free} {'free' if needed <= usable else 'too much'}", ""))
    what = "measured" if found.measured_s is not None else "predicted"
    yield row("step time", (words.seconds(found.step_time_s), "value"), (f"   {what}", "dim"))
    best_s = found.best_step_time_s
    if best_s is None:
        yield from words.text_rows("best", f"not searched: {found.no_best}", "warn")
        return
    gain = (found.step_time_s - best_s) / found.step_time_s
    share = f"{words.percent(gain)} less" if gain > 0.0 else "no gain"
    yield row("best", (words.seconds(best_s), "value"), (f"   {share}, the best plan of {found.target}", ""))


def _findings(found: Review) -> Iterator[Line]:
    yield ()
    if not found.findings:
        yield row("findings", ("none", "good"))
    for place, one in enumerate(found.findings):
        label = "" if place else "findings"
        yield row(
            label,
            (f"{one.severity:<9}", _STYLES[one.severity]),
            (f"{one.code}  ", "value"),
            (one.field, "code"),
        )
        for line in textwrap.wrap(one.text, columns() - LABEL - 10):
            yield row("", (f"         {line}", ""))


def _changes(found: Review) -> Iterator[Line]:
    yield ()
    if not found.changes:
        yield row("changes", ("none of one or two choices is worth it", "dim"))
    for place, one in enumerate(found.changes):
        yield from _change(f"change {place + 1}", one)
    if found.best is not None and found.best_flags and _is_worth(found):
        gain_s = None if found.step_time_s is None else found.step_time_s - (found.best_step_time_s or 0.0)
        yield from _change("best plan", None, found.best_flags, found.best_step_time_s or 0.0, gain_s)


def _is_worth(found: Review) -> bool:
    best_s = found.best_step_time_s
    return best_s is not None and (not found.fits or best_s < (found.step_time_s or 0.0))


def _change(
    label: str,
    one: ReviewChange | None,
    flags: tuple[str, ...] = (),
    step_time_s: float = 0.0,
    gain_s: float | None = None,
) -> Iterator[Line]:
    if one is not None:
        flags, step_time_s, gain_s = one.flags, one.step_time_s, one.gain_s
    gain = "" if gain_s is None else f"{format_seconds(abs(gain_s))} {'less' if gain_s >= 0.0 else 'more'}, "
    yield row(label, (f"{gain}{words.seconds(step_time_s)} a step", "value"))
    for flag in flags:
        yield row("", (f"  {words.shortened(flag, columns() - LABEL - 3)}", "code"))


def _scaled(found: Review) -> Iterator[Line]:
    """That the times which follow are predictions, where the others are scaled."""
    if found.measured_s is not None:
        yield row("scale", (f"{found.scale:.3f}", "value"), ("   measured over predicted; predicted:", "dim"))
