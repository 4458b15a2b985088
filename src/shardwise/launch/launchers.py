"""Launch commands and files for plans, with torchrun, Slurm, Ray or Kubernetes.

`launch_of` collects what launchers need from a plan in a `Launch`: hosts, processes per host, the command.

- `torchrun_commands`: one command per host.
- `slurm_script`: a batch script for sbatch.
- `ray_script`: a driver that reserves the hosts and starts torchrun on each.
- `kubernetes_manifest`: an indexed Job, a Service for the names of its pods, and the plan as a ConfigMap.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from shardwise.cluster import Node
from shardwise.errors import ConfigError
from shardwise.plans import Plan

# What all launchers need

LAUNCHERS = ("torchrun", "slurm", "ray", "k8s")
"""Values of `--with`."""

_LABEL_LENGTH = 40
"""Longest name; with a number appended, it stays within the 63 characters of a DNS label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run of a plan on hosts, with one process per device and ranks in the order of the hosts.

    `arguments` are those of `shardwise` (`train PLAN ...`). `processes` has the number of devices of each
    host. `head` is the host of the rendezvous (host 0), None if the launcher finds it; `port` must be free
    there. `gpu` is the vendor of the devices, None for CPUs. `unlike` has the device class of each host if
    hosts of different classes are not interchangeable; it is empty if all are.
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
        """Arguments of torchrun that name the program. After `--`, torchrun does not parse options like
        `--log` as abbreviations of its own."""
        return ("-m", "--", "shardwise", *self.arguments)

    def command(
        self, *, rank: str, processes: int, head: str, escape: Callable[[str], str] = str
    ) -> list[str]:
        """The command that starts host `rank` of several hosts.

        All words are escaped by `escape` except `rank` and `head`, which may be variables of a launcher. The
        rendezvous is static: host k has the ranks that the plan gives it, whichever host starts first.
        """
        before = ("torchrun", "--nnodes", str(self.hosts), "--nproc-per-node", str(processes),
                  "--master-port", str(self.port))  # fmt: skip
        rendezvous = (escape("--node-rank"), rank, escape("--master-addr"), head)
        return [*map(escape, before), *rendezvous, *map(escape, self.program)]

    def processes_per_host(self, launcher: str) -> int:
        """Processes of each host. ConfigError, naming the launcher, if hosts differ in devices or are not
        interchangeable."""
        if len(set(self.processes)) > 1:
            raise ConfigError(
                "needs equal hosts", key=f"--with {launcher}",
                found="hosts of " + ", ".join(map(str, sorted(set(self.processes)))) + " devices",
                allowed="--with torchrun, which has a command per host",
            )  # fmt: skip
        if len(set(self.unlike)) > 1:
            raise ConfigError(
                "needs equal hosts", key=f"--with {launcher}",
                found="hosts of " + ", ".join(sorted(set(self.unlike))),
                allowed="--with torchrun, which has a command per host",
            )  # fmt: skip
        return self.processes[0]


def launch_of(plan: Plan, arguments: Sequence[str], *, head: str | None = None, port: int = 29500) -> Launch:
    """How `shardwise ARGUMENTS` runs `plan` on all hosts of its cluster, including idle ones.

    Unless its nodes are interchangeable, hosts are distinguished by device class and speed.
    """
    vendors = {device.vendor for device in plan.cluster.classes.values()} - {"host"}
    words = re.sub(r"[^a-z0-9]+", "-", plan.network.name.lower()).strip("-")
    return Launch(
        name=f"shardwise-{words}"[:_LABEL_LENGTH].strip("-"),
        arguments=tuple(arguments),
        processes=tuple(node.devices for node in plan.cluster.nodes),
        head=head,
        port=port,
        gpu=" and ".join(sorted(vendors)) or None,
        unlike=() if plan.best.can_swap_nodes else tuple(_kind(node) for node in plan.cluster.nodes),
    )


def _kind(node: Node) -> str:
    """Device class and speed of a host, by which hosts are distinguished."""
    return node.device_class if node.speed == 1.0 else f"{node.device_class} at {node.speed:g}"


# Kubernetes

_PLAN_FOLDER = "/etc/shardwise"
PLAN_PATH = f"{_PLAN_FOLDER}/plan.yaml"
"""Path of the plan in the pods."""

_MAX_PLAN_BYTES = 1_000_000
"""Largest plan in bytes. A ConfigMap holds at most 1 MiB, including its metadata (Kubernetes, ConfigMaps)."""

_GPU_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel": "habana.ai/gaudi",
                  "Google": "google.com/tpu", "AWS": "aws.amazon.com/neuron"}  # fmt: skip
