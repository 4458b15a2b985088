"""From the arguments about a whole training run to its days, device hours, money and energy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.pareto import non_dominated
from shardwise.plans import DAY_S, Plan, Reliability, RunLength, WholeRun, whole_run, whole_run_of
from shardwise.questions import arguments
from shardwise.search import Curve, Point, chosen

MOST_TOKENS = 1e18
LEAST_DAYS, MOST_DAYS = 0.001, 36_500.0
HOUR_S = 3600.0

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_TOKENS = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?(?:e[0-9]{1,2})?) ?([kKMBGT]?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """The arguments about a whole run, as given; None where one was left out."""

    tokens: object = None
    steps: object = None
    days: object = None
    power: object = None
    mtbf: object = None
    checkpoint_interval: object = None
    checkpoint_stall: object = None
    restart: object = None
    jitter: object = None


def run_length(given: RunArguments) -> RunLength | None:
    """The length of the run, None where none is given. ConfigError for more than one length, for a value
    that cannot be used, and for a power without a length."""
    lengths = {"--tokens": given.tokens, "--steps": given.steps, "--days": given.days}
    named = [name for name, value in lengths.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"cannot be combined with {named[0]}", key=named[1], allowed="one of the two")
    power_w = (
        None
        if given.power is None
        else arguments.quantity("--power", given.power, "W", allowed="such as 700W or 1.2kW")
    )
    if not named:
        if power_w is not None:
            raise ConfigError("requires the length of a run", key="--power", allowed=" or ".join(lengths))
        return None
    return RunLength(
        tokens=None if given.tokens is None else _tokens(given.tokens),
        steps=None if given.steps is None else arguments.count("--steps", given.steps, high=10**9),
        wall_s=None
        if given.days is None
        else arguments.number("--days", given.days, low=LEAST_DAYS, high=MOST_DAYS) * DAY_S,
        power_w=power_w,
    )


def required_length(given: RunArguments) -> RunLength:
    """The length of the run. ConfigError where none is given."""
    length = run_length(given)
    if length is None:
        raise ConfigError("is missing", key="--tokens", allowed="--tokens, --steps or --days")
    return length


def reliability_of(given: RunArguments) -> Reliability:
    """How often devices fail, and what failures and checkpoints cost; defaults where nothing is given."""
    found: dict[str, float] = {}
    limits: Mapping[str, tuple[str, object, float, float]] = {
        "device_mtbf_s": ("--mtbf", given.mtbf, HOUR_S, 1e8 * HOUR_S),
        "checkpoint_interval_s": ("--checkpoint-interval", given.checkpoint_interval, 1.0, 365 * DAY_S),
        "checkpoint_stall_s": ("--checkpoint-stall", given.checkpoint_stall, 1e-3, DAY_S),
        "restart_s": ("--restart", given.restart, 0.0, 30 * DAY_S),
    }
    for name, (option, value, low, high) in limits.items():
        if value is not None:
            found[name] = arguments.seconds(option, value, low=low, high=high)
    if given.jitter is not None:
        found["jitter"] = arguments.number("--jitter", given.jitter, low=0.0, high=1.0)
    return Reliability(**found)


def run_of_plan(plan: Plan, given: RunArguments) -> WholeRun:
    """The whole run of a plan. ConfigError for an argument that cannot be used."""
    return whole_run_of(plan, required_length(given), reliability_of(given))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOnPart:
    """The whole run at the fastest `point` of a part of the cluster. `is_on_frontier` says whether no other
    part is at least as good in wall time and money, and better in one; device hours stand for money where a
    price is not known."""

    point: Point[Any]
    run: WholeRun
    is_on_frontier: bool


def runs_on_parts(
    curves: Sequence[Curve[Any]],
    given: RunArguments,
    *,
    limit_bytes: float,
    tokens_per_step: float | None,
) -> tuple[RunOnPart, ...]:
    """The whole run on each part that has a point within `limit_bytes`, in the order of the curves.
    ConfigError for an argument that cannot be used."""
    return runs_of_length(
        curves,
        required_length(given),
        reliability_of(given),
        limit_bytes=limit_bytes,
        tokens_per_step=tokens_per_step,
    )


def runs_of_length(
    curves: Sequence[Curve[Any]],
    length: RunLength,
    reliability: Reliability,
    *,
    limit_bytes: float,
    tokens_per_step: float | None,
) -> tuple[RunOnPart, ...]:
    """The same for arguments that are read. Runs within the same wall time are compared by their steps and
    their money an hour."""
    points = [chosen(curve.points, mode="time", limit_bytes=limit_bytes) for curve in curves]
    found = [
        (
            point,
            whole_run(
                length,
                reliability,
                cluster=point.part,
                step_time_s=point.time_s,
                tokens_per_step=tokens_per_step,
            ),
        )
        for point in points
        if point is not None
    ]
    if not found:
        return ()
    is_priced = all(run.usd is not None for _, run in found)
    figures = [
        (run.wall_s, (run.usd or 0.0) if is_priced else run.device_hours)
        if length.wall_s is None
        else (-float(run.steps), (run.usd_per_hour or 0.0) if is_priced else float(run.devices))
        for _, run in found
    ]
    best = set(non_dominated(np.array(figures)).tolist())
    return tuple(
        RunOnPart(point=point, run=run, is_on_frontier=place in best)
        for place, (point, run) in enumerate(found)
    )


def _tokens(value: Any) -> float:
    """Tokens: a number, or text such as `15T`."""
    allowed = "tokens such as 15T, 300B or 2e12"
    if isinstance(value, str):
        match = _TOKENS.fullmatch(value.strip())
        if match is None:
            raise ConfigError(
                "is no number of tokens", key="--tokens", found=short_repr(value), allowed=allowed
            )
        value = float(match[1]) * _PREFIXES[match[2]]
    return arguments.number("--tokens", value, low=1.0, high=MOST_TOKENS)
