"""Runs whose peak memory is known, with our prediction: read by `benchmarks.memory`.

Peaks come from the shipped measurements (`accuracy/data/measurements.csv`), from `memory_rows.json` (other
published runs and reports, each with its source and what is assumed) and from our own runtime on an H100
(`accelerated_h100.json`). `memory_rows.json` and `production_runs.json` also say which runs fit their
devices, and which ran out of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks import accelerated_record, production
from benchmarks.accelerated_shapes import SHAPES, plan_of
from benchmarks.recipes_facts import read_facts
from benchmarks.recipes_judgement import judged, target_for

from shardwise import search
from shardwise.accuracy import SHIPPED, read_rows
from shardwise.accuracy.case import cases_of
from shardwise.accuracy.measured import measured_of
from shardwise.accuracy.predict import predictions_of
from shardwise.cluster import Cluster, load_cluster
from shardwise.cost import Problem, bind, costs_of_all_stages, peaks_of, rank_bytes
from shardwise.cost.memory import communicators_of
from shardwise.errors import ConfigError, Infeasible
from shardwise.model import load_model, model_from_config
from shardwise.strategy import Strategy, StrategyTable, complete, kind_of_profile, software_of, target_of

ROWS = Path(__file__).with_name("memory_rows.json")

OWN = "own-runtime"
"""The source of peaks of our own runtime."""

INFORMED = ("simumax", "dlperf-gpt", OWN)
"""Sources that formulas of memory were corrected with."""

ALLOCATED, RESERVED, DEVICE = "allocated", "reserved", "device"
"""Kinds of peaks: bytes in tensors, reserved by the allocator, counted by the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRow:
    """A measured peak and its prediction, in bytes.

    `software` is the name of the profile, `software_kind` the kind that shares a band. `kind` is one of
    ALLOCATED, RESERVED, DEVICE. `allocated` and `opened` (communicators of the rank) are predicted; the other
    bytes follow from `ratio` (fragmentation), `communicator` and `context`, which are fitted or assumed. With
    `is_informed` formulas of memory were corrected knowing this peak.
    """

    source: str
    name: str
    software: str
    device: str
    kind: str
    measured: float
    allocated: float
    opened: float
    ratio: float
    communicator: float
    context: float
    is_informed: bool = False
    assumed: tuple[str, ...] = ()

    @property
    def software_kind(self) -> str:
        return kind_of_profile(self.software)

    @property
    def is_of_need(self) -> bool:
        """Whether a band is made from the row: it has bytes in tensors, and no formula knew it. What the
        allocator and the driver count grows with freed blocks that PyTorch keeps as long as there is room
        for them, so it is no measure of what a step needs."""
        return self.kind == ALLOCATED and not self.is_informed

    @property
    def predicted(self) -> float:
        return self.predicted_with(self.ratio, self.communicator, self.context)

    def predicted_with(self, ratio: float, communicator: float, context: float) -> float:
        """The predicted peak with other numbers for what is outside of tensors."""
        if self.kind == ALLOCATED:
            return self.allocated
        reserved = self.allocated * (1.0 + ratio)
        return reserved if self.kind == RESERVED else reserved + self.opened * communicator + context

    @property
    def log_ratio(self) -> float:
        """Logarithm of measured over predicted: above 0 where the prediction is too small."""
        return log(self.measured / self.predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeRow:
    """A run of which it is known whether it fits, and what we say: `needed` and `capacity` are bytes of a
    device, `margin` is the share that stays free by default; `illegal` is a broken rule, else empty.
    `likely` is the predicted probability that it fits; 0 where the host's memory is too small. `failed` has
    the smallest and the largest share of runs that ran out of memory, where some did."""

    group: str
    name: str
    software_kind: str
    fits: bool
    needed: float
    capacity: float
    likely: float
    illegal: str = ""
    failed: tuple[float, float] | None = None

    @property
    def says_fits(self) -> bool:
        """Whether we call it fitting: likelier than not."""
        return not self.illegal and self.likely >= 0.5

    @property
    def is_right(self) -> bool:
        if self.failed is not None:
            return not self.illegal and self.failed[0] <= 1.0 - self.likely <= self.failed[1]
        return self.says_fits == self.fits


def csv_peaks() -> Iterator[PeakRow]:
    """All rows of the shipped measurements that have a peak."""
    rows, _ = read_rows(str(SHIPPED))
    cases, _ = cases_of([row for row in rows if row.peak_mem_gib is not None])
    for case, found in zip(cases, predictions_of(cases), strict=True):
        measured = measured_of(case.row, case.problem)
        efficiency = case.problem.efficiency
        yield PeakRow(
            source=case.row.group,
            name=case.row.id,
            software=case.problem.profile.name,
            device=case.problem.device.name,
            kind=measured.memory_kind,
            measured=measured.peak_bytes or 0.0,
            allocated=found.allocated_bytes,
            opened=float(communicators_of(StrategyTable.of([found.strategy]))[0]),
            ratio=efficiency.fragmentation_ratio,
            communicator=efficiency.communicator_bytes,
            context=efficiency.context_bytes,
            is_informed=case.row.group in INFORMED,
            assumed=case.assumed,
        )


def skipped_peaks() -> dict[str, str]:
    """Rows of the shipped measurements that have a peak and cannot be used, each with the reason."""
    rows, unread = read_rows(str(SHIPPED))
    _, faults = cases_of([row for row in rows if row.peak_mem_gib is not None])
    return {fault.id: fault.reason for fault in (*unread, *faults)}


def records() -> list[dict[str, Any]]:
    """The records of `memory_rows.json`."""
    found: list[dict[str, Any]] = json.loads(ROWS.read_text("utf-8"))
    return found


def problem_of(record: Mapping[str, Any]) -> tuple[Problem, Strategy]:
    """The problem of a record and its strategy. ConfigError where they contradict each other."""
    named = record["model"]
    model = load_model(named) if isinstance(named, str) else model_from_config(dict(named))
    cluster = _with_memory(load_cluster(record["cluster"]), record)
    job = search.default_job(
        model,
        cluster,
        seq_len=record["seq_len"],
        global_batch_size=record["global_batch_size"],
        dtype=record["dtype"],
        optimizer="adamw",
        memory_margin=0.05,
        expert_imbalance=1.1,
    )
    profile = software_of(record["software"])
    if record["options"]:
        profile = target_of(record["software"]).with_options(profile, record["options"])
    strategy = complete(
        record["strategy"],
        devices=cluster.devices,
        layers=model.layers,
        experts=None if model.experts is None else model.experts.experts,
        global_batch_size=record["global_batch_size"],
    )
    profile = replace(profile, **record["profile"])
    return bind(model, cluster, replace(job, profile=profile)), strategy


def _with_memory(cluster: Cluster, record: Mapping[str, Any]) -> Cluster:
    """The cluster with the memory of hosts and devices that a record states."""
    if "host_gb" in record:
        host = record["host_gb"] * 1e9
        nodes = tuple(replace(node, host_memory_bytes=host) for node in cluster.nodes)
        cluster = replace(cluster, nodes=nodes)
    if "device_gib" in record:
        of_device = int(record["device_gib"] * 2**30)
        classes = {name: replace(one, memory_bytes=of_device) for name, one in cluster.classes.items()}
        cluster = replace(cluster, classes=classes)
    return cluster


def row_of(record: Mapping[str, Any]) -> PeakRow:
    """The peak of a record, on its fullest rank or on the last one."""
    problem, strategy = problem_of(record)
    table = StrategyTable.of([strategy])
    costs = costs_of_all_stages(problem, table)
    allocated = np.asarray(rank_bytes(problem, table, costs).allocated)[:, 0]
    if record["rank"] == "last":
        allocated = allocated[np.asarray(costs.partition.moments.rank)[:, 0] == strategy.pp - 1]
    efficiency = problem.efficiency
    return PeakRow(
        source=record["group"],
        name=record["name"],
        software=problem.profile.name,
        device=problem.device.name,
        kind=record["memory_kind"],
        measured=record["peak_gib"] * 2.0**30,
        allocated=float(allocated.max()),
        opened=float(communicators_of(table)[0]),
        ratio=efficiency.fragmentation_ratio,
        communicator=efficiency.communicator_bytes,
        context=efficiency.context_bytes,
        is_informed=record["informed"],
        assumed=tuple(record["assumed"]),
    )


def own_peaks() -> Iterator[PeakRow]:
    """Peaks of our own runtime on one H100; its cost model was chosen on an H200."""
    calibration, measured = accelerated_record.H100.calibration, accelerated_record.H100.read()
    shapes = {shape.name: shape for shape in SHAPES}
    for each in measured["steps"]:
        plan = plan_of(shapes[each["name"]], calibration)
        yield PeakRow(
            source=OWN,
            name=each["name"],
            software="fsdp2",
            device="H100-SXM",
            kind=ALLOCATED,
            measured=each["allocated_bytes"],
            allocated=plan.best.peak_memory.allocated,
            opened=1.0,
            ratio=0.0,
            communicator=0.0,
            context=0.0,
            is_informed=True,
        )


def unsaid() -> list[tuple[str, str]]:
    """Records whose plan we cannot say, each with the reason."""
    return [(record["name"], record["unsaid"]) for record in records() if record["unsaid"]]


def peak_rows() -> list[PeakRow]:
    """All measured peaks that can be predicted."""
    recorded = [one for one in records() if one["peak_gib"] is not None and not one["unsaid"]]
    return [*csv_peaks(), *map(row_of, recorded), *own_peaks()]


# Fits or not


def outcome_rows() -> Iterator[OutcomeRow]:
    """Runs of which it is known whether they fit: reports, measured peaks and production runs."""
    for record in records():
        knows = record["fits"] if record["fits"] is not None else True
        if record["unsaid"] or (record["fits"] is None and record["peak_gib"] is None):
            continue
        try:
            outcome = _outcome(record["group"], record["name"], *problem_of(record), knows)
            yield replace(outcome, failed=tuple(record["failed"])) if "failed" in record else outcome
        except ConfigError as error:
            yield _illegal(record["group"], record["name"], record["software"], knows, str(error))
    for run in production.read_runs():
        try:
            yield _outcome("production", run.name, *production.problem_of(run), True)
        except (ConfigError, Infeasible) as error:
            yield _illegal("production", run.name, run.software, True, str(error))
    yield from _recipes()


def _recipes() -> Iterator[OutcomeRow]:
    """Performance recipes, which were benchmarked on the devices that they name."""
    recipes, _ = read_facts()
    for recipe in recipes:
        if recipe.task != "pretrain" or recipe.kind != "performance":
            continue
        found = judged(recipe, is_compared=False)
        if found.skipped:
            continue
        software = target_for(recipe).own_profile
        if found.illegal:
            yield _illegal("recipes", recipe.name, software.name, True, found.illegal)
            continue
        yield OutcomeRow(
            group="recipes",
            name=recipe.name,
            software_kind=kind_of_profile(software.name),
            fits=True,
            needed=found.needed_bytes,
            capacity=found.device_bytes,
            likely=software.peak_errors.fits_probability(found.needed_bytes, found.device_bytes),
        )


def _outcome(group: str, name: str, problem: Problem, strategy: Strategy, fits: bool) -> OutcomeRow:
    peaks = peaks_of(problem, StrategyTable.of([strategy]))
    needed, host = float(peaks.device_bytes[0]), float(peaks.host_bytes[0])
    likely = problem.profile.peak_errors.fits_probability(needed, problem.capacity_bytes)
    return OutcomeRow(
        group=group,
        name=name,
        software_kind=kind_of_profile(problem.profile.name),
        fits=fits,
        needed=needed,
        capacity=problem.capacity_bytes,
        likely=likely if host <= problem.host_bytes_per_device else 0.0,
    )


def _illegal(group: str, name: str, software: str, fits: bool, reason: str) -> OutcomeRow:
    kind = kind_of_profile(software)
    return OutcomeRow(
        group=group, name=name, software_kind=kind, fits=fits, needed=0.0, capacity=0.0, likely=0.0,
        illegal=reason,
    )  # fmt: skip
