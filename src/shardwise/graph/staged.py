"""A layout of a graph that is cut into stages of a pipeline, told as plain JSON values and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardwise.graph.labels import block_labels
from shardwise.graph.loans import blocks_joined_by_skips
from shardwise.graph.named import GraphLayout
from shardwise.graph.record import OpGraph
from shardwise.graph.scale import scaled
from shardwise.graph.told import layout_from_record, layout_record
from shardwise.inputs import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLayout(GraphLayout):
    """A layout whose blocks lie on stages in a row, with meshes alike: `cuts` are the first blocks of all but
    the first, repetitions counted. The batch goes through them in `microbatches`, as `schedule` says."""

    cuts: tuple[int, ...]
    microbatches: int
    schedule: str

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first block of each stage, and the one behind its last."""
        return tuple(pairwise((0, *self.cuts, len(self.blocks))))

    @property
    def stages(self) -> tuple[GraphLayout, ...]:
        """The layout of each stage."""
        return tuple(
            GraphLayout(ranks=self.ranks, blocks=self.blocks[first:end]) for first, end in self.spans
        )

    def shared_parameters(self, graph: OpGraph) -> list[str]:
        """The parameters of `graph` that several stages read."""
        stage_of = [stage for stage, (first, end) in enumerate(self.spans) for _ in range(first, end)]
        homes: dict[str, set[int]] = {}
        place = 0
        for block in graph.blocks:
            for op in block.operators if block.repeat == 1 else ():  # repetitions have their own
                for parameter in op.parameters:
                    homes.setdefault(parameter.name, set()).add(stage_of[place])
            place += block.repeat
        return [name for name, stages in homes.items() if len(stages) > 1]


def staged_record(layout: StagedLayout) -> dict[str, Any]:
    """`layout` as mappings, lists and texts; each stage as `layout_record` has it."""
    stages = [layout_record(stage) for stage in layout.stages]
    return {"schedule": layout.schedule, "microbatches": layout.microbatches, "stages": stages}


def staged_from_record(
    record: Mapping[str, Any],
    graph: OpGraph,
    ranks: Sequence[int],
    schedules: Sequence[str],
    *,
    file: str | None = None,
    key: str = "layout",
) -> StagedLayout:
    """The layout that `staged_record` wrote of `graph`, which has the sizes of the whole batch, on meshes of
    `ranks` per axis; ConfigError, located below `key`, where it is not such a record."""
    part = Fields(record, file=file, key=key)
    schedule = part.choice("schedule", schedules)
    microbatches = part.integer("microbatches", low=1, high=1e7)
    if graph.batch % microbatches:
        allowed = f"divisors of {graph.batch}"
        raise part.error(
            "microbatches", "do not share out the batch", found=str(microbatches), allowed=allowed
        )
    blocks: list[Any] = []
    ends: list[int] = []
    for stage in part.mappings("stages", low=2):
        blocks += stage.sequence("blocks", low=1)
        ends.append(sum(_count(item) for item in blocks))
        stage.finish()
    part.finish()
    labels = block_labels(graph)
    if parted := [labels[cut] for cut in ends[:-1] if cut in blocks_joined_by_skips(graph)]:
        allowed = "cuts before blocks that read nothing of stages before but their entry, as those behind"
        raise part.error("stages", "begin where tensors cross besides", found=parted[0], allowed=allowed)
    of_one = scaled(graph, graph.batch // microbatches)
    whole = layout_from_record({"blocks": blocks}, of_one, ranks, file=file, key=key)
    return StagedLayout(
        ranks=whole.ranks,
        blocks=whole.blocks,
        cuts=tuple(ends[:-1]),
        microbatches=microbatches,
        schedule=schedule,
    )


def _count(item: object) -> int:
    """How many repetitions a record of blocks is of; what is none is told when it is read."""
    count = item.get("count") if isinstance(item, Mapping) else None
    return count if isinstance(count, int) else 1
