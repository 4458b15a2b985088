"""Accuracy of predictions on emulated clusters (`make accuracy`); needs root, Linux and PyTorch.

`python -m benchmarks.emulated [CLUSTER ...] [--repeats N] [--out FILE]` calibrates each cluster: all its
devices at once, and the links between them. It plans the strategies below and points of the frontier of a
captured graph. It runs the plans alternately in one group of processes, with calibration rounds between them,
and compares their median step times with the predictions. Where the network changes, each plan is predicted
and measured before and after the change. It fails where all rows together miss a goal or a requirement is
missing, and never skips; a cluster that misses a goal alone is reported. Nothing else may run at the same
time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from benchmarks import captured
from benchmarks.emulated_rounds import ROUNDS, STEPS_A_ROUND

from shardwise import search
from shardwise.accuracy.validate import kendall_tau
from shardwise.app.cli.measuring import STEPS
from shardwise.cluster import link_graph, load_cluster, mesh_of
from shardwise.cost import Training, estimate_layout
from shardwise.inputs import dumps_yaml
from shardwise.model import model_from_config
from shardwise.plans import Plan, read_plan, write_plan
from shardwise.strategy import (
    OWN_PROFILE,
    Calibration,
    Job,
    complete,
    parse_fields,
    read_calibration,
    target_of,
)

SHARE = 0.3
"""CPU share of a device of speed 1, in cores: four devices take 60 % of two cores. At 80 % of two cores
devices get only 92 to 100 % of their shares while all compute."""

REPEATS = 10
MODEL = {"layers": 4, "hidden": 256, "ffn": 1024, "heads": 4, "vocab": 512}
BATCH = 8

SEQ_LENS, COMPUTED_S = (128, 256, 512, 1024), 2.0
"""Sequence lengths in tokens, and most seconds of computation per step.

A cluster trains on the longest sequences with which a step of its first plan computes for at most that time.
On most machines that is about one second or more: long compared with noise, and short enough to repeat."""

COMPUTED = ("matmul", "attention", "memory_bound", "recompute")
"""Parts of a plan's breakdown that are computation."""

START_S, SLACK, MADE_S, KERNELS_S, LINKS_S = 90.0, 1.5, 2.0, 15.0, 20.0
"""Length of an epoch of a changing network, in seconds: START_S for the start of the processes, plus SLACK
times the predicted time of all steps, MADE_S per start and end of a plan, and KERNELS_S and LINKS_S per
calibration round. SLACK covers a slower machine."""

FOUR = (
    "dp=4,micro_batch_size=2",
    "dp=4,micro_batch_size=1,zero_stage=1",
    "pp=4,micro_batch_size=2",
    "pp=4,micro_batch_size=1",
    "pp=2,dp=2,micro_batch_size=1",
    "pp=2,dp=2,micro_batch_size=2,schedule=gpipe",
    "pp=2,dp=2,micro_batch_size=1,recompute=full",
    "tp=2,dp=2,micro_batch_size=4,sequence_parallel=false",
)
PAIRS = (*FOUR, "tp=2,pp=2,micro_batch_size=4,sequence_parallel=false")
TWO = (
    "dp=2,micro_batch_size=2",
    "dp=2,micro_batch_size=4,recompute=full",
    "dp=2,micro_batch_size=4,zero_stage=1",
    "tp=2,micro_batch_size=4",
    "tp=2,micro_batch_size=4,sequence_parallel=false",
    "pp=2,micro_batch_size=2",
    "pp=2,micro_batch_size=1",
)
CHANGING = (
    "dp=2,micro_batch_size=4",
    "dp=2,micro_batch_size=4,recompute=full",
    "dp=2,micro_batch_size=4,zero_stage=1",
    "tp=2,micro_batch_size=4,sequence_parallel=false",
    "pp=2,micro_batch_size=1",
    "pp=2,micro_batch_size=2,recompute=full",
)

GOALS = {"mean_accuracy": 0.94, "worst_accuracy": 0.85, "regret": 0.03, "kendall_tau": 0.85}
"""Goals for all plans of all clusters together: least values, and the largest regret.

They do not apply to single clusters. With seven plans, one pair in the wrong order lowers tau by 0.1, and
noise decides the order of plans that differ by some percent."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The content of a cluster file, the plans that run on it, and the number of `points` of a captured graph
    that run too. `then` is the content in a second epoch, where the network changes during the run."""

    cluster: str
    plans: tuple[str, ...]
    points: int = 0
    then: str | None = None

    @property
    def clusters(self) -> tuple[str, ...]:
        """The content of the cluster file in each epoch."""
        return (self.cluster,) if self.then is None else (self.cluster, self.then)


