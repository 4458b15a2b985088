"""Arguments and options that commands share: names, metavars and help. Scripts rely on the names."""

from __future__ import annotations

from typing import Annotated

import typer

ModelText = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model: a Hugging Face config.json (file or folder), a cached ORG/NAME of the Hugging "
        "Face Hub, a YAML of dimensions, or a catalogue name.",
        show_default=False,
    ),
]
ModelOrGraphText = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Transformer: a config.json (file or folder), a cached ORG/NAME of the Hugging Face Hub, "
        "a YAML of dimensions, or a catalogue name. "
        "Operator graph: a YAML or JSON of operators, or graph:NAME (see `shardwise graphs`).",
        show_default=False,
    ),
]
PlanClusterText = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="C",
        help="Cluster of a plan, as of `plan`. Default: the one that the plan was made for, with its idle "
        "nodes.",
        show_default=False,
    ),
]
ClusterText = Annotated[
    str,
    typer.Option(
        "--cluster",
        metavar="C",
        help="Cluster: a shorthand such as 8x8xH100-SXM (nodes x devices per node x device) or 4xRTX4090, a "
        "shipped cluster such as two-classes, or a cluster YAML.",
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
        help="Bandwidth of each network card: 200Gb/s; 4x200Gb/s for four cards per node.",
        show_default=False,
    ),
]
CalibrationFile = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        metavar="FILE",
        help="Calibration file of measured devices and software, from `shardwise calibrate`.",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="D",
        help="Training precision. Default: the best 16-bit type that all devices support.",
        show_default=False,
    ),
]
OptimizerName = Annotated[
    str, typer.Option("--optimizer", metavar="O", help="Optimizer: adamw, adafactor, sgd or muon.")
]
Margin = Annotated[
    str, typer.Option("--memory-margin", metavar="X", help="Fraction of device memory to leave free.")
]
Imbalance = Annotated[
    str,
    typer.Option(
        "--expert-imbalance",
        metavar="X",
        help="Load of the busiest expert-parallel rank, relative to the mean.",
    ),
]
Space = Annotated[
    str,
    typer.Option(
        "--space",
        metavar="NAME|FILE",
        help="Search space: default, core, or a YAML file with a base and the values of some axes.",
    ),
]
Fixed = Annotated[
    str,
    typer.Option(
        "--fix", metavar="K=V,...", help="Fix fields of the strategy: tp=8,zero_stage=1.",
        show_default=False,
    ),
]  # fmt: skip
TargetName = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Restrict plans to those that a target runs: megatron-lm-0.19, shardwise (`shardwise train`), "
        "or any. Default: shardwise on clusters of cpu devices, else any.",
        show_default=False,
    ),
]
Mtbf = Annotated[
    str | None,
    typer.Option(
        "--mtbf",
        metavar="T",
        help="Mean time between failures of a device, for goodput. Default: 50677h.",
        show_default=False,
    ),
]
CheckpointInterval = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-interval",
        metavar="T",
        help="Training time between checkpoints, for goodput: 30min. Default: the optimum.",
        show_default=False,
    ),
]
CheckpointStall = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-stall",
        metavar="T",
        help="Time that a checkpoint blocks training, for goodput. Default: 6.3s.",
        show_default=False,
    ),
]
Restart = Annotated[
    str | None,
    typer.Option(
        "--restart",
        metavar="T",
        help="Time from a failure to the next step, for goodput. Default: 10min.",
        show_default=False,
    ),
]
Jitter = Annotated[
    str | None,
    typer.Option(
        "--jitter",
        metavar="X",
        help="Standard deviation of a node's step time over its mean, for goodput. Default: 0.007.",
        show_default=False,
    ),
]
UseAll = Annotated[bool, typer.Option("--use-all", help="Use all devices, even where fewer are faster.")]
AllowIdle = Annotated[bool, typer.Option("--allow-idle", hidden=True)]
IsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/reference/formats.md).")]


