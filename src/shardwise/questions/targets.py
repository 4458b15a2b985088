"""The target that a question names, and what of a plan our own runtime does not run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.model import Model
from shardwise.plans import Result
from shardwise.questions.arguments import choice, optional_text
from shardwise.questions.request import OWN_TARGET
from shardwise.strategy import ANY, Job, Target, newest_target, target_names, target_of
from shardwise.targets import EXPORTERS


class OfModel(Protocol):
    """What has a model, a cluster and a job: a request, or the plan of a model."""

    @property
    def model(self) -> Model: ...

    @property
    def cluster(self) -> Cluster: ...

    @property
    def job(self) -> Job: ...


def requested_target(given: object, request: OfModel) -> Target | None:
    """The target with this name; None for `any`. ConfigError where the target does not run on the cluster.

    The default is our own runtime on devices that it knows, else `any`.
    """
    name = optional_text("--target", given)
    if name is not None:
        name = choice("--target", newest_target(name), (*target_names(), ANY))
    if name == ANY or (name is None and not target_of(OWN_TARGET).knows_devices(request.cluster.classes)):
        return None
    target = target_of(name or OWN_TARGET)
    require_runs_on(target, request)
    return target


def require_runs_on(target: Target, request: OfModel) -> None:
    """ConfigError where the target does not run on the cluster."""
    if not target.runs_on(request.cluster.vendors):
        raise ConfigError(
            f"{target.command} does not run on this cluster", key="--target", found=target.name,
            allowed=f"clusters of {target.known_devices}; or --target any",
        )  # fmt: skip


def not_run(plan: Result, request: OfModel) -> tuple[str, ...] | None:
    """The parts of this plan that `shardwise train` does not support, as texts; None where
    it does not run on these devices at all."""
    target = target_of(OWN_TARGET)
    if not target.runs_on(request.cluster.vendors):
        return None
    job = request.job
    target = target.for_job(request.model, job)
    if plan.is_uniform:
        found, dtypes = [str(refusal) for refusal in target.refusals(plan.strategy)], target.dtypes
    else:
        is_beyond = any(stage.parts for stage in plan.layout.stages) and not target.runs_mixed_pool_stages
        found, dtypes = ["stages on two pools"] if is_beyond else [], target.uneven_dtypes
    return (*found, *_unknown(target, dtypes, request))


def require_job(target: Target, request: OfModel) -> None:
    """ConfigError where the target runs no plan of the job."""
    for unsupported in _unknown(target, target.dtypes, request):
        raise ConfigError(
            f"{target.command} runs no plan of this job",
            key="--target",
            found=unsupported,
            allowed="--target any, to plan it without a target",
        )
    if target.name in EXPORTERS:
        EXPORTERS[target.name].check_model(request.model, request.job.seq_len)


def _unknown(target: Target, dtypes: Sequence[str], request: OfModel) -> Iterator[str]:
    """Properties of job and model that a target with these dtypes does not support, as texts."""
    for key, value, known in (
        ("dtype", request.job.dtype, dtypes),
        ("optimizer", request.job.optimizer, target.optimizers),
        ("model family", request.model.family, target.families),
    ):
        if value not in known:
            yield f"{key} {value} (it runs {', '.join(known)})"
    for part in request.model.special_parts:
        if part in target.lacks:
            yield f"{part} (it runs models without it)"
