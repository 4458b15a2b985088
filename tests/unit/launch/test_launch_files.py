"""Commands and files that start a plan: their content, and the calls that stand-ins for the launchers
receive.
"""

from __future__ import annotations

import ast
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.property.layout_instances import chain
from tests.runtime.graph_plans import sampled_in_stages
from tests.runtime.plans import make_plan
from tests.runtime.uneven_plans import make_uneven
from tests.unit.launch.stand_ins import SRUN, expanded, install, recorded

from shardwise.cluster import load_cluster
from shardwise.errors import ConfigError
from shardwise.launch import (
    Launch,
    host_commands,
    kubernetes_manifest,
    launch_of,
    own_program,
    ray_script,
    slurm_script,
)

ODD = ("train", "my plan's.yaml", "--data", '$(x) "$HOME" {0} $$ $$(JOB_COMPLETION_INDEX)')
"""Arguments that shells, file formats and Kubernetes would each interpret differently."""


def launch(*processes: int, head: str | None = None, gpu: str | None = None, arguments: Any = ODD) -> Launch:
    program = own_program(arguments)
    return Launch(name="shardwise-tiny", program=program, processes=processes, head=head, port=29500, gpu=gpu)


def words_of(host: int, *, hosts: int = 2, processes: int = 4, head: str = "h0") -> list[str]:
    """Arguments for torchrun on `host`."""
    text = (
        f"--nnodes {hosts} --nproc-per-node {processes} --master-port 29500 --node-rank {host}"
        f" --master-addr {head} -m -- shardwise"
    )
    return [*text.split(), *ODD]


def test_torchrun_on_one_host() -> None:
    commands = host_commands(launch(4, arguments=("train", "p.yaml", "--steps", "5")))
    assert [shlex.join(command) for command in commands] == [
        "torchrun --standalone --nproc-per-node 4 -m -- shardwise train p.yaml --steps 5"
    ]


def test_torchrun_on_unequal_hosts() -> None:
    commands = host_commands(launch(4, 2, head="h0", arguments=("train", "p.yaml")))
    assert [shlex.join(command) for command in commands] == [
        "torchrun --nnodes 2 --nproc-per-node 4 --master-port 29500 --node-rank 0 --master-addr h0"
        " -m -- shardwise train p.yaml",
        "torchrun --nnodes 2 --nproc-per-node 2 --master-port 29500 --node-rank 1 --master-addr h0"
        " -m -- shardwise train p.yaml",
    ]


def test_several_hosts_need_a_rendezvous_address() -> None:
    with pytest.raises(ConfigError, match="--head"):
        host_commands(launch(4, 4))


def test_the_ray_driver_needs_identical_hosts() -> None:
    with pytest.raises(ConfigError, match="hosts of 2, 4 devices"):
        ray_script(launch(4, 2))


UNEQUAL_SRUN = """\
import os, subprocess, sys
(group,) = (int(word.removeprefix("--het-group=")) for word in sys.argv if word.startswith("--het-group="))
words = [word for word in sys.argv[1:] if not word.startswith("--")]
for host in range((2, 1)[group]):
    subprocess.run(words, env={**os.environ, "SLURM_NODEID": str(host)}, check=True)
"""
"""Replaces srun: two hosts in the first component of a job, and one in the second."""


def test_slurm_starts_each_kind_of_host_by_itself(tmp_path: Path) -> None:
    """Hosts 0 and 1 have 4 devices, host 2 has 2; Slurm numbers the hosts of each component from 0."""
    install(tmp_path, "srun", UNEQUAL_SRUN)
    install(tmp_path, "scontrol", 'import sys; print(sys.argv[-1].replace("list", "h0"))')
    script = tmp_path / "job"
    script.write_text(slurm_script(launch(4, 4, 2, gpu="NVIDIA")))
    calls = recorded(tmp_path, ["bash", str(script)], SLURM_JOB_NODELIST_HET_GROUP_0="list")
    expected = [["torchrun", *words_of(host, hosts=3, processes=4)] for host in range(2)]
    expected.append(["torchrun", *words_of(2, hosts=3, processes=2)])
    assert sorted(call.words for call in calls) == sorted(expected)
    directives = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "#SBATCH --job-name=shardwise-tiny",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --exclusive",
        "#SBATCH hetjob",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=2",
        "#SBATCH --exclusive",
    ]


