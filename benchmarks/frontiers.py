"""Time of whole frontiers, on one device count or on several, checked by random candidates."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from benchmarks.random_candidates import fitting_costs, sampled

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search import Question, StrategyCurve, StrategyCurves, curves_for, default_job
from shardwise.strategy import StrategyTable

SAMPLES = 200
"""Random candidates per curve: half from the whole space, half with the degrees of points of the curve."""


@dataclass(frozen=True, slots=True)
class Job:
    """A model, a cluster, a batch, and the mode of the frontier."""

    model: str
    cluster: str
    seq_len: int
    batch: int
    mode: str


FRONTIERS = {
    "gpt2_4": Job("gpt2", "1x4xA100-80G", 1024, 12, "time"),
    "llama8b_64": Job("llama-3.1-8b", "8x8xH100-SXM", 2048, 256, "time"),
    "llama8b_1_to_64": Job("llama-3.1-8b", "8x8xH100-SXM", 2048, 256, "profile"),
    "mixtral_8x7b_32": Job("mixtral-8x7b", "4x8xH100-SXM", 4096, 64, "time"),
}


def source_of(job: Job) -> StrategyCurves:
    """The source of the curves of a job."""
    model, cluster = load_model(job.model), load_cluster(job.cluster)
    training_job = default_job(model, cluster, seq_len=job.seq_len, global_batch_size=job.batch)
    return StrategyCurves(Question(model=model, cluster=cluster, job=training_job))


def figures(name: str) -> dict[str, float]:
    """Figures of the curves of one job, with cold caches of schedule tables."""
    job = FRONTIERS[name]
    curves = curves_for(source_of(job), mode=job.mode, sizes=None, limit_bytes=inf)
    whole = [curve for curve in curves if isinstance(curve, StrategyCurve)]
    return {
        "device_counts": float(len(whole)),
        "points": float(sum(len(curve.points) for curve in whole)),
        "candidates": float(sum(curve.outcome.enumerated for curve in whole)),
        "simulated": float(sum(curve.outcome.ledger.simulated for curve in whole)),
        "search_cpu_s": sum(curve.search_cpu_s for curve in whole),
        "search_s": sum(curve.search_s for curve in whole),
        **_sample_figures(whole),
    }


def _sample_figures(curves: list[StrategyCurve]) -> dict[str, float]:
    """Counts of random candidates. `drawn_undominated` has to be 0: each candidate that is legal and fits is
    dominated or equalled by a point of its curve."""
    found = {"drawn": 0.0, "drawn_legal": 0.0, "drawn_fitting": 0.0, "drawn_undominated": 0.0}
    rng = np.random.default_rng(0)
    for curve in curves:
        space, problem = curve.question.candidates(), curve.question.problem()
        centers = [curve.points[place].layout for place in rng.integers(len(curve.points), size=4)]
        tables = [sampled(space, SAMPLES // 2, rng)]
        tables += [sampled(space, SAMPLES // 8, rng, StrategyTable.of([strategy])) for strategy in centers]
        legal, times_s, nbytes = fitting_costs(problem, StrategyTable.joined(tables))
        points = np.array([(point.time_s, point.memory_bytes) for point in curve.points]) * (1.0 - 1e-12)
        no_worse = (points[:, :1] <= times_s) & (points[:, 1:] <= nbytes)
        found["drawn"] += SAMPLES
        found["drawn_legal"] += legal
        found["drawn_fitting"] += len(times_s)
        found["drawn_undominated"] += int((~no_worse.any(axis=0)).sum())
    return found
