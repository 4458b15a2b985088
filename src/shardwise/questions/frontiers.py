"""From the arguments of `frontier` to the frontier of a model or an operator graph.

`StrategySource` is a model, whose layouts are strategies. `GraphSource` is an operator graph, whose layouts
have a sharding rule per operator and mesh axis; in pipeline stages, its curves are `StagedCurves`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil, inf, isclose
from typing import Any, Generic, Protocol, TypeVar

from shardwise import search
from shardwise.cluster import Cluster
from shardwise.errors import ConfigError, Infeasible, InternalError, naming_arguments
from shardwise.graph import GRAPH_PREFIX, GraphLayout, StagedLayout, layout_record, staged_record
from shardwise.inputs import record_of, short_repr
from shardwise.notebook import line, panel, table
from shardwise.plans import Plan, PlanQuestion, Value, plan_of
from shardwise.questions import arguments
from shardwise.questions.arguments import Progress
from shardwise.questions.planning import SearchArguments, plan_question, request_and_target
from shardwise.questions.request import (
    GraphRequest,
    JobArguments,
    Request,
    graph_request_of,
    is_graph,
    refuse_bare_graph,
    request_of,
)
from shardwise.questions.spaces import require_candidates, space_choice
from shardwise.questions.whole_runs import RunArguments, RunOnPart, runs_on_parts
from shardwise.search import (
    MODES,
    Curve,
    CurveSource,
    GraphCurve,
    GraphCurves,
    PartChoice,
    Point,
    Question,
    Reference,
    SpaceChoice,
    StagedCurves,
    StrategyCurve,
    StrategyCurves,
)
from shardwise.strategy import Job, Strategy, Target, strategy_record
from shardwise.ties import TIE
from shardwise.units import format_bytes, format_seconds

LayoutT = TypeVar("LayoutT")

OBJECTIVES = (("time", "memory"), ("time", "memory", "cost"))

# Sources of curves, and the plans of their points


class FrontierSource(Protocol[LayoutT]):
    """A model on a cluster, with strategies; or a graph, with a layout per operator."""

    @property
    def curves(self) -> CurveSource[LayoutT]:
        """The source of the curves."""
        ...

    @property
    def name(self) -> str:
        """The name of the model or graph."""
        ...

    def layout(self, point: Point[LayoutT]) -> Mapping[str, object]:
        """The layout of a point as plain values."""
        ...

    def text(self, point: Point[LayoutT]) -> str:
        """The layout of a point in a few words."""
        ...

    def host_memory(self, point: Point[LayoutT]) -> Mapping[str, float] | None:
        """Bytes of a rank on its host (`used`), and those that the host has for it (`capacity`); None for
        layouts of graphs, which have no offload."""
        ...

    def plan(self, curve: Curve[LayoutT], place: int, *, epsilon: float) -> Plan:
        """The plan of a point of a frontier that was requested to `epsilon`. ConfigError where a plan file
        cannot represent it."""
        ...


class StrategySource:
    """A model on a cluster; implements `FrontierSource`."""

    def __init__(self, request: Request, question: Question, target: Target | None = None) -> None:
        self.request, self.question, self.target = request, question, target
        self.curves = StrategyCurves(question, target)

    @property
    def name(self) -> str:
        return self.request.model.name

    def layout(self, point: Point[Strategy]) -> Mapping[str, object]:
        return {"strategy": strategy_record(point.layout)}

    def text(self, point: Point[Strategy]) -> str:
        return search.shortest_text(self.request.model, point.part, self.request.job, point.layout)

    def host_memory(self, point: Point[Strategy]) -> Mapping[str, float]:
        used, capacity = search.host_memory(self.request.model, point.part, self.request.job, point.layout)
        return {"used": used, "capacity": capacity}

    def plan(self, curve: Curve[Strategy], place: int, *, epsilon: float) -> Plan:
        """The fastest plan within the memory of the point."""
        if not isinstance(curve, StrategyCurve):
            raise InternalError("the curve of a transformer has no strategies")
        question, answer = search.answer_at(curve, place)
        return plan_of(
            replace(answer, whole=self.request.cluster, idle=self.curves.idle_of(question.cluster)),
            model=question.model,
            cluster=question.cluster,
            job=question.job,
            question=plan_question(self.question, self.target, self.request),
        )


class GraphSource:
    """A graph on a cluster; implements `FrontierSource`."""

    def __init__(self, request: GraphRequest, curves: GraphCurves) -> None:
        self.request, self.curves = request, curves

    @property
    def name(self) -> str:
        return f"{GRAPH_PREFIX}{self.request.graph.name}"

    def layout(self, point: Point[GraphLayout]) -> Mapping[str, object]:
        found = point.layout
        record = staged_record(found) if isinstance(found, StagedLayout) else layout_record(found)
        return {"mesh": list(found.ranks), **record}

    def text(self, point: Point[GraphLayout]) -> str:
        return f"mesh {'x'.join(map(str, point.layout.ranks))}"

    def host_memory(self, point: Point[GraphLayout]) -> None:
        return None

    def plan(self, curve: Curve[GraphLayout], place: int, *, epsilon: float) -> Plan:
        if not isinstance(curve, GraphCurve):
            raise InternalError("the curve of a graph has no layouts")
        point, request, cluster = curve.points[place], self.request, curve.part
        best = search.graph_result(request.graph, cluster, request.training, point.layout)
        for unit, found, estimated in (
            ("s", point.time_s, best.step_time_s),
            ("B", point.memory_bytes, best.peak_memory.device),
        ):
            if not isclose(estimated, found, rel_tol=TIE):
                raise InternalError(f"a point of {found!r} {unit} has a layout of {estimated!r} {unit}")
        return Plan(
            network=request.graph,
            cluster=cluster,
            job=Job(
                seq_len=request.graph.seq_len or 1,
                global_batch_size=request.graph.batch,
                dtype=request.training.dtype,
                optimizer=request.training.optimizer,
                memory_margin=request.memory_margin,
                profile=request.training.profile,
            ),
            question=PlanQuestion(epsilon=epsilon, use_all=self.curves.choice.uses_all).of_part(
                cluster, request.cluster
            ),
            best=best,
            epsilon=curve.epsilon,
            idle=self.curves.idle_of(cluster),
        )


# The answer


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierQuery:
    """The arguments of a frontier, checked; `limit_bytes` is infinite and `sizes` None where they were left
    out."""

    mode: str
    limit_bytes: float
    sizes: tuple[int, ...] | None
    objectives: tuple[str, ...]
    epsilon: float


@dataclass(frozen=True, kw_only=True, repr=False)
class FrontierAnswer(Generic[LayoutT]):
    """A Pareto frontier of step time and memory, with `points` that no other dominates, and the plan of each
    on demand.

    `curves` are the frontiers on the parts of the cluster. `pick` is the point that the mode chooses, None
    for `profile`. `references` are common layouts on the devices of the pick, or of the last curve with
    points. `limit_bytes` is infinite without a limit. No layout is better than every point by more than a
    factor 1 + `epsilon`.
    """

    source: FrontierSource[LayoutT]
    query: FrontierQuery
    curves: Sequence[Curve[LayoutT]]
    points: Sequence[Point[LayoutT]]
    pick: Point[LayoutT] | None
    references: Sequence[Reference[LayoutT]]

    @property
    def mode(self) -> str:
        """How the pick is chosen."""
        return self.query.mode

    @property
    def objectives(self) -> tuple[str, ...]:
        """What the points trade."""
        return self.query.objectives

    @property
    def limit_bytes(self) -> float:
        """Most bytes of a device that the pick may take."""
        return self.query.limit_bytes

    @property
    def epsilon(self) -> float:
        """The requested relative distance from the exact frontier."""
        return self.query.epsilon

    def __len__(self) -> int:
        return len(self.points)

    def retained(self, curve: Curve[LayoutT]) -> int:
        """Points of a curve that are on the frontier of all parts; all points where parts are not
        compared."""
        return sum(point.part == curve.part for point in self.points)

    def curve_of(self, point: Point[LayoutT]) -> Curve[LayoutT]:
        """The curve that a point is from."""
        return next(curve for curve in self.curves if curve.part == point.part)

    def plan(self, point: int | Point[LayoutT] | None = None) -> Plan:
        """The plan of a point, or of the point with this index; by default of the pick.

        Raises ConfigError for an index without a point, or where the mode picks none.
        """
        if isinstance(point, int):
            if not -len(self.points) <= point < len(self.points):
                raise ConfigError(
                    "is no point", key="point", found=str(point), allowed=f"0 to {len(self.points) - 1}"
                )
            point = self.points[point]
        point = self.pick if point is None else point
        if point is None:
            raise ConfigError(
                "is required: this mode picks no point", key="point", allowed=f"0 to {len(self.points) - 1}"
            )
        curve = self.curve_of(point)
        return self.source.plan(curve, curve.points.index(point), epsilon=self.epsilon)

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens of a step of a model; None for a graph, whose samples have none."""
        if not isinstance(self.source, StrategySource):
            return None
        job = self.source.request.job
        return job.seq_len * job.global_batch_size

    def whole_runs(
        self,
        *,
        tokens: float | str | None = None,
        steps: int | None = None,
        days: float | None = None,
        power: float | str | None = None,
        mtbf: float | str | None = None,
        checkpoint_interval: float | str | None = None,
        checkpoint_stall: float | str | None = None,
        restart: float | str | None = None,
        jitter: float | None = None,
    ) -> tuple[RunOnPart, ...]:
        """The whole run at the fastest point of each part within the memory limit, with those that no other
        part beats in both time and money marked. The arguments are those of `Plan.whole_run`. Raises
        ConfigError for an argument that cannot be used."""
        given = record_of(RunArguments, locals())
        with naming_arguments():
            return runs_on_parts(
                self.curves, given, limit_bytes=self.limit_bytes, tokens_per_step=self.tokens_per_step
            )

    def rows(self) -> list[dict[str, object]]:
        """A row for a data frame for each point: seconds, bytes, dollars per step and devices, with the
        fields of a strategy."""
        return [
            {
                "step_time_s": point.time_s,
                "device_bytes": point.memory_bytes,
                "cost_usd": point.cost_usd,
                "devices": point.devices,
                **(strategy_record(point.layout) if isinstance(point.layout, Strategy) else {}),
            }
            for point in self.points
        ]

    def to_dict(self) -> dict[str, object]:
        """The points with their layouts as plain values, and the pick."""
        return {
            "name": self.source.name,
            "cluster": self.source.curves.cluster.name,
            "mode": self.mode,
            "objectives": list(self.objectives),
            "epsilon": self.epsilon,
            "points": [point_document(self.source, point) for point in self.points],
            "chosen": None if self.pick is None else point_document(self.source, self.pick),
        }

    @cached_property
    def _title(self) -> str:
        return f"{self.source.name} on {self.source.curves.cluster.name}"

    def __repr__(self) -> str:
        fastest, least = self.points[0], search.smallest(self.points)
        return (
            f"<Frontier {self._title}: {len(self.points)} points from {_figures_text(fastest)} "
            f"to {_figures_text(least)}>"
        )

    def _repr_html_(self) -> str:
        slowest = max(point.time_s for point in self.points)
        most = max(point.memory_bytes for point in self.points)
        picked = None if self.pick is None else _figures_text(self.pick)
        dots = "".join(
            f'<circle cx="{10 + 280 * point.time_s / slowest:.1f}" '
            f'cy="{150 - 140 * point.memory_bytes / most:.1f}" r="3" fill="#4c78a8"/>'
            for point in self.points
        )
        axes = '<path d="M10 5V150H295" fill="none" stroke="#888"/>'
        rows = [
            (place, format_seconds(point.time_s), format_bytes(point.memory_bytes), point.devices)
            for place, point in enumerate(self.points[:MOST_ROWS])
        ]
        return panel(
            self._title,
            f'<svg width="300" height="155" role="img">{axes}{dots}</svg>',
            line("Step time (right) against device memory (up), both from 0."),
            *([] if picked is None else [line(f"Chosen: {picked}")]),
            table(("point", "step time", "device memory", "devices"), rows),
            *([line(f"{len(self.points) - MOST_ROWS} more points")] if len(self.points) > MOST_ROWS else []),
        )


