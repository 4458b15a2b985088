"""The commands about change, and their options.

The commands `events generate` and `events convert`, and their options.
"""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.app.cli.options import (
    ClusterText,
    Dtype,
    InterNode,
    IsJson,
    Margin,
    OptimizerName,
    OptionalSeqLen,
    PlanFile,
)
from shardwise.app.cli.output import Output

events_app = typer.Typer(
    help="Traces of what happens to a cluster over time (docs/reference/formats.md).", rich_markup_mode=None
)
OutFile = Annotated[
    str | None,
    typer.Option("--out", metavar="FILE", help="Write the trace there, not to stdout.", show_default=False),
]


@events_app.command("generate")
def events_generate(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="diurnal, bursty, flapping, preemption or slowdown.", show_default=False
        ),
    ],
    cluster: ClusterText,
    length: Annotated[str, typer.Option("--length", metavar="T", help="How long: 24h, 7d.")] = "24h",
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="The same seed, the same trace.")] = "0",
    out: OutFile = None,
    inter_node: InterNode = None,
    is_json: IsJson = False,
) -> Output:
    """Make a trace of events for a cluster, from a seed."""
    from shardwise.app.cli import eventing

    return eventing.generated(
        kind, cluster=cluster, inter_node=inter_node, length=length, seed=seed, out=out, is_json=is_json
    )


@events_app.command("convert")
def events_convert(
    file: Annotated[
        str,
        typer.Argument(
            metavar="CSV", help="Availability of devices, or links of regions.", show_default=False
        ),
    ],
    per_node: Annotated[
        str, typer.Option("--per-node", metavar="N", help="Devices of a node, where devices are counted.")
    ] = "1",
    out: OutFile = None,
    is_json: IsJson = False,
) -> Output:
    """Make a trace from a CSV of nodes that come and go, or of what lies between regions."""
    from shardwise.app.cli import eventing

    return eventing.converted(file, per_node=per_node, out=out, is_json=is_json)


Regroup = Annotated[
    str, typer.Option("--regroup", metavar="T", help="Seconds that a patch stands still beside its bytes.")
]
MigrationRestart = Annotated[
    str, typer.Option("--restart", metavar="T", help="Seconds that a move stands still beside its bytes.")
]
LostInterval = Annotated[
    str,
    typer.Option("--checkpoint-interval", metavar="T", help="Work between checkpoints, half of it is lost."),
]


def replan(
    plan: PlanFile,
    cluster: ClusterText,
    events: Annotated[
        str,
        typer.Option(
            metavar="F|TEXT",
            help="A trace of events, or words: 'lost n3; slow n5 0.5; link n0>s1g0 5GB/s'.",
            show_default=False,
        ),
    ],
    horizon: Annotated[
        str, typer.Option(metavar="T", help="How long training goes on in these conditions.")
    ] = "6h",
    regroup: Regroup = "10s",
    restart: MigrationRestart = "60s",
    checkpoint_interval: LostInterval = "10min",
    save: Annotated[
        str | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Decide among what a plan file can say (equal shares), and write it.",
            show_default=False,
        ),
    ] = None,
    inter_node: InterNode = None,
    is_json: IsJson = False,
) -> Output:
    """Decide what to do after events: keep the plan, patch it, or move to another."""
    from shardwise.app.cli import replanning, request
    from shardwise.replanning import Costs

    return replanning.replanned(
        plan,
        cluster=cluster,
        inter_node=inter_node,
        events=events,
        horizon_s=request.duration("--horizon", horizon, low="1s", high="365d"),
        costs=Costs(
            regroup_s=request.duration("--regroup", regroup, low="0s", high="1d"),
            restart_s=request.duration("--restart", restart, low="0s", high="1d"),
            checkpoint_interval_s=request.duration(
                "--checkpoint-interval", checkpoint_interval, low="0s", high="365d"
            ),
        ),
        save=save,
        is_json=is_json,
    )


def replay(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|PLAN", help="A model, or a plan file that runs at first.", show_default=False
        ),
    ],
    cluster: ClusterText,
    events: Annotated[
        str, typer.Option(metavar="TRACE", help="A trace of events, or words.", show_default=False)
    ],
    policy: Annotated[
        str,
        typer.Option(metavar="NAMES", help="static, robust, expected, adaptive, oracle, or all of them."),
    ] = "all",
    length: Annotated[
        str | None,
        typer.Option(metavar="T", help="How long. Default: to the last event.", show_default=False),
    ] = None,
    seq_len: OptionalSeqLen = None,
    global_batch_size: Annotated[
        str,
        typer.Option("--global-batch-size", metavar="N", help="Sequences per step, where a model is named."),
    ] = "",
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    memory_margin: Margin = "0.05",
    regroup: Regroup = "10s",
    restart: MigrationRestart = "60s",
    checkpoint_interval: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-interval",
            metavar="T",
            help="Work between checkpoints. Default: what loses least on this trace.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot", metavar="FILE", help="Draw tokens over time: a .png, .svg or .html.", show_default=False
        ),
    ] = None,
    inter_node: InterNode = None,
    is_json: IsJson = False,
) -> Output:
    """Simulate training through a trace of events, under several policies."""
    from shardwise.app.cli import replaying, request

    options = request.JobOptions(
        model=subject,
        cluster=cluster,
        inter_node=inter_node,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
    )

    def seconds(option: str, text: str | None, low: str = "0s") -> float | None:
        return None if text is None else request.duration(option, text, low=low, high="3650d")

    replay_options = replaying.ReplayOptions(
        events=events,
        policies=policy,
        length_s=seconds("--length", length, "1s"),
        regroup_s=request.duration("--regroup", regroup, low="0s", high="1d"),
        restart_s=request.duration("--restart", restart, low="0s", high="1d"),
        checkpoint_interval_s=seconds("--checkpoint-interval", checkpoint_interval, "1s"),
        plot=plot,
    )
    return replaying.replayed(options, replay_options, is_json=is_json)


def add_change_commands(app: typer.Typer) -> None:
    """`replan`, `replay` and `events` among the commands of `app`."""
    app.command()(replan)
    app.command()(replay)
    app.add_typer(events_app, name="events")
