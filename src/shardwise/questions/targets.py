"""The target that a question names."""

from __future__ import annotations

from shardwise.cluster import Cluster
from shardwise.errors import ConfigError
from shardwise.launch import unsupported_job
from shardwise.questions.arguments import choice, optional_text
from shardwise.questions.request import OWN_TARGET, Request
from shardwise.strategy import ANY, Target, newest_target, target_names, target_of
from shardwise.targets import EXPORTERS


def is_table_of_targets(given: object, request: Request) -> bool:
    """Whether the best target is to be found: none is named, and our own runtime is not the default."""
    return given is None and not target_of(OWN_TARGET).knows_devices(request.cluster.classes)


def target_name(given: object) -> str | None:
    """The name of a target, with its version, or `any`; None where none was given."""
    name = optional_text("--target", given)
    return None if name is None else choice("--target", newest_target(name), (*target_names(), ANY))


def request_for(given: object, request: Request) -> tuple[Request, Target | None]:
    """The request with the software profile of the target with this name, and the target; None for `any`.
    ConfigError where the target does not run on the cluster, or runs no plan of the job.

    The default is our own runtime on devices that it knows, else `any`.
    """
    name = target_name(given)
    if name == ANY or (name is None and is_table_of_targets(name, request)):
        return request.for_any_target(), None
    target = target_of(name or OWN_TARGET)
    require_runs_on(target, request.cluster)
    require_job(target, request)
    return request.for_target(target), target


def require_runs_on(target: Target, cluster: Cluster) -> None:
    """ConfigError where the target does not run on the cluster."""
    if not target.runs_on(cluster.vendors):
        raise ConfigError(
            f"{target.command} does not run on this cluster", key="--target", found=target.name,
            allowed=f"clusters of {target.known_devices}; or --target any",
        )  # fmt: skip


def require_job(target: Target, request: Request) -> None:
    """ConfigError where the target runs no plan of the job."""
    for unsupported in unsupported_job(target, request.model, request.job, target.dtypes):
        raise ConfigError(
            f"{target.command} runs no plan of this job",
            key="--target",
            found=str(unsupported),
            allowed="--target any, to plan it without a target",
        )
    if target.name in EXPORTERS:
        EXPORTERS[target.name].check_model(request.model, request.job.seq_len)
