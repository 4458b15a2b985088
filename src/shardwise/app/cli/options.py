"""The options that several commands share, in the spelling that scripts rely on."""

from __future__ import annotations

from typing import Annotated

import typer

ModelText = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A Hugging Face config.json (file or folder), a YAML of plain dimensions, or a catalogue name.",
        show_default=False,
    ),
]
ModelOrGraphText = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A transformer: a config.json (file or folder), a YAML of plain dimensions, a catalogue name. "
        "Or an operator graph: a YAML or JSON of operators, or graph:NAME of one that `graphs` lists.",
        show_default=False,
    ),
]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="C",
        help="A shorthand: 8x8xH100-SXM (nodes x per node x device), 4xRTX4090; a shipped cluster such as "
        "two-classes; or a cluster YAML.",
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
        help="Bandwidth between nodes, of each network card: 200Gb/s; 4x200Gb/s has four cards a node.",
        show_default=False,
    ),
]
CalibrationFile = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Measured numbers of devices and software, from calibrate.",
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
Space = Annotated[
    str,
    typer.Option(
        "--space",
        metavar="NAME|FILE",
        help="The space: default, core, or a file with a base and the values of some axes.",
    ),
]
Fixed = Annotated[
    str,
    typer.Option(
        "--fix", metavar="K=V,...", help="Keep only candidates with these values: tp=8,zero_stage=1.",
        show_default=False,
    ),
]  # fmt: skip
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Plan what this software can run: megatron-lm-0.19, shardwise (`shardwise train`), or any. "
        "Default: shardwise on devices that it knows by name, else any.",
        show_default=False,
    ),
]
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
UseAll = Annotated[bool, typer.Option("--use-all", help="Use all devices, also where fewer are faster.")]
AllowIdle = Annotated[bool, typer.Option("--allow-idle", hidden=True)]
IsJson = Annotated[
    bool, typer.Option("--json", help="Answer with one JSON document (docs/reference/formats.md).")
]


Workers = Annotated[str, typer.Option("--workers", metavar="N", help="Processes that search.")]
StageDp = Annotated[
    str,
    typer.Option(
        "--stage-dp",
        metavar="N",
        help="Replicas that share a microbatch's rows inside a stage of an uneven plan, at most.",
    ),
]
MixedStageRows = Annotated[
    str,
    typer.Option(
        "--braid",
        metavar="N",
        help="Rows of a microbatch that a stage of an uneven plan splits over two pools, at most.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="T",
        help="End the search after 10s, with the best so far and its proven gap.",
        show_default=False,
    ),
]
PlanFile = Annotated[
    str, typer.Argument(metavar="PLAN", help="A plan file, from plan --save.", show_default=False)
]
OptionalSeqLen = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        metavar="N",
        help="Tokens per sequence. Default: the longest of the model, or 4096.",
        show_default=False,
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="NAME",
        help="time (the fastest), devices (the fewest) or profile (a table per device count).",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Memory per device that the point picked may take: 40GiB.",
        show_default=False,
    ),
]
DeviceCounts = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="N,...",
        help="Device counts to look at: 1,2,4. Default: those that the mode asks about.",
        show_default=False,
    ),
]
Objectives = Annotated[
    str, typer.Option("--objectives", metavar="NAMES", help="time,memory or time,memory,cost.")
]
Epsilon = Annotated[
    str, typer.Option("--epsilon", metavar="X", help="How far points may be from exact ones, relative.")
]
StageCount = Annotated[
    str | None,
    typer.Option("--stages", metavar="N", help="Pipeline stages to cut MODEL into.", show_default=False),
]
MicrobatchCounts = Annotated[
    str | None,
    typer.Option(
        "--microbatches",
        metavar="LIST",
        help="Micro-batches that a graph in stages goes through, such as 8,16.",
        show_default=False,
    ),
]
Meshes = Annotated[
    str,
    typer.Option(
        "--meshes",
        metavar="tiers|all|LIST",
        help="Meshes for the layouts of a graph: one axis for each tier, all, or some such as 8,2x4.",
    ),
]
SaveFolder = Annotated[
    str | None,
    typer.Option("--save", metavar="DIR", help="Write a plan file for each point.", show_default=False),
]
PlotFile = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Draw it: a .png, .svg, or .html that says on hover what each point is.",
        show_default=False,
    ),
]

Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Save the job here, at the end and on the way.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint, under this plan.")]
Adaptive = Annotated[
    bool, typer.Option("--adaptive", help="Watch steps and links, and change plans where that pays.")
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights", metavar="DIR", help="Start from safetensors, as Hugging Face's.", show_default=False
    ),
]
Export = Annotated[
    str | None,
    typer.Option(
        "--export", metavar="DIR", help="Write safetensors at the end, as Hugging Face's.", show_default=False
    ),
]
TokenData = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FILE",
        help="A file of token ids (docs/how-to/train.md), of a graph a folder of arrays; or synthetic.",
    ),
]
StepTraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write a trace of the last step: in JSON, or for Perfetto alone where FILE ends in .pftrace.",
        show_default=False,
    ),
]
PlannedEvents = Annotated[
    str | None,
    typer.Option(
        "--events",
        metavar="TRACE",
        help="Plan for a trace of events, or for words: 'lost n3; slow n5 0.5'.",
        show_default=False,
    ),
]
PlanPolicy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="With --events: best now, expected (the default) or worst.",
        show_default=False,
    ),
]
