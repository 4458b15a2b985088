"""Reviews of configuration files of training software: does it fit, how long is a step, what is risky, and
which changes make it faster in the same software."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any

from shardwise import search
from shardwise.cluster import Cluster
from shardwise.cost import Problem, bind
from shardwise.errors import ConfigError, Infeasible
from shardwise.inputs import printable
from shardwise.model import Model
from shardwise.notebook import bars, line, panel, table
from shardwise.plans import Plan, Result
from shardwise.questions import arguments
from shardwise.questions.arguments import Progress
from shardwise.questions.planning import SearchArguments, planned
from shardwise.questions.request import JobArguments, Request, measured_cluster, model_of, request_of
from shardwise.questions.review_findings import Reviewed, findings_of
from shardwise.strategy import Job, Strategy, complete, target_of
from shardwise.targets import IMPORTERS, ImportedRun, ReviewFinding, Supplied, imported_run
from shardwise.units import format_seconds

MOST_CHANGES = 3
"""Most changes of a single choice that a review lists; a change of two choices may follow."""

SMALLEST_GAIN = 0.01
"""Share of the step time below which a change is not listed: `plan` gives up as much for what it prefers."""

LONGEST_S = 30 * 86400.0

OWN_OPTIONS = (
    "cuda_graph", "ep_overlap", "fp8_param_gather", "grad_reduce_dtype", "moment_dtype", "offload_modules",
)  # fmt: skip
"""Options of the software that no search chooses: the best plan has those of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewArguments:
    """The arguments of `review`, as given; None where one was left out."""

    cluster: object
    model: object = None
    trainer: object = None
    measured: object = None
    seq_len: object = None
    global_batch_size: object = None
    fix: object = None
    memory_margin: object = 0.05
    expert_imbalance: object = 1.1
    mean_sample_len: object = None
    inter_node: object = None
    calibration: object = None
    software: object = None
    workers: object = 1
    budget: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewChange:
    """Other values of one or two choices. `flags` are what changes in the words of the software, `gain_s` the
    seconds of a step that it saves (None where the configuration has no prediction)."""

    choices: tuple[str, ...]
    flags: tuple[str, ...]
    strategy: Strategy
    step_time_s: float
    gain_s: float | None


