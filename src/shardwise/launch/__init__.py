"""Launching of plans: what the shardwise runtime does not run of a plan (`not_run`, `check_runnable`), and
how to start one, or a program for one, with torchrun, Slurm, Ray or Kubernetes."""

from shardwise.launch.capability import check_runnable, not_run, own_target, unsupported_job
from shardwise.launch.launchers import (
    FILES_FOLDER,
    LAUNCHERS,
    PLAN_PATH,
    Launch,
    Program,
    Verbatim,
    host_commands,
    host_lines,
    jobset_manifest,
    kubernetes_manifest,
    launch_of,
    own_program,
    ray_script,
    slurm_script,
    start_lines,
)

__all__ = [
    "FILES_FOLDER",
    "LAUNCHERS",
    "PLAN_PATH",
    "Launch",
    "Program",
    "Verbatim",
    "check_runnable",
    "host_commands",
    "host_lines",
    "jobset_manifest",
    "kubernetes_manifest",
    "launch_of",
    "not_run",
    "own_program",
    "own_target",
    "ray_script",
    "slurm_script",
    "start_lines",
    "unsupported_job",
]
