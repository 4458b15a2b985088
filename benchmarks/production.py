"""Published large runs against our predictions: `python -m benchmarks.production`.

`production_runs.json` has the runs: model, devices, batch and plan as published, with their source, and
what the source leaves open (`assumed`). The table says whether each plan is legal, whether it fits its
devices, and how the predicted step time compares with the published one. No number of the cost model is
fitted to these runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.recipes import table

from shardwise import search
from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import Model, load_model, model_flop_per_token, model_from_config
from shardwise.strategy import Strategy, complete, software_of, target_of

RUNS = Path(__file__).with_name("production_runs.json")
GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A published run. `cluster` is a shorthand, `strategy` fields of a strategy. `software` names a
    software profile that stands for that of the run. `step_s` are seconds of a step, or `tflops` the model
    TFLOP/s of a device (with those of full recomputation where `counts_recomputation`); both may be None.
    `assumed` is what the source does not say."""

    name: str
    model: str | Mapping[str, Any]
    cluster: str
    seq_len: int
    global_batch_size: int
    dtype: str
    software: str
    options: Mapping[str, str]
    strategy: Mapping[str, Any]
    step_s: float | None
    tflops: float | None
    counts_recomputation: bool
    source: str
    assumed: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What we say of a run: the broken rule or None, bytes of the fullest rank and of its device, and
    seconds of a step, predicted and published (None where no time is published)."""

    run: Run
    illegal: str | None
    needed_bytes: float = 0.0
    device_bytes: float = 0.0
    predicted_s: float = 0.0
    published_s: float | None = None
    band_s: tuple[float, float] = (0.0, 0.0)

    @property
    def fits(self) -> bool:
        return self.illegal is None and self.needed_bytes <= self.device_bytes

    @property
    def error(self) -> float | None:
        """Predicted over published time, minus 1; None where there is no such time."""
        if self.illegal is not None or self.published_s is None:
            return None
        return self.predicted_s / self.published_s - 1.0

    @property
    def is_in_band(self) -> bool | None:
        """Whether the published time is within the band of the prediction."""
        if self.illegal is not None or self.published_s is None:
            return None
        return self.band_s[0] <= self.published_s <= self.band_s[1]


def read_runs(path: Path = RUNS) -> list[Run]:
    """The published runs."""
    records = json.loads(path.read_text("utf-8"))
    return [Run(**{**record, "assumed": tuple(record["assumed"])}) for record in records]


def outcome_of(run: Run) -> Outcome:
    """The prediction of a run with its published plan."""
    problem = _problem(run)
    published = _published_s(run, problem)
    try:
        result = search.predicted(*problem_of(run))
    except (ConfigError, Infeasible) as error:
        return Outcome(run=run, illegal=str(error), published_s=published)
    return Outcome(
        run=run,
        illegal=None,
        needed_bytes=result.peak_memory.device,
        device_bytes=min(float(one.memory_bytes) for one in problem.cluster.classes.values()),
        predicted_s=result.step_time_s,
        published_s=published,
        band_s=result.band_s,
    )


def problem_of(run: Run) -> tuple[Problem, Strategy]:
    """The problem of a run and its strategy. Raises ConfigError where they contradict each other."""
    problem = _problem(run)
    model = problem.model
    return problem, complete(
        run.strategy,
        devices=problem.cluster.devices,
        layers=model.layers,
        experts=None if model.experts is None else model.experts.experts,
        global_batch_size=run.global_batch_size,
    )


def _problem(run: Run) -> Problem:
    model: Model = load_model(run.model) if isinstance(run.model, str) else model_from_config(dict(run.model))
    cluster = load_cluster(run.cluster)
    job = search.default_job(
        model,
        cluster,
        seq_len=run.seq_len,
        global_batch_size=run.global_batch_size,
        dtype=run.dtype,
        optimizer="adamw",
        memory_margin=0.05,
        expert_imbalance=1.1,
    )
    profile = software_of(run.software)
    if run.options:
        profile = target_of(run.software).with_options(profile, run.options)
    return bind(model, cluster, replace(job, profile=profile))


def _published_s(run: Run, problem: Problem) -> float | None:
    """Seconds of a step. A published rate counts the model's own FLOP, with whole attention matrices, as
    Megatron-LM does; with full recomputation the forward pass counts twice, 4 / 3 of them."""
    if run.step_s is not None or run.tflops is None:
        return run.step_s
    tokens = run.seq_len * run.global_batch_size
    flop = tokens * model_flop_per_token(problem.model, run.seq_len, causal_half=False)
    times = 4.0 / 3.0 if run.counts_recomputation else 1.0
    return times * flop / (run.tflops * 1e12 * problem.cluster.devices)


HEADS = ("run", "legal", "GiB", "fits", "predicted s", "published s", "error", "in its band")


def rows_of(outcomes: Sequence[Outcome]) -> Iterator[tuple[object, ...]]:
    """A row of the table per run, and one for all of them."""
    for one in outcomes:
        if one.illegal is not None:
            yield one.run.name, one.illegal, "", "", "", "", "", ""
            continue
        yield (
            one.run.name,
            "yes",
            f"{one.needed_bytes / GIB:.0f} of {one.device_bytes / GIB:.0f}",
            "yes" if one.fits else "no",
            f"{one.predicted_s:.1f}",
            "" if one.published_s is None else f"{one.published_s:.1f}",
            "" if one.error is None else f"{one.error:+.0%}",
            "" if one.is_in_band is None else "yes" if one.is_in_band else "no",
        )
    errors = [abs(one.error) for one in outcomes if one.error is not None]
    inside = [one.is_in_band for one in outcomes if one.is_in_band is not None]
    yield (
        f"{len(outcomes)} runs",
        str(sum(one.illegal is None for one in outcomes)),
        "",
        str(sum(one.fits for one in outcomes)),
        "",
        f"{len(errors)} published",
        f"{fmean(errors):.0%} in the mean",
        f"{sum(inside)} of {len(inside)}",
    )


def main() -> int:
    outcomes = [outcome_of(run) for run in read_runs()]
    print(table(HEADS, rows_of(outcomes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