MOST_ROWS = 20
"""Most points of a frontier that a table in a notebook shows."""


def _figures_text(point: Point[Any]) -> str:
    return (
        f"{format_seconds(point.time_s)} and {format_bytes(point.memory_bytes)} on {point.devices:,} devices"
    )


def point_document(source: FrontierSource[LayoutT], point: Point[LayoutT]) -> dict[str, object]:
    """A point with its layout."""
    return {
        "time_s": point.time_s,
        "memory_bytes": point.memory_bytes,
        "host_memory_bytes": source.host_memory(point),
        "cost_usd": point.cost_usd,
        "devices": point.devices,
        "part": point.part.name,
        "idle": asdict(source.curves.idle_of(point.part)),
        "layout": source.layout(point),
    }


def found_frontier(
    source: FrontierSource[LayoutT], query: FrontierQuery, *, progress: Progress | None = None
) -> FrontierAnswer[LayoutT]:
    """The frontier of any source. Infeasible where nothing fits, with the smallest point where the memory
    limit is below it."""
    curves = search.curves_for(
        source.curves,
        mode=query.mode,
        sizes=query.sizes,
        limit_bytes=query.limit_bytes,
        epsilon=query.epsilon,
        progress=progress,
    )
    weighs_cost, any_part = "cost" in query.objectives, search.uses_any_part(query.mode, query.sizes)
    every = search.points_of(curves, weighs_cost=False)
    if not every:
        raise _nothing_fits(source, curves[-1])
    points = search.points_of(curves, weighs_cost=weighs_cost, any_part=any_part)
    # From all points: with cost as an objective, the point on the fewest devices may be dominated.
    pick = search.chosen(every, mode=query.mode, limit_bytes=query.limit_bytes)
    nearest = search.smallest(points)
    if nearest.memory_bytes > query.limit_bytes:
        raise Infeasible(
            f"no point needs at most {format_bytes(query.limit_bytes)}; the smallest needs "
            f"{ceil(nearest.memory_bytes)} bytes: {_figures_text(nearest)}, {source.text(nearest)}",
            reasons={},
            point=point_document(source, nearest),
        )
    return FrontierAnswer(
        source=source,
        query=query,
        curves=curves,
        points=points,
        pick=pick,
        references=source.curves.references((points[-1] if pick is None else pick).part),
    )


