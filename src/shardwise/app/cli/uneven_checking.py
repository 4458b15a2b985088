"""What `check` finds of an uneven plan: its stages are priced anew, one by one, its schedule is walked."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.check import Check, Verdict, fit_check, number_check, parts_check, value_check
from shardwise.plan import UnevenFile, document_hash, read_uneven_plan, uneven_plan_document
from shardwise.search import RecordPrices, priced_again, restated


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
            fit_check("fits", found.device_bytes, found.usable_bytes),
            number_check("certificate", certificate.best_s, best.step_time_s),
            number_check("gap", certificate.gap, 1.0 - certificate.lower_bound_s / best.step_time_s, 1.0),
            *_figure_checks(plan),
        ]
    bound = f"no plan takes less than {certificate.lower_bound_s!r} s"
    checks.append(
        Check(
            name="optimal",
            ok=False,
            found=bound if plan.for_trace is None else "chosen for a trace: nothing is claimed of it alone",
            expected="the same, by another search: there is none for uneven plans",
            is_open=True,
        )
    )
    return Verdict(plan_hash=stated, checks=tuple(checks))


def _figure_checks(plan: UnevenFile) -> Iterator[Check]:
    """What follows from the times and bytes of the stages; nothing of a plan that does not fit."""
    best, batch = plan.best, plan.job.global_batch_size
    again = restated(RecordPrices(plan.model, plan.cluster, plan.job), best, batch)
    if again is None:
        return
    for name in ("mfu", "mfu_full_attention", "tokens_per_s_per_device"):
        yield number_check(name, getattr(best, name), getattr(again, name))
    for name in ("allocated", "reserved", "capacity"):
        yield number_check(f"{name} bytes", getattr(best.peak_memory, name), getattr(again.peak_memory, name))
    yield value_check("tightest rank", best.tightest_rank, again.tightest_rank)
    yield parts_check("breakdown parts", best.breakdown, again.breakdown, again.step_time_s)
    for place, (pipeline, own) in enumerate(zip(best.layout.pipelines, best.microbatches, strict=True)):
        part = own / sum(best.microbatches)
        wrong = [stage.share for stage in pipeline.stages if abs(stage.share - part) > 1e-9]
        if wrong:
            yield number_check(f"share of pipeline {place}", wrong[0], part)
