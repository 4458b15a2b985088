"""The command `frontier`: searches a Pareto frontier per part of the cluster, chooses a point, and prints a
card or JSON.

`frontier` and `answered` are the entry points; `save` writes a plan file per point and an index for `--save
DIR`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

from shardwise import api
from shardwise.app.cli.activity import progress
from shardwise.app.cli.card import NOT_AS_GIVEN, next_lines
from shardwise.app.cli.frontier.graphs import graph_subject
from shardwise.app.cli.frontier.output import (
    curve_table,
    frontier_document,
    frontier_idle_lines,
    is_of_uniform_strategies,
    pick_lines,
    plot_of,
    profile_table,
    reference_lines,
)
from shardwise.app.cli.frontier.subject import StrategySubject, Subject
from shardwise.app.cli.output import Line, Output, row
from shardwise.app.cli.planning import inputs_of, question_arguments
from shardwise.app.cli.request import JobOptions, LongRun, count, fraction, job_arguments, workers
from shardwise.app.cli.whole_run import runs_table
from shardwise.app.cli.words import counted, percent, text_rows
from shardwise.app.plot import check_plot_file, write_plot
from shardwise.cluster import pools_of
from shardwise.errors import ConfigError, InternalError
from shardwise.inputs import printable, short_repr
from shardwise.plans import Reliability, check_output_path, remove_abandoned, write_file, write_plan
from shardwise.questions import FrontierAnswer, GraphSource, RunOnPart, StrategySource, runs_of_length
from shardwise.search import MOST_UNITED, Curve
from shardwise.units import format_bytes

INDEX = "frontier.json"
"""The file of `--save` that lists the points and the names of their plan files."""

LayoutT = TypeVar("LayoutT")


def check_folder(folder: str) -> None:
    """ConfigError, before the search, where the folder cannot be created or written into."""
    if os.path.isdir(folder):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError("cannot be written into", file=printable(folder), key="--save")
    elif os.path.exists(folder) or not os.path.isdir(os.path.dirname(os.path.abspath(folder))) or not folder:
        raise ConfigError(
            "is neither a folder nor a new name in a folder",
            key="--save",
            found=repr(folder) if not folder else printable(folder),
            allowed="a folder, for a plan file per point",
        )


def save(
    folder: str, subject: Subject[LayoutT], found: FrontierAnswer[LayoutT], *, inputs: Sequence[str]
) -> list[str]:
    """Write a plan file for each point that a plan file can represent, then the answer with their names and
    hashes. Each file is written atomically. An older index is removed first and the new one written last, so
    an interrupted write leaves no index of other files. Returns a note."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be created: {why}", file=printable(folder), key="--save") from error
    index = os.path.join(folder, INDEX)
    check_output_path("--save", index, inputs=inputs)
    remove_abandoned(folder)
    with suppress(FileNotFoundError):
        os.unlink(index)
    names: list[str | None] = []
    hashes: list[str | None] = []
    digits = len(str(len(found.points)))
    for number, point in enumerate(found.points, start=1):
        name = f"devices-{point.devices}-point-{number:0{digits}}.yaml"
        try:
            plan = found.plan(point)
        except ConfigError:
            names.append(None)
            hashes.append(None)
            continue
        path = os.path.join(folder, name)
        check_output_path("--save", path, inputs=inputs)
        hashes.append(write_plan(path, plan))
        names.append(name)
    document = {**frontier_document(subject, found), "plans": names, "plan_hashes": hashes}
    write_file(index, (json.dumps(document, indent=2) + "\n").encode("ascii"))
    plans_written = sum(name is not None for name in names)
    return [f"wrote {plans_written} plans for {len(names)} points and {INDEX} to {folder}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierOptions:
    """The options of `frontier` other than those of the job, as given; None where one was left out."""

    mode: str | None
    memory_limit: str | None
    devices: str | None
    stages: str | None
    microbatches: str | None
    meshes: str
    objectives: str
    epsilon: str
    target: str | None = None
    space: str
    fix: str
    workers: str
    save: str | None
    plot: str | None
    use_all: bool
    is_json: bool
    run: LongRun | None = None


def frontier(options: JobOptions, frontier_options: FrontierOptions) -> Output:
    """The answer of `frontier` for a transformer or an operator graph. Infeasible where nothing fits, with
    the smallest point where `--memory-limit` is below it."""
    sizes, microbatches = frontier_options.devices, frontier_options.microbatches
    arguments = {
        **job_arguments(options),
        "mode": frontier_options.mode or ("profile" if _has_length(frontier_options) else "time"),
        "memory_limit": frontier_options.memory_limit,
        "devices": None if sizes is None else _counts("--devices", sizes),
        "stages": None if frontier_options.stages is None else count("--stages", frontier_options.stages),
        "microbatches": None if microbatches is None else _counts("--microbatches", microbatches),
        "meshes": frontier_options.meshes,
        "objectives": frontier_options.objectives,
        "epsilon": fraction("--epsilon", frontier_options.epsilon, default=0.001, low=0.0, high=1.0),
        "target": frontier_options.target,
        "space": frontier_options.space,
        "fix": frontier_options.fix,
        "workers": workers(frontier_options.workers),
        "use_all": frontier_options.use_all,
    }
    inputs = inputs_of(options, frontier_options.space)
    if frontier_options.save is not None:
        check_folder(frontier_options.save)
    if frontier_options.plot is not None:
        check_plot_file(frontier_options.plot, key="--plot")
        check_output_path("--plot", frontier_options.plot, inputs=inputs)
    with progress() as show:
        found = api.frontier(**arguments, progress=show)
    following = _next_commands(options, frontier_options)
    if isinstance(found.source, GraphSource):
        return answered(graph_subject(found.source), found, frontier_options, inputs=inputs)
    if not isinstance(found.source, StrategySource):
        raise InternalError("a frontier of neither a transformer nor a graph")
    subject = StrategySubject(found.source)
    return answered(subject, found, frontier_options, inputs=inputs, next_commands=following)


def _has_length(frontier_options: FrontierOptions) -> bool:
    """Whether the length of a whole run is requested."""
    return frontier_options.run is not None and frontier_options.run.length is not None


def _counts(option: str, text: str) -> list[int]:
    """The counts in `1,2,4`; whether they can be requested is checked later."""
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", text) is None:
        raise ConfigError("is not a list of numbers", key=option, found=short_repr(text), allowed="1,2,4,8")
    return [count(option, part) for part in text.split(",")]


def _next_commands(options: JobOptions, frontier_options: FrontierOptions) -> tuple[str, ...]:
    """The same question with --plot and with --save, where they were not given."""
    given = (
        ("--mode", frontier_options.mode, None),
        ("--memory-limit", frontier_options.memory_limit, None),
        ("--devices", frontier_options.devices, None),
        ("--stages", frontier_options.stages, None),
        ("--objectives", frontier_options.objectives, "time,memory"),
        ("--target", frontier_options.target, None),
        ("--space", frontier_options.space, "default"),
        ("--fix", frontier_options.fix, ""),
    )
    words = ["shardwise frontier", *question_arguments(options)]
    for name, value, default in given:
        if value is not None and value != default:
            words += [name, shlex.quote(value)]
    words += ["--use-all"] if frontier_options.use_all else []
    more = ((frontier_options.plot, "--plot frontier.html"), (frontier_options.save, "--save frontier"))
    return tuple(" ".join((*words, option)) for value, option in more if value is None)


def answered(
    subject: Subject[LayoutT],
    found: FrontierAnswer[LayoutT],
    frontier_options: FrontierOptions,
    *,
    inputs: Sequence[str],
    next_commands: Sequence[str] = (),
) -> Output:
    """The output for any subject."""
    notes = (
        [] if frontier_options.save is None else save(frontier_options.save, subject, found, inputs=inputs)
    )
    if frontier_options.plot is not None:
        write_plot(frontier_options.plot, plot_of(subject, found))
        notes.append(f"wrote {frontier_options.plot}")
    run, runs = frontier_options.run, None
    if run is not None and run.length is not None:
        runs = runs_of_length(
            found.curves,
            run.length,
            run.reliability or Reliability(),
            limit_bytes=found.limit_bytes,
            tokens_per_step=found.tokens_per_step,
        )
    if frontier_options.is_json:
        return Output(document=frontier_document(subject, found, runs), notes=notes)
    return Output(lines=[*_lines(subject, found, runs), *next_lines(next_commands)], notes=notes)


def _lines(
    subject: Subject[LayoutT], found: FrontierAnswer[LayoutT], runs: Sequence[RunOnPart] | None
) -> Iterator[Line]:
    yield from subject.heading()
    counts = [curve for curve in found.curves if curve.points]
    where = _where(counts)
    yield row(
        "frontier", (f"{len(found.points):,} points", "value"), (f" of {_listed(found)} on {where}", "")
    )
    proven = _proven(max(curve.epsilon for curve in counts), found.epsilon)
    yield row("", (NOT_AS_GIVEN if subject.priced_as else proven, "dim"))
    if is_of_uniform_strategies(subject):
        text = "uniform strategies only; `plan` has uneven plans, maybe faster"
        yield from text_rows("", text, "warn")
    yield from _unsearched(subject, found)
    if found.pick is not None:
        yield from pick_lines(subject, found.pick, _why(subject, found))
        yield from frontier_idle_lines(subject, found)
    if runs is not None:
        yield from runs_table(runs)
    if len(found.curves) > 1 or found.mode == "profile":
        yield from profile_table(subject, found)
    if found.pick is not None:
        yield from curve_table(subject, found, found.curve_of(found.pick))
    yield from reference_lines(subject, found.references)
    yield from subject.proof(found.curves)


def _unsearched(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> Iterator[Line]:
    """The parts of a cluster of several pools that were not searched."""
    pools = len(pools_of(subject.source.curves.cluster))
    if pools > 1 and [curve.part for curve in found.curves] == [subject.source.curves.cluster]:
        yield row("", ("on all devices; smaller parts of the cluster were not searched", "dim"))
    elif pools > MOST_UNITED:
        yield row(
            "",
            (
                f"each of the {pools} pools alone and all devices; other unions of pools were not searched",
                "dim",
            ),
        )


def _where(curves: Sequence[Curve[LayoutT]]) -> str:
    """The devices of the points: a number, or how many counts or parts."""
    sizes = {curve.devices for curve in curves}
    if len(curves) == 1:
        return counted(curves[0].devices, "device")
    return (
        f"{len(curves)} parts of the cluster" if len(sizes) < len(curves) else f"{len(sizes)} device counts"
    )


def _proven(proven: float, allowed: float) -> str:
    """The proven relative distance from the exact frontier, of the worst curve, and the allowed one."""
    if proven == 0.0:
        return f"exact (--epsilon {percent(allowed, 2)})"
    proven_text = f"within {percent(proven, 2)} of the exact frontier"
    if proven > allowed:
        return f"{proven_text}; not proven to --epsilon {percent(allowed, 2)}"
    return (
        f"{proven_text} (--epsilon)"
        if proven == allowed
        else f"{proven_text} (--epsilon {percent(allowed, 2)})"
    )


def _listed(found: FrontierAnswer[LayoutT]) -> str:
    return ", ".join(found.objectives[:-1]) + f" and {found.objectives[-1]}"


def _why(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> str:
    of = " uniform strategy" if is_of_uniform_strategies(subject) else ""
    within = f" within {format_bytes(found.limit_bytes)}" if isfinite(found.limit_bytes) else ""
    return {"time": f"the fastest{of}{within}", "devices": f"the fewest devices{within}, the fastest there"}[
        found.mode
    ]
