"""Layouts of a graph: the sharding rules, placements and recomputation of every block, and their JSON
records.

`GraphLayout` is a layout on one mesh, `StagedLayout` one in pipeline stages. `layout_record` and
`staged_record` write them as plain values, as plans of operator graphs hold them; `layout_from_record` and
`staged_from_record` read them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

from shardwise.graph.batch import scaled
from shardwise.graph.operator import rules_of
from shardwise.graph.record import (
    Block,
    OpGraph,
    OpNode,
    SkipTensors,
    block_labels,
    blocks_joined_by_skips,
    skip_tensors_of,
    tensor_shapes,
)
from shardwise.graph.rules import (
    REPLICATE,
    REPLICATE_SHARD_STATES,
    REPLICATE_SUM_GRAD,
    Placement,
    ShardingRule,
    allows,
    placement_text,
    placements_of,
    shard,
)
from shardwise.inputs import Fields, short_repr

# Layouts

Mode = Literal["kept", "recomputed"]
"""Whether the activations of a block are saved for the backward pass, or recomputed from the block's
inputs."""

MODES: tuple[Mode, ...] = ("kept", "recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The layout of one repetition of a block.

    `rules` has the sharding rules of each operator, one per mesh axis, outermost first. `tensors` are the
    placements of the entry, the result, skip tensors and tensors with several readers, by the name of
    producer or entry. `stored` are the placements in which parameters are stored. `used` are those to which a
    parameter with several readers is gathered for all of them. Both are repeated in each block that reads the
    parameter.
    """

    name: str
    mode: Mode
    rules: Mapping[str, tuple[ShardingRule, ...]]
    tensors: Mapping[str, tuple[Placement, ...]]
    stored: Mapping[str, tuple[Placement, ...]]
    used: Mapping[str, tuple[Placement, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLayout:
    """A layout of all blocks, each repetition by itself, on a mesh of `ranks` per axis, outermost first."""

    ranks: tuple[int, ...]
    blocks: tuple[BlockLayout, ...]


# Records of layouts

Placements = tuple[Placement, ...]


def layout_record(layout: GraphLayout) -> dict[str, Any]:
    """`layout` as mappings, lists and text; equal repetitions in a row are one entry with a count."""
    runs = [(block, len(list(alike))) for block, alike in groupby(layout.blocks)]
    return {"blocks": [{"name": block.name, "count": count, **_block(block)} for block, count in runs]}


def _block(block: BlockLayout) -> dict[str, Any]:
    def texts(placed: Mapping[str, Placements]) -> dict[str, list[str]]:
        return {name: [placement_text(each) for each in placements] for name, placements in placed.items()}

    return {
        "mode": block.mode,
        "operators": {name: [rule.name for rule in rules] for name, rules in block.rules.items()},
        "tensors": texts(block.tensors),
        "stored": texts(block.stored),
        "used": texts(block.used),
    }


def layout_from_record(
    record: Mapping[str, Any],
    graph: OpGraph,
    ranks: Sequence[int],
    *,
    file: str | None = None,
    key: str = "layout",
) -> GraphLayout:
    """The layout of `graph` on a mesh of `ranks` per axis from a record of `layout_record`.

    ConfigError, located below `key`, where it is not such a record.
    """
    part = Fields(record, file=file, key=key)
    skips, shapes = skip_tensors_of(graph), tensor_shapes(graph)
    blocks = [block for block in graph.blocks for _ in range(block.repeat)]
    homes = [home for home, block in enumerate(graph.blocks) for _ in range(block.repeat)]
    readers = Counter(
        parameter.name for block in graph.blocks for op in block.operators for parameter in op.parameters
    )
    found: list[BlockLayout] = []
    for item in part.mappings("blocks", low=1):
        count = item.integer("count", low=1, high=max(len(blocks) - len(found), 1))
        place = len(found)
        own = blocks[place] if place < len(blocks) else blocks[-1]
        item.choice("name", [own.name])
        if any(block.name != own.name for block in blocks[place : place + count]) or place >= len(blocks):
            allowed = f"the {len(blocks)} blocks of the graph, in order"
            raise item.error("count", "goes beyond its block", found=str(count), allowed=allowed)
        is_last = place + count == len(blocks)
        home = homes[min(place, len(blocks) - 1)]
        tensor_dims = _placed_tensors(graph, home, skips, shapes[home], has_next=not is_last)
        found += [_read_block(item, own, ranks, readers, tensor_dims)] * count
    if len(found) != len(blocks):
        allowed = f"all {len(blocks)} of the graph"
        raise part.error(
            "blocks", "are not all blocks of the graph", found=f"{len(found)} blocks", allowed=allowed
        )
    for (before, made), (block, read) in pairwise(zip(blocks, found, strict=True)):
        ends = made.tensors[before.operators[-1].name]
        if block.entry is not None and read.tensors[block.entry] != ends:
            raise part.error(
                "blocks",
                f"do not agree: the entry of {block.name} has other placements than the result of "
                f"{before.name}",
                found=" ".join(map(placement_text, read.tensors[block.entry])),
                allowed=" ".join(map(placement_text, ends)),
            )  # fmt: skip
    _check_skip_tensors(part, blocks, found, skips)
    part.finish()
    return GraphLayout(ranks=tuple(ranks), blocks=tuple(found))


def _check_skip_tensors(
    part: Fields, blocks: Sequence[Block], found: Sequence[BlockLayout], skips: SkipTensors
) -> None:
    """A skip tensor has the same placements in the block that makes it and in all that read it."""
    first_placements: dict[str, tuple[str, Placements]] = {}
    for block, own in zip(blocks, found, strict=True):
        for name in skips.names:
            if name not in own.tensors:
                continue
            maker, placements = first_placements.setdefault(name, (block.name, own.tensors[name]))
            if own.tensors[name] != placements:
                raise part.error(
                    "blocks", f"do not agree: {block.name} has {name} in other placements than {maker}",
                    found=" ".join(map(placement_text, own.tensors[name])),
                    allowed=" ".join(map(placement_text, placements)),
                )  # fmt: skip


def _read_block(
    item: Fields,
    block: Block,
    ranks: Sequence[int],
    readers: Mapping[str, int],
    tensor_dims: Mapping[str, int],
) -> BlockLayout:
    is_saved = item.choice("mode", MODES) == "kept"
    rules = item.mapping("operators")
    parameters = {
        parameter.name: len(parameter.dims) for op in block.operators for parameter in op.parameters
    }
    shared = {name: dims for name, dims in parameters.items() if readers[name] > 1}
    layout = BlockLayout(
        name=block.name,
        mode="kept" if is_saved else "recomputed",
        rules={op.name: _rules(rules, op, ranks) for op in block.operators},
        tensors=_placed(item.mapping("tensors"), tensor_dims, len(ranks), placements_of),
        stored=_placed(item.mapping("stored"), parameters, len(ranks), _stored_placements),
        used=_placed(item.mapping("used"), shared, len(ranks), _used_placements),
    )
    rules.finish()
    item.finish()
    return layout


def _placed_tensors(
    graph: OpGraph, place: int, skips: SkipTensors, shapes: Mapping[str, Sequence[int]], *, has_next: bool
) -> dict[str, int]:
    """The tensors of a block that have placements of their own, with their numbers of dims."""
    block = graph.blocks[place]
    counts = Counter(operand.source for op in block.operators for operand in op.inputs)
    names = [] if block.entry is None else [block.entry]
    names += skips.skip_inputs[place]
    names += [
        op.name for op in block.operators if counts[op.name] > 1 or op.name in skips.skip_outputs[place]
    ]
    if has_next:
        names.append(block.operators[-1].name)
    return {name: len(shapes[name]) for name in names}


def _stored_placements(dims: int) -> tuple[Placement, ...]:
    return (*map(shard, range(dims)), REPLICATE, REPLICATE_SHARD_STATES)


def _used_placements(dims: int) -> tuple[Placement, ...]:
    return (*map(shard, range(dims)), REPLICATE, REPLICATE_SUM_GRAD)


def _rules(part: Fields, op: OpNode, ranks: Sequence[int]) -> tuple[ShardingRule, ...]:
    """The rules of an operator, one per axis, which must be allowed together."""
    known = {rule.name: rule for rule in rules_of(op)}
    names = part.sequence(op.name, low=len(ranks), high=len(ranks))
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise part.unknown(op.name, name, known, "has no such rule")
    rules = tuple(known[str(name)] for name in names)
    if not allows(op, rules, ranks):
        allowed = f"rules that are allowed together on {'x'.join(map(str, ranks))} ranks"
        raise part.error(
            op.name, "cannot have these rules together", found=short_repr(names), allowed=allowed
        )
    return rules


def _placed(
    part: Fields, names: Mapping[str, int], axes: int, among: Callable[[int], tuple[Placement, ...]]
) -> dict[str, Placements]:
    """The placements of each of `names`, which gives their numbers of dims."""
    found = {}
    for name, dims in names.items():
        words = {placement_text(each): each for each in among(dims)}
        texts = part.sequence(name, low=axes, high=axes)
        for text in texts:
            if not isinstance(text, str) or text not in words:
                raise part.unknown(name, text, words, "has no such placement")
        found[name] = tuple(words[str(text)] for text in texts)
    part.finish()
    return found


# Pipeline stages


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLayout(GraphLayout):
    """A layout in pipeline stages, whose meshes are equal.

    `cuts` are the first blocks of all stages but the first, repetitions counted. The batch runs in
    `microbatches` in the order of `schedule`.
    """

    cuts: tuple[int, ...]
    microbatches: int
    schedule: str

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first block of each stage, and the block after its last."""
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
            for op in block.operators if block.repeat == 1 else ():  # each repetition has its own
                for parameter in op.parameters:
                    homes.setdefault(parameter.name, set()).add(stage_of[place])
            place += block.repeat
        return [name for name, stages in homes.items() if len(stages) > 1]


def staged_record(layout: StagedLayout) -> dict[str, Any]:
    """`layout` as mappings, lists and text; each stage as in `layout_record`."""
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
    """The layout of `graph` on meshes of `ranks` per axis from a record of `staged_record`.

    `graph` has the sizes of the whole batch. ConfigError, located below `key`, where it is not such a record.
    """
    part = Fields(record, file=file, key=key)
    schedule = part.choice("schedule", schedules)
    microbatches = part.integer("microbatches", low=1, high=1e7)
    if graph.batch % microbatches:
        allowed = f"divisors of {graph.batch}"
        raise part.error("microbatches", "do not divide the batch", found=str(microbatches), allowed=allowed)
    blocks: list[Any] = []
    ends: list[int] = []
    for stage in part.mappings("stages", low=2):
        blocks += stage.sequence("blocks", low=1)
        ends.append(sum(_count(item) for item in blocks))
        stage.finish()
    part.finish()
    labels = block_labels(graph)
    if parted := [labels[cut] for cut in ends[:-1] if cut in blocks_joined_by_skips(graph)]:
        allowed = "stages that no skip tensor enters"
        raise part.error("stages", "cut through skip tensors", found=parted[0], allowed=allowed)
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
    """The number of repetitions of a record's block; 1 for an invalid one, which is refused when it is
    read."""
    count = item.get("count") if isinstance(item, Mapping) else None
    return count if isinstance(count, int) else 1
