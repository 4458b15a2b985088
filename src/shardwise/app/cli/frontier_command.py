"""The command `frontier`: it is added to the others in `commands`."""

from __future__ import annotations

from shardwise.app.cli.options import (
    BatchSize,
    CalibrationFile,
    ClusterText,
    DeviceCounts,
    Dtype,
    Epsilon,
    Fixed,
    Imbalance,
    InterNode,
    IsJson,
    Margin,
    MemoryLimit,
    Meshes,
    MicrobatchCounts,
    Mode,
    ModelOrGraphText,
    Objectives,
    OptimizerName,
    OptionalSeqLen,
    PlotFile,
    SaveFolder,
    Space,
    StageCount,
    UseAll,
    Workers,
)  # fmt: skip
from shardwise.app.cli.output import Output


def frontier(
    model: ModelOrGraphText,
    cluster: ClusterText,
    global_batch_size: BatchSize,
    seq_len: OptionalSeqLen = None,
    mode: Mode = "time",
    memory_limit: MemoryLimit = None,
    devices: DeviceCounts = None,
    stages: StageCount = None,
    microbatches: MicrobatchCounts = None,
    meshes: Meshes = "tiers",
    objectives: Objectives = "time,memory",
    epsilon: Epsilon = "0.001",
    inter_node: InterNode = None,
    calibration: CalibrationFile = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = "adamw",
    space: Space = "default",
    fix: Fixed = "",
    memory_margin: Margin = "0.05",
    expert_imbalance: Imbalance = "1.1",
    workers: Workers = "1",
    save: SaveFolder = None,
    plot: PlotFile = None,
    use_all: UseAll = False,
    is_json: IsJson = False,
) -> Output:
    """Show all of time against memory for MODEL: every point that none beats in one without losing in the
    other."""
    from shardwise.app.cli import request
    from shardwise.app.cli.frontier import command as frontiers

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
    frontier_options = frontiers.FrontierOptions(
        mode=mode,
        memory_limit=memory_limit,
        devices=devices,
        stages=stages,
        microbatches=microbatches,
        meshes=meshes,
        objectives=objectives,
        epsilon=epsilon,
        space=space,
        fix=fix,
        workers=workers,
        save=save,
        plot=plot,
        uses_all=use_all,
        is_json=is_json,
    )
    return frontiers.frontier(options, frontier_options)
