"""The cases that a chain falls into, each of which has lines of its own."""

from __future__ import annotations

from dataclasses import replace

from shardwise.frontier import Chain
from shardwise.search.tracking.prune import PresolvedChain

DOMINANT_SHARE = 0.5
"""Of the variables of a chain, more than this in one link make its modes cases."""


def cases_of(chain: Chain) -> list[PresolvedChain]:
    """A chain with each mode of the link that is most of it; where no link is, the chain as it is.

    A line lies below every mean of two solutions, and so far below all that there is between two modes of
    most of a chain: lines of each mode alone are closer. Each solution is in one of the cases.
    """
    whole, place = PresolvedChain.of(chain), dominant_segment(chain)
    if place is None:
        return [whole]
    return [_in_mode(whole, place, mode) for mode in range(len(chain[place].modes))]


def dominant_segment(chain: Chain) -> int | None:
    """The link that is most of a chain, where one is."""
    counts = [
        segment.repeat * max((len(part.sizes) for _, part in segment.modes), default=0) for segment in chain
    ]
    for place, (segment, count) in enumerate(zip(chain, counts, strict=True)):
        if segment.repeat == 1 and count > DOMINANT_SHARE * sum(counts):
            return place
    return None


def _in_mode(whole: PresolvedChain, place: int, mode: int) -> PresolvedChain:
    """A chain with all of its choices, but one mode of a link."""
    own = replace(whole.chain[place], modes=(whole.chain[place].modes[mode],))
    return PresolvedChain(
        (*whole.chain[:place], own, *whole.chain[place + 1 :]),
        (*whole.modes[:place], (mode,), *whole.modes[place + 1 :]),
        (*whole.choices[:place], (whole.choices[place][mode],), *whole.choices[place + 1 :]),
    )
