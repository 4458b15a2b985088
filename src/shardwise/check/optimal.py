"""Whether a plan's claim holds that nothing in its space is better."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np

from shardwise.check.count import SpaceRows
from shardwise.check.figures import Figures
from shardwise.check.finding import Check
from shardwise.check.proof import Cover, OutOfTimeError, Prover
from shardwise.check.rows import Rows
from shardwise.check.rules import count
from shardwise.plan import Certificate, Plan
from shardwise.strategy import FIELDS

PROVEN_GAP = 1e-12
"""Relative difference up to which two step times, or bytes, are no better than one another."""

PROOF_BUDGET_S = 600.0

LARGEST_SPACE = 1 << 62
"""Candidates that a cover counts without overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """No legal candidate of at most `usable_bytes` takes less than `lowest_s` seconds; `text` says it."""

    lowest_s: float
    usable_bytes: float
    text: str


def optimal_check(plan: Plan, figures: Figures, budget_s: float) -> Check:
    """The claims of the plan's objective, proven in `budget_s` seconds, or open."""
    proof = plan.certificate
    space = space_of(figures, proof)
    all_of = count(figures, proof.space, proof.fixed, proof.axes)
    until_s = monotonic() + budget_s
    claims = claims_of(plan, figures)
    found = "; ".join(claim.text for claim in claims)
    if all_of > LARGEST_SPACE:
        return _open_check(found, f"not proven: {all_of} candidates")
    covers = []
    for claim in claims:
        prover = Prover(
            figures=figures,
            space=space,
            lowest_s=claim.lowest_s,
            usable_bytes=claim.usable_bytes,
            is_over=lambda: monotonic() > until_s,
        )
        try:
            cover = prover.run()
        except OutOfTimeError:
            return _open_check(found, f"not proven within {budget_s:g} s")
        if cover.faster is not None:
            return Check(name="optimal", ok=False, found=found, expected=_beaten_text(cover, cover.faster))
        covers.append(cover)
    return Check(
        name="optimal",
        ok=all(cover.count == all_of for cover in covers),
        found=found,
        expected="; ".join(_cover_text(cover, all_of) for cover in covers),
    )


def _open_check(found: str, expected: str) -> Check:
    return Check(name="optimal", ok=False, is_open=True, found=found, expected=expected)


def space_of(figures: Figures, proof: Certificate) -> SpaceRows:
    """The space that the certificate is about."""
    return SpaceRows(
        layers=figures.limits.layers,
        is_moe=figures.model.experts is not None,
        devices=figures.cluster.devices,
        batch=figures.job.global_batch_size,
        is_core=proof.space == "core",
        fixed=proof.fixed,
        axes=proof.axes,
    )


def claims_of(plan: Plan, figures: Figures) -> list[Claim]:
    """What must be proven: of a search that ended early, no more than its bound."""
    proof, usable = plan.certificate, figures.usable_bytes
    is_whole = proof.unexplored == 0 and proof.gap <= PROVEN_GAP
    if not is_whole:
        bound_s = proof.lower_bound_s
        return [_time_claim(bound_s, usable, f"nothing below {bound_s!r} s")]
    best_s = plan.best.step_time_s
    if plan.objective != "memory":
        # A plan file holds no other part of the cluster than the one that it uses.
        here = "" if plan.objective == "time" else " on these devices"
        return [_time_claim(best_s, usable, f"{best_s!r} s is the least{here}")]
    nbytes = plan.best.peak_memory.device
    return [
        Claim(lowest_s=inf, usable_bytes=nbytes * (1 - PROVEN_GAP), text=f"{nbytes!r} B are the least"),
        _time_claim(best_s, min(nbytes * (1 + PROVEN_GAP), usable), f"of these {best_s!r} s"),
    ]


def _time_claim(seconds: float, usable: float, text: str) -> Claim:
    return Claim(lowest_s=seconds * (1 - PROVEN_GAP), usable_bytes=usable, text=text)


def _cover_text(cover: Cover, all_of: int) -> str:
    least = f"{cover.least_s!r} s" if cover.least_s < inf else "none"
    return (
        f"{cover.illegal} illegal + {cover.unfitting} too large + {cover.bounded} bounded "
        f"+ {cover.evaluated} evaluated = {all_of}; least bound {least}"
    )


def _beaten_text(cover: Cover, row: Rows) -> str:
    return f"{cover.faster_s!r} s, {cover.faster_bytes!r} B: {row_text(row)}"


def row_text(row: Rows) -> str:
    """The one strategy of `row`, all of its fields."""
    values = {name: getattr(row, name)[0] for name in FIELDS}
    return ",".join(
        f"{name}={str(bool(value)).lower() if isinstance(value, np.bool_) else value}"
        for name, value in values.items()
    )
