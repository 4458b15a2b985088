"""Alternatives on the card: how sure the choice is, the best plan of each target, and plans of other kinds.

`how_sure` says in one sentence how many plans are too close to tell apart. `target_table` has the best plan
of each target, `different_plans` the fastest runner-up of each other kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.app.cli import words
from shardwise.app.cli.output import Line, TableRow, columns
from shardwise.plans import Answer, Optimum, Result
from shardwise.strategy import ANY, LIKELY, groups_of

MOST_KINDS = 4
"""Most kinds of runners-up that a card shows."""

INDISTINGUISHABLE = 0.02
"""Largest relative difference of two predictions that says nothing about which is faster: of 298 pairs of
published runs of one workload whose predictions are that close, 59 % rank as predicted."""


# How sure


def how_sure(answer: Answer, tolerance: float) -> Iterator[Line]:
    """How far the other plans are from the recommended one, and what it gives up to the optimum."""
    text = _sureness(answer)
    if text:
        yield from words.text_rows("how sure", text, "value")
    if answer.optimum is not None:
        yield from words.text_rows("" if text else "how sure", _given_up(answer, answer.optimum, tolerance))


def _sureness(answer: Answer) -> str:
    """How far the next plans are; on a mixed cluster an uneven plan has no runners-up but the best uniform
    strategy. Empty where no other plan is known, and where step time is not the objective."""
    best_s, mixed = answer.best.step_time_s, answer.mixed
    if answer.objective != "time":
        return ""
    if not answer.runners_up and mixed is not None and mixed.uniform_step_time_s not in (None, best_s):
        slower = (mixed.uniform_step_time_s or 0.0) / best_s - 1.0
        return f"the best uniform strategy is {words.percent(slower)} slower"
    return sureness(best_s, [one.step_time_s for one in answer.runners_up])


def sureness(step_s: float, others_s: Sequence[float]) -> str:
    """`9 plans are within 0.6 %: indistinguishable`, or how much slower the next plan is, for the step times
    of a plan and its runners-up; empty without these."""
    slower = sorted((other_s / step_s - 1.0 for other_s in others_s), key=abs)
    if not slower:
        return ""
    close = [share for share in slower if abs(share) <= INDISTINGUISHABLE]
    if not close:
        return f"the next plan is {words.percent(abs(slower[0]))} {'slower' if slower[0] > 0.0 else 'faster'}"
    least = "at least " if len(close) == len(slower) else ""
    widest = abs(close[-1])
    within = words.percent(widest, 2 if widest < 0.0005 else 1)
    return f"{least}{len(close) + 1} plans are within {within}: indistinguishable"


def _given_up(answer: Answer, optimum: Optimum, tolerance: float) -> str:
    """What the recommended strategy gives up to the optimum, and why."""
    slower = words.percent(answer.best.step_time_s / optimum.step_time_s - 1.0, 2)
    fits = optimum.fits_probability
    unlikely = fits is not None and fits < LIKELY <= answer.best.fits_probability
    reason = f"which is {fits:.2f} likely to fit" if unlikely else "but simpler"
    of = f"{slower} slower than the optimum, {words.seconds(optimum.step_time_s)}"
    return f"{of}, {reason} (--tolerance {tolerance:g})"


def _over(one: Result, best: Result) -> float:
    return one.step_time_s / best.step_time_s - 1.0


# The best of each target


def target_table(answer: Answer, target: str | None) -> Iterator[Line]:
    """The best plan of each target, and how far each is from the best of any."""
    if not answer.targets:
        return
    yield ()
    left = columns() - 43
    each = words.shortened("the fastest strategy of each", left)
    yield ((f" {'targets':<20}{'step time':>11}{'to any':>9}  {each}", "label"),)
    for one in answer.targets:
        is_chosen = one.target == (target or ANY)
        name = f" {'→' if is_chosen else ' '} {one.target:<18}"
        if one.step_time_s is None:
            yield ((name, ""), (f"{'-':>11}{'':>9}  {words.shortened(one.reason or '', left)}", "dim"))
            continue
        over = "" if one.over_any is None else f"{one.over_any * 100:+.1f} %"
        division = "uneven" if one.strategy is None else words.brief_division_text(one.strategy)
        fixed = f"{words.seconds(one.step_time_s):>11}{over:>9}  "
        style = "value" if is_chosen else ""
        yield ((name, style), (fixed, style), (words.shortened(division, left), style or "dim"))


# Runners-up


def different_plans(answer: Answer, layers: int, *, is_verbose: bool) -> Iterator[Line]:
    """The fastest runner-up of each kind (`kind_of`) with what differs from the best, and how many more there
    are. Those of the kind of the best share a line unless `is_verbose`."""
    if not answer.runners_up:
        return
    best = answer.best
    wide = min(columns() - 42, 38)
    kinds: dict[int, list[tuple[int, Result]]] = {}
    for place, group in enumerate(groups_of(best.strategy, [one.strategy for one in answer.runners_up])):
        kinds.setdefault(group, []).append((place + 2, answer.runners_up[place]))
    alike = [] if is_verbose else kinds.pop(0, [])
    shown = list(kinds.values())[: len(kinds) if is_verbose else MOST_KINDS]
    yield ()
    yield TableRow(
        [(f" {'alternatives':<{wide}}{'step time':>12}{'slower':>9}{'memory':>11}{'fits':>7}", "label")]
    )
    for members in shown:
        yield from _kind(members, best, layers, wide)
    left = list(kinds.values())[len(shown) :]
    texts = []
    if left:
        texts.append(
            f"{words.counted(sum(map(len, left)), 'plan')} of {words.counted(len(left), 'more kind')}"
        )
    if alike:
        texts.append(f"{words.counted(len(alike), 'plan')} like the recommended one{_to(alike, best)}")
    if texts:
        for text in words.wrapped([f"{text} (--verbose)" for text in texts], " · ", columns() - 5):
            yield ((f"     {text}", "dim"),)


def _kind(members: list[tuple[int, Result]], best: Result, layers: int, wide: int) -> Iterator[Line]:
    """The fastest of one kind, and what differs."""
    (place, first), *more = members
    name = words.shortened(words.degrees_text(first.strategy), wide - 5)
    fixed = (
        f" {place:>2}  {name:<{wide - 4}}{words.seconds(first.step_time_s):>12}{_slower(first, best):>9}"
        f"{words.memory(first.peak_memory.device):>11}{first.fits_probability:>7.2f}"
    )
    yield TableRow([(fixed, "")])
    texts = list(words.difference_texts(first.strategy, best.strategy, layers))
    if more:
        texts.append(f"{len(more)} more like it{_to(more, best)}")
    for text in words.wrapped(texts, " · ", columns() - 5):
        yield ((f"     {text}", "dim"),)


def _to(members: list[tuple[int, Result]], best: Result) -> str:
    """How slow the slowest is."""
    return f", to {_slower(members[-1][1], best)}"


def _slower(one: Result, best: Result) -> str:
    return words.slower_text(_over(one, best))
