"""The figures of docs/concepts/frontier.md for Llama 3.1 8B on 1 to 64 devices.

`python -m benchmarks.frontier_page [FILE.svg]` prints the table and the counts, and draws the plot.
"""

from __future__ import annotations

import sys
from math import inf

from benchmarks.frontiers import FRONTIERS, source_of

from shardwise.search import Curve, curves_for, points_of
from shardwise.strategy import Strategy

JOB = FRONTIERS["llama8b_1_to_64"]
SLOWER = (0.01, 0.05, 0.10, 0.25)
FROM_DEVICES = 8
"""Least device count whose cost is compared: a whole node."""


def saved(curve: Curve[Strategy], slower: float) -> float:
    """The largest share of the fastest point's memory that points save which are at most the share `slower`
    slower."""
    fastest = curve.points[0]
    within = [point for point in curve.points if point.time_s <= fastest.time_s * (1.0 + slower)]
    return 1.0 - min(point.memory_bytes for point in within) / fastest.memory_bytes


def main(arguments: list[str]) -> None:
    """Prints the figures of the page; with a file, draws the plot by the command that the page names."""
    curves = curves_for(source_of(JOB), mode=JOB.mode, sizes=None, limit_bytes=inf)
    head = ("devices", "points", "fastest", "its memory", *(f"{slower:.0%} slower" for slower in SLOWER))
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for curve in curves:
        fastest = curve.points[0]
        cells = (
            str(curve.devices),
            str(len(curve.points)),
            f"{fastest.time_s:.4g} s",
            f"{fastest.memory_bytes / 2**30:.1f} GiB",
            *(f"{saved(curve, slower):.0%}" for slower in SLOWER),
        )
        print("| " + " | ".join(cells) + " |")
    whole = [curve for curve in curves if curve.devices >= FROM_DEVICES]
    remaining = points_of(whole, weighs_cost=True)
    counts = ", ".join(str(curve.devices) for curve in whole)
    total = sum(len(curve.points) for curve in whole)
    print(f"\nOf {total} points on {counts} devices cost leaves {len(remaining)}:")
    for curve in whole:
        own = sum(point.devices == curve.devices for point in remaining)
        print(f"  {own} of {len(curve.points)} on {curve.devices}")
    if arguments:
        draw(arguments[0])


def draw(path: str) -> None:
    """Draws the plot by the command `frontier --plot`."""
    from shardwise.app.cli import main as shardwise

    question = ("frontier", JOB.model, "--cluster", JOB.cluster, "--seq-len", str(JOB.seq_len))
    shardwise([*question, "--global-batch-size", str(JOB.batch), "--mode", JOB.mode, "--plot", path])


if __name__ == "__main__":
    main(sys.argv[1:])
