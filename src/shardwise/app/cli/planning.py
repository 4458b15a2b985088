"""The commands `plan`, `evaluate` and `space`: search, then a card or a JSON document.

`space_choice` reads `--space` and `require_candidates` refuses spaces without a candidate; `counted_space`
and `counted_uneven` count with the code of the checker. `requested_target` reads `--target`, and `not_run`
lists the parts of a plan that `shardwise train` does not support.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwise import search
from shardwise.app.cli import card, documents, tables
from shardwise.app.cli.output import INTERRUPTED, Output, progress
from shardwise.app.cli.request import (
    MIXED_POOL_STAGES,
    OWN_TARGET,
    JobOptions,
    PlanOptions,
    Request,
    check_output_path,
    choice,
    load_request,
)
from shardwise.cluster import pools_of
from shardwise.cost import limits_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.inputs import nearest, short_repr
from shardwise.plans import (
    GOODPUT_FROM_DEVICES,
    Answer,
    Goodput,
    PlanQuestion,
    Reliability,
    Result,
    Value,
    goodput_of,
    plan_of,
    write_plan,
)
from shardwise.schedule import MAX_ACTIONS, Schedule, generate
from shardwise.strategy import (
    ANY,
    Job,
    Strategy,
    Target,
    complete,
    newest_target,
    parse_fields,
    target_names,
    target_of,
)
from shardwise.targets import EXPORTS, check_model
from shardwise_verify import PipelineCount, PoolSize, SpaceCount, count_pipelines, count_space

Axes = Mapping[str, tuple[Value, ...]]
Fixed = Mapping[str, Value]


# Spaces


def space_choice(text: str) -> search.SpaceChoice:
    """The space in `--space`: a name, or a file with a base and restricted axes."""
    if text in search.SPACES:
        return search.SpaceChoice(base=text)
    if text and (os.path.exists(text) or re.search(r"[/.\\]", text)):
        return search.read_space(text)
    near = nearest(text, search.SPACES)
    hint = f" (did you mean {near}?)" if near else ""
    raise ConfigError(
        f"is neither a space nor a file{hint}",
        key="--space",
        found=short_repr(text),
        allowed=", ".join(search.SPACES),
    )


def require_candidates(chosen: search.SpaceChoice, fixed: Fixed, request: Request) -> None:
    """ConfigError with the first axis of a space file that leaves no candidate together with the axes before
    it and the fixed fields."""
    restrictions: dict[str, tuple[Value, ...]] = {}
    for name, values in chosen.axes.items():
        before = dict(restrictions)
        restrictions[name] = values
        if not counted_space(chosen.base, fixed, restrictions, request).count:
            possible = counted_space(chosen.base, fixed, before, request).axes[name]
            allowed = ", ".join(possible[:20]) + (", ..." if len(possible) > 20 else "")
            raise ConfigError(
                "leaves no candidate"
                + (f" together with {', '.join((*before, *fixed))}" if before or fixed else ""),
                file=chosen.file,
                key=f"axes.{name}",
                found=", ".join(map(str, values)),
                allowed=allowed or "none: the fixed fields leave no candidate",
            )


def counted_space(base: str, fixed: Fixed, axes: Axes, request: Request) -> SpaceCount:
    """The axes of a space and its number of candidates, counted by the checker."""
    experts = request.model.experts
    return count_space(
        model_layers=request.model.layers,
        experts=None if experts is None else experts.experts,
        devices=request.cluster.devices,
        global_batch_size=request.job.global_batch_size,
        space=base,
        fixed=fixed,
        axes=axes,
    )


def counted_uneven(
    chosen: search.SpaceChoice, fixed: Fixed, request: Request, limits: Mapping[str, int]
) -> PipelineCount | None:
    """The pipelines of uneven plans with up to `stage_dp` replicas of a stage and mixed-pool stages that
    split up to `mixed_stage_rows` rows, counted by the checker; None where `plan` searches no uneven
    plans."""
    model, job = request.model, request.job
    is_restricted = bool(chosen.base != "default" or chosen.axes or fixed)
    is_plain = model.experts is None and len(model.kinds) == 1
    if is_restricted or not is_plain or not search.is_mixed(request.cluster):
        return None
    of_model = limits_of(model, job)
    return count_pipelines(
        layers=model.layers,
        pools=[
            PoolSize(name=pool.name, devices=pool.devices, node_devices=pool.node.devices)
            for pool in pools_of(request.cluster)
        ],
        splits=(of_model.heads, of_model.ffn_splits, of_model.seq_len),
        kv_heads=of_model.kv_heads,
        stage_dp=limits["stage_dp"],
        mixed_stage_rows=limits["mixed_stage_rows"],
        global_batch_size=job.global_batch_size,
    )


# Targets


def requested_target(name: str | None, request: Request) -> Target | None:
    """The target in `--target`; None for `any`. ConfigError where the target does not run on the cluster.

    The default is our own runtime on devices that it knows, else `any`.
    """
    if name is not None:
        name = choice("--target", newest_target(name), (*target_names(), ANY))
    if name == ANY or (name is None and not target_of(OWN_TARGET).knows_devices(request.cluster.classes)):
        return None
    target = target_of(name or OWN_TARGET)
    if not target.runs_on(request.cluster.vendors):
        raise ConfigError(
            f"{target.command} does not run on this cluster", key="--target", found=target.name,
            allowed=f"clusters of {target.known_devices}; or --target any",
        )  # fmt: skip
    return target


def not_run(plan: Result, request: Request) -> tuple[str, ...] | None:
    """The parts of this plan that `shardwise train` does not support, as texts; None where
    it does not run on these devices at all."""
    target = target_of(OWN_TARGET)
    if not target.runs_on(request.cluster.vendors):
        return None
    job = request.job
    target = target.for_job(request.model, job)
    if plan.is_uniform:
        found, dtypes = [str(refusal) for refusal in target.refusals(plan.strategy)], target.dtypes
    else:
        is_beyond = any(stage.parts for stage in plan.layout.stages) and not target.runs_mixed_pool_stages
        found, dtypes = ["stages on two pools"] if is_beyond else [], target.uneven_dtypes
    return (*found, *_unknown(target, dtypes, request))


def require_job(target: Target, request: Request) -> None:
    """ConfigError where the target runs no plan of the job."""
    for unsupported in _unknown(target, target.dtypes, request):
        raise ConfigError(
            f"{target.command} runs no plan of this job",
            key="--target",
            found=unsupported,
            allowed="--target any, to plan it without a target",
        )
    if target.name in EXPORTS:
        check_model(request.model, request.job.seq_len)


def _unknown(target: Target, dtypes: Sequence[str], request: Request) -> Iterator[str]:
    """Properties of job and model that a target with these dtypes does not support, as texts."""
    for key, value, known in (
        ("dtype", request.job.dtype, dtypes),
        ("optimizer", request.job.optimizer, target.optimizers),
        ("model family", request.model.family, target.families),
    ):
        if value not in known:
            yield f"{key} {value} (it runs {', '.join(known)})"
    for part in request.model.special_parts:
        if part in target.lacks:
            yield f"{part} (it runs models without it)"


def train_warnings(unsupported: Sequence[str] | None, request: Request, save: str | None) -> list[str]:
    """A warning where our own runtime does not run the plan: on devices that it knows by name, and for any
    plan file."""
    is_shown = save is not None or target_of(OWN_TARGET).knows_devices(request.cluster.classes)
    return (
        [
            f"shardwise: `shardwise train` does not run this plan: {'; '.join(unsupported)}; "
            f"--target {OWN_TARGET} restricts the search to plans that it runs"
        ]
        if unsupported and is_shown
        else []
    )


# The commands

SPLIT_BACKWARDS = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")
"""Schedules that split the backward pass: up to three actions per stage and micro-batch instead of two."""

Fields = Mapping[str, int | str | bool]


def planned(
    options: JobOptions,
    plan_options: PlanOptions,
    *,
    save: str | None,
    is_json: bool,
    reliability: Reliability | None = None,
) -> Output:
    """The answer of `plan`; writes the plan file where `save` names one.

    Goodput is shown on large clusters, and where `reliability` is given. An interrupted search answers with
    the incumbent and exit code 130.
    """
    fixed = parse_fields(plan_options.fix, key="--fix")
    chosen = space_choice(plan_options.space)
    if save is not None:
        check_output_path(
            "--save", save, inputs=(options.model, options.cluster, *([chosen.file] if chosen.file else []))
        )
    request = load_request(options)
    target = requested_target(plan_options.target, request)
    if target is not None:
        require_job(target, request)
        request = request.for_target(target)
    by_pools = plan_options.objective == "time" and search.is_mixed(request.cluster)
    question = search.Question(
        model=request.model,
        cluster=request.cluster,
        job=request.job,
        space=chosen.base,
        fixed=fixed,
        axes=chosen.axes,
        objective=plan_options.objective,
        use_all=plan_options.use_all,
        top=plan_options.top,
        frontier=plan_options.frontier,
        exhaustive=plan_options.exhaustive,
        workers=plan_options.workers,
        budget_s=plan_options.budget_s,
        stage_dp=plan_options.stage_dp,
        mixed_stage_rows=plan_options.mixed_stage_rows,
    )
    if not question.uses_parts:
        require_candidates(chosen, fixed, request)
    _check_uneven_options(plan_options, target, by_pools=by_pools)
    try:
        answer = _search(question, target, by_pools=by_pools)
    except Infeasible:
        require_candidates(chosen, fixed, request)
        raise
    used = request if answer.cluster is None else replace(request, cluster=answer.cluster)
    return _plan_output(
        answer,
        used,
        request,
        plan_options,
        question,
        target,
        save=save,
        is_json=is_json,
        reliability=reliability,
    )


def _search(question: search.Question, target: Target | None, *, by_pools: bool) -> Answer:
    """The answer of the planner among the plans that the target runs."""
    with progress() as show:
        if by_pools:
            return search.plan_mixed_cluster(question, target=target, progress=show)
        if target is not None:
            return search.plan_for(target, question, search.plan, progress=show)
        return search.plan(question, progress=show)


def _check_uneven_options(plan_options: PlanOptions, target: Target | None, *, by_pools: bool) -> None:
    """ConfigError where options of uneven plans do not apply, or allow stages that the target does not
    run."""
    for key, value in (
        ("--stage-dp", plan_options.stage_dp),
        (MIXED_POOL_STAGES, plan_options.mixed_stage_rows),
    ):
        if value > 1 and not by_pools:
            raise ConfigError(
                "applies to uneven plans only: objective time, clusters of two to four pools",
                key=key, found=str(value), allowed="1",
            )  # fmt: skip
    if plan_options.mixed_stage_rows > 1 and target is not None and not target.runs_mixed_pool_stages:
        raise ConfigError(
            f"{target.command} runs no mixed-pool stages",
            key=MIXED_POOL_STAGES, found=str(plan_options.mixed_stage_rows), allowed="1, or --target any",
        )  # fmt: skip


def _exit_status(is_interrupted: bool) -> tuple[list[str], int]:
    """A note where the search was interrupted, and the exit code."""
    if is_interrupted:
        return ["shardwise: interrupted; this is the best so far"], INTERRUPTED
    return [], 0


def plan_question(question: search.Question, target: Target | None) -> PlanQuestion:
    """The question as a plan holds it."""
    return PlanQuestion(
        objective=question.objective,
        space=question.space,
        fixed=question.fixed,
        axes=question.axes,
        target=None if target is None else target.name,
        use_all=question.use_all,
        stage_dp=question.stage_dp,
        mixed_stage_rows=question.mixed_stage_rows,
    )


def _plan_output(
    answer: Answer,
    used: Request,
    request: Request,
    plan_options: PlanOptions,
    question: search.Question,
    target: Target | None,
    *,
    save: str | None,
    is_json: bool,
    reliability: Reliability | None,
) -> Output:
    """Card or document of an answer on the cluster of `used`; writes the plan file too."""
    goodput = _goodput_if_shown(answer.best, used, reliability)
    notes, code = _exit_status(answer.is_interrupted)
    name = None if target is None else target.name
    unsupported = not_run(answer.best, used)
    notes += train_warnings(unsupported, used, save) if name in (None, OWN_TARGET) else []
    if plan_options.objective != "time" and search.is_mixed(request.cluster):
        notes.append(
            f"shardwise: uneven plans are searched for objective time only; for {plan_options.objective} only"
            " uniform strategies are"
        )
    if save is not None or is_json:
        plan = plan_of(
            answer,
            model=used.model,
            cluster=used.cluster,
            job=used.job,
            schedule=schedule_of(answer.best, used.job),
            question=plan_question(question, target),
        )
        if save is not None:
            notes.append(f"wrote {save} ({write_plan(save, plan)})")
        if is_json:
            document = documents.plan_answer(plan, answer, goodput, not_run=unsupported)
            return Output(document=document, notes=notes, code=code)
    lines = card.answer_card(
        answer,
        model=used.model,
        cluster=used.cluster,
        job=used.job,
        of_devices=request.cluster.devices,
        target=name,
        goodput=goodput,
        next_commands=_after_plan(
            used,
            answer,
            plan_options,
            target=name,
            save=save,
            is_whole_cluster=used.cluster is request.cluster,
        ),
    )
    return Output(lines=lines, notes=notes, code=code)


def _goodput_if_shown(best: Result, request: Request, reliability: Reliability | None) -> Goodput | None:
    if reliability is None and request.cluster.devices < GOODPUT_FROM_DEVICES:
        return None
    return goodput_of(best, request.cluster, reliability or Reliability())


def evaluated(options: JobOptions, *, strategy: str, is_json: bool) -> Output:
    """The answer of `evaluate`. Infeasible with reasons for a strategy that is illegal or does not fit."""
    fields = parse_fields(strategy, key="--strategy")
    request = load_request(options)
    chosen = _completed(fields, request)
    result = search.evaluate(request.model, request.cluster, request.job, chosen)
    if is_json:
        return Output(document=documents.evaluation(request, result))
    command = " ".join(("shardwise plan", *question_arguments(options)))
    lines = card.evaluation_card(
        result, model=request.model, cluster=request.cluster, job=request.job, next_commands=(command,)
    )
    return Output(lines=lines)


def counted(options: JobOptions, *, space: str, fix: str, limits: Mapping[str, int], is_json: bool) -> Output:
    """The answer of `space`; `limits` has `stage_dp` and `mixed_stage_rows` of uneven plans."""
    fixed = parse_fields(fix, key="--fix")
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


def schedule_of(result: Result, job: Job) -> Schedule | None:
    """The action table of one replica of a uniform strategy for a step, None if the stages are not alike.
    ConfigError where it is too long for a plan file."""
    if not result.is_uniform:
        return None
    strategy = result.strategy
    microbatches = job.global_batch_size // (strategy.dp * strategy.micro_batch_size)
    per_microbatch = (3 if strategy.schedule in SPLIT_BACKWARDS else 2) * strategy.pp * strategy.vpp
    if microbatches * per_microbatch > MAX_ACTIONS:
        raise ConfigError(
            "has too many micro-batches for a plan file and JSON; leave out --save and --json",
            key="--global-batch-size",
            found=f"{microbatches} micro-batches of {per_microbatch} actions",
            allowed=f"{MAX_ACTIONS} actions",
        )
    return generate(strategy.schedule, pp=strategy.pp, microbatches=microbatches, vpp=strategy.vpp)


def _completed(fields: Fields, request: Request) -> Strategy:
    experts = request.model.experts
    return complete(
        fields,
        devices=request.cluster.devices,
        layers=request.model.layers,
        experts=None if experts is None else experts.experts,
        global_batch_size=request.job.global_batch_size,
    )


def _after_plan(
    request: Request,
    answer: Answer,
    plan_options: PlanOptions,
    *,
    target: str | None,
    save: str | None,
    is_whole_cluster: bool,
) -> tuple[str, ...]:
    """Follow-up commands of a plan, ready to copy."""
    question = question_arguments(request.options)
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
    if target in EXPORTS:
        commands.append(f"shardwise export {file} --to {target} --out run")
    elif not_run(answer.best, request) == ():
        is_here = target_of(OWN_TARGET).knows_devices(request.cluster.classes)
        commands.append(
            f"shardwise train {file}" if is_here else f"shardwise launch {file} --with slurm --print"
        )
    if is_whole_cluster and answer.best.is_uniform:
        text = _short_text(answer.best.strategy, request)
        commands.append(" ".join(("shardwise evaluate", *question, "--strategy", text)))
    return tuple(commands)


def question_arguments(options: JobOptions) -> list[str]:
    """The arguments that repeat the question, without those at their default."""
    words = [shlex.quote(options.model), "--cluster", shlex.quote(options.cluster)]
    given = (
        ("--inter-node", options.inter_node, None),
        ("--seq-len", options.seq_len, None),
        ("--global-batch-size", options.global_batch_size, None),
        ("--calibration", options.calibration, None),
        ("--dtype", options.dtype, None),
        ("--optimizer", options.optimizer, "adamw"),
        ("--memory-margin", options.memory_margin, "0.05"),
        ("--expert-imbalance", options.expert_imbalance, "1.1"),
    )
    for name, value, default in given:
        if value is not None and value != default:
            words += [name, shlex.quote(value)]
    return words


def _short_text(strategy: Strategy, request: Request) -> str:
    """The fewest fields that determine `strategy`, quoted for a shell."""
    return shlex.quote(search.shortest_text(request.model, request.cluster, request.job, strategy))
