"""The subject of a frontier: its source, and its layouts as text and JSON.

`StrategySubject` is a transformer, whose layouts are the strategies of `plan`; graphs are in `graphs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from shardwise.app.cli import card, documents, words
from shardwise.app.cli.card import NOT_AS_GIVEN, packing_facts, priced_as_lines
from shardwise.app.cli.output import Line, row
from shardwise.errors import InternalError
from shardwise.questions import FrontierSource, StrategySource
from shardwise.search import Curve, Point, StrategyCurve
from shardwise.strategy import ANY, Strategy
from shardwise.units import format_seconds

LayoutT = TypeVar("LayoutT")


class Subject(Protocol[LayoutT]):
    """A transformer on a cluster, with strategies; or a graph, with a layout per operator."""

    @property
    def source(self) -> FrontierSource[LayoutT]:
        """The source of the curves and of plans."""
        ...

    @property
    def priced_as(self) -> Sequence[str]:
        """Approximations of the cluster in the cost model."""
        ...

    def heading(self) -> Iterator[Line]:
        """The question as the head of a card."""
        ...

    def caption(self) -> tuple[str, Sequence[str]]:
        """The question as the title of a plot, and facts about the job."""
        ...

    def question(self) -> Mapping[str, object]:
        """The question as keys of the JSON answer."""
        ...

    def title(self, point: Point[LayoutT]) -> str:
        """A layout in at most 25 columns."""
        ...

    def details(self, point: Point[LayoutT]) -> Sequence[str]:
        """The other choices of a layout, a few words each."""
        ...

    def layout_lines(self, point: Point[LayoutT]) -> Sequence[str]:
        """A layout operator by operator, a line each; empty where `details` are complete."""
        ...

    def difference(self, point: Point[LayoutT], other: Point[LayoutT]) -> str:
        """The choices in which `point` differs from `other`, except those in its title."""
        ...

    def sizes(self) -> Mapping[str, object]:
        """The keys `operators` and `layouts_per_operator`, null where there are none."""
        ...

    def certificate(self, curves: Sequence[Curve[LayoutT]]) -> Mapping[str, object]:
        """The certificate: outcomes of all candidates of these curves together."""
        ...

    def proof(self, curves: Sequence[Curve[LayoutT]]) -> Iterator[Line]:
        """The certificate and the assumptions as lines of a card."""
        ...


class StrategySubject:
    """A model on a cluster; implements `Subject`."""

    def __init__(self, source: StrategySource) -> None:
        self.source = source
        self._request, self._question = source.request, source.question

    @property
    def priced_as(self) -> Sequence[str]:
        return self._request.cluster.priced_as

    def heading(self) -> Iterator[Line]:
        yield from card.question_lines(self._request.model, self._request.cluster, self._request.job)
        yield row("target", (self._target, "value"))
        if options := self._request.job.profile.options:
            named = " · ".join(f"{name} {value}" for name, value in options.items())
            yield row("options", (named, "value"))

    @property
    def _target(self) -> str:
        return ANY if self.source.target is None else self.source.target.name

    def caption(self) -> tuple[str, Sequence[str]]:
        job = self._request.job
        tokens = f"{job.global_batch_size:,} × {job.seq_len:,} tokens a step"
        facts = (tokens, *packing_facts(job), job.dtype, job.optimizer)
        return f"{self._request.model.name} on {self._request.cluster.name}", facts

    def question(self) -> Mapping[str, object]:
        job = self._request.job
        return {
            **documents.question_document(self._request.model, self._request.cluster, job),
            "target": self._target,
        }

    def title(self, point: Point[Strategy]) -> str:
        return words.degrees_text(point.layout).replace(" · ", " ")

    def details(self, point: Point[Strategy]) -> Sequence[str]:
        return words.detail_texts(point.layout, self._request.job, self._request.model.layers)

    def layout_lines(self, point: Point[Strategy]) -> Sequence[str]:
        return ()

    def difference(self, point: Point[Strategy], other: Point[Strategy]) -> str:
        return words.short_difference_text(point.layout, other.layout, self._request.model.layers)

    def sizes(self) -> Mapping[str, object]:
        return {"operators": None, "layouts_per_operator": None}

    def certificate(self, curves: Sequence[Curve[Strategy]]) -> Mapping[str, object]:
        question = self._question
        own = [_strategy_curve(curve) for curve in curves]
        rejected: Counter[str] = Counter()
        for curve in own:
            rejected.update(curve.outcome.ledger.rejected)
        return {
            "space": question.space,
            "fixed": dict(question.fixed),
            "axes": {name: list(values) for name, values in question.axes.items()},
            "enumerated": sum(curve.outcome.enumerated for curve in own),
            "unexplored": sum(curve.outcome.unexplored for curve in own),
            "rejected": dict(rejected),
            "cut_by_bound": sum(curve.outcome.ledger.pruned for curve in own),
            "simulated": sum(curve.outcome.ledger.simulated for curve in own),
            "search_s": sum(curve.search_s for curve in own),
            "search_cpu_s": sum(curve.search_cpu_s for curve in own),
        }

    def proof(self, curves: Sequence[Curve[Strategy]]) -> Iterator[Line]:
        own = [_strategy_curve(curve) for curve in curves]
        total = sum(curve.outcome.enumerated for curve in own)
        rejected = sum(sum(curve.outcome.ledger.rejected.values()) for curve in own)
        pruned = sum(curve.outcome.ledger.pruned for curve in own)
        simulated = sum(curve.outcome.ledger.simulated for curve in own)
        yield ()
        yield row(
            "proof",
            (f"not proven: {NOT_AS_GIVEN};", "warn") if self.priced_as else ("exact", "good"),
            (f" among {total:,} candidates of the space '{self._question.space}'", ""),
        )
        yield from priced_as_lines(self.priced_as)
        counts = (f"{rejected:,} rejected", f"{pruned:,} pruned as dominated", f"{simulated:,} evaluated")
        yield from words.wrapped_rows("", counts)
        if not self._request.cluster.is_uniform:
            yield row("", ("each strategy at the speed of its slowest device", ""))
        spent_s, cpu_s = sum(curve.search_s for curve in own), sum(curve.search_cpu_s for curve in own)
        yield row("", (f"found in {format_seconds(spent_s)} ({format_seconds(cpu_s)} of CPU)", ""))
        yield from card.assumption_lines(
            self._request.cluster, self._request.job, self.source.curves.evaluator, self._question.space
        )


def _strategy_curve(curve: Curve[Strategy]) -> StrategyCurve:
    if not isinstance(curve, StrategyCurve):
        raise InternalError("the curve of a transformer has no strategies")
    return curve
