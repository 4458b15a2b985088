"""The Python interface (`import shardwise as sw`): plans, evaluates, explains, checks. It needs no PyTorch.

Times are seconds, sizes bytes, rates per second. Every function raises `ConfigError` for an argument or a
file that cannot be used, with the name of the argument, and `Infeasible` where nothing fits, with the
reasons.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, overload

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError, naming_arguments
from shardwise.inputs import record_of, short_repr, unknown
from shardwise.model import Model
from shardwise.plans import DAY_S, Plan, StepParts, Value, WholeRun, read_plan, write_file, write_plan
from shardwise.questions import (
    ExportedPlan,
    FrontierAnswer,
    FrontierArguments,
    JobArguments,
    PlanExplanation,
    Progress,
    RunArguments,
    SearchArguments,
    Sweep,
    evaluated,
    explained,
    exported,
    flag,
    frontier_of,
    frontier_of_plan,
    optional_text,
    planned,
    planned_for_trace,
    row_of,
    run_of_plan,
    seconds,
    swept,
    text,
)
from shardwise.questions import what_if as changed
from shardwise.questions import why_not as alternative
from shardwise.search import PlanComparison, step_parts_of
from shardwise.search import memory_by_stage as memory_of_stages

if TYPE_CHECKING:
    from shardwise.questions import CheckedPlan, ImportedCluster, Replanned, Review

ModelSource = str | os.PathLike[str] | Model | Mapping[str, Any]
"""A model: its name in the catalogue, the path of a config.json, its folder or a YAML file, an id of the
Hugging Face Hub such as `meta-llama/Llama-3.1-8B`, a config as a dict, or a config object of Transformers
(anything with `to_dict()`)."""

Path = str | os.PathLike[str]

LoraSource = int | Path | Mapping[str, Any] | Any
"""Adapters: a rank, text such as `r=16,targets=q_proj+v_proj`, the path of an adapter_config.json or of its
folder, its keys as a dict, or a `LoraConfig` of PEFT."""


def plan(
    model: ModelSource | Any,
    *,
    cluster: str | Cluster,
    global_batch_size: int,
    seq_len: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    objective: str = "time",
    target: str | None = None,
    tolerance: float = 0.01,
    space: str = "default",
    fix: Mapping[str, Value] | str | None = None,
    use_all: bool = False,
    memory_margin: float = 0.05,
    expert_imbalance: float = 1.1,
    mean_sample_len: int | None = None,
    inter_node: str | None = None,
    calibration: str | None = None,
    software: str | None = None,
    attention: str | None = None,
    set: Mapping[str, str] | str | None = None,
    price: float | str | None = None,
    lora: LoraSource | None = None,
    images: int | str | Mapping[str, int] | None = None,
    freeze: str | Sequence[str] | None = None,
    top: int = 8,
    frontier: bool = False,
    exhaustive: bool = False,
    stage_dp: int = 1,
    mixed_pool_stages: int = 1,
    events: str | None = None,
    policy: str | None = None,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan for training `model` on `cluster`, with a certificate.

    `model` is a name of the catalogue, a path, an id of the Hugging Face Hub whose config is in the local
    cache, a config as a dict, or a config object of Transformers. `cluster` is a shorthand such as
    `8x8xH100-SXM` (nodes x devices per node x device), a shipped cluster, or the path of a YAML file.

    - `global_batch_size`: sequences of a step. `seq_len`: their tokens (default: the model's, or 4096).
    - `dtype`: `fp32`, `fp16`, `bf16`, `fp8`, ...; the default is the best 16-bit type of all devices.
      `optimizer`: `adamw`, `adafactor`, `sgd`, `muon`. `objective`: `time`, `memory`, `devices` or `cost`.
    - `target`: the software that runs the plan, such as `megatron-lm-0.19`, or `any`; the default is the
      first target within 3 % of the fastest (`plan.targets` has the best of each). `tolerance`: how much
      slower than the optimum of the target (`plan.optimum`) a simpler strategy may be that is recommended.
    - `fix`: fields of the strategy with one value, such as `{"tp": 8}`; `space`: `default`, `core` or a file.
    - `use_all`: no device may stay idle. `memory_margin`: fraction of device memory to leave free.
      `expert_imbalance`: load of the busiest expert rank over the mean. `mean_sample_len`: tokens of the
      samples that are packed into a sequence, within which tokens attend (default: a sequence is one sample).
      `inter_node`: bandwidth of a network card, such as `200Gb/s`. `calibration`: a file of
      `shardwise calibrate`. `software`: the software profile to price by, instead of that of the target.
      `set`: options of the software, such as `{"grad_reduce_dtype": "bf16"}`; `attention`: that one alone,
      `flash`, `efficient` or `unfused`. `price`: dollars per device and hour, or a list price such as
      `aws:3-years`; the default is the list price on demand, where there is one. `lora`: train adapters
      alone, with the weights of the model frozen: a rank, `r=16,targets=q_proj+v_proj`, an
      `adapter_config.json`, or a `LoraConfig` of PEFT. `images`: images per sequence, for which the vision
      tower is counted, such as `2` or `2@1024x768` with height and width. `freeze`: parts that are not
      trained, such as `vision` or `vision+projector`.
    - `top`: number of runners-up. `frontier`: also find the Pareto frontier of time and memory
      (`plan.answer.frontier`). `exhaustive`: evaluate every feasible candidate.
    - `stage_dp`, `mixed_pool_stages`: limits of uneven plans, as the options of `shardwise plan`.
    - `events`: a trace of events, as a path or as text such as `lost n3`; the plan is then that of `policy`:
      `now`, `expected` (the default) or `worst`, and its `for_trace` says what it makes of the trace.
    - `workers`: processes of the search. `budget`: limit of the search in seconds, or text such as `10s`; the
      answer is then the best so far with its gap. `progress` is called with lines that say how far it is.

    Raises ConfigError for an argument that cannot be used, Infeasible where nothing fits.
    """
    given = record_of(JobArguments, locals())
    wanted = record_of(SearchArguments, locals())
    with naming_arguments():
        return _planned(given, wanted, events, policy, progress)


