"""Turns a list of operators into a chain of blocks and folds repetitions: `blocks_of`.

A segment is a run of operators that passes a single tensor on. Equal segments in a row become one block with
`repeat`. Tensors that several repetitions read, such as an encoder's output, become skip tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.graph import Block, Operand, OpNode, Parameter

MOST_IN_BLOCK = 8
"""Largest number of operators of a block that is not repeated, where it can be split."""

MOST_SHARED = 4
"""Largest number of skip tensors that repetitions read in addition to the previous block's result."""

Nodes = tuple[OpNode, ...]


def needed(nodes: Sequence[OpNode], result: str) -> Nodes:
    """The operators on which `result` depends, in order."""
    required = {result}
    selected: list[OpNode] = []
    for node in reversed(nodes):
        if node.name in required:
            selected.append(node)
            required.update(operand.source for operand in node.inputs)
    return tuple(reversed(selected))


def blocks_of(nodes: Sequence[OpNode], inputs: Mapping[str, tuple[int, ...]]) -> tuple[Block, ...]:
    """The chain of blocks, with equal blocks in a row folded.

    A block ends wherever a single tensor is read later, not counting skip tensors that all repetitions read
    (such as an encoder's output in a decoder).
    """
    plain = list(_segments(nodes))
    names = {node.name for node in nodes}
    blocks = _folded(list(_with_shared(plain, inputs)), inputs, names)
    return blocks if _are_chained(blocks) else _folded([_Segment(each) for each in plain], inputs, names)


def _are_chained(blocks: Sequence[Block]) -> bool:
    """Whether each block reads the one before it, or passes its result on as a skip tensor."""
    reads = [{operand.source for node in block.operators for operand in node.inputs} for block in blocks]
    return all(
        block.entry in reads[place]
        or (block.repeat == 1 and any(block.entry in following for following in reads[place + 1 :]))
        for place, block in enumerate(blocks)
        if place
    )


