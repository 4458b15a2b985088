"""How a tensor lies along one axis of a device mesh, forward and backward together.

A placement says two things at once: what each of the n ranks along the axis holds of the tensor, and what it
holds of the tensor's gradient. Four are enough, because the backward pass of every operator is linear in the
gradient:

| placement | tensor | gradient |
|---|---|---|
| `shard(i)` | split along its dim i | split along dim i |
| `WHOLE` | whole on every rank | whole on every rank |
| `WHOLE_SUMMED` | whole on every rank | a partial sum on every rank |
| `PARTIAL` | a partial sum on every rank | whole on every rank |

(DTensor's Shard, Replicate and Partial, with the gradient's placement made explicit.)
"""

from __future__ import annotations

from typing import NewType

Placement = NewType("Placement", int)
"""`shard(i)` is i; the others are negative, so that placements sort and index columns."""

WHOLE = Placement(-1)
WHOLE_SUMMED = Placement(-2)
PARTIAL = Placement(-3)

STATES_SPLIT = Placement(-4)
"""How a parameter alone may be stored: whole, with its optimizer states split."""


def shard(dim: int) -> Placement:
    """Split along dim `dim` of the tensor, 0 the outermost."""
    return Placement(dim)


def placements_of(dims: int) -> tuple[Placement, ...]:
    """All placements of a tensor of so many dims along one mesh axis."""
    return (*(shard(dim) for dim in range(dims)), WHOLE, WHOLE_SUMMED, PARTIAL)


def placement_text(placement: Placement) -> str:
    """`S(1)`, `R`, `R+` (gradient summed), `P`, or `R°` (states split)."""
    return {WHOLE: "R", WHOLE_SUMMED: "R+", PARTIAL: "P", STATES_SPLIT: "R°"}.get(
        placement, f"S({placement})"
    )
