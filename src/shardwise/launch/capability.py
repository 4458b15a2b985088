"""What the shardwise runtime does not run of a plan, by its capability file
`strategy/data/targets/shardwise.json` (`not_run`, `check_runnable`), and what a target does not run of a job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.graph import StagedLayout, loss_weight
from shardwise.model import Model
from shardwise.plans import Plan
from shardwise.strategy import PACKED_SAMPLES, Job, Target, target_of


def own_target() -> Target:
    """The target of our own runtime."""
    return target_of("shardwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A value in a plan that the software does not support: its key in the plan file, the supported values,
    and its name in a list."""

    key: str
    found: str
    allowed: str
    label: str

    def __str__(self) -> str:
        return f"{self.label} (it runs {self.allowed})"


def not_run(plan: Plan) -> tuple[str, ...] | None:
    """What this runtime does not run of `plan`, as texts; None where it does not run on these devices at all.
    Of a graph, its operators are not checked."""
    if not own_target().runs_on(plan.cluster.vendors):
        return None
    return tuple(map(str, _unsupported(plan)))


def check_runnable(plan: Plan) -> None:
    """ConfigError with the first reason why this runtime cannot run `plan`. Of a graph, its operators are not
    checked."""
    for first in _unsupported(plan):
        of_strategy = first.key.startswith("best.strategy.")
        advice = f", as in plans of `plan --target {own_target().name}`" if of_strategy else ""
        raise ConfigError(
            "is not supported by this runtime", key=first.key, found=first.found,
            allowed=first.allowed + advice,
        )  # fmt: skip


def unsupported_job(
    target: Target, model: Model | None, job: Job, dtypes: Sequence[str]
) -> Iterator[Unsupported]:
    """What a target that supports these `dtypes` does not run of a job, and of the model if there is one."""
    yield from _unknown("job.dtype", "dtype", job.dtype, dtypes)
    yield from _unknown("job.optimizer", "optimizer", job.optimizer, target.optimizers)
    if job.is_packed and PACKED_SAMPLES in target.lacks:
        yield _named("job.mean_sample_len", PACKED_SAMPLES, "the sequence length")
    if model is not None:
        yield from _unknown("model", "model family", model.family, target.families)
        for part in model.special_parts:
            if part in target.lacks:
                yield _named("model", part, "models without it")


def _unknown(key: str, name: str, value: str, known: Sequence[str]) -> Iterator[Unsupported]:
    if value not in known:
        yield Unsupported(key=key, found=value, allowed=", ".join(known), label=f"{name} {value}")


def _named(key: str, found: str, allowed: str) -> Unsupported:
    return Unsupported(key=key, found=found, allowed=allowed, label=found)


def _unsupported(plan: Plan) -> Iterator[Unsupported]:
    """What this runtime does not run of `plan`: first fields of a strategy, then job, model and devices, then
    the layout."""
    of_kind = {"uniform": _of_strategy, "uneven": _of_pipelines, "graph": _of_graph}[plan.kind]
    yield from of_kind(plan)


def _of_strategy(plan: Plan) -> Iterator[Unsupported]:
    strategy = plan.strategy
    for refusal in own_target().for_job(plan.model, plan.job).refusals(strategy):
        yield Unsupported(
            key=f"best.strategy.{refusal.key}", found=refusal.found, allowed=refusal.allowed,
            label=f"{refusal.key}={refusal.found}",
        )  # fmt: skip
    yield from unsupported_job(own_target(), plan.model, plan.job, own_target().dtypes)
    yield from _of_devices(plan)
    is_ring = strategy.cp > 1 and strategy.cp_kind == "ring"
    if is_ring and plan.job.dtype == "fp32" and not own_target().knows_devices(plan.cluster.classes):
        # PyTorch's flash-attention kernels, which return the log-sum-exp of scores, do not support fp32 on
        # devices.
        yield _named("job.dtype", "fp32 with ring attention", "bf16, or cp_kind all_to_all")
    layout = plan.best.layout
    if len(layout.pipelines) > 1 or len({stage.device_class for stage in layout.stages}) > 1:
        yield _named("best.layout", "a mixed layout", "one pipeline of equal stages")


def _of_pipelines(plan: Plan) -> Iterator[Unsupported]:
    """Stages must also form pipelines on the ranks of the cluster."""
    yield from unsupported_job(own_target(), plan.model, plan.job, own_target().uneven_dtypes)
    yield from _of_devices(plan)
    if plan.model.experts is not None:
        yield _named("model", "experts", "models without experts")
    best, job = plan.best, plan.job
    sequences = sum(best.microbatches) * best.micro_batch_size
    taken: list[int] = []
    for place, pipeline in enumerate(best.layout.pipelines):
        layers = sum(sum(stage.layers) for stage in pipeline.stages)
        if layers != plan.model.layers:
            yield _named(f"best.layout.pipelines.{place}", f"{layers} layers", f"{plan.model.layers}")
        for stage in pipeline.stages:
            if stage.parts and not own_target().runs_mixed_pool_stages:
                yield _named("best.layout", "a stage on two pools", "stages on one pool each")
            ranks = stage.rank_numbers
            taken += ranks
            if len(ranks) != stage.tp * stage.dp:
                yield _named("best.layout", f"ranks {stage.ranks}", f"{stage.tp * stage.dp} ranks")
            if best.micro_batch_size % stage.dp or job.seq_len % stage.tp:
                yield _named("best.layout", f"tp {stage.tp}, dp {stage.dp}", "equal parts of a micro-batch")
    if sequences != job.global_batch_size:
        yield _named("best.microbatches", f"{sequences} sequences", f"{job.global_batch_size}")
    if len(set(taken)) != len(taken) or not set(taken) <= set(range(plan.cluster.devices)):
        yield _named("best.layout", "ranks used twice or unknown", f"ranks below {plan.cluster.devices}")


def _of_graph(plan: Plan) -> Iterator[Unsupported]:
    yield from unsupported_job(own_target(), None, plan.job, own_target().dtypes)
    yield from _of_devices(plan)
    if isinstance(plan.operators, StagedLayout):
        if shared := plan.operators.shared_parameters(plan.graph):
            yield _named("layout.stages", f"{shared[0]} in several stages", "parameters of one stage each")
        try:
            loss_weight(plan.graph, plan.microbatches)
        except ConfigError as error:
            found = f"{plan.microbatches} micro-batches, which {error.message}"
            yield _named("layout.microbatches", found, "1 micro-batch")


def _of_devices(plan: Plan) -> Iterator[Unsupported]:
    if not own_target().runs_on(plan.cluster.vendors):
        yield _named("cluster", ", ".join(plan.cluster.classes), own_target().known_devices)
