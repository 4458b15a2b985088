"""Checks of an operator graph: edges, order, shapes, names, and each operator against its kind
(`check_graph`)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from shardwise.errors import ConfigError
from shardwise.graph.operator import check_op
from shardwise.graph.record import Block, Operand, OpGraph, OpNode, skip_tensors_of
from shardwise.graph.sizes import CONSTANT, SizeGrowth
from shardwise.inputs import short_repr, unknown

Shape = tuple[int, ...]

COUNTER = re.compile(r"\{([0-9]{1,9})\}")
"""The counter of repetitions in the name of a parameter of a repeated block; the number is its start."""

MAX_ITERATIONS = 10**40
"""Largest iteration space of one operator, in iterations: above any real operator, far below float
overflow."""


def check_graph(graph: OpGraph) -> None:
    """ConfigError with the key (as in a file) and the operator where the graph is not valid."""
    _check_names(graph)
    skips = skip_tensors_of(graph)
    before: _TensorType | None = None
    there = {name: _TensorType(shape, None) for name, shape in graph.inputs.items()}
    for index, block in enumerate(graph.blocks):
        key = f"blocks[{index}]"
        _check_entry(graph, block, before, key)
        made = _check_block(graph, block, before, there, skips.skip_outputs[index], key)
        before = made[block.operators[-1].name]
        there |= {name: made[name] for name in skips.skip_outputs[index]}
    _check_loss(graph)
    _check_parameters(graph)
    _check_parameter_names(graph)
    _check_inputs(graph)


@dataclass(frozen=True, slots=True)
class _TensorType:
    """A tensor: its shape, and the growth of each dim (None for a graph input, whose readers define it)."""

    shape: Shape
    growth: tuple[SizeGrowth, ...] | None


def _check_names(graph: OpGraph) -> None:
    """No two graph inputs, blocks, entries or operators that can be read together have the same name."""
    seen: dict[str, str] = {name: f"inputs.{name}" for name in graph.inputs}
    blocks: set[str] = set()
    for index, block in enumerate(graph.blocks):
        key = f"blocks[{index}]"
        if block.name in blocks:
            raise _wrong(f"{key}.name", "is given twice", block.name, "a unique name for each block")
        blocks.add(block.name)
        for place, node in enumerate(block.operators):
            if node.name in seen:
                raise _wrong(
                    f"{key}.operators[{place}].name",
                    f"is given twice (first at {seen[node.name]})",
                    node.name,
                    "a unique name for each operator and graph input",
                )
            seen[node.name] = f"{key}.operators[{place}]"
    for index, block in enumerate(graph.blocks):
        if block.entry is not None and block.entry in seen:
            raise _wrong(
                f"blocks[{index}].entry",
                f"is also the name of {seen[block.entry]}",
                block.entry,
                "another name",
            )


def _check_entry(graph: OpGraph, block: Block, before: _TensorType | None, key: str) -> None:
    """Only the first block has no entry; a repeated block's result has the shape of its entry."""
    if before is None and block.entry is not None:
        raise _wrong(f"{key}.entry", "is given for the first block", block.entry, "no entry")
    if before is not None and block.entry is None:
        allowed = "a name for the result of the previous block"
        raise _wrong(f"{key}.entry", "is missing", f"nothing in block {short_repr(block.name)}", allowed)
    if block.repeat > 1 and before is None:
        raise _wrong(f"{key}.repeat", "needs an entry", str(block.repeat), "1 in the first block")
    if block.repeat > 1 and before is not None:
        result = _result_type(graph, block.operators[-1])
        if result.shape != before.shape:
            raise _wrong(
                f"{key}.repeat",
                f"of block {short_repr(block.name)} needs a result of the shape of its entry",
                _shape_text(result.shape),
                _shape_text(before.shape),
            )


