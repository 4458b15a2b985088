"""Checks of a saved plan: the verdict of the independent checker, and what the planner computes again.

`shardwise_verify` checks plans of every kind from their document; a file of version 1 becomes one of version
2 first. What it does not re-derive of uneven plans and operator graphs, `computed_again` predicts again with
code of the planner, so these checks stand apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import shardwise_verify
from shardwise.errors import ConfigError, Infeasible
from shardwise.notebook import panel, table
from shardwise.plans import Plan, Result, plan_document, read_plan
from shardwise.questions.arguments import Progress
from shardwise.search import predicted_again
from shardwise_verify import (
    PROOF_BUDGET_S,
    Check,
    InputError,
    Verdict,
    answer_of,
    fit_check,
    number_check,
    parts_check,
    value_check,
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckedPlan:
    """The independent verdict on a plan file, and the checks by which the planner computes it again."""

    verdict: Verdict
    computed_again: tuple[Check, ...]

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks of both."""
        return (*self.verdict.checks, *self.computed_again)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that do not hold."""
        return tuple(check for check in self.checks if not check.ok and not check.is_open)

    @property
    def ok(self) -> bool:
        """Whether no check fails; open checks do not fail."""
        return not self.failed

    def rows(self) -> list[dict[str, object]]:
        """A row for a data frame for each check: its name, whether it holds or is open, and the values."""
        return [asdict(check) for check in self.checks]

    def to_dict(self) -> dict[str, object]:
        """The answer of `check --json`."""
        return {
            **answer_of(self.verdict),
            "ok": self.ok,
            "computed_again": [asdict(check) for check in self.computed_again],
        }

    def __repr__(self) -> str:
        wrong = ", ".join(check.name for check in self.failed)
        open_checks = sum(check.is_open for check in self.checks)
        verdict = f"fails: {wrong}" if wrong else "agrees"
        return f"<CheckedPlan {verdict}; {len(self.checks)} checks, {open_checks} open>"

    def _repr_html_(self) -> str:
        rows = [
            ("open" if one.is_open else "ok" if one.ok else "wrong", one.name, one.found, one.expected)
            for one in self.checks
        ]
        return panel(repr(self)[1:-1], table(("", "check", "found", "expected"), rows))


def checked_plan(
    path: str, proof_budget_s: float = PROOF_BUDGET_S, *, progress: Progress | None = None
) -> CheckedPlan:
    """The verdict of the checker and of the planner on the plan file at `path`. Raises ConfigError for a file
    that is no plan or was altered."""
    plan = read_plan(path)
    try:
        verdict = _verdict(path, plan, proof_budget_s, progress)
    except InputError as error:
        raise _config_error(error).within(file=path) from None
    return CheckedPlan(verdict=verdict, computed_again=tuple(computed_again(plan, verdict)))


def checked_record(
    plan: Plan, proof_budget_s: float = PROOF_BUDGET_S, *, progress: Progress | None = None
) -> CheckedPlan:
    """The verdict of the checker and of the planner on a plan, as its file would be. Raises ConfigError where
    the checker cannot use a value."""
    try:
        verdict = shardwise_verify.check_document(
            plan_document(plan), proof_budget_s=proof_budget_s, progress=progress
        )
    except InputError as error:
        raise _config_error(error) from None
    return CheckedPlan(verdict=verdict, computed_again=tuple(computed_again(plan, verdict)))


def _config_error(error: InputError) -> ConfigError:
    return ConfigError(
        error.message, key=error.key or None, found=error.found or None, allowed=error.allowed or None
    )


def _verdict(path: str, plan: Plan, proof_budget_s: float, progress: Progress | None) -> Verdict:
    """The verdict of the checker on the document of version 2; a file of version 1 keeps its own hash."""
    document: Mapping[str, object] = shardwise_verify.read_document(path)
    stated, version = shardwise_verify.checked_hash(document)
    if version == shardwise_verify.VERSION:
        return shardwise_verify.check_document(document, proof_budget_s=proof_budget_s, progress=progress)
    verdict = shardwise_verify.check_document(
        plan_document(plan), proof_budget_s=proof_budget_s, progress=progress
    )
    first = value_check("hash of version 1", stated, stated)
    return replace(verdict, plan_hash=stated, checks=(first, *verdict.checks))


# What the planner computes again

PREDICTED = "best.breakdown"
"""A claim that the checker re-derives where it has prices of its own."""


def computed_again(plan: Plan, verdict: Verdict) -> Iterator[Check]:
    """The lines about approximations; and checks by the planner's own prediction, where the checker does not
    re-derive the times itself."""
    yield from _approximations(plan)
    if not any(claim.key == PREDICTED for claim in verdict.not_re_derived):
        return
    expected = "a plan of its cluster"
    try:
        predicted = predicted_again(plan)
    except (ConfigError, Infeasible) as error:
        yield Check(name="prediction", ok=False, found=str(error), expected=expected)
        return
    peak = predicted.peak_memory
    usable = peak.capacity * (1.0 - plan.job.memory_margin)
    yield fit_check("predicted bytes fit", peak.device, usable)
    yield from _result_checks(plan.best, predicted)


def _approximations(plan: Plan) -> Iterator[Check]:
    """Lines about the cluster come first; a plan for a trace also has lines about its events, which no plan
    file holds."""
    own, stated, is_for_trace = plan.cluster.priced_as, plan.priced_as, plan.for_trace is not None
    if own or stated:
        yield Check(
            name="approximations",
            ok=stated[: len(own)] == own and (is_for_trace or len(stated) == len(own)),
            found="; ".join(stated),
            expected="; ".join((*own, "then lines about the events") if is_for_trace else own),
        )


def _result_checks(found: Result, predicted: Result) -> Iterator[Check]:
    """Every figure of a result, compared with its prediction."""
    yield value_check("predicted layout", found.layout.with_times(predicted.pipeline_s), predicted.layout)
    numbers = {
        "predicted step time": (found.step_time_s, predicted.step_time_s),
        "predicted band low": (found.band_s[0], predicted.band_s[0]),
        "predicted band high": (found.band_s[1], predicted.band_s[1]),
        "predicted memory band low": (found.memory_band_bytes[0], predicted.memory_band_bytes[0]),
        "predicted memory band high": (found.memory_band_bytes[1], predicted.memory_band_bytes[1]),
        "predicted fits probability": (found.fits_probability, predicted.fits_probability),
    }
    for place, pair in enumerate(zip(found.pipeline_s, predicted.pipeline_s, strict=True)):
        numbers[f"predicted pipeline {place}"] = pair
    for name in ("allocated", "reserved", "device"):
        own, other = (getattr(result.peak_memory, name) for result in (found, predicted))
        numbers[f"predicted {name} bytes"] = own, other
    for name, (own, other) in numbers.items():
        yield number_check(name, own, other)
    for name in ("tokens_per_s_per_device", "mfu", "mfu_full_attention"):
        own, other = getattr(found, name), getattr(predicted, name)
        is_number = own is not None and other is not None
        yield (number_check if is_number else value_check)(f"predicted {name}", own, other)
    yield parts_check("predicted breakdown", found.breakdown, predicted.breakdown, predicted.step_time_s)
    yield parts_check("predicted memory", found.memory, predicted.memory, predicted.peak_memory.device)
    yield value_check("predicted capacity", found.peak_memory.capacity, predicted.peak_memory.capacity)
    yield value_check("tightest rank", found.tightest_rank, predicted.tightest_rank)
    yield value_check("evaluator", found.evaluator, predicted.evaluator)
