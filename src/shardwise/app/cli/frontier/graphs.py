"""The frontier of an operator graph, whose layouts have a sharding rule per operator and mesh axis.

`GraphSubject` is a graph on one mesh, `StagedSubject` a graph in pipeline stages. `full_layout_lines` prints
a layout operator by operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from shardwise.app.cli import words
from shardwise.app.cli.card import NOT_AS_GIVEN, priced_as_lines
from shardwise.app.cli.output import Line, columns, row
from shardwise.errors import ConfigError, InternalError
from shardwise.graph import (  # fmt: skip
    GRAPH_PREFIX,
    BlockLayout,
    GraphLayout,
    StagedLayout,
    loss_weight,
    parameter_count,
    placement_text,
)
from shardwise.questions import GraphSource
from shardwise.search import (
    Curve,
    GraphCurve,
    Point,
    StagedCurve,
    StagedCurves,
)
from shardwise.units import format_count, format_seconds

# Layouts as text


def full_layout_lines(layout: GraphLayout) -> tuple[str, ...]:
    """A layout as text: for each run of equal blocks a line with its name, then a line per sharding (the rule
    of each mesh axis, the outermost first) with its operators, and per storage with its parameters."""
    lines: list[str] = []
    for block, same in groupby(layout.blocks):
        many = len(list(same))
        lines.append(f"{f'{many} x ' if many > 1 else ''}{block.name}, {block.mode}")
        lines += _block_lines(block)
    return tuple(lines)


def _block_lines(block: BlockLayout) -> Iterator[str]:
    placed = ((along_axes(rule.name for rule in rules), name) for name, rules in block.rules.items())
    for placement, names in _names_by_placement(placed):
        yield f"  {placement}: {', '.join(names)}"
    prefix = _shared_prefix(block.stored)
    stored = (
        (along_axes(map(placement_text, placements)), name.removeprefix(prefix))
        for name, placements in block.stored.items()
    )
    for placement, names in _names_by_placement(stored):
        yield f"  stored {placement}: {', '.join(names)}"


def along_axes(words: Iterable[str]) -> str:
    """A word per axis, the outermost first; a single word where all are equal."""
    found = list(words)
    return found[0] if len(set(found)) == 1 else " | ".join(found)


def _names_by_placement(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Names grouped by placement, in the order of the first occurrence."""
    found: dict[str, list[str]] = {}
    for placement, name in pairs:
        found.setdefault(placement, []).append(name)
    yield from found.items()


def _shared_prefix(names: Iterable[str]) -> str:
    """The longest common prefix of dotted names, up to a dot."""
    shared = ""
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared += f"{parts[0]}."
    return shared


# Graphs without stages

GraphPoint = Point[GraphLayout]


