"""Graph files: reads operator graphs from YAML or JSON and writes them.

`load_graph` reads a path, or `graph:NAME` for a shipped graph; `parse_graph` a mapping; `graph_text` writes a
graph that is read back as an equal one. Unknown keys are refused. The keys are in docs/reference/formats.md,
section "Operator graphs".
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from shardwise.errors import ConfigError
from shardwise.graph.batch import input_growth
from shardwise.graph.check import check_graph
from shardwise.graph.record import Block, Operand, OpGraph, OpNode, Parameter
from shardwise.graph.sizes import CONSTANT, SizeGrowth, parse_size, size_text
from shardwise.inputs import Fields, dumps_flow_yaml, dumps_yaml, printable, read_mapping, short_repr, unknown

# Unchecked documents


def first_user(document: object, name: str) -> str | None:
    """The first operator that has a dim or tensor with this name, in an unchecked file with any contents."""
    for block in _listed(document, "blocks"):
        for operator in _listed(block, "operators"):
            title = operator.get("name") if isinstance(operator, Mapping) else None
            if isinstance(title, str) and _names(operator, name):
                return title
    return None


def _listed(value: object, key: str) -> Sequence[object]:
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, list) else ()


def _names(value: object, name: str) -> bool:
    """Whether any text within `value` is this name."""
    if isinstance(value, Mapping):
        return any(_names(part, name) for part in value.values())
    return any(_names(part, name) for part in value) if isinstance(value, list) else value == name


# Reading

GRAPH_SCHEMA = "shardwise.graph"
VERSION = 1

_DIM = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}")
_DIM_ALLOWED = "a letter, then letters, digits and underscores"


def graph_of_file(path: str) -> OpGraph:
    """The graph in the file at `path`. ConfigError with the file, the key and the operator."""
    mapping = read_mapping(path)
    try:
        return parse_graph(mapping, name=printable(os.path.splitext(os.path.basename(path))[0]))
    except ConfigError as error:
        raise error.within(file=printable(path)) from None


def parse_graph(mapping: Mapping[str, object], *, name: str = "graph") -> OpGraph:
    """The checked graph in a mapping, as read from a file; `name` is its default name. ConfigError as
    above."""
    fields = Fields(mapping)
    fields.choice("schema", (GRAPH_SCHEMA,), default=GRAPH_SCHEMA)
    fields.integer("version", low=1, high=VERSION, default=VERSION)
    batch = fields.integer("batch", low=1, high=1e9)
    seq_len = fields.integer("seq_len", low=1, high=1e9) if fields.has("seq_len") else None
    scope = _Scope(document=mapping, batch=batch, seq_len=seq_len, sizes={}, growth={})
    scope.sizes.update(scope.sizes_of(fields, "sizes"))
    declared = _inputs(fields, scope)
    blocks = tuple(_block(part, scope) for part in fields.mappings("blocks", low=1))
    graph = OpGraph(
        name=fields.text("name", default=name),
        inputs={key: tuple(size for size, _ in shape) for key, shape in declared.items()},
        blocks=blocks,
        batch=batch,
        seq_len=seq_len,
        growth={dim: growth for dim, growth in scope.growth.items() if growth != CONSTANT},
        source=fields.text("source", max_length=2000) if fields.has("source") else "",
    )
    fields.finish()
    _refuse_unused(fields, scope, graph)
    check_graph(graph)
    _check_growth(fields, declared, graph)
    return graph


@dataclass(frozen=True, slots=True)
class _Scope:
    """The sizes of dim names in a file, the `document`; `growth` collects the growth of every name as it is
    read."""

    document: Mapping[str, object]
    batch: int
    seq_len: int | None
    sizes: dict[str, int]
    growth: dict[str, SizeGrowth]

    def sizes_of(self, fields: Fields, key: str, *, operator: str | None = None) -> dict[str, int]:
        """The sizes by name at `key`, empty where it is absent. ConfigError for a name with two growths."""
        sizes: dict[str, int] = {}
        part = fields.mapping(key, default={})
        for dim in part.names:
            if not _DIM.fullmatch(dim):
                raise part.error(dim, "is not a dim name", found=short_repr(dim), allowed=_DIM_ALLOWED)
            sizes[dim], growth = self.size(part, dim, part.any(dim, allowed="a size"), operator)
            if self.growth.setdefault(dim, growth) != growth:
                raise part.error(
                    dim,
                    "does not grow as elsewhere under this name",
                    found=short_repr(part.any(dim)),
                    allowed=f"a size that grows with {_growth_text(self.growth[dim])}, or another name",
                )
        part.finish()
        return sizes

    def size(
        self, fields: Fields, key: str, value: object, operator: str | None = None
    ) -> tuple[int, SizeGrowth]:
        """The size that `value` stands for. An error names the `operator`, or the first one that has
        `key`."""
        try:
            return parse_size(value, self.batch, self.seq_len)
        except ConfigError as error:
            user = operator or first_user(self.document, key)
            message = error.message if user is None else f"of operator {short_repr(user)} {error.message}"
            raise fields.error(key, message, found=error.found, allowed=error.allowed) from None


def _growth_text(growth: SizeGrowth) -> str:
    words = ["batch"] * growth.batch + ["seq_len"] * growth.seq_len
    return "*".join(words) or "nothing"


def _inputs(fields: Fields, scope: _Scope) -> dict[str, tuple[tuple[int, SizeGrowth], ...]]:
    """The size and growth of each dim of each graph input."""
    part = fields.mapping("inputs")
    inputs = {
        name: tuple(scope.size(part, name, item) for item in part.sequence(name, high=16))
        for name in part.chosen_names()
    }
    part.finish()
    return inputs


def _check_growth(
    fields: Fields, declared: Mapping[str, tuple[tuple[int, SizeGrowth], ...]], graph: OpGraph
) -> None:
    """ConfigError where a graph input does not grow as the dims of its readers."""
    part = fields.mapping("inputs")
    for name, shape in declared.items():
        for (size, found), allowed in zip(shape, input_growth(graph, name), strict=True):
            if found != allowed:
                raise part.error(
                    name,
                    "does not grow as its readers' dims",
                    found=f"{size} that grows with {_growth_text(found)}",
                    allowed=f"{size} that grows with {_growth_text(allowed)}",
                )


def _block(part: Fields, scope: _Scope) -> Block:
    block = Block(
        name=part.text("name"),
        entry=part.text("entry") if part.has("entry") else None,
        repeat=part.integer("repeat", low=1, high=1e5, default=1),
        operators=tuple(_operator(item, scope) for item in part.mappings("operators", low=1)),
    )
    part.finish()
    return block


def _operator(part: Fields, scope: _Scope) -> OpNode:
    name = part.text("name")
    own = scope.sizes_of(part, "dims", operator=name)
    sizes = scope.sizes | own
    inputs = tuple(
        Operand(item.text("from"), _dims(item, "dims", sizes, name)) for item in _each(part, "inputs")
    )
    parameters = tuple(
        Parameter(item.text("name"), _dims(item, "dims", sizes, name)) for item in _each(part, "parameters")
    )
    output = _dims(part, "output", sizes, name)
    tensors = (*(operand.dims for operand in inputs), *(p.dims for p in parameters), output)
    seen = dict.fromkeys((*(dim for dims in tensors for dim in dims), *own))
    node = OpNode(
        name=name,
        kind=part.text("kind"),
        dims={dim: sizes[dim] for dim in seen},
        inputs=inputs,
        output=output,
        parameters=parameters,
        attributes=_attributes(part),
        whole=_dims(part, "whole", sizes, name) if part.has("whole") else (),
        flop=part.number("flop", high=1e30) if part.has("flop") else None,
        moved_bytes=part.number("moved_bytes", high=1e30) if part.has("moved_bytes") else None,
    )
    part.finish()
    return node


def _each(part: Fields, key: str) -> Iterator[Fields]:
    """The mappings at `key`, none where it is absent; each refuses unknown keys after it is read."""
    for item in part.mappings(key, default=()):
        yield item
        item.finish()


def _dims(part: Fields, key: str, sizes: Mapping[str, int], operator: str) -> tuple[str, ...]:
    """The names of dims at `key`: unique, and each with a size."""
    dims: list[str] = []
    for item in part.sequence(key, high=16):
        if not isinstance(item, str) or item not in sizes:
            allowed = "names in sizes, or in the operator's dims"
            raise part.error(
                key,
                f"of operator {short_repr(operator)}: dim without a size",
                found=short_repr(item),
                allowed=allowed,
            )
        if item in dims:
            message = f"of operator {short_repr(operator)}: dim given twice"
            raise part.error(key, message, found=short_repr(item), allowed="each once")
        dims.append(item)
    return tuple(dims)


def _attributes(part: Fields) -> dict[str, int | float | bool | str]:
    if not part.has("attributes"):
        return {}
    found = part.mapping("attributes")
    attributes: dict[str, int | float | bool | str] = {}
    for name in found.names:
        value = found.any(name, allowed="a number, true, false or text")
        if not isinstance(value, int | float | bool | str):
            raise found.error(
                name, "is not a plain value", found=short_repr(value), allowed="a number, true, false or text"
            )
        attributes[name] = value
    found.finish()
    return attributes


def _refuse_unused(fields: Fields, scope: _Scope, graph: OpGraph) -> None:
    used = {dim for block in graph.blocks for node in block.operators for dim in node.dims}
    for dim in scope.sizes:
        if dim not in used:
            raise fields.error(
                "sizes", "has a name that no operator uses", found=short_repr(dim), allowed="used names"
            )


# Shipped graphs

FOLDER: Final = Path(__file__).parent / "catalogue"
GRAPH_PREFIX: Final = "graph:"
"""Prefix of the name of a shipped graph."""
GRAPH_FILES: Final = (".yaml", ".yml", ".json")
"""Extensions of graph files, in any case."""


def load_graph(text: str) -> OpGraph:
    """The graph that `text` names: `graph:NAME`, in any case, a shipped one; otherwise the path of a file.

    ConfigError with the file, the key and the operator.
    """
    if text.casefold().startswith(GRAPH_PREFIX):
        return _shipped(text[len(GRAPH_PREFIX) :].casefold(), text)
    if not os.path.exists(text) and not _looks_like_path(text):
        raise unknown(
            "is neither a file nor a known graph",
            text,
            graph_names(),
            prefix=GRAPH_PREFIX,
            key="GRAPH",
            found=printable(text) or "nothing",
            allowed="a YAML or JSON file of operators, or a name that `shardwise graphs` lists",
        )
    return graph_of_file(text)


def shipped_graphs() -> dict[str, OpGraph]:
    """All shipped graphs by name, without the prefix `graph:`."""
    return {name: _read(name) for name in graph_names()}


def graph_names() -> tuple[str, ...]:
    """The names of the shipped graphs, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def _read(name: str) -> OpGraph:
    return graph_of_file(str(FOLDER / f"{name}.yaml"))


