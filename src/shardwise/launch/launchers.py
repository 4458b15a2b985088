"""Launch commands and files for plans, with torchrun, Slurm, Ray or Kubernetes.

A `Program` is what runs on the hosts: `shardwise train` (`own_program`), or other training software.
`launch_of` collects what launchers need for it from a plan in a `Launch`: hosts, processes per host, the
command.

- `host_commands`: one command per host; `host_lines`: the same as bash text. `start_lines`: one command for
  all hosts, with variables.
- `slurm_script`: a batch script for sbatch.
- `ray_script`: a driver that reserves the hosts and starts torchrun on each.
- `kubernetes_manifest`: an indexed Job, a Service for the names of its pods, and the plan as a ConfigMap.
- `jobset_manifest`: a JobSet, and the files of the program as a ConfigMap.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import yaml

from shardwise.cluster import Node
from shardwise.errors import ConfigError
from shardwise.plans import Plan

# What all launchers need

LAUNCHERS = ("torchrun", "slurm", "ray", "k8s")
"""Values of `--with`."""

PORT = 29500
"""The default port of the first host; torchrun's too."""

_LABEL_LENGTH = 40
"""Longest name; with numbers appended, it stays within the 63 characters of a DNS label."""


class Verbatim(str):
    """A word in the language of the launcher, such as a variable, which is not escaped."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is started on the hosts.

    `words` are the arguments of torchrun that name the program, with its own arguments: after `--`, torchrun
    does not parse options like `--log` as abbreviations of its own. With `accelerate`, a configuration file,
    `accelerate launch` starts them instead. `setup` are bash commands that run first on every host. `notes`
    are comments for the user, one line each.
    """

    words: tuple[str, ...]
    accelerate: str | None = None
    setup: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def own_program(arguments: Sequence[str]) -> Program:
    """`shardwise ARGUMENTS`."""
    return Program(words=("-m", "--", "shardwise", *arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """Neighbouring hosts, from number `first` on, with equally many processes each."""

    first: int
    hosts: int
    processes: int

    def rank(self, variable: str) -> Verbatim:
        """The number of a host, where a shell variable has its number in the group."""
        return Verbatim(f'"$(({variable} + {self.first}))"' if self.first else f'"${variable}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A run of a plan on hosts, with one process per device and ranks in the order of the hosts.

    `processes` has the number of devices of each host. `head` is the host of the rendezvous (host 0), None if
    the launcher finds it; `port` must be free there. `gpu` is the vendor of the devices, None for CPUs.
    `unlike` has the device class of each host if hosts of different classes are not interchangeable; it is
    empty if all are.
    """

    name: str
    program: Program
    processes: tuple[int, ...]
    head: str | None
    port: int
    gpu: str | None
    unlike: tuple[str, ...] = ()

    @property
    def hosts(self) -> int:
        return len(self.processes)

    def command(self, *, rank: str, processes: str, head: str) -> list[str]:
        """The words that start host `rank` of several hosts.

        The rendezvous is static: host k has the ranks that the plan gives it, whichever host starts first.
        """
        if self.program.accelerate is None:
            sizes = ["--nnodes", str(self.hosts), "--nproc-per-node", processes]
            starter = ["torchrun", *sizes, "--master-port", str(self.port), "--node-rank", rank,
                       "--master-addr", head]  # fmt: skip
        else:
            starter = [*self._accelerate, "--main_process_port", str(self.port),
                       "--machine_rank", rank, "--main_process_ip", head]  # fmt: skip
        return [*starter, *self.program.words]

    @property
    def alone(self) -> list[str]:
        """The words that start the only host."""
        starter = ["torchrun", "--standalone", "--nproc-per-node", str(self.processes[0])]
        if self.program.accelerate is not None:
            starter = self._accelerate
        return [*starter, *self.program.words]

    @property
    def _accelerate(self) -> list[str]:
        return ["accelerate", "launch", "--config_file", str(self.program.accelerate),
                "--num_machines", str(self.hosts), "--num_processes", str(sum(self.processes))]  # fmt: skip

    def text(self, command: Iterable[str], *, before: str = "") -> str:
        """Bash text of a command, which `before` precedes, after the setup of the program."""
        return " && ".join((*self.program.setup, before + " ".join(_escaped(command, shlex.quote))))

    def processes_per_host(self, launcher: str) -> int:
        """Processes of each host. ConfigError, naming the launcher, if hosts differ in devices or are not
        interchangeable."""
        (first, *others) = self.groups(launcher)
        if others:
            raise ConfigError(
                "needs equal hosts", key=f"--with {launcher}",
                found="hosts of " + ", ".join(map(str, sorted(set(self.processes)))) + " devices",
                allowed="--with torchrun, slurm or k8s, which start each kind of host by itself",
            )  # fmt: skip
        return first.processes

    def groups(self, launcher: str) -> list[HostGroup]:
        """The hosts as groups of neighbours with equally many processes. ConfigError, naming the launcher,
        if the hosts of a group are not interchangeable."""
        if len(set(self.unlike)) > 1:
            raise ConfigError(
                "needs equal hosts", key=f"--with {launcher}",
                found="hosts of " + ", ".join(sorted(set(self.unlike))),
                allowed="--with torchrun, which has a command per host",
            )  # fmt: skip
        counts = [(processes, len(list(run))) for processes, run in groupby(self.processes)]
        starts = accumulate((hosts for _, hosts in counts), initial=0)
        return [
            HostGroup(first=first, hosts=hosts, processes=processes)
            for first, (processes, hosts) in zip(starts, counts, strict=False)
        ]


def _escaped(words: Iterable[str], escape: Callable[[str], str]) -> list[str]:
    return [str(word) if isinstance(word, Verbatim) else escape(word) for word in words]


def launch_of(plan: Plan, program: Program, *, head: str | None = None, port: int = PORT) -> Launch:
    """How `program` runs `plan` on all hosts of its cluster, including idle ones.

    Unless its nodes are interchangeable, hosts are distinguished by device class and speed.
    """
    vendors = {device.vendor for device in plan.cluster.classes.values()} - {"host"}
    words = re.sub(r"[^a-z0-9]+", "-", plan.network.name.lower()).strip("-")
    return Launch(
        name=f"shardwise-{words}"[:_LABEL_LENGTH].strip("-"),
        program=program,
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

FILES_FOLDER = "/etc/shardwise"
"""Folder of the files in the pods."""

PLAN_PATH = f"{FILES_FOLDER}/plan.yaml"
"""Path of the plan in the pods."""

_MAX_BYTES = 1_000_000
"""Most bytes of files. A ConfigMap holds at most 1 MiB, including its metadata (Kubernetes, ConfigMaps)."""

_GPU_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel": "habana.ai/gaudi",
                  "Google": "google.com/tpu", "AWS": "aws.amazon.com/neuron"}  # fmt: skip
"""Resource names of the vendors' device plugins."""

_RANK_VARIABLE = "JOB_COMPLETION_INDEX"
"""Variable of the pods of an indexed Job: the number of the pod."""


def kubernetes_manifest(launch: Launch, *, plan_text: str, image: str) -> str:
    """YAML for `kubectl apply`, with a pod per host, and a Job for each group of equal hosts. `image` must
    contain shardwise and torchrun, and bash where there are several groups.

    The program must name the plan as `PLAN_PATH`. A pod that fails ends its job. ConfigError if the
    plan is too large or hosts are not interchangeable.
    """
    groups, labels = launch.groups("k8s"), {"app": launch.name}
    names = [launch.name] if len(groups) == 1 else [f"{launch.name}-{place}" for place in range(len(groups))]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": launch.name},
        # Pods look for each other before they are ready, so their names must be published by then.
        "spec": {"clusterIP": "None", "selector": labels, "publishNotReadyAddresses": True},
    }
    # Kubernetes names pod k of the Job NAME-k.
    head = f"{names[0]}-0.{launch.name}"
    jobs = []
    for name, group in zip(names, groups, strict=True):
        if len(groups) == 1:
            rank = Verbatim(f"$({_RANK_VARIABLE})")
            command = launch.command(rank=rank, processes=str(group.processes), head=head)
            words = _escaped(command, _unexpanded)
        else:
            words = _bash(launch, group, head)
        pod = {"subdomain": launch.name, **_pod(launch, words, image, group)}
        spec = _job(group, {"metadata": {"labels": labels}, "spec": pod})
        jobs.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec})
    return _yaml(_config_map(launch, {"plan.yaml": plan_text}), service, *jobs)


