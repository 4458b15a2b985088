"""The commands about change, and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.app.cli.options import ClusterText, InterNode, IsJson, PlanFile
from shardwise.app.cli.output import Output

Regroup = Annotated[
    str, typer.Option("--regroup", metavar="T", help="Seconds that a patch stands still beside its bytes.")
]
MoveRestart = Annotated[
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
    restart: MoveRestart = "60s",
    checkpoint_interval: LostInterval = "10min",
    inter_node: InterNode = None,
    is_json: IsJson = False,
) -> Output:
    """Decide what to do after events: keep the plan, patch it, or move to another."""
    from shardwise.app.cli import replanning, request
    from shardwise.replan import Costs

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
        is_json=is_json,
    )
