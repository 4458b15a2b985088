"""A trace as epochs: stretches of time in which nothing changes."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster import Conditions, EventTrace, NodeView
from shardwise.replan.situation import Situation, situation_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """From `start_s` to `end_s` the situation holds. `lost` are nodes that went at its start, `saved` those
    of them that had notice."""

    start_s: float
    end_s: float
    situation: Situation
    lost: frozenset[str]
    saved: frozenset[str]

    @property
    def returned(self) -> frozenset[str]:
        """Nodes that went at its start and are there again."""
        return self.lost & frozenset(self.situation.states)

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def epochs_of(trace: EventTrace, view: NodeView, end_s: float) -> list[Epoch]:
    """All epochs up to `end_s`; events of one instant make one change, and those that change nothing make
    none."""
    conditions = Conditions.at_start(trace)
    situation = situation_of(view, conditions, trace.sites)
    found: list[Epoch] = []
    start_s, lost, saved = 0.0, frozenset[str](), frozenset[str]()
    place = 0
    while place < len(trace.events):
        now = trace.events[place].time_s
        if now >= end_s:
            break
        gone, noticed = frozenset[str](), frozenset[str]()
        while place < len(trace.events) and trace.events[place].time_s == now:
            before, conditions = conditions, conditions.after(trace.events[place])
            gone |= before.present - conditions.present
            noticed |= (before.present - conditions.present) & before.noticed
            place += 1
        after = situation_of(view, conditions, trace.sites)
        if after.key == situation.key and not gone:
            continue
        if now > start_s:
            found.append(Epoch(start_s=start_s, end_s=now, situation=situation, lost=lost, saved=saved))
            start_s, lost, saved = now, gone, noticed
        else:
            lost, saved = lost | gone, saved | noticed
        situation = after
    found.append(Epoch(start_s=start_s, end_s=end_s, situation=situation, lost=lost, saved=saved))
    return found
