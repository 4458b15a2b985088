"""The Python interface (`import shardwise as sw`): plans, evaluates, explains, checks. It needs no PyTorch.

Times are seconds, sizes bytes, rates per second. Every function raises `ConfigError` for an argument or a
file that cannot be used, with the name of the argument, and `Infeasible` where nothing fits, with the
reasons.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise import search
from shardwise.cluster import Cluster
from shardwise.errors import ConfigError, naming_arguments
from shardwise.inputs import short_repr
from shardwise.model import Model
from shardwise.plans import Plan, Value, read_plan, write_plan
from shardwise.questions import (
    Frontier,
    FrontierArguments,
    JobArguments,
    Progress,
    SearchArguments,
    budget_s,
    evaluated,
    fields,
    frontier_of,
    planned,
    text,
)
from shardwise.questions import (
    workers as worker_count,
)
from shardwise.search import Explanation, PlanComparison

ModelSource = str | os.PathLike[str] | Model | Mapping[str, Any]
"""A model: its name in the catalogue, the path of a config.json, its folder or a YAML file, an id of the
Hugging Face Hub such as `meta-llama/Llama-3.1-8B`, a config as a dict, or a config object of Transformers
(anything with `to_dict()`)."""

Path = str | os.PathLike[str]

__all__ = [
    "Explanation",
    "PlanComparison",
    "evaluate",
    "explain",
    "frontier",
    "load",
    "plan",
    "save",
    "what_if",
]


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
    space: str = "default",
    fix: Mapping[str, Value] | str | None = None,
    use_all: bool = False,
    memory_margin: float = 0.05,
    expert_imbalance: float = 1.1,
    inter_node: str | None = None,
    calibration: str | None = None,
    top: int = 3,
    frontier: bool = False,
    exhaustive: bool = False,
    stage_dp: int = 1,
    mixed_pool_stages: int = 1,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The best plan for training `model` on `cluster`, with a certificate.

    `model` is a name of the catalogue, a path, an id of the Hugging Face Hub whose config is in the local
    cache, a config as a dict, or a config object of Transformers. `cluster` is a shorthand such as
    `8x8xH100-SXM` (nodes x devices per node x device), a shipped cluster, or the path of a YAML file.

    - `global_batch_size`: sequences of a step. `seq_len`: tokens of a sequence; the default is the maximum of
      the model, else 4096.
    - `dtype`: `fp32`, `fp16`, `bf16`, `fp8`, ...; the default is the best 16-bit type of all devices.
      `optimizer`: `adamw`, `adafactor`, `sgd` or `muon`.
    - `objective`: what is minimised: `time`, `memory`, `devices` or `cost`.
    - `target`: the software that must run the plan, such as `megatron-lm-0.19`, or `any`; `fix`: fields of
      the strategy with one value, such as `{"tp": 8}`; `space`: `default`, `core` or the path of a YAML file;
      `use_all`: no device may stay idle.
    - `memory_margin`: fraction of device memory to leave free. `expert_imbalance`: load of the busiest
      expert-parallel rank over the mean. `inter_node`: bandwidth of each network card, such as `200Gb/s`.
      `calibration`: path of a file of `shardwise calibrate`.
    - `top`: number of runners-up. `frontier`: also find the Pareto frontier of time and memory
      (`plan.answer.frontier`). `exhaustive`: evaluate every feasible candidate.
    - `stage_dp`: most replicas of a stage of an uneven plan that split the rows of a micro-batch;
      `mixed_pool_stages`: rows of micro-batches that a stage on two device pools may split.
    - `workers`: processes of the search. `budget`: limit of the search in seconds, or text such as `10s`; the
      answer is then the best so far with its gap. `progress` is called with lines that say how far it is.

    Raises ConfigError for an argument that cannot be used, Infeasible where nothing fits.
    """
    given = JobArguments(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
        inter_node=inter_node,
        calibration=calibration,
    )
    wanted = SearchArguments(
        objective=objective,
        space=space,
        fix=fix,
        target=target,
        use_all=use_all,
        top=top,
        frontier=frontier,
        exhaustive=exhaustive,
        stage_dp=stage_dp,
        mixed_pool_stages=mixed_pool_stages,
        workers=workers,
        budget=budget,
    )
    with naming_arguments():
        return planned(given, wanted, progress=progress)