Workers = Annotated[str, typer.Option("--workers", metavar="N", help="Worker processes of the search.")]
StageDp = Annotated[
    str,
    typer.Option(
        "--stage-dp",
        metavar="N",
        help="Most replicas of a stage of an uneven plan that split the rows of a micro-batch.",
    ),
]
MixedStageRows = Annotated[
    str,
    typer.Option(
        "--mixed-pool-stages",
        metavar="N",
        help="Allow stages of uneven plans on two device pools that split micro-batches of up to N rows; "
        "1 allows none.",
    ),
]
MixedStageRowsAlias = Annotated[str | None, typer.Option("--braid", metavar="N", hidden=True)]
"""The former name of `--mixed-pool-stages`."""

Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="T",
        help="Time limit of the search, such as 10s; the answer is then the incumbent with its gap.",
        show_default=False,
    ),
]
PlanFile = Annotated[
    str, typer.Argument(metavar="PLAN", help="Plan file, from `plan --save FILE`.", show_default=False)
]
OptionalSeqLen = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        metavar="N",
        help="Tokens per sequence. Default: the maximum of the model, else 4096.",
        show_default=False,
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="NAME",
        help="Choose the fastest point (time), the fewest devices (devices), or none and show a table per "
        "device count (profile).",
    ),
]
MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Most memory per device of the chosen point: 40GiB.",
        show_default=False,
    ),
]
DeviceCounts = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="N,...",
        help="Device counts to search: 1,2,4. Default: those of the mode.",
        show_default=False,
    ),
]
Objectives = Annotated[
    str,
    typer.Option(
        "--objectives", metavar="NAMES", help="Objectives of the frontier: time,memory or time,memory,cost."
    ),
]
Epsilon = Annotated[
    str,
    typer.Option(
        "--epsilon", metavar="X", help="Relative distance that points may have from the exact frontier."
    ),
]
StageCount = Annotated[
    str | None,
    typer.Option("--stages", metavar="N", help="Number of pipeline stages.", show_default=False),
]
MicrobatchCounts = Annotated[
    str | None,
    typer.Option(
        "--microbatches",
        metavar="LIST",
        help="Numbers of micro-batches of an operator graph in stages, such as 8,16.",
        show_default=False,
    ),
]
Meshes = Annotated[
    str,
    typer.Option(
        "--meshes",
        metavar="tiers|all|LIST",
        help="Device meshes of an operator graph: tiers (one axis per tier), all, or a list such as 8,2x4.",
    ),
]
SaveFolder = Annotated[
    str | None,
    typer.Option(
        "--save", metavar="DIR", help="Write a plan file per point into this folder.", show_default=False
    ),
]
PlotFile = Annotated[
    str | None,
    typer.Option(
        "--plot",
        metavar="FILE",
        help="Plot the frontier as .png, .svg, or .html with details on hover.",
        show_default=False,
    ),
]

Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="Folder of checkpoints, saved every --checkpoint-every steps and at the end.",
        show_default=False,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint, under this plan.")]
Seed = Annotated[
    str | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Random seed of parameters and samples. Default: 0, or the checkpoint's.",
        show_default=False,
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option("--adaptive", help="Monitor steps and links, and change the plan where that is faster."),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="DIR",
        help="Load initial weights from safetensors with Hugging Face's names.",
        show_default=False,
    ),
]
Export = Annotated[
    str | None,
    typer.Option(
        "--export",
        metavar="DIR",
        help="Write the weights as safetensors with Hugging Face's names at the end.",
        show_default=False,
    ),
]
TokenData = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Training data: a file of token ids (docs/how-to/train.md), for a graph a folder of arrays, or "
        "synthetic.",
    ),
]
StepTraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write a trace of the last step: JSON, or Perfetto's format where FILE ends in .pftrace.",
        show_default=False,
    ),
]
PlannedEvents = Annotated[
    str | None,
    typer.Option(
        "--events",
        metavar="TRACE",
        help="Plan for these events: a trace file, or text such as 'lost n3; slow n5 0.5'.",
        show_default=False,
    ),
]
PlanPolicy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Policy with --events: now, expected (the default) or worst.",
        show_default=False,
    ),
]