def _planned(
    given: JobArguments,
    wanted: SearchArguments,
    events: object,
    policy: object,
    progress: Progress | None,
) -> Plan:
    """The plan without events, or for a trace of them."""
    if events is not None:
        return planned_for_trace(given, wanted, events=events, policy=policy).plan
    if policy is not None:
        raise ConfigError("requires --events", key="--policy", allowed="with --events TRACE")
    return planned(given, wanted, progress=progress)


def evaluate(
    model: ModelSource | Any,
    *,
    strategy: Mapping[str, Value] | str,
    cluster: str | Cluster,
    global_batch_size: int,
    seq_len: int | None = None,
    target: str | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    memory_margin: float = 0.05,
    expert_imbalance: float = 1.1,
    mean_sample_len: int | None = None,
    inter_node: str | None = None,
    calibration: str | None = None,
    software: str | None = None,
    attention: str | None = None,
    set: Mapping[str, str] | str | None = None,
    price: float | str | None = None,
    lora: LoraSource | None = None,
    images: int | str | Mapping[str, int] | None = None,
    freeze: str | Sequence[str] | None = None,
) -> Plan:
    """The plan of one given strategy, with its step time and memory; it has no certificate.

    `strategy` has fields such as `{"tp": 8, "pp": 2}` or text such as `tp=8,pp=2`; those that are not named
    have their defaults. `target` is software that must run it (default: any). The other arguments are those
    of `plan`. Raises ConfigError for an argument that cannot be used, Infeasible with the reason where the
    strategy is illegal, does not fit or is not run by the target.
    """
    given = record_of(JobArguments, locals())
    with naming_arguments():
        return evaluated(given, strategy, target)


