"""Parses the texts of options into the records that the planner takes."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.inputs import short_repr, unknown
from shardwise.plans import Reliability, RunLength
from shardwise.questions import (
    MAX_COUNT,
    MIXED_POOL_STAGES,
    OPTIMIZERS,
    JobArguments,
    Request,
    RunArguments,
    request_of,
    run_length,
)
from shardwise.units import parse_quantity

_EXPONENT = r"([eE][+-]?[0-9]{1,3})?"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options about model, cluster and job, as given; None where an option was left out."""

    model: str
    cluster: str
    inter_node: str | None = None
    seq_len: str | None = None
    global_batch_size: str
    dtype: str | None = None
    optimizer: str = "adamw"
    memory_margin: str | None = None
    expert_imbalance: str | None = None
    mean_sample_len: str | None = None
    calibration: str | None = None
    software: str | None = None
    attention: str | None = None
    set: str | None = None
    price: str | None = None
    lora: str | None = None
    images: str | None = None
    freeze: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options of `plan` about the search; `space`, `fix` and `target` are texts."""

    objective: str
    frontier: bool
    use_all: bool
    space: str
    fix: str
    target: str | None = None
    tolerance: float = 0.01
    top: int
    exhaustive: bool
    workers: int
    budget_s: float | None
    stage_dp: int = 1
    mixed_stage_rows: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a long run, as given: its length, and what goodput depends on; None where one was left
    out."""

    tokens: str | None = None
    steps: str | None = None
    days: str | None = None
    power: str | None = None
    mtbf: str | None = None
    checkpoint_interval: str | None = None
    checkpoint_stall: str | None = None
    restart: str | None = None
    jitter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRun:
    """The requested length of a run and what its goodput depends on; None where no option says so."""

    length: RunLength | None = None
    reliability: Reliability | None = None

    @property
    def is_requested(self) -> bool:
        """Whether any option is given."""
        return self.length is not None or self.reliability is not None


def job_arguments(options: JobOptions) -> dict[str, Any]:
    """The options as arguments of the functions of `shardwise.api`. ConfigError with the first that is no
    number or no choice."""
    margin, imbalance = options.memory_margin, options.expert_imbalance
    sample = options.mean_sample_len
    return {
        "seq_len": None if options.seq_len is None else count("--seq-len", options.seq_len),
        "global_batch_size": count("--global-batch-size", options.global_batch_size),
        "memory_margin": fraction("--memory-margin", margin, default=0.05, low=0.0, high=0.9),
        "expert_imbalance": fraction("--expert-imbalance", imbalance, default=1.1, low=1.0, high=100.0),
        "mean_sample_len": None if sample is None else count("--mean-sample-len", sample),
        "dtype": options.dtype,
        "optimizer": choice("--optimizer", options.optimizer, OPTIMIZERS),
        "model": options.model,
        "cluster": options.cluster,
        "inter_node": options.inter_node,
        "calibration": options.calibration,
        "software": options.software,
        "attention": options.attention,
        "set": options.set,
        "price": None if options.price is None else price(options.price),
        "lora": options.lora,
        "images": options.images,
        "freeze": options.freeze,
    }


def price(text: str) -> float | str:
    """Dollars per device and hour, as `2.9` or `2.9USD/h`, or the name of an offer."""
    plain = text.removesuffix("USD/h").strip()
    return float(plain) if re.fullmatch(r"[0-9]{1,7}(?:\.[0-9]{1,6})?", plain) else text


def load_request(options: JobOptions) -> Request:
    """The request that `options` describe. ConfigError with option, file and key of the first error."""
    return request_of(JobArguments(**job_arguments(options)))


def train_numbers(
    *, steps: str, lr: str, seed: str | None, checkpoint_every: str, restarts: str
) -> dict[str, int | float | None]:
    """The numeric options of `train`, parsed; ConfigError for the first that is out of range."""
    return {
        "steps": count("--steps", steps),
        "lr": fraction("--lr", lr, default=0.0, low=0.0, high=10.0),
        "seed": None if seed is None else count("--seed", seed, low=0),
        "checkpoint_every": count("--checkpoint-every", checkpoint_every),
        "restarts": count("--restarts", restarts, low=0),
    }


def count(option: str, text: str, *, low: int = 1, high: int = MAX_COUNT) -> int:
    """The integer in `text`, the value of `option`, written with plain digits."""
    if re.fullmatch(r"[0-9]{1,9}", text) is None or not low <= int(text) <= high:
        raise ConfigError(
            "is not a whole number in range", key=option, found=short_repr(text), allowed=f"{low} to {high}"
        )
    return int(text)


