"""The certificate of a plan: the size of the space, the reasons, the ledger, the bound."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.check.beyond import TARGET_REASON, TargetLimits, plan_limits_of, target_limits_of
from shardwise.check.count import SPACES
from shardwise.check.figures import Figures
from shardwise.check.finding import Check, number_check, same, value_check
from shardwise.check.rejected import rejected_counts
from shardwise.check.rules import HOST_MEMORY, MEMORY, RULES, count
from shardwise.errors import ConfigError
from shardwise.plan import Certificate, Plan


def certificate_checks(plan: Plan, figures: Figures) -> Iterator[Check]:
    """Everything that the certificate says, but for the proof of the bound itself."""
    certificate = plan.certificate
    yield _space_check(certificate, figures)
    yield from _reason_checks(
        certificate, figures, target_limits_of(plan_limits_of(plan), plan.model, plan.job)
    )
    yield _ledger_check(certificate)
    listed = 1 + len(plan.runners_up)
    yield Check(
        name="simulated",
        # A block that time did not suffice for counts as unexplored, whatever was found in it.
        ok=certificate.simulated + certificate.unexplored >= listed,
        found=str(certificate.simulated),
        expected=f"at least {listed}, the strategies listed",
    )
    yield number_check("best_s", certificate.best_s, plan.best.step_time_s)
    lower, best = certificate.lower_bound_s, certificate.best_s
    yield Check(
        name="lower bound",
        ok=0 < lower <= best or same(lower, best),
        found=repr(lower),
        expected=f"more than 0, and at most {best!r}",
    )
    if not certificate.priced_as:  # else the file has none
        yield number_check("gap", certificate.gap, (best - lower) / best if best else 0.0, scale=1.0)


def _space_check(certificate: Certificate, figures: Figures) -> Check:
    name, all_of = "space", certificate.enumerated + certificate.unexplored
    found = f"{all_of} candidates of {certificate.space!r}"
    try:
        number = count(figures, certificate.space, certificate.fixed, certificate.axes)
    except ConfigError as error:
        return Check(name=name, ok=False, found=found, expected=str(error))
    return Check(name=name, ok=all_of == number, found=found, expected=f"{number} candidates")


def _reason_checks(
    certificate: Certificate, figures: Figures, target_limits: TargetLimits
) -> Iterator[Check]:
    known = (*RULES, TARGET_REASON, MEMORY, HOST_MEMORY)
    unknown = [code for code in certificate.rejected if code not in known]
    if unknown:
        yield Check(name="reasons", ok=False, found=", ".join(unknown), expected=", ".join(known))
    if certificate.space not in SPACES:
        return
    own = rejected_counts(figures, certificate.space, certificate.fixed, certificate.axes, target_limits)
    for code in (*RULES, TARGET_REASON):
        claimed, expected = certificate.rejected.get(code, 0), own.get(code, 0)
        if claimed or expected:
            yield value_check(f"rejected by {code}", claimed, expected)


def _ledger_check(certificate: Certificate) -> Check:
    rejected = sum(certificate.rejected.values())
    total = rejected + certificate.cut_by_bound + certificate.simulated
    return Check(
        name="ledger",
        ok=total == certificate.enumerated,
        found=f"{rejected} rejected + {certificate.cut_by_bound} cut + {certificate.simulated} simulated",
        expected=f"{certificate.enumerated} enumerated",
    )
