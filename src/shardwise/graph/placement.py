"""How a tensor lies along one axis of a device mesh, forward and backward together.

A placement says two things at once: what each of the n ranks along the axis holds of the tensor, and what it
holds of the tensor's gradient. Four are enough, because the backward pass of every operator is linear in the
gradient:

| placement | tensor | gradient |
|---|---|---|
| `shard(i)` | split along its dim i | split along dim i |
| `REPLICATE` | whole on every rank | whole on every rank |
| `REPLICATE_SUM_GRAD` | whole on every rank | a partial sum on every rank |
| `PARTIAL` | a partial sum on every rank | whole on every rank |

(DTensor's Shard, Replicate and Partial, with the gradient's placement made explicit.)
"""

from __future__ import annotations

from typing import NewType

Placement = NewType("Placement", int)
"""`shard(i)` is i; the others are negative, so that placements sort and index columns."""

REPLICATE = Placement(-1)
REPLICATE_SUM_GRAD = Placement(-2)
PARTIAL = Placement(-3)

REPLICATE_SHARD_STATES = Placement(-4)
"""How a parameter alone may be stored: whole, with its optimizer states split."""


def shard(dim: int) -> Placement:
    """Split along dim `dim` of the tensor, 0 the outermost."""
    return Placement(dim)


def placements_of(dims: int) -> tuple[Placement, ...]:
    """All placements of a tensor of so many dims along one mesh axis."""
    return (*(shard(dim) for dim in range(dims)), REPLICATE, REPLICATE_SUM_GRAD, PARTIAL)


def placement_text(placement: Placement) -> str:
    """`S(1)`, `R`, `R+` (gradient summed), `P`, or `R°` (states split)."""
    return {REPLICATE: "R", REPLICATE_SUM_GRAD: "R+", PARTIAL: "P", REPLICATE_SHARD_STATES: "R°"}.get(
        placement, f"S({placement})"
    )