def fraction(option: str, text: str | None, *, default: float, low: float, high: float) -> float:
    """The decimal number in `text`, the value of `option` (3e-5 too); `default` where it was left out."""
    if text is None:
        return default
    if (
        re.fullmatch(rf"([0-9]{{1,9}}(\.[0-9]{{0,25}})?|\.[0-9]{{1,25}}){_EXPONENT}", text) is None
        or not low <= float(text) <= high
    ):
        raise ConfigError(
            "is not a number in range", key=option, found=short_repr(text), allowed=f"{low:g} to {high:g}"
        )
    return float(text)


def duration(option: str, text: str, *, low: str, high: str, bare: bool = False) -> float:
    """Seconds in `text`, the value of `option`, such as 30min; with `bare`, plain digits are seconds."""
    allowed = f"{low} to {high}, in s, min, h or d"
    is_bare = bare and re.fullmatch(rf"[0-9]{{1,9}}(\.[0-9]{{0,9}})?{_EXPONENT}", text) is not None
    try:
        value = parse_quantity(f"{text}s" if is_bare else text, "s")
    except ConfigError as error:
        raise ConfigError(error.message, key=option, found=short_repr(text), allowed=allowed) from None
    if not parse_quantity(low, "s") <= value <= parse_quantity(high, "s"):
        raise ConfigError("is not a time in range", key=option, found=short_repr(text), allowed=allowed)
    return value


def long_run(options: RunOptions) -> LongRun:
    """The options of a long run, read. ConfigError for the first that cannot be used."""
    return LongRun(length=_run_length(options), reliability=_reliability(options))


def required_length(options: RunOptions) -> LongRun:
    """The same for commands that show nothing else of a long run than the run itself: the other options need
    a length."""
    found = long_run(options)
    if found.length is None and found.reliability is not None:
        raise ConfigError(
            "is missing: goodput is that of a whole run", key="--tokens",
            allowed="--tokens, --steps or --days",
        )  # fmt: skip
    return found


def _run_length(options: RunOptions) -> RunLength | None:
    days = options.days
    return run_length(
        RunArguments(
            tokens=options.tokens,
            steps=None if options.steps is None else count("--steps", options.steps, high=10**9),
            days=None if days is None else fraction("--days", days, default=0.0, low=0.001, high=36_500.0),
            power=options.power,
        )
    )


def _reliability(options: RunOptions) -> Reliability | None:
    """The options about goodput, others at their default; None where none of them is given."""
    given: dict[str, float] = {}
    mtbf, interval, stall = options.mtbf, options.checkpoint_interval, options.checkpoint_stall
    restart, jitter = options.restart, options.jitter
    if mtbf is not None:
        given["device_mtbf_s"] = duration("--mtbf", mtbf, low="1h", high="1e8h")
    if interval is not None:
        given["checkpoint_interval_s"] = duration("--checkpoint-interval", interval, low="1s", high="365d")
    if stall is not None:
        given["checkpoint_stall_s"] = duration("--checkpoint-stall", stall, low="1ms", high="1d", bare=True)
    if restart is not None:
        given["restart_s"] = duration("--restart", restart, low="0s", high="30d", bare=True)
    if jitter is not None:
        given["jitter"] = fraction("--jitter", jitter, default=0.0, low=0.0, high=1.0)
    return Reliability(**given) if given else None


def choice(option: str, text: str, choices: Sequence[str]) -> str:
    """`text` where it is one of `choices`."""
    if text not in choices:
        raise unknown("is not one of the choices", text, choices, key=option)
    return text


def workers(text: str) -> int:
    """The number of processes in `--workers`: at most the number of cores."""
    return count("--workers", text, low=1, high=os.cpu_count() or 1)


def stage_dp(text: str) -> int:
    """The replicas in `--stage-dp`, a power of two."""
    found = count("--stage-dp", text, low=1, high=64)
    if found & (found - 1):
        raise ConfigError("is not a power of two", key="--stage-dp", found=text, allowed="1, 2, 4, ... 64")
    return found


def all_devices(*, use_all: bool, allow_idle: bool) -> bool:
    """Whether `--use-all` is given; the hidden `--allow-idle` states the default."""
    if use_all and allow_idle:
        raise ConfigError("cannot be combined with --allow-idle", key="--use-all", allowed="one of the two")
    return use_all


def mixed_stage_rows(text: str, alias_text: str | None) -> int:
    """The rows in `--mixed-pool-stages`, or in its hidden alias `--braid`; 1 allows no mixed-pool stages."""
    if alias_text is None:
        return count(MIXED_POOL_STAGES, text, low=1, high=8)
    if text != "1":
        raise ConfigError("is the same option", key="--braid", allowed=f"{MIXED_POOL_STAGES} alone")
    return count("--braid", alias_text, low=1, high=8)


def budget(text: str | None) -> float | None:
    """Seconds in `--budget`; None where it was left out."""
    return None if text is None else duration("--budget", text, low="1ms", high="30d")
