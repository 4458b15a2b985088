"""The command `launch` for other training software: what starts it, called with stand-ins for launchers."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.runtime.uneven_plans import make_uneven
from tests.unit.app.conftest import Run
from tests.unit.launch.published import JOB, JOB_SET, SBATCH_OPTIONS, SRUN_OPTIONS
from tests.unit.launch.stand_ins import SRUN, Call, expanded, install, recorded
from tests.unit.targets.small_plans import LLAMA, small_plan

from shardwise.app.cli.launched import COMMAND_VARIABLE
from shardwise.cluster import load_cluster
from shardwise.plans import Plan, write_plan

ODD = ("--name", 'it\'s $(touch odd) `touch odd` "$HOME"', "a  b")
"""Arguments of the program that bash or Kubernetes would interpret, were they not quoted."""

FOLDER = "out it's $(touch odd)"
"""A folder of exported files."""


@dataclass(frozen=True)
class Case:
    """A target with a strategy for 16 devices, and the words after the options of the launcher: `{}` is the
    folder of the files.
    """

    strategy: str
    program: tuple[str, ...]
    starter: str = "torchrun"


CASES = {
    "megatron-lm-0.19": Case("tp=2,pp=2,dp=4", ("--", "pretrain_gpt.py", "FLAGS")),
    "torchtitan-0.3": Case(
        "tp=2,dp=8,zero_stage=3",
        ("-m", "--", "torchtitan.train", "--module", "torchtitan_0_3", "--config", "plan"),
    ),
    "fsdp2": Case("tp=1,dp=16,zero_stage=3", ("train.py",), "accelerate"),
    "deepspeed-0.19": Case(
        "tp=1,dp=16,zero_stage=3",
        ("--", "train.py", "--deepspeed", "--deepspeed_config", "{}/deepspeed.json"),
    ),
}

CASES["megatron-fsdp-0.19"] = replace(CASES["megatron-lm-0.19"], strategy="tp=2,pp=2,dp=4,zero_stage=3")
CASES["transformers-5"] = Case("tp=1,dp=16,zero_stage=3", ("--", "train.py", "{}/trainer_args.json"))

TARGETS = tuple(CASES)

MEGATRON = ("megatron-lm-0.19", "megatron-fsdp-0.19")

MODULES = {"torchtitan-0.3": "torchtitan_0_3.py", "transformers-5": "distributed_config.py"}
"""Modules that Python must find."""

UNLIKE_NODES = (*MEGATRON, "torchtitan-0.3")
"""Targets that run on nodes of unlike sizes."""


def case_plan(target: str, cluster: str = "2x8xH100-SXM") -> Plan:
    return small_plan(LLAMA, CASES[target].strategy, cluster=cluster)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(plan: Plan) -> str:
    write_plan("p.yaml", plan)
    return "p.yaml"


def started(target: str, host: int, head: str, folder: str, odd: tuple[str, ...] = ODD) -> list[str]:
    """The words that start `host` of two hosts of 8 devices, written out by hand."""
    case = CASES[target]
    words = [word.format(folder) for word in case.program]
    if "FLAGS" in words:
        exported = Path(folder, "megatron-lm.args").read_text()
        words = [*words[:-1], *shlex.split(exported, comments=True)]
    options = f"torchrun --nnodes 2 --nproc-per-node 8 --master-port 29500 --node-rank {host} --master-addr"
    if case.starter == "accelerate":
        options = (
            f"accelerate launch --config_file FILE --num_machines 2 --num_processes 16"
            f" --main_process_port 29500 --machine_rank {host} --main_process_ip"
        )
    named = [f"{folder}/accelerate.yaml" if word == "FILE" else word for word in options.split()]
    return [*named, head, *words, *odd]


def check_environment(target: str, call: Call, folder: str) -> None:
    """Megatron-LM needs one connection on Hopper, its FSDP more; modules of plans are found by Python."""
    expected = {"megatron-lm-0.19": "1", "megatron-fsdp-0.19": None}.get(target, "8")
    assert call.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected
    if target in MODULES:
        assert call.environment["PYTHONPATH"].split(":")[0] == folder
        assert (Path(folder) / MODULES[target]).is_file()


def lines_of(text: str) -> list[str]:
    """Lines that are no comments."""
    return [line for line in text.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize("target", TARGETS)
def test_torchrun_or_accelerate_starts_the_exported_files(run: Run, folder: Path, target: str) -> None:
    path = written(case_plan(target))
    assert run("export", path, "--to", target, "--out", FOLDER).code == 0
    head = "h0; touch odd"
    ran = run(
        "launch",
        path,
        "--target",
        target,
        "--with",
        "torchrun",
        "--head",
        head,
        "--files",
        FOLDER,
        "--",
        *ODD,
    )
    assert (ran.code, ran.err) == (0, "")
    lines = lines_of(ran.out)
    assert len(lines) == 2
    for host, line in enumerate(lines):
        (call,) = recorded(folder, ["bash", "-c", line], PYTHONPATH="before", CUDA_DEVICE_MAX_CONNECTIONS="8")
        assert call.words == started(target, host, head, f"./{FOLDER}")
        check_environment(target, call, FOLDER)
    assert not (folder / "odd").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_slurm_starts_the_exported_files_on_each_node(run: Run, folder: Path, target: str) -> None:
    path = written(case_plan(target))
    assert run("export", path, "--to", target, "--out", FOLDER).code == 0
    ran = run("launch", path, "--target", target, "--with", "slurm", "--files", FOLDER, "--", *ODD)
    assert (ran.code, ran.err) == (0, "")
    script = folder / "job"
    script.write_text(ran.out)
    subprocess.run(["bash", "-n", str(script)], check=True)
    directives = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", ran.out, re.MULTILINE)
    assert len(directives) == ran.out.count("#SBATCH")
    assert {name for name, _ in directives} <= SBATCH_OPTIONS
    assert {("nodes", "2"), ("gpus-per-node", "8"), ("ntasks-per-node", "1")} <= set(directives)
    # sbatch reads no directive after the first command.
    assert ran.out.rindex("#SBATCH") < ran.out.index("\nset -eu\n")
    (srun,) = re.findall(r"^srun (.*?) bash -c", ran.out, re.MULTILINE)
    assert set(re.findall(r"--([a-z-]+)", srun)) <= SRUN_OPTIONS
    install(folder, "srun", SRUN)
    install(folder, "scontrol", 'print("h0\\nh1")')
    variables = {"SLURM_JOB_NODELIST": "h[0-1]", "CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    calls = recorded(folder, ["bash", str(script)], **variables)
    for host, call in enumerate(calls):
        assert call.words == started(target, host, "h0", f"./{FOLDER}")
        check_environment(target, call, FOLDER)
    assert len(calls) == 2 and not (folder / "odd").exists()


@pytest.mark.parametrize("target", TARGETS)
def test_a_job_set_starts_the_files_in_its_pods(run: Run, folder: Path, target: str) -> None:
    path = written(case_plan(target))
    assert run("export", path, "--to", target, "--out", "out").code == 0
    odd = (*ODD, "$(JOB_COMPLETION_INDEX)", "$$ $$( $")
    ran = run("launch", path, "--target", target, "--with", "k8s", "--image", "me/it: 1", "--", *odd)
    assert (ran.code, ran.err) == (0, "")
    config, job_set = yaml.safe_load_all(ran.out)
    jsonschema.Draft202012Validator(JOB_SET).validate(job_set)
    assert config["kind"] == "ConfigMap"
    assert config["data"] == {file.name: file.read_text() for file in Path("out").iterdir()}
    (job,) = job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert (job["replicas"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (1, 2, 2, 0)
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "me/it: 1"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    assert container["volumeMounts"][0] == {"name": pod["volumes"][0]["name"], "mountPath": "/etc/shardwise"}
    # JobSet names pod 0 of Job 0: SET-JOB-0-0, in the domain SET.
    head = f"{job_set['metadata']['name']}-{job['name']}-0-0.{job_set['metadata']['name']}"
    for host in range(2):
        variables = {"JOB_COMPLETION_INDEX": str(host)}
        command = [expanded(word, variables) for word in container["command"]]
        command = [word.replace("/etc/shardwise", f"{folder}/out") for word in command]
        (call,) = recorded(folder, command, CUDA_DEVICE_MAX_CONNECTIONS="8", **variables)
        assert call.words == started(target, host, head, f"{folder}/out", odd)
        check_environment(target, call, f"{folder}/out")
    assert not (folder / "odd").exists()


def test_the_manifest_of_the_own_runtime_has_the_fields_of_a_job(run: Run, folder: Path) -> None:
    path = written(small_plan(LLAMA, "tp=2,dp=4,zero_stage=1"))
    ran = run("launch", path, "--with", "k8s", "--image", "me/it", "--print")
    assert (ran.code, ran.err) == (0, "")
    *_, job = yaml.safe_load_all(ran.out)
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    jsonschema.Draft202012Validator(JOB).validate(job["spec"])


@pytest.mark.parametrize("target", UNLIKE_NODES)
def test_nodes_of_unlike_sizes_get_a_command_each(run: Run, folder: Path, target: str) -> None:
    """12 + 4 devices: Slurm has a component of a job, and a JobSet a job, for each kind of node."""
    plan = replace(case_plan(target), cluster=load_cluster("1x12xH100-SXM+1x4xH100-SXM"))
    path = written(plan)
    ran = run("launch", path, "--target", target, "--with", "torchrun", "--head", "h0")
    assert (ran.code, ran.err) == (0, "")
    found = re.findall(r"--nnodes (\d+) --nproc-per-node (\d+) .*--node-rank (\d+)", ran.out)
    assert found == [("2", "12", "0"), ("2", "4", "1")]
    ran = run("launch", path, "--target", target, "--with", "slurm")
    assert (ran.code, ran.err) == (0, "")
    assert re.findall(r"--gpus-per-node=(\d+)", ran.out) == ["12", "4"] and "#SBATCH hetjob" in ran.out
    subprocess.run(["bash", "-n"], input=ran.out, text=True, check=True)
    ran = run("launch", path, "--target", target, "--with", "k8s", "--image", "me/it")
    assert (ran.code, ran.err) == (0, "")
    *_, jobset = yaml.safe_load_all(ran.out)
    jsonschema.Draft202012Validator(JOB_SET).validate(jobset)
    assert [job["name"] for job in jobset["spec"]["replicatedJobs"]] == ["node0", "node1"]
    # Kubernetes reads $$( as $(.
    assert '--node-rank "$$((JOB_COMPLETION_INDEX + 1))"' in " ".join(ran.out.split())


@pytest.mark.parametrize("target", sorted(set(TARGETS) - set(UNLIKE_NODES)))
def test_unlike_nodes_are_refused_where_the_target_has_equal_ones(
    run: Run, folder: Path, target: str
) -> None:
    plan = replace(case_plan(target), cluster=load_cluster("1x12xH100-SXM+1x4xH100-SXM"))
    ran = run("launch", written(plan), "--target", target, "--with", "torchrun", "--head", "h0")
    assert (ran.code, ran.out) == (2, "") and ran.err.count("\n") == 1
    assert "p.yaml: cluster: cannot be exported" in ran.err and "nodes of 12, 4 devices" in ran.err


def test_one_node_needs_no_rendezvous(run: Run, folder: Path) -> None:
    small = {"megatron-lm-0.19": "tp=2,pp=2,dp=2", "fsdp2": "tp=1,dp=8,zero_stage=3"}
    found = {}
    for target, strategy in small.items():
        path = written(small_plan(LLAMA, strategy, cluster="1x8xH100-SXM"))
        found[target] = lines_of(run("launch", path, "--target", target, "--with", "torchrun").out)
    assert found == {
        "megatron-lm-0.19": [
            ". ./megatron-lm.sh && torchrun --standalone --nproc-per-node 8 -- pretrain_gpt.py"
            ' "${megatron_lm_args[@]}"'
        ],
        "fsdp2": [
            "accelerate launch --config_file ./accelerate.yaml --num_machines 1 --num_processes 8 train.py"
        ],
    }


def test_the_default_target_is_that_of_the_plan(run: Run, folder: Path) -> None:
    plan = small_plan(LLAMA, "tp=2,dp=4", cluster="1x8xH100-SXM")
    named = replace(plan, question=replace(plan.question, target="megatron-lm-0.19"))
    for given, options, mark in (
        (named, (), "pretrain_gpt.py"),
        (named, ("--target", "shardwise"), "shardwise train"),
        (plan, (), "shardwise train"),
        (plan, ("--target", "megatron-lm"), "pretrain_gpt.py"),
    ):
        ran = run("launch", written(given), "--with", "torchrun", "--print", *options)
        assert (ran.code, ran.err) == (0, "") and mark in lines_of(ran.out)[0]


def test_a_run_is_resumed_under_the_target_that_was_named(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's own target is another one, which is not resumed by options of `train`."""
    plan = small_plan(LLAMA, "tp=2,dp=4", cluster="1x8xH100-SXM")
    path = written(replace(plan, question=replace(plan.question, target="megatron-lm-0.19")))
    started: list[dict[str, str]] = []

    def execute(file: str, words: list[str], environment: dict[str, str]) -> None:
        started.append(environment)
        raise FileNotFoundError

    monkeypatch.setattr(os, "execvpe", execute)
    run("launch", path, "--with", "torchrun", "--target", "shardwise")
    (environment,) = started
    assert environment[COMMAND_VARIABLE] == (
        "shardwise launch p.yaml --with torchrun --port 29500 --target shardwise"
    )


