"""The verdict on a plan file: one check for each statement that must hold (`check_file`, `Verdict`).

`plan_checks` covers the plan itself: strategy, layout, schedule, times, memory. `certificate_checks` covers
its certificate: size of the space, rejection reasons, ledger, lower bound. The proof of optimality comes
last.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from shardwise.errors import ConfigError
from shardwise.inputs import read_mapping
from shardwise.plans import Certificate, Plan, read_plan
from shardwise.verification.checks import (
    REASON_EFFORT,
    REASON_QUESTION,
    REASON_SUM,
    REASON_TRACE,
    Check,
    UncheckedKey,
    fit_check,
    number_check,
    open_if_priced_as,
    parts_check,
    priced_as_check,
    same,
    unchecked,
    value_check,
)
from shardwise.verification.estimate import StrategyEstimate, estimate_strategy, mfu, tokens_per_s_per_device
from shardwise.verification.memory import ALLOCATED
from shardwise.verification.problem import Figures, active_parameters, figures_of, parameters
from shardwise.verification.proof import PROOF_BUDGET_S, optimal_check, runners_up_checks
from shardwise.verification.rules import (
    HOST_MEMORY,
    MEMORY,
    RULES,
    count,
    first_broken,
    is_candidate,
    rejected_counts,
)
from shardwise.verification.schedules import DeadlockError, Table, TableAction, table_of
from shardwise.verification.space import (
    SPACES,
    TARGET_REASON,
    TargetLimits,
    plan_limits_of,
    target_check,
    target_limits_of,
)
from shardwise.verification.stages import layout_of
from shardwise.verification.strategy_rows import Family, families, rows_of


def certificate_checks(plan: Plan, figures: Figures) -> Iterator[Check]:
    """All statements of the certificate, except the proof of optimality."""
    certificate = plan.proof
    yield _space_check(certificate, figures)
    yield from _reason_checks(
        certificate, figures, target_limits_of(plan_limits_of(plan), plan.model, plan.job)
    )
    yield _ledger_check(certificate)
    listed = 1 + len(plan.runners_up)
    yield Check(
        name="simulated",
        # A subproblem that was not finished in time counts as unexplored, even where it gave a candidate.
        ok=certificate.simulated + certificate.unexplored >= listed,
        found=str(certificate.simulated),
        expected=f"at least {listed}, the number of listed strategies",
    )
    yield number_check("best_s", certificate.best_s, plan.best.step_time_s)
    lower, best = certificate.lower_bound_s, certificate.best_s
    yield Check(
        name="lower bound",
        ok=0 < lower <= best or same(lower, best),
        found=repr(lower),
        expected=f"more than 0, and at most {best!r}",
    )
    if not certificate.priced_as:  # else the file has no gap
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
        found=f"{rejected} rejected + {certificate.cut_by_bound} pruned + {certificate.simulated} evaluated",
        expected=f"{certificate.enumerated} enumerated",
    )


MAX_PLAN_BYTES = 8 << 20
"""Size limit of a plan file, bytes; as that of the planner's own reader."""
MAX_PLAN_NODES = 1_000_000
"""Limit of the values in a plan file; as that of the planner's own reader."""
EVALUATOR = "max-plus"

UNHASHED = ("rejected", "cut_by_bound", "simulated", "search_s", "search_cpu_s")
PROVENANCE = ("assumptions", "provenance", "sources")
"""Keys that the hash omits: in the certificate, and anywhere in the cluster and the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All checks, in order; the plan holds where none fails. `plan_hash` is the one stated in the file;
    `unchecked` are the keys of the file that no check covers."""

    plan_hash: str
    checks: tuple[Check, ...]
    unchecked: tuple[UncheckedKey, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok or check.is_open for check in self.checks)


def check_file(path: str, *, proof_budget_s: float = PROOF_BUDGET_S) -> Verdict:
    """The verdict on the plan file at `path`. Where all other checks hold, the last check is the proof of
    optimality; it is left open if it takes longer than `proof_budget_s` seconds.

    Raises ConfigError where nothing can be checked: the file is not a plan, is of a newer version, was
    altered, or names a dtype that the cluster lacks.
    """
    plan = read_plan(path)
    document = read_mapping(os.fspath(path), max_bytes=MAX_PLAN_BYTES, max_nodes=MAX_PLAN_NODES)
    stated = str(document["hash"])
    first = value_check("hash", stated, hash_of(document))
    figures = figures_of(plan.model, plan.cluster, plan.job)
    checks = [first, *_count_checks(plan, document), *plan_checks(plan, figures)]
    if all(check.ok for check in checks):
        checks.append(open_if_priced_as(optimal_check(plan, figures, proof_budget_s), plan.priced_as))
    return Verdict(plan_hash=stated, checks=tuple(checks), unchecked=tuple(_unchecked(plan)))


