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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import TypeVar

from shardwise.app.cli.card import NOT_AS_GIVEN, next_lines
from shardwise.app.cli.frontier.graphs import graph_subject, is_graph, load_graph_request, refuse_bare_graph
from shardwise.app.cli.frontier.output import (
    FrontierAnswer,
    curve_table,
    figures,
    frontier_document,
    frontier_idle_lines,
    pick_lines,
    plot_of,
    point_document,
    profile_table,
    reference_lines,
)
from shardwise.app.cli.frontier.subject import StrategySubject, Subject
from shardwise.app.cli.output import Line, Output, progress, row
from shardwise.app.cli.planning import question_arguments, require_candidates, space_choice
from shardwise.app.cli.request import (
    JobOptions,
    Request,
    check_output_path,
    choice,
    count,
    fraction,
    load_request,
    workers,
)
from shardwise.app.cli.words import counted, percent
from shardwise.app.plot import check_plot_file, write_plot
from shardwise.cluster import Cluster, pools_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.inputs import printable, short_repr
from shardwise.plans import Value, write_file, write_plan
from shardwise.search import (
    MODES,
    MOST_UNITED,
    Curve,
    PartChoice,
    Point,
    Question,
    SpaceChoice,
    chosen,
    curves_for,
    points_of,
    smallest,
    uses_any_part,
)
from shardwise.strategy import parse_fields
from shardwise.units import format_bytes, parse_quantity

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
    """Write a plan file for each point that a plan file can represent, then the answer with their names. Each
    file is written atomically, the index last. Returns a note."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be created: {why}", file=printable(folder), key="--save") from error
    names: list[str | None] = []
    digits = len(str(len(found.points)))
    for number, point in enumerate(found.points, start=1):
        curve = found.curve_of(point)
        name = f"devices-{point.devices}-point-{number:0{digits}}.yaml"
        try:
            plan = subject.plan(curve, curve.points.index(point), epsilon=found.epsilon)
        except ConfigError:
            names.append(None)
            continue
        path = os.path.join(folder, name)
        check_output_path("--save", path, inputs=inputs)
        write_plan(path, plan)
        names.append(name)
    index = os.path.join(folder, INDEX)
    check_output_path("--save", index, inputs=inputs)
    document = frontier_document(subject, found)
    write_file(index, (json.dumps({**document, "plans": names}, indent=2) + "\n").encode("ascii"))
    plans_written = sum(name is not None for name in names)
    return [f"wrote {plans_written} plans for {len(names)} points and {INDEX} to {folder}"]


OBJECTIVES = (("time", "memory"), ("time", "memory", "cost"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierOptions:
    """The options of `frontier` other than those of the job, as given; None where one was left out."""

    mode: str
    memory_limit: str | None
    devices: str | None
    stages: str | None
    microbatches: str | None
    meshes: str
    objectives: str
    epsilon: str
    space: str
    fix: str
    workers: str
    save: str | None
    plot: str | None
    uses_all: bool
    is_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierQuery:
    """The options of a frontier, parsed; `limit_bytes` is infinite and `sizes` None where they were left
    out."""

    mode: str
    limit_bytes: float
    sizes: tuple[int, ...] | None
    objectives: tuple[str, ...]
    epsilon: float


def frontier(options: JobOptions, frontier_options: FrontierOptions) -> Output:
    """The answer of `frontier` for a transformer or an operator graph. Infeasible where nothing fits, with
    the smallest point where `--memory-limit` is below it."""
    query = read_query(frontier_options)
    if is_graph(options.model):
        return _graph_frontier(options, query, frontier_options)
    fixed = fixed_fields(frontier_options)
    space = space_choice(frontier_options.space)
    processes = workers(frontier_options.workers)
    inputs = (options.model, options.cluster, *([space.file] if space.file else []))
    if frontier_options.save is not None:
        check_folder(frontier_options.save)
    if frontier_options.plot is not None:
        check_plot_file(frontier_options.plot, key="--plot")
        check_output_path("--plot", frontier_options.plot, inputs=inputs)
    refuse_bare_graph(options.model)
    request = load_request(options)
    question = Question(
        model=request.model,
        cluster=request.cluster,
        job=request.job,
        space=space.base,
        fixed=fixed,
        axes=space.axes,
        workers=processes,
        use_all=frontier_options.uses_all,
        fixed_by={} if frontier_options.stages is None else {"pp": _pp_options(frontier_options)},
    )
    if uses_any_part(query.mode, query.sizes):
        _require_candidates(space, fixed, request, uses_all=frontier_options.uses_all)
    if "cost" in query.objectives:
        require_prices(request.cluster)
    subject = StrategySubject(request, question)
    return answered(
        subject,
        query,
        frontier_options,
        inputs=inputs,
        next_commands=_next_commands(options, frontier_options),
    )


def _require_candidates(
    space: SpaceChoice, fixed: Mapping[str, Value], request: Request, *, uses_all: bool
) -> None:
    """ConfigError where a space file leaves no candidate on any part of the cluster."""
    refusal: ConfigError | None = None
    for part in PartChoice(request.cluster, uses_all).unions:
        try:
            return require_candidates(space, fixed, replace(request, cluster=part))
        except ConfigError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _graph_frontier(options: JobOptions, query: FrontierQuery, frontier_options: FrontierOptions) -> Output:
    """The answer for an operator graph. Options without effect on a graph are still validated."""
    workers(frontier_options.workers)
    for option, given, default in (
        ("--space", frontier_options.space, "default"),
        ("--fix", frontier_options.fix, ""),
    ):
        if given != default:
            raise ConfigError(
                "applies to transformers; a graph has a layout per operator", key=option,
                found=short_repr(given), allowed="a transformer, or no such option",
            )  # fmt: skip
    if frontier_options.save is not None:
        check_folder(frontier_options.save)
    if frontier_options.plot is not None:
        check_plot_file(frontier_options.plot, key="--plot")
        check_output_path("--plot", frontier_options.plot, inputs=(options.model, options.cluster))
    request = load_graph_request(options, frontier_options.meshes)
    if "cost" in query.objectives:
        require_prices(request.cluster)
    subject = graph_subject(
        request, frontier_options.stages, frontier_options.microbatches, uses_all=frontier_options.uses_all
    )
    return answered(subject, query, frontier_options, inputs=(options.model, options.cluster))


def fixed_fields(frontier_options: FrontierOptions) -> dict[str, int | str | bool]:
    """The fixed fields of a strategy: those of `--fix`, and `pp` by `--stages`."""
    if frontier_options.microbatches is not None:
        raise ConfigError(
            "applies to graphs; a strategy has micro_batch_size", key="--microbatches",
            found=short_repr(frontier_options.microbatches), allowed="--fix micro_batch_size=N",
        )  # fmt: skip
    if frontier_options.meshes != "tiers":
        raise ConfigError(
            "applies to graphs; a strategy has degrees and axis_order", key="--meshes",
            found=short_repr(frontier_options.meshes), allowed="--fix tp=N,axis_order=...",
        )  # fmt: skip
    fixed = parse_fields(frontier_options.fix, key="--fix")
    if frontier_options.stages is not None:
        stages = count("--stages", frontier_options.stages)
        if fixed.setdefault("pp", stages) != stages:
            raise ConfigError("differs from pp in --fix", key="--stages", found=str(stages))
    return fixed


def _pp_options(frontier_options: FrontierOptions) -> str:
    """The options that fix the number of stages."""
    return "--stages and --fix pp" if "pp" in parse_fields(frontier_options.fix, key="--fix") else "--stages"


def _next_commands(options: JobOptions, frontier_options: FrontierOptions) -> tuple[str, ...]:
    """The same question with --plot and with --save, where they were not given."""
    given = (
        ("--mode", frontier_options.mode, "time"),
        ("--memory-limit", frontier_options.memory_limit, None),
        ("--devices", frontier_options.devices, None),
        ("--stages", frontier_options.stages, None),
        ("--objectives", frontier_options.objectives, "time,memory"),
        ("--space", frontier_options.space, "default"),
        ("--fix", frontier_options.fix, ""),
    )
    words = ["shardwise frontier", *question_arguments(options)]
    for name, value, default in given:
        if value is not None and value != default:
            words += [name, shlex.quote(value)]
    words += ["--use-all"] if frontier_options.uses_all else []
    more = ((frontier_options.plot, "--plot frontier.html"), (frontier_options.save, "--save frontier"))
    return tuple(" ".join((*words, option)) for value, option in more if value is None)


def read_query(frontier_options: FrontierOptions) -> FrontierQuery:
    """The options, parsed. ConfigError with the first option in error."""
    mode = choice("--mode", frontier_options.mode, MODES)
    objectives = tuple(frontier_options.objectives.split(","))
    if tuple(sorted(objectives, key="time memory cost".find)) not in OBJECTIVES:
        raise ConfigError(
            "is not one of the choices",
            key="--objectives",
            found=short_repr(frontier_options.objectives),
            allowed=" or ".join(",".join(names) for names in OBJECTIVES),
        )
    return FrontierQuery(
        mode=mode,
        limit_bytes=_limit_bytes(frontier_options.memory_limit),
        sizes=None if frontier_options.devices is None else _sizes(frontier_options.devices),
        objectives=objectives,
        epsilon=fraction("--epsilon", frontier_options.epsilon, default=0.001, low=0.0, high=1.0),
    )


def _limit_bytes(text: str | None) -> float:
    if text is None:
        return inf
    try:
        nbytes = parse_quantity(text, "B")
    except ConfigError as error:
        raise ConfigError(
            error.message, key="--memory-limit", found=error.found, allowed=error.allowed
        ) from None
    if nbytes <= 0.0:
        raise ConfigError(
            "is not a memory size",
            key="--memory-limit",
            found=short_repr(text),
            allowed="more than 0, such as 40GiB",
        )
    return nbytes


def _sizes(text: str) -> tuple[int, ...]:
    """Device counts in ascending order; whether the cluster has such parts is checked later."""
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", text) is None:
        raise ConfigError(
            "is not a list of device counts", key="--devices", found=short_repr(text), allowed="1,2,4,8"
        )
    sizes = [count("--devices", part) for part in text.split(",")]
    if len(set(sizes)) < len(sizes):
        raise ConfigError("names a device count twice", key="--devices", found=short_repr(text))
    return tuple(sorted(sizes))


def require_prices(cluster: Cluster) -> None:
    """ConfigError where the price of a node is not known."""
    if cluster.price_usd_per_hour is None:
        raise ConfigError(
            "needs the price of every node",
            key="--objectives",
            found="cost",
            allowed="a cluster file with `price: 25USD/h` for each entry of `nodes`",
        )


def answered(
    subject: Subject[LayoutT],
    query: FrontierQuery,
    frontier_options: FrontierOptions,
    *,
    inputs: Sequence[str],
    next_commands: Sequence[str] = (),
) -> Output:
    """The answer for any subject."""
    with progress() as show:
        curves = curves_for(
            subject.curves,
            mode=query.mode,
            sizes=query.sizes,
            limit_bytes=query.limit_bytes,
            epsilon=query.epsilon,
            progress=show,
        )
    weighs_cost, any_part = "cost" in query.objectives, uses_any_part(query.mode, query.sizes)
    every = points_of(curves, weighs_cost=False)
    if not every:
        raise _nothing_fits(subject, curves[-1])
    points = points_of(curves, weighs_cost=weighs_cost, any_part=any_part)
    # From all points: with cost as an objective, the point on the fewest devices may be dominated.
    pick = chosen(every, mode=query.mode, limit_bytes=query.limit_bytes)
    nearest = smallest(points)
    if nearest.memory_bytes > query.limit_bytes:
        raise _above_limit(subject, nearest, query.limit_bytes)
    found = FrontierAnswer(
        mode=query.mode,
        objectives=query.objectives,
        limit_bytes=query.limit_bytes,
        epsilon=query.epsilon,
        curves=curves,
        points=points,
        pick=pick,
        references=subject.curves.references((points[-1] if pick is None else pick).part),
    )
    notes = (
        [] if frontier_options.save is None else save(frontier_options.save, subject, found, inputs=inputs)
    )
    if frontier_options.plot is not None:
        write_plot(frontier_options.plot, plot_of(subject, found))
        notes.append(f"wrote {frontier_options.plot}")
    if frontier_options.is_json:
        return Output(document=frontier_document(subject, found), notes=notes)
    return Output(lines=[*_lines(subject, found), *next_lines(next_commands)], notes=notes)


def _nothing_fits(subject: Subject[LayoutT], curve: Curve[LayoutT]) -> Infeasible:
    """The error where a curve has no point, with the closest infeasible point."""
    error, closest = subject.curves.nothing_fits(curve), subject.curves.closest(curve)
    return Infeasible(
        error.message,
        reasons=error.reasons,
        relaxations=error.relaxations,
        point=None if closest is None else point_document(subject, closest),
    )


def _above_limit(subject: Subject[LayoutT], nearest: Point[LayoutT], limit_bytes: float) -> Infeasible:
    """The error where the smallest point needs more than the memory limit."""
    text = " · ".join((*figures(nearest), subject.title(nearest), *subject.details(nearest)))
    return Infeasible(
        f"no point needs at most {format_bytes(limit_bytes)}; the smallest needs "
        f"{ceil(nearest.memory_bytes)} bytes: {text}",
        reasons={},
        point=point_document(subject, nearest),
    )


def _lines(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> Iterator[Line]:
    yield from subject.heading()
    counts = [curve for curve in found.curves if curve.points]
    where = _where(counts)
    yield row(
        "frontier", (f"{len(found.points):,} points", "value"), (f" of {_listed(found)} on {where}", "")
    )
    proven = _proven(max(curve.epsilon for curve in counts), found.epsilon)
    yield row("", (NOT_AS_GIVEN if subject.priced_as else proven, "dim"))
    yield from _unsearched(subject, found)
    if found.pick is not None:
        yield from pick_lines(subject, found.pick, _why(found))
        yield from frontier_idle_lines(subject, found)
    if len(found.curves) > 1 or found.mode == "profile":
        yield from profile_table(subject, found)
    if found.pick is not None:
        yield from curve_table(subject, found, found.curve_of(found.pick))
    yield from reference_lines(subject, found.references)
    yield from subject.proof(found.curves)


def _unsearched(subject: Subject[LayoutT], found: FrontierAnswer[LayoutT]) -> Iterator[Line]:
    """The parts of a cluster of several pools that were not searched."""
    pools = len(pools_of(subject.curves.cluster))
    if pools > 1 and [curve.part for curve in found.curves] == [subject.curves.cluster]:
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


def _why(found: FrontierAnswer[LayoutT]) -> str:
    within = f" within {format_bytes(found.limit_bytes)}" if isfinite(found.limit_bytes) else ""
    return {"time": f"the fastest{within}", "devices": f"the fewest devices{within}, the fastest there"}[
        found.mode
    ]