def _shipped(name: str, text: str) -> OpGraph:
    names = graph_names()
    if name not in names:
        raise unknown(
            "is not a shipped graph", name, names, prefix=GRAPH_PREFIX, key="GRAPH", found=printable(text)
        )
    return _read(name)


def _looks_like_path(text: str) -> bool:
    return "/" in text or os.sep in text or text.lower().endswith(GRAPH_FILES)


# Writing

_WIDTH = 118
"""Width of a line of operators, in characters."""


def graph_text(graph: OpGraph) -> str:
    """`graph` as a YAML file, each operator on one or a few lines. `load_graph` reads it as an equal
    graph."""
    shared = _shared_sizes(graph)
    text = dumps_yaml(_head(graph, shared)) + "blocks:\n"
    return text + "".join(
        f"{line}\n" for block in graph.blocks for line in _block_lines(graph, block, shared)
    )


def _head(graph: OpGraph, shared: dict[str, int]) -> dict[str, object]:
    """Everything but the blocks, as plain values."""
    document: dict[str, object] = {"schema": GRAPH_SCHEMA, "version": VERSION, "name": graph.name}
    if graph.source:
        document["source"] = graph.source
    document["batch"] = graph.batch
    if graph.seq_len is not None:
        document["seq_len"] = graph.seq_len
    document["sizes"] = {dim: _size(graph, dim, size) for dim, size in shared.items()}
    document["inputs"] = {
        name: [
            size_text(size, growth, graph.batch, graph.seq_len)
            for size, growth in zip(shape, input_growth(graph, name), strict=True)
        ]
        for name, shape in graph.inputs.items()
    }
    return document