def _unchecked(plan: Plan) -> Iterator[UncheckedKey]:
    yield from unchecked(REASON_QUESTION, "model.name", "model.config", "job", "cluster")
    if plan.objective in ("devices", "cost"):
        yield from unchecked("other parts of the cluster are not in the file", "objective")
    counts = [f"certificate.rejected.{code}" for code in (MEMORY, HOST_MEMORY)]
    yield from unchecked(REASON_SUM, *counts, "certificate.cut_by_bound", "certificate.simulated")
    yield from unchecked(REASON_EFFORT, "certificate.search_s", "certificate.search_cpu_s")
    if plan.for_trace is not None:
        yield from unchecked(REASON_TRACE, "for_trace")


def plan_checks(plan: Plan, figures: Figures) -> Iterator[Check]:
    """Checks of the plan itself. Checks that need an earlier one that failed are omitted."""
    strategy = _strategy_check(plan, figures)
    yield strategy
    if strategy.ok:
        ((_, family),) = families(rows_of([plan.best.strategy]), plan.job.global_batch_size)
        yield _layout_check(plan, family)
        yield from _schedule_checks(plan, family)
        yield from _best_checks(plan, figures)
    yield from runners_up_checks(plan, figures)
    if plan.target is not None:
        yield target_check(plan)
    yield from certificate_checks(plan, figures)
    yield from priced_as_check(plan.cluster, plan.priced_as, is_for_trace=plan.for_trace is not None)


def hash_of(document: Mapping[str, object]) -> str:
    """The hash of the content: JSON with sorted keys, without search effort and provenance
    (docs/reference/formats.md)."""
    body = {key: value for key, value in document.items() if key != "hash"}
    certificate = body.get("certificate")
    if isinstance(certificate, Mapping):
        body["certificate"] = {key: value for key, value in certificate.items() if key not in UNHASHED}
    for key in ("cluster", "job"):
        body[key] = _without(body.get(key), PROVENANCE)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def _without(value: object, keys: tuple[str, ...]) -> object:
    if isinstance(value, Mapping):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, list) else value


def _count_checks(plan: Plan, document: Mapping[str, object]) -> Iterator[Check]:
    """The parameter counts that the file states."""
    model = document["model"]
    stated: Mapping[str, object] = model if isinstance(model, Mapping) else {}
    yield value_check("parameters", stated.get("parameters"), parameters(plan.model))
    yield value_check("active parameters", stated.get("active_parameters"), active_parameters(plan.model))


def _strategy_check(plan: Plan, figures: Figures) -> Check:
    strategy, proof = plan.best.strategy, plan.proof
    space = proof.space
    found, expected = "a legal candidate", f"a legal candidate of the space {space!r}"
    if not is_candidate(figures, strategy, space, proof.fixed, proof.axes):
        found = "not a candidate of the space"
    elif broken := str(first_broken(rows_of([strategy]), figures)[0]):
        found = f"breaks {broken}"
    return Check(name="strategy", ok=found == "a legal candidate", found=found, expected=expected)


def _layout_check(plan: Plan, family: Family) -> Check:
    expected = layout_of(
        family, plan.model.layers, plan.cluster, plan.job.global_batch_size, plan.best.step_time_s
    )
    found = plan.best.layout
    if found == expected:
        text = f"{family.pp} stages, {family.stages} chunks"
        return Check(name="layout", ok=True, found=text, expected="the layout of the strategy")
    pairs = [
        (f"stage {number}: {asdict(stage)}", f"{asdict(should)}")
        for pipeline in found.pipelines
        for number, (stage, should) in enumerate(
            zip(pipeline.stages, expected.pipelines[0].stages, strict=False)
        )
        if stage != should
    ]
    shape = (
        f"{len(found.pipelines)} pipelines, {[len(pipeline.stages) for pipeline in found.pipelines]} stages"
    )
    has, should = pairs[0] if pairs else (shape, f"1 pipeline of {family.pp} stages")
    return Check(name="layout", ok=False, found=has, expected=should)


