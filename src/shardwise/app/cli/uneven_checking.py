"""What `check` finds of an uneven plan: its stages are priced anew, one by one, its schedule is walked."""

from __future__ import annotations

from shardwise.check import Check, Verdict, number_check, value_check
from shardwise.plan import document_hash, read_uneven_plan, uneven_plan_document
from shardwise.search import priced_again


def check_uneven_file(path: str) -> Verdict:
    """The verdict on the uneven plan at `path`, by a program that reads stages and their order from the file
    and shares the prices of single stages with the search (docs/mixed.md). That no plan is better is not
    proven again: it stays open.

    Raises ConfigError for a file that is no such plan or was altered.
    """
    plan = read_uneven_plan(path)
    best, certificate = plan.best, plan.certificate
    document = uneven_plan_document(plan)
    stated = str(document["hash"])
    found = priced_again(plan.model, plan.cluster, plan.job, best)
    faults = "; ".join(found.faults[:3]) or "devices, layers and microbatches add up"
    checks = [
        value_check("hash", stated, document_hash(document)),
        Check(
            name="layout", ok=not found.faults, found=faults, expected="a plan of the space of uneven plans"
        ),
    ]
    if not found.faults:
        checks += [
            *(
                number_check(f"pipeline {place}", time_s, again_s)
                for place, (time_s, again_s) in enumerate(zip(best.pipeline_s, found.pipeline_s, strict=True))
                if time_s != again_s
            ),
            number_check("step time", best.step_time_s, max(found.pipeline_s)),
            number_check("breakdown", sum(best.breakdown.values()), best.step_time_s),
            number_check("device bytes", best.peak_memory.device, found.device_bytes),
            Check(
                name="fits",
                ok=found.device_bytes <= found.usable_bytes,
                found=f"{found.device_bytes!r} B",
                expected=f"at most {found.usable_bytes!r} B",
            ),
            number_check("certificate", certificate.best_s, best.step_time_s),
        ]
    checks.append(
        Check(
            name="optimal",
            ok=False,
            found=f"no plan takes less than {certificate.lower_bound_s!r} s",
            expected="the same, by another search: there is none for uneven plans",
            is_open=True,
        )
    )
    return Verdict(plan_hash=stated, checks=tuple(checks))
