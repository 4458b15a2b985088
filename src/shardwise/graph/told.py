"""A layout as plain JSON values and back: what a plan of an operator graph holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from shardwise.graph.layout import allows
from shardwise.graph.loans import SkipTensors, skip_tensors_of, tensor_shapes
from shardwise.graph.named import MODES, BlockLayout, GraphLayout
from shardwise.graph.operator import rules_of
from shardwise.graph.placement import (
    REPLICATE,
    REPLICATE_SHARD_STATES,
    REPLICATE_SUM_GRAD,
    Placement,
    placement_text,
    placements_of,
    shard,
)
from shardwise.graph.record import Block, OpGraph, OpNode
from shardwise.graph.rule import ShardingRule
from shardwise.inputs import Fields, short_repr

Placements = tuple[Placement, ...]


def layout_record(layout: GraphLayout) -> dict[str, Any]:
    """`layout` as mappings, lists and texts; repetitions that are laid alike are one, with a count."""
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
    """The layout of `graph` on a mesh of `ranks` per axis that `layout_record` wrote; ConfigError, located
    below `key`, where it is not such a record."""
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
            allowed = f"the {len(blocks)} blocks of the graph, one after the other"
            raise item.error("count", "goes beyond its block", found=str(count), allowed=allowed)
        is_last = place + count == len(blocks)
        home = homes[min(place, len(blocks) - 1)]
        tensor_dims = _placed_tensors(graph, home, skips, shapes[home], has_next=not is_last)
        found += [_read_block(item, own, ranks, readers, tensor_dims)] * count
    if len(found) != len(blocks):
        allowed = f"all {len(blocks)} of the graph"
        raise part.error("blocks", "do not make up the graph", found=f"{len(found)} blocks", allowed=allowed)
    for (before, made), (block, read) in pairwise(zip(blocks, found, strict=True)):
        ends = made.tensors[before.operators[-1].name]
        if block.entry is not None and read.tensors[block.entry] != ends:
            raise part.error(
                "blocks", f"do not meet: {block.name} begins where {before.name} does not end",
                found=" ".join(map(placement_text, read.tensors[block.entry])),
                allowed=" ".join(map(placement_text, ends)),
            )  # fmt: skip
    _check_skip_tensors(part, blocks, found, skips)
    part.finish()
    return GraphLayout(ranks=tuple(ranks), blocks=tuple(found))


def _check_skip_tensors(
    part: Fields, blocks: Sequence[Block], found: Sequence[BlockLayout], skips: SkipTensors
) -> None:
    """What a block lends lies in one place, for itself and for those that borrow it."""
    first_placements: dict[str, tuple[str, Placements]] = {}
    for block, own in zip(blocks, found, strict=True):
        for name in skips.names:
            if name not in own.tensors:
                continue
            maker, placements = first_placements.setdefault(name, (block.name, own.tensors[name]))
            if own.tensors[name] != placements:
                raise part.error(
                    "blocks", f"do not meet: {block.name} reads {name} where {maker} does not leave it",
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
    """The tensors of a block that lie in a place of their own, and their numbers of dims."""
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
    """The rules of an operator, one per axis, that go together."""
    known = {rule.name: rule for rule in rules_of(op)}
    names = part.sequence(op.name, low=len(ranks), high=len(ranks))
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise part.error(op.name, "has no such rule", found=short_repr(name), allowed=", ".join(known))
    rules = tuple(known[str(name)] for name in names)
    if not allows(op, rules, ranks):
        allowed = f"rules that go together on {'x'.join(map(str, ranks))} ranks"
        raise part.error(op.name, "cannot be laid so", found=short_repr(names), allowed=allowed)
    return rules


def _placed(
    part: Fields, names: Mapping[str, int], axes: int, among: Callable[[int], tuple[Placement, ...]]
) -> dict[str, Placements]:
    """The placements of each of `names`, tensors of so many dims."""
    found = {}
    for name, dims in names.items():
        words = {placement_text(each): each for each in among(dims)}
        texts = part.sequence(name, low=axes, high=axes)
        for text in texts:
            if not isinstance(text, str) or text not in words:
                raise part.error(
                    name, "has no such placement", found=short_repr(text), allowed=", ".join(words)
                )
        found[name] = tuple(words[str(text)] for text in texts)
    part.finish()
    return found
