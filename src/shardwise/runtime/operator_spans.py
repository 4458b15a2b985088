"""Passes of operators and of blocks as spans, from the events of a profile.

Forward passes have marks. Backward ones have none: autograd numbers the nodes of its graph as they are made,
and computes those of a pass from the last to the first, on the thread that asked. The nodes of an operator
are those from the first one that was made in its mark to before the first one of the next operator.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.runtime.marks import BLOCK, OPERATOR
from shardwise.runtime.profiled import ProfiledEvent
from shardwise.sim import BLOCKS, OPERATORS, Span

_PASS = re.compile(r"PP:\d+([FB])(\d+)")


def operator_spans(rank: int, events: Sequence[ProfiledEvent]) -> list[Span]:
    """The passes of operators and blocks in a step of one stage of a graph, by their names behind those of
    the pass: `F0` forward of the first micro-batch, `B0` backward, and `R0` forward once more on the way
    back. Of what has no gradient there is no backward pass. Nothing where nothing is marked.
    """
    passes = [_Pass(match[1], match[2], event) for event in events if (match := _PASS.fullmatch(event.name))]
    passes.sort(key=lambda each: each.event.start_s)
    made = sorted(
        (event.start_s, event.node) for event in events if event.node >= 0 and not event.is_backward
    )
    for mark in _marks(events, OPERATOR):
        if (own := _containing(passes, mark)) is not None:
            own.operators.append(_Operator(mark, _first_node(mark, made)))
    for mark in _marks(events, BLOCK):
        if (own := _containing(passes, mark)) is not None:
            own.blocks.append(mark)
    forward = {each.number: each for each in passes if each.kind == "F"}
    computed = sorted(
        (event for event in events if event.node >= 0 and event.is_backward), key=lambda event: event.start_s
    )
    spans: list[Span] = []
    for each in passes:
        spans += each.forward(rank)
        if each.kind == "B" and each.number in forward:
            own_nodes = _within(computed, each.event)
            spans += _backward(rank, each.number, forward[each.number], own_nodes)
    return spans


@dataclass(frozen=True, slots=True)
class _Operator:
    """A forward pass of an operator, and the first node that it may have made for the backward pass."""

    mark: ProfiledEvent
    node: int | None

    @property
    def name(self) -> str:
        return self.mark.name.removeprefix(OPERATOR)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass F or B of a micro-batch, and what is marked in it: in a pass B that is computed again."""

    kind: str
    number: str
    event: ProfiledEvent
    operators: list[_Operator] = field(default_factory=list)
    blocks: list[ProfiledEvent] = field(default_factory=list)

    def forward(self, rank: int) -> Iterator[Span]:
        """The marks themselves."""
        word = "F" if self.kind == "F" else "R"
        for each in self.operators:
            name = f"{word}{self.number} {each.name}"
            yield Span(rank, OPERATORS, name, each.mark.start_s, each.mark.finish_s)
        if self.kind == "F":
            for block in self.blocks:
                name = f"F{self.number} {block.name.removeprefix(BLOCK)}"
                yield Span(rank, BLOCKS, name, block.start_s, block.finish_s)

    def block_of(self, operator: _Operator) -> str:
        """The name of the block whose mark an operator's lies in."""
        starts = [block.start_s for block in self.blocks]
        return self.blocks[bisect_right(starts, operator.mark.start_s) - 1].name.removeprefix(BLOCK)


def _marks(events: Iterable[ProfiledEvent], kind: str) -> list[ProfiledEvent]:
    return sorted((event for event in events if event.name.startswith(kind)), key=lambda each: each.start_s)


def _containing(passes: Sequence[_Pass], mark: ProfiledEvent) -> _Pass | None:
    """The pass in which `mark` lies; passes of a rank come one after the other."""
    place = bisect_right([each.event.start_s for each in passes], mark.start_s) - 1
    return passes[place] if place >= 0 and mark.finish_s <= passes[place].event.finish_s else None


def _first_node(mark: ProfiledEvent, made: Sequence[tuple[float, int]]) -> int | None:
    """The number that the next node had when the first thing happened inside `mark`."""
    place = bisect_left(made, (mark.start_s, -1))
    return made[place][1] if place < len(made) and made[place][0] <= mark.finish_s else None


def _within(events: Sequence[ProfiledEvent], whole: ProfiledEvent) -> Iterator[ProfiledEvent]:
    """Those of `events`, in order of time, that lie in `whole` and in none before them."""
    until_s = whole.start_s
    for event in events[bisect_left([event.start_s for event in events], whole.start_s) :]:
        if event.start_s > whole.finish_s:
            return
        if event.start_s >= until_s:
            yield event
            until_s = event.finish_s


def _backward(rank: int, number: str, forward: _Pass, nodes: Iterable[ProfiledEvent]) -> Iterator[Span]:
    """The backward passes of the operators of `forward`, in the order in which `nodes` were computed, each up
    to the next one, and of their blocks."""
    known = [each for each in forward.operators if each.node is not None]
    first_nodes = [each.node or 0 for each in known]
    runs: list[tuple[_Operator, float, float]] = []
    for event in nodes:
        place = bisect_right(first_nodes, event.node) - 1
        if place < 0:
            continue
        if runs and runs[-1][0] is known[place]:
            runs[-1] = (*runs[-1][:2], event.finish_s)
        else:
            if runs:
                runs[-1] = (*runs[-1][:2], event.start_s)
            runs.append((known[place], event.start_s, event.finish_s))
    for operator, start_s, finish_s in runs:
        yield Span(rank, OPERATORS, f"B{number} {operator.name}", start_s, finish_s)
    hulls: list[Span] = []
    for operator, start_s, finish_s in runs:
        name = f"B{number} {forward.block_of(operator)}"
        if hulls and hulls[-1].name == name:
            start_s = hulls.pop().start_s
        hulls.append(Span(rank, BLOCKS, name, start_s, finish_s))
    yield from hulls
