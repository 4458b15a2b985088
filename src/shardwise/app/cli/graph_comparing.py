"""What `compare` says of a step of an operator graph beside what it says of every step."""

from __future__ import annotations

from dataclasses import asdict

from shardwise.accuracy import PARTS, GraphComparison, OperatorTimes
from shardwise.app.cli import words
from shardwise.app.cli.output import Line
from shardwise.app.cli.tables import table

PART_LABELS = {
    "forward": "computing forward",
    "backward": "computing backward",
    "recomputation": "computing again",
    "exchanges": "exchanges inside operators",
    "conversions": "conversions between operators",
    "gathers": "gathering parameters",
    "gradients": "summing gradients",
    "optimizer": "norm and optimizer",
    "rest": "waiting, sends, host",
}

HIDDEN_LABEL = "gradients beside computing"
"""Of a plan alone: how long sums of gradients are beside the last backward pass, which counts in no part."""

MAX_OPERATORS = 8
"""So many passes of operators are shown, those that are furthest apart."""


def part_rows(found: GraphComparison) -> list[tuple[str, ...]]:
    """The parts of the stage that is predicted to work longest; those that are nothing in either are left
    out."""
    predicted_times, measured_times = (
        found.predicted_parts[found.busiest],
        found.measured_parts[found.busiest],
    )
    whole = "in parts" if len(found.places) == 1 else f"stage {found.busiest} in parts"
    rows = [
        ("", PART_LABELS[part], *words.pair(predicted_times[part], measured_times[part]))
        for part in PARTS
        if predicted_times[part] > 0.0 or measured_times[part] > 0.0
    ]
    if (hidden_s := found.hidden_s[found.busiest]) > 0.0:
        rows.append(("", HIDDEN_LABEL, words.seconds(hidden_s), "-", "-"))
    return [(whole, *first[1:]) if place == 0 else first for place, first in enumerate(rows)]


def operator_lines(found: GraphComparison) -> list[Line]:
    """The passes of operators that are furthest apart, in all repetitions together."""
    rows = [
        (_operator_name(each, found), each.direction, *words.pair(each.predicted_s, each.measured_s))
        for each in found.operators[:MAX_OPERATORS]
    ]
    return [(), *table(("furthest apart", "pass", "predicted", "measured", "ratio"), rows, left=2)]


def _operator_name(each: OperatorTimes, found: GraphComparison) -> str:
    stage = f"stage {each.stage}: " if len(found.places) > 1 else ""
    times = f" × {each.repetitions}" if each.repetitions > 1 else ""
    return f"{stage}{each.block}/{each.operator}{times}"


def graph_document(found: GraphComparison) -> dict[str, object]:
    """What a document has more: the parts of each stage, and the passes of operators."""
    return {
        "parts": [
            {
                "stage": stage,
                "predicted": dict(predicted_times),
                "measured": dict(measured_times),
                "predicted_hidden_s": hidden_s,
            }
            for stage, (predicted_times, measured_times, hidden_s) in enumerate(
                zip(found.predicted_parts, found.measured_parts, found.hidden_s, strict=True)
            )
        ],
        "operators": [asdict(each) for each in found.operators],
    }
