"""Operators in order as a chain of blocks, with repetitions folded."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.graph import Block, Operand, OpNode, Parameter

MOST_IN_BLOCK = 8
"""Operators of a block that is no repetition, where it can be cut."""

Nodes = tuple[OpNode, ...]


def needed(nodes: Sequence[OpNode], result: str) -> Nodes:
    """The operators on which `result` depends, in order."""
    wanted = {result}
    kept: list[OpNode] = []
    for node in reversed(nodes):
        if node.name in wanted:
            kept.append(node)
            wanted.update(operand.source for operand in node.inputs)
    return tuple(reversed(kept))


def blocks_of(nodes: Sequence[OpNode], inputs: Mapping[str, tuple[int, ...]]) -> tuple[Block, ...]:
    """The chain of blocks: cut wherever one tensor alone is read behind, runs of alike ones folded."""
    segments = list(_segments(nodes, inputs))
    prints = [_print(segment, inputs) for segment in segments]
    blocks: list[Block] = []
    loose: list[OpNode] = []
    place = 0
    while place < len(segments):
        run = _run_at(place, segments, prints) if place else None
        if run is None:
            if loose and len(loose) + len(segments[place]) > MOST_IN_BLOCK:
                _close(blocks, loose, inputs)
            loose += segments[place]
            place += 1
        else:
            _close(blocks, loose, inputs)
            body = tuple(node for segment in segments[place : place + run.period] for node in segment)
            _close(blocks, list(_with_names(body, run.names)), inputs, repeat=run.count)
            place += run.period * run.count
    _close(blocks, loose, inputs)
    return tuple(blocks)


def _segments(nodes: Sequence[OpNode], inputs: Mapping[str, tuple[int, ...]]) -> Iterator[Nodes]:
    """The finest runs of operators between which a single tensor passes, the last one made."""
    last = {operand.source: at for at, node in enumerate(nodes) for operand in node.inputs}
    start, reach = 0, 0
    for at, node in enumerate(nodes):
        if reach <= at:
            yield tuple(nodes[start : at + 1])
            start = at + 1
        reach = max(reach, last.get(node.name, at))
    if start < len(nodes):
        yield tuple(nodes[start:])


@dataclass(frozen=True, slots=True)
class _Run:
    """So many segments, so many times, and the parameters' names with their counters."""

    period: int
    count: int
    names: Mapping[str, str]


def _run_at(place: int, segments: Sequence[Nodes], prints: Sequence[object]) -> _Run | None:
    """The repetition that begins here and covers most segments, of those the shortest."""
    best: _Run | None = None
    for period in range(1, (len(segments) - place) // 2 + 1):
        count = 1
        first = prints[place : place + period]
        names: Mapping[str, str] = {}
        while prints[place + count * period : place + (count + 1) * period] == first:
            one, two = (
                [
                    p.name
                    for segment in segments[at : at + period]
                    for node in segment
                    for p in node.parameters
                ]
                for at in (place, place + count * period)
            )
            found = _counted(one, two, count)
            if found is None or (count > 1 and found != names):
                break
            names, count = found, count + 1
        if count > 1 and (best is None or period * count > best.period * best.count):
            best = _Run(period, count, names)
    return best


def _counted(one: Sequence[str], two: Sequence[str], step: int) -> dict[str, str] | None:
    """For each name of `one` the name with a counter, which gives that of `two` after `step` repetitions."""
    names: dict[str, str] = {}
    for first, other in zip(one, two, strict=True):
        ours, theirs = first.split("."), other.split(".")
        differ = [at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
        if len(ours) != len(theirs) or len(differ) != 1:
            return None
        at = differ[0]
        start = re.fullmatch(r"(.*?)(\d+)", ours[at])
        if start is None or theirs[at] != f"{start[1]}{int(start[2]) + step}":
            return None
        names[first] = ".".join((*ours[:at], f"{start[1]}{{{start[2]}}}", *ours[at + 1 :]))
    return names


def _print(segment: Nodes, inputs: Mapping[str, tuple[int, ...]]) -> object:
    """What two repetitions of a segment have in common: all but names of operators, data and parameters."""
    places = {node.name: at for at, node in enumerate(segment)}
    parameters: dict[str, int] = {}
    data: dict[str, int] = {}

    def source(operand: Operand) -> object:
        if operand.source in inputs:
            return ("data", data.setdefault(operand.source, len(data)), inputs[operand.source])
        return places.get(operand.source, "entry")

    return tuple(
        (
            node.kind,
            tuple(node.dims.items()),
            tuple((source(operand), operand.dims) for operand in node.inputs),
            tuple((parameters.setdefault(p.name, len(parameters)), p.dims) for p in node.parameters),
            node.output,
            tuple(node.attributes.items()),
        )
        for node in segment
    )


def _with_names(nodes: Nodes, names: Mapping[str, str]) -> Nodes:
    return tuple(
        replace(node, parameters=tuple(Parameter(names[p.name], p.dims) for p in node.parameters))
        for node in nodes
    )


def _close(
    blocks: list[Block], nodes: list[OpNode], inputs: Mapping[str, tuple[int, ...]], *, repeat: int = 1
) -> None:
    """Adds a block of `nodes`, which reads the one before it as its entry, and empties them."""
    if not nodes:
        return
    entry = "entry"
    while entry in inputs or any(node.name == entry for node in nodes):
        entry += "_"
    own = {node.name for node in nodes}
    renamed = tuple(
        replace(
            node,
            inputs=tuple(
                operand if operand.source in own or operand.source in inputs else Operand(entry, operand.dims)
                for operand in node.inputs
            ),
        )
        for node in nodes
    )
    name = _block_name(renamed, repeat, {block.name for block in blocks}, len(blocks))
    blocks.append(Block(name=name, operators=renamed, entry=entry if blocks else None, repeat=repeat))
    nodes.clear()


def _block_name(nodes: Nodes, repeat: int, taken: set[str], count: int) -> str:
    """What counted parameters have in front of their counter (`model.layers`), else the block's place."""
    fronts = (p.name.partition(".{")[0] for node in nodes for p in node.parameters if ".{" in p.name)
    front = next(fronts, "") if repeat > 1 else ""
    return front if front and front not in taken else f"block{count}"
