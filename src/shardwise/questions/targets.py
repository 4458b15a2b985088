"""The target that a question names."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.launch import unsupported_job
from shardwise.questions.arguments import choice, optional_text
from shardwise.questions.request import OWN_TARGET, Request
from shardwise.strategy import ANY, Target, newest_target, target_names, target_of
from shardwise.targets import EXPORTERS


def requested_target(given: object, request: Request) -> Target | None:
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


def require_runs_on(target: Target, request: Request) -> None:
    """ConfigError where the target does not run on the cluster."""
    if not target.runs_on(request.cluster.vendors):
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
