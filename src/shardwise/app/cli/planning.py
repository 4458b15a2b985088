"""The commands `plan`, `evaluate` and `space`: the question goes to `shardwise.api`; then a card or a JSON
document."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwise import api, search
from shardwise.app.cli import card, documents, tables
from shardwise.app.cli.activity import progress
from shardwise.app.cli.output import Form, Output
from shardwise.app.cli.overlap import step_parts_or_none
from shardwise.app.cli.request import JobOptions, LongRun, PlanOptions, job_arguments, load_request
from shardwise.app.cli.target_words import target_words
from shardwise.cluster import Cluster
from shardwise.errors import InternalError
from shardwise.interrupts import INTERRUPTED
from shardwise.launch import not_run
from shardwise.plans import (
    GOODPUT_FROM_DEVICES,
    Goodput,
    Plan,
    Reliability,
    WholeRun,
    check_output_path,
    goodput_of,
    whole_run_of,
)
from shardwise.questions import (
    MIXED_POOL_STAGES,
    OWN_TARGET,
    counted_space,
    counted_uneven,
    fields,
    require_candidates,
    space_choice,
    targets_that_run,
)
from shardwise.strategy import target_of, target_of_options
from shardwise.targets import EXPORTERS


def train_warnings(unsupported: Sequence[str] | None, cluster: Cluster, save: str | None) -> list[str]:
    """A warning where our own runtime does not run the plan: on devices that it knows by name, and for any
    plan file."""
    is_shown = save is not None or target_of(OWN_TARGET).knows_devices(cluster.classes)
    return (
        [
            f"shardwise: `shardwise train` does not run this plan: {'; '.join(unsupported)}; "
            f"--target {OWN_TARGET} restricts the search to plans that it runs"
        ]
        if unsupported and is_shown
        else []
    )


# The commands


def planned(
    options: JobOptions,
    plan_options: PlanOptions,
    *,
    run: LongRun,
    save: str | None,
    form: Form,
) -> Output:
    """The answer of `plan`; writes the plan file where `save` names one.

    Goodput is shown on large clusters, and where an option of a long `run` is given. An interrupted search
    answers with the incumbent and exit code 130.
    """
    if save is not None:
        check_output_path("--save", save, inputs=inputs_of(options, plan_options.space))
    with progress() as show:
        plan = api.plan(
            **job_arguments(options),
            objective=plan_options.objective,
            space=plan_options.space,
            fix=plan_options.fix,
            target=plan_options.target,
            tolerance=plan_options.tolerance,
            use_all=plan_options.use_all,
            top=plan_options.top,
            frontier=plan_options.frontier,
            exhaustive=plan_options.exhaustive,
            stage_dp=plan_options.stage_dp,
            mixed_pool_stages=plan_options.mixed_stage_rows,
            workers=plan_options.workers,
            budget=plan_options.budget_s,
            progress=show,
        )
    return _plan_output(plan, options, plan_options, run=run, save=save, form=form)


def inputs_of(options: JobOptions, space: str) -> tuple[str, ...]:
    """The files that a question may name."""
    return (options.model, options.cluster, *(() if space in search.SPACES else (space,)))


def _exit_status(is_interrupted: bool) -> tuple[list[str], int]:
    """A note where the search was interrupted, and the exit code."""
    if is_interrupted:
        return ["shardwise: interrupted; this is the best so far"], INTERRUPTED
    return [], 0


def _plan_output(
    plan: Plan,
    options: JobOptions,
    plan_options: PlanOptions,
    *,
    run: LongRun,
    save: str | None,
    form: Form,
) -> Output:
    """Card or document of a plan; writes its file too."""
    answer = plan.answer
    if answer is None or answer.whole is None:
        raise InternalError("a plan without the answer of its search")
    goodput, whole_run = _goodput_if_shown(plan, run), _whole_run(plan, run)
    notes, code = _exit_status(answer.is_interrupted)
    unsupported = not_run(plan)
    notes += train_warnings(unsupported, plan.cluster, save) if plan.target in (None, OWN_TARGET) else []
    if plan.objective != "time" and search.is_mixed(answer.whole):
        notes.append(
            f"shardwise: uneven plans are searched for objective time only; for {plan.objective} only"
            " uniform strategies are"
        )
    if save is not None:
        notes.append(f"wrote {save} ({api.save(plan, save)})")
    run_by = targets_that_run(plan) if plan.target is None else None
    if form.is_json:
        document = documents.plan_answer(plan, answer, goodput, whole_run, not_run=unsupported, run_by=run_by)
        return Output(document=document, notes=notes, code=code)
    if form.is_brief:
        return Output(
            lines=[card.brief_line(plan.best, plan.target, answer)], is_verbatim=True, notes=notes, code=code
        )
    lines = card.answer_card(
        answer,
        model=plan.model,
        cluster=plan.cluster,
        job=plan.job,
        of_devices=answer.whole.devices,
        tolerance=plan.question.tolerance,
        run_by=run_by,
        goodput=goodput,
        shown=_shown(plan, _after_plan(plan, options, plan_options, save=save), form, whole_run),
    )
    return Output(lines=lines, notes=notes, code=code)


def _shown(plan: Plan, next_commands: Sequence[str], form: Form, whole_run: WholeRun | None) -> card.Shown:
    """What the card of a plan shows besides the answer."""
    return card.Shown(
        target=plan.target,
        target_words=target_words(plan),
        options=plan.options,
        next_commands=next_commands,
        whole_run=whole_run,
        is_verbose=form.is_verbose,
        parts=step_parts_or_none(plan),
    )


def _goodput_if_shown(plan: Plan, run: LongRun) -> Goodput | None:
    if not run.is_requested and plan.cluster.devices < GOODPUT_FROM_DEVICES:
        return None
    return goodput_of(plan.best, plan.cluster, run.reliability or Reliability())


def _whole_run(plan: Plan, run: LongRun) -> WholeRun | None:
    """The whole run under a plan where its length is requested."""
    return None if run.length is None else whole_run_of(plan, run.length, run.reliability or Reliability())


def evaluated(
    options: JobOptions,
    *,
    strategy: str,
    target: str | None,
    run: LongRun,
    save: str | None = None,
    form: Form,
) -> Output:
    """The answer of `evaluate`; writes the plan file where `save` names one. Infeasible with reasons for a
    strategy that is illegal or does not fit."""
    if save is not None:
        check_output_path("--save", save, inputs=(options.model, options.cluster))
    plan = api.evaluate(**job_arguments(options), strategy=strategy, target=target)
    notes = [] if save is None else [f"wrote {save} ({api.save(plan, save)})"]
    whole_run = _whole_run(plan, run)
    if form.is_json:
        return Output(document=documents.evaluation(plan, whole_run), notes=notes)
    commands = [" ".join(("shardwise plan", *question_arguments(options)))]
    commands += [] if save is None else [f"shardwise simulate {shlex.quote(save)}"]
    if form.is_brief:
        return Output(lines=[card.brief_line(plan.best, plan.target)], is_verbatim=True, notes=notes)
    lines = card.evaluation_card(
        plan.best,
        model=plan.model,
        cluster=plan.cluster,
        job=plan.job,
        shown=_shown(plan, commands, form, whole_run),
    )
    return Output(lines=lines, notes=notes)


def counted(options: JobOptions, *, space: str, fix: str, limits: Mapping[str, int], is_json: bool) -> Output:
    """The answer of `space`; `limits` has `stage_dp` and `mixed_stage_rows` of uneven plans."""
    fixed = fields("--fix", fix)
    chosen = space_choice(space)
    request = load_request(options)
    require_candidates(chosen, fixed, request)
    size = counted_space(chosen.base, fixed, chosen.axes, request)
    uneven = counted_uneven(chosen, fixed, request, limits)
    if is_json:
        return Output(document=documents.space(chosen.base, size, request, uneven))
    lines = tables.space(
        chosen.base if chosen.file is None else f"{chosen.base}, as in {chosen.file}",
        size,
        model=request.model.name,
        devices=request.cluster.devices,
        batch=request.job.global_batch_size,
    )
    lines += [] if uneven is None else tables.pipelines(uneven)
    return Output(lines=lines)


def _after_plan(
    plan: Plan, options: JobOptions, plan_options: PlanOptions, *, save: str | None
) -> tuple[str, ...]:
    """Follow-up commands of a plan, ready to copy."""
    question = question_arguments(options)
    given = (
        ("--objective", plan_options.objective, "time"),
        ("--space", plan_options.space, "default"),
        ("--fix", plan_options.fix, ""),
        ("--target", plan_options.target, None),
    )
    chosen = [
        word
        for name, value, default in given
        if value and value != default
        for word in (name, shlex.quote(value))
    ]
    chosen += ["--use-all"] if plan_options.use_all else []
    chosen += [f"--stage-dp {plan_options.stage_dp}"] if plan_options.stage_dp > 1 else []
    rows = plan_options.mixed_stage_rows
    chosen += [f"{MIXED_POOL_STAGES} {rows}"] if rows > 1 else []
    commands = []
    if save is None:
        commands.append(" ".join(("shardwise plan", *question, *chosen, "--save plan.yaml")))
    file = shlex.quote(save) if save is not None else "plan.yaml"
    commands.append(f"shardwise explain {file}")
    commands.append(f"shardwise simulate {file} --trace plan.pftrace")
    if plan.target in EXPORTERS:
        commands.append(f"shardwise export {file} --to {plan.target} --out run")
    elif not_run(plan) == ():
        is_here = target_of(OWN_TARGET).knows_devices(plan.cluster.classes)
        commands.append(
            f"shardwise train {file}" if is_here else f"shardwise launch {file} --with slurm --print"
        )
    if plan.question.cluster is None and plan.best.can_be_evaluated:
        text = search.shortest_text(plan.model, plan.cluster, plan.job, plan.strategy)
        own = plan.target not in (None, OWN_TARGET)
        target = ["--target", str(plan.target)] if own else []
        repeated = question_arguments(_with_found_options(options, plan))
        commands.append(" ".join(("shardwise evaluate", *repeated, *target, "--strategy", shlex.quote(text))))
    return tuple(commands)


def _with_found_options(options: JobOptions, plan: Plan) -> JobOptions:
    """The options of the job with those of the software that the search chose."""
    searched = target_of_options(plan.target).searched_options
    found = [f"{name}={plan.options[name]}" for name in searched if name in plan.options]
    new = [text for text in found if text.partition("=")[0] not in plan.question.options]
    return replace(options, set=",".join(filter(None, (options.set, *new)))) if new else options


def question_arguments(options: JobOptions) -> list[str]:
    """The arguments that repeat the question, without those at their default."""
    words = [shlex.quote(options.model), "--cluster", shlex.quote(options.cluster)]
    given = (
        ("--inter-node", options.inter_node, None),
        ("--seq-len", options.seq_len, None),
        ("--global-batch-size", options.global_batch_size, None),
        ("--calibration", options.calibration, None),
        ("--software", options.software, None),
        ("--attention", options.attention, None),
        ("--set", options.set, None),
        ("--price", options.price, None),
        ("--lora", options.lora, None),
        ("--images", options.images, None),
        ("--freeze", options.freeze, None),
        ("--dtype", options.dtype, None),
        ("--optimizer", options.optimizer, "adamw"),
        ("--memory-margin", options.memory_margin, "0.05"),
        ("--expert-imbalance", options.expert_imbalance, "1.1"),
        ("--mean-sample-len", options.mean_sample_len, None),
    )
    for name, value, default in given:
        if value is not None and value != default:
            words += [name, shlex.quote(value)]
    return words
