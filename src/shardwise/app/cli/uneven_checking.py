"""What `check` finds of an uneven plan: its stages are priced anew, one by one, its schedule is walked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import isqrt

from shardwise.check import (
    REASON_EFFORT,
    REASON_QUESTION,
    REASON_SUM,
    REASON_TRACE,
    Check,
    UncheckedKey,
    Verdict,
    fit_check,
    number_check,
    open_if_priced_as,
    parts_check,
    priced_as_check,
    unchecked,
    value_check,
)
from shardwise.cluster import Cluster, pools_of
from shardwise.plan import UnevenFile, document_hash, read_uneven_plan, uneven_plan_document
from shardwise.search import RecordCostModel, predict_record, predicted_result

EVALUATOR = "max-plus, pipeline by pipeline"


def check_uneven_file(path: str) -> Verdict:
    """The verdict on the uneven plan at `path`, by a program that reads stages and their order from the file
    and shares the prices of single stages with the search (docs/concepts/mixed-clusters.md). That no plan is
    better is not proven again: it stays open.

    Raises ConfigError for a file that is no such plan or was altered.
    """
    plan = read_uneven_plan(path)
    best, certificate = plan.best, plan.certificate
    document = uneven_plan_document(plan)
    stated = str(document["hash"])
    found = predict_record(plan.model, plan.cluster, plan.job, best)
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
                number_check(f"pipeline {place}", time_s, predicted_s)
                for place, (time_s, predicted_s) in enumerate(
                    zip(best.pipeline_s, found.pipeline_s, strict=True)
                )
                if time_s != predicted_s
            ),
            number_check("step time", best.step_time_s, max(found.pipeline_s)),
            number_check("breakdown", sum(best.breakdown.values()), best.step_time_s),
            number_check("device bytes", best.peak_memory.device, found.device_bytes),
            fit_check("fits", found.device_bytes, found.usable_bytes),
            *_figure_checks(plan),
        ]
    checks += [*_compared_checks(plan), *_certificate_checks(plan)]
    bound = f"no plan takes less than {certificate.lower_bound_s!r} s"
    optimal = Check(
        name="optimal",
        ok=False,
        found=bound if plan.for_trace is None else "chosen for a trace: nothing is claimed of it alone",
        expected="the same, by another search: there is none for uneven plans",
        is_open=True,
    )
    checks += priced_as_check(plan.cluster, plan.priced_as, is_for_trace=plan.for_trace is not None)
    checks.append(open_if_priced_as(optimal, plan.priced_as))
    return Verdict(plan_hash=stated, checks=tuple(checks), unchecked=tuple(_unchecked(plan)))


def _unchecked(plan: UnevenFile) -> Iterator[UncheckedKey]:
    yield from unchecked(REASON_QUESTION, "model.name", "model.config", "job", "cluster")
    uniform = "uniform strategies are not searched again"
    yield from unchecked(uniform, "compared")
    yield from unchecked("no other search bounds uneven plans", "certificate.lower_bound_s")
    yield from unchecked(
        REASON_SUM, "certificate.enumerated", "certificate.unexplored", "certificate.cut_by_bound",
        "certificate.simulated",
    )  # fmt: skip
    yield from unchecked(REASON_EFFORT, "certificate.search_s", "certificate.search_cpu_s")
    if plan.for_trace is not None:
        yield from unchecked(REASON_TRACE, "for_trace")


def _figure_checks(plan: UnevenFile) -> Iterator[Check]:
    """What follows from the times and bytes of the stages; nothing of a plan that does not fit."""
    best, batch = plan.best, plan.job.global_batch_size
    predicted = predicted_result(RecordCostModel(plan.model, plan.cluster, plan.job), best, batch)
    if predicted is None:
        return
    for place, edge in enumerate(("low", "high")):
        yield number_check(f"band {edge}", best.band_s[place], predicted.band_s[place])
    for name in ("mfu", "mfu_full_attention", "tokens_per_s_per_device"):
        yield number_check(name, getattr(best, name), getattr(predicted, name))
    for name in ("allocated", "reserved", "capacity"):
        yield number_check(
            f"{name} bytes", getattr(best.peak_memory, name), getattr(predicted.peak_memory, name)
        )
    yield value_check("tightest rank", best.tightest_rank, predicted.tightest_rank)
    yield value_check("evaluator", best.evaluator, EVALUATOR)
    yield parts_check("breakdown parts", best.breakdown, predicted.breakdown, predicted.step_time_s)
    for place, (pipeline, own) in enumerate(zip(best.layout.pipelines, best.microbatches, strict=True)):
        part = own / sum(best.microbatches)
        wrong = [stage.share for stage in pipeline.stages if abs(stage.share - part) > 1e-9]
        if wrong:
            yield number_check(f"share of pipeline {place}", wrong[0], part)


def _compared_checks(plan: UnevenFile) -> Iterator[Check]:
    """What must hold of the figures of uniform strategies: none is faster than the plan, but where that was
    chosen for a trace, and one pool alone is no faster than the fastest union."""
    mixed, best_s = plan.mixed, plan.best.step_time_s
    uniform_s, alone_s, alone = (
        mixed.uniform_step_time_s,
        mixed.fastest_class_step_time_s,
        mixed.fastest_class,
    )
    names = [pool.name for pool in pools_of(plan.cluster)]
    least_s = 0.0 if plan.for_trace is not None else best_s
    ok = (uniform_s is None or uniform_s >= least_s) and (alone_s is None) == (alone is None)
    if alone_s is not None:
        ok &= alone in names and uniform_s is not None and alone_s >= uniform_s
    yield Check(
        name="compared",
        ok=ok,
        found=f"uniform {uniform_s!r} s, {alone} alone {alone_s!r} s",
        expected=f"at least {least_s!r} s, on one of {', '.join(names)} no less than on any union",
    )


def _certificate_checks(plan: UnevenFile) -> Iterator[Check]:
    """Everything that the certificate says, but for the bound itself."""
    certificate, step_s = plan.certificate, plan.best.step_time_s
    lower_s = certificate.lower_bound_s
    yield value_check("space", certificate.space, "uneven")
    restrictions = {**certificate.fixed, **certificate.axes, **certificate.rejected}
    yield value_check("fixed, axes, rejected", restrictions, {})
    expected = 1 if plan.for_trace is not None else _candidates(plan.cluster, plan.job.global_batch_size)
    yield value_check("candidates", certificate.enumerated + certificate.unexplored, expected)
    yield Check(
        name="simulated",
        ok=certificate.simulated + certificate.unexplored >= 1,
        found=str(certificate.simulated),
        expected="at least 1, the plan itself",
    )
    yield number_check("certificate", certificate.best_s, step_s)
    yield Check(
        name="lower bound",
        ok=0.0 < lower_s <= step_s * (1.0 + 1e-9),
        found=repr(lower_s),
        expected=f"more than 0, and at most {step_s!r}",
    )
    if not certificate.priced_as:  # else the file has no gap
        yield number_check("gap", certificate.gap, 1.0 - lower_s / step_s, 1.0)


def _candidates(cluster: Cluster, batch: int) -> int:
    """The candidates of an uneven search: of each set of pools and micro-batch size every number of
    pipelines, and on several pools every number of alike ones, from two on
    (docs/concepts/mixed-clusters.md)."""
    devices = [pool.devices for pool in pools_of(cluster)]
    small = [size for size in range(1, isqrt(batch) + 1) if batch % size == 0]
    divisors = {*small, *(batch // size for size in small)}
    total = 0
    for count in range(1, len(devices) + 1):
        for some in combinations(devices, count):
            for size in divisors:
                most = min(sum(some), batch // size)
                total += most + (most - 1 if count > 1 else 0)
    return total
