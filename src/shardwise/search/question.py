"""The question that a search answers (`Question`), and the default job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.cluster import Cluster
from shardwise.cost import RECIPES, Problem, bind
from shardwise.errors import ConfigError
from shardwise.inputs import unknown
from shardwise.model import Model
from shardwise.plans import OBJECTIVES, Value
from shardwise.search.space import Space
from shardwise.strategy import (
    ALIASES,
    FIELDS,
    Job,
    Limit,
    Optimizer,
    Strategy,
    brief_text,
    is_value,
    require_modules,
)

SPACES = ("core", "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Find the best strategy in `space` for training `model` on `cluster`, or on the best part of it, with
    `job`.

    `fixed` restricts fields (or the aliases zero_stage, dp_replicate, dp_shard) to one value, `axes`
    restricts fields to several values. `objective` is one of OBJECTIVES. With the objective `memory`,
    `use_all` or `exhaustive`, all devices are used (docs/reference/space.md). `top` is the number of
    runners-up. `frontier` requests the Pareto frontier of time and memory. `exhaustive` evaluates every legal
    strategy that fits.

    `workers` is the number of search processes; `budget_s` ends the search early with the incumbent. In an
    uneven plan up to `stage_dp` replicas of a stage, a power of two, share the rows of a micro-batch; a
    mixed-pool stage splits micro-batches of up to `mixed_stage_rows` rows. `fixed_by` names the option that
    fixes a field if it is not `--fix`. Candidates that exceed one of `limits` (of a target, for the model)
    are rejected. With `has_even_stages` the first and the last stage have as many layers as an even split.
    With `has_empty_ends` (of a target, or without one) interleaved pipelines may have two stages more than
    layers; with `has_own_set` selective recomputation has the own set of our runtime too where `axes` names
    modules. `open_options` are options of the target's software of which the best value is searched too.
    """

    model: Model
    cluster: Cluster
    job: Job
    space: str = "default"
    fixed: Mapping[str, Value] = field(default_factory=dict)
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    objective: str = "time"
    use_all: bool = False
    top: int = 3
    frontier: bool = False
    exhaustive: bool = False
    workers: int = 1
    budget_s: float | None = None
    stage_dp: int = 1
    mixed_stage_rows: int = 1
    fixed_by: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    has_even_stages: bool = False
    has_empty_ends: bool = False
    has_own_set: bool = False
    open_options: tuple[str, ...] = ()

    def problem(self) -> Problem:
        """The input of the cost model. Raises ConfigError if the fields are inconsistent."""
        check_choice("space", self.space, SPACES)
        check_choice("objective", self.objective, OBJECTIVES)
        if self.use_all and self.objective in ("devices", "cost"):
            raise ConfigError(
                "cannot be combined with an objective that may leave devices idle", key="use_all",
                found=f"objective {self.objective}", allowed="objective time or memory",
            )  # fmt: skip
        if self.top < 0:
            raise ConfigError("is negative", key="top", found=str(self.top), allowed="0 or more")
        if self.workers < 1:
            raise ConfigError("is too few", key="workers", found=str(self.workers), allowed="1 or more")
        if self.budget_s is not None and not self.budget_s > 0.0:
            raise ConfigError(
                "is not positive", key="budget", found=f"{self.budget_s:g} s", allowed="more than 0"
            )
        if self.stage_dp < 1 or self.stage_dp & (self.stage_dp - 1):
            raise ConfigError(
                "is no power of two", key="stage_dp", found=str(self.stage_dp), allowed="1, 2, 4, ..."
            )
        if self.mixed_stage_rows < 1:
            raise ConfigError(
                "is too few", key="mixed_stage_rows", found=str(self.mixed_stage_rows), allowed="1 or more"
            )
        for name, value in self.fixed.items():
            if name not in FIELDS and name not in ALIASES:
                raise unknown("is not a field of a strategy", name, (*FIELDS, *ALIASES), key=f"fix.{name}")
            if not is_value(name, value):
                raise ConfigError("is not a value of this field", key=f"fix.{name}", found=repr(value))
            if name == "recompute_modules":
                require_modules(self.model, str(value), f"fix.{name}")
        for name, values in self.axes.items():
            if name not in FIELDS:
                raise unknown("is not a field of a strategy", name, FIELDS, key=f"axes.{name}")
            for value in values:
                if not is_value(name, value):
                    raise ConfigError("is not a value of this field", key=f"axes.{name}", found=repr(value))
        check_batch(self.job.global_batch_size, self.cluster.devices, self.fixed)
        return bind(self.model, self.cluster, self.job)

    @property
    def uses_parts(self) -> bool:
        """Whether the plan may use only a part of the cluster."""
        if self.objective in ("devices", "cost"):
            return True
        return self.objective == "time" and not self.use_all and not self.exhaustive

    @property
    def why_uniform(self) -> str | None:
        """Why no uneven plans are searched for the question, whatever its cluster; None where they are."""
        if self.space != "default" or self.fixed or self.axes:
            return "a space or fields were chosen: only uniform strategies have them"
        if self.frontier or self.exhaustive:
            return "a frontier or every candidate was requested: only uniform strategies have them"
        if self.model.experts is not None:
            return "uneven plans of mixtures of experts are not searched"
        if self.model.patches:
            return "uneven plans of models with a vision tower are not searched"
        if len(self.model.kinds) > 1:
            return "uneven plans of models whose layers differ are not searched"
        return None

    def candidates(self) -> Space:
        """The search space of the candidates."""
        return Space(
            name=self.space,
            devices=self.cluster.devices,
            layers=self.model.layers,
            experts=self.model.experts is not None,
            global_batch_size=self.job.global_batch_size,
            fixed=self.fixed,
            axes=self.axes,
            limits=self.limits,
            has_even_stages=self.has_even_stages,
            has_empty_ends=self.has_empty_ends,
            has_own_set=self.has_own_set,
        )