def _bash(launch: Launch, group: HostGroup, head: str) -> list[str]:
    """The words of a container of this group, whose number in it is a variable."""
    command = launch.command(rank=group.rank(_RANK_VARIABLE), processes=str(group.processes), head=head)
    return ["bash", "-c", _unexpanded(launch.text(command, before="exec "))]


def jobset_manifest(launch: Launch, *, files: Mapping[str, str], image: str) -> str:
    """YAML for `kubectl apply`, with a pod per host, and a replicated job for each group of equal hosts, for
    clusters with the JobSet controller. `image` must contain the software and bash.

    The program must name the files, texts by name, in `FILES_FOLDER`. A pod that fails ends the set.
    ConfigError if the files are too large or hosts are not interchangeable.
    """
    groups = launch.groups("k8s")
    names = ["node"] if len(groups) == 1 else [f"node{place}" for place in range(len(groups))]
    # The controller names pod k of the only Job (number 0) of `node` NAME-node-0-k, in the domain NAME.
    head = f"{launch.name}-{names[0]}-0-0.{launch.name}"
    jobs = [
        {
            "name": name,
            "replicas": 1,
            "template": {
                "spec": _job(group, {"spec": _pod(launch, _bash(launch, group, head), image, group)})
            },
        }
        for name, group in zip(names, groups, strict=True)
    ]
    jobset = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": launch.name},
        "spec": {"replicatedJobs": jobs},
    }
    return _comments(launch) + _yaml(_config_map(launch, files), jobset)