def frontier(
    model: ModelSource | Any,
    *,
    cluster: str | Cluster,
    global_batch_size: int,
    seq_len: int | None = None,
    mode: str = "time",
    memory_limit: float | str | None = None,
    devices: Sequence[int] | None = None,
    stages: int | None = None,
    microbatches: Sequence[int] | None = None,
    meshes: str = "tiers",
    objectives: str | Sequence[str] = ("time", "memory"),
    epsilon: float = 0.001,
    dtype: str | None = None,
    optimizer: str = "adamw",
    target: str | None = None,
    space: str = "default",
    fix: Mapping[str, Value] | str | None = None,
    use_all: bool = False,
    memory_margin: float = 0.05,
    expert_imbalance: float = 1.1,
    mean_sample_len: int | None = None,
    inter_node: str | None = None,
    calibration: str | None = None,
    software: str | None = None,
    attention: str | None = None,
    set: Mapping[str, str] | str | None = None,
    price: float | str | None = None,
    lora: LoraSource | None = None,
    images: int | str | Mapping[str, int] | None = None,
    freeze: str | Sequence[str] | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> FrontierAnswer[Any]:
    """The Pareto frontier of step time and memory of a model, or of an operator graph (`graph:NAME`, or the
    path of one).

    - `mode`: `time` picks the fastest point, `devices` the fewest devices, `profile` none.
    - `memory_limit`: most memory of a device at the pick, in bytes or as text such as `40GiB`. `devices`:
      device counts to search; the default is those of the mode.
    - `objectives`: time and memory, or also cost in dollars per step.
    - `target`: the software that runs the points of a model; the default is that of `plan` among uniform
      strategies. The fastest point is the optimum of this target.
    - Of operator graphs: `stages` and `microbatches` of a pipeline, `meshes` (`tiers`, `all` or a list such
      as `8,2x4`), and `epsilon`, the relative distance that points may have from the exact frontier.

    The other arguments are those of `plan`. Raises ConfigError for an argument that cannot be used,
    Infeasible where nothing fits.
    """
    given = record_of(JobArguments, locals())
    wanted = record_of(FrontierArguments, locals())
    with naming_arguments():
        return frontier_of(given, wanted, progress=progress)


def review(
    file: Path,
    *,
    cluster: str | Cluster,
    model: ModelSource | Any | None = None,
    trainer: Path | None = None,
    measured: float | str | None = None,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
    fix: Mapping[str, Value] | str | None = None,
    memory_margin: float = 0.05,
    expert_imbalance: float = 1.1,
    mean_sample_len: int | None = None,
    inter_node: str | None = None,
    calibration: str | None = None,
    software: str | None = None,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> Review:
    """What a configuration file of training software does on `cluster`: whether it fits, the predicted step
    time, findings, and which changes make it faster in the same software.

    `file` is the path of a log of Megatron-LM with its arguments, of a file or script with its flags, of a
    JSON or TOML of TorchTitan, a JSON of DeepSpeed, a YAML of Accelerate, a `DistributedConfig` of
    Transformers, or arguments of its Trainer in JSON or YAML.

    - `trainer`: the file with arguments of the Trainer, where `file` is the `DistributedConfig`, the JSON of
      DeepSpeed or the YAML of Accelerate of the same run.
    - `model`, `seq_len`, `global_batch_size`, `fix`: what the file lacks (`fix` has fields of the strategy,
      such as `{"micro_batch_size": 2}`).
    - `measured`: a measured step time in seconds, or text such as `12.3s`; times are then scaled by measured
      over predicted.

    The other arguments are those of `plan`. Raises ConfigError for a file or an argument that cannot be used.
    """
    from shardwise.questions import ReviewArguments, reviewed

    given = record_of(ReviewArguments, locals())
    with naming_arguments():
        return reviewed(file, given, progress=progress)


def import_cluster(
    files: Path | Sequence[Path], *, device: str | None = None, name: str | None = None
) -> ImportedCluster:
    """The cluster that files of other software describe together.

    `files` are paths of: `topology.conf` and `topology.yaml` of Slurm, its nodes (`scontrol show nodes
    --json`, `sinfo --json`) or a hostlist; `kubectl get nodes -o json`, a graph of Topograph; `nvidia-smi -q
    -x` and `nvidia-smi topo -m` of one node, a topology of NCCL; output of nccl-tests. `device` names the
    devices of all nodes, where the files do not. `name` is the name of the cluster.

    `cluster` of the answer is an argument of `plan`; `provenance` says which file each part is from, and
    which defaults were taken. Raises ConfigError, with the file and the place, for files that cannot be read
    or contradict each other.
    """
    from shardwise.questions import imported_cluster

    with naming_arguments():
        return imported_cluster(files, device=device, name=name)


def sweep(
    questions: Iterable[Mapping[str, Any]],
    executor: Executor | None = None,
    out: Path | None = "sweep.jsonl",
) -> Sweep:
    """The answers of `plan` to many questions, each a mapping of its arguments such as `{"model":
    "llama-3.1-8b", "cluster": "1x8xH100-SXM", "seq_len": 8192, "global_batch_size": 64}`.

    `executor` is any `concurrent.futures.Executor`; without one, the questions are answered one by one. Every
    answer is appended to `out` as a JSON line as soon as it is there, so that an interrupted sweep resumes: a
    question with an answer in the file is not asked again (unless the version of shardwise is another). None
    keeps no file. An infeasible question is an answer with its reason.

    Raises ConfigError for the first question that cannot be used, with its place, such as
    `questions[3].seq_len`; the answers until then are in the file.
    """
    with naming_arguments():
        if isinstance(questions, str | Mapping) or not isinstance(questions, Iterable):
            raise ConfigError(
                "is not a list of questions", key="questions", found=short_repr(questions),
                allowed="a list of mappings of the arguments of plan",
            )  # fmt: skip
        path = None if out is None else text("out", out)
        return swept(list(questions), answer_question, executor=executor, path=path)


def answer_question(question: Mapping[str, Any]) -> dict[str, Any]:
    """The row of one question of a sweep: what `sweep` submits to its executor. Raises ConfigError for a
    question that cannot be used."""
    known = set(inspect.signature(plan).parameters)
    for name in question:
        if name not in known:
            raise unknown("is no argument", name, sorted(known), key=str(name), found=None)
    for name in ("model", "cluster", "global_batch_size"):
        if name not in question:
            raise ConfigError("is missing", key=name, allowed="model, cluster and global_batch_size")
    return row_of(lambda: plan(**question))


def replan(
    plan: Plan | Path,
    *,
    events: str,
    cluster: str | Cluster | None = None,
    horizon: float | str = "6h",
    regroup: float | str = "10s",
    restart: float | str = "60s",
    checkpoint_interval: float | str = "10min",
    savable: bool = False,
    inter_node: str | None = None,
    target: str | None = None,
    software: str | None = None,
) -> Replanned:
    """The decision for a running plan, or the one in a file, after all events: keep, patch or move.

    `events` is the path of a trace, or text such as `lost n3; slow n5 0.5`. `cluster` is by default the one
    that the plan was requested for, with nodes that the plan leaves idle. Times are seconds or text, as
    `6h`: training continues for `horizon` under these conditions; a patch takes `regroup`, a migration
    `restart`, in addition to what moves; half of `checkpoint_interval` is lost after a failure. With
    `savable` only plans that a plan file holds are considered, so that the answer has a `plan`. `target` is
    the software that runs all plans (default: that of the plan), `software` the profile that prices them.

    Raises ConfigError for events or a cluster that do not match the plan, Infeasible where nothing runs.
    """
    from shardwise.questions import replanned
    from shardwise.replanning import Costs

    with naming_arguments():
        found = _plan("plan", plan)
        costs = Costs(
            regroup_s=seconds("--regroup", regroup, low=0.0, high=DAY_S),
            restart_s=seconds("--restart", restart, low=0.0, high=DAY_S),
            checkpoint_interval_s=seconds(
                "--checkpoint-interval", checkpoint_interval, low=0.0, high=365 * DAY_S
            ),
        )
        return replanned(
            found,
            cluster=cluster,
            inter_node=optional_text("--inter-node", inter_node),
            events=events,
            horizon_s=seconds("--horizon", horizon, low=1.0, high=365 * DAY_S),
            costs=costs,
            is_of_files=flag("--savable", savable),
            target=target,
            software=software,
        )


def check(
    plan: Plan | Path, *, proof_budget: float | str = "10min", progress: Progress | None = None
) -> CheckedPlan:
    """The verdict of the independent checker on a plan, or on the one in a file, and what the planner
    computes again.

    `proof_budget`: limit of the proof of optimality, in seconds or as text; the check is open where it takes
    longer. `progress` is called with lines that say how far the proof is. Raises ConfigError for a file that
    is no plan or was altered.
    """
    from shardwise.questions import checked_plan, checked_record

    with naming_arguments():
        limit_s = seconds("--proof-budget", proof_budget, low=1e-3, high=30 * DAY_S)
        if isinstance(plan, Plan):
            return checked_record(plan, limit_s, progress=progress)
        if isinstance(plan, str | os.PathLike):
            return checked_plan(os.fspath(plan), limit_s, progress=progress)
        raise _no_plan("plan", plan)


def load(path: Path) -> Plan:
    """The plan in the file at `path`, of any kind and version.

    Raises ConfigError if it is not a plan file, has a newer version, was altered or is incomplete.
    """
    with naming_arguments():
        return read_plan(text("path", path))


def memory_by_stage(plan: Plan) -> list[dict[str, float]]:
    """Bytes of each part of memory on a rank of every pipeline stage, first stage first, each at its peak.

    The keys are those of `plan.memory`, and `device` for their sum. Raises ConfigError for the plan of an
    operator graph, and for a plan whose stages are not alike.
    """
    with naming_arguments():
        found = _plan("plan", plan)
        return memory_of_stages(found.model, found.cluster, found.job, found.best.strategy)


def step_parts(plan: Plan) -> StepParts:
    """Computation, communication, overlap and idle time of a step on its critical rank, in seconds.

    Their combination, computation + communication - overlap + idle, is the step time. `communication` has for
    each mechanism its total, hidden and exposed seconds. The plan is estimated again. Raises ConfigError for
    an uneven plan that is not one of its cluster.
    """
    with naming_arguments():
        return step_parts_of(_plan("plan", plan))


def save(plan: Plan, path: Path) -> str:
    """Writes `plan` to the file at `path` atomically, as YAML or, for a name that ends in .json, as JSON.

    Returns the hash of the plan. Raises ConfigError if the path cannot be written, or if the table of actions
    of the plan is too long for a file.
    """
    with naming_arguments():
        return write_plan(text("path", path), _plan("plan", plan))


def export(plan: Plan | Path, *, to: str, out: Path, validate: bool = False) -> ExportedPlan:
    """Writes a plan, or the one in a file, as files of the target `to` into the folder `out`.

    `to` is a target such as `megatron-lm-0.19` or `torchtitan`; the folder is created if missing. With
    `validate` the target's own code, which has to be installed, reads the files first; where it reads other
    values than the plan has, `read_back.differences` of the answer names them, and nothing is written.

    Raises ConfigError, with the key of the plan file, for a value that the target cannot express, and for a
    folder that cannot be written.
    """
    inputs = () if isinstance(plan, Plan) else (os.fspath(plan),)
    with naming_arguments():
        return exported(_plan("plan", plan), to, out, validate=validate, inputs=inputs)


def report(
    plan: Plan | Path,
    *,
    out: Path | None = None,
    frontier: bool = False,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> str:
    """The report of a plan, or of the one in a file: one HTML page with step time, memory, pipeline, layout,
    proof and assumptions, which needs no network and no other file.

    `out` is the path to write it to, atomically. `frontier` adds the frontier of step time and memory, which
    is searched with `workers` processes and a `budget` in seconds or as text. Raises ConfigError for a plan
    that this version estimates otherwise, and for a path that cannot be written.
    """
    from shardwise.app.web import page_suffix_checked, report_page

    with naming_arguments():
        found, path = _plan("plan", plan), None if out is None else page_suffix_checked(text("out", out))
        searched = None
        if flag("--frontier", frontier):
            searched = frontier_of_plan(found, workers=workers, budget=budget, progress=progress)
        name = "" if isinstance(plan, Plan) else os.fspath(plan)
        page = report_page([found], [name], [searched])
        if path is not None:
            write_file(path, page)
        return page.decode("utf-8")


def _plan(name: str, given: object) -> Plan:
    """A plan, or the one in the file that it names."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, str | os.PathLike):
        return read_plan(given)
    raise _no_plan(name, given)


def _no_plan(name: str, given: object) -> ConfigError:
    return ConfigError("is no plan", key=name, found=short_repr(given), allowed="a plan, or the path of one")


def whole_run(
    plan: Plan | Path,
    *,
    tokens: float | str | None = None,
    steps: int | None = None,
    days: float | None = None,
    power: float | str | None = None,
    mtbf: float | str | None = None,
    checkpoint_interval: float | str | None = None,
    checkpoint_stall: float | str | None = None,
    restart: float | str | None = None,
    jitter: float | None = None,
) -> WholeRun:
    """A whole training run under a plan, or the one in a file; the method `whole_run` of `Plan`."""
    given = record_of(RunArguments, locals())
    with naming_arguments():
        return run_of_plan(_plan("plan", plan), given)


@overload
def explain(
    plan: Plan | Path,
    why_not: None = None,
    *,
    every_value: bool = False,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> PlanExplanation: ...


@overload
def explain(
    plan: Plan | Path,
    why_not: Mapping[str, Value] | str,
    *,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> PlanComparison: ...


def explain(
    plan: Plan | Path,
    why_not: Mapping[str, Value] | str | None = None,
    *,
    every_value: bool = False,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> PlanExplanation | PlanComparison:
    """Why a plan, or the one in a file, is what it is; the method `explain` of `Plan`. The best plan with
    another value is searched for the values next to the plan's of the main fields, with `every_value` for all
    values of all fields."""
    with naming_arguments():
        found = _plan("plan", plan)
        if why_not is None:
            return explained(
                found, every_value=every_value, workers=workers, budget=budget, progress=progress
            )
        return alternative(found, why_not, workers=workers, budget=budget, progress=progress)


def what_if(
    plan: Plan | Path,
    changes: Mapping[str, str | float] | str,
    *,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> PlanComparison:
    """The best plan of a changed question; the method `what_if` of `Plan`."""
    with naming_arguments():
        found = _plan("plan", plan)
        return changed(found, changes, workers=workers, budget=budget, progress=progress)


__all__ = [
    "ExportedPlan",
    "PlanComparison",
    "PlanExplanation",
    "check",
    "evaluate",
    "explain",
    "export",
    "frontier",
    "import_cluster",
    "load",
    "memory_by_stage",
    "plan",
    "replan",
    "report",
    "review",
    "save",
    "step_parts",
    "sweep",
    "what_if",
    "whole_run",
]
