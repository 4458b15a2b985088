"""Launching of plans: what the shardwise runtime does not run of a plan (`not_run`, `check_runnable`), and
how to start one with torchrun, Slurm, Ray or Kubernetes."""

from shardwise.launch.capability import TARGET, check_runnable, not_run, unsupported_job
from shardwise.launch.launchers import (
    LAUNCHERS,
    PLAN_PATH,
    Launch,
    kubernetes_manifest,
    launch_of,
    ray_script,
    slurm_script,
    torchrun_commands,
)

__all__ = [
    "LAUNCHERS",
    "PLAN_PATH",
    "TARGET",
    "Launch",
    "check_runnable",
    "kubernetes_manifest",
    "launch_of",
    "not_run",
    "ray_script",
    "slurm_script",
    "torchrun_commands",
    "unsupported_job",
]