def _host(rate: str, *, count: int = 1, devices: int = 1, speed: float = 1.0) -> str:
    card = f"nics: {{count: 1, bandwidth: {rate}}}"
    return f"- {{device: cpu, count: {count}, devices: {devices}, speed: {speed}, {card}}}\n"


SITES = """tiers:
- {name: host, span: node, bandwidth: 3GB/s, latency: 20us}
- {name: site, span: 2, latency: 100us}
- {name: between sites, latency: 100us, oversubscription: 2}
"""


SETTINGS: Mapping[str, Setting] = {
    "uniform": Setting(_host("200Mb/s", count=4), FOUR, points=4),
    "two hosts": Setting(_host("200Mb/s", count=2), TWO, points=4),
    "slow network": Setting(_host("100Mb/s", count=2), TWO, points=4),
    "two sites": Setting(_host("200Mb/s", count=4) + SITES, FOUR),
    "fast pairs": Setting(_host("100Mb/s", count=2, devices=2), PAIRS),
    "mixed shares": Setting(_host("200Mb/s") + _host("200Mb/s", speed=0.75), TWO),
    "changing": Setting(_host("200Mb/s", count=2), CHANGING, then=_host("100Mb/s", count=2)),
}


def accuracy_of(predicted_s: float, measured_s: float) -> float:
    return 1.0 - abs(predicted_s / measured_s - 1.0)


def judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of plans, and the same with suffix `_before`, predicted with the calibration before the
    run, when the machine may have been faster or slower."""
    now, before = (_figures(rows, predicted_key) for predicted_key in ("predicted_s", "calibrated_s"))
    return now | {f"{name}_before": value for name, value in before.items()}


def _figures(rows: Sequence[Mapping[str, Any]], predicted_key: str) -> dict[str, float]:
    """The figures of plans, predicted by `predicted_key` of each row.

    Plans are ranked within one question: a job on a cluster in an epoch. `regret` is the worst of all
    questions, and `kendall_tau` the mean weighted by the pairs of plans of each question.
    """
    accuracies = [accuracy_of(row[predicted_key], row["measured_s"]) for row in rows]
    regrets, taus, pairs = [], [], []
    for question in dict.fromkeys(map(_question, rows)):
        own = [row for row in rows if _question(row) == question]
        measured_s, predictions_s = ([row[key] for row in own] for key in ("measured_s", predicted_key))
        regrets.append(measured_s[predictions_s.index(min(predictions_s))] / min(measured_s) - 1.0)
        taus.append(kendall_tau(measured_s, predictions_s) or 0.0)
        pairs.append(len(own) * (len(own) - 1) // 2)
    return {
        "mean_accuracy": fmean(accuracies),
        "worst_accuracy": min(accuracies),
        "regret": max(regrets),
        "kendall_tau": sum(tau * of for tau, of in zip(taus, pairs, strict=True)) / sum(pairs),
    }


def _question(row: Mapping[str, Any]) -> tuple[str, int, str]:
    """The question that a row's plan answers: cluster, epoch and job."""
    return row["cluster"], row["epoch"], row["job"]


def missed(figures: Mapping[str, float]) -> Iterator[str]:
    for name, goal in GOALS.items():
        is_met = figures[name] <= goal if name == "regret" else figures[name] >= goal
        if not is_met:
            yield f"{name} {figures[name]:.3f}, goal {goal:g}"