def _check_block(
    graph: OpGraph,
    block: Block,
    before: _TensorType | None,
    there: Mapping[str, _TensorType],
    skip_outputs: Collection[str],
    key: str,
) -> dict[str, _TensorType]:
    """Check the operators of a block; returns all tensors that later operators may read.

    Each operator reads graph inputs, tensors of the block, its entry, or skip tensors of earlier blocks.
    Every result but the last is read in the block or is a skip output.
    """
    made = dict(there)
    if before is not None and block.entry is not None:
        made[block.entry] = before
    read = set(skip_outputs)
    for place, node in enumerate(block.operators):
        where = f"{key}.operators[{place}]"
        for slot, operand in enumerate(node.inputs):
            at = f"{where}.inputs[{slot}]"
            if operand.source not in made:
                raise _unreadable(graph, block, node, operand, f"{at}.from")
            _check_shape(graph, node, operand, made[operand.source], f"{at}.dims")
            read.add(operand.source)
        _check_kind(node, where)
        made[node.name] = _result_type(graph, node)
    if block.entry is not None and block.entry not in read:
        raise _wrong(f"{key}.entry", "is read by no operator", block.entry, "an entry that is read")
    for place, node in enumerate(block.operators[:-1]):
        if node.name not in read:
            raise _wrong(
                f"{key}.operators[{place}]",
                f"makes {short_repr(node.name)}, which no operator reads",
                None,
                "results that are read; a block's result is that of its last operator",
            )
    return made


def _check_kind(node: OpNode, key: str) -> None:
    iterations = prod(node.dims.values())
    if iterations > MAX_ITERATIONS:
        raise _wrong(
            f"{key}.dims",
            f"of operator {short_repr(node.name)} are too large together",
            f"10^{len(str(iterations)) - 1} iterations",
            "10^40",
        )
    try:
        check_op(node)
    except ConfigError as error:
        raise error.within(key=key) from None


def _result_type(graph: OpGraph, node: OpNode) -> _TensorType:
    return _TensorType(node.shape(node.output), tuple(graph.growth.get(dim, CONSTANT) for dim in node.output))


def _check_shape(graph: OpGraph, node: OpNode, operand: Operand, tensor: _TensorType, key: str) -> None:
    shape = node.shape(operand.dims)
    if shape != tensor.shape:
        raise _wrong(
            key,
            f"of operator {short_repr(node.name)} do not have the shape of {short_repr(operand.source)}",
            _shape_text(shape),
            _shape_text(tensor.shape),
        )
    growth = tuple(graph.growth.get(dim, CONSTANT) for dim in operand.dims)
    if tensor.growth is not None and growth != tensor.growth:
        dim = next(d for d, a, b in zip(operand.dims, growth, tensor.growth, strict=True) if a != b)
        raise _wrong(
            key,
            f"of operator {short_repr(node.name)}: does not grow as that dim of {short_repr(operand.source)}",
            dim,
            "the same growth with the batch and the sequence length",
        )


def _unreadable(graph: OpGraph, block: Block, node: OpNode, operand: Operand, key: str) -> ConfigError:
    """The error for an operand that cannot be read: a cycle, wrong order, another block, or an unknown
    name."""
    own = {other.name: other for other in block.operators}
    reader, source = short_repr(node.name), short_repr(operand.source)
    if operand.source in own:
        cycle = _cycle(own, node.name)
        if cycle:
            text = " -> ".join(cycle)
            return _wrong(key, f"of operator {reader} closes a cycle", text, "an acyclic graph")
        return _wrong(key, f"of operator {reader} comes after it", operand.source, "producers before readers")
    for other in graph.blocks:
        if operand.source == other.entry or any(operand.source == maker.name for maker in other.operators):
            allowed = (
                "operators of the block, its entry, graph inputs, and of earlier blocks without repeat the "
                "operators and uniquely named entries"
            )
            return _wrong(key, f"of operator {reader} is in block {short_repr(other.name)}", source, allowed)
    return unknown(
        f"of operator {reader} does not exist",
        operand.source,
        (*own, *graph.inputs, *((block.entry,) if block.entry else ())),
        key=key,
        found=operand.source,
        allowed="an operator of the block, its entry or a graph input",
    )


def _cycle(own: Mapping[str, OpNode], start: str) -> list[str]:
    """A cycle of operators through `start`, each reading the one before it; empty if there is none."""
    came_from: dict[str, str] = {}
    queue = [start]
    for name in queue:
        for operand in own[name].inputs:
            if operand.source == start:
                path = [name]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return [start, *path]
            if operand.source in own and operand.source not in came_from:
                came_from[operand.source] = name
                queue.append(operand.source)
    return []


def _check_loss(graph: OpGraph) -> None:
    """The last operator makes a scalar."""
    node = graph.blocks[-1].operators[-1]
    if node.output:
        raise _wrong(
            f"blocks[{len(graph.blocks) - 1}].operators[{len(graph.blocks[-1].operators) - 1}].output",
            f"of operator {short_repr(node.name)}, the last one, is not a loss",
            f"[{', '.join(node.output)}]",
            "[], a scalar",
        )