def _shared_sizes(graph: OpGraph) -> dict[str, int]:
    """For each name of a dim the size that most operators give it; the first of equally frequent ones."""
    counts: dict[str, Counter[int]] = {}
    for block in graph.blocks:
        for node in block.operators:
            for dim, size in node.dims.items():
                counts.setdefault(dim, Counter())[size] += 1
    return {dim: sizes.most_common(1)[0][0] for dim, sizes in counts.items()}


def _size(graph: OpGraph, dim: str, size: int) -> int | str:
    return size_text(size, graph.growth.get(dim, CONSTANT), graph.batch, graph.seq_len)


def _block_lines(graph: OpGraph, block: Block, shared: dict[str, int]) -> Iterator[str]:
    yield f"- name: {dumps_flow_yaml(block.name)}"
    if block.entry is not None:
        yield f"  entry: {dumps_flow_yaml(block.entry)}"
    if block.repeat > 1:
        yield f"  repeat: {block.repeat}"
    yield "  operators:"
    for node in block.operators:
        pairs = [
            f"{key}: {dumps_flow_yaml(value)}" for key, value in _operator_entry(graph, node, shared).items()
        ]
        yield from _wrapped(pairs)


def _wrapped(pairs: list[str]) -> Iterator[str]:
    """A flow mapping as a list item, broken between its keys where it is too long for a line."""
    line = "  - {"
    for index, pair in enumerate(pairs):
        if len(line) + len(pair) + 1 > _WIDTH and index:
            yield line.rstrip()
            line = "     "
        line += pair + ("}" if index == len(pairs) - 1 else ", ")
    yield line


def _operator_entry(graph: OpGraph, node: OpNode, shared: dict[str, int]) -> dict[str, object]:
    """One operator; keys with default values are left out."""
    tensors = {dim for dims in node.tensors for dim in dims}
    own = {
        dim: _size(graph, dim, size)
        for dim, size in node.dims.items()
        if size != shared[dim] or dim not in tensors
    }
    document: dict[str, object] = {"name": node.name, "kind": node.kind}
    if own:
        document["dims"] = own
    if node.inputs:
        document["inputs"] = [{"from": o.source, "dims": list(o.dims)} for o in node.inputs]
    if node.parameters:
        document["parameters"] = [{"name": p.name, "dims": list(p.dims)} for p in node.parameters]
    document["output"] = list(node.output)
    if node.attributes:
        document["attributes"] = dict(node.attributes)
    if node.whole:
        document["whole"] = list(node.whole)
    for key, value in (("flop", node.flop), ("moved_bytes", node.moved_bytes)):
        if value is not None:
            document[key] = value
    return document
