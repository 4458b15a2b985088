"""The space that is asked for: a name, or a file; counted by the checker."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shardwise import search
from shardwise.app.cli.request import Request
from shardwise.check import PipelineCount, PoolSize, SpaceCount, count_pipelines, count_space
from shardwise.cluster import pools_of
from shardwise.cost import limits_of
from shardwise.errors import ConfigError
from shardwise.inputs import nearest, short_repr
from shardwise.plan import Value

Axes = Mapping[str, tuple[Value, ...]]
Fixed = Mapping[str, Value]


def space_choice(text: str) -> search.SpaceChoice:
    """The space that `--space` names, or that is written in the file it names."""
    if text in search.SPACES:
        return search.SpaceChoice(base=text)
    if text and (os.path.exists(text) or re.search(r"[/.\\]", text)):
        return search.read_space(text)
    near = nearest(text, search.SPACES)
    hint = f" (did you mean {near}?)" if near else ""
    raise ConfigError(
        f"is neither a space nor a file{hint}",
        key="--space",
        found=short_repr(text),
        allowed=", ".join(search.SPACES),
    )


def require_candidates(chosen: search.SpaceChoice, fixed: Fixed, request: Request) -> None:
    """ConfigError, naming the first axis that leaves none, where values of a space file exclude each other or
    what is fixed."""
    restrictions: dict[str, tuple[Value, ...]] = {}
    for name, values in chosen.axes.items():
        before = dict(restrictions)
        restrictions[name] = values
        if not counted_space(chosen.base, fixed, restrictions, request).count:
            possible = counted_space(chosen.base, fixed, before, request).axes[name]
            allowed = ", ".join(possible[:20]) + (", ..." if len(possible) > 20 else "")
            raise ConfigError(
                "leaves no candidate"
                + (f" beside {', '.join((*before, *fixed))}" if before or fixed else ""),
                file=chosen.file,
                key=f"axes.{name}",
                found=", ".join(map(str, values)),
                allowed=allowed or "none: what is fixed leaves no candidate",
            )


def counted_space(base: str, fixed: Fixed, axes: Axes, request: Request) -> SpaceCount:
    """The space with its axes, by the checker's count."""
    experts = request.model.experts
    return count_space(
        model_layers=request.model.layers,
        experts=None if experts is None else experts.experts,
        devices=request.cluster.devices,
        global_batch_size=request.job.global_batch_size,
        space=base,
        fixed=fixed,
        axes=axes,
    )


def counted_uneven(
    chosen: search.SpaceChoice, fixed: Fixed, request: Request, limits: Mapping[str, int]
) -> PipelineCount | None:
    """The pipelines of uneven plans with up to `stage_dp` replicas in a stage, and up to `mixed_stage_rows`
    rows split over two pools, by the checker's count; None where `plan` looks for none."""
    model, job = request.model, request.job
    is_restricted = bool(chosen.base != "default" or chosen.axes or fixed)
    is_plain = model.experts is None and len(model.kinds) == 1
    if is_restricted or not is_plain or not search.is_mixed(request.cluster):
        return None
    of_model = limits_of(model, job)
    return count_pipelines(
        layers=model.layers,
        pools=[
            PoolSize(name=pool.name, devices=pool.devices, node_devices=pool.node.devices)
            for pool in pools_of(request.cluster)
        ],
        splits=(of_model.heads, of_model.ffn_splits, of_model.seq_len),
        kv_heads=of_model.kv_heads,
        stage_dp=limits["stage_dp"],
        mixed_stage_rows=limits["braid"],
        global_batch_size=job.global_batch_size,
    )