def test_a_failed_step_of_slurm_ends_the_others(tmp_path: Path) -> None:
    """The first component waits for ever, the second fails."""
    body = 'import sys, time\nif "--het-group=1" in sys.argv: sys.exit(3)\ntime.sleep(600)\n'
    install(tmp_path, "srun", body)
    install(tmp_path, "scontrol", 'print("h0")')
    script = tmp_path / "job"
    script.write_text(slurm_script(launch(4, 2)))
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    environment["SLURM_JOB_NODELIST_HET_GROUP_0"] = "h0"
    done = subprocess.run(["bash", str(script)], env=environment, timeout=60, check=False)
    assert done.returncode == 3


def test_kubernetes_has_a_job_for_each_kind_of_host() -> None:
    _, service, *jobs = manifest(launch(4, 4, 2))
    found = []
    for job in jobs:
        spec = job["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {"cpu": 4 if job is jobs[0] else 2}}
        assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        bash, option, text = (expanded(word, {}) for word in container["command"])
        for index in range(spec["completions"]):
            shown = 'torchrun() { printf "%s\\n" "$@"; }; ' + text.removeprefix("exec ")
            environment = {**os.environ, "JOB_COMPLETION_INDEX": str(index)}
            done = subprocess.run(
                [bash, option, shown], env=environment, capture_output=True, text=True, check=True
            )
            found.append(done.stdout.splitlines())
    head = "shardwise-tiny-0-0.shardwise-tiny"
    flat = [word for one in ODD for word in one.split("\n")]
    expected = [words_of(host, hosts=3, processes=4 if host < 2 else 2, head=head) for host in range(3)]
    assert found == [[*words[: -len(ODD)], *flat] for words in expected]
    assert [job["metadata"]["name"] for job in jobs] == ["shardwise-tiny-0", "shardwise-tiny-1"]


def test_the_slurm_script_starts_torchrun_on_each_host(tmp_path: Path) -> None:
    install(tmp_path, "srun", SRUN)
    install(tmp_path, "scontrol", 'print("h0\\nh1")')
    script = tmp_path / "job"
    script.write_text(slurm_script(launch(4, 4)))
    calls = recorded(tmp_path, ["bash", str(script)], SLURM_JOB_NODELIST="h[0-1]")
    assert [call.words for call in calls] == [["torchrun", *words_of(host)] for host in range(2)]


def test_the_resources_requested_of_slurm() -> None:
    lines = slurm_script(launch(8, 8, gpu="NVIDIA")).splitlines()
    assert lines[:6] == [
        "#!/bin/bash",
        "#SBATCH --job-name=shardwise-tiny",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive",
    ]
    assert "#SBATCH --cpus-per-task=4" in slurm_script(launch(4)).splitlines()


RAY = {
    "ray/__init__.py": """\
from types import SimpleNamespace
def remote(**options):
    def decorate(function):
        def at(**place):
            print(place["num_cpus"], place["num_gpus"], place["scheduling_strategy"])
            return SimpleNamespace(remote=function)
        return SimpleNamespace(options=at)
    return decorate
def init(): pass
def get(value): return value
from ray import util
""",
    "ray/util/__init__.py": 'def get_node_ip_address(): return "h0"\n',
    "ray/util/placement_group.py": """\
from types import SimpleNamespace
def placement_group(bundles, strategy):
    print(strategy, bundles)
    return SimpleNamespace(ready=lambda: None)
""",
    "ray/util/scheduling_strategies.py": """\
def PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index):
    return f"bundle {placement_group_bundle_index}"
""",
}
"""Replaces the parts of Ray that the driver uses, all in one process."""


def test_the_ray_driver_starts_torchrun_on_each_host(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in RAY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    driver = tmp_path / "driver.py"
    driver.write_text(ray_script(launch(8, 8, gpu="NVIDIA")))
    calls = recorded(tmp_path, [sys.executable, str(driver)], PYTHONPATH=str(tmp_path))
    assert [call.words for call in calls] == [["torchrun", *words_of(host, processes=8)] for host in range(2)]
    assert capfd.readouterr().out.splitlines() == [
        "STRICT_SPREAD [{'CPU': 1, 'GPU': 8}, {'CPU': 1, 'GPU': 8}]",
        "1 8 bundle 0",
        "1 8 bundle 0",
        "1 8 bundle 1",
    ]


def test_the_ray_driver_of_a_cpu_plan_asks_for_cores() -> None:
    tree = ast.parse(ray_script(launch(4)))
    values = {
        ast.unparse(node.targets[0]): ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.Constant)
    }
    assert values == {"HOSTS": 1, "DEVICES": {"CPU": 4}}


def manifest(start: Launch, plan_text: str = "a: 1\n") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(kubernetes_manifest(start, plan_text=plan_text, image="me/it:1")))