def _nothing_fits(source: FrontierSource[LayoutT], curve: Curve[LayoutT]) -> Infeasible:
    """The error where a curve has no point, with the closest infeasible point."""
    error, closest = source.curves.nothing_fits(curve), source.curves.closest(curve)
    return Infeasible(
        error.message,
        reasons=error.reasons,
        relaxations=error.relaxations,
        point=None if closest is None else point_document(source, closest),
    )


# Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierArguments:
    """The arguments of `frontier` other than those of the job, as given; None where one was left out."""

    mode: object = "time"
    memory_limit: object = None
    devices: object = None
    stages: object = None
    microbatches: object = None
    meshes: object = "tiers"
    objectives: object = "time,memory"
    epsilon: object = 0.001
    space: object = "default"
    fix: object = None
    workers: object = 1
    use_all: object = False
    target: object = None


def frontier_of(
    given: JobArguments, wanted: FrontierArguments, *, progress: Progress | None = None
) -> FrontierAnswer[Any]:
    """The frontier of a model or an operator graph. ConfigError for the first argument that cannot be used,
    Infeasible where nothing fits."""
    query, processes = _query(wanted), arguments.workers(wanted.workers)
    uses_all = arguments.flag("--use-all", wanted.use_all)
    if is_graph(given.model):
        return found_frontier(_graph_source(given, wanted, query, uses_all), query, progress=progress)
    fixed, fixed_by = _fixed(wanted, given.set)
    space = space_choice(wanted.space)
    refuse_bare_graph(given.model)
    request = request_of(given, wanted.target)
    uses_any_part = search.uses_any_part(query.mode, query.sizes)
    is_whole = uses_all or (uses_any_part and not search.is_mixed(request.cluster))
    search_arguments = SearchArguments(
        space=wanted.space, fix=fixed, target=wanted.target, use_all=is_whole, workers=processes
    )
    request, target = request_and_target(request, search_arguments, has_uneven=False, progress=progress)
    question = Question(
        model=request.model,
        cluster=request.cluster,
        job=request.job,
        space=space.base,
        fixed=fixed,
        axes=space.axes,
        workers=processes,
        use_all=uses_all,
        fixed_by=fixed_by,
    )
    if uses_any_part:
        _require_candidates(space, fixed, request, uses_all=uses_all)
    _require_prices(query, request.cluster)
    return found_frontier(StrategySource(request, question, target), query, progress=progress)


