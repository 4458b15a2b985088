"""Spaces that a question names, and their candidates as the checker counts them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from shardwise import search
from shardwise.cluster import pools_of
from shardwise.cost import limits_of
from shardwise.errors import ConfigError
from shardwise.inputs import unknown
from shardwise.plans import Value
from shardwise.questions.arguments import text
from shardwise.questions.request import Request
from shardwise_verify import PipelineCount, PoolSize, SpaceCount, count_pipelines, count_space

Axes = Mapping[str, tuple[Value, ...]]
Fixed = Mapping[str, Value]


def space_choice(given: object) -> search.SpaceChoice:
    """The space that an argument names: a name, or a file with a base and restricted axes."""
    named = text("--space", given)
    if named in search.SPACES:
        return search.SpaceChoice(base=named)
    if named and (os.path.exists(named) or re.search(r"[/.\\]", named)):
        return search.read_space(named)
    raise unknown("is neither a space nor a file", named, search.SPACES, key="--space")


def require_candidates(chosen: search.SpaceChoice, fixed: Fixed, request: Request) -> None:
    """ConfigError with the first axis of a space file that leaves no candidate together with the axes before
    it and the fixed fields."""
    restrictions: dict[str, tuple[Value, ...]] = {}
    for name, values in chosen.axes.items():
        before = dict(restrictions)
        restrictions[name] = values
        if not counted_space(chosen.base, fixed, restrictions, request).count:
            possible = counted_space(chosen.base, fixed, before, request).axes.get(name, ())
            allowed = ", ".join(possible[:20]) + (", ..." if len(possible) > 20 else "")
            raise ConfigError(
                "leaves no candidate"
                + (f" together with {', '.join((*before, *fixed))}" if before or fixed else ""),
                file=chosen.file,
                key=f"axes.{name}",
                found=", ".join(map(str, values)),
                allowed=allowed or "none: the fixed fields leave no candidate",
            )


def counted_space(base: str, fixed: Fixed, axes: Axes, request: Request) -> SpaceCount:
    """The axes of a space without a target and its number of candidates, counted by the checker."""
    model, cluster, job = request.model, request.cluster, request.job
    bare = search.Question(model=model, cluster=cluster, job=job, space=base, fixed=fixed, axes=axes)
    question = search.without_target(bare)
    return count_space(
        model_layers=model.layers,
        experts=None if model.experts is None else model.experts.experts,
        devices=cluster.devices,
        global_batch_size=job.global_batch_size,
        space=base,
        fixed=fixed,
        axes=question.axes,
        empty_ends=question.has_empty_ends,
        own_set=question.has_own_set,
    )


def counted_uneven(
    chosen: search.SpaceChoice, fixed: Fixed, request: Request, limits: Mapping[str, int]
) -> PipelineCount | None:
    """The pipelines of uneven plans with up to `stage_dp` replicas of a stage and mixed-pool stages that
    split up to `mixed_stage_rows` rows, counted by the checker; None where `plan` searches no uneven
    plans."""
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
        mixed_stage_rows=limits["mixed_stage_rows"],
        global_batch_size=job.global_batch_size,
    )
