"""Published large runs against our predictions: `python -m benchmarks.production`.

`production_runs.json` has the runs: model, devices, batch and plan as published, with their source, and
what the source leaves open (`assumed`). The table says whether each plan is legal, whether it fits its
devices, how the predicted step time compares with the published one, and how fast our own pick for the same
software and devices is predicted. No number of the cost model is fitted to these runs.
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
from shardwise.plans import Result
from shardwise.strategy import Strategy, complete, software_of, target_of

RUNS = Path(__file__).with_name("production_runs.json")
GIB = 2.0**30
TARGET = "megatron-lm-0.19"


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
    seconds of a step, predicted and published (None where no time is published). `own` is our pick for the
    same software, None where nothing of it fits with the default margin."""

    run: Run
    illegal: str | None
    needed_bytes: float = 0.0
    device_bytes: float = 0.0
    predicted_s: float = 0.0
    published_s: float | None = None
    band_s: tuple[float, float] = (0.0, 0.0)
    own: Strategy | None = None
    own_s: float = 0.0

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
    def gain(self) -> float | None:
        """Share of the published plan's predicted step that our pick saves; None where one of them does not
        fit, since then they are not comparable."""
        return None if self.own is None or not self.fits else 1.0 - self.own_s / self.predicted_s

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


OF_ITS_TIME: Mapping[str, Mapping[str, Any]] = {
    "megatron-2021": {"cp": 1, "offload": "none"},
    "deepspeed-2022": {"cp": 1, "offload": "none", "schedule": "1f1b"},
}
"""Fields of which software of these years had one value; what its profile says is not repeated here."""


def with_own_pick(outcome: Outcome, found: dict[Any, Result | None]) -> Outcome:
    """The outcome with our pick: the fastest plan on all devices of the run among those that its software
    runs, with the default margin of memory. `found` has picks of the same question, and gets new ones.

    Software is that of Megatron-LM 0.19 where it runs the published plan, else any. Older software has the
    ZeRO stages, recomputation and sequence parallelism of its profile, even stages, and `OF_ITS_TIME`.
    """
    run, problem = outcome.run, _problem(outcome.run)
    profile, target = problem.profile, target_of(TARGET)
    fixed, axes = dict(OF_ITS_TIME.get(run.software, {})), {}
    if run.software in OF_ITS_TIME:
        axes["recompute"] = tuple(profile.recomputes)
        fixed["zero_stage"] = max(profile.zero_stages)
        if not profile.sequence_parallel:
            fixed["sequence_parallel"] = False
    question = search.Question(
        model=problem.model, cluster=problem.cluster, job=problem.job, use_all=True, top=0, fixed=fixed,
        axes=axes, has_even_stages=run.software in OF_ITS_TIME,
    )  # fmt: skip
    is_run = not any(target.for_job(problem.model, problem.job).refusals(problem_of(run)[1]))
    key = (problem.model.name, problem.cluster.name, problem.job, is_run)
    if key not in found:
        try:
            answer = search.plan_for(target, question, search.plan) if is_run else search.plan(question)
            found[key] = answer.best
        except Infeasible:
            found[key] = None
    best = found[key]
    return outcome if best is None else replace(outcome, own=best.strategy, own_s=best.step_time_s)


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


HEADS = (
    "run", "legal", "GiB", "fits", "predicted s", "published s", "error", "in its band", "our pick s",
    "saves", "our pick",
)  # fmt: skip


def text_of(strategy: Strategy) -> str:
    """The degrees of a strategy, its schedule and what it recomputes or offloads."""
    degrees = (
        f"{name} {getattr(strategy, name)}"
        for name in ("tp", "cp", "pp", "vpp", "dp", "ep")
        if getattr(strategy, name) > 1
    )
    recomputed = strategy.recompute_modules or strategy.recompute
    others = (
        f"micro-batch {strategy.micro_batch_size}",
        strategy.schedule if strategy.pp > 1 else "",
        "" if strategy.recompute == "none" else f"recomputes {recomputed}",
        "" if strategy.offload == "none" else f"offloads {strategy.offload}",
    )
    return ", ".join((" ".join(degrees), *filter(None, others)))


def rows_of(outcomes: Sequence[Outcome]) -> Iterator[tuple[object, ...]]:
    """A row of the table per run, and one for all of them."""
    for one in outcomes:
        if one.illegal is not None:
            yield one.run.name, one.illegal, *[""] * (len(HEADS) - 2)
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
            "" if one.own is None else f"{one.own_s:.1f}",
            "" if one.gain is None else f"{one.gain:.0%}",
            "" if one.own is None else text_of(one.own),
        )
    errors = [abs(one.error) for one in outcomes if one.error is not None]
    gains = [one.gain for one in outcomes if one.gain is not None]
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
        "",
        "" if not gains else f"{min(gains):.0%} to {max(gains):.0%}",
        "",
    )


def outcomes_with_picks() -> list[Outcome]:
    """The outcomes of all runs, with our picks: about a minute."""
    found: dict[Any, Result | None] = {}
    return [with_own_pick(outcome_of(run), found) for run in read_runs()]


def main() -> int:
    outcomes = outcomes_with_picks()
    print(table(HEADS, rows_of(outcomes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
