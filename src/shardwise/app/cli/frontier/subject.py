"""What a frontier is about: where its curves come from, and how its layouts are told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from shardwise.app.cli.output import Line
from shardwise.plan import GraphPlan, Plan
from shardwise.search import Curve, CurveSource, Point

LayoutT = TypeVar("LayoutT")


class Subject(Protocol[LayoutT]):
    """A transformer on a cluster, with strategies; or a graph, with a layout for each operator."""

    @property
    def curves(self) -> CurveSource[LayoutT]:
        """Where the curves come from."""
        ...

    @property
    def priced_as(self) -> Sequence[str]:
        """What the cluster is priced as where that is not what was given."""
        ...

    def heading(self) -> Iterator[Line]:
        """What was asked, as the head of a card."""
        ...

    def caption(self) -> tuple[str, Sequence[str]]:
        """The same as the title of a plot, and a few words each about the job."""
        ...

    def question(self) -> Mapping[str, object]:
        """The same as keys of the answer."""
        ...

    def title(self, point: Point[LayoutT]) -> str:
        """A layout in at most 25 columns."""
        ...

    def details(self, point: Point[LayoutT]) -> Sequence[str]:
        """All else about a layout, a few words each."""
        ...

    def layout_lines(self, point: Point[LayoutT]) -> Sequence[str]:
        """A layout operator by operator, a line each; nothing where `details` say it all."""
        ...

    def difference(self, point: Point[LayoutT], other: Point[LayoutT]) -> str:
        """What `point` chooses otherwise than `other`, beside its title."""
        ...

    def layout(self, point: Point[LayoutT]) -> Mapping[str, object]:
        """The key `layout` of a point."""
        ...

    def sizes(self) -> Mapping[str, object]:
        """The keys `operators` and `layouts_per_operator`, null where there are none."""
        ...

    def certificate(self, curves: Sequence[Curve[LayoutT]]) -> Mapping[str, object]:
        """What became of all candidates of these curves together."""
        ...

    def proof(self, curves: Sequence[Curve[LayoutT]]) -> Iterator[Line]:
        """The same for people, and what it rests on."""
        ...

    def plan(self, curve: Curve[LayoutT], place: int) -> Plan | GraphPlan:
        """The plan of a point. ConfigError where no plan file holds it."""
        ...
