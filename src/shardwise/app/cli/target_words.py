"""The recommended plan in the words of its target: flags of Megatron-LM, keys of a configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import complete
from shardwise.targets import IMPORTERS

ALWAYS = ("micro", "batch_size", "--use-megatron-fsdp")
"""Parts of the names of settings that every plan shows."""


def target_words(plan: Plan) -> tuple[str, ...]:
    """The settings of the target in which the plan differs from data parallelism alone, with the micro-batch
    size; empty without a target whose settings are known, and for uneven plans."""
    importer = IMPORTERS.get(plan.target or "")
    if importer is None or plan.best.fields is None:
        return ()
    settings = importer.settings(plan)
    plain = _plain(plan)
    return tuple(
        _text(name, value)
        for name, value in settings.items()
        if plain.get(name) != value or any(part in name for part in ALWAYS)
    )


def _plain(plan: Plan) -> Mapping[str, str]:
    """The settings of data parallelism alone; none where the target cannot say it."""
    experts = plan.model.experts
    strategy = complete(
        {}, devices=plan.cluster.devices, layers=plan.model.layers,
        experts=None if experts is None else experts.experts,
        global_batch_size=plan.job.global_batch_size,
    )  # fmt: skip
    try:
        return IMPORTERS[str(plan.target)].settings(replace(plan, best=replace(plan.best, fields=strategy)))
    except ConfigError:
        return {}


def _text(name: str, value: str) -> str:
    """`--flag value`, quoted for a shell; `key = value` of a file."""
    if name.startswith("--"):
        return f"{name} '{value}'" if any(sign in value for sign in "|*()") else f"{name} {value}".strip()
    return f"{name} {value}".replace(" : ", ": ", 1)