@dataclass(frozen=True, kw_only=True, repr=False)
class Review:
    """The review of a configuration.

    `result` is the prediction, None where the strategy is illegal; `strategy` is then None too. Times that
    the review gives (`step_time_s`, `breakdown`, gains) are scaled by `scale`: measured over predicted step
    time, 1 without a measurement. `best` is the best plan of the same software, None with a reason in
    `no_best`; `best_flags` are what changes for it.
    """

    target: str
    request: Request
    result: Result | None
    fits: bool | None
    usable_bytes: float
    measured_s: float | None
    findings: tuple[ReviewFinding, ...]
    changes: tuple[ReviewChange, ...]
    best: Plan | None
    best_flags: tuple[str, ...] = ()
    no_best: str = ""
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        if self.measured_s is None or self.result is None:
            object.__setattr__(self, "scale", 1.0)
        else:
            object.__setattr__(self, "scale", self.measured_s / self.result.step_time_s)

    @property
    def strategy(self) -> Strategy | None:
        """The strategy that the file describes."""
        return None if self.result is None else self.result.strategy

    @property
    def step_time_s(self) -> float | None:
        """Step time in seconds: as measured, else as predicted; None for an illegal strategy."""
        return None if self.result is None else self.result.step_time_s * self.scale

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds of each part of the step."""
        parts = {} if self.result is None else self.result.breakdown
        return {name: seconds * self.scale for name, seconds in parts.items()}

    @property
    def best_step_time_s(self) -> float | None:
        """Step time in seconds of the best plan of the same software."""
        return None if self.best is None else self.best.step_time_s * self.scale

    def to_dict(self) -> dict[str, object]:
        """The review as plain values: seconds, bytes, shares."""
        best = self.best
        return {
            "fits": self.fits,
            "step_time_s": self.step_time_s,
            "breakdown": self.breakdown,
            "findings": [
                {"code": one.code, "severity": one.severity, "field": one.field, "text": one.text}
                for one in self.findings
            ],
            "changes": [self._change(one) for one in self.changes],
            "best": None
            if best is None
            else {
                "strategy": None if best.best.fields is None else _plain(best.strategy),
                "step_time_s": self.best_step_time_s,
                "gain_s": self._gain(best.step_time_s),
                "flags": list(self.best_flags),
                "device_bytes": best.best.peak_memory.device,
            },
            "no_best": self.no_best or None,
            "target": self.target,
            "strategy": None if self.strategy is None else _plain(self.strategy),
            "predicted_s": None if self.result is None else self.result.step_time_s,
            "measured_s": self.measured_s,
            "scale": self.scale,
            "band_s": None if self.result is None else [end * self.scale for end in self.result.band_s],
            "device_bytes": None if self.result is None else self.result.peak_memory.device,
            "usable_bytes": self.usable_bytes,
            "memory": None if self.result is None else dict(self.result.memory),
        }

    def _change(self, one: ReviewChange) -> dict[str, object]:
        return {
            "flags": list(one.flags),
            "gain_s": one.gain_s,
            "step_time_s": one.step_time_s,
            "choices": list(one.choices),
            "strategy": _plain(one.strategy),
        }

    def _gain(self, other_s: float) -> float | None:
        return None if self.result is None else (self.result.step_time_s - other_s) * self.scale

    def __repr__(self) -> str:
        verdict = {True: "fits", False: "does not fit", None: "is illegal"}[self.fits]
        step = "" if self.step_time_s is None else f", {format_seconds(self.step_time_s)} a step"
        count = len(self.findings)
        return f"<Review for {self.target}: {verdict}{step}, {count} finding{'s' * (count != 1)}>"

    def _repr_html_(self) -> str:
        rows = [[one.severity, one.code, one.field, one.text] for one in self.findings]
        parts = [
            line(repr(self)[1:-1]),
            table(("severity", "code", "field", "finding"), rows) if rows else "",
            *(bars("Step time", self.breakdown, format_seconds) for _ in self.breakdown and (1,)),
        ]
        return panel(f"{self.request.model.name} on {self.request.cluster.name}", *parts)


def _plain(strategy: Strategy) -> dict[str, object]:
    return {name: getattr(strategy, name) for name in Strategy.__dataclass_fields__}


def reviewed(file: object, given: ReviewArguments, *, progress: Progress | None = None) -> Review:
    """The review of the configuration in the file at a path. Raises ConfigError, with the argument or file
    and key, for what cannot be used."""
    path = arguments.text("FILE", file)
    reviewing = _reviewing(path, given, progress)
    try:
        return reviewing.review()
    except ConfigError as error:
        raise error.within(file=printable(path)) from None


def run_of_file(path: str, given: ReviewArguments) -> tuple[Problem, Strategy]:
    """The problem and the strategy that a configuration describes. ConfigError where they contradict each
    other, or where the strategy is illegal."""
    reviewing = _reviewing(path, given, None)
    strategy, faults = reviewing.strategy()
    try:
        search.predicted(reviewing.problem, strategy)
    except Infeasible as error:
        raise ConfigError(f"is not a legal configuration: {error.message}", file=printable(path)) from None
    for fault in faults:
        raise ConfigError(fault.text, file=printable(path), key=fault.field)
    return reviewing.problem, strategy


def _reviewing(path: str, given: ReviewArguments, progress: Progress | None) -> _Reviewing:
    """The run in the file at a path, with its request."""
    measured_s = _measured(given.measured)
    supplied = Supplied(
        model=None if given.model is None else model_of(given.model),
        seq_len=None if given.seq_len is None else arguments.count("--seq-len", given.seq_len),
        global_batch_size=(
            None
            if given.global_batch_size is None
            else arguments.count("--global-batch-size", given.global_batch_size)
        ),
        fields=arguments.fields("--fix", given.fix),
    )
    cluster, _ = measured_cluster(_job_arguments(given, None, None))
    trainer = None if given.trainer is None else os.fspath(arguments.text("--trainer", given.trainer))
    run = imported_run(os.fspath(path), devices=cluster.devices, supplied=supplied, trainer=trainer)
    options = {name: run.options[name] for name in OWN_OPTIONS if name in run.options}
    own = replace(_job_arguments(given, run.model, run), set=options)
    request = request_of(own).for_target(target_of(run.target))
    return _Reviewing(run, request, own, given, measured_s, progress)


def _near(batch: int, rows: int) -> list[int]:
    """The multiples of `rows` next to a batch."""
    below = batch // rows * rows
    return [one for one in (below, below + rows) if one > 0]


def _measured(given: object) -> float | None:
    if given is None:
        return None
    return arguments.seconds("--measured", given, low=1e-3, high=LONGEST_S)


def _job_arguments(given: ReviewArguments, model: Model | None, run: ImportedRun | None) -> JobArguments:
    return JobArguments(
        model=model,
        cluster=given.cluster,
        seq_len=None if run is None else run.seq_len,
        global_batch_size=None if run is None else run.global_batch_size,
        dtype=None if run is None else run.dtype,
        optimizer="adamw" if run is None else run.optimizer,
        memory_margin=given.memory_margin,
        expert_imbalance=given.expert_imbalance,
        mean_sample_len=given.mean_sample_len,
        inter_node=given.inter_node,
        calibration=given.calibration,
        software=given.software,
    )


@dataclass(frozen=True)
class _Reviewing:
    """A run with its request, which has the software profile of the target as it is by default."""

    run: ImportedRun
    request: Request
    own: JobArguments
    given: ReviewArguments
    measured_s: float | None
    progress: Progress | None

    @cached_property
    def job(self) -> Job:
        """The job with the software profile as the file changes it."""
        profile = target_of(self.run.target).with_options(self.request.job.profile, self.run.options)
        return replace(self.request.job, profile=replace(profile, **self.run.profile))

    @cached_property
    def problem(self) -> Problem:
        return bind(self.request.model, self.request.cluster, self.job)

    @property
    def cluster(self) -> Cluster:
        return self.request.cluster

    def review(self) -> Review:
        strategy, illegal = self.strategy()
        result = None
        if not illegal:
            try:
                result = search.predicted(self.problem, strategy)
            except Infeasible as error:
                illegal = [self._illegal(error)]
        is_fit = None if result is None else search.fits(self.problem, strategy)
        changes = search.changes_of(self.problem, strategy, target_of(self.run.target))
        best, no_best = self._best()
        findings = [*illegal, *self.run.findings]
        if result is not None:
            findings += self._findings(strategy, result, bool(is_fit), changes, best)
        order = ("error", "warning", "info")
        listed = self._changes(strategy, result, bool(is_fit), changes)
        return Review(
            target=self.run.target,
            request=replace(self.request, job=self.job),
            result=result,
            fits=is_fit,
            usable_bytes=self.problem.usable_bytes,
            measured_s=self.measured_s,
            findings=tuple(sorted(findings, key=lambda one: order.index(one.severity))),
            changes=tuple(listed),
            best=best,
            best_flags=() if best is None else self._flags(strategy, best.best, best.job),
            no_best=no_best,
        )

    def strategy(self) -> tuple[Strategy, list[ReviewFinding]]:
        """The strategy of the file; one with a smaller micro-batch, and an error, where its own does not
        divide the batch. Raises ConfigError for fields that contradict each other."""
        fields = dict(self.run.fields)
        batch, dp = self.run.global_batch_size, int(fields.get("dp", 1))
        micro = int(fields.get("micro_batch_size", 1))
        faults = []
        if batch % (dp * micro):
            faults.append(
                ReviewFinding(
                    code="batch_does_not_divide", severity="error",
                    field=self.run.names.get("global_batch_size", "global_batch_size"),
                    text=f"{batch} sequences do not divide over {dp} data-parallel ranks with micro-batches"
                    f" of {micro}; {' and '.join(map(str, _near(batch, dp * micro)))} do",
                )
            )  # fmt: skip
            fields["micro_batch_size"] = gcd(micro, max(batch // dp, 1)) if batch % dp == 0 else 1
        experts = self.request.model.experts
        strategy = complete(
            fields,
            devices=self.cluster.devices,
            layers=self.request.model.layers,
            experts=None if experts is None else experts.experts,
            global_batch_size=batch,
        )
        return strategy, faults

    def _illegal(self, error: Infeasible) -> ReviewFinding:
        reason = next(iter(error.reasons), "illegal")
        fields = {"batch_dp": "global_batch_size", "interleaved_microbatches": "vpp", "experts_ep": "ep"}
        name = fields.get(reason, "pp" if reason.startswith("layers") else "tp")
        return ReviewFinding(
            code="illegal", severity="error", field=self.run.names.get(name, name), text=error.message
        )

    def _best(self) -> tuple[Plan | None, str]:
        """The recommended plan of the same software on all devices, else the reason why there is none."""
        wanted = SearchArguments(
            target=self.run.target, use_all=True, top=0, workers=self.given.workers, budget=self.given.budget
        )
        try:
            return planned(self.own, wanted, progress=self.progress), ""
        except (ConfigError, Infeasible) as error:
            return None, str(error)

    def _findings(
        self, strategy: Strategy, result: Result, is_fit: bool, changes: search.Changes, best: Plan | None
    ) -> Iterator[ReviewFinding]:
        yield from findings_of(
            Reviewed(
                run=self.run,
                cluster=self.cluster,
                strategy=strategy,
                result=result,
                fits=is_fit,
                usable_bytes=self.problem.usable_bytes,
                singles={one.choices[0]: one for one in changes.singles},
                best_s=None if best is None else best.step_time_s,
            )
        )
        low, high = result.band_s
        if self.measured_s is not None and not low <= self.measured_s <= high:
            yield ReviewFinding(
                code="measured_differs", severity="warning", field="--measured",
                text=f"{format_seconds(self.measured_s)} is outside of the 80 % band of the prediction, "
                f"{format_seconds(low)} to {format_seconds(high)}: the run has a cost that the file lacks",
            )  # fmt: skip

    def _changes(
        self, strategy: Strategy, result: Result | None, is_fit: bool, changes: search.Changes
    ) -> Iterator[ReviewChange]:
        """The best changes of one choice, and that of two where it is better."""
        most_s = result.step_time_s * (1.0 - SMALLEST_GAIN) if result is not None and is_fit else float("inf")
        singles = [one for one in (*self._overlapped(strategy), *changes.singles) if one.step_time_s < most_s]
        singles = sorted(singles, key=lambda one: one.step_time_s)[:MOST_CHANGES]
        below_s = min((one.step_time_s for one in singles), default=most_s) * (1.0 - SMALLEST_GAIN)
        pairs = [one for one in changes.pairs[:1] if not singles or one.step_time_s < min(below_s, most_s)]
        scale = self.measured_s / result.step_time_s if self.measured_s and result is not None else 1.0
        for one in (*singles, *(pair for pair in pairs if pair.step_time_s < most_s)):
            job = self.request.job if one.choices == ("overlap",) else self.job
            problem = bind(self.request.model, self.cluster, job)
            yield ReviewChange(
                choices=one.choices,
                flags=self._flags(strategy, search.predicted(problem, one.strategy), job),
                strategy=one.strategy,
                step_time_s=one.step_time_s * scale,
                gain_s=None if result is None else (result.step_time_s - one.step_time_s) * scale,
            )

    def _overlapped(self, strategy: Strategy) -> Sequence[search.Change]:
        """The same strategy with the overlaps of the software that the file leaves out."""
        if self.job.profile == self.request.job.profile:
            return ()
        problem = bind(self.request.model, self.cluster, self.request.job)
        try:
            result = search.predicted(problem, strategy)
        except Infeasible:
            return ()
        if not search.fits(problem, strategy):
            return ()
        return (search.Change(choices=("overlap",), strategy=strategy, step_time_s=result.step_time_s),)

    def _flags(self, strategy: Strategy, other: Result, job: Job) -> tuple[str, ...]:
        """What differs between the file's strategy and another one in the words of the software."""
        if other.fields is None:
            return ()
        before = self._settings(replace(other, fields=strategy), self.job)
        after = self._settings(other, job)
        changed = [
            f"{name} {value}".strip().replace(" : ", ": ", 1)
            for name, value in after.items()
            if before.get(name) != value
        ]
        return (*changed, *(f"without {name}" for name in before if name not in after))

    def _settings(self, result: Result, job: Job) -> Mapping[str, Any]:
        plan = Plan(network=self.request.model, cluster=self.cluster, job=job, best=result)
        settings = IMPORTERS[self.run.target].settings(plan)
        return {self.run.renamed(name): value for name, value in settings.items()}