class GraphSubject:
    """A graph on a cluster; implements `Subject`."""

    def __init__(self, source: GraphSource) -> None:
        self.source, self._request = source, source.request

    @property
    def priced_as(self) -> Sequence[str]:
        return self._request.cluster.priced_as

    def heading(self) -> Iterator[Line]:
        graph, cluster = self._request.graph, self._request.cluster
        yield (("", ""),)
        yield ((f" {GRAPH_PREFIX}{graph.name}", "title"), (" on ", "dim"), (cluster.name, "title"))
        for line in words.wrapped(self._facts(), " · ", columns() - 1):
            yield ((f" {line}", "dim"),)
        yield (("─" * columns(), "dim"),)

    def _facts(self) -> tuple[str, ...]:
        graph, training = self._request.graph, self._request.training
        tokens = f" × {graph.seq_len:,}" if graph.seq_len else ""
        return (
            f"{format_count(parameter_count(graph))} parameters",
            f"{graph.operators:,} operators",
            words.counted(self._request.cluster.devices, "device"),
            f"batch {graph.batch:,}{tokens}",
            training.dtype,
            training.optimizer,
        )

    def caption(self) -> tuple[str, Sequence[str]]:
        return f"{GRAPH_PREFIX}{self._request.graph.name} on {self._request.cluster.name}", self._facts()[3:]

    def question(self) -> Mapping[str, object]:
        graph, cluster, training = self._request.graph, self._request.cluster, self._request.training
        return {
            "graph": {
                "name": graph.name,
                "parameters": parameter_count(graph),
                "batch": graph.batch,
                "seq_len": graph.seq_len,
            },
            "cluster": {
                "name": cluster.name,
                "devices": cluster.devices,
                "nodes": len(cluster.nodes),
                "classes": list(cluster.classes),
                "assumptions": list(cluster.assumptions),
            },
            "job": {
                "dtype": training.dtype,
                "optimizer": training.optimizer,
                "memory_margin": self._request.memory_margin,
                "profile": training.profile.name,
            },
            "priced_as": list(cluster.priced_as),
        }

    def title(self, point: GraphPoint) -> str:
        recomputed = sum(block.mode == "recomputed" for block in point.layout.blocks)
        described = (
            f"{recomputed} of {len(point.layout.blocks)} recomputed" if recomputed else "no recomputation"
        )
        return described if self.source.curves.meshes.text == "tiers" else f"{mesh_name(point)}, {described}"

    def details(self, point: GraphPoint) -> Sequence[str]:
        is_in_title = self.source.curves.meshes.text != "tiers"
        return self.blocks(point) if is_in_title else [f"mesh {mesh_name(point)}", *self.blocks(point)]

    def blocks(self, point: GraphPoint) -> Sequence[str]:
        """The main sharding of each block; runs of equal blocks share a text."""
        described = [f"{block.name}: {_block_text(block)}" for block in point.layout.blocks]
        runs = [(text, len(list(same))) for text, same in groupby(described)]
        return [f"{many} x {text}" if many > 1 else text for text, many in runs]

    def layout_lines(self, point: GraphPoint) -> Sequence[str]:
        return full_layout_lines(point.layout)

    def difference(self, point: GraphPoint, other: GraphPoint) -> str:
        if point.layout.ranks != other.layout.ranks:
            return f"mesh {mesh_name(point)}"
        pairs = list(zip(point.layout.blocks, other.layout.blocks, strict=True))
        rules = sum(a.rules != b.rules for a, b in pairs)
        stored = sum(a.stored != b.stored for a, b in pairs)
        described = ((rules, "sharding"), (stored, "storage"))
        return (
            ", ".join(f"{what} of {words.counted(many, 'block')} differs" for many, what in described if many)
            or "as chosen"
        )

    def sizes(self) -> Mapping[str, object]:
        counts = self.source.curves.layouts_per_operator(self.source.curves.largest)
        return {"operators": self._request.graph.operators, "layouts_per_operator": counts}

    def certificate(self, curves: Sequence[Curve[GraphLayout]]) -> Mapping[str, object]:
        own = [_graph_curve(curve) for curve in curves]
        efforts = [effort for curve in own for effort in curve.efforts]
        return {
            "space": "layouts",
            "meshes": _mesh_record(own),
            "epsilon": None if self.priced_as else max(curve.epsilon for curve in own),
            "choices": sum(effort.choices for effort in efforts),
            "weighted_sums": sum(effort.weights for effort in efforts),
            "labels": sum(effort.labels for effort in efforts),
            "search_s": sum(curve.search_s for curve in own),
            "search_cpu_s": sum(curve.search_cpu_s for curve in own),
        }

    mesh_text = ""

    def _meshes(self, curves: Sequence[GraphCurve]) -> Iterator[Line]:
        """The meshes that were searched, and the option for others."""
        choice = self.source.curves.meshes.text
        what = {"tiers": "the mesh of the tiers", "all": "all meshes"}.get(choice, "these meshes only")
        described = list(dict.fromkeys(", ".join(mesh.name for mesh in curve.meshes) for curve in curves))
        described = [f"on {what}{self.mesh_text}: {described[0]}", *described[1:]]
        yield from words.wrapped_rows("", described, separator="; ")
        if choice == "tiers":
            yield row("", ("--meshes all searches the others too and takes longer", "dim"))

    def _layouts(self, curve: GraphCurve) -> Iterator[Line]:
        """Numbers of layouts of the operators on one device count. Grouped by kind of operator, since a graph
        may have hundreds: `matmul 96 x 25` is 96 operators with 25 layouts each."""
        of_kind: dict[str, Counter[int]] = {}
        for block in self._request.graph.blocks:
            for node in block.operators:
                counts = of_kind.setdefault(node.kind, Counter())
                counts[curve.layouts_per_operator[node.name]] += block.repeat
        described = [
            f"{kind} " + ", ".join(f"{counts[many]} x {many:,}" for many in sorted(counts, reverse=True))
            for kind, counts in of_kind.items()
        ]
        described[0] = f"on {words.counted(curve.devices, 'device')}: {described[0]}"
        yield from words.wrapped_rows("layouts", described)

    def proof(self, curves: Sequence[Curve[GraphLayout]]) -> Iterator[Line]:
        own = [_graph_curve(curve) for curve in curves]
        worst = max(curve.epsilon for curve in own)
        yield ()
        described = "exact" if worst == 0.0 else f"within {words.percent(worst, 2)}"
        verdict = (f"not proven: {NOT_AS_GIVEN};", "warn") if self.priced_as else (described, "good")
        yield row("proof", verdict, (" among all layouts (layouts per operator below)", ""))
        yield from priced_as_lines(self.priced_as)
        yield from self._layouts(own[-1])
        yield from self._meshes(own)
        spent_s, cpu_s = sum(curve.search_s for curve in own), sum(curve.search_cpu_s for curve in own)
        yield row("", (f"found in {format_seconds(spent_s)} ({format_seconds(cpu_s)} of CPU)", ""))
        yield from words.wrapped_rows("", self._request.cluster.assumptions, "dim")


