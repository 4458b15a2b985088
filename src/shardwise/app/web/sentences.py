"""The sentences of a report: how the plan divides the work, how sure the answer is, what the certificate
proves, and what the estimate assumes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from shardwise.app.cli import words
from shardwise.app.cli.alternatives import sureness
from shardwise.app.cli.card import NOT_AS_GIVEN, assumption_texts
from shardwise.app.cli.division import division, division_text
from shardwise.app.cli.target_words import target_words
from shardwise.plans import PROVEN_GAP, UNEVEN_SPACE, Certificate, Plan, StrategyFrontier
from shardwise.strategy import ANY, LIKELY, strategy_text
from shardwise.targets import EXPORTERS


def texts(plan: Plan, file: str, frontier: StrategyFrontier | None = None) -> dict[str, object]:
    """The sentences of one plan, and of the points of its frontier; `file` is its plan file, empty where it
    has none."""
    _, head, details = division(plan.best)
    return {
        "division": head,
        "details": details,
        "settings": list(target_words(plan)),
        "sure": _sure(plan),
        "recommended": _recommended(plan),
        "certificate": _certificate(plan),
        "assumptions": _assumptions(plan),
        "targets": {
            one.target: words.degrees_text(one.strategy)
            + (f" · {text}" if (text := words.sharding_text(one.strategy)) else "")
            for one in plan.targets
            if one.strategy is not None
        },
        "runners_up": _runners_up(plan),
        "terms": {name: words.term_text(name) for name in (*plan.breakdown, *plan.memory)},
        "commands": _commands(plan, file),
        "frontier_command": (
            None
            if plan.best.fields is None
            else f"shardwise report {shlex.quote(file or 'plan.yaml')} --frontier"
        ),
        "points": [] if frontier is None else _points(plan, file, frontier),
    }


def division_line(plan: Plan) -> str:
    """How the plan divides the work and its step time, in one line."""
    return f"{division_text(plan)} · step {words.seconds(plan.step_time_s)}"


def _sure(plan: Plan) -> list[str]:
    """How sure the step time, the memory and the choice are."""
    best, peak = plan.best, plan.best.peak_memory
    low, high = map(words.rounded_seconds, best.band_s)
    sentences = [f"In 8 of 10 runs the step takes between {low} and {high}."]
    if best.fits_probability >= LIKELY:
        fits = "It very likely fits" if best.fits_probability >= 0.95 else "It likely fits"
    else:
        fits = "It may not fit"
    band = " to ".join(map(words.rounded_gib, best.memory_band_bytes))
    sentences.append(
        f"{fits} (probability {best.fits_probability:.2f}): the peak is {band} GiB in 8 of 10 runs, "
        f"of {words.memory(peak.capacity)}."
    )
    others_s = [one.step_time_s for one in plan.runners_up]
    text = sureness(plan.step_time_s, others_s) if plan.objective == "time" else ""
    if text:
        sentences.append(f"{text[0].upper()}{text[1:]}.")
    if "indistinguishable" in text:
        sentences[-1] += " Choose among them by what is simpler to run."
    return sentences


def _recommended(plan: Plan) -> str | None:
    """Why the recommended plan is not the fastest."""
    optimum = plan.optimum
    if optimum is None:
        return None
    slower = words.percent(plan.step_time_s / optimum.step_time_s - 1.0, 2)
    fits = optimum.fits_probability
    unlikely = fits is not None and fits < LIKELY <= plan.best.fits_probability
    why = f"the fastest plan fits with probability {fits:.2f} only" if unlikely else "it is simpler"
    return (
        f"It is recommended although it is {slower} slower than the fastest plan of the target "
        f"({words.seconds(optimum.step_time_s)}), because {why} (--tolerance {plan.question.tolerance:g})."
    )


def _certificate(plan: Plan) -> list[str]:
    """What the search proves, in plain words."""
    found = plan.certificate
    if found is None:
        return ["No search chose this plan: it was given, so nothing is said of other plans."]
    space = "(uneven plans)" if found.space == UNEVEN_SPACE else f"of the search space '{found.space}'"
    of = f" that {plan.target} runs" if plan.target not in (None, ANY) else ""
    sentences = [_verdict(plan, found, space, of)]
    parts = [f"{count:,} {words.reason_text(name)}" for name, count in _largest(found.rejected)]
    if parts:
        rejected = sum(found.rejected.values())
        sentences.append(f"Candidates that break a rule or do not fit: {rejected:,} ({'; '.join(parts)}).")
    sentences.append(
        "Candidates that a lower bound excluded, because even in the best case they are not faster: "
        f"{found.cut_by_bound:,}. Candidates that were evaluated in full: {found.simulated:,}."
    )
    if found.unexplored:
        sentences.append(
            f"Candidates that the search left out: {found.unexplored:,}; none of them takes less than "
            f"{words.seconds(found.lower_bound_s)}."
        )
    if plan.mixed is not None and plan.mixed.uneven_gap > PROVEN_GAP:
        gap = words.percent(plan.mixed.uneven_gap, 2)
        sentences.append(f"An uneven plan may be up to {gap} faster: that search is not exact.")
    sentences.append(
        "The proof is about predicted step times: it says nothing of the error of the predictions. "
        "'shardwise check' derives it again with an independent program."
    )
    return sentences


def _verdict(plan: Plan, found: Certificate, space: str, of: str) -> str:
    if found.priced_as:
        return f"Nothing is proven, because {NOT_AS_GIVEN}: {'; '.join(found.priced_as)}."
    counted = f"{found.counted:,} candidates {space}{of}"
    if found.is_proven and plan.objective == "time":
        return (
            f"No candidate is predicted to be faster than {words.seconds(found.best_s)}, among all {counted}."
        )
    if found.is_proven:
        return f"No candidate is better for the objective {plan.objective}, among all {counted}."
    return (
        f"Not proven: among {counted} there may be one that is up to {words.percent(found.gap, 2)} faster "
        f"(the lower bound is {words.seconds(found.lower_bound_s)})."
    )


def _largest(rejected: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((name, count) for name, count in rejected.items() if count), key=lambda one: -one[1])[:4]


def _assumptions(plan: Plan) -> list[str]:
    space = "" if plan.certificate is None else plan.certificate.space
    return [
        *plan.priced_as,
        *assumption_texts(plan.cluster, plan.job, plan.best.evaluator, space, plan.best.fields),
    ]


def _runners_up(plan: Plan) -> list[dict[str, object]]:
    """What distinguishes each runner-up from the plan, in words."""
    best = plan.best.fields
    if best is None:
        return []
    return [
        {
            "degrees": words.degrees_text(one.strategy),
            "differs": list(words.difference_texts(one.strategy, best, plan.model.layers)),
        }
        for one in plan.runners_up
    ]


def _points(plan: Plan, file: str, frontier: StrategyFrontier) -> list[dict[str, str]]:
    """The words and the command of each point of the frontier."""
    name = shlex.quote(file or "plan.yaml")
    layers = plan.model.layers
    return [
        {
            "division": " · ".join(
                [words.degrees_text(point.strategy), *words.choice_texts(point.strategy, layers)]
            ),
            "command": f"shardwise explain {name} --why-not {strategy_text(point.strategy)}",
        }
        for point in frontier.points
    ]


def _commands(plan: Plan, file: str) -> list[str]:
    """Commands that continue from the plan file."""
    name = shlex.quote(file or "plan.yaml")
    commands = [f"shardwise explain {name}", f"shardwise check {name}"]
    if plan.target in EXPORTERS:
        commands.append(f"shardwise export {name} --to {plan.target} --out run")
    return commands
