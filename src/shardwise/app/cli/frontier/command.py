"""What `frontier` answers: search the curves, pick a point, then a card or a document."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from typing import TypeVar

from shardwise.app.cli.answer import question_words
from shardwise.app.cli.card import next_lines
from shardwise.app.cli.frontier.document import Found, frontier_document, point_document
from shardwise.app.cli.frontier.graphs import is_graph, load_graph_request, refuse_bare_graph
from shardwise.app.cli.frontier.picture import plot_of
from shardwise.app.cli.frontier.saved import check_folder, save
from shardwise.app.cli.frontier.staged import graph_subject
from shardwise.app.cli.frontier.strategies import StrategySubject
from shardwise.app.cli.frontier.subject import Subject
from shardwise.app.cli.frontier.tables import (
    curve_table,
    figures,
    frontier_idle_lines,
    pick_lines,
    profile_table,
    reference_lines,
)
from shardwise.app.cli.output import Line, Output, progress, row
from shardwise.app.cli.proof import PRICED_OTHERWISE
from shardwise.app.cli.request import (
    JobOptions,
    Request,
    choice,
    count,
    fraction,
    load_request,
    workers,
    writable,
)
from shardwise.app.cli.spaces import require_candidates, space_choice
from shardwise.app.cli.words import counted, percent
from shardwise.app.plot import check_plot_file, write_plot
from shardwise.cluster import Cluster, pools_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.inputs import shown
from shardwise.plan import Value
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

OBJECTIVES = (("time", "memory"), ("time", "memory", "cost"))

LayoutT = TypeVar("LayoutT")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierOptions:
    """The options of `frontier` beside those of the job, as given; None where one was left out."""

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
class Asked:
    """The same, read; the limit is infinite and `sizes` None where nothing was given."""

    mode: str
    limit_bytes: float
    sizes: tuple[int, ...] | None
    objectives: tuple[str, ...]
    epsilon: float


def frontier(options: JobOptions, wanted: FrontierOptions) -> Output:
    """The answer of `frontier` for a transformer or an operator graph. Infeasible where nothing fits, with
    the smallest point where it is the limit that is too low."""
    asked = read_asked(wanted)
    if is_graph(options.model):
        return _graph_frontier(options, asked, wanted)
    fixed = fixed_fields(wanted)
    space = space_choice(wanted.space)
    processes = workers(wanted.workers)
    inputs = (options.model, options.cluster, *([space.file] if space.file else []))
    if wanted.save is not None:
        check_folder(wanted.save)
    if wanted.plot is not None:
        check_plot_file(wanted.plot, key="--plot")
        writable("--plot", wanted.plot, inputs=inputs)
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
        use_all=wanted.uses_all,
        fixed_by={} if wanted.stages is None else {"pp": _pp_options(wanted)},
    )
    if uses_any_part(asked.mode, asked.sizes):
        _require_candidates(space, fixed, request, uses_all=wanted.uses_all)
    if "cost" in asked.objectives:
        require_prices(request.cluster)
    subject = StrategySubject(request, question)
    return answered(subject, asked, wanted, inputs=inputs, next_commands=_next_commands(options, wanted))


def _require_candidates(
    space: SpaceChoice, fixed: Mapping[str, Value], request: Request, *, uses_all: bool
) -> None:
    """ConfigError where the values of a space file leave no candidate on any part of the cluster."""
    refusal: ConfigError | None = None
    for part in PartChoice(request.cluster, uses_all).unions:
        try:
            return require_candidates(space, fixed, replace(request, cluster=part))
        except ConfigError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _graph_frontier(options: JobOptions, asked: Asked, wanted: FrontierOptions) -> Output:
    """The answer for an operator graph. Options that change nothing for a graph are read all the same."""
    workers(wanted.workers)
    for option, given, plain in (("--space", wanted.space, "default"), ("--fix", wanted.fix, "")):
        if given != plain:
            raise ConfigError(
                "is about strategies, and a graph has a layout for each operator", key=option,
                found=shown(given), allowed="a transformer, or the option left out",
            )  # fmt: skip
    if wanted.save is not None:
        check_folder(wanted.save)
    if wanted.plot is not None:
        check_plot_file(wanted.plot, key="--plot")
        writable("--plot", wanted.plot, inputs=(options.model, options.cluster))
    request = load_graph_request(options, wanted.meshes)
    if "cost" in asked.objectives:
        require_prices(request.cluster)
    subject = graph_subject(request, wanted.stages, wanted.microbatches, uses_all=wanted.uses_all)
    return answered(subject, asked, wanted, inputs=(options.model, options.cluster))


def fixed_fields(wanted: FrontierOptions) -> dict[str, int | str | bool]:
    """The fields of a strategy that are held to one value: those of `--fix`, and `pp` by `--stages`."""
    if wanted.microbatches is not None:
        raise ConfigError(
            "is about graphs: a strategy has its micro_batch_size", key="--microbatches",
            found=shown(wanted.microbatches), allowed="--fix micro_batch_size=N",
        )  # fmt: skip
    if wanted.meshes != "tiers":
        raise ConfigError(
            "is about graphs: a strategy has its degrees and axis_order", key="--meshes",
            found=shown(wanted.meshes), allowed="--fix tp=N,axis_order=...",
        )  # fmt: skip
    fixed = parse_fields(wanted.fix, key="--fix")
    if wanted.stages is not None:
        stages = count("--stages", wanted.stages)
        if fixed.setdefault("pp", stages) != stages:
            raise ConfigError("is not the pp of --fix", key="--stages", found=str(stages))
    return fixed


def _pp_options(wanted: FrontierOptions) -> str:
    """The options that fix the number of stages."""
    return "--stages and --fix pp" if "pp" in parse_fields(wanted.fix, key="--fix") else "--stages"


def _next_commands(options: JobOptions, wanted: FrontierOptions) -> tuple[str, ...]:
    """The same question with a picture, and with its plans, where they were not asked for."""
    given = (
        ("--mode", wanted.mode, "time"),
        ("--memory-limit", wanted.memory_limit, None),
        ("--devices", wanted.devices, None),
        ("--stages", wanted.stages, None),
        ("--objectives", wanted.objectives, "time,memory"),
        ("--space", wanted.space, "default"),
        ("--fix", wanted.fix, ""),
    )
    words = ["shardwise frontier", *question_words(options)]
    for name, value, plain in given:
        if value is not None and value != plain:
            words += [name, shlex.quote(value)]
    words += ["--use-all"] if wanted.uses_all else []
    more = ((wanted.plot, "--plot frontier.html"), (wanted.save, "--save frontier"))
    return tuple(" ".join((*words, option)) for value, option in more if value is None)


def read_asked(wanted: FrontierOptions) -> Asked:
    """The options read. ConfigError with the option of the first fault."""
    mode = choice("--mode", wanted.mode, MODES)
    objectives = tuple(wanted.objectives.split(","))
    if tuple(sorted(objectives, key="time memory cost".find)) not in OBJECTIVES:
        raise ConfigError(
            "is not one of the choices",
            key="--objectives",
            found=shown(wanted.objectives),
            allowed=" or ".join(",".join(names) for names in OBJECTIVES),
        )
    return Asked(
        mode=mode,
        limit_bytes=_limit_bytes(wanted.memory_limit),
        sizes=None if wanted.devices is None else _sizes(wanted.devices),
        objectives=objectives,
        epsilon=fraction("--epsilon", wanted.epsilon, default=0.001, low=0.0, high=1.0),
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
            "is no memory", key="--memory-limit", found=shown(text), allowed="more than 0, such as 40GiB"
        )
    return nbytes


def _sizes(text: str) -> tuple[int, ...]:
    """Device counts in ascending order; whether the cluster has such parts is asked later."""
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", text) is None:
        raise ConfigError(
            "is no list of device counts", key="--devices", found=shown(text), allowed="1,2,4,8"
        )
    sizes = [count("--devices", part) for part in text.split(",")]
    if len(set(sizes)) < len(sizes):
        raise ConfigError("names a device count twice", key="--devices", found=shown(text))
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
    asked: Asked,
    wanted: FrontierOptions,
    *,
    inputs: Sequence[str],
    next_commands: Sequence[str] = (),
) -> Output:
    """The answer about any subject."""
    with progress() as show:
        curves = curves_for(
            subject.curves,
            mode=asked.mode,
            sizes=asked.sizes,
            limit_bytes=asked.limit_bytes,
            epsilon=asked.epsilon,
            progress=show,
        )
    weighs_cost, any_part = "cost" in asked.objectives, uses_any_part(asked.mode, asked.sizes)
    every = points_of(curves, weighs_cost=False)
    if not every:
        raise _nothing_fits(subject, curves[-1])
    points = points_of(curves, weighs_cost=weighs_cost, any_part=any_part)
    # Of all points: on the fewest devices each may cost more than one on others, and still be the pick.
    pick = chosen(every, mode=asked.mode, limit_bytes=asked.limit_bytes)
    nearest = smallest(points)
    if nearest.memory_bytes > asked.limit_bytes:
        raise _above_limit(subject, nearest, asked.limit_bytes)
    found = Found(
        mode=asked.mode,
        objectives=asked.objectives,
        limit_bytes=asked.limit_bytes,
        epsilon=asked.epsilon,
        curves=curves,
        points=points,
        pick=pick,
        references=subject.curves.references((points[-1] if pick is None else pick).part),
    )
    talk = [] if wanted.save is None else save(wanted.save, subject, found, inputs=inputs)
    if wanted.plot is not None:
        write_plot(wanted.plot, plot_of(subject, found))
        talk.append(f"wrote {wanted.plot}")
    if wanted.is_json:
        return Output(document=frontier_document(subject, found), talk=talk)
    return Output(lines=[*_lines(subject, found), *next_lines(next_commands)], talk=talk)


def _nothing_fits(subject: Subject[LayoutT], curve: Curve[LayoutT]) -> Infeasible:
    """The error where a curve has no point, with what comes closest."""
    error, closest = subject.curves.nothing_fits(curve), subject.curves.closest(curve)
    return Infeasible(
        error.message,
        reasons=error.reasons,
        relaxations=error.relaxations,
        point=None if closest is None else point_document(subject, closest),
    )


def _above_limit(subject: Subject[LayoutT], nearest: Point[LayoutT], limit_bytes: float) -> Infeasible:
    """The error where even the smallest point takes more than is allowed."""
    text = " · ".join((*figures(nearest), subject.title(nearest), *subject.details(nearest)))
    return Infeasible(
        f"no point takes at most {format_bytes(limit_bytes)}; the smallest takes "
        f"{ceil(nearest.memory_bytes)} bytes: {text}",
        reasons={},
        point=point_document(subject, nearest),
    )


def _lines(subject: Subject[LayoutT], found: Found[LayoutT]) -> Iterator[Line]:
    yield from subject.heading()
    counts = [curve for curve in found.curves if curve.points]
    where = _where(counts)
    yield row(
        "frontier", (f"{len(found.points):,} points", "value"), (f" of {_listed(found)} on {where}", "")
    )
    proven = _proven(max(curve.epsilon for curve in counts), found.epsilon)
    yield row("", (PRICED_OTHERWISE if subject.priced_as else proven, "dim"))
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


def _unsearched(subject: Subject[LayoutT], found: Found[LayoutT]) -> Iterator[Line]:
    """Which parts of a cluster of several pools were not searched, where all may be faster."""
    pools = len(pools_of(subject.curves.cluster))
    if pools > 1 and [curve.part for curve in found.curves] == [subject.curves.cluster]:
        yield row("", ("on all devices: no smaller part of the cluster was searched", "dim"))
    elif pools > MOST_UNITED:
        yield row("", (f"each of the {pools} pools alone and all devices, no other unions of them", "dim"))


def _where(curves: Sequence[Curve[LayoutT]]) -> str:
    """What the points are on."""
    sizes = {curve.devices for curve in curves}
    if len(curves) == 1:
        return counted(curves[0].devices, "device")
    return (
        f"{len(curves)} parts of the cluster" if len(sizes) < len(curves) else f"{len(sizes)} device counts"
    )


def _proven(proven: float, allowed: float) -> str:
    """How far points may be from exact ones, by what is proven of the worst curve."""
    if proven == 0.0:
        return f"exact; --epsilon would allow {percent(allowed, 2)}"
    told = f"none beaten in all by more than {percent(proven, 2)}"
    if proven > allowed:
        return f"{told}; not proven to --epsilon {percent(allowed, 2)}"
    return f"{told} (--epsilon)" if proven == allowed else f"{told} (--epsilon {percent(allowed, 2)})"


def _listed(found: Found[LayoutT]) -> str:
    return ", ".join(found.objectives[:-1]) + f" and {found.objectives[-1]}"


def _why(found: Found[LayoutT]) -> str:
    within = f" within {format_bytes(found.limit_bytes)}" if isfinite(found.limit_bytes) else ""
    return {"time": f"the fastest{within}", "devices": f"the fewest devices{within}, the fastest there"}[
        found.mode
    ]
