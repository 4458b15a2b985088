"""Checks of a plan of one strategy: every figure is re-derived by the checker's own code.

`uniform_checks` covers the plan itself: strategy, layout, schedule, times, memory; and its certificate: size
of the space, rejection reasons, ledger, lower bound. The proof of optimality comes last, where all others
hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from shardwise_verify.arithmetic import ledger_check, outcome_checks
from shardwise_verify.checks import Check, fit_check, number_check, parts_check, value_check
from shardwise_verify.estimate import StrategyEstimate, estimate_strategy, mfu, tokens_per_s_per_device
from shardwise_verify.memory import ALLOCATED
from shardwise_verify.problem import Figures, figures_of
from shardwise_verify.proof import runners_up_checks
from shardwise_verify.reading import InputError
from shardwise_verify.records import (
    CertificateRecord,
    LayersRecord,
    PlanRecord,
    QuestionRecord,
    ScheduleRecord,
    StrategyRecord,
)
from shardwise_verify.rules import (
    HOST_MEMORY,
    MEMORY,
    RULES,
    count,
    fault_of,
    first_broken,
    is_candidate,
    rejected_counts,
    wider_of,
)
from shardwise_verify.schedules import DeadlockError, Table, TableAction, table_in, table_of
from shardwise_verify.space import SPACES
from shardwise_verify.stages import layout_of
from shardwise_verify.strategy_rows import Family, families, rows_of
from shardwise_verify.targets import (
    TARGET_REASON,
    TargetLimits,
    capabilities_of,
    is_known,
    limits_of,
    target_check,
    target_limits_of,
    with_options,
)

EVALUATOR = "max-plus"


def uniform_checks(plan: PlanRecord, figures: Figures) -> Iterator[Check]:
    """All checks of the plan but the proof of optimality. Checks that need an earlier one that failed are
    omitted."""
    strategy = _strategy_check(plan, figures)
    yield strategy
    if strategy.ok:
        ((_, family),) = families(rows_of([plan.strategy]), plan.job.global_batch_size)
        yield _layout_check(plan, figures.model, family)
        yield from _best_checks(plan, figures, family)
    yield from runners_up_checks(plan, figures)
    capabilities = capabilities_of(plan.target)
    if capabilities is not None:
        yield target_check(plan, figures.model, capabilities)
    if plan.certificate is not None:
        yield _question_check(plan.question, plan.certificate)
        yield _space_check(plan.certificate, figures)
        limits = target_limits_of(limits_of(plan), figures.model, plan.job)
        if is_known(plan.target):
            yield from _reason_checks(plan.certificate, figures, limits)
        yield from outcome_checks(plan, plan.certificate)
        for other in plan.certificate.other_options:
            with_them = with_options(plan, other)
            own = figures_of(figures.model, plan.cluster, with_them.job)
            name = " ".join(f"{key} {value}" for key, value in other.options.items())
            limits = target_limits_of(limits_of(with_them), own.model, with_them.job)
            checks = (_question_check(plan.question, other), _space_check(other, own),
                      *_reason_checks(other, own, limits), ledger_check(other))  # fmt: skip
            yield from (replace(check, name=f"{check.name} with {name}") for check in checks)


def _question_check(question: QuestionRecord, certificate: CertificateRecord) -> Check:
    """Whether the certificate is about the space of the question, or a part of it: targets restrict it."""
    expected = f"{question.space}, {dict(question.fixed)}, {dict(question.axes)}"
    fixed = certificate.fixed
    wider = [name for name, value in question.fixed.items() if fixed.get(name, certificate) != value]
    for name, values in question.axes.items():
        own = (fixed[name],) if name in fixed else certificate.axes.get(name, ())
        wider += [name] if not own or any(value not in values for value in own) else []
    ok = certificate.space == question.space and not wider
    found = f"{certificate.space}, wider in {', '.join(wider)}" if wider else certificate.space
    return Check(name="question", ok=ok, found=found, expected=f"at most {expected}")


def _space_check(certificate: CertificateRecord, figures: Figures) -> Check:
    name, all_of = "space", certificate.enumerated + certificate.unexplored
    found = f"{all_of} candidates of {certificate.space!r}"
    try:
        restrictions = certificate.space, certificate.fixed, certificate.axes
        number = count(figures, *restrictions, **wider_of(certificate))
    except InputError as error:
        return Check(name=name, ok=False, found=found, expected=str(error))
    return Check(name=name, ok=all_of == number, found=found, expected=f"{number} candidates")


def _reason_checks(
    certificate: CertificateRecord, figures: Figures, target_limits: TargetLimits
) -> Iterator[Check]:
    known = (*RULES, TARGET_REASON, MEMORY, HOST_MEMORY)
    unknown = [code for code in certificate.rejected if code not in known]
    if unknown:
        yield Check(name="reasons", ok=False, found=", ".join(unknown), expected=", ".join(known))
    if certificate.space not in SPACES:
        return
    restrictions = certificate.space, certificate.fixed, certificate.axes
    own = rejected_counts(figures, *restrictions, target_limits, **wider_of(certificate))
    for code in (*RULES, TARGET_REASON):
        claimed, expected = certificate.rejected.get(code, 0), own.get(code, 0)
        if claimed or expected:
            yield value_check(f"rejected by {code}", claimed, expected)


def _strategy_check(plan: PlanRecord, figures: Figures) -> Check:
    """Whether the strategy is legal, and a candidate of the space of the certificate if there is one."""
    strategy, proof = plan.strategy, plan.certificate
    legal = "a legal strategy" if proof is None else f"a legal candidate of the space {proof.space!r}"
    found = legal
    if proof is None:
        fault = fault_of(figures, strategy)
        found = f"illegal: {fault}" if fault else legal
    elif not any(_has(figures, one, strategy) for one in (proof, *_certificates_of(plan, proof))):
        found = "not a candidate of the space"
    if found == legal and (broken := str(first_broken(rows_of([strategy]), figures)[0])):
        found = f"breaks {broken}"
    return Check(name="strategy", ok=found == legal, found=found, expected=legal)


def _has(figures: Figures, proof: CertificateRecord, strategy: StrategyRecord) -> bool:
    """Whether the strategy is a candidate of the space of a certificate."""
    restrictions = proof.space, proof.fixed, proof.axes
    return is_candidate(figures, strategy, *restrictions, **wider_of(proof))


def _certificates_of(plan: PlanRecord, proof: CertificateRecord) -> Iterator[CertificateRecord]:
    """Certificates with other options whose space a recommended strategy may be of: those with the options of
    the job, and those about options that do not act on it."""
    chosen, acting = plan.job.profile.options, plan.strategy.options
    for other in proof.other_options:
        is_chosen = all(chosen.get(name) == value for name, value in other.options.items())
        if is_chosen or not set(other.options) & set(acting):
            yield other


def _layout_check(plan: PlanRecord, model: LayersRecord, family: Family) -> Check:
    expected = layout_of(
        family, len(model.layer_kinds), plan.cluster, plan.job.global_batch_size, plan.best.step_time_s
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


def _schedule_checks(schedule: ScheduleRecord, found: Table, family: Family) -> Iterator[Check]:
    ranks = tuple(family.rank_of(stage) for stage in range(family.stages))
    yield value_check("schedule", schedule.name, family.schedule)
    yield value_check("microbatches", schedule.microbatches, family.microbatches)
    yield value_check("stages on ranks", _listed(schedule.stage_rank), _listed(ranks))
    expected = table_of(family)
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


def _best_checks(plan: PlanRecord, figures: Figures, family: Family) -> Iterator[Check]:
    """The schedule; times and bytes of the best strategy, with the actions of the file."""
    best, schedule = plan.best, plan.schedule
    if schedule is None:
        raise InputError("is missing", key="schedule", allowed="the table of actions")
    table = table_in(schedule.ranks)
    yield from _schedule_checks(schedule, table, family)
    try:
        own = estimate_strategy(figures, plan.strategy, table)
    except (DeadlockError, LookupError):
        yield Check(
            name="step time",
            ok=False,
            found="a schedule that cannot run to its end",
            expected=repr(estimate_strategy(figures, plan.strategy).step_time_s),
        )
        return
    step_s = own.step_time_s
    yield number_check("step time", best.step_time_s, step_s)
    yield parts_check("breakdown", best.breakdown, own.breakdown, step_s)
    yield parts_check("memory", best.memory_parts, own.memory, own.device_bytes)
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


def _peak_checks(plan: PlanRecord, figures: Figures, own: StrategyEstimate) -> Iterator[Check]:
    """Peak memory and whether it fits, on the device and on the host."""
    peak = plan.best.peak_memory_bytes
    allocated = sum(own.memory[name] for name in ALLOCATED)
    for name, found, expected in (
        ("allocated", peak.allocated, allocated),
        ("reserved", peak.reserved, allocated + own.memory["fragmentation"]),
        ("device", peak.device, own.device_bytes),
        ("capacity", peak.capacity, figures.capacity_bytes),
    ):
        yield number_check(f"{name} bytes", found, expected)
    yield value_check("tightest rank", plan.best.memory.get("tightest_rank"), own.tightest_rank)
    yield fit_check("fits", own.device_bytes, figures.usable_bytes)
    yield fit_check("fits on the host", own.host_bytes, figures.host_capacity_bytes)
