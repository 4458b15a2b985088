"""Arguments and options that commands share: names, metavars and help. Scripts rely on the names."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from shardwise.app.cli.completion import completer


def option(name: str, metavar: str, help_text: str) -> Any:
    """An option whose help shows no default: it has none, or the text names it."""
    return typer.Option(
        name, metavar=metavar, help=help_text, show_default=False, autocompletion=completer(name)
    )


def argument(metavar: str, help_text: str, *, completed_as: str | None = None) -> Any:
    """An argument whose help shows no default. Shells complete it as `completed_as` (default: the
    metavar)."""
    return typer.Argument(
        metavar=metavar,
        help=help_text,
        show_default=False,
        autocompletion=completer(completed_as or metavar),
    )


ModelText = Annotated[
    str,
    argument(
        "MODEL",
        "Model: a Hugging Face config.json (file or folder), a cached ORG/NAME of the Hugging "
        "Face Hub, a YAML of dimensions, or a catalogue name.",
    ),
]
ModelOrGraphText = Annotated[
    str,
    argument(
        "MODEL",
        "Transformer: a config.json (file or folder), a cached ORG/NAME of the Hugging Face Hub, "
        "a YAML of dimensions, or a catalogue name. "
        "Operator graph: a YAML or JSON of operators, or graph:NAME (see `shardwise graphs`).",
        completed_as="MODEL or graph",
    ),
]
PlanClusterText = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        autocompletion=completer("--cluster"),
        metavar="C",
        help="Cluster of a plan, as of `plan`. Default: the one that the plan was made for, with its idle "
        "nodes.",
        show_default=False,
    ),
]
ClusterText = Annotated[
    str,
    option(
        "--cluster",
        "C",
        "Cluster: a shorthand such as 8x8xH100-SXM (nodes x devices per node x device) or 4xRTX4090, a "
        "shipped cluster such as two-classes, or a cluster YAML.",
    ),
]
SeqLen = Annotated[str, option("--seq-len", "N", "Tokens per sequence.")]
BatchSize = Annotated[str, option("--global-batch-size", "N", "Sequences per optimizer step.")]
InterNode = Annotated[
    str | None,
    option(
        "--inter-node", "RATE", "Bandwidth of each network card: 200Gb/s; 4x200Gb/s for four cards per node."
    ),
]
Price = Annotated[
    str | None,
    option(
        "--price",
        "USD",
        "Price per device and hour: 2.9, or a list price such as aws:3-years. Default: the list price on"
        " demand.",
    ),
]
LoraAdapters = Annotated[
    str | None,
    option(
        "--lora",
        "R|FILE",
        "Train LoRA adapters alone, the model's weights frozen: 16 (on q_proj and v_proj), "
        "r=16,targets=q_proj+k_proj+v_proj+o_proj, or an adapter_config.json of PEFT (file or folder).",
    ),
]
Images = Annotated[
    str | None,
    option(
        "--images",
        "N",
        "Images per sequence: counts the vision tower of the config. With height and width: 2@1024x768."
        " Default: the text decoder alone.",
    ),
]
FrozenParts = Annotated[
    str | None,
    option(
        "--freeze",
        "PARTS",
        "Parts that are not trained: vision, projector, language, such as vision+projector.",
    ),
]
CalibrationFile = Annotated[
    str | None,
    option(
        "--calibration",
        "FILE",
        "Calibration file of measured devices and software, from `shardwise calibrate`.",
    ),
]
Dtype = Annotated[
    str | None,
    option("--dtype", "D", "Training precision. Default: the best 16-bit type that all devices support."),
]
OptimizerName = Annotated[
    str,
    typer.Option(
        "--optimizer",
        autocompletion=completer("--optimizer"),
        metavar="O",
        help="Optimizer: adamw, adafactor, sgd or muon.",
    ),
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
MeanSampleLen = Annotated[
    str | None,
    option(
        "--mean-sample-len",
        "N",
        "Tokens of the samples that are packed into a sequence; a token attends within its sample. Default: "
        "the whole sequence.",
    ),
]
Space = Annotated[
    str,
    typer.Option(
        "--space",
        autocompletion=completer("--space"),
        metavar="NAME|FILE",
        help="Search space: default, core, or a YAML file with a base and the values of some axes.",
    ),
]
Fixed = Annotated[
    str,
    option("--fix", "K=V,...", "Fix fields of the strategy: tp=8,zero_stage=1.")
]  # fmt: skip
TargetName = Annotated[
    str | None,
    option(
        "--target",
        "NAME",
        "Software that runs the plan: megatron-lm-0.19, torchtitan-0.3, fsdp2, deepspeed-0.19, "
        "megatron-fsdp-0.19, transformers-5, shardwise (`shardwise train`), or any. Default: the first "
        "within 3 % of the fastest; shardwise on clusters of cpu devices.",
    ),
]
SoftwareName = Annotated[
    str | None,
    option(
        "--software",
        "NAME",
        "Price as this software instead of the target's own: a target, or a profile such as megatron-2024.",
    ),
]
AttentionKernel = Annotated[
    str | None,
    option(
        "--attention",
        "KERNEL",
        "Attention kernel, as --set attention=KERNEL: flash, efficient (of PyTorch), or unfused (scores in "
        "memory). Default: that of the software and its version on these devices.",
    ),
]
SoftwareOptions = Annotated[
    str | None,
    option(
        "--set",
        "K=V,...",
        "Set options of the software: tp_comm_overlap=on|off, ep_overlap=on|off, "
        "grad_reduce_dtype=fp32|bf16, moment_dtype=fp32|bf16, attention=flash|efficient|unfused, "
        "loss=eager|fused, cuda_graph=none|modules|full_iteration, offload_modules=core_attn+attn_proj, "
        "recompute_modules=core_attn+mlp. Default: what the target does by itself, or is never slower with.",
    ),
]
Tolerance = Annotated[
    str,
    typer.Option(
        "--tolerance",
        metavar="X",
        help="How much slower than the optimum the recommended strategy may be, where it is simpler.",
    ),
]
Tokens = Annotated[
    str | None,
    option("--tokens", "N", "Length of the whole run in tokens, such as 15T: shows days, money and energy."),
]
RunSteps = Annotated[str | None, option("--steps", "N", "Length of the whole run in optimizer steps.")]
Days = Annotated[
    str | None, option("--days", "X", "Length of the whole run in days: shows how many tokens it trains.")
]
Power = Annotated[
    str | None,
    option(
        "--power",
        "W",
        "Power of a device in a whole run, such as 1.2kW. Default: its rated power, without servers and"
        " cooling.",
    ),
]
Mtbf = Annotated[
    str | None, option("--mtbf", "T", "Mean time between failures of a device, for goodput. Default: 50677h.")
]
CheckpointInterval = Annotated[
    str | None,
    option(
        "--checkpoint-interval",
        "T",
        "Training time between checkpoints, for goodput: 30min. Default: the optimum.",
    ),
]
CheckpointStall = Annotated[
    str | None,
    option("--checkpoint-stall", "T", "Time that a checkpoint blocks training, for goodput. Default: 6.3s."),
]
Restart = Annotated[
    str | None, option("--restart", "T", "Time from a failure to the next step, for goodput. Default: 10min.")
]
Jitter = Annotated[
    str | None,
    option(
        "--jitter",
        "X",
        "Standard deviation of a node's step time over its mean, for goodput. Default: 0.007.",
    ),
]
UseAll = Annotated[bool, typer.Option("--use-all", help="Use all devices, even where fewer are faster.")]
AllowIdle = Annotated[bool, typer.Option("--allow-idle", hidden=True)]
IsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/reference/formats.md).")]
IsBrief = Annotated[bool, typer.Option("--brief", help="Print one line.")]
IsVerbose = Annotated[
    bool, typer.Option("--verbose", help="Print all counts, reasons, alternatives and assumptions.")
]


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
    option(
        "--budget",
        "T",
        "Time limit of the search, such as 10s; the answer is then the incumbent with its gap.",
    ),
]
PlanFile = Annotated[str, argument("PLAN", "Plan file, from `plan --save FILE`.")]
OptionalSeqLen = Annotated[
    str | None, option("--seq-len", "N", "Tokens per sequence. Default: the maximum of the model, else 4096.")
]
Mode = Annotated[
    str | None,
    option(
        "--mode",
        "NAME",
        "Choose the fastest point (time), the fewest devices (devices), or none and show a table per "
        "device count (profile). Default: time; profile for a whole run.",
    ),
]
MemoryLimit = Annotated[
    str | None, option("--memory-limit", "SIZE", "Most memory per device of the chosen point: 40GiB.")
]
DeviceCounts = Annotated[
    str | None, option("--devices", "N,...", "Device counts to search: 1,2,4. Default: those of the mode.")
]
Objective = Annotated[
    str,
    typer.Option(
        "--objective",
        autocompletion=completer("--objective"),
        metavar="NAME",
        help="Objective to minimise: time, memory, devices or cost.",
    ),
]
HasFrontier = Annotated[
    bool, typer.Option("--frontier", help="Add the exact Pareto frontier of step time and memory.")
]
Exhaustive = Annotated[
    bool, typer.Option("--exhaustive", help="Evaluate every feasible candidate, without pruning.")
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
StageCount = Annotated[str | None, option("--stages", "N", "Number of pipeline stages.")]
MicrobatchCounts = Annotated[
    str | None,
    option(
        "--microbatches", "LIST", "Numbers of micro-batches of an operator graph in stages, such as 8,16."
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
SaveFolder = Annotated[str | None, option("--save", "DIR", "Write a plan file per point into this folder.")]
PlotFile = Annotated[
    str | None, option("--plot", "FILE", "Plot the frontier as .png, .svg, or .html with details on hover.")
]

Checkpoint = Annotated[
    str | None,
    option(
        "--checkpoint", "DIR", "Folder of checkpoints, saved every --checkpoint-every steps and at the end."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume from the newest checkpoint, under this plan.")]
Seed = Annotated[
    str | None,
    option("--seed", "N", "Random seed of parameters and samples. Default: 0, or the checkpoint's."),
]
Adaptive = Annotated[
    bool,
    typer.Option("--adaptive", help="Monitor steps and links, and change the plan where that is faster."),
]
Weights = Annotated[
    str | None, option("--weights", "DIR", "Load initial weights from safetensors with Hugging Face's names.")
]
Export = Annotated[
    str | None,
    option("--export", "DIR", "Write the weights as safetensors with Hugging Face's names at the end."),
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
    option(
        "--trace",
        "FILE",
        "Write a trace of the last step: JSON, or Perfetto's format where FILE ends in .pftrace.",
    ),
]
PlannedEvents = Annotated[
    str | None,
    option(
        "--events", "TRACE", "Plan for these events: a trace file, or text such as 'lost n3; slow n5 0.5'."
    ),
]
PlanPolicy = Annotated[
    str | None, option("--policy", "NAME", "Policy with --events: now, expected (the default) or worst.")
]
