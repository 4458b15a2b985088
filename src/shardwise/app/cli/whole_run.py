"""A whole training run as lines of a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.app.cli import words
from shardwise.app.cli.output import LABEL, USUAL, Line, TableRow, columns, row
from shardwise.plans import DAY_S, WholeRun
from shardwise.questions import RunOnPart
from shardwise.units import format_count, format_rate


def whole_run_lines(run: WholeRun | None) -> Iterator[Line]:
    """Days, device hours, money and energy of a run; nothing without one."""
    if run is None:
        return
    yield ()
    lost = run.wall_s - run.computing_s
    yield from words.span_rows(
        "whole run", (days_text(run.wall_s), "value"), (_band(run), "dim"), (f"   {_length(run)}", "dim")
    )
    text = f"{days_text(run.computing_s)} of steps and {days_text(lost)} lost, by the goodput"
    yield from words.text_rows("", text, "dim")
    yield from _figure(f"{format_count(round(run.device_hours))} device hours", _on(run))
    yield from _money(run)
    yield from _energy(run)


def _figure(value: str, note: str) -> Iterator[Line]:
    """A figure of the run with its note."""
    if columns() < USUAL:
        yield row("", (value, "value"))
        yield from words.text_rows("", note, "dim")
        return
    for place, line in enumerate(words.wrapped_text(note, columns() - LABEL - len(value) - 3)):
        yield row("", (" " * len(value) if place else value, "value"), (f"   {line}", "dim"))


def run_document(found: RunOnPart) -> dict[str, object]:
    """The whole run on a part of the cluster as plain values."""
    point = found.point
    return {
        "part": point.part.name,
        "time_s": point.time_s,
        "memory_bytes": point.memory_bytes,
        "is_on_frontier": found.is_on_frontier,
        "run": found.run.to_dict(),
    }


def runs_table(runs: Sequence[RunOnPart]) -> Iterator[Line]:
    """The whole run on each part of the cluster: days (or tokens, within requested days) against money. Those
    that another part beats in both are dim."""
    if not runs:
        return
    is_of_days = len({one.run.steps for one in runs}) > 1
    first = runs[0].run
    length = f"in {days_text(first.wall_s)}" if is_of_days else _length(first)
    yield ()
    yield from words.span_rows("whole run", (length, "value"), ("   by device count", "dim"))
    yield TableRow(
        [
            (f" {'devices':>7}{_amount_name(first) if is_of_days else 'days':>14}", "label"),
            (f"{'device hours':>14}{'money':>14}{'energy':>9}{'goodput':>9}", "label"),
        ]
    )
    soonest, cheapest = _extremes(runs)
    for one in runs:
        run = one.run
        text = (
            f" {run.devices:>7,}{_amount(run) if is_of_days else words.digits(run.days, 3):>14}"
            f"{format_count(round(run.device_hours)):>14}{'-' if run.usd is None else dollars(run.usd):>14}"
            f"{'-' if run.energy_j is None else energy(run.energy_j):>9}"
            f"{words.percent(run.goodput.fraction):>9}  "
        )
        most = "most" if is_of_days else "soonest"
        marks = [name for name, mark in ((most, soonest), ("cheapest", cheapest)) if one is mark]
        marks = ["best in both"] if len(marks) > 1 else marks
        if not one.is_on_frontier:
            marks = [*marks, "beaten"]
        yield TableRow([(text, "" if one.is_on_frontier else "dim"), (marks[0] if marks else "", "value")])
    if not all(one.is_on_frontier for one in runs):
        text = "beaten: another device count is neither later nor dearer, and better in one"
        yield ((f"   {text}", "dim"),)


def _amount_name(run: WholeRun) -> str:
    return "steps" if run.tokens is None else "tokens"


def _amount(run: WholeRun) -> str:
    """The tokens of a run, or its steps where samples have none."""
    return format_count(run.steps if run.tokens is None else run.tokens)


def _extremes(runs: Sequence[RunOnPart]) -> tuple[RunOnPart, RunOnPart]:
    """The run with the most steps a day, and the one with the least money (device hours where a price is not
    known) for a step."""
    is_priced = all(one.run.usd is not None for one in runs)

    def spent(one: RunOnPart) -> float:
        amount = one.run.usd if is_priced and one.run.usd is not None else one.run.device_hours
        return amount / one.run.steps

    return min(runs, key=lambda one: one.run.wall_s / one.run.steps), min(runs, key=spent)


def days_text(wall_s: float) -> str:
    """Days with three digits, hours below one day."""
    return f"{words.digits(wall_s / DAY_S, 3)} days" if wall_s >= DAY_S else words.hours(wall_s)


def dollars(usd: float) -> str:
    """Dollars with three digits below a thousand: `$4.56`, `$1,234`, `$12.3 million`."""
    if usd >= 1e6:
        return f"${format_count(usd)}"
    return f"${usd:,.0f}" if usd >= 1e3 else f"${words.digits(usd, 3)}"


def energy(joules: float) -> str:
    """Energy with its prefix: `21.6 GWh`."""
    return format_rate(joules / 3600.0, "Wh")


def _length(run: WholeRun) -> str:
    steps = words.counted(run.steps, "step")
    return f"for {steps}" if run.tokens is None else f"for {format_count(run.tokens)} tokens in {steps}"


def _band(run: WholeRun) -> str:
    if run.wall_band_s is None:
        return ""
    low, high = (words.digits(end / DAY_S, 3) for end in run.wall_band_s)
    return f"   80 % band {low} to {high} days"


def _on(run: WholeRun) -> str:
    return f"on {words.counted(run.devices, 'device')}, goodput {words.percent(run.goodput.fraction)}"


def _money(run: WholeRun) -> Iterator[Line]:
    if run.usd is None:
        return words.text_rows("", "no cost: the price is not known; --price gives it", "dim")
    note = "; ".join((f"at {dollars(run.usd_per_hour or 0.0)} an hour", *run.prices))
    return _figure(dollars(run.usd), note)


def _energy(run: WholeRun) -> Iterator[Line]:
    """Energy, and where the power is from."""
    value = "no energy" if run.energy_j is None else energy(run.energy_j)
    return _figure(value, "; ".join(run.powers))
