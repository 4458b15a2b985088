"""What `--target` means for a question, and what keeps `shardwise train` from a strategy."""

from __future__ import annotations

from shardwise.app.cli.request import OWN, Request, choice
from shardwise.errors import ConfigError
from shardwise.strategy import ANY, Strategy, Target, target_names, target_of


def wanted_target(name: str | None, request: Request) -> Target | None:
    """The target that `--target` names; None for any. ConfigError where it does not know the devices.

    Where nothing is named it is our own runtime on devices that it knows.
    """
    if name is not None:
        name = choice("--target", name, (*target_names(), ANY))
    if name == ANY or (name is None and not target_of(OWN).knows_devices(request.cluster.classes)):
        return None
    target = target_of(name or OWN)
    if not target.knows_devices(request.cluster.classes):
        raise ConfigError(
            f"{target.command} does not run on this cluster", key="--target", found=target.name,
            allowed=f"clusters of {', '.join(target.devices)}, or --target any",
        )  # fmt: skip
    return target


def not_run(strategy: Strategy | None, request: Request) -> tuple[str, ...] | None:
    """What keeps `shardwise train` from this strategy (None: from an uneven plan), as text; None where it
    does not know the devices."""
    target = target_of(OWN)
    if not target.knows_devices(request.cluster.classes):
        return None
    job = request.job
    found = [] if strategy is None else [str(refusal) for refusal in target.refusals(strategy)]
    for key, value, known in (
        ("dtype", job.dtype, target.uneven_dtypes if strategy is None else target.dtypes),
        ("optimizer", job.optimizer, target.optimizers),
        ("model family", request.model.family, target.families),
    ):
        if value not in known:
            found.append(f"{key} {value} (it runs {', '.join(known)})")
    return tuple(found)
