"""The curves of an operator graph cut into stages: time against memory over cuts and layouts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from shardwise.cluster import Cluster, Mesh
from shardwise.cost import StepCounts, Training
from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, StagedLayout, scaled
from shardwise.plan import usd_per_step
from shardwise.search.curve_parts import runs_text
from shardwise.search.curves import Point
from shardwise.search.drive import Progress
from shardwise.search.graph_curves import TIERS, GraphCurve, GraphCurves, layouts_on_all
from shardwise.search.mesh_choice import MeshChoice
from shardwise.search.stages import SCHEDULE, StagedPipeline, StagedProblem, staged_frontier
from shardwise.search.tracking.track import Effort

MOST_STAGE_LABELS = 10_000
"""Labels that a search keeps for one stage before it goes on with what is proven by then."""

MICROBATCHES_PER_STAGE = 4
"""For each stage so many micro-batches, at most, where none are asked for: stages that are alike wait for a
fifth of the step then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCurve(GraphCurve):
    """A curve over ways to cut, `partitions` of which `evaluated` were; the meshes are a stage's."""

    stages: int
    microbatches: tuple[int, ...]
    partitions: int
    evaluated: int


class StagedCurves(GraphCurves):
    """Yields the frontier of `graph` over all cuts into `stages`, all layouts of these, and numbers of
    `microbatches` (None: the largest divisor of the batch up to MICROBATCHES_PER_STAGE for each stage).

    Each stage has as many devices in a row, of one node or whole nodes, all alike, and a mesh like the
    others'.
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
        """The meshes of each stage; none where the devices of the part are not shared out."""
        if not divides_evenly(part, self.stages):
            return ()
        return self.meshes.of(part, part.devices // self.stages)

    def _does_not_divide(self, parts: Sequence[Cluster]) -> ConfigError:
        """What could be requested instead: other stages of these parts, or other devices for the stages."""
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
            f"do not share out all of {devices}: each stage has as many devices, of one node or whole nodes, "
            "all alike",
            key="--stages", found=str(self.stages), allowed="; ".join(allowed_values) or "1",
        )  # fmt: skip

    def problems(self, part: Cluster) -> list[StagedProblem]:
        """Pipelines on a part, on each mesh one of each number of micro-batches. ConfigError where the batch
        has no such micro-batches."""
        return [
            staged_problem(self.graph, part, self.training, self.stages, microbatches, mesh)
            for mesh in self.meshes_on(part)
            for microbatches in self.microbatches
        ]

    def layouts_per_operator(self, part: Cluster) -> Mapping[str, int]:
        return _layouts_per_operator(self.problems(part))

    def curve(self, part: Cluster, *, epsilon: float = 0.0, progress: Progress | None = None) -> StagedCurve:
        start_s, start_cpu_s = perf_counter(), process_time()
        problems = self.problems(part)
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
    """Whether so many stages can have all devices of `cluster`: each as many in a row, of one node or whole
    nodes, all alike."""
    nodes = cluster.nodes
    own, left = divmod(cluster.devices, stages)
    if left or any(node != nodes[0] for node in nodes):
        return False
    return own % nodes[0].devices == 0 or nodes[0].devices % own == 0


def staged_problem(
    graph: OpGraph, cluster: Cluster, training: Training, stages: int, microbatches: int, mesh: Mesh
) -> StagedProblem:
    """`graph`, of the size of the whole batch, on stages that share all of `cluster`, each on a mesh like
    `mesh`. ConfigError where the batch has no such micro-batches."""
    if graph.batch % microbatches:
        raise ConfigError(
            "do not share out the batch", key="--microbatches", found=str(microbatches),
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