def measure(name: str, setting: Setting, folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Calibrates a cluster, plans for it and runs the plans; returns a row per plan and epoch.

    The speed of a machine may change by a quarter within minutes, and by more within an hour. So
    `predicted_s` uses a calibration whose rounds run between the steps of all plans, and `calibrated_s` the
    calibration before the run. `speed` is the speed of the machine during the run over that before, by the
    steps of the calibration's small plans.
    """
    calibration, steps = folder / "links.yaml", folder / "steps.json"
    files = [folder / f"cluster-{epoch}.yaml" for epoch in range(len(setting.clusters))]
    for file, cluster_text in zip(files, setting.clusters, strict=True):
        file.write_text(f"name: {name}\nnodes:\n{cluster_text}")
    _emulate(files[0], "-m", "shardwise", "calibrate", "--links", "--cluster", files[0], "--out", calibration)
    plain = read_calibration(str(calibration))
    seq_len = seq_len_for(setting, files[0], plain)
    paths = [folder / f"plan-{number}.yaml" for number in range(len(setting.plans))]
    for text, path in zip(setting.plans, paths, strict=True):
        write_plan(str(path), plan_of(text, files[0], plain, seq_len))
    points = _points(files[0], calibration, folder, setting.points) if setting.points else []
    names = [*setting.plans, *(f"captured graph, {path.stem}" for path in points)]
    paths += points
    requested_plans: list[str | Path] = [*setting.plans, *points]
    predictions_s = [_predicted_s(requested, files[0], plain, seq_len) for requested in requested_plans]
    calibrated_s = float(yaml.safe_load(calibration.read_text())["measured"]["steps"]["seconds"])
    # Each timed step follows one step of the same plan.
    steps_s = repeats * (2.0 * sum(predictions_s) + MADE_S * len(paths))
    taken_s = steps_s + ROUNDS * (KERNELS_S + LINKS_S + STEPS_A_ROUND * STEPS * calibrated_s)
    epoch_s = START_S + SLACK * taken_s
    options: list[object] = []
    if setting.then is not None:
        events = folder / "events.jsonl"
        events.write_text(events_between(*files, at_s=epoch_s))
        options = ["--events", events]
    _emulate(files[0], "-m", "benchmarks.emulated_steps", steps, repeats, epoch_s, calibration, len(files),
             *files, *paths, options=options)  # fmt: skip
    document = json.loads(steps.read_text())
    rows = []
    for epoch, (file, found) in enumerate(zip(files, document["epochs"], strict=True)):
        speed, taken = calibrated_s / found["small_s"], folder / f"meanwhile-{epoch}.yaml"
        taken.write_text(dumps_yaml(found["calibration"]))
        meanwhile = read_calibration(str(taken))
        for called, requested, measured in zip(names, requested_plans, found["plans"], strict=True):
            plain_s, predicted_s = (
                _predicted_s(requested, file, each, seq_len) for each in (plain, meanwhile)
            )
            rows.append(
                {"cluster": name, "epoch": epoch, "plan": called, "speed": speed,
                 "job": f"model on {seq_len} tokens" if isinstance(requested, str) else "graph",
                 "calibrated_s": plain_s, "predicted_s": predicted_s, **measured}
            )  # fmt: skip
    return rows


def seq_len_for(setting: Setting, cluster_file: Path, calibration: Calibration) -> int:
    """The sequence length for a calibrated cluster (`SEQ_LENS`)."""

    def computed_s(seq_len: int) -> float:
        parts = plan_of(setting.plans[0], cluster_file, calibration, seq_len).best.breakdown
        return sum(parts[name] for name in COMPUTED)

    return max((each for each in SEQ_LENS if computed_s(each) <= COMPUTED_S), default=SEQ_LENS[0])


def _predicted_s(requested: str | Path, cluster_file: Path, calibration: Calibration, seq_len: int) -> float:
    """Predicted seconds per step of a strategy at `seq_len`, or of the layout of a saved point."""
    if isinstance(requested, str):
        return plan_of(requested, cluster_file, calibration, seq_len).best.step_time_s
    return _point_s(requested, cluster_file, calibration)


def events_between(before: Path, after: Path, *, at_s: float) -> str:
    """A trace in which the network links of one cluster file get the bandwidths of another at `at_s`."""
    start, end = (load_cluster(str(file)) for file in (before, after))
    lines: list[dict[str, object]] = [{"schema": "shardwise.events", "version": 1, "nodes": len(start.nodes)}]
    for old, new in zip(link_graph(start), link_graph(end), strict=True):
        is_network = {old.source[0], old.target[0]} <= {"n", "s"}
        if is_network and new.capacity != old.capacity:
            rate = new.capacity.at(0.0)
            lines.append({"time_s": at_s, "kind": "link", "link": old.name, "bytes_per_s": rate})
    return "".join(json.dumps(line) + "\n" for line in lines)


def _emulate(cluster: Path | str, *words: object, options: Sequence[object] = ()) -> None:
    command = [sys.executable, "-m", "shardwise", "emulate", "--cpu-share", str(SHARE), *map(str, options)]
    command += [str(cluster), "--", sys.executable, *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _points(cluster: Path, calibration: Path, folder: Path, count: int) -> list[Path]:
    """Plans of `count` points of the frontier of the captured graph on all devices, from the fastest to the
    one with the least memory."""
    graph, saved = folder / "captured.yaml", folder / "points"
    module = Path(__file__).with_name("captured.py")
    question = [
        "--cluster", cluster, "--calibration", calibration, "--global-batch-size", captured.BATCH, "--dtype",
        "fp32", "--epsilon", 0.01, "--save", saved,
    ]  # fmt: skip
    for words in (["capture", f"{module}:perceptron", "--out", graph], ["frontier", graph, *question]):
        command = [sys.executable, "-m", "shardwise", *map(str, words)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    names = [name for name in json.loads((saved / "frontier.json").read_text())["plans"] if name]
    return [saved / names[round(place * (len(names) - 1) / (count - 1))] for place in range(count)]


def _point_s(path: Path, cluster_file: Path, calibration: Calibration) -> float:
    """Predicted seconds per step of the layout of a saved point, with a calibration."""
    plan = read_plan(str(path))
    cluster = load_cluster(str(cluster_file), measured=calibration.devices)
    job = plan.job
    training = Training(
        dtype=job.dtype,
        optimizer=job.optimizer,
        profile=calibration.profile_without_data_overlap or job.profile,
    )
    mesh = mesh_of(cluster, plan.mesh.ranks)
    return estimate_layout(plan.graph, cluster, training, mesh, plan.operators).time_s


def plan_of(text: str, cluster_file: Path, calibration: Calibration, seq_len: int) -> Plan:
    """The plan of a strategy at `seq_len`, predicted with a calibration."""
    cluster = load_cluster(str(cluster_file), measured=calibration.devices)
    model = model_from_config(MODEL | {"seq_len": seq_len}, name="accuracy")
    job = Job(seq_len=seq_len, global_batch_size=BATCH, dtype="fp32")
    if calibration.profile is not None:
        job = replace(job, profile=target_of(OWN_PROFILE).run_by(calibration.profile))
    strategy = complete(
        parse_fields(text), devices=cluster.devices, layers=model.layers, experts=None,
        global_batch_size=BATCH,
    )  # fmt: skip
    return search.plan_of_strategy(model, cluster, job, strategy)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated")
    parser.add_argument("clusters", nargs="*", choices=[[], *SETTINGS])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    clusters: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.clusters or SETTINGS:
            own = Path(folder) / name.replace(" ", "-")
            own.mkdir()
            of = measure(name, SETTINGS[name], own, arguments.repeats)
            rows += of
            for epoch in range(len(SETTINGS[name].clusters)):
                part = [row for row in of if row["epoch"] == epoch]
                called = name if epoch == 0 else f"{name}, then"
                clusters[called] = judged(part)
                _report(called, part, clusters[called])
            if arguments.out is not None:  # results are saved even where a later cluster fails
                _write(arguments.out, arguments.repeats, rows, clusters)
    overall = judged(rows)
    print(f"all {len(rows)} rows " + _figures_text(overall))
    for name, figures in clusters.items():
        for line in missed(figures):
            print(f"{name} alone: {line}", file=sys.stderr)
    failures = list(missed(overall))
    for line in failures:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if failures else 0


def _write(
    path: Path, repeats: int, rows: Sequence[Mapping[str, Any]], clusters: Mapping[str, Mapping[str, float]]
) -> None:
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "share": SHARE, "repeats": repeats,
        "overall": judged(rows), "clusters": clusters, "rows": rows,
    }  # fmt: skip
    path.write_text(json.dumps(document, indent=1) + "\n")


def _report(name: str, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, float]) -> None:
    for row in rows:
        predicted_s, measured_s = row["predicted_s"], row["measured_s"]
        print(
            f"{name:13} {row['plan']:54} predicted {predicted_s:.3f} s, measured {measured_s:.3f} s"
            f" ({predicted_s / measured_s - 1.0:+.1%})"
        )
    print(f"{name:13} {_figures_text(figures)}", flush=True)


def _figures_text(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {value:.3f}" for key, value in figures.items())


if __name__ == "__main__":
    sys.exit(main())
