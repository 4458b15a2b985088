"""The commands and their options. Each command reads its options, calls the module that answers, and returns
an `Output`; it prints nothing itself. Scripts rely on the names of commands and options.

Modules of the answers are imported inside the commands, so that `--help` stays fast.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from shardwise.app.cli.options import (  # fmt: skip
    Adaptive,
    AllowIdle,
    AttentionKernel,
    BatchSize,
    Budget,
    CalibrationFile,
    Checkpoint,
    CheckpointInterval,
    CheckpointStall,
    ClusterText,
    Days,
    DeviceCounts,
    Dtype,
    Epsilon,
    Exhaustive,
    Export,
    Fixed,
    FrozenParts,
    HasFrontier,
    Images,
    Imbalance,
    InterNode,
    IsBrief,
    IsJson,
    IsVerbose,
    Jitter,
    LoraAdapters,
    Margin,
    MeanSampleLen,
    MemoryLimit,
    Meshes,
    MicrobatchCounts,
    MixedStageRows,
    MixedStageRowsAlias,
    Mode,
    ModelOrGraphText,
    ModelText,
    Mtbf,
    Objective,
    Objectives,
    OptimizerName,
    OptionalSeqLen,
    PlanFile,
    PlannedEvents,
    PlanPolicy,
    PlotFile,
    Power,
    Price,
    Restart,
    Resume,
    RunSteps,
    SaveFolder,
    Seed,
    SeqLen,
    SoftwareName,
    SoftwareOptions,
    Space,
    StageCount,
    StageDp,
    StepTraceFile,
    TargetName,
    TokenData,
    Tokens,
    Tolerance,
    UseAll,
    Weights,
    Workers,
    argument,
    option,
)
from shardwise.app.cli.output import Form, Output
from shardwise.app.cli.replan_commands import add_change_commands

# Commands that run a plan, besides `train`


def launch(
    context: typer.Context,
    plan: PlanFile,
    launcher: Annotated[str, option("--with", "NAME", "Launcher: torchrun, slurm, ray or k8s.")],
    is_printed: Annotated[
        bool, typer.Option("--print", help="Print the command or file without starting it.")
    ] = False,
    head: Annotated[
        str | None, option("--head", "NAME", "Name or address of the first of several hosts, for torchrun.")
    ] = None,
    port: Annotated[str, typer.Option(metavar="N", help="Free port of the first host.")] = "29500",
    host: Annotated[str, typer.Option(metavar="K", help="Index of this host, from 0, for torchrun.")] = "0",
    image: Annotated[
        str | None,
        option("--image", "NAME", "Container image with shardwise[torch] or the target's software, for k8s."),
    ] = None,
    target: Annotated[
        str | None,
        option(
            "--target",
            "NAME",
            "Software to start: shardwise, or a target of export, whose start is only printed. "
            "Default: the target of the plan, or shardwise.",
        ),
    ] = None,
    files: Annotated[
        str | None,
        option("--files", "DIR", "Folder that export wrote for the target. Default: the current folder."),
    ] = None,
    script: Annotated[
        str | None,
        option(
            "--script", "FILE", "Training script. Default: pretrain_gpt.py of Megatron-LM, else train.py."
        ),
    ] = None,
) -> Output:
    """Start a plan on a cluster, or print the command. Options of train, or of the program, follow --."""
    from shardwise.app.cli import launching, request

    arguments = tuple(context.args)

    def is_adaptive() -> bool:
        train = context.find_root().command.commands["train"]  # type: ignore[attr-defined]
        params = train.make_context("train", [plan, *arguments]).params  # fails where train would
        names = ("steps", "lr", "seed", "checkpoint_every", "restarts")
        request.train_numbers(**{name: params[name] for name in names})
        return bool(params["adaptive"])

    options = launching.LaunchOptions(
        launcher=launcher,
        target=target,
        is_printed=is_printed,
        head=head,
        port=request.count("--port", port, low=1, high=65_535),
        host=request.count("--host", host, low=0, high=10**6),
        image=image,
        files=files,
        script=script,
    )
    return launching.launched(plan, options, arguments, is_adaptive=is_adaptive)


def export(
    plan: PlanFile,
    to: Annotated[
        str,
        option(
            "--to",
            "TARGET",
            "Target: megatron-lm-0.19, torchtitan-0.3, fsdp2, deepspeed-0.19, megatron-fsdp-0.19 or "
            "transformers-5; a name without a version means the newest.",
        ),
    ],
    out: Annotated[str, option("--out", "DIR", "Folder for the files; created if missing.")],
    is_validated: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Read the flags back with the target's own parser and compare every value with the plan.",
        ),
    ] = False,
) -> Output:
    """Write a plan in the words of its target. Flags or configuration files of Megatron-LM, for example."""
    from shardwise.app.cli import exporting

    return exporting.exported_plan(plan, to=to, out=out, is_validated=is_validated)


def review(
    file: Annotated[
        str,
        argument(
            "FILE",
            "Megatron-LM: a log with its arguments, a file or script with its flags, or a recipe of "
            "Megatron-Bridge. Transformers: Python with a DistributedConfig, Trainer arguments in JSON or "
            "YAML. TorchTitan: JSON or TOML. DeepSpeed: JSON. Accelerate: YAML.",
        ),
    ],
    cluster: ClusterText,
    model: Annotated[
        str | None, option("--model", "M", "Model, as of `plan`, where the file has none.")
    ] = None,
    trainer: Annotated[
        str | None,
        option(
            "--trainer",
            "FILE",
            "Trainer arguments of Transformers (JSON or YAML), where FILE is the DistributedConfig, or the "
            "file of DeepSpeed or Accelerate, of the run.",
        ),
    ] = None,
    measured: Annotated[
        str | None, option("--measured", "T", "Measured step time, 12.3s: times are scaled to it.")
    ] = None,
    seq_len: Annotated[
        str | None, option("--seq-len", "N", "Tokens per sequence, where the file has none.")
    ] = None,
    global_batch_size: Annotated[
        str | None,
        option("--global-batch-size", "N", "Sequences per optimizer step, where the file has none."),
    ] = None,
    fix: Annotated[
        str, option("--fix", "K=V,...", "Fields of the strategy that the file lacks: micro_batch_size=2.")
    ] = "",
    inter_node: InterNode = None,
    calibration: CalibrationFile = None,
    software: SoftwareName = None,
    memory_margin: Margin = "0.05",
    expert_imbalance: Imbalance = "1.1",
    mean_sample_len: MeanSampleLen = None,
    workers: Workers = "1",
    budget: Budget = None,
    is_json: IsJson = False,
) -> Output:
    """Review a configuration of training software. Does it fit, how fast is it, what should change?"""
    from shardwise.app.cli import reviewing
    from shardwise.inputs import record_of

    return reviewing.reviewed(file, record_of(reviewing.ReviewOptions, locals()), is_json=is_json)


def compare(
    plan: PlanFile,
    measured: Annotated[
        str, argument("OTHER", "Another plan file, or a trace in JSON, from `train --trace FILE`.")
    ],
    trace: Annotated[
        str | None, option("--trace", "FILE", "Write the predicted and the measured timeline into one trace.")
    ] = None,
    out: Annotated[str | None, option("--out", "FILE", "Write both side by side as one HTML page.")] = None,
    is_json: IsJson = False,
) -> Output:
    """Compare a plan with another plan or a measured step. Order of actions, time of parts, memory, cost."""
    from shardwise.app.cli import comparing

    return comparing.compared(plan, measured, trace=trace, out=out, is_json=is_json)


def calibrate(
    out: Annotated[str, option("--out", "FILE", "Calibration file to write.")],
    devices: Annotated[
        str, typer.Option(metavar="KIND", help="Devices to measure: cpu, or cuda (kernels only).")
    ] = "cpu",
    cluster: Annotated[
        str | None,
        option(
            "--cluster",
            "C",
            "Cluster of processes to measure (default: one cpu device per core), cluster on which"
            " nccl-tests ran, or the CUDA device as 1x1xDEVICE.",
        ),
    ] = None,
    links: Annotated[bool, typer.Option("--links", help="Measure the links between processes too.")] = False,
    sources: Annotated[
        list[str] | None,
        option(
            "--from",
            "FILE",
            "Read results from a file; may be repeated: a calibration to extend, output of nccl-tests, a"
            " CSV of measured runs, a plan with its log of train, a log of Megatron-LM with its arguments, a"
            " configuration that `review` reads and its log.",
        ),
    ] = None,
    measured: Annotated[
        list[str] | None,
        option(
            "--measured",
            "TIME",
            "Measured step time of a plan or configuration of --from without a log, such as 12.3s; may be"
            " repeated.",
        ),
    ] = None,
    model: Annotated[
        str | None, option("--model", "M", "Model, as of `plan`, where a configuration has none.")
    ] = None,
    seq_len: Annotated[
        str | None, option("--seq-len", "N", "Tokens per sequence, where a configuration has none.")
    ] = None,
    global_batch_size: Annotated[
        str | None,
        option("--global-batch-size", "N", "Sequences per optimizer step, where a configuration has none."),
    ] = None,
    threads: Annotated[
        str | None, option("--threads", "N", "Threads per process. Default: as in train.")
    ] = None,
) -> Output:
    """Measure devices, links and software of this machine."""
    from shardwise.app.cli import calibrating, request

    return calibrating.calibrated(
        out=out,
        devices=devices,
        cluster=cluster,
        links=links,
        sources=sources or (),
        measured_s=[
            request.duration("--measured", text, low="1ms", high="30d", bare=True) for text in measured or ()
        ],
        run={
            "model": model,
            "seq_len": None if seq_len is None else request.count("--seq-len", seq_len),
            "global_batch_size": None
            if global_batch_size is None
            else request.count("--global-batch-size", global_batch_size),
        },
        threads=(
            None if threads is None else request.count("--threads", threads, low=1, high=os.cpu_count() or 1)
        ),
    )


def emulate(
    context: typer.Context,
    cluster: Annotated[str, argument("CLUSTER", "Cluster of cpu devices.")],
    cpu_share: Annotated[
        str | None,
        option(
            "--cpu-share",
            "X",
            "Share of a core per device of speed 1. Default: 80 % of all cores, split evenly.",
        ),
    ] = None,
    events: Annotated[
        str | None, option("--events", "TRACE", "Trace of events that change links and devices.")
    ] = None,
) -> Output:
    """Run a command on every device of an emulated cluster.

    The command follows --. The devices are processes of this machine; needs Linux and root.
    """
    from shardwise.app.cli import emulating, request

    share = None
    if cpu_share is not None:
        share = request.fraction("--cpu-share", cpu_share, default=1.0, low=0.1, high=1.0)
    return emulating.ran(cluster, context.args, cpu_share=share, events=events)


def add_run_commands(app: typer.Typer) -> None:
    """Add these commands to `app`; arguments after -- go to the program that `launch` or `emulate` starts."""
    app.command(context_settings={"allow_extra_args": True})(launch)
    app.command(context_settings={"allow_extra_args": True})(emulate)
    app.command()(calibrate)
    app.command()(export)
    app.command()(review)
    app.command()(compare)


# Commands that plan


def frontier(
    model: ModelOrGraphText,
    cluster: ClusterText,
    global_batch_size: BatchSize,
    seq_len: OptionalSeqLen = None,
    mode: Mode = None,
    memory_limit: MemoryLimit = None,
    devices: DeviceCounts = None,
    stages: StageCount = None,
    microbatches: MicrobatchCounts = None,
    meshes: Meshes = "tiers",
    objectives: Objectives = "time,memory",
    epsilon: Epsilon = "0.001",
    inter_node: InterNode = None,
    calibration: CalibrationFile = None,
    target: TargetName = None,
    software: SoftwareName = None,
    attention: AttentionKernel = None,
    set: SoftwareOptions = None,
    price: Price = None,
    lora: LoraAdapters = None,
    images: Images = None,
    freeze: FrozenParts = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    space: Space = "default",
    fix: Fixed = "",
    memory_margin: Margin = "0.05",
    expert_imbalance: Imbalance = "1.1",
    mean_sample_len: MeanSampleLen = None,
    workers: Workers = "1",
    save: SaveFolder = None,
    plot: PlotFile = None,
    use_all: UseAll = False,
    tokens: Tokens = None,
    steps: RunSteps = None,
    days: Days = None,
    power: Power = None,
    mtbf: Mtbf = None,
    checkpoint_interval: CheckpointInterval = None,
    checkpoint_stall: CheckpointStall = None,
    restart: Restart = None,
    jitter: Jitter = None,
    is_json: IsJson = False,
) -> Output:
    """Compute the Pareto frontier of step time and memory for MODEL."""
    from shardwise.app.cli import request
    from shardwise.app.cli.frontier import command as frontiers
    from shardwise.inputs import record_of

    options = record_of(request.JobOptions, locals())
    run = request.required_length(record_of(request.RunOptions, locals()))
    frontier_options = record_of(frontiers.FrontierOptions, locals())
    return frontiers.frontier(options, frontier_options)


app = typer.Typer(
    help="Plan distributed training: the provably best parallel strategy for a model on a cluster.",
    epilog="Exit codes: 0 success, 1 unexpected error, 2 usage or bad input, 3 infeasible, 4 failed check, "
    "130 interrupted (143 by SIGTERM, 129 by SIGHUP).",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def command() -> Any:
    """The parser of all commands; its class depends on the version of typer."""
    return typer.main.get_command(app)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"shardwise {version('shardwise')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def shardwise(
    context: typer.Context,
    is_version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@app.command()
def plan(
    model: ModelText,
    cluster: ClusterText,
    seq_len: SeqLen,
    global_batch_size: BatchSize,
    objective: Objective = "time",
    frontier: HasFrontier = False,
    use_all: UseAll = False,
    allow_idle: AllowIdle = False,
    inter_node: InterNode = None,
    calibration: CalibrationFile = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    space: Space = "default",
    fix: Fixed = "",
    target: TargetName = None,
    tolerance: Tolerance = "0.01",
    software: SoftwareName = None,
    attention: AttentionKernel = None,
    set: SoftwareOptions = None,
    price: Price = None,
    lora: LoraAdapters = None,
    images: Images = None,
    freeze: FrozenParts = None,
    memory_margin: Margin = "0.05",
    expert_imbalance: Imbalance = "1.1",
    mean_sample_len: MeanSampleLen = None,
    top: Annotated[str, typer.Option(metavar="K", help="Number of runners-up.")] = "8",
    exhaustive: Exhaustive = False,
    workers: Workers = "1",
    stage_dp: StageDp = "1",
    mixed_stage_rows: MixedStageRows = "1",
    mixed_stage_rows_alias: MixedStageRowsAlias = None,
    budget: Budget = None,
    save: Annotated[str | None, option("--save", "FILE", "Write the plan file.")] = None,
    tokens: Tokens = None,
    steps: RunSteps = None,
    days: Days = None,
    power: Power = None,
    mtbf: Mtbf = None,
    checkpoint_interval: CheckpointInterval = None,
    checkpoint_stall: CheckpointStall = None,
    restart: Restart = None,
    jitter: Jitter = None,
    events: PlannedEvents = None,
    policy: PlanPolicy = None,
    is_json: IsJson = False,
    is_brief: IsBrief = False,
    is_verbose: IsVerbose = False,
) -> Output:
    """Find the best strategy for MODEL on a cluster, and prove it."""
    from shardwise.app.cli import planning, request, trace_planning
    from shardwise.inputs import record_of
    from shardwise.plans import OBJECTIVES

    options = record_of(request.JobOptions, locals())
    run = request.long_run(record_of(request.RunOptions, locals()))
    choices = request.PlanOptions(
        objective=request.choice("--objective", objective, OBJECTIVES),
        frontier=frontier,
        use_all=request.all_devices(use_all=use_all, allow_idle=allow_idle),
        space=space,
        fix=fix,
        target=target,
        tolerance=request.fraction("--tolerance", tolerance, default=0.01, low=0.0, high=1.0),
        top=request.count("--top", top, low=0, high=1000),
        exhaustive=exhaustive,
        workers=request.workers(workers),
        budget_s=request.budget(budget),
        stage_dp=request.stage_dp(stage_dp),
        mixed_stage_rows=request.mixed_stage_rows(mixed_stage_rows, mixed_stage_rows_alias),
    )
    if trace_planning.is_requested(events, policy, run):
        return trace_planning.planned(options, choices, events or "", policy, save=save, is_json=is_json)
    form = Form.of(is_json=is_json, is_brief=is_brief, is_verbose=is_verbose)
    return planning.planned(options, choices, run=run, save=save, form=form)


@app.command()
def evaluate(
    model: ModelText,
    cluster: ClusterText,
    seq_len: SeqLen,
    global_batch_size: BatchSize,
    strategy: Annotated[
        str, option("--strategy", "K=V,...", "Strategy: tp=8,pp=4,zero_stage=1,micro_batch_size=1.")
    ],
    target: Annotated[
        str | None, option("--target", "NAME", "Require that this target runs the strategy. Default: any.")
    ] = None,
    inter_node: InterNode = None,
    calibration: CalibrationFile = None,
    software: SoftwareName = None,
    attention: AttentionKernel = None,
    set: SoftwareOptions = None,
    price: Price = None,
    lora: LoraAdapters = None,
    images: Images = None,
    freeze: FrozenParts = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    memory_margin: Margin = "0.05",
    expert_imbalance: Imbalance = "1.1",
    mean_sample_len: MeanSampleLen = None,
    save: Annotated[str | None, option("--save", "FILE", "Write the plan file.")] = None,
    tokens: Tokens = None,
    steps: RunSteps = None,
    days: Days = None,
    power: Power = None,
    mtbf: Mtbf = None,
    checkpoint_interval: CheckpointInterval = None,
    checkpoint_stall: CheckpointStall = None,
    restart: Restart = None,
    jitter: Jitter = None,
    is_json: IsJson = False,
    is_brief: IsBrief = False,
    is_verbose: IsVerbose = False,
) -> Output:
    """Estimate step time and memory of one strategy for MODEL."""
    from shardwise.app.cli import planning, request
    from shardwise.inputs import record_of

    options = record_of(request.JobOptions, locals())
    run = request.required_length(record_of(request.RunOptions, locals()))
    form = Form.of(is_json=is_json, is_brief=is_brief, is_verbose=is_verbose)
    return planning.evaluated(options, strategy=strategy, target=target, run=run, save=save, form=form)


app.command()(frontier)


@app.command()
def space(
    model: ModelText,
    cluster: ClusterText,
    global_batch_size: BatchSize,
    seq_len: Annotated[
        str | None, option("--seq-len", "N", "Tokens per sequence; the count does not depend on it.")
    ] = None,
    inter_node: InterNode = None,
    space: Space = "default",
    fix: Fixed = "",
    stage_dp: StageDp = "1",
    mixed_stage_rows: MixedStageRows = "1",
    mixed_stage_rows_alias: MixedStageRowsAlias = None,
    is_json: IsJson = False,
) -> Output:
    """List the axes of a search space and count its candidates."""
    from shardwise.app.cli import planning, request

    options = request.JobOptions(
        model=model,
        cluster=cluster,
        inter_node=inter_node,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
    )
    limits = {
        "stage_dp": request.stage_dp(stage_dp),
        "mixed_stage_rows": request.mixed_stage_rows(mixed_stage_rows, mixed_stage_rows_alias),
    }
    return planning.counted(options, space=space, fix=fix, limits=limits, is_json=is_json)


@app.command()
def simulate(
    plan: PlanFile,
    trace: Annotated[
        str | None, option("--trace", "FILE", "Write a trace for https://ui.perfetto.dev.")
    ] = None,
    plot: Annotated[
        str | None, option("--plot", "FILE", "Draw every action of the step as an HTML page.")
    ] = None,
    target: Annotated[
        str | None, option("--target", "NAME", "Require that the plan is for this target.")
    ] = None,
    is_json: IsJson = False,
) -> Output:
    """Simulate one training step of a plan and show its timeline."""
    from shardwise.app.cli import simulating

    return simulating.simulated(plan, trace=trace, plot=plot, target=target, is_json=is_json)


@app.command()
def report(
    plan: PlanFile,
    out: Annotated[
        str | None, option("--out", "FILE", "HTML page to write. Default: the plan's name with .html.")
    ] = None,
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Search the frontier of step time and memory too.")
    ] = False,
    workers: Workers = "1",
    budget: Budget = None,
    is_json: IsJson = False,
) -> Output:
    """Write a plan as one HTML page. Time, memory, pipeline, layout and proof; it needs no network."""
    from shardwise.app.cli import reporting, request

    return reporting.reported(
        plan,
        out=out,
        has_frontier=frontier,
        workers=request.workers(workers),
        budget_s=request.budget(budget),
        is_json=is_json,
    )


@app.command()
def serve(
    port: Annotated[
        str, typer.Option(metavar="N", help="Port on this machine; 0 takes a free one.")
    ] = "8765",
    budget: Annotated[str, typer.Option(metavar="T", help="Time limit of a question.")] = "60s",
) -> Output:
    """Serve a page on this machine that asks for plans. It compares them and changes the cluster."""
    from shardwise.app.cli import request, serving

    return serving.served(
        port=request.count("--port", port, low=0, high=65_535),
        budget_s=request.duration("--budget", budget, low="1s", high="1h"),
    )


@app.command()
def check(
    plan: PlanFile,
    proof_budget: Annotated[
        str,
        typer.Option(
            metavar="T",
            help="Time limit of the proof of optimality; the check is open where it takes longer.",
        ),
    ] = "10min",
    is_json: IsJson = False,
) -> Output:
    """Check a plan with an independent checker. It names the claims that it does not re-derive.

    The checker is the package shardwise_verify, which imports nothing of shardwise. What the planner computes
    again stands apart.
    """
    from shardwise.app.cli import checking, request

    budget_s = request.duration("--proof-budget", proof_budget, low="1ms", high="30d")
    return checking.checked(plan, is_json=is_json, proof_budget_s=budget_s)


@app.command()
def explain(
    plan: PlanFile,
    why_not: Annotated[
        str | None,
        option(
            "--why-not",
            "K=V,...",
            "Find the best strategy with these values and show the difference term by term.",
        ),
    ] = None,
    what_if: Annotated[
        str | None,
        option(
            "--what-if",
            "K=V,...",
            "Plan again with a changed cluster or job: inter_node_bandwidth=2x, nodes=16.",
        ),
    ] = None,
    workers: Workers = "1",
    budget: Budget = None,
    is_json: IsJson = False,
    is_verbose: IsVerbose = False,
) -> Output:
    """Show what binds, and the best plan with other choices. Also where time and memory go, and outcomes."""
    from shardwise.app.cli import explaining, request

    return explaining.explained(
        plan,
        why_not=why_not,
        what_if=what_if,
        workers=request.workers(workers),
        budget_s=request.budget(budget),
        is_json=is_json,
        is_verbose=is_verbose,
    )


@app.command()
def train(
    plan: PlanFile,
    data: TokenData = "synthetic",
    steps: Annotated[str, typer.Option(metavar="N", help="Optimizer steps.")] = "20",
    lr: Annotated[str, typer.Option(metavar="X", help="Learning rate.")] = "0.001",
    seed: Seed = None,
    log: Annotated[str | None, option("--log", "FILE", "Write one line of JSON per step.")] = None,
    trace: StepTraceFile = None,
    checkpoint: Checkpoint = None,
    checkpoint_every: Annotated[str, typer.Option(metavar="N", help="Steps between checkpoints.")] = "100",
    resume: Resume = False,
    restarts: Annotated[
        str, typer.Option(metavar="N", help="Most restarts from a checkpoint after a rank is lost.")
    ] = "3",
    weights: Weights = None,
    export: Export = None,
    adaptive: Adaptive = False,
) -> Output:
    """Train under a plan with PyTorch.

    A device of a cluster of cpu devices is a process of this machine.
    """
    from shardwise.app.cli import launched, request, training
    from shardwise.app.cli.training_run import TrainArguments
    from shardwise.inputs import record_of

    with launched.report_on_rank_0():
        numbers = request.train_numbers(
            steps=steps, lr=lr, seed=seed, checkpoint_every=checkpoint_every, restarts=restarts
        )
    return training.trained(record_of(TrainArguments, {**locals(), **numbers, "path": plan}))


@app.command()
def validate(
    rows: Annotated[
        str | None,
        argument("[ROWS]", "CSV of measured runs (docs/reference/formats.md). Default: the published runs."),
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="NAME", help="Group rows by source, software, gpu, family or row.")
    ] = "source",
    level: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Rows to use: complete, near (parts of the strategy are assumed) or all."
        ),
    ] = "all",
    calibration: CalibrationFile = None,
    is_json: IsJson = False,
) -> Output:
    """Show the prediction error against measured runs.

    Without ROWS: prediction error against 885 published runs.
    """
    from shardwise.app.cli import measured_runs

    return measured_runs.validated(rows, by=by, level=level, calibration=calibration, is_json=is_json)


@app.command()
def fit(
    rows: Annotated[
        str, typer.Argument(metavar="ROWS", help="CSV of measured runs (docs/reference/formats.md).")
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="File to write the fitted numbers to.")],
    budget: Annotated[
        str | None, option("--budget", "T", "Time after which the fit makes no further step, such as 60s.")
    ] = None,
    is_json: IsJson = False,
) -> Output:
    """Fit the numbers of devices and software to measured runs.

    Fewer than 20 rows give a calibration instead, as `calibrate --from ROWS` does."""
    from shardwise.app.cli import measured_runs, request

    return measured_runs.fitted_file(rows, out, budget_s=request.budget(budget), is_json=is_json)


@app.command()
def models(is_json: IsJson = False) -> Output:
    """List the models of the catalogue."""
    from shardwise.app.cli import tables

    return tables.models(is_json=is_json)


@app.command()
def devices(is_json: IsJson = False) -> Output:
    """List the devices with figures from their datasheets."""
    from shardwise.app.cli import tables

    return tables.devices(is_json=is_json)


@app.command()
def graphs(is_json: IsJson = False) -> Output:
    """List the operator graphs that graph:NAME can name."""
    from shardwise.app.cli import tables as shipped

    return shipped.graphs(is_json=is_json)


@app.command()
def capture(
    target: Annotated[
        str,
        argument(
            "FILE.py:function",
            "Function that returns (module, inputs), called with meta as the default device; its file "
            "is executed.",
        ),
    ],
    out: Annotated[str, typer.Option(metavar="GRAPH", help="Graph file to write.")],
    batch: Annotated[str | None, option("--batch", "N", "Samples per optimizer step.")] = None,
) -> Output:
    """Capture a PyTorch module as an operator graph. Runs your code."""
    from shardwise.app.cli import capturing, request

    samples = None if batch is None else request.count("--batch", batch, low=1, high=10**9)
    return capturing.captured(target, out, batch=samples)


add_run_commands(app)
add_change_commands(app)
