"""Slurm: a batch script."""

from __future__ import annotations

import shlex

from shardwise.launch.hosts import Launch

# Words of a shell inside single quotes: `$0` is what follows them.
_RANK, _HEAD = '"$SLURM_NODEID"', '"$0"'


def slurm_script(launch: Launch) -> str:
    """A script for `sbatch`, to be submitted from the folder that the plan's path is relative to.

    One task per host starts torchrun there; the hosts meet at the first one of the allocation.
    """
    processes = launch.processes_per_host("slurm")
    devices = f"--cpus-per-task={processes}" if launch.gpu is None else f"--gpus-per-node={processes}"
    words = launch.command(rank=_RANK, processes=processes, head=_HEAD, escape=shlex.quote)
    inner = shlex.quote(f"exec {' '.join(words)}")
    return (
        "#!/bin/bash\n"
        f"#SBATCH --job-name={launch.name}\n"
        f"#SBATCH --nodes={launch.hosts}\n"
        "#SBATCH --ntasks-per-node=1\n"
        f"#SBATCH {devices}\n"
        "#SBATCH --exclusive\n"
        "set -eu\n"
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f'srun --kill-on-bad-exit=1 bash -c {inner} "$head"\n'
    )
