"""What `--target` means for a question, and what keeps `shardwise train` from a strategy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.app.cli.request import OWN_TARGET, Request, choice
from shardwise.errors import ConfigError
from shardwise.plan import UnevenResult
from shardwise.strategy import ANY, Strategy, Target, newest_target, target_names, target_of
from shardwise.targets import EXPORTS, check_model


def requested_target(name: str | None, request: Request) -> Target | None:
    """The target that `--target` names; None for any. ConfigError where it does not know the devices.

    Where nothing is named it is our own runtime on devices that it knows.
    """
    if name is not None:
        name = choice("--target", newest_target(name), (*target_names(), ANY))
    if name == ANY or (name is None and not target_of(OWN_TARGET).knows_devices(request.cluster.classes)):
        return None
    target = target_of(name or OWN_TARGET)
    if not target.runs_on(request.cluster.vendors):
        raise ConfigError(
            f"{target.command} does not run on this cluster", key="--target", found=target.name,
            allowed=f"clusters of {target.known_devices}; or --target any",
        )  # fmt: skip
    return target


def not_run(plan: Strategy | UnevenResult, request: Request) -> tuple[str, ...] | None:
    """What keeps `shardwise train` from this strategy or uneven plan, as text; None where it does not run on
    these devices at all."""
    target = target_of(OWN_TARGET)
    if not target.runs_on(request.cluster.vendors):
        return None
    job = request.job
    target = target.for_job(request.model, job)
    if isinstance(plan, Strategy):
        found, dtypes = [str(refusal) for refusal in target.refusals(plan)], target.dtypes
    else:
        stages = [stage for pipeline in plan.layout.pipelines for stage in pipeline.stages]
        is_beyond = any(stage.parts for stage in stages) and not target.runs_mixed_pool_stages
        found, dtypes = ["stages on two pools"] if is_beyond else [], target.uneven_dtypes
    return (*found, *_unknown(target, dtypes, request))


def require_job(target: Target, request: Request) -> None:
    """ConfigError where the target runs no plan of the job, whatever it is."""
    for unsupported in _unknown(target, target.dtypes, request):
        raise ConfigError(
            f"{target.command} runs no plan of this job",
            key="--target",
            found=unsupported,
            allowed="--target any, which plans it all the same",
        )
    if target.name in EXPORTS:
        check_model(request.model, request.job.seq_len)


def _unknown(target: Target, dtypes: Sequence[str], request: Request) -> Iterator[str]:
    """What of a job and its model a target does not know, which knows these dtypes."""
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


def train_warnings(unsupported: Sequence[str] | None, request: Request, save: str | None) -> list[str]:
    """What is said where our own runtime does not run the plan: on devices that it knows by name, and of any
    plan file."""
    is_shown = save is not None or target_of(OWN_TARGET).knows_devices(request.cluster.classes)
    return (
        [
            f"shardwise: `shardwise train` does not run this plan: {'; '.join(unsupported)}; "
            f"--target {OWN_TARGET} keeps to what it runs"
        ]
        if unsupported and is_shown
        else []
    )
