"""The commands and their options, in the spelling that scripts rely on. Each returns an Output and prints
nothing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwise.app.cli.output import Output

app = typer.Typer(
    help="Plan distributed training: the provably best parallel strategy for a model on a cluster.",
    epilog="Exit codes: 0 answered, 2 usage or bad input, 3 infeasible, 4 the checker disagrees, "
    "1 anything else.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

ModelText = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face config.json (file or folder), a YAML of plain dimensions, or a catalogue name.",
        show_default=False,
    ),
]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="C",
        help="A cluster YAML, or a shorthand: 8x8xH100-SXM (nodes x per node x device), 4xRTX4090.",
        show_default=False,
    ),
]
SeqLen = Annotated[
    str, typer.Option("--seq-len", metavar="N", help="Tokens per sequence.", show_default=False)
]
BatchSize = Annotated[
    str,
    typer.Option(
        "--global-batch-size", metavar="N", help="Sequences per optimizer step.", show_default=False
    ),
]
InterNode = Annotated[
    str | None,
    typer.Option(
        "--inter-node",
        metavar="RATE",
        help="Bandwidth between nodes, per device: 200Gb/s.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="D",
        help="Default: the best 16-bit type that all devices have.",
        show_default=False,
    ),
]
OptimizerName = Annotated[
    str, typer.Option("--optimizer", metavar="O", help="adamw, adafactor, sgd or muon.")
]
Margin = Annotated[
    str, typer.Option("--memory-margin", metavar="X", help="Fraction of device memory that stays free.")
]
Imbalance = Annotated[
    str,
    typer.Option("--expert-imbalance", metavar="X", help="Load of the busiest expert rank over the mean."),
]
Space = Annotated[str, typer.Option("--space", metavar="NAME", help="The declared space: default or core.")]
Fixed = Annotated[
    str,
    typer.Option(
        "--fix", metavar="K=V,...", help="Keep only candidates with these values: tp=8,zero_stage=1.",
        show_default=False,
    ),
]  # fmt: skip
Mtbf = Annotated[
    str | None,
    typer.Option(
        "--mtbf",
        metavar="T",
        help="Goodput: mean time between failures of a device. Default: 50677h.",
        show_default=False,
    ),
]
CheckpointInterval = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-interval",
        metavar="T",
        help="Goodput: work between checkpoints, 30min. Default: the optimum.",
        show_default=False,
    ),
]
CheckpointStall = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-stall",
        metavar="T",
        help="Goodput: time that training waits for a checkpoint. Default: 6.3s.",
        show_default=False,
    ),
]
Restart = Annotated[
    str | None,
    typer.Option(
        "--restart",
        metavar="T",
        help="Goodput: time from a failure to the next step. Default: 10min.",
        show_default=False,
    ),
]
Jitter = Annotated[
    str | None,
    typer.Option(
        "--jitter",
        metavar="X",
        help="Goodput: standard deviation of a node's step time over its mean. Default: 0.007.",
        show_default=False,
    ),
]
IsJson = Annotated[bool, typer.Option("--json", help="Answer with one JSON document (docs/formats.md).")]


def command() -> Any:
    """The command-line parser of all commands (its class depends on the release of typer)."""
    return typer.main.get_command(app)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
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
    objective: Annotated[str, typer.Option(metavar="NAME", help="What to minimise: time.")] = "time",
    inter_node: InterNode = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    space: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The declared space, default or core. Left out: default up to 16 devices, else core.",
            show_default=False,
        ),
    ] = None,
    fix: Fixed = "",
    memory_margin: Margin = "0.05",
    expert_imbalance: Imbalance = "1.1",
    top: Annotated[str, typer.Option(metavar="K", help="Number of runners-up.")] = "3",
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Evaluate everything that is legal and fits.")
    ] = False,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the plan file.", show_default=False)
    ] = None,
    mtbf: Mtbf = None,
    checkpoint_interval: CheckpointInterval = None,
    checkpoint_stall: CheckpointStall = None,
    restart: Restart = None,
    jitter: Jitter = None,
    is_json: IsJson = False,
) -> Output:
    """Find the best strategy for MODEL on the cluster, and prove it."""
    from shardwise.app.cli import answer, request

    options = request.JobOptions(
        model=model,
        cluster=cluster,
        inter_node=inter_node,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
    )
    return answer.planned(
        options,
        objective=request.objective(objective),
        space=None if space is None else request.choice("--space", space, request.SPACES),
        fix=fix,
        top=request.count("--top", top, low=0, high=1000),
        is_exhaustive=exhaustive,
        save=save,
        is_json=is_json,
        reliability=request.reliability(
            mtbf=mtbf,
            interval=checkpoint_interval,
            stall=checkpoint_stall,
            restart=restart,
            jitter=jitter,
        ),
    )


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
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
    )
    return answer.evaluated(options, strategy=strategy, is_json=is_json)


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
    return answer.counted(
        options, space=request.choice("--space", space, request.SPACES), fix=fix, is_json=is_json
    )


@app.command()
def simulate(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan file, from plan --save.", show_default=False)
    ],
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
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan file, from plan --save.", show_default=False)
    ],
    is_json: IsJson = False,
) -> Output:
    """Check all that a plan says, by code that shares nothing with the planner."""
    from shardwise.app.cli import checking

    return checking.checked(plan, is_json=is_json)


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