def evaluate(
    model: ModelSource | Any,
    *,
    strategy: Mapping[str, Value] | str,
    cluster: str | Cluster,
    global_batch_size: int,
    seq_len: int | None = None,
    dtype: str | None = None,
    optimizer: str = "adamw",
    memory_margin: float = 0.05,
    expert_imbalance: float = 1.1,
    inter_node: str | None = None,
    calibration: str | None = None,
) -> Plan:
    """The plan of one given strategy, with its step time and memory; it has no certificate.

    `strategy` has fields such as `{"tp": 8, "pp": 2}` or text such as `tp=8,pp=2`; those that are not named
    have their defaults. The other arguments are those of `plan`. Raises ConfigError for an argument that
    cannot be used, Infeasible with the reason where the strategy is illegal or does not fit.
    """
    given = JobArguments(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
        inter_node=inter_node,
        calibration=calibration,
    )
    with naming_arguments():
        return evaluated(given, strategy)


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
    space: str = "default",
    fix: Mapping[str, Value] | str | None = None,
    use_all: bool = False,
    memory_margin: float = 0.05,
    expert_imbalance: float = 1.1,
    inter_node: str | None = None,
    calibration: str | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Frontier[Any]:
    """The Pareto frontier of step time and memory of a model, or of an operator graph (`graph:NAME`, or the
    path of one).

    - `mode`: `time` picks the fastest point, `devices` the fewest devices, `profile` none.
    - `memory_limit`: most memory of a device at the pick, in bytes or as text such as `40GiB`. `devices`:
      device counts to search; the default is those of the mode.
    - `objectives`: time and memory, or also cost in dollars per step.
    - Of operator graphs: `stages` and `microbatches` of a pipeline, `meshes` (`tiers`, `all` or a list such
      as `8,2x4`), and `epsilon`, the relative distance that points may have from the exact frontier.

    The other arguments are those of `plan`. Raises ConfigError for an argument that cannot be used,
    Infeasible where nothing fits.
    """
    given = JobArguments(
        model=model,
        cluster=cluster,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        dtype=dtype,
        optimizer=optimizer,
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
        inter_node=inter_node,
        calibration=calibration,
    )
    wanted = FrontierArguments(
        mode=mode,
        memory_limit=memory_limit,
        devices=devices,
        stages=stages,
        microbatches=microbatches,
        meshes=meshes,
        objectives=objectives,
        epsilon=epsilon,
        space=space,
        fix=fix,
        workers=workers,
        use_all=use_all,
    )
    with naming_arguments():
        return frontier_of(given, wanted, progress=progress)


def load(path: Path) -> Plan:
    """The plan in the file at `path`, of any kind and version.

    Raises ConfigError if it is not a plan file, has a newer version, was altered or is incomplete.
    """
    with naming_arguments():
        return read_plan(text("path", path))


def save(plan: Plan, path: Path) -> str:
    """Writes `plan` to the file at `path` atomically, as YAML or, for a name that ends in .json, as JSON.

    Returns the hash of the plan. Raises ConfigError if the path cannot be written, or if the table of actions
    of the plan is too long for a file.
    """
    with naming_arguments():
        return write_plan(text("path", path), _plan("plan", plan))


def _plan(name: str, given: object) -> Plan:
    """A plan, or the one in the file that it names."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, str | os.PathLike):
        return read_plan(given)
    raise ConfigError("is no plan", key=name, found=short_repr(given), allowed="a plan, or the path of one")


def explain(
    plan: Plan | Path,
    why_not: Mapping[str, Value] | str | None = None,
    *,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> Explanation | PlanComparison:
    """The method `explain` of `Plan`, for a plan or its file."""
    with naming_arguments():
        found = _plan("plan", plan)
        many, limit_s = worker_count(workers), budget_s(budget)
        if why_not is None:
            return search.explained(found, workers=many, budget_s=limit_s, progress=progress)
        pinned = fields("--why-not", why_not)
        if not pinned:
            raise ConfigError(
                "names no field", key="--why-not", found=short_repr(why_not), allowed="fields such as tp=8"
            )
        return search.why_not(found, pinned, workers=many, budget_s=limit_s, progress=progress)


def what_if(
    plan: Plan | Path,
    changes: Mapping[str, str | float] | str,
    *,
    workers: int = 1,
    budget: float | str | None = None,
    progress: Progress | None = None,
) -> PlanComparison:
    """The method `what_if` of `Plan`, for a plan or its file."""
    with naming_arguments():
        found = _plan("plan", plan)
        written = changes if isinstance(changes, str) else ",".join(f"{k}={v}" for k, v in changes.items())
        return search.what_if(
            found, written, workers=worker_count(workers), budget_s=budget_s(budget), progress=progress
        )