def test_a_script_of_the_user_replaces_the_placeholder(run: Run, folder: Path) -> None:
    path = written(case_plan("deepspeed-0.19"))
    options = ("launch", path, "--target", "deepspeed", "--with", "slurm")
    named, own = run(*options), run(*options, "--script", "my train.py")
    assert "# train.py is a placeholder for your training script" in named.out
    assert "placeholder" not in own.out
    script = folder / "job"
    script.write_text(own.out)
    install(folder, "srun", SRUN)
    install(folder, "scontrol", 'print("h0")')
    call = recorded(folder, ["bash", str(script)], SLURM_JOB_NODELIST="h[0-1]")[0]
    assert "my train.py" in call.words and "train.py" not in call.words


def test_a_name_of_two_lines_stays_in_its_quotes(run: Run, folder: Path) -> None:
    """A line end in a name starts neither a command nor a directive of Slurm."""
    path = written(case_plan("megatron-lm-0.19"))
    odd = "x\n#SBATCH --nodes=9\ntouch odd\n"
    ran = run(
        "launch", path, "--target", "megatron-lm", "--with", "slurm", "--files", odd, "--script", odd,
        "--", odd,
    )  # fmt: skip
    script = folder / "job"
    script.write_text(ran.out)
    assert ran.out.index("set -eu") < ran.out.index("--nodes=9")
    install(folder, "srun", SRUN)
    install(folder, "scontrol", 'print("h0")')
    (folder / odd).mkdir()
    (folder / odd / "megatron-lm.sh").write_text("megatron_lm_args=()\n")
    for call in recorded(folder, ["bash", str(script)], SLURM_JOB_NODELIST="h0"):
        assert call.words[-3:] == ["--", odd, odd]
    assert not (folder / "odd").exists()


