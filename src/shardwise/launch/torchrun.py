"""torchrun: a command for every host."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.launch.hosts import Launch


def torchrun_commands(launch: Launch) -> list[list[str]]:
    """The words of each host's command, host by host. ConfigError where several have no place to meet."""
    if launch.hosts == 1:
        alone = ("torchrun", "--standalone", "--nproc-per-node", str(launch.processes[0]))
        return [[*alone, *launch.program]]
    if launch.head is None:
        raise ConfigError(
            "is needed, as the plan has several hosts", key="--head", found=f"{launch.hosts} hosts",
            allowed="the name or address of the first one",
        )  # fmt: skip
    return [
        launch.command(rank=str(host), processes=processes, head=launch.head)
        for host, processes in enumerate(launch.processes)
    ]
