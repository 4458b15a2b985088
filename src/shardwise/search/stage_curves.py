"""The curves of an operator graph cut into stages: time against memory over cuts and layouts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from shardwise.cluster import Cluster, Mesh, part_of
from shardwise.cost import Training, Turns
from shardwise.errors import ConfigError
from shardwise.graph import GraphLayout, OpGraph, StagedLayout, scaled
from shardwise.plan import usd_per_step
from shardwise.search.curves import Point, Reference
from shardwise.search.drive import Progress
from shardwise.search.graph_curves import TIERS, GraphCurve, GraphCurves, layouts_on_all
from shardwise.search.mesh_choice import MeshChoice
from shardwise.search.stages import SCHEDULE, Setting, Staged, staged
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
    ) -> None:
        super().__init__(graph, cluster, training, memory_margin, meshes)
        self.stages = stages
        self.microbatches = tuple(microbatches or (_usual(graph.batch, stages),))
        if not self.sizes:
            raise ConfigError(
                "do not share out the devices", key="--stages", found=str(stages),
                allowed="as many devices for each, of one node or whole nodes, all alike",
            )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in super().sizes if self._is_shared_out(size))

    def _is_shared_out(self, devices: int) -> bool:
        nodes = part_of(self.cluster, devices).nodes
        own, left = divmod(devices, self.stages)
        if left or any(node != nodes[0] for node in nodes):
            return False
        return own % nodes[0].devices == 0 or nodes[0].devices % own == 0

    def settings(self, devices: int) -> list[Setting]:
        """Pipelines on so many devices, on each mesh one of each number of micro-batches. ConfigError where
        the batch has no such micro-batches."""
        cluster = part_of(self.cluster, devices)
        meshes = self.meshes.of(cluster, devices // self.stages)
        return [
            setting_of(self.graph, cluster, self.training, self.stages, microbatches, mesh)
            for mesh in meshes
            for microbatches in self.microbatches
        ]

    def layouts_per_operator(self, devices: int) -> Mapping[str, int]:
        return _layouts_per_operator(self.settings(devices))

    def curve(self, devices: int, *, epsilon: float = 0.0, progress: Progress | None = None) -> StagedCurve:
        start_s, start_cpu_s = perf_counter(), process_time()
        settings = self.settings(devices)
        found, every = staged(settings, epsilon=epsilon, most_labels=MOST_STAGE_LABELS)
        limit_bytes = self.limit_bytes(devices)
        cluster = part_of(self.cluster, devices)
        points = tuple(
            Point(
                time_s=point.time_s,
                memory_bytes=point.memory_bytes,
                cost_usd=usd_per_step(cluster, point.time_s),
                devices=devices,
                layout=_layout_of(point),
            )
            for point in found.points
            if point.memory_bytes <= limit_bytes
        )
        return StagedCurve(
            devices=devices,
            points=points,
            epsilon=found.epsilon,
            search_s=perf_counter() - start_s,
            search_cpu_s=process_time() - start_cpu_s,
            meshes=tuple(dict.fromkeys(setting.mesh for setting in settings)),
            layouts_per_operator=_layouts_per_operator(settings),
            efforts=tuple(Effort(pieces.weights, pieces.choices, pieces.labels) for pieces in every),
            smallest_bytes=min(point.memory_bytes for point in found.points),
            stages=self.stages,
            microbatches=self.microbatches,
            partitions=found.partitions,
            evaluated=found.evaluated,
        )

    def references(self, devices: int) -> tuple[Reference[GraphLayout], ...]:
        return ()


def setting_of(
    graph: OpGraph, cluster: Cluster, training: Training, stages: int, microbatches: int, mesh: Mesh
) -> Setting:
    """`graph`, of the size of the whole batch, on stages that share all of `cluster`, each on a mesh like
    `mesh`. ConfigError where the batch has no such micro-batches."""
    if graph.batch % microbatches:
        raise ConfigError(
            "do not share out the batch", key="--microbatches", found=str(microbatches),
            allowed=f"divisors of {graph.batch}",
        )  # fmt: skip
    return Setting(
        graph=scaled(graph, graph.batch // microbatches),
        cluster=cluster,
        training=training,
        mesh=mesh,
        stages=stages,
        microbatches=microbatches,
    )


def _usual(batch: int, stages: int) -> int:
    most = MICROBATCHES_PER_STAGE * stages
    return max(count for count in range(1, min(most, batch) + 1) if batch % count == 0)


def _layout_of(point: Staged) -> StagedLayout:
    blocks = tuple(block for layout in point.layouts for block in layout.blocks)
    microbatches = point.setting.microbatches
    return StagedLayout(
        ranks=point.setting.mesh.ranks,
        blocks=blocks,
        cuts=point.cuts,
        microbatches=microbatches,
        schedule=SCHEDULE,
    )


def _layouts_per_operator(settings: Sequence[Setting]) -> Mapping[str, int]:
    of_each = {setting.mesh: setting for setting in settings}
    return layouts_on_all([each.opened(0, len(each.blocks), Turns()) for each in of_each.values()])