def _folded(
    segments: Sequence[_Segment], inputs: Mapping[str, tuple[int, ...]], names: Collection[str]
) -> tuple[Block, ...]:
    """The blocks that segments make, with equal segments in a row folded."""
    fingerprints = [_fingerprint(segment, inputs) for segment in segments]
    builder = _BlockBuilder(inputs, names, frozenset().union(*(segment.shared for segment in segments)))
    pending: list[OpNode] = []
    place = 0
    while place < len(segments):
        segment = segments[place]
        run = _run_at(place, segments, fingerprints) if place and not segment.is_boundary else None
        if run is None:
            if segment.is_boundary or (pending and len(pending) + len(segment.nodes) > MOST_IN_BLOCK):
                builder.close(pending)
            pending += segment.nodes
            place += 1
        else:
            builder.close(pending)
            after = place + run.period * run.count
            body = [node for each in segments[place : place + run.period] for node in each.nodes]
            result = segments[after - 1].nodes[-1].name
            builder.close(list(_with_names(body, run.names)), repeat=run.count, result=result)
            place = after
    builder.close(pending)
    return tuple(builder.blocks)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive operators that read one tensor of those before them, and any tensors that are `shared`.

    A boundary is not a repetition: it makes a shared tensor, or begins with one.
    """

    nodes: Nodes
    shared: frozenset[str] = frozenset()
    is_boundary: bool = False


def _with_shared(segments: Sequence[Nodes], inputs: Mapping[str, tuple[int, ...]]) -> Iterator[_Segment]:
    """The segments, split further where tensors that several of them read are all that hides repetitions.

    The last repetition may end in later segments.
    """
    plain = [_Segment(nodes) for nodes in segments]
    fingerprints = [_fingerprint(segment, inputs) for segment in plain]
    before: str | None = None
    for place, nodes in enumerate(segments):
        chosen, most = plain[place : place + 1], 0
        for shared in _candidates(nodes, before):
            subsegments = _split_segments(nodes, before, shared)
            own = [*(_fingerprint(segment, inputs) for segment in subsegments), *fingerprints[place + 1 :]]
            saved = _operators_saved(subsegments, [*subsegments, *plain[place + 1 :]], own, shared)
            if saved > most:
                chosen, most = subsegments, saved
        yield from chosen
        before = nodes[-1].name


def _candidates(nodes: Nodes, before: str | None) -> Iterator[frozenset[str]]:
    """Sets of tensors that may be shared: the first one, two, ... of those with several readers.

    They are ordered by the distance between producer and last reader, longest first.
    """
    made = {node.name: at for at, node in enumerate(nodes)} | ({before: -1} if before is not None else {})
    reads: dict[str, list[int]] = {}
    for at, node in enumerate(nodes):
        for operand in node.inputs:
            if operand.source in made:
                reads.setdefault(operand.source, []).append(at)
    several = [name for name, places in reads.items() if len(places) > 1]
    several.sort(key=lambda name: made[name] - reads[name][-1])
    for count in range(1, min(len(several), MOST_SHARED) + 1):
        yield frozenset(several[:count])


def _split_segments(nodes: Nodes, before: str | None, shared: frozenset[str]) -> list[_Segment]:
    """The segments of `nodes` between which a single tensor passes, not counting the shared ones."""
    return [
        _Segment(
            each,
            shared,
            is_boundary=any(node.name in shared for node in each) or (number == 0 and before in shared),
        )
        for number, each in enumerate(_segments(nodes, before, shared))
    ]


def _operators_saved(
    subsegments: Sequence[_Segment],
    following: Sequence[_Segment],
    fingerprints: Sequence[object],
    shared: frozenset[str],
) -> int:
    """Number of operators that folding saves; zero where no repetition reads a shared tensor."""
    reads = [_reads(segment, shared) for segment in following]
    saved, is_read, place = 0, False, 1
    while place < len(subsegments) and sum(reads[1 : len(subsegments)]) > 1:
        run = None if subsegments[place].is_boundary else _run_at(place, following, fingerprints)
        if run is None:
            place += 1
            continue
        after = place + run.period * run.count
        saved += sum(len(segment.nodes) for segment in following[place + run.period : after])
        is_read |= any(reads[place : place + run.period])
        place = after
    return saved if is_read else 0


def _reads(segment: _Segment, sources: frozenset[str]) -> bool:
    return any(operand.source in sources for node in segment.nodes for operand in node.inputs)


def _segments(
    nodes: Sequence[OpNode], before: str | None = None, shared: frozenset[str] = frozenset()
) -> Iterator[Nodes]:
    """The shortest runs of operators that pass a single tensor on, not counting `shared` ones.

    `before` is the tensor that they read of earlier operators.
    """
    last = {operand.source: at for at, node in enumerate(nodes) for operand in node.inputs}
    start, last_use = 0, 0 if before is None or before in shared else last.get(before, 0)
    for at, node in enumerate(nodes):
        if last_use <= at:
            yield tuple(nodes[start : at + 1])
            start = at + 1
        if node.name not in shared:
            last_use = max(last_use, last.get(node.name, at))
    if start < len(nodes):
        yield tuple(nodes[start:])


@dataclass(frozen=True, slots=True)
class _Run:
    """`period` segments, repeated `count` times, and parameter names with their counters."""

    period: int
    count: int
    names: Mapping[str, str]


def _run_at(place: int, segments: Sequence[_Segment], fingerprints: Sequence[object]) -> _Run | None:
    """The repetition that begins at `place` and covers most segments; of equal ones, that with the shortest
    period."""
    best: _Run | None = None
    for period in range(1, (len(segments) - place) // 2 + 1):
        count = 1
        first = fingerprints[place : place + period]
        names: Mapping[str, str] = {}
        while fingerprints[place + count * period : place + (count + 1) * period] == first:
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
    """Names of `one` with a counter that gives the names of `two` after `step` repetitions; None if there is
    none."""
    names: dict[str, str] = {}
    for first, other in zip(one, two, strict=True):
        left, right = first.split("."), other.split(".")
        differ = [at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b]
        if len(left) != len(right) or len(differ) != 1:
            return None
        at = differ[0]
        start = re.fullmatch(r"(.*?)(\d+)", left[at])
        if start is None or right[at] != f"{start[1]}{int(start[2]) + step}":
            return None
        names[first] = ".".join((*left[:at], f"{start[1]}{{{start[2]}}}", *left[at + 1 :]))
    return names


def _fingerprint(segment: _Segment, inputs: Mapping[str, tuple[int, ...]]) -> object:
    """All that two repetitions of a segment have in common: everything but names of operators, data,
    parameters."""
    places = {node.name: at for at, node in enumerate(segment.nodes)}
    parameters: dict[str, int] = {}
    data: dict[str, int] = {}

    def source(operand: Operand) -> object:
        if operand.source in inputs:
            return ("data", data.setdefault(operand.source, len(data)), inputs[operand.source])
        if operand.source in segment.shared:
            return ("shared", operand.source)
        return places.get(operand.source, "entry")

    return segment.is_boundary, tuple(
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


def _with_names(nodes: Sequence[OpNode], names: Mapping[str, str]) -> Nodes:
    return tuple(
        replace(node, parameters=tuple(Parameter(names[p.name], p.dims) for p in node.parameters))
        for node in nodes
    )


class _BlockBuilder:
    """Blocks built so far, of a graph with these inputs and operators.

    `shared` tensors are read by name; the result of the previous block is read as the entry.
    """

    def __init__(
        self, inputs: Mapping[str, tuple[int, ...]], names: Collection[str], shared: frozenset[str]
    ) -> None:
        self.inputs, self.taken, self.shared = inputs, {*inputs, *names}, shared
        self.blocks: list[Block] = []
        self.known: dict[str, str] = {}
        self.entry = self._free("entry")
        self.before: str | None = None

    def _free(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def close(self, nodes: list[OpNode], *, repeat: int = 1, result: str | None = None) -> None:
        """Add a block of `nodes` and clear the list. Its entry is the result of the previous block.

        `result` is the result of the last repetition.
        """
        if not nodes:
            return
        entry = self.entry
        if self.before in self.shared and repeat == 1:
            # The next block passes it on as a skip tensor: blocks cannot read a tensor inside repetitions,
            # and it may be all that the block reads.
            entry = self.known[self.before] = self._free("shared")
        own = {node.name for node in nodes} | {*self.inputs}

        def read(operand: Operand) -> Operand:
            if operand.source in own:
                return operand
            source = entry if operand.source == self.before else self.known.get(operand.source, entry)
            return Operand(source, operand.dims)

        renamed = tuple(replace(node, inputs=tuple(map(read, node.inputs))) for node in nodes)
        name = _block_name(renamed, repeat, {block.name for block in self.blocks}, len(self.blocks))
        self.blocks.append(
            Block(name=name, operators=renamed, entry=entry if self.blocks else None, repeat=repeat)
        )
        if repeat == 1:
            self.known |= {node.name: node.name for node in nodes if node.name in self.shared}
        self.before = result or nodes[-1].name
        nodes.clear()


def _block_name(nodes: Nodes, repeat: int, taken: set[str], count: int) -> str:
    """The prefix of counted parameters (`model.layers`), or else the block's number."""
    fronts = (p.name.partition(".{")[0] for node in nodes for p in node.parameters if ".{" in p.name)
    front = next(fronts, "") if repeat > 1 else ""
    return front if front and front not in taken else f"block{count}"