def test_the_manifest_is_a_job_whose_pods_find_each_other() -> None:
    plan, service, job = manifest(launch(4, 4))
    kinds = [(part["apiVersion"], part["kind"]) for part in (plan, service, job)]
    assert kinds == [("v1", "ConfigMap"), ("v1", "Service"), ("batch/v1", "Job")]
    assert job["spec"]["completionMode"] == "Indexed"
    assert (job["spec"]["completions"], job["spec"]["parallelism"], job["spec"]["backoffLimit"]) == (2, 2, 0)
    template = job["spec"]["template"]
    # The Service selects the pods, and its name is their subdomain: pod 0 is NAME-0.NAME.
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"] == job["metadata"]["name"]
    (container,) = template["spec"]["containers"]
    for host in range(2):
        command = [expanded(word, {"JOB_COMPLETION_INDEX": str(host)}) for word in container["command"]]
        assert command == ["torchrun", *words_of(host, head="shardwise-tiny-0.shardwise-tiny")]
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert container["resources"] == {"limits": {"cpu": 4}}


def test_the_manifest_carries_the_plan_as_it_is() -> None:
    text = "name: 'tiny'\nactions:\n- \"0F0 0B0\"\n- [1, 2]\n\n# end \n"
    assert manifest(launch(4), text)[0]["data"]["plan.yaml"] == text


@pytest.mark.parametrize(("vendor", "resource"), [("NVIDIA", "nvidia.com/gpu"), ("AMD", "amd.com/gpu")])
def test_pods_ask_for_devices(vendor: str, resource: str) -> None:
    pod = manifest(launch(8, gpu=vendor))[2]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {resource: 8}}


def test_plans_that_kubernetes_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="too large for a ConfigMap"):
        manifest(launch(4), "x" * 1_000_001)
    with pytest.raises(ConfigError, match="no known device plugin"):
        manifest(launch(4, gpu="Huawei"))


@pytest.mark.parametrize(
    "write", [slurm_script, ray_script, lambda start: kubernetes_manifest(start, plan_text="", image="it")]
)
def test_launch_files_need_interchangeable_hosts(write: Any) -> None:
    """Hosts of an uneven plan have equally many devices, but not the same: no file distinguishes
    the hosts.
    """
    unlike = replace(launch(4, 4), unlike=("A100-80G", "V100-32G"))
    with pytest.raises(ConfigError, match="hosts of A100-80G, V100-32G"):
        write(unlike)
    write(replace(unlike, unlike=("V100-32G", "V100-32G")))
    commands = host_commands(replace(unlike, head="h0"))
    assert commands == [["torchrun", *words_of(host)] for host in range(2)]


def test_hosts_of_an_uneven_plan_are_distinguished_by_class_and_speed() -> None:
    slow = load_cluster("2x2xcpu")
    slow = replace(slow, nodes=(slow.nodes[0], replace(slow.nodes[1], speed=0.5)))
    uneven = replace(make_uneven("5 tp2l4+3 tp2l4"), cluster=slow)
    program = own_program(("train", "p.yaml"))
    assert launch_of(uneven, program).unlike == ("cpu", "cpu at 0.5")
    assert launch_of(uneven, program).processes == (2, 2)
    assert launch_of(make_plan("tp=2,dp=2"), program).unlike == ()


def test_hosts_are_distinguished_unless_all_stages_are_alike() -> None:
    """Stages of an operator graph differ; those of a strategy do not."""
    slow = load_cluster("2x2xcpu")
    slow = replace(slow, nodes=(slow.nodes[0], replace(slow.nodes[1], speed=0.5)))
    graph = next(sampled_in_stages(chain(8, 6, 12, 5), (2,), (2,), 2, [0]))
    for plan, unlike in ((graph, ("cpu", "cpu at 0.5")), (make_plan("tp=2,dp=2"), ())):
        assert launch_of(replace(plan, cluster=slow), own_program(("train", "p.yaml"))).unlike == unlike