@pytest.mark.parametrize(
    ("device", "is_set"), [("H100-SXM", True), ("B200", False), ("MI300X", True), ("A100-80G", True)]
)
def test_the_connections_of_a_device_before_blackwell(
    run: Run, folder: Path, device: str, is_set: bool
) -> None:
    """With tp or cp above 1, `validate_args` of Megatron-LM 0.19 asks for one connection where the major
    version of the device is below 10 (Blackwell).
    """
    path = written(small_plan(LLAMA, "tp=2,dp=4", cluster=f"1x8x{device}"))
    assert run("export", path, "--to", "megatron-lm", "--out", "out").code == 0
    (line,) = lines_of(
        run("launch", path, "--target", "megatron-lm", "--with", "torchrun", "--files", "out").out
    )
    (call,) = recorded(folder, ["env", "-u", "CUDA_DEVICE_MAX_CONNECTIONS", "bash", "-c", line])
    assert call.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == ("1" if is_set else None)


@pytest.mark.parametrize(
    ("target", "options", "named"),
    [
        ("megatron-lm", ("--with", "ray"), "--with ray: starts plans of the target shardwise only"),
        ("megatron-lm", ("--with", "torchrun"), "--head: is required for a plan with several hosts"),
        ("megatron-lm", ("--with", "k8s"), "--image: is required for k8s"),
        (
            "megatron-lm",
            ("--with", "k8s", "--image", "a", "--files", "x"),
            "--files: is not an option for k8s",
        ),
        ("megatron-lm", ("--with", "pbs"), "--with: is not one of the choices; found 'pbs'"),
        ("any", ("--with", "slurm"), "--target: is not one of the choices; found 'any'"),
        ("nemo", ("--with", "slurm"), "--target: is not one of the choices; found 'nemo'"),
        ("deepspeed", ("--with", "slurm"), "best.strategy.tp: cannot be exported to DeepSpeed 0.19"),
        ("shardwise", ("--with", "slurm", "--files", "x"), "--files: is not an option for the target"),
        ("shardwise", ("--with", "slurm", "--script", "x"), "--script: is not an option for the target"),
    ],
)
def test_a_wrong_combination_is_refused_in_one_line(
    run: Run, folder: Path, target: str, options: tuple[str, ...], named: str
) -> None:
    ran = run("launch", written(case_plan("megatron-lm-0.19")), "--target", target, *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1 and named in ran.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--script", "x"), "--script: is not an option for the target torchtitan-0.3"),
        (("--files", "a:b"), "--files: cannot be a folder of PYTHONPATH; found a:b"),
    ],
)
def test_options_that_torchtitan_cannot_use(
    run: Run, folder: Path, options: tuple[str, ...], named: str
) -> None:
    path = written(case_plan("torchtitan-0.3"))
    ran = run("launch", path, "--target", "torchtitan", "--with", "slurm", *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1 and named in ran.err


@pytest.mark.parametrize("target", TARGETS)
def test_an_uneven_plan_is_refused(run: Run, folder: Path, target: str) -> None:
    path = written(make_uneven("5 tp2l4+3 l2 l2"))
    ran = run("launch", path, "--target", target, "--with", "torchrun", "--head", "h0")
    assert (ran.code, ran.out) == (2, "") and ran.err.count("\n") == 1
    assert "is not supported for an uneven plan" in ran.err
    ran = run("launch", path, "--with", "torchrun", "--head", "h0", "--print")
    assert (ran.code, ran.err) == (0, "") and "shardwise train p.yaml" in ran.out


BROKEN: dict[str, Any] = {
    "a misspelled field": lambda spec: spec.update(paralelism=2),
    "an unknown restart policy": lambda spec: spec["template"]["spec"].update(restartPolicy="never"),
    "no containers": lambda spec: spec["template"]["spec"].update(containers=[]),
    "a number as a command": lambda spec: spec["template"]["spec"]["containers"][0]["command"].append(1),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_schema_refuses_a_broken_job_set(run: Run, folder: Path, fault: str) -> None:
    path = written(case_plan("fsdp2"))
    ran = run("launch", path, "--target", "fsdp2", "--with", "k8s", "--image", "me/it")
    _, job_set = yaml.safe_load_all(ran.out)
    BROKEN[fault](job_set["spec"]["replicatedJobs"][0]["template"]["spec"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(JOB_SET).validate(job_set)
