"""Windows over the last dims of a tensor, whose rows at the edges of a part are the neighbours'."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.graph.dividing import split_rule
from shardwise.graph.kinds.kind import Attribute, without
from shardwise.graph.record import OpNode
from shardwise.graph.rule import CollectiveCall, ShardingRule

PADDING = Attribute(name="padding", type="integer", meaning="rows of padding on either side; default 0")


def halo_rows(rows: int, windows: int, *, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """The most rows that a rank needs of a neighbour, where `rows` and `windows` are both split evenly.

    Windows begin at row `stride` w - `padding` and are `dilation` (`kernel` - 1) + 1 long. The part of a rank
    begins at rows * f and its windows at windows * f for a share f of the ranks before it, so that it needs
    stride * windows * f - padding >= rows * f - halo, and likewise at its end.
    """
    shift = rows - stride * windows
    before = padding + max(shift, 0)
    after = dilation * (kernel - 1) + 1 - stride - padding + max(-shift, 0)
    return max(before, after, 0) if windows > 1 else 0


def spatial_rules(op: OpNode, spatial: int, halos: Sequence[int]) -> tuple[ShardingRule, ...]:
    """Each of the last `spatial` dims, with its rows of neighbours forward and their gradients backward."""
    before, after = op.inputs[0].dims, op.output
    rules = []
    for read, made, halo in zip(before[-spatial:], after[-spatial:], halos, strict=True):
        call = CollectiveCall(collective="neighbours", dims=without(before, (read,)), copies=halo)
        rules.append(split_rule(op, made, also=(read,), collectives=(call,) if halo else ()))
    return tuple(rules)
