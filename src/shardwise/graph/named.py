"""One layout of a graph, told: what every operator, tensor and parameter of it does on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.graph.placement import Placement
from shardwise.graph.rule import ShardingRule

Mode = Literal["kept", "recomputed"]
"""What the backward pass needs of a block is kept from the forward pass, or made again from what it reads."""

MODES: tuple[Mode, ...] = ("kept", "recomputed")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """One repetition of a block.

    `rules` of each operator, one per mesh axis, the outermost first. `tensors` are the placements of those
    that several operators read, of the entry and of the result, by the name of their maker (or entry).
    `stored` are the placements in which parameters of the block wait, `used` those to which a parameter with
    several readers is brought for all of them; of a parameter with readers in several blocks both are told
    in each.
    """

    name: str
    mode: Mode
    rules: Mapping[str, tuple[ShardingRule, ...]]
    tensors: Mapping[str, tuple[Placement, ...]]
    stored: Mapping[str, tuple[Placement, ...]]
    used: Mapping[str, tuple[Placement, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLayout:
    """A layout of all blocks, repetitions one by one, on a mesh of `ranks` per axis, the outermost first."""

    ranks: tuple[int, ...]
    blocks: tuple[BlockLayout, ...]