def _require_candidates(
    space: SpaceChoice, fixed: Mapping[str, Value], request: Request, *, uses_all: bool
) -> None:
    """ConfigError where a space file leaves no candidate on any part of the cluster."""
    refusal: ConfigError | None = None
    for part in PartChoice(request.cluster, uses_all).unions:
        try:
            require_candidates(space, fixed, replace(request, cluster=part))
            return
        except ConfigError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _graph_source(
    given: JobArguments, wanted: FrontierArguments, query: FrontierQuery, uses_all: bool
) -> GraphSource:
    """The source of a graph, in pipeline stages where these are more than 1."""
    for option, value, default in (
        ("--space", wanted.space, "default"),
        ("--fix", wanted.fix, None),
        ("--target", wanted.target, None),
    ):
        if value and value != default:
            raise ConfigError(
                "applies to transformers; a graph has a layout per operator", key=option,
                found=short_repr(value), allowed="a transformer, or no such option",
            )  # fmt: skip
    request = graph_request_of(given, arguments.text("--meshes", wanted.meshes))
    _require_prices(query, request.cluster)
    stages = 1 if wanted.stages is None else arguments.count("--stages", wanted.stages)
    microbatches = (
        None
        if wanted.microbatches is None
        else arguments.counts("--microbatches", wanted.microbatches, allowed="a list such as [8, 16]")
    )
    of = (request.graph, request.cluster, request.training, request.memory_margin)
    if stages > 1:
        staged = StagedCurves(*of, stages, microbatches, request.meshes, uses_all=uses_all)
        return GraphSource(request, staged)
    if microbatches is not None:
        raise ConfigError(
            "applies to graphs in stages", key="--microbatches", found=", ".join(map(str, microbatches)),
            allowed="with --stages 2 or more",
        )  # fmt: skip
    return GraphSource(request, GraphCurves(*of, request.meshes, uses_all=uses_all))


