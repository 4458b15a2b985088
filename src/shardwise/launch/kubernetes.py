"""Kubernetes: an indexed Job, the Service that gives its pods names, and the plan as a ConfigMap."""

from __future__ import annotations

from typing import Any

import yaml

from shardwise.errors import ConfigError
from shardwise.launch.hosts import Launch

_PLAN_FOLDER = "/etc/shardwise"
PLAN_PATH = f"{_PLAN_FOLDER}/plan.yaml"
"""Where the pods find the plan."""

_MAX_PLAN_BYTES = 1_000_000
"""A ConfigMap holds at most 1 MiB (Kubernetes, ConfigMaps), its names included."""

_GPU_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel": "habana.ai/gaudi",
                  "Google": "google.com/tpu", "AWS": "aws.amazon.com/neuron"}  # fmt: skip
"""What the vendors' device plugins call a device."""


def kubernetes_manifest(launch: Launch, *, plan_text: str, image: str) -> str:
    """YAML for `kubectl apply`: a pod per host, of `image`, which has shardwise and torchrun.

    `launch.arguments` name the plan `PLAN_PATH`. A pod that fails ends the job.
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
        # Names are there before the pods are ready: that is when they look for each other.
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
            "has no device plugin that is known here", key="--with k8s", found=str(launch.gpu),
            allowed=", ".join(_GPU_RESOURCES),
        )  # fmt: skip
    # Kubernetes itself puts JOB_COMPLETION_INDEX into the pods of an indexed Job, and pod k is named NAME-k.
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
    """Texts of several lines as they are; a mapping that is used twice is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