def _mesh_record(curves: Sequence[GraphCurve]) -> dict[str, list[list[int]]]:
    """The distinct meshes of each device count."""
    found: dict[str, list[list[int]]] = {}
    for curve in curves:
        known = found.setdefault(str(curve.devices), [])
        known += [list(mesh.ranks) for mesh in curve.meshes if list(mesh.ranks) not in known]
    return found


def mesh_name(point: GraphPoint) -> str:
    return "x".join(map(str, point.layout.ranks))


def _block_text(block: BlockLayout) -> str:
    """The most frequent sharding of the operators of a block, per mesh axis."""
    rules = Counter(tuple(rule.name for rule in rules) for rules in block.rules.values())
    (most, _), *_ = rules.most_common(1)
    prefix = "" if block.mode == "kept" else "recomputed, "
    return f"{prefix}{along_axes(most)}"


def _graph_curve(curve: Curve[GraphLayout]) -> GraphCurve:
    if not isinstance(curve, GraphCurve):
        raise InternalError("the curve of a graph has no layouts")
    return curve


# Graphs in pipeline stages


def graph_subject(source: GraphSource) -> GraphSubject:
    """The subject of a graph, in pipeline stages where it has any."""
    return StagedSubject(source) if isinstance(source.curves, StagedCurves) else GraphSubject(source)


class StagedSubject(GraphSubject):
    """A graph in pipeline stages on a cluster; implements `Subject`."""

    mesh_text = " of each stage"

    @property
    def _staged(self) -> StagedCurves:
        curves = self.source.curves
        if not isinstance(curves, StagedCurves):
            raise InternalError("a graph in stages whose curves have none")
        return curves

    def title(self, point: GraphPoint) -> str:
        layout = point.layout
        if not isinstance(layout, StagedLayout):  # a reference layout
            return "no stages"
        counts = "+".join(str(len(stage.blocks)) for stage in layout.stages)
        recomputed = sum(block.mode == "recomputed" for block in layout.blocks)
        return words.shortened(f"{counts}, {recomputed} recomputed" if recomputed else f"{counts} blocks", 25)

    def details(self, point: GraphPoint) -> Sequence[str]:
        layout = point.layout
        if not isinstance(layout, StagedLayout):
            return [f"mesh {mesh_name(point)}", *self.blocks(point)]
        recomputed = sum(block.mode == "recomputed" for block in layout.blocks)
        return [
            f"{layout.microbatches:,} micro-batches by {layout.schedule}",
            f"{recomputed} of {len(layout.blocks)} blocks recomputed",
            f"mesh {mesh_name(point)} for each stage",
            *self.blocks(point),
        ]

    def difference(self, point: GraphPoint, other: GraphPoint) -> str:
        first, second = _staged(point), _staged(other)
        cut = [] if first.cuts == second.cuts else ["different cuts"]
        return ", ".join([*cut, super().difference(point, other)])

    def certificate(self, curves: Sequence[Curve[GraphLayout]]) -> Mapping[str, object]:
        own = [_staged_curve(curve) for curve in curves]
        return {
            **super().certificate(curves),
            "space": "stages",
            "stages": self._staged.stages,
            "microbatches": list(self._staged.microbatches),
            "partitions": sum(curve.partitions for curve in own),
            "evaluated": sum(curve.evaluated for curve in own),
        }

    def proof(self, curves: Sequence[Curve[GraphLayout]]) -> Iterator[Line]:
        yield from super().proof(curves)
        own = [_staged_curve(curve) for curve in curves]
        partition_count, tried = sum(curve.partitions for curve in own), sum(curve.evaluated for curve in own)
        many = ", ".join(map(str, self._staged.microbatches))
        yield row(
            "stages",
            (f"{partition_count:,} partitions", "value"),
            (f", {tried:,} evaluated, the others pruned by bounds", ""),
        )
        yield row("", (f"micro-batches: {many} (--microbatches)", "dim"))
        if refusal := self._refusal():
            described = f"shardwise train does not run them: it {refusal}".split()
            yield from words.wrapped_rows("", described, "dim", separator=" ")

    def _refusal(self) -> str | None:
        """Why our own runtime cannot split the graph into micro-batches; None where it can."""
        try:
            for many in self._staged.microbatches:
                loss_weight(self._request.graph, many)
        except ConfigError as error:
            return error.message
        return None


def _staged(point: GraphPoint) -> StagedLayout:
    if not isinstance(point.layout, StagedLayout):
        raise InternalError("a point of a staged graph has a layout without stages")
    return point.layout


def _staged_curve(curve: Curve[GraphLayout]) -> StagedCurve:
    if not isinstance(curve, StagedCurve):
        raise InternalError("the curve of a staged graph has no stages")
    return curve