def _fixed(wanted: FrontierArguments, options: object) -> tuple[dict[str, Value], dict[str, str]]:
    """The fixed fields of a strategy, with pp by the number of stages; and the options that fix pp."""
    for option, value, allowed in (
        ("--microbatches", wanted.microbatches, "--fix micro_batch_size=N"),
        ("--meshes", None if wanted.meshes == "tiers" else wanted.meshes, "--fix tp=N,axis_order=..."),
    ):
        if value is not None:
            has = "micro_batch_size" if option == "--microbatches" else "degrees and axis_order"
            raise ConfigError(
                f"applies to graphs; a strategy has {has}", key=option, found=short_repr(value),
                allowed=allowed,
            )  # fmt: skip
    fixed = arguments.fields_and_modules("--fix", wanted.fix, options)
    if wanted.stages is None:
        return fixed, {}
    by = "--stages and --fix pp" if "pp" in fixed else "--stages"
    stages = arguments.count("--stages", wanted.stages)
    if fixed.setdefault("pp", stages) != stages:
        raise ConfigError("differs from pp in --fix", key="--stages", found=str(stages))
    return fixed, {"pp": by}


def _query(wanted: FrontierArguments) -> FrontierQuery:
    """The arguments of any frontier, checked."""
    objectives = arguments.names("--objectives", wanted.objectives)
    if tuple(sorted(objectives, key="time memory cost".find)) not in OBJECTIVES:
        raise ConfigError(
            "is not one of the choices",
            key="--objectives",
            found=short_repr(",".join(objectives)),
            allowed=" or ".join(",".join(names) for names in OBJECTIVES),
        )
    allowed = "more than 0, such as 40GiB"
    limit = wanted.memory_limit
    sizes = wanted.devices
    return FrontierQuery(
        mode=arguments.choice("--mode", wanted.mode, MODES),
        limit_bytes=inf
        if limit is None
        else arguments.quantity("--memory-limit", limit, "B", allowed=allowed),
        sizes=None if sizes is None else arguments.counts("--devices", sizes, allowed="1,2,4,8"),
        objectives=objectives,
        epsilon=arguments.number("--epsilon", wanted.epsilon, low=0.0, high=1.0),
    )


def _require_prices(query: FrontierQuery, cluster: Cluster) -> None:
    """ConfigError where cost is an objective and the price of a node is not known."""
    if "cost" in query.objectives and cluster.price_usd_per_hour is None:
        raise ConfigError(
            "needs the price of every node",
            key="--objectives",
            found="cost",
            allowed="a cluster file with `price: 25USD/h` for each entry of `nodes`",
        )
