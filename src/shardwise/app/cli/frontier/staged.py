"""The frontier of an operator graph that is cut into stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwise.app.cli import words
from shardwise.app.cli.frontier.graphs import GraphPoint, GraphRequest, GraphSubject, mesh_name
from shardwise.app.cli.output import LABEL, WIDTH, Line, row
from shardwise.app.cli.request import count
from shardwise.errors import ConfigError, InternalError
from shardwise.graph import GraphLayout, StagedLayout, loss_weight, staged_record
from shardwise.inputs import short_repr
from shardwise.search import Curve, StagedCurve, StagedCurves


def microbatches_of(text: str | None) -> tuple[int, ...] | None:
    """Numbers of micro-batches in ascending order; None where none are given."""
    if text is None:
        return None
    counts = [count("--microbatches", part) for part in text.split(",")]
    if len(set(counts)) < len(counts):
        raise ConfigError("names a number twice", key="--microbatches", found=short_repr(text))
    return tuple(sorted(counts))


def graph_subject(
    request: GraphRequest, stages: str | None, microbatches: str | None, *, uses_all: bool
) -> GraphSubject:
    """A graph as a whole, or in as many stages as an option says."""
    stage_count = 1 if stages is None else count("--stages", stages)
    counts = microbatches_of(microbatches)
    if stage_count > 1:
        return StagedSubject(request, stage_count, counts, uses_all=uses_all)
    if microbatches is not None:
        raise ConfigError(
            "are of a graph in stages", key="--microbatches", found=short_repr(microbatches),
            allowed="--stages 2 or more",
        )  # fmt: skip
    return GraphSubject(request, uses_all=uses_all)


class StagedSubject(GraphSubject):
    """A graph in stages on a cluster; implements `Subject`."""

    mesh_text = " of each stage"

    def __init__(
        self,
        request: GraphRequest,
        stages: int,
        microbatches: Sequence[int] | None,
        *,
        uses_all: bool = False,
    ) -> None:
        self._staged = StagedCurves(
            request.graph,
            request.cluster,
            request.training,
            request.memory_margin,
            stages,
            microbatches,
            request.meshes,
            uses_all=uses_all,
        )
        super().__init__(request, self._staged)

    def title(self, point: GraphPoint) -> str:
        layout = point.layout
        if not isinstance(layout, StagedLayout):  # what is customary
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
        cut = [] if first.cuts == second.cuts else ["cut otherwise"]
        return ", ".join([*cut, super().difference(point, other)])

    def layout(self, point: GraphPoint) -> Mapping[str, object]:
        if not isinstance(point.layout, StagedLayout):
            return super().layout(point)
        return {"mesh": list(point.layout.ranks), **staged_record(point.layout)}

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
            (f"{partition_count:,} ways to cut", "value"),
            (f", {tried:,} evaluated, the rest bounded", ""),
        )
        yield row("", (f"micro-batches: {many} (--microbatches)", "dim"))
        if refusal := self._refusal():
            described = f"train does not run them: it {refusal}".split()
            for line in words.wrapped(described, " ", WIDTH - LABEL):
                yield row("", (line, "dim"))

    def _refusal(self) -> str | None:
        """Why our own runtime does not compute the graph by micro-batches, where it does not."""
        try:
            for many in self._staged.microbatches:
                loss_weight(self._request.graph, many)
        except ConfigError as error:
            return error.message
        return None


def _staged(point: GraphPoint) -> StagedLayout:
    if not isinstance(point.layout, StagedLayout):
        raise InternalError("a point of stages has a layout without")
    return point.layout


def _staged_curve(curve: Curve[GraphLayout]) -> StagedCurve:
    if not isinstance(curve, StagedCurve):
        raise InternalError("the curve of stages is of a graph")
    return curve
