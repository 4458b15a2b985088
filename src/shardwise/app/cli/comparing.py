"""The command `compare`: the predicted step of a plan compared with a measured one, or with another plan.

`compared` shows times per stage. For plans of operator graphs, `part_rows` and `operator_lines` add the parts
of the busiest stage and the operators with the largest differences.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from shardwise.accuracy import (
    PARTS,
    Comparison,
    OperatorComparison,
    OperatorTimes,
    StageBreakdown,
    compare,
    stage_label,
)
from shardwise.app.cli import words
from shardwise.app.cli.differing import compared_plans
from shardwise.app.cli.division import division_text
from shardwise.app.cli.output import Line, Output, row
from shardwise.app.cli.tables import table
from shardwise.app.web import measured_report_document, page_of, page_suffix_checked, report_page
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import Plan, check_output_path, is_plan_file, plan_hash, read_plan, write_file
from shardwise.sim import read_trace, write_trace

# Plans of operator graphs

PART_LABELS = {
    "forward": "forward compute",
    "backward": "backward compute",
    "recomputation": "recomputation",
    "exchanges": "collectives inside operators",
    "conversions": "redistribution between operators",
    "gathers": "all-gather of parameters",
    "gradients": "gradient reduction",
    "optimizer": "gradient norm and optimizer",
    "rest": "waiting, sends, host",
}

HIDDEN_LABEL = "overlapped gradient reduction"
"""Label of the gradient reduction that the last backward pass overlaps: predicted only, and part of no other
row."""

MAX_OPERATORS = 8
"""Most passes of operators that are shown, those with the largest differences."""


def part_rows(found: OperatorComparison) -> list[tuple[str, ...]]:
    """The parts of the stage with the longest predicted work; parts that are 0 in both are left out."""
    predicted_times, measured_times = (
        found.predicted_parts[found.busiest],
        found.measured_parts[found.busiest],
    )
    whole = "by part" if len(found.hidden_s) == 1 else f"stage {found.busiest} by part"
    rows = [
        ("", PART_LABELS[part], *words.pair(predicted_times[part], measured_times[part]))
        for part in PARTS
        if predicted_times[part] > 0.0 or measured_times[part] > 0.0
    ]
    if (hidden_s := found.hidden_s[found.busiest]) > 0.0:
        rows.append(("", HIDDEN_LABEL, words.seconds(hidden_s), "-", "-"))
    return [(whole, *first[1:]) if place == 0 else first for place, first in enumerate(rows)]


def operator_lines(found: OperatorComparison) -> list[Line]:
    """The passes of operators with the largest differences, summed over repetitions."""
    rows = [
        (_operator_name(each, found), each.direction, *words.pair(each.predicted_s, each.measured_s))
        for each in found.operators[:MAX_OPERATORS]
    ]
    return [(), *table(("largest differences", "pass", "predicted", "measured", "ratio"), rows, left=2)]


def _operator_name(each: OperatorTimes, found: OperatorComparison) -> str:
    stage = f"stage {each.stage}: " if len(found.hidden_s) > 1 else ""
    times = f" × {each.repetitions}" if each.repetitions > 1 else ""
    return f"{stage}{each.block}/{each.operator}{times}"


def graph_document(found: OperatorComparison) -> dict[str, object]:
    """The additional keys of a graph plan: `parts` of each stage, and `operators`."""
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


# The command

VERSION = 1
DISAGREES = 4
"""Exit code where ranks left the order of the schedule."""

_PARTS = ("forward", "backward", "waiting", "after")


def compared(path: str, measured: str, *, trace: str | None, out: str | None, is_json: bool) -> Output:
    """The answer of `compare` for the plan file at `path` and another one, or a trace, at `measured`; writes
    both timelines to `trace`, and the page to `out`. ConfigError where the trace is not of this plan.
    """
    for option, file in (("--trace", trace), ("--out", out)):
        if file is not None:
            check_output_path(option, file, inputs=(path, measured))
    if out is not None:
        page_suffix_checked(out)
    plan = read_plan(path)
    if is_plan_file(measured):
        other = read_plan(measured)
        found_plans = compared_plans(plan, other, other_path=measured, trace=trace, is_json=is_json)
        if out is None:
            return found_plans
        write_file(out, report_page([plan, other], [path, measured]))
        return replace(found_plans, notes=[*found_plans.notes, f"wrote {out}"])
    steps = read_trace(measured)
    try:
        found = compare(plan, steps)
    except ConfigError as error:
        at_plan = error.key is not None and error.key.startswith(("best", "schedule", "step_time_s"))
        raise error.within(file=printable(path if at_plan else measured)) from None
    notes = []
    if steps.plan_hash is None:
        notes.append(f"{printable(measured)} does not name its plan; ranks and actions match this plan")
    if found.order_violation:
        notes.append(f"shardwise: error: {measured}: {found.order_violation}")
    if trace is not None:
        write_trace(found.both, trace)
        notes.append(f"wrote {trace}; open it at https://ui.perfetto.dev")
    if out is not None:
        document = measured_report_document(plan, path, measured, found)
        write_file(out, page_of(f"{plan.name} on {plan.cluster.name}", document))
        notes.append(f"wrote {out}")
    code = DISAGREES if found.order_violation else 0
    if is_json:
        return Output(document=_document(plan, found, trace), notes=notes, code=code)
    return Output(lines=_lines(plan, found), notes=notes, code=code)


def _lines(plan: Plan, found: Comparison) -> list[Line]:
    rows: list[tuple[str, ...]] = [
        (
            stage_label(place, found.places),
            part,
            *words.pair(getattr(predicted_times, f"{part}_s"), getattr(measured_times, f"{part}_s")),
        )
        for place, predicted_times, measured_times in zip(
            found.places, found.predicted, found.measured, strict=True
        )
        for part in _PARTS
    ]
    rows += _rows_within(found) if found.operators is None else part_rows(found.operators)
    rows += _rows_of_critical_rank(found)
    of = division_text(plan)
    return [
        row("compared", (f"{plan.name} on {plan.cluster.name}", "value"), (f"   {of}", "")),
        row("step time", (words.seconds(found.predicted_s), "time"), (" predicted, ", ""),
            (words.seconds(found.measured_s), "time"), (f" measured ({found.error:+.1%})", "")),
        row("order", (found.order_violation or "every rank ran its actions as planned", "")),
        (),
        *table(("", "part", "predicted", "measured", "ratio"), rows, left=2),
        *(() if found.operators is None else operator_lines(found.operators)),
    ]  # fmt: skip


def _rows_of_critical_rank(found: Comparison) -> list[tuple[str, ...]]:
    """Computation without communication, all communication, hidden or not, and idle time of the critical
    rank; they sum to the step."""
    predicted_times, measured_times = (times[found.critical] for times in (found.predicted, found.measured))

    def alone_s(times: StageBreakdown) -> float:
        return times.step_s - (times.communication_s or 0.0) - (times.idle_s or 0.0)

    return [
        (
            f"rank {found.parts.rank}",
            "computation alone",
            *words.pair(alone_s(predicted_times), alone_s(measured_times)),
        ),
        *(
            ("", text, *words.pair(getattr(predicted_times, name), getattr(measured_times, name) or 0.0))
            for text, name in (("all communication", "communication_s"), ("idle", "idle_s"))
        ),
    ]


def _rows_within(found: Comparison) -> list[tuple[str, ...]]:
    """Times in collectives, host copies and the optimizer, of the stage with the longest measured work."""
    measured_times = max(found.measured, key=lambda times: times.forward_s + times.backward_s)
    rows: list[tuple[str, ...]] = [
        (
            "of these",
            "in collectives",
            *words.pair(found.predicted_collectives_s, measured_times.collectives_s or 0.0),
        )
    ]
    if found.predicted_copies_s or measured_times.copies_s:
        pair = words.pair(found.predicted_copies_s, measured_times.copies_s or 0.0)
        rows.append(("", "in copies to the host", *pair))
    rows.append(
        ("", "in the optimizer", *words.pair(found.predicted_optimizer_s, measured_times.optimizer_s or 0.0))
    )
    return rows


def _document(plan: Plan, found: Comparison, trace: str | None) -> dict[str, object]:
    def times(of: StageBreakdown) -> dict[str, object]:
        return asdict(of) | {"step_s": of.step_s}

    document: dict[str, object] = {
        "schema": "shardwise.comparison",
        "version": VERSION,
        "plan_hash": plan_hash(plan),
        "predicted_s": found.predicted_s,
        "measured_s": found.measured_s,
        "error": found.error,
        "in_order": found.order_violation is None,
        "disorder": found.order_violation,
        "predicted_collectives_s": found.predicted_collectives_s,
        "predicted_copies_s": found.predicted_copies_s,
        "predicted_optimizer_s": found.predicted_optimizer_s,
        "step_parts": found.parts.to_dict(),
        "stages": [
            {
                "pipeline": pipeline,
                "stage": stage,
                "predicted": times(predicted_times),
                "measured": times(measured_times),
            }
            for (pipeline, stage), predicted_times, measured_times in zip(
                found.places, found.predicted, found.measured, strict=True
            )
        ],
        "trace": trace,
    }
    return document if found.operators is None else document | graph_document(found.operators)
