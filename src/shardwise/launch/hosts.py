"""What every launcher needs to know of a plan: hosts, their processes, and the command of each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.cluster import Node
from shardwise.errors import ConfigError
from shardwise.plan import AnyPlan, GraphPlan, UnevenFile

LAUNCHERS = ("torchrun", "slurm", "ray", "k8s")

_LABEL_LENGTH = 40
"""Of a name: with a number behind it, it stays within the 63 characters of a DNS label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run of a plan on hosts, one process per device, ranks in the order of the hosts.

    `arguments` are those of `shardwise` (`train PLAN ...`); `processes` has the devices of each host. `head`
    is the host where ranks meet (host 0), None where the launcher finds it; `port` is free there. `gpu` is
    the vendor whose devices the plan is for, None for a plan on CPUs. `unlike` has the device class of each
    host where none may stand for one of another class; it is empty where any may.
    """

    name: str
    arguments: tuple[str, ...]
    processes: tuple[int, ...]
    head: str | None
    port: int
    gpu: str | None
    unlike: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        return len(self.processes)

    @property
    def program(self) -> tuple[str, ...]:
        """What torchrun is to run. Behind `--` it does not take words like `--log` for short forms of its
        own."""
        return ("-m", "--", "shardwise", *self.arguments)

    def command(
        self, *, rank: str, processes: int, head: str, escape: Callable[[str], str] = str
    ) -> list[str]:
        """The words that start host `rank` of several, all but `rank` and `head` as `escape` writes them:
        these two may be a launcher's own variables.

        The rendezvous is static: host k has the ranks that the plan gives it, whoever comes first.
        """
        before = ("torchrun", "--nnodes", str(self.hosts), "--nproc-per-node", str(processes),
                  "--master-port", str(self.port))  # fmt: skip
        rendezvous = (escape("--node-rank"), rank, escape("--master-addr"), head)
        return [*map(escape, before), *rendezvous, *map(escape, self.program)]

    def processes_per_host(self, launcher: str) -> int:
        """Processes of each host, where all hosts have as many and any may be any of the plan's; ConfigError
        names the launcher that needs it."""
        if len(set(self.processes)) > 1:
            raise ConfigError(
                "starts hosts that are alike", key=f"--with {launcher}",
                found="hosts of " + ", ".join(map(str, sorted(set(self.processes)))) + " devices",
                allowed="--with torchrun, a command per host",
            )  # fmt: skip
        if len(set(self.unlike)) > 1:
            raise ConfigError(
                "starts hosts that are alike", key=f"--with {launcher}",
                found="hosts of " + ", ".join(sorted(set(self.unlike))),
                allowed="--with torchrun, a command per host",
            )  # fmt: skip
        return self.processes[0]


def launch_of(
    plan: AnyPlan, arguments: Sequence[str], *, head: str | None = None, port: int = 29500
) -> Launch:
    """How `plan` is run by `shardwise ARGUMENTS` on the hosts of its cluster, those that it leaves idle too.

    An uneven plan says which devices have which stages, so that its hosts are told apart by class and speed.
    """
    vendors = {device.vendor for device in plan.cluster.classes.values()} - {"host"}
    name = plan.graph.name if isinstance(plan, GraphPlan) else plan.model.name
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return Launch(
        name=f"shardwise-{words}"[:_LABEL_LENGTH].strip("-"),
        arguments=tuple(arguments),
        processes=tuple(node.devices for node in plan.cluster.nodes),
        head=head,
        port=port,
        gpu=" and ".join(sorted(vendors)) or None,
        unlike=tuple(_kind(node) for node in plan.cluster.nodes) if isinstance(plan, UnevenFile) else (),
    )


def _kind(node: Node) -> str:
    """What tells a host of an uneven plan from others."""
    return node.device_class if node.speed == 1.0 else f"{node.device_class} at {node.speed:g}"