"""Resource names of the vendors' device plugins."""


def kubernetes_manifest(launch: Launch, *, plan_text: str, image: str) -> str:
    """YAML for `kubectl apply`, with a pod per host. `image` must contain shardwise and torchrun.

    `launch.arguments` must name the plan as `PLAN_PATH`. A pod that fails ends the job. ConfigError if the
    plan is too large or hosts differ.
    """
    processes = launch.processes_per_host("k8s")
    if len(plan_text.encode()) > _MAX_PLAN_BYTES:
        raise ConfigError(
            "is too large for a ConfigMap", key="--with k8s", found=f"{len(plan_text.encode()):,} bytes",
            allowed=f"at most {_MAX_PLAN_BYTES:,}",
        )  # fmt: skip
    labels = {"app": launch.name}
    plan = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": launch.name},
            "data": {"plan.yaml": plan_text}}  # fmt: skip
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": launch.name},
        # Pods look for each other before they are ready, so their names must be published by then.
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": launch.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": launch.hosts,
            "parallelism": launch.hosts,
            "backoffLimit": 0,
            "template": {"metadata": {"labels": labels}, "spec": _pod(launch, processes, image)},
        },
    }
    return str(yaml.dump_all([plan, service, job], Dumper=_Dumper, sort_keys=False, width=110))


def _pod(launch: Launch, processes: int, image: str) -> dict[str, Any]:
    resource = "cpu" if launch.gpu is None else _GPU_RESOURCES.get(launch.gpu)
    if resource is None:
        raise ConfigError(
            "has no known device plugin", key="--with k8s", found=str(launch.gpu),
            allowed=", ".join(_GPU_RESOURCES),
        )  # fmt: skip
    # Kubernetes sets JOB_COMPLETION_INDEX in the pods of an indexed Job, and names pod k NAME-k.
    command = launch.command(
        rank="$(JOB_COMPLETION_INDEX)",
        processes=processes,
        head=f"{launch.name}-0.{launch.name}",
        escape=lambda word: word.replace("$(", "$$("),
    )
    return {
        "subdomain": launch.name,
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "shardwise",
                "image": image,
                "command": command,
                "resources": {"limits": {resource: processes}},
                "volumeMounts": [
                    {"name": "plan", "mountPath": _PLAN_FOLDER},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "plan", "configMap": {"name": launch.name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text as block literals, and repeated mappings without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


# Ray

_DRIVER = '''\
"""Runs a plan on a Ray cluster: ray job submit --working-dir . -- python THIS_FILE"""

import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HOSTS = {hosts}
DEVICES = {devices}


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def run(rank, head):
    subprocess.run(
        [{command}],
        check=True,
    )


ray.init()
group = placement_group([DEVICES] * HOSTS, strategy="STRICT_SPREAD")
ray.get(group.ready())


def on(rank):
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
    return {{"num_cpus": DEVICES["CPU"], "num_gpus": DEVICES.get("GPU", 0), "scheduling_strategy": place}}


head = ray.get(address.options(**on(0)).remote())
ray.get([run.options(**on(rank)).remote(rank, head) for rank in range(HOSTS)])
'''


def ray_script(launch: Launch) -> str:
    """A Python program for `ray job submit`, whose working folder must contain the plan."""
    processes = launch.processes_per_host("ray")
    devices = {"CPU": processes} if launch.gpu is None else {"CPU": 1, "GPU": processes}
    words = launch.command(rank="str(rank)", processes=processes, head="head", escape=repr)
    return _DRIVER.format(hosts=launch.hosts, devices=devices, command=", ".join(words))


# Slurm

# Shell words inside single quotes: `$0` is the argument after them.
_RANK, _HEAD = '"$SLURM_NODEID"', '"$0"'


def slurm_script(launch: Launch) -> str:
    """A script for `sbatch`, to be submitted from the folder to which the plan's path is relative.

    One task per host starts torchrun. The rendezvous is at the first host of the allocation.
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


# torchrun


def torchrun_commands(launch: Launch) -> list[list[str]]:
    """The command of each host, as words. ConfigError if there are several hosts and no head."""
    if launch.hosts == 1:
        alone = ("torchrun", "--standalone", "--nproc-per-node", str(launch.processes[0]))
        return [[*alone, *launch.program]]
    if launch.head is None:
        raise ConfigError(
            "is required for a plan with several hosts", key="--head", found=f"{launch.hosts} hosts",
            allowed="name or address of the first host",
        )  # fmt: skip
    return [
        launch.command(rank=str(host), processes=processes, head=launch.head)
        for host, processes in enumerate(launch.processes)
    ]
