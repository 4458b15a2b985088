"""The curves of an operator graph cut into stages: time against memory over cuts and layouts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

from shardwise.cluster import Cluster, part_of, tier_mesh
from shardwise.cost import Training, Turns
from shardwise.errors import ConfigError
from shardwise.graph import GraphLayout, OpGraph, StagedLayout, scaled
from shardwise.plan import usd_per_step
from shardwise.search.curves import Point, Reference
from shardwise.search.drive import Progress
from shardwise.search.graph_curves import GraphCurve, GraphCurves
from shardwise.search.stages import SCHEDULE, Setting, Staged, staged
from shardwise.search.tracking.track import Effort

MOST_STAGE_LABELS = 10_000
"""Labels that a search keeps for one stage before it goes on with what is proven by then."""

MICROBATCHES_PER_STAGE = 4
"""For each stage so many micro-batches, at most, where none are asked for: stages that are alike wait for a
fifth of the step then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedCurve(GraphCurve):
    """A curve over ways to cut, `partitions` of which `evaluated` were; the mesh is each stage's."""

    stages: int
    microbatches: tuple[int, ...]
    partitions: int
    evaluated: int


class StagedCurves(GraphCurves):
    """Yields the frontier of `graph` over all cuts into `stages`, all layouts of these, and numbers of
    `microbatches` (None: the largest divisor of the batch up to MICROBATCHES_PER_STAGE for each stage).

    Each stage has as many devices in a row, of one node or whole nodes, all alike.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster,
        training: Training,
        memory_margin: float,
        stages: int,
        microbatches: Sequence[int] | None,
    ) -> None:
        super().__init__(graph, cluster, training, memory_margin)
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

    def setting(self, devices: int, microbatches: int) -> Setting:
        """The pipeline on so many devices. ConfigError where the batch has no such micro-batches."""
        return setting_of(
            self.graph, part_of(self.cluster, devices), self.training, self.stages, microbatches
        )

    def layouts_per_operator(self, devices: int) -> Mapping[str, int]:
        return _layouts_per_operator(self.setting(devices, self.microbatches[0]))

    def curve(self, devices: int, *, epsilon: float = 0.0, progress: Progress | None = None) -> StagedCurve:
        start_s, start_cpu_s = perf_counter(), process_time()
        settings = [self.setting(devices, count) for count in self.microbatches]
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
            mesh=settings[0].mesh,
            layouts_per_operator=_layouts_per_operator(settings[0]),
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
    graph: OpGraph, cluster: Cluster, training: Training, stages: int, microbatches: int
) -> Setting:
    """`graph`, of the size of the whole batch, on stages that share all of `cluster`, each on the mesh of its
    tiers. ConfigError where the batch has no such micro-batches."""
    if graph.batch % microbatches:
        raise ConfigError(
            "do not share out the batch", key="--microbatches", found=str(microbatches),
            allowed=f"divisors of {graph.batch}",
        )  # fmt: skip
    return Setting(
        graph=scaled(graph, graph.batch // microbatches),
        cluster=cluster,
        training=training,
        mesh=tier_mesh(cluster, cluster.devices // stages),
        stages=stages,
        microbatches=microbatches,
    )


def _usual(batch: int, stages: int) -> int:
    most = MICROBATCHES_PER_STAGE * stages
    return max(count for count in range(1, min(most, batch) + 1) if batch % count == 0)


def _layout_of(point: Staged) -> StagedLayout:
    blocks = tuple(block for layout in point.layouts for block in layout.blocks)
    microbatches = point.setting.microbatches
    return StagedLayout(blocks=blocks, cuts=point.cuts, microbatches=microbatches, schedule=SCHEDULE)


def _layouts_per_operator(setting: Setting) -> Mapping[str, int]:
    return setting.opened(0, len(setting.blocks), Turns()).layouts_per_operator