def _unexpanded(text: str) -> str:
    """`text`, of which Kubernetes expands nothing: it reads $(NAME) as a variable, and $$ as $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _yaml(*documents: object) -> str:
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110))


def _config_map(launch: Launch, files: Mapping[str, str]) -> dict[str, Any]:
    if (size := sum(len(text.encode()) for text in files.values())) > _MAX_BYTES:
        raise ConfigError(
            "is too large for a ConfigMap", key="--with k8s", found=f"{size:,} bytes",
            allowed=f"at most {_MAX_BYTES:,}",
        )  # fmt: skip
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": launch.name}, "data": dict(files)}


def _job(group: HostGroup, template: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": group.hosts,
        "parallelism": group.hosts,
        "backoffLimit": 0,
        "template": template,
    }


def _pod(launch: Launch, command: Sequence[str], image: str, group: HostGroup) -> dict[str, Any]:
    resource = "cpu" if launch.gpu is None else _GPU_RESOURCES.get(launch.gpu)
    if resource is None:
        raise ConfigError(
            "has no known device plugin", key="--with k8s", found=str(launch.gpu),
            allowed=", ".join(_GPU_RESOURCES),
        )  # fmt: skip
    return {
        "restartPolicy": "Never",
        "containers": [
            {
                "name": "shardwise",
                "image": image,
                "command": list(command),
                "resources": {"limits": {resource: group.processes}},
                "volumeMounts": [
                    {"name": "files", "mountPath": FILES_FOLDER},
                    {"name": "shm", "mountPath": "/dev/shm"},
                ],
            }
        ],
        "volumes": [
            {"name": "files", "configMap": {"name": launch.name}},
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
    words = launch.command(rank=Verbatim("str(rank)"), processes=str(processes), head=Verbatim("head"))
    command = ", ".join(_escaped(words, repr))
    return _DRIVER.format(hosts=launch.hosts, devices=devices, command=command)


# Slurm

# Inside single quotes, `$0` is the argument after them.
_NODE, _HEAD = "SLURM_NODEID", Verbatim('"$0"')


def slurm_script(launch: Launch) -> str:
    """A script for `sbatch`, to be submitted from the folder to which the program's paths are relative.

    One task per host starts the processes. The rendezvous is at the first host of the allocation. Where hosts
    have unequally many processes, each group of equal ones is a component of a heterogeneous job with a step
    of its own; a step that fails ends the others. ConfigError if hosts are not interchangeable.
    """
    groups = launch.groups("slurm")
    requests = "#SBATCH hetjob\n".join(_request(launch, group) for group in groups)
    start = f"#!/bin/bash\n{_comments(launch)}#SBATCH --job-name={launch.name}\n{requests}set -eu\n"
    if len(groups) == 1:
        return f"{start}{_head_of('SLURM_JOB_NODELIST')}{_step(launch, groups[0])}\n"
    steps = (f"{_step(launch, group, f'--het-group={place} ')} &\n" for place, group in enumerate(groups))
    return (
        f"{start}{_head_of('SLURM_JOB_NODELIST_HET_GROUP_0')}"
        "trap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n"
        f"{''.join(steps)}"
        f"for _ in {' '.join(map(str, range(len(groups))))}; do wait -n; done\n"
    )


def _request(launch: Launch, group: HostGroup) -> str:
    """The directives for the hosts of a group."""
    kind = "cpus-per-task" if launch.gpu is None else "gpus-per-node"
    options = (f"--nodes={group.hosts}", "--ntasks-per-node=1", f"--{kind}={group.processes}", "--exclusive")
    return "".join(f"#SBATCH {option}\n" for option in options)


def _head_of(variable: str) -> str:
    return f'head=$(scontrol show hostnames "${variable}" | head -n 1)\n'


def _step(launch: Launch, group: HostGroup, options: str = "") -> str:
    """The command that starts the processes on the hosts of a group."""
    command = launch.command(rank=group.rank(_NODE), processes=str(group.processes), head=_HEAD)
    inner = shlex.quote(launch.text(command, before="exec "))
    return f'srun {options}--kill-on-bad-exit=1 --cpu-bind=none bash -c {inner} "$head"'


# torchrun


def host_commands(launch: Launch) -> list[list[str]]:
    """The command of each host, as words. ConfigError if there are several hosts and no head."""
    if launch.hosts == 1:
        return [launch.alone]
    if launch.head is None:
        raise ConfigError(
            "is required for a plan with several hosts", key="--head", found=f"{launch.hosts} hosts",
            allowed="name or address of the first host",
        )  # fmt: skip
    return [
        launch.command(rank=str(host), processes=str(processes), head=launch.head)
        for host, processes in enumerate(launch.processes)
    ]


def host_lines(launch: Launch) -> str:
    """The commands of `host_commands` as bash text, with the setup of the program before each."""
    return _comments(launch) + "".join(f"{launch.text(command)}\n" for command in host_commands(launch))


def start_lines(plan: Plan, program: Program) -> Iterator[str]:
    """How `program` starts, for a comment: bash text that is the same on every node. On several nodes it has
    the variables NODE_RANK and MASTER_ADDR, and DEVICES where nodes have unequally many."""
    launch = launch_of(plan, program)
    if launch.hosts == 1:
        yield launch.text(launch.alone)
        return
    yield f"On each of the {launch.hosts} nodes, NODE_RANK from 0 in the order of the plan's cluster:"
    each = str(launch.processes[0])
    if len(set(launch.processes)) > 1:
        yield f"DEVICES is the number of devices of the node: {', '.join(map(str, launch.processes))}."
        each = Verbatim('"$DEVICES"')
    command = launch.command(rank=Verbatim('"$NODE_RANK"'), processes=each, head=Verbatim('"$MASTER_ADDR"'))
    yield launch.text(command)


def _comments(launch: Launch) -> str:
    return "".join(f"# {note}\n" for note in launch.program.notes)
