"""The command `check`: verifies a plan file and prints one line per check.

Plans of uniform strategies go to the independent checker (`shardwise.verification`). `check_graph_plan`
estimates the layout of a graph plan again from its names, with the costs of the search. `check_uneven_plan`
estimates an uneven plan stage by stage and simulates its schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import combinations, groupby
from math import isqrt

from shardwise.app.cli.output import Line, Output
from shardwise.cluster import Cluster, pools_of
from shardwise.cost import Training
from shardwise.graph import StagedLayout
from shardwise.plans import MixedFigures, Plan, document_hash, plan_document, read_plan
from shardwise.search import RecordCostModel, estimate_of, predict_record, predicted_result
from shardwise.verification import (
    PROOF_BUDGET_S,
    REASON_EFFORT,
    REASON_QUESTION,
    REASON_SUM,
    REASON_TRACE,
    Check,
    UncheckedKey,
    Verdict,
    check_file,
    fit_check,
    number_check,
    open_if_priced_as,
    parts_check,
    priced_as_check,
    unchecked,
    value_check,
)

# Graph plans


def check_graph_plan(plan: Plan) -> Verdict:
    """The verdict on the plan of an operator graph, by the estimate of its layout from the names in the file
    (docs/concepts/pareto-search.md). Optimality is not proven again: that check stays open.
    """
    training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
    estimate = estimate_of(plan.graph, plan.cluster, training, plan.operators)
    document = plan_document(plan)
    stated = str(document["hash"])
    capacity = min(device.memory_bytes for device in plan.cluster.classes.values())
    limit = capacity * (1.0 - plan.job.memory_margin)
    layout = f"{len(plan.operators.blocks)} blocks on {plan.mesh.name}"
    if isinstance(plan.operators, StagedLayout):
        layout = f"{layout} in {len(plan.operators.stages)} stages"
    return Verdict(
        plan_hash=stated,
        checks=(
            value_check("hash", stated, document_hash(document)),
            Check(name="layout", ok=True, found=layout, expected="sharding rules of the operators"),
            number_check("step time", plan.step_time_s, estimate.time_s),
            parts_check("breakdown", plan.breakdown, estimate.seconds, estimate.time_s),
            number_check("device bytes", plan.best.peak_memory.device, estimate.memory_bytes),
            number_check("bytes at once", plan.best.peak_memory.allocated, estimate.at_once_bytes),
            parts_check("memory", plan.memory, estimate.nbytes, estimate.memory_bytes),
            fit_check("fits", estimate.memory_bytes, limit),
            *priced_as_check(plan.cluster, plan.priced_as, is_for_trace=False),
            open_if_priced_as(
                Check(
                    name="optimal",
                    ok=False,
                    found=f"matches all layouts within {plan.epsilon!r}",
                    expected="the same by another search; none exists for graph layouts",
                    is_open=True,
                ),
                plan.priced_as,
            ),
        ),
        unchecked=(
            *unchecked(REASON_QUESTION, "graph", "job", "cluster"),
            *unchecked("no other search bounds graph layouts", "epsilon"),
            *unchecked(
                "the file has only the devices that are used", *(["idle"] if plan.idle.devices else [])
            ),
        ),
    )


# Uneven plans

EVALUATOR = "max-plus, pipeline by pipeline"


def check_uneven_plan(plan: Plan) -> Verdict:
    """The verdict on an uneven plan: stages and their order are read from the file; only the costs
    of single stages share code with the search (docs/concepts/mixed-clusters.md). Optimality is not proven
    again: that check stays open.
    """
    best, certificate = plan.best, plan.proof
    document = plan_document(plan)
    stated = str(document["hash"])
    found = predict_record(plan.model, plan.cluster, plan.job, best)
    faults = "; ".join(found.faults[:3]) or "devices, layers and micro-batches add up"
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
        found=bound if plan.for_trace is None else "chosen for a trace; no claim about the plan alone",
        expected="the same by another search; none exists for uneven plans",
        is_open=True,
    )
    checks += priced_as_check(plan.cluster, plan.priced_as, is_for_trace=plan.for_trace is not None)
    checks.append(open_if_priced_as(optimal, plan.priced_as))
    return Verdict(plan_hash=stated, checks=tuple(checks), unchecked=tuple(_unchecked(plan)))


def _unchecked(plan: Plan) -> Iterator[UncheckedKey]:
    yield from unchecked(REASON_QUESTION, "model.name", "model.config", "job", "cluster")
    uniform = "uniform strategies are not searched again"
    yield from unchecked(uniform, "mixed")
    yield from unchecked("no other search bounds uneven plans", "certificate.lower_bound_s")
    yield from unchecked(
        REASON_SUM, "certificate.enumerated", "certificate.unexplored", "certificate.cut_by_bound",
        "certificate.simulated",
    )  # fmt: skip
    yield from unchecked(REASON_EFFORT, "certificate.search_s", "certificate.search_cpu_s")
    if plan.for_trace is not None:
        yield from unchecked(REASON_TRACE, "for_trace")


def _figure_checks(plan: Plan) -> Iterator[Check]:
    """Checks of the figures that follow from stage times and bytes; none for a plan that does not fit."""
    best, batch = plan.best, plan.job.global_batch_size
    predicted = predicted_result(RecordCostModel(plan.model, plan.cluster, plan.job), best, batch)
    if predicted is None:
        return
    for place, edge in enumerate(("low", "high")):
        yield number_check(f"band {edge}", best.band_s[place], predicted.band_s[place])
    for name in ("mfu", "mfu_full_attention", "tokens_per_s_per_device"):
        yield number_check(name, getattr(best, name) or 0.0, getattr(predicted, name) or 0.0)
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


def _compared_checks(plan: Plan) -> Iterator[Check]:
    """Uniform strategies are not faster than the plan, unless it was chosen for a trace; one pool alone is
    not faster than the best union of pools."""
    best_s = plan.best.step_time_s
    mixed = plan.mixed or MixedFigures(
        uniform_step_time_s=None, fastest_class_step_time_s=None, fastest_class=None, idle=()
    )
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
        expected=f"at least {least_s!r} s; on one of {', '.join(names)} no less than on any union",
    )


def _certificate_checks(plan: Plan) -> Iterator[Check]:
    """Checks of the certificate, except that the lower bound is valid."""
    certificate, step_s = plan.proof, plan.best.step_time_s
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
        expected="at least 1 (the plan itself)",
    )
    yield number_check("certificate", certificate.best_s, step_s)
    yield Check(
        name="lower bound",
        ok=0.0 < lower_s <= step_s * (1.0 + 1e-9),
        found=repr(lower_s),
        expected=f"more than 0, and at most {step_s!r}",
    )
    if not certificate.priced_as:  # otherwise the file has no gap
        yield number_check("gap", certificate.gap, 1.0 - lower_s / step_s, 1.0)


def _candidates(cluster: Cluster, batch: int) -> int:
    """The number of candidates of an uneven search (docs/concepts/mixed-clusters.md): per set of pools and
    micro-batch size, every number of pipelines, and on several pools every number of identical pipelines from
    two on."""
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


# The command

VERSION = 1
DISAGREES = 4
"""Exit code where a check fails."""

_SHOWN = 180
"""Most characters of a found or expected value in the terminal; JSON has all."""


def checked(path: str, *, is_json: bool, proof_budget_s: float = PROOF_BUDGET_S) -> Output:
    """The verdict on the plan file at `path`. ConfigError for a file that is no plan or was altered."""
    verdict = verdict_on(path, proof_budget_s)
    code = 0 if verdict.ok else DISAGREES
    if is_json:
        return Output(document=_document(verdict), notes=_notes(verdict), code=code)
    width = max(len(check.name) for check in verdict.checks)
    lines = [_line(check, width) for check in verdict.checks]
    return Output(lines=[*lines, *_unchecked_lines(verdict, width)], notes=_notes(verdict), code=code)


def verdict_on(path: str, proof_budget_s: float) -> Verdict:
    """The verdict of the checker for the kind of plan in the file."""
    plan = read_plan(path)
    if plan.kind == "graph":
        return check_graph_plan(plan)
    if plan.kind == "uneven":
        return check_uneven_plan(plan)
    return check_file(path, proof_budget_s=proof_budget_s)


def _line(check: Check, width: int) -> Line:
    word, style = ("ok   ", "good") if check.ok else ("open ", "warn") if check.is_open else ("wrong", "bad")
    name = (f"  {check.name:<{width}}  ", "label")
    return (word, style), name, (f"{_short(check.found)}; expected {_short(check.expected)}", "")


def _unchecked_lines(verdict: Verdict, width: int) -> Iterator[Line]:
    """A line per reason, with the keys of the file that are not checked for it."""
    for why, keys in groupby(verdict.unchecked, key=lambda one: one.why):
        listed = ", ".join(one.key for one in keys)
        yield ("note ", "label"), (f"  {'not checked':<{width}}  ", "label"), (f"{listed}: {why}", "")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _notes(verdict: Verdict) -> list[str]:
    wrong = [check.name for check in verdict.checks if not check.ok and not check.is_open]
    undecided = [check.name for check in verdict.checks if check.is_open]
    if not wrong:
        return [f"shardwise: not proven: {name}" for name in undecided]
    return [f"shardwise: {len(wrong)} of {len(verdict.checks)} checks fail: {', '.join(wrong)}"]


def _document(verdict: Verdict) -> dict[str, object]:
    return {
        "schema": "shardwise.check",
        "version": VERSION,
        "plan_hash": verdict.plan_hash,
        "ok": verdict.ok,
        "checks": [asdict(check) for check in verdict.checks],
        "not_judged": [asdict(one) for one in verdict.unchecked],
    }