def _check_parameter_names(graph: OpGraph) -> None:
    """With counters replaced by their numbers, no two tensors have the same name."""
    first: dict[str, tuple[str, str]] = {}
    for _, block, key, node in _nodes(graph):
        for slot, parameter in enumerate(node.parameters):
            at, name = f"{key}.parameters[{slot}].name", parameter.name
            counters = len(COUNTER.findall(name))
            if counters > 1 or re.search(r"[{}]", COUNTER.sub("", name)):
                raise _wrong(
                    at,
                    f"of operator {short_repr(node.name)} has braces that are not one counter",
                    name,
                    "one number in braces at most, such as layers.{0}.up",
                )
            if block.repeat > 1 and not counters:
                raise _wrong(
                    at,
                    f"of operator {short_repr(node.name)} is one name for {block.repeat:,} tensors, "
                    "one per repetition",
                    name,
                    "a number in braces that counts them, such as layers.{0}.up",
                )
            for own in _counted(name, block.repeat):
                known, owner = first.setdefault(own, (name, node.name))
                if known != name:
                    raise _wrong(
                        at,
                        f"of operator {short_repr(node.name)} is also a name of operator {short_repr(owner)} "
                        f"({short_repr(known)})",
                        own,
                        "a unique name for each tensor",
                    )


def _counted(name: str, repeat: int) -> Iterator[str]:
    """The names of a parameter in all repetitions."""
    front, *counter = COUNTER.split(name)
    for count in range(repeat):
        yield f"{front}{int(counter[0]) + count}{counter[1]}" if counter else name


def _check_parameters(graph: OpGraph) -> None:
    """A parameter name stands for one tensor: one shape, and for a repeated block in that block only."""
    first: dict[str, tuple[Shape, int, str]] = {}
    for index, block, key, node in _nodes(graph):
        for slot, parameter in enumerate(node.parameters):
            at = f"{key}.parameters[{slot}]"
            shape = node.shape(parameter.dims)
            known, home, owner = first.setdefault(parameter.name, (shape, index, node.name))
            if shape != known:
                raise _wrong(
                    at,
                    f"of operator {short_repr(node.name)} has another shape than at operator "
                    f"{short_repr(owner)}",
                    _shape_text(shape),
                    _shape_text(known),
                )
            if home != index and max(block.repeat, graph.blocks[home].repeat) > 1:
                raise _wrong(
                    at,
                    f"of operator {short_repr(node.name)} is shared with operator "
                    f"{short_repr(owner)} of another block",
                    parameter.name,
                    "parameters of a repeated block in that block only",
                )
            if any(graph.growth.get(dim, CONSTANT) != CONSTANT for dim in parameter.dims):
                raise _wrong(
                    at,
                    f"of operator {short_repr(node.name)} grows with the batch or the sequence length",
                    parameter.name,
                    "constant sizes",
                )


def _check_inputs(graph: OpGraph) -> None:
    """Each graph input is read, and its readers agree on its growth."""
    growth: dict[str, tuple[SizeGrowth, ...]] = {}
    for _, _, key, node in _nodes(graph):
        for slot, operand in enumerate(node.inputs):
            if operand.source not in graph.inputs:
                continue
            own = tuple(graph.growth.get(dim, CONSTANT) for dim in operand.dims)
            if growth.setdefault(operand.source, own) != own:
                raise _wrong(
                    f"{key}.inputs[{slot}].dims",
                    f"of operator {short_repr(node.name)} do not grow as another reader's",
                    operand.source,
                    "the same growth with the batch and the sequence length",
                )
    for name in graph.inputs:
        if name not in growth:
            raise _wrong(f"inputs.{name}", "is read by no operator", None, "inputs that are read")


def _nodes(graph: OpGraph) -> Iterator[tuple[int, Block, str, OpNode]]:
    """Every operator with its block's index, its block, and its key in a file."""
    for index, block in enumerate(graph.blocks):
        for place, node in enumerate(block.operators):
            yield index, block, f"blocks[{index}].operators[{place}]", node


def _shape_text(shape: Shape) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _wrong(key: str, message: str, found: str | None, allowed: str) -> ConfigError:
    return ConfigError(message, key=key, found=found, allowed=allowed)