def check_choice(key: str, found: str, allowed: tuple[str, ...]) -> None:
    """Raises ConfigError if `found` is not one of `allowed`."""
    if found not in allowed:
        raise unknown("is not one of the choices", found, allowed, key=key)


def default_job(
    model: Model,
    cluster: Cluster,
    *,
    seq_len: int | None,
    global_batch_size: int,
    dtype: str | None = None,
    optimizer: Optimizer = "adamw",
    memory_margin: float = 0.05,
    expert_imbalance: float = 1.1,
    mean_sample_len: int | None = None,
) -> Job:
    """A job with defaults filled in: the model's sequence length, and the best 16-bit dtype of all
    devices. ConfigError for a value out of range; samples are no longer than sequences."""
    length = seq_len if seq_len is not None else model.max_seq_len
    if length is None:
        raise ConfigError("the model names no sequence length", key="seq_len", allowed="--seq-len N")
    limits = (("seq_len", length), ("global_batch_size", global_batch_size))
    for key, count in limits:
        if not 1 <= count <= 10_000_000:
            raise ConfigError("out of range", key=key, found=str(count), allowed="1 to 10000000")
    if not 0.0 <= memory_margin < 1.0:
        raise ConfigError(
            "out of range", key="memory_margin", found=str(memory_margin), allowed="0 to below 1"
        )
    if not 1.0 <= expert_imbalance <= 100.0:
        raise ConfigError(
            "out of range", key="expert_imbalance", found=str(expert_imbalance), allowed="1 to 100"
        )
    if mean_sample_len is not None and not 1 <= mean_sample_len <= length:
        raise ConfigError(
            "is no length of samples that are packed into a sequence", key="mean_sample_len",
            found=str(mean_sample_len), allowed=f"1 to the sequence length, {length}",
        )  # fmt: skip
    if dtype is not None and dtype not in RECIPES:
        raise unknown("is not a known dtype", dtype, RECIPES, key="dtype")
    return Job(
        seq_len=length,
        global_batch_size=global_batch_size,
        dtype=dtype if dtype is not None else best_dtype(cluster),
        optimizer=optimizer,
        memory_margin=memory_margin,
        expert_imbalance=expert_imbalance,
        mean_sample_len=mean_sample_len,
    )


def best_dtype(cluster: Cluster) -> str:
    """bf16 if all devices support it, else fp16, else fp32."""
    used = {node.device_class for node in cluster.nodes}
    for dtype in ("bf16", "fp16"):
        if all(dtype in cluster.classes[name].peak_flop_per_s for name in used):
            return dtype
    return "fp32"


def check_batch(global_batch_size: int, devices: int, fixed: Mapping[str, object]) -> None:
    """Raises ConfigError, with the nearest batch sizes that work, if the fixed dp does not divide the
    batch."""
    dp = fixed.get("dp")
    if not isinstance(dp, int) or dp < 1 or global_batch_size % dp == 0:
        return
    below = global_batch_size // dp * dp
    near = [str(batch) for batch in (below, below + dp) if batch > 0]
    raise ConfigError(
        f"dp={dp} does not divide the batch", key="global_batch_size", found=str(global_batch_size),
        allowed=f"multiples of {dp}; nearest {' and '.join(near)}",
    )  # fmt: skip


def shortest_text(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> str:
    """The strategy with only the fields that `--strategy` needs for this model, cluster and job."""
    return brief_text(
        strategy,
        devices=cluster.devices,
        layers=model.layers,
        experts=None if model.experts is None else model.experts.experts,
        global_batch_size=job.global_batch_size,
    )
