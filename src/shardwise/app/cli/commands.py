"""The commands and their options, in the spelling that scripts rely on. Each returns an Output and prints
nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwise.app.cli.change_commands import add_change_commands
from shardwise.app.cli.frontier_command import frontier
from shardwise.app.cli.options import (
    Adaptive,
    AllowIdle,
    BatchSize,
    Budget,
    CalibrationFile,
    Checkpoint,
    CheckpointInterval,
    CheckpointStall,
    ClusterText,
    Dtype,
    Export,
    Fixed,
    Imbalance,
    InterNode,
    IsJson,
    Jitter,
    Margin,
    MixedStageRows,
    ModelText,
    Mtbf,
    OptimizerName,
    PlanFile,
    PlannedEvents,
    PlanPolicy,
    Restart,
    Resume,
    SeqLen,
    Space,
    StageDp,
    StepTraceFile,
    TargetName,
    TokenData,
    UseAll,
    Weights,
    Workers,
)
from shardwise.app.cli.output import Output
from shardwise.app.cli.run_commands import add_run_commands

app = typer.Typer(
    help="Plan distributed training: the provably best parallel strategy for a model on a cluster.",
    epilog="Exit codes: 0 answered, 2 usage or bad input, 3 infeasible, 4 a check does not hold, "
    "130 interrupted, 1 anything else.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def command() -> Any:
    """The command-line parser of all commands (its class depends on the release of typer)."""
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
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="What to minimise: time, memory, devices or cost.")
    ] = "time",
    frontier: Annotated[
        bool, typer.Option("--frontier", help="Add the exact frontier of step time against memory.")
    ] = False,
    use_all: UseAll = False,
    allow_idle: AllowIdle = False,
    inter_node: InterNode = None,
    calibration: CalibrationFile = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    space: Space = "default",
    fix: Fixed = "",
    target: TargetName = None,
    memory_margin: Margin = "0.05",
    expert_imbalance: Imbalance = "1.1",
    top: Annotated[str, typer.Option(metavar="K", help="Number of runners-up.")] = "3",
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Evaluate everything that is legal and fits.")
    ] = False,
    workers: Workers = "1",
    stage_dp: StageDp = "1",
    mixed_stage_rows: MixedStageRows = "1",
    budget: Budget = None,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the plan file.", show_default=False)
    ] = None,
    mtbf: Mtbf = None,
    checkpoint_interval: CheckpointInterval = None,
    checkpoint_stall: CheckpointStall = None,
    restart: Restart = None,
    jitter: Jitter = None,
    events: PlannedEvents = None,
    policy: PlanPolicy = None,
    is_json: IsJson = False,
) -> Output:
    """Find the best strategy for MODEL on the cluster, and prove it."""
    from shardwise.app.cli import answer, for_trace, request
    from shardwise.plan import OBJECTIVES

    options = request.JobOptions(
        model=model,
        cluster=cluster,
        inter_node=inter_node,
        calibration=calibration,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
    )
    choices = request.PlanOptions(
        objective=request.choice("--objective", objective, OBJECTIVES),
        frontier=frontier,
        use_all=request.all_devices(use_all=use_all, allow_idle=allow_idle),
        space=space,
        fix=fix,
        target=target,
        top=request.count("--top", top, low=0, high=1000),
        exhaustive=exhaustive,
        workers=request.workers(workers),
        budget_s=request.budget(budget),
        stage_dp=request.stage_dp(stage_dp),
        mixed_stage_rows=request.mixed_stage_rows(mixed_stage_rows),
    )
    reliability = request.reliability(
        mtbf=mtbf, interval=checkpoint_interval, stall=checkpoint_stall, restart=restart, jitter=jitter
    )
    if for_trace.is_requested(events, policy):
        for_trace.check_plan_options(choices, reliability)
        return for_trace.planned(options, choices, events or "", policy, save=save, is_json=is_json)
    return answer.planned(options, plan_options=choices, save=save, is_json=is_json, reliability=reliability)


@app.command()
def evaluate(
    model: ModelText,
    cluster: ClusterText,
    seq_len: SeqLen,
    global_batch_size: BatchSize,
    strategy: Annotated[
        str,
        typer.Option(
            metavar="K=V,...",
            help="The strategy: tp=8,pp=4,zero_stage=1,micro_batch_size=1.",
            show_default=False,
        ),
    ],
    inter_node: InterNode = None,
    calibration: CalibrationFile = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    memory_margin: Margin = "0.05",
    expert_imbalance: Imbalance = "1.1",
    is_json: IsJson = False,
) -> Output:
    """Price one strategy for MODEL on the cluster."""
    from shardwise.app.cli import answer, request

    options = request.JobOptions(
        model=model,
        cluster=cluster,
        inter_node=inter_node,
        calibration=calibration,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
    )
    return answer.evaluated(options, strategy=strategy, is_json=is_json)


app.command()(frontier)


@app.command()
def space(
    model: ModelText,
    cluster: ClusterText,
    global_batch_size: BatchSize,
    seq_len: Annotated[
        str | None,
        typer.Option(
            "--seq-len",
            metavar="N",
            help="Tokens per sequence; the count does not depend on it.",
            show_default=False,
        ),
    ] = None,
    inter_node: InterNode = None,
    space: Space = "default",
    fix: Fixed = "",
    stage_dp: StageDp = "1",
    mixed_stage_rows: MixedStageRows = "1",
    is_json: IsJson = False,
) -> Output:
    """Print every axis of a space and the exact number of candidates."""
    from shardwise.app.cli import answer, request

    options = request.JobOptions(
        model=model,
        cluster=cluster,
        inter_node=inter_node,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
    )
    limits = {"stage_dp": request.stage_dp(stage_dp), "braid": request.mixed_stage_rows(mixed_stage_rows)}
    return answer.counted(options, space=space, fix=fix, limits=limits, is_json=is_json)


@app.command()
def simulate(
    plan: PlanFile,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a trace that opens in ui.perfetto.dev.", show_default=False),
    ] = None,
    is_json: IsJson = False,
) -> Output:
    """Show one training step of a plan as a timeline."""
    from shardwise.app.cli import timeline

    return timeline.simulated(plan, trace=trace, is_json=is_json)


@app.command()
def check(
    plan: PlanFile,
    proof_budget: Annotated[
        str,
        typer.Option(
            metavar="T", help="Leave the proof that nothing is better open where it takes longer than this."
        ),
    ] = "10min",
    is_json: IsJson = False,
) -> Output:
    """Check all that a plan says, by code that shares nothing with the planner."""
    from shardwise.app.cli import checking, request

    budget_s = request.duration("--proof-budget", proof_budget, low="1ms", high="30d")
    return checking.checked(plan, is_json=is_json, proof_budget_s=budget_s)


@app.command()
def explain(
    plan: PlanFile,
    why_not: Annotated[
        str | None,
        typer.Option(
            metavar="K=V,...",
            help="Solve with these values pinned, and show the difference term by term.",
            show_default=False,
        ),
    ] = None,
    what_if: Annotated[
        str | None,
        typer.Option(
            metavar="K=V,...",
            help="Plan again with another cluster or job: inter_node_bandwidth=2x, nodes=16.",
            show_default=False,
        ),
    ] = None,
    workers: Workers = "1",
    budget: Budget = None,
    is_json: IsJson = False,
) -> Output:
    """Show what became of all candidates of a plan, and what pinned its best strategy."""
    from shardwise.app.cli import explaining, request

    return explaining.explained(
        plan,
        why_not=why_not,
        what_if=what_if,
        workers=request.workers(workers),
        budget_s=request.budget(budget),
        is_json=is_json,
    )


@app.command()
def train(
    plan: PlanFile,
    data: TokenData = "synthetic",
    steps: Annotated[str, typer.Option(metavar="N", help="Optimizer steps.")] = "20",
    lr: Annotated[str, typer.Option(metavar="X", help="Learning rate.")] = "0.001",
    seed: Annotated[str, typer.Option(metavar="N", help="Of parameters and samples.")] = "0",
    log: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write a line of JSON for every step.", show_default=False),
    ] = None,
    trace: StepTraceFile = None,
    checkpoint: Checkpoint = None,
    checkpoint_every: Annotated[str, typer.Option(metavar="N", help="Steps between checkpoints.")] = "100",
    resume: Resume = False,
    restarts: Annotated[
        str, typer.Option(metavar="N", help="Times that a run with --checkpoint outlives a rank.")
    ] = "3",
    weights: Weights = None,
    export: Export = None,
    adaptive: Adaptive = False,
) -> Output:
    """Train as a plan says, on PyTorch; a cluster of cpu devices is as many processes of this machine."""
    from shardwise.app.cli import launched, request, training
    from shardwise.app.cli.training_run import TrainArguments

    with launched.report_on_rank_0():
        numbers = request.train_numbers(
            steps=steps, lr=lr, seed=seed, checkpoint_every=checkpoint_every, restarts=restarts
        )
    return training.trained(
        TrainArguments(
            path=plan,
            data=data,
            steps=numbers.steps,
            lr=numbers.lr,
            seed=numbers.seed,
            log=log,
            trace=trace,
            checkpoint=checkpoint,
            checkpoint_every=numbers.checkpoint_every,
            resume=resume,
            restarts=numbers.restarts,
            weights=weights,
            export=export,
            adaptive=adaptive,
        )
    )


@app.command()
def validate(
    rows: Annotated[
        str | None,
        typer.Argument(
            metavar="[ROWS]",
            help="A CSV of measured runs (docs/reference/formats.md); without it, the published runs.",
            show_default=False,
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(metavar="NAME", help="How rows are grouped: source, gpu, family or row.")
    ] = "source",
    level: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Rows to use: complete, near (some of the strategy is assumed) or all."
        ),
    ] = "all",
    is_json: IsJson = False,
) -> Output:
    """Hold predictions against measured runs, and show how far they lie apart."""
    from shardwise.app.cli import validating

    return validating.validated(rows, by=by, level=level, is_json=is_json)


@app.command()
def fit(
    rows: Annotated[
        str, typer.Argument(metavar="ROWS", help="A CSV of measured runs (docs/reference/formats.md).")
    ],
    out: Annotated[str, typer.Option(metavar="FILE", help="Where the fitted numbers are written.")],
    is_json: IsJson = False,
) -> Output:
    """Find the numbers of devices and software that explain measured runs best, from scratch."""
    from shardwise.app.cli import fitting

    return fitting.fitted_file(rows, out, is_json=is_json)


@app.command()
def models(is_json: IsJson = False) -> Output:
    """List the models of the catalogue."""
    from shardwise.app.cli import tables

    return tables.models(is_json=is_json)


@app.command()
def devices(is_json: IsJson = False) -> Output:
    """List the devices, with figures from their datasheets."""
    from shardwise.app.cli import tables

    return tables.devices(is_json=is_json)


@app.command()
def graphs(is_json: IsJson = False) -> Output:
    """List the operator graphs that `graph:NAME` stands for."""
    from shardwise.app.cli import graphs as shipped

    return shipped.graphs(is_json=is_json)


@app.command()
def capture(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:function",
            help="A function that returns (module, inputs), called with meta as the default device; its "
            "file is run.",
            show_default=False,
        ),
    ],
    out: Annotated[str, typer.Option(metavar="GRAPH", help="Where the graph is written.")],
    batch: Annotated[
        str | None,
        typer.Option(metavar="N", help="Samples per optimizer step.", show_default=False),
    ] = None,
) -> Output:
    """Make an operator graph of a PyTorch module. Runs your code."""
    from shardwise.app.cli import capturing, request

    samples = None if batch is None else request.count("--batch", batch, low=1, high=10**9)
    return capturing.captured(target, out, batch=samples)


add_run_commands(app)
add_change_commands(app)
