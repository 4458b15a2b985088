"""The commands around running a plan, beside `train`: they are added to the others in `commands`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from shardwise.app.cli.options import IsJson, PlanFile
from shardwise.app.cli.output import Output


def launch(
    context: typer.Context,
    plan: PlanFile,
    launcher: Annotated[
        str, typer.Option("--with", metavar="NAME", help="torchrun, slurm, ray or k8s.", show_default=False)
    ],
    is_printed: Annotated[
        bool, typer.Option("--print", help="Print the command or the file, and start nothing.")
    ] = False,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="torchrun: name or address of the first of several hosts.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[str, typer.Option(metavar="N", help="A free port of the first host.")] = "29500",
    host: Annotated[str, typer.Option(metavar="K", help="torchrun: which host this one is, from 0.")] = "0",
    image: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="k8s: a container image with shardwise[torch].", show_default=False
        ),
    ] = None,
) -> Output:
    """Start a plan on a real cluster, or print how. Behind -- come options of train."""
    from shardwise.app.cli import launching, request

    options = tuple(context.args)
    train = context.find_root().command.commands["train"]  # type: ignore[attr-defined]
    train_params = train.make_context("train", [plan, *options]).params  # refuses what train would
    names = ("steps", "lr", "seed", "checkpoint_every", "restarts")
    request.train_numbers(**{name: train_params[name] for name in names})
    return launching.launched(
        plan,
        launcher=launcher,
        is_printed=is_printed,
        head=head,
        port=request.count("--port", port, low=1, high=65_535),
        host=request.count("--host", host, low=0, high=10**6),
        image=image,
        training=options,
        is_adaptive=train_params["adaptive"],
    )


def export(
    plan: PlanFile,
    to: Annotated[
        str,
        typer.Option(
            metavar="TARGET",
            help="megatron-lm-0.19; a name without a version is the newest.",
            show_default=False,
        ),
    ],
    out: Annotated[
        str,
        typer.Option(metavar="DIR", help="Folder for the files; made if missing.", show_default=False),
    ],
    is_validated: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Let the target's own parser read the flags, and compare every value with the plan.",
        ),
    ] = False,
) -> Output:
    """Write a plan as flags of other training software."""
    from shardwise.app.cli import exporting

    return exporting.exported_plan(plan, to=to, out=out, is_validated=is_validated)


def compare(
    plan: PlanFile,
    measured: Annotated[
        str,
        typer.Argument(metavar="MEASURED", help="A trace in JSON, from train --trace.", show_default=False),
    ],
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write both timelines into one trace.", show_default=False),
    ] = None,
    is_json: IsJson = False,
) -> Output:
    """Hold a measured step against its plan: the order of actions, and the time of every part."""
    from shardwise.app.cli import comparing

    return comparing.compared(plan, measured, trace=trace, is_json=is_json)


def calibrate(
    out: Annotated[
        str, typer.Option(metavar="FILE", help="Where the calibration is written.", show_default=False)
    ],
    devices: Annotated[
        str, typer.Option(metavar="KIND", help="What is measured: cpu, or cuda, of which kernels alone are.")
    ] = "cpu",
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="C",
            help="The processes that are measured at a time (default: a cpu device per core), where"
            " nccl-tests ran, or what the CUDA device is.",
            show_default=False,
        ),
    ] = None,
    links: Annotated[bool, typer.Option("--links", help="Measure the links between them too.")] = False,
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="What there is already, once or several times: a calibration whose numbers are kept, output"
            " of nccl-tests, a log of train and its plan.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        str | None,
        typer.Option(metavar="N", help="Threads of each process [default: as in train]", show_default=False),
    ] = None,
) -> Output:
    """Measure this machine, for plan --calibration."""
    from shardwise.app.cli import calibrating, request

    return calibrating.calibrated(
        out=out,
        devices=devices,
        cluster=cluster,
        links=links,
        sources=sources or (),
        threads=(
            None if threads is None else request.count("--threads", threads, low=1, high=os.cpu_count() or 1)
        ),
    )


def emulate(
    context: typer.Context,
    cluster: Annotated[
        str, typer.Argument(metavar="CLUSTER", help="A cluster of cpu devices.", show_default=False)
    ],
    cpu_share: Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="Share of a core of a device of speed 1. Default: 80 % of the cores among all.",
            show_default=False,
        ),
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE", help="Change links and devices as this trace says.", show_default=False
        ),
    ] = None,
) -> Output:
    """Run a command on every device of a cluster emulated on this machine (Linux, root). It follows --."""
    from shardwise.app.cli import emulating, request

    share = None
    if cpu_share is not None:
        share = request.fraction("--cpu-share", cpu_share, default=1.0, low=0.1, high=1.0)
    return emulating.ran(cluster, context.args, cpu_share=share, events=events)


def add_run_commands(app: typer.Typer) -> None:
    """Make these commands of `app`; what follows -- goes to what two of them start."""
    app.command(context_settings={"allow_extra_args": True})(launch)
    app.command(context_settings={"allow_extra_args": True})(emulate)
    app.command()(calibrate)
    app.command()(export)
    app.command()(compare)