def _schedule_checks(plan: Plan, family: Family) -> Iterator[Check]:
    schedule = plan.schedules[0]
    ranks = tuple(family.rank_of(stage) for stage in range(family.stages))
    yield value_check("schedule", schedule.name, family.schedule)
    yield value_check("microbatches", schedule.microbatches, family.microbatches)
    yield value_check("stages on ranks", _listed(schedule.stage_rank), _listed(ranks))
    found, expected = table_in(plan), table_of(family)
    if found == expected:
        text = f"{sum(map(len, found))} actions on {len(found)} ranks"
        yield Check(name="schedule actions", ok=True, found=text, expected=f"the table of {family.schedule}")
    else:
        has, should = _first_difference(found, expected)
        yield Check(name="schedule actions", ok=False, found=has, expected=should)


def _listed(ranks: tuple[int, ...]) -> str:
    return ",".join(map(str, ranks))


def _first_difference(found: Table, expected: Table) -> tuple[str, str]:
    """The first difference of two tables, as found in each."""
    for rank, (row, own) in enumerate(zip(found, expected, strict=False)):
        for place, (action, should) in enumerate(zip(row, own, strict=False)):
            if action != should:
                return f"rank {rank}, action {place}: {_action_text(action)}", _action_text(should)
        if len(row) != len(own):
            return f"{len(row)} actions on rank {rank}", f"{len(own)} actions"
    return f"{len(found)} ranks", f"{len(expected)} ranks"


def _action_text(action: TableAction) -> str:
    stage, kind, microbatch = action
    return f"{stage}{kind}{microbatch}"


def table_in(plan: Plan) -> Table:
    """The actions that the plan file lists."""
    return tuple(
        tuple((action.stage, str(action.kind), action.microbatch) for action in row)
        for row in plan.schedules[0].ranks
    )


def _best_checks(plan: Plan, figures: Figures) -> Iterator[Check]:
    """Times and bytes of the best strategy, with the actions of the file."""
    best = plan.best
    try:
        own = estimate_strategy(figures, best.strategy, table_in(plan))
    except (DeadlockError, LookupError):
        yield Check(
            name="step time",
            ok=False,
            found="a schedule that cannot run to its end",
            expected=repr(estimate_strategy(figures, best.strategy).step_time_s),
        )
        return
    step_s = own.step_time_s
    yield number_check("step time", best.step_time_s, step_s)
    yield parts_check("breakdown", best.breakdown, own.breakdown, step_s)
    yield parts_check("memory", best.memory, own.memory, own.device_bytes)
    yield from _peak_checks(plan, figures, own)
    profile = figures.profile
    low, high = profile.warm_band if figures.efficiency.is_calibrated else profile.cold_band
    for name, found, expected in (
        ("band low", best.band_s[0], low * step_s),
        ("band high", best.band_s[1], high * step_s),
        ("tokens per second", best.tokens_per_s_per_device or 0.0, tokens_per_s_per_device(figures, step_s)),
        ("mfu", best.mfu or 0.0, mfu(figures, step_s)),
        ("mfu full attention", best.mfu_full_attention or 0.0, mfu(figures, step_s, full_attention=True)),
    ):
        yield number_check(name, found, expected)
    yield value_check("evaluator", best.evaluator, EVALUATOR)


def _peak_checks(plan: Plan, figures: Figures, own: StrategyEstimate) -> Iterator[Check]:
    """Peak memory and whether it fits, on the device and on the host."""
    peak = plan.best.peak_memory
    allocated = sum(own.memory[name] for name in ALLOCATED)
    for name, found, expected in (
        ("allocated", peak.allocated, allocated),
        ("reserved", peak.reserved, allocated + own.memory["fragmentation"]),
        ("device", peak.device, own.device_bytes),
        ("capacity", peak.capacity, figures.capacity_bytes),
    ):
        yield number_check(f"{name} bytes", found, expected)
    yield value_check("tightest rank", plan.best.tightest_rank, own.tightest_rank)
    yield fit_check("fits", own.device_bytes, figures.usable_bytes)
    yield fit_check("fits on the host", own.host_bytes, figures.host_capacity_bytes)
