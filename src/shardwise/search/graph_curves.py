"""Curves of step time against memory of an operator graph, on parts of a cluster.

`GraphCurves` searches the layouts of all operators (docs/concepts/pareto-search.md). `StagedCurves` searches
the cuts into pipeline stages together with the layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2
from time import perf_counter, process_time
from typing import Any

from shardwise.cluster import Cluster, Mesh, tier_mesh
from shardwise.cost import LayoutSpace, StepCounts, Training, estimate_layout, layout_chain
from shardwise.errors import ConfigError, Infeasible, InternalError
from shardwise.graph import GraphLayout, OpGraph, StagedLayout, data_parallel, megatron, scaled
from shardwise.plans import Idle, usd_per_step
from shardwise.search.bnb.solver import Progress
from shardwise.search.curve_parts import MeshChoice, PartChoice, runs_text
from shardwise.search.curves import Curve, Point, Reference
from shardwise.search.pareto import pareto_search, reporting_compilation, require_numba
from shardwise.search.pareto.two_phase import Effort, ParetoSearchResult
from shardwise.search.staged import SCHEDULE, StagedPipeline, StagedProblem, staged_frontier
from shardwise.units import format_bytes

MOST_LABELS = 150_000
"""Largest number of labels of the search of one mesh; beyond, it returns its solutions with their proven
epsilon."""

MOST_HALVINGS, ROUGH_EPSILON = 4, 0.5
"""How many numbers of micro-batches are tried where nothing fits, and the epsilon of these searches: any
layout that fits will do."""

TIERS = MeshChoice("tiers")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCurve(Curve[GraphLayout]):
    """A curve with its meshes, the number of layouts of each operator on all of them, and the effort of the
    Pareto search. `smallest` is the point of least memory of any layout, whether it fits or not."""

    meshes: tuple[Mesh, ...]
    layouts_per_operator: Mapping[str, int]
    efforts: tuple[Effort, ...]
    smallest: Point[GraphLayout] | None


class GraphCurves:
    """Returns the Pareto frontier of `graph` over all layouts on the `meshes` of a part of a cluster.

    It leaves out points that leave less than `memory_margin` of a device's memory free. Raises ConfigError if
    numba is not installed.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        training: Training,
        memory_margin: float,
        meshes: MeshChoice = TIERS,
        *,
        uses_all: bool = False,
    ) -> None:
        require_numba()
        self.graph, self.cluster, self.training = graph, cluster, training
        self.meshes = meshes
        self.choice = PartChoice(cluster, uses_all)
        self._margin = memory_margin

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in self.choice.sizes if self.parts(size))

    @property
    def largest(self) -> Cluster:
        """The part with most devices on which the request is possible."""
        sizes = reversed(self.choice.sizes)
        return next(part for size in sizes for part in reversed(self.parts(size)))

    def idle_of(self, part: Cluster) -> Idle:
        return self.choice.idle_of(part)

    def parts(self, devices: int | None) -> tuple[Cluster, ...]:
        every = self.choice.unions if devices is None else self.choice.of(devices)
        return tuple(part for part in every if self.meshes_on(part))

    def require(self, sizes: Sequence[int] | None) -> None:
        if sizes is None:
            required = self.parts(None) or (self.cluster,)
        else:
            required = tuple(part for size in sizes for part in self.parts(size) or self.choice.of(size)[:1])
        self.meshes.require([(part, part.devices) for part in required])

    def meshes_on(self, part: Cluster) -> tuple[Mesh, ...]:
        """The meshes to search, over all devices of a part; none if none of the requested meshes exists
        there."""
        return self.meshes.of(part, part.devices)

    def limit_bytes(self, part: Cluster) -> float:
        """Usable bytes of each device of a part."""
        used = {node.device_class for node in part.nodes}
        return min(part.classes[name].memory_bytes for name in used) * (1.0 - self._margin)

    def laid_out(self, part: Cluster) -> list[LayoutSpace]:
        """All layouts on each mesh of a part."""
        return [layout_chain(self.graph, part, self.training, mesh) for mesh in self.meshes_on(part)]

    def layouts_per_operator(self, part: Cluster) -> Mapping[str, int]:
        """The number of layouts of each operator on all meshes of a part."""
        return layouts_on_all(self.laid_out(part))

    def curve(self, part: Cluster, *, epsilon: float = 0.0, progress: Progress | None = None) -> GraphCurve:
        """The Pareto frontier on a part, proven to `epsilon`, or to the `epsilon` of the curve if the search
        is truncated."""
        start_s, start_cpu_s = perf_counter(), process_time()
        laid = self.laid_out(part)
        limit_bytes = self.limit_bytes(part)
        chains = [each.chain for each in laid]
        with reporting_compilation(progress):
            found = pareto_search(chains, epsilon=epsilon, most_labels=MOST_LABELS, most_bytes=limit_bytes)
        rows = list(range(len(found.points)))
        every = [
            Point(
                time_s=float(found.points[row, 0]),
                memory_bytes=float(found.points[row, 1]),
                cost_usd=usd_per_step(part, float(found.points[row, 0])),
                part=part,
                layout=layout,
            )
            for row, layout in zip(rows, _layouts(laid, found, rows), strict=True)
        ]
        return GraphCurve(
            part=part,
            points=tuple(point for point in every if point.memory_bytes <= limit_bytes),
            epsilon=found.epsilon,
            search_s=perf_counter() - start_s,
            search_cpu_s=process_time() - start_cpu_s,
            meshes=tuple(each.mesh for each in laid),
            layouts_per_operator=layouts_on_all(laid),
            efforts=found.efforts,
            smallest=min(every, key=lambda point: point.memory_bytes, default=None),
        )

    def references(self, part: Cluster) -> tuple[Reference[GraphLayout], ...]:
        """Data parallelism and Megatron's layout on the tier mesh of the part, estimated by
        `estimate_layout`."""
        if part.devices == 1:
            return ()
        mesh = tier_mesh(part, part.devices)
        found = []
        for name, reference_layout in (("data parallel", data_parallel), ("Megatron", megatron)):
            layout = reference_layout(self.graph, mesh.ranks)
            if layout is None:
                continue
            estimate = estimate_layout(self.graph, part, self.training, mesh, layout)
            point = Point(
                time_s=estimate.time_s,
                memory_bytes=estimate.memory_bytes,
                cost_usd=usd_per_step(part, estimate.time_s),
                part=part,
                layout=layout,
            )
            found.append(Reference(name=name, point=point, fits=point.memory_bytes <= self.limit_bytes(part)))
        return tuple(found)

    def nothing_fits(self, curve: Curve[Any]) -> Infeasible:
        if not isinstance(curve, GraphCurve):
            raise InternalError("the curve of a graph is of layouts")
        if curve.smallest is None:
            return Infeasible(
                f"no layout of {self.graph.name} exists for {curve.devices} devices", reasons={}
            )
        limit = format_bytes(self.limit_bytes(curve.part))
        return Infeasible(
            f"no layout of {self.graph.name} fits on {curve.devices} devices with the whole batch at once: "
            f"the smallest takes {format_bytes(curve.smallest.memory_bytes)} of {limit}; "
            "more devices, a smaller batch or more memory help",
            reasons={"memory": 1},
            relaxations=self._relaxations(curve.part, curve.smallest.memory_bytes),
        )

    def _relaxations(self, part: Cluster, smallest_bytes: float) -> list[str]:
        """The fewest parts of the batch, a power of two, of which one fits: gradients of all parts can be
        accumulated. Empty where none of a few numbers does."""
        limit_bytes, batch = self.limit_bytes(part), self.graph.batch
        first = max(1, ceil(log2(smallest_bytes / limit_bytes)))
        for many in (1 << power for power in range(first, first + MOST_HALVINGS)):
            if batch % many:
                break
            small = scaled(self.graph, batch // many)
            chains = [layout_chain(small, part, self.training, mesh).chain for mesh in self.meshes_on(part)]
            found = pareto_search(
                chains, epsilon=ROUGH_EPSILON, most_labels=MOST_LABELS, most_bytes=limit_bytes
            )
            least = float(found.points[:, 1].min()) if len(found.points) else inf
            if least <= limit_bytes:
                text = f"{many:,} micro-batches of {batch // many:,} with their gradients accumulated"
                return [f"{text}: one takes {format_bytes(least)} (--global-batch-size {batch // many})"]
        return []

    def closest(self, curve: Curve[Any]) -> Point[GraphLayout] | None:
        return curve.smallest if isinstance(curve, GraphCurve) else None


def layouts_on_all(laid: Sequence[LayoutSpace]) -> Mapping[str, int]:
    """The number of layouts of each operator on several meshes."""
    total: Counter[str] = Counter()
    for each in laid:
        total.update(each.layouts_per_operator)
    return dict(total)


def _layouts(
    laid: Sequence[LayoutSpace], found: ParetoSearchResult, rows: Sequence[int]
) -> list[GraphLayout]:
    """The layouts of some points, in their order."""
    by_row: dict[int, GraphLayout] = {}
    for mesh, own in enumerate(laid):
        ours = [row for row in rows if found.solutions[row][0] == mesh]
        by_row |= zip(ours, own.layouts([found.solutions[row][1] for row in ours]), strict=True)
    return [by_row[row] for row in rows]


# Graphs cut into stages

MOST_STAGE_LABELS = 10_000
"""Largest number of labels of the search of one stage; beyond, it continues with its proven epsilon."""

MICROBATCHES_PER_STAGE = 4
"""Largest default number of micro-batches per stage. With this number, equal stages idle for about a fifth of
the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCurve(GraphCurve):
    """A curve over `partitions` ways to cut the graph, of which `evaluated` were evaluated; the meshes are
    those of a stage."""

    stages: int
    microbatches: tuple[int, ...]
    partitions: int
    evaluated: int


class StagedCurves(GraphCurves):
    """Returns the Pareto frontier of `graph` over all cuts into `stages`, all layouts of the stages, and the
    given numbers of `microbatches` (None: the largest divisor of the batch up to MICROBATCHES_PER_STAGE per
    stage).

    Every stage has the same number of consecutive devices, part of one node or whole nodes, all of one kind,
    and the same mesh.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        training: Training,
        memory_margin: float,
        stages: int,
        microbatches: Sequence[int] | None,
        meshes: MeshChoice = TIERS,
        *,
        uses_all: bool = False,
    ) -> None:
        super().__init__(graph, cluster, training, memory_margin, meshes, uses_all=uses_all)
        self.stages = stages
        self.microbatches = tuple(microbatches or (_default_microbatches(graph.batch, stages),))

    def require(self, sizes: Sequence[int] | None) -> None:
        required: list[Cluster] = []
        for every in (self.choice.unions,) if sizes is None else map(self.choice.of, sizes):
            shared = [part for part in every if divides_evenly(part, self.stages)]
            if not shared:
                raise self._does_not_divide(every)
            required += [part for part in shared if self.meshes_on(part)] or shared[:1]
        self.meshes.require([(part, part.devices // self.stages) for part in required])

    def meshes_on(self, part: Cluster) -> tuple[Mesh, ...]:
        """The meshes of each stage; none if the devices of the part cannot be divided into equal stages."""
        if not divides_evenly(part, self.stages):
            return ()
        return self.meshes.of(part, part.devices // self.stages)

    def _does_not_divide(self, parts: Sequence[Cluster]) -> ConfigError:
        """The error with possible requests: other numbers of stages, or other device counts."""
        devices, most = parts[-1].devices, sum(block.repeat for block in self.graph.blocks)
        stages = [
            each
            for each in range(2, min(devices, most) + 1)
            if any(divides_evenly(part, each) for part in parts)
        ]
        allowed_values = [runs_text(stages)] if stages else []
        if self.sizes:
            allowed_values.append(f"{self.stages} with --devices {runs_text(self.sizes)}")
        return ConfigError(
            "stages with as many devices each, of one node or whole nodes of one kind, do not use "
            f"all of {devices}",
            key="--stages", found=str(self.stages), allowed="; ".join(allowed_values) or "1",
        )  # fmt: skip

    def problems(self, part: Cluster) -> list[StagedProblem]:
        """The pipelines on a part, one for each mesh and number of micro-batches. Raises ConfigError if the
        batch cannot be divided into that many micro-batches."""
        return [
            staged_problem(self.graph, part, self.training, self.stages, microbatches, mesh)
            for mesh in self.meshes_on(part)
            for microbatches in self.microbatches
        ]

    def layouts_per_operator(self, part: Cluster) -> Mapping[str, int]:
        return _layouts_per_operator(self.problems(part))

    def _relaxations(self, part: Cluster, smallest_bytes: float) -> list[str]:
        """None: the batch goes in micro-batches through the stages."""
        return []

    def curve(self, part: Cluster, *, epsilon: float = 0.0, progress: Progress | None = None) -> StagedCurve:
        start_s, start_cpu_s = perf_counter(), process_time()
        problems = self.problems(part)
        with reporting_compilation(progress):
            found, every = staged_frontier(problems, epsilon=epsilon, most_labels=MOST_STAGE_LABELS)
        limit_bytes = self.limit_bytes(part)
        points = [
            Point(
                time_s=point.time_s,
                memory_bytes=point.memory_bytes,
                cost_usd=usd_per_step(part, point.time_s),
                part=part,
                layout=_layout_of(point),
            )
            for point in found.points
        ]
        return StagedCurve(
            part=part,
            points=tuple(point for point in points if point.memory_bytes <= limit_bytes),
            epsilon=found.epsilon,
            search_s=perf_counter() - start_s,
            search_cpu_s=process_time() - start_cpu_s,
            meshes=tuple(dict.fromkeys(problem.mesh for problem in problems)),
            layouts_per_operator=_layouts_per_operator(problems),
            efforts=tuple(
                Effort(stage_frontiers.weights, stage_frontiers.choices, stage_frontiers.labels)
                for stage_frontiers in every
            ),
            smallest=min(points, key=lambda point: point.memory_bytes, default=None),
            stages=self.stages,
            microbatches=self.microbatches,
            partitions=found.partitions,
            evaluated=found.evaluated,
        )


def divides_evenly(cluster: Cluster, stages: int) -> bool:
    """Whether `stages` stages can use all devices of `cluster`: each the same number of consecutive devices,
    part of one node or whole nodes, all of one kind."""
    nodes = cluster.nodes
    own, left = divmod(cluster.devices, stages)
    if left or any(node != nodes[0] for node in nodes):
        return False
    return own % nodes[0].devices == 0 or nodes[0].devices % own == 0


def staged_problem(
    graph: OpGraph, cluster: Cluster, training: Training, stages: int, microbatches: int, mesh: Mesh
) -> StagedProblem:
    """`graph`, whose size is the whole batch, on stages that divide all of `cluster`, each on a mesh like
    `mesh`. Raises ConfigError if the batch cannot be divided into `microbatches`."""
    if graph.batch % microbatches:
        raise ConfigError(
            "do not divide the batch", key="--microbatches", found=str(microbatches),
            allowed=f"divisors of {graph.batch}",
        )  # fmt: skip
    return StagedProblem(
        graph=scaled(graph, graph.batch // microbatches),
        cluster=cluster,
        training=training,
        mesh=mesh,
        stages=stages,
        microbatches=microbatches,
    )


def _default_microbatches(batch: int, stages: int) -> int:
    most = MICROBATCHES_PER_STAGE * stages
    return max(count for count in range(1, min(most, batch) + 1) if batch % count == 0)


def _layout_of(point: StagedPipeline) -> StagedLayout:
    blocks = tuple(block for layout in point.layouts for block in layout.blocks)
    microbatches = point.problem.microbatches
    return StagedLayout(
        ranks=point.problem.mesh.ranks,
        blocks=blocks,
        cuts=point.cuts,
        microbatches=microbatches,
        schedule=SCHEDULE,
    )


def _layouts_per_operator(problems: Sequence[StagedProblem]) -> Mapping[str, int]:
    of_each = {problem.mesh: problem for problem in problems}
    return layouts_on_all(
        [each.open_candidates(0, len(each.blocks), StepCounts()) for each in of_each.values()]
    )
