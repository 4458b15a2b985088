"""Solutions of chains of factor graphs, by the names of their choices."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cost.layouts.block import Variable
from shardwise.cost.layouts.chain import LayoutSpace
from shardwise.graph import Placement, placement_text
from shardwise.search.pareto.solution import SegmentChoice, Solution

Names = Mapping[str, str]
"""Names of rules by operator, and of placements by parameter, one per mesh axis, joined by slashes; for a
shared tensor its placements, after the word `tensor`.
"""


def solution_of(laid: LayoutSpace, names: Names, mode: str = "kept") -> Solution:
    """The solution with these names; segments without such a mode keep their mode."""
    chosen = []
    for place, link in enumerate(laid.chain):
        modes = [each for each, _ in link.modes]
        choices = tuple(
            [option_text(option) for option in variable.options].index(names[named(variable)])
            for variable in laid.variables[place]
        )
        chosen += [SegmentChoice(modes.index(mode) if mode in modes else 0, choices)] * link.repeat
    return tuple(chosen)


def named(variable: Variable) -> str:
    """The name of a variable in these texts."""
    return f"tensor {variable.name}" if variable.role == "tensors" else variable.name


def option_text(option: tuple[object, ...]) -> str:
    """`split b/replicate`, `S(0)/R`."""
    return "/".join(
        placement_text(Placement(each)) if isinstance(each, int) else str(getattr(each, "name", each))
        for each in option
    )
