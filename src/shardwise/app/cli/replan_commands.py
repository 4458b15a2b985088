"""The commands `replan`, `replay`, `events generate`, `events convert` and `cluster import`, and their
options."""

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
    PlanClusterText,
    PlanFile,
    SoftwareName,
    argument,
    option,
)
from shardwise.app.cli.output import Output

events_app = typer.Typer(
    help="Generate or convert traces of cluster events. Format: docs/reference/formats.md.",
    rich_markup_mode=None,
)
OutFile = Annotated[str | None, option("--out", "FILE", "File to write the trace to. Default: stdout.")]


@events_app.command("generate")
def events_generate(
    kind: Annotated[
        str, argument("KIND", "Kind of events: diurnal, bursty, flapping, preemption or slowdown.")
    ],
    cluster: ClusterText,
    length: Annotated[
        str, typer.Option("--length", metavar="T", help="Length of the trace: 24h, 7d.")
    ] = "24h",
    seed: Annotated[
        str, typer.Option("--seed", metavar="N", help="Random seed; equal seeds give equal traces.")
    ] = "0",
    out: OutFile = None,
    inter_node: InterNode = None,
    is_json: IsJson = False,
) -> Output:
    """Generate a trace of events for a cluster from a seed."""
    from shardwise.app.cli import eventing

    return eventing.generated(
        kind, cluster=cluster, inter_node=inter_node, length=length, seed=seed, out=out, is_json=is_json
    )


@events_app.command("convert")
def events_convert(
    file: Annotated[
        str, argument("CSV", "CSV of available devices or nodes over time, or of links between regions.")
    ],
    per_node: Annotated[
        str, typer.Option("--per-node", metavar="N", help="Devices per node, if the CSV counts devices.")
    ] = "1",
    out: OutFile = None,
    is_json: IsJson = False,
) -> Output:
    """Convert a CSV of availability or of links into a trace."""
    from shardwise.app.cli import eventing

    return eventing.converted(file, per_node=per_node, out=out, is_json=is_json)


cluster_app = typer.Typer(
    help="Import a cluster from files of other software. Formats: docs/how-to/import-a-cluster.md.",
    rich_markup_mode=None,
)


@cluster_app.callback()
def cluster_commands() -> None:
    """Import a cluster from files of other software. Formats: docs/how-to/import-a-cluster.md."""


@cluster_app.command("import")
def cluster_import(
    files: Annotated[
        list[str],
        argument(
            "FILE...",
            "Files of one cluster: Slurm (topology.conf, topology.yaml, scontrol show nodes --json, sinfo"
            " --json, a hostlist), kubectl get nodes -o json, Topograph, nvidia-smi (-q -x, topo -m), a"
            " topology of NCCL, output of nccl-tests.",
        ),
    ],
    out: Annotated[str | None, option("--out", "FILE", "Cluster file to write. Default: stdout.")] = None,
    device: Annotated[
        str | None, option("--device", "NAME", "Device of all nodes, where the files do not name it.")
    ] = None,
    name: Annotated[str | None, option("--name", "NAME", "Name of the cluster.")] = None,
    is_json: IsJson = False,
) -> Output:
    """Write a cluster file from files of Slurm, Kubernetes, NVIDIA and NCCL."""
    from shardwise.app.cli import importing

    return importing.imported(files, out=out, device=device, name=name, is_json=is_json)


Regroup = Annotated[
    str,
    typer.Option(
        "--regroup", metavar="T", help="Time that a patch stops training, in addition to its transfer."
    ),
]
MigrationRestart = Annotated[
    str,
    typer.Option(
        "--restart", metavar="T", help="Time that a migration stops training, in addition to its transfer."
    ),
]
LostInterval = Annotated[
    str,
    typer.Option(
        "--checkpoint-interval",
        metavar="T",
        help="Training time between checkpoints; half of it is lost after a failure.",
    ),
]


def replan(
    plan: PlanFile,
    events: Annotated[
        str,
        option(
            "--events",
            "F|TEXT",
            "Trace of events, or text such as 'lost n3; slow n5 0.5; link n0>s1g0 5GB/s'.",
        ),
    ],
    cluster: PlanClusterText = None,
    horizon: Annotated[
        str, typer.Option(metavar="T", help="Time that training continues under these conditions.")
    ] = "6h",
    regroup: Regroup = "10s",
    restart: MigrationRestart = "60s",
    checkpoint_interval: LostInterval = "10min",
    save: Annotated[
        str | None,
        option(
            "--save",
            "FILE",
            "Write the decision as a plan file, and decide among plans with equal shares only.",
        ),
    ] = None,
    inter_node: InterNode = None,
    target: Annotated[
        str | None,
        option("--target", "NAME", "Software that runs the plans. Default: the target of the plan."),
    ] = None,
    software: SoftwareName = None,
    is_json: IsJson = False,
) -> Output:
    """Decide after events: keep the plan, patch it, or migrate."""
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
        target=target,
        software=software,
        save=save,
        is_json=is_json,
    )


def replay(
    subject: Annotated[str, argument("MODEL|PLAN", "Model, or plan file that runs at the start.")],
    events: Annotated[str, option("--events", "TRACE", "Trace of events, or text.")],
    cluster: PlanClusterText = None,
    policy: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Policies: static, robust, expected, adaptive, oracle, or all."),
    ] = "all",
    length: Annotated[
        str | None, option("--length", "T", "Length of the replay. Default: to the last event.")
    ] = None,
    seq_len: OptionalSeqLen = None,
    global_batch_size: Annotated[
        str,
        typer.Option(
            "--global-batch-size", metavar="N", help="Sequences per optimizer step; only for a model."
        ),
    ] = "",
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    memory_margin: Margin = "0.05",
    regroup: Regroup = "10s",
    restart: MigrationRestart = "60s",
    checkpoint_interval: Annotated[
        str | None,
        option(
            "--checkpoint-interval",
            "T",
            "Training time between checkpoints. Default: the optimum on this trace.",
        ),
    ] = None,
    plot: Annotated[
        str | None, option("--plot", "FILE", "Plot tokens over time as .png, .svg or .html.")
    ] = None,
    inter_node: InterNode = None,
    target: Annotated[
        str | None,
        option(
            "--target",
            "NAME",
            "Software that runs the plans. Default: the target of the plan; for a model as in `plan`.",
        ),
    ] = None,
    software: SoftwareName = None,
    budget: Annotated[
        str | None,
        option("--budget", "T", "Time limit, such as 60s; the replay then ends where it got to."),
    ] = None,
    is_json: IsJson = False,
) -> Output:
    """Simulate training through a trace of events, by policy."""
    from shardwise.app.cli import replaying, request

    options = request.JobOptions(
        model=subject,
        cluster=cluster or "",
        inter_node=inter_node,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
        software=software,
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
        target=target,
        budget_s=request.budget(budget),
    )
    return replaying.replayed(options, replay_options, is_json=is_json)


def add_change_commands(app: typer.Typer) -> None:
    """Add `replan`, `replay` and `events` to `app`."""
    app.command()(replan)
    app.command()(replay)
    app.add_typer(events_app, name="events")
    app.add_typer(cluster_app, name="cluster")
