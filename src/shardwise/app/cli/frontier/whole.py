"""A layout of a graph operator by operator, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from shardwise.graph import BlockLayout, GraphLayout, placement_text


def full_layout_lines(layout: GraphLayout) -> tuple[str, ...]:
    """For each run of like blocks a line with its name, then one for each way to lay operators (the rule
    along each axis of the mesh, the outermost first) or to store parameters, with the names of those."""
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
    """A word for each axis, the outermost first; one where they are alike."""
    found = list(words)
    return found[0] if len(set(found)) == 1 else " | ".join(found)


def _names_by_placement(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """The names of each way, in the order in which ways first come."""
    found: dict[str, list[str]] = {}
    for placement, name in pairs:
        found.setdefault(placement, []).append(name)
    yield from found.items()


def _shared_prefix(names: Iterable[str]) -> str:
    """What all dotted names begin with, up to a dot."""
    shared = ""
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared += f"{parts[0]}."
    return shared
