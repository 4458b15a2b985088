"""A whole training run: days, device hours, money and energy, with failures and checkpoints counted in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, floor

from shardwise.cluster import Cluster, node_runs, price_lines, rated_powers
from shardwise.errors import ConfigError
from shardwise.plans.goodput import Goodput, Reliability, goodput_at
from shardwise.plans.plan import Plan

DAY_S = 86400.0
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLength:
    """How long a run is: exactly one of trained tokens, optimizer steps, and seconds of wall time.

    `power_w` is the power of a device in watts, with its share of the server and of cooling if these are to
    be counted; None for the rated power of the device.
    """

    tokens: float | None = None
    steps: int | None = None
    wall_s: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """A training run of `steps` steps with `tokens` tokens (None where samples have no tokens).

    `computing_s` is their time without any loss; `wall_s` adds failures, checkpoints and jitter (`goodput`).
    `wall_band_s` is the wall time at both ends of the 80 % band of the step time, None where that is not
    known. `usd` is the price of the used nodes during `wall_s`, None if a price is unknown; `prices` says
    where each is from. `energy_j` is the power of the used devices during `wall_s` in joules, None if a power
    is unknown; `powers` says where each is from.
    """

    steps: int
    tokens: float | None
    step_time_s: float
    computing_s: float
    wall_s: float
    wall_band_s: tuple[float, float] | None
    devices: int
    usd: float | None
    usd_per_hour: float | None
    prices: tuple[str, ...]
    energy_j: float | None
    powers: tuple[str, ...]
    goodput: Goodput

    @property
    def days(self) -> float:
        """Days of wall time."""
        return self.wall_s / DAY_S

    @property
    def device_hours(self) -> float:
        """Hours of wall time of all used devices together."""
        return self.devices * self.wall_s / HOUR_S

    @property
    def energy_kwh(self) -> float | None:
        """Energy in kilowatt-hours."""
        return None if self.energy_j is None else self.energy_j / 3.6e6

    def to_dict(self) -> dict[str, object]:
        """The run as plain values."""
        return {
            **asdict(self),
            "days": self.days,
            "device_hours": self.device_hours,
            "energy_kwh": self.energy_kwh,
        }


def whole_run(
    length: RunLength,
    reliability: Reliability,
    *,
    cluster: Cluster,
    step_time_s: float,
    tokens_per_step: float | None,
    band_s: tuple[float, float] | None = None,
) -> WholeRun:
    """The run of `length` on all devices of `cluster`; `band_s` is the 80 % band of the step time.

    The last step is whole. Within a wall time only whole steps count. Raises ConfigError where tokens are
    requested of samples that have none, for a wall time below one step, and where failures leave no progress.
    """
    rate = None if tokens_per_step is None else tokens_per_step / step_time_s / cluster.devices
    goodput = goodput_at(step_time_s, rate, cluster, reliability)
    if goodput.fraction <= 0.0:
        raise ConfigError(
            "leaves no progress: a failure comes before the next step", key="--mtbf",
            found=f"{reliability.device_mtbf_s / HOUR_S:g}h", allowed="a longer time, or fewer devices",
        )  # fmt: skip
    wall_per_step = step_time_s / goodput.fraction
    steps = _steps(length, tokens_per_step, wall_per_step)
    wall_s = steps * wall_per_step
    powers, watts = _powers(cluster, length.power_w)
    usd_per_hour = cluster.price_usd_per_hour
    return WholeRun(
        steps=steps,
        tokens=None if tokens_per_step is None else steps * tokens_per_step,
        step_time_s=step_time_s,
        computing_s=steps * step_time_s,
        wall_s=wall_s,
        wall_band_s=None if band_s is None else (
            wall_s * band_s[0] / step_time_s, wall_s * band_s[1] / step_time_s
        ),
        devices=cluster.devices,
        usd=None if usd_per_hour is None else usd_per_hour * wall_s / HOUR_S,
        usd_per_hour=usd_per_hour,
        prices=tuple(price_lines(cluster)),
        energy_j=None if watts is None else watts * wall_s,
        powers=powers,
        goodput=goodput,
    )  # fmt: skip


def whole_run_of(plan: Plan, length: RunLength, reliability: Reliability) -> WholeRun:
    """The run of `plan`. Raises ConfigError as `whole_run`."""
    per_device = plan.best.tokens_per_s_per_device
    return whole_run(
        length,
        reliability,
        cluster=plan.cluster,
        step_time_s=plan.step_time_s,
        tokens_per_step=None if per_device is None else plan.job.seq_len * plan.job.global_batch_size,
        band_s=plan.best.band_s,
    )


def _steps(length: RunLength, tokens_per_step: float | None, wall_per_step: float) -> int:
    """The whole steps of a length."""
    if length.steps is not None:
        return length.steps
    if length.tokens is not None:
        if tokens_per_step is None:
            raise ConfigError(
                "is not known of samples of an operator graph", key="--tokens", found=f"{length.tokens:g}",
                allowed="--steps or --days",
            )  # fmt: skip
        return ceil(length.tokens / tokens_per_step)
    wall_s = length.wall_s or 0.0
    steps = floor(wall_s / wall_per_step)
    if steps < 1:
        raise ConfigError(
            "is less than one step", key="--days", found=f"{wall_s / DAY_S:g}",
            allowed=f"at least {wall_per_step / DAY_S:.3g}",
        )  # fmt: skip
    return steps


def _powers(cluster: Cluster, given_w: float | None) -> tuple[tuple[str, ...], float | None]:
    """Where the power of each device class is from, and the power of all devices in watts (None if one is
    not known)."""
    if given_w is not None:
        return (f"power of a device: {given_w:,.4g} W (given)",), given_w * cluster.devices
    counts: dict[str, int] = {}
    for node, count in node_runs(cluster.nodes):
        counts[node.device_class] = counts.get(node.device_class, 0) + node.devices * count
    texts, watts = [], 0.0
    is_known = True
    for name, count in counts.items():
        rated = rated_powers().get(cluster.classes[name].name)
        if rated is None:
            is_known = False
            texts.append(f"power of {name}: not known; --power gives it")
            continue
        watts += rated.watts * count
        texts.append(
            f"power of {name}: {rated.watts:,.4g} W, rated ({rated.source}), without servers and cooling"
        )
    return tuple(texts), watts if is_known else None
