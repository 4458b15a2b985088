"""Whether a plan's claim holds that nothing in its space is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic

import numpy as np

from shardwise.check.beyond import TargetLimits, plan_limits_of, target_limits_of
from shardwise.check.count import SpaceDefinition
from shardwise.check.cover import ProofOutcome, ProofTimeLimitError
from shardwise.check.figures import Figures
from shardwise.check.finding import TOLERANCE, Check
from shardwise.check.price import evaluate
from shardwise.check.proof import Prover
from shardwise.check.rows import StrategyRows, rows_of
from shardwise.check.rules import count
from shardwise.check.runners_up import StrategyKind, kind_of
from shardwise.plan import Certificate, Plan
from shardwise.strategy import FIELDS

PROVEN_GAP = 1e-12
"""Relative difference up to which two step times, or bytes, are no better than one another."""

PROOF_BUDGET_S = 600.0

LARGEST_SPACE = 1 << 62
"""Candidates that a cover counts without overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """No legal candidate of at most `usable_bytes` takes less than `cutoff_s` seconds, of the kinds
    `kind_cutoffs_s` less than so many; `text` says it."""

    cutoff_s: float
    usable_bytes: float
    text: str
    kind_cutoffs_s: Mapping[StrategyKind, float] = field(default_factory=dict)


def optimal_check(plan: Plan, figures: Figures, budget_s: float) -> Check:
    """The claims of the plan's objective, proven in `budget_s` seconds, or open."""
    proof = plan.certificate
    space = space_of(figures, proof, target_limits_of(plan_limits_of(plan), plan.model, plan.job))
    all_of = count(figures, proof.space, proof.fixed, proof.axes)
    until_s = monotonic() + budget_s
    # Of what fits by rounding alone nothing is claimed: the planner may find that it does not.
    figures = replace(figures, host_capacity_bytes=figures.host_capacity_bytes * (1 - TOLERANCE))
    claims = claims_of(plan, figures)
    found = "; ".join(claim.text for claim in claims)
    if all_of > LARGEST_SPACE:
        return _open_check(found, f"not proven: {all_of} candidates")
    covers = []
    for claim in claims:
        prover = Prover(
            figures=figures,
            space=space,
            cutoff_s=claim.cutoff_s,
            usable_bytes=claim.usable_bytes,
            kind_cutoffs_s=claim.kind_cutoffs_s,
            is_out_of_time=lambda: monotonic() > until_s,
        )
        try:
            outcome = prover.run()
        except ProofTimeLimitError:
            return _open_check(found, f"not proven within {budget_s:g} s")
        if outcome.counterexample is not None:
            return Check(
                name="optimal",
                ok=False,
                found=found,
                expected=_counterexample_text(outcome, outcome.counterexample, claim),
            )
        covers.append(outcome)
    return Check(
        name="optimal",
        ok=all(outcome.count == all_of for outcome in covers),
        found=found,
        expected="; ".join(_outcome_text(outcome, all_of) for outcome in covers),
    )


def _open_check(found: str, expected: str) -> Check:
    return Check(name="optimal", ok=False, is_open=True, found=found, expected=expected)


def space_of(figures: Figures, proof: Certificate, target_limits: TargetLimits) -> SpaceDefinition:
    """The space that the certificate is about, and what of it is beyond the target."""
    return SpaceDefinition(
        layers=figures.limits.layers,
        is_moe=figures.model.experts is not None,
        devices=figures.cluster.devices,
        batch=figures.job.global_batch_size,
        is_core=proof.space == "core",
        fixed=proof.fixed,
        axes=proof.axes,
        target_limits=target_limits,
    )


def claims_of(plan: Plan, figures: Figures) -> list[Claim]:
    """What must be proven: of a search that ended early, no more than its bound."""
    proof, usable = plan.certificate, figures.usable_bytes * (1 - TOLERANCE)
    is_whole = proof.unexplored == 0 and proof.gap <= PROVEN_GAP
    if not is_whole:
        bound_s = proof.lower_bound_s
        return [_time_claim(bound_s, usable, f"nothing below {bound_s!r} s")]
    results = [(plan.best.strategy, plan.best.step_time_s)]
    results += [(one.strategy, one.step_time_s) for one in plan.runners_up]
    own = evaluate(figures, rows_of([strategy for strategy, _ in results]))
    # What is said and what is found differ by rounding; neither may be beaten.
    times_s = [min(stated, float(found)) for (_, stated), found in zip(results, own.step_time_s, strict=True)]
    best_s = times_s[0]
    if plan.objective == "memory":
        nbytes = min(plan.best.peak_memory.device, float(own.device_bytes[0]))
        return [
            Claim(cutoff_s=inf, usable_bytes=nbytes * (1 - PROVEN_GAP), text=f"{nbytes!r} B are the least"),
            _time_claim(best_s, min(nbytes * (1 + PROVEN_GAP), usable), f"of these {best_s!r} s"),
        ]
    # A plan file holds no other part of the cluster than the one that it uses.
    here = "" if plan.objective == "time" else " on these devices"
    claim = _time_claim(max(times_s), usable, f"{best_s!r} s is the least{here}")
    if not plan.runners_up:
        return [claim]
    kind_cutoffs_s = {
        kind_of(strategy): seconds * (1 - PROVEN_GAP)
        for (strategy, _), seconds in zip(results, times_s, strict=True)
    }
    return [replace(claim, kind_cutoffs_s=kind_cutoffs_s, text=f"{claim.text}, then the runners-up")]


def _time_claim(seconds: float, usable: float, text: str) -> Claim:
    return Claim(cutoff_s=seconds * (1 - PROVEN_GAP), usable_bytes=usable, text=text)


def _outcome_text(outcome: ProofOutcome, all_of: int) -> str:
    least = f"{outcome.lower_bound_s!r} s" if outcome.lower_bound_s < inf else "none"
    return (
        f"{outcome.illegal} illegal + {outcome.out_of_memory} too large + {outcome.pruned} bounded "
        f"+ {outcome.evaluated} evaluated = {all_of}; least bound {least}"
    )


def _counterexample_text(outcome: ProofOutcome, row: StrategyRows, claim: Claim) -> str:
    best_s = min(claim.kind_cutoffs_s.values(), default=claim.cutoff_s)
    what = "" if outcome.counterexample_s < best_s else "a runner-up not listed: "
    return f"{what}{outcome.counterexample_s!r} s, {outcome.counterexample_bytes!r} B: {row_text(row)}"


def row_text(row: StrategyRows) -> str:
    """The one strategy of `row`, all of its fields."""
    values = {name: getattr(row, name)[0] for name in FIELDS}
    return ",".join(
        f"{name}={str(bool(value)).lower() if isinstance(value, np.bool_) else value}"
        for name, value in values.items()
    )
