"""Operators in order as a chain of blocks, with repetitions folded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    """The chain of blocks: cut wherever one tensor alone is read behind, besides what an encoder hands to all
    layers of a decoder; runs of alike ones folded."""
    segments = list(_with_shared(list(_segments(nodes)), inputs))
    prints = [_print(segment, inputs) for segment in segments]
    making = _Making(inputs, {node.name for node in nodes})
    loose: list[OpNode] = []
    place = 0
    while place < len(segments):
        segment = segments[place]
        run = _run_at(place, segments, prints) if place and not segment.opens else None
        if run is None:
            if segment.opens or (loose and len(loose) + len(segment.nodes) > MOST_IN_BLOCK):
                making.close(loose)
            if segment.opens and segment.shared is not None:
                making.open(segment.shared)
            loose += segment.nodes
            place += 1
        else:
            making.close(loose)
            body = tuple(node for each in segments[place : place + run.period] for node in each.nodes)
            making.close(list(_with_names(body, run.names)), repeat=run.count)
            place += run.period * run.count
    making.close(loose)
    return tuple(making.blocks)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Operators in a row that read one tensor of those before them, and one that is `shared` with segments
    beside them, the first of which `opens` it: to that one it is what the one before made."""

    nodes: Nodes
    shared: str | None = None
    opens: bool = False


def _with_shared(segments: Sequence[Nodes], inputs: Mapping[str, tuple[int, ...]]) -> Iterator[_Segment]:
    """The segments; where one would fall into repetitions but for what it reads of those before it, which all
    of them read, these. The last repetition may end in segments behind."""
    plain = [_Segment(nodes) for nodes in segments]
    prints = [_print(segment, inputs) for segment in plain]
    before: str | None = None
    for place, nodes in enumerate(segments):
        finer = [
            _Segment(each, before, opens=number == 0)
            for number, each in enumerate(_segments(nodes) if before is not None else ())
        ]
        behind = [*finer, *plain[place + 1 :]]
        own = [*(_print(segment, inputs) for segment in finer), *prints[place + 1 :]]
        runs = (_run_at(start, behind, own) for start in range(1, len(finer)))
        repeats = any(
            run is not None and any(_reads(each, before) for each in behind[start : start + run.period])
            for start, run in enumerate(runs, start=1)
        )
        yield from finer if repeats else plain[place : place + 1]
        before = nodes[-1].name


def _reads(segment: _Segment, source: str | None) -> bool:
    return any(operand.source == source for node in segment.nodes for operand in node.inputs)


def _segments(nodes: Sequence[OpNode]) -> Iterator[Nodes]:
    """The finest runs of operators between which a single tensor of their own passes, the last one made."""
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


def _run_at(place: int, segments: Sequence[_Segment], prints: Sequence[object]) -> _Run | None:
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
                    for node in segment.nodes
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


def _print(segment: _Segment, inputs: Mapping[str, tuple[int, ...]]) -> object:
    """What two repetitions of a segment have in common: all but names of operators, data and parameters."""
    places = {node.name: at for at, node in enumerate(segment.nodes)}
    parameters: dict[str, int] = {}
    data: dict[str, int] = {}

    def source(operand: Operand) -> object:
        if operand.source in inputs:
            return ("data", data.setdefault(operand.source, len(data)), inputs[operand.source])
        if operand.source == segment.shared:
            return ("shared", operand.source)
        return places.get(operand.source, "entry")

    return segment.opens, tuple(
        (
            node.kind,
            tuple(node.dims.items()),
            tuple((source(operand), operand.dims) for operand in node.inputs),
            tuple((parameters.setdefault(p.name, len(parameters)), p.dims) for p in node.parameters),
            node.output,
            tuple(node.attributes.items()),
        )
        for node in segment.nodes
    )


def _with_names(nodes: Nodes, names: Mapping[str, str]) -> Nodes:
    return tuple(
        replace(node, parameters=tuple(Parameter(names[p.name], p.dims) for p in node.parameters))
        for node in nodes
    )


class _Making:
    """Blocks in the making, of a graph that has these inputs and operators; `shared` are the names by which
    blocks read what an operator made that they share: that of the entry of the first of them."""

    def __init__(self, inputs: Mapping[str, tuple[int, ...]], names: Collection[str]) -> None:
        self.inputs, self.taken = inputs, {*inputs, *names}
        self.blocks: list[Block] = []
        self.shared: dict[str, str] = {}
        self.entry = self.next_entry = self._free("entry")

    def _free(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        return name

    def open(self, source: str) -> None:
        """What the block before made is shared from here on: the entry of the next block."""
        self.shared[source] = self.next_entry = self._free("shared")
        self.taken.add(self.next_entry)

    def close(self, nodes: list[OpNode], *, repeat: int = 1) -> None:
        """Adds a block of `nodes`, which reads the one before it as its entry, and empties them."""
        if not nodes:
            return
        own = {node.name for node in nodes} | {*self.inputs}

        def read(operand: Operand) -> Operand:
            if operand.source in own:
                return operand
            return Operand(self.shared.get(operand.source, self.entry), operand.dims)

        renamed = tuple(replace(node, inputs=tuple(map(read, node.inputs))) for node in nodes)
        name = _block_name(renamed, repeat, {block.name for block in self.blocks}, len(self.blocks))
        entry = self.next_entry if self.blocks else None
        self.blocks.append(Block(name=name, operators=renamed, entry=entry, repeat=repeat))
        self.next_entry = self.entry
        nodes.clear()


def _block_name(nodes: Nodes, repeat: int, taken: set[str], count: int) -> str:
    """What counted parameters have in front of their counter (`model.layers`), else the block's place."""
    fronts = (p.name.partition(".{")[0] for node in nodes for p in node.parameters if ".{" in p.name)
    front = next(fronts, "") if repeat > 1 else ""
    return front if front and front not in taken else f"block{count}"
