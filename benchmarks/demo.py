"""Compares a run that changes plans when its network changes with a static one (`make demo`).

It needs root, Linux and PyTorch. Two hosts train the same model three times with the same seed. The first run
is undisturbed, without emulation. In the other two, emulated links lose most of their bandwidth during the
run: one keeps its first plan (static), one uses `--adaptive`. It prints the losses and step times of the runs
and every decision, and fails where a claim does not hold. Nothing else should run at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

STEPS = 34
FAST_BYTES_PER_S, SLOW_BYTES_PER_S = 80e6, 6.4e6
DROP_S = 12.0
"""Seconds from the start of the processes to the loss of bandwidth; loading PyTorch takes a third of it."""

MODEL = {"layers": 4, "hidden": 256, "ffn": 1024, "heads": 4, "vocab": 512, "seq_len": 128}
BATCH = 16
START = "dp=2,zero_stage=1"
"""Fixed fields of the first plan: sharded optimizer states, so that a migration has to send some."""

TOLERANCE = 1e-4
"""Largest relative difference of losses. Plans sum in different orders, and differences grow over steps."""

Log = Sequence[Mapping[str, Any]]
"""The lines of `train --log`."""


def seconds_of(log: Log) -> float:
    """Seconds of all steps and of the work between them: measurements, decisions and migrations."""
    changes = [line["change"] for line in log if line.get("change")]
    between = sum(change["measured_s"] + change["moved_s"] for change in changes)
    return float(sum(line["step_time_s"] for line in log) + between)


def migrations_of(log: Log) -> list[Mapping[str, Any]]:
    """The changes with a migration to another plan."""
    return [line["change"] for line in log if line.get("change") and line["change"]["moved_s"] > 0.0]


def largest_difference(one: Log, other: Log) -> float:
    """The largest relative difference between losses of the same step; infinite where the steps differ."""
    if [line["step"] for line in one] != [line["step"] for line in other]:
        return float("inf")
    return max(abs(float(a["loss"]) / float(b["loss"]) - 1.0) for a, b in zip(one, other, strict=True))


def missed(quiet: Log, static: Log, adaptive: Log, *, steps: int) -> Iterator[str]:
    """The claims that do not hold."""
    for name, log in (("undisturbed", quiet), ("static", static), ("adaptive", adaptive)):
        if [line["step"] for line in log] != list(range(1, steps + 1)):
            yield f"the {name} run did not run every step once"
        elif len({line["tokens"] / line["step"] for line in log}) != 1:
            yield f"the {name} run skipped samples or repeated some"
    migrations = migrations_of(adaptive)
    if not migrations:
        yield "the adaptive run did not change plans"
    elif not any(migration["moved_bytes"] > 0 for migration in migrations):
        yield "no state moved between hosts"
    for name, log in (("static", static), ("adaptive", adaptive)):
        off = largest_difference(log, quiet)
        if not off <= TOLERANCE:
            yield f"losses of the {name} run differ by {off:.1e}, allowed {TOLERANCE:g}"
    if not seconds_of(adaptive) < seconds_of(static):
        yield f"the adaptive run took {seconds_of(adaptive):.1f} s, the static one {seconds_of(static):.1f} s"


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster, model, trace, plan = (
            folder / part for part in ("cluster.yaml", "model.yaml", "trace.jsonl", "p.yaml")
        )
        card = f"nics: {{count: 1, bandwidth: {8e-6 * FAST_BYTES_PER_S:g}Mb/s}}"
        cluster.write_text(f"name: two hosts\nnodes:\n- {{device: cpu, count: 2, devices: 1, {card}}}\n")
        model.write_text("".join(f"{key}: {value}\n" for key, value in MODEL.items()))
        trace.write_text("\n".join(_trace()) + "\n")
        _run("emulate", cluster, "--", "true")  # fails at once where this machine cannot emulate
        _run("plan", model, "--cluster", cluster, "--seq-len", MODEL["seq_len"], "--global-batch-size", BATCH,
             "--dtype", "fp32", "--fix", START, "--save", plan)  # fmt: skip
        training = ("train", plan, "--steps", STEPS, "--log")
        emulated = ("emulate", cluster, "--events", trace, "--", sys.executable, "-m", "shardwise")
        logs = {}
        for run, words in (
            ("undisturbed", training),
            ("static", (*emulated, *training)),
            ("adaptive", (*emulated, *training)),
        ):
            more = ("--adaptive",) if run == "adaptive" else ()
            start_s = time.perf_counter()
            _run(*words, folder / run, *more)
            print(f"{run}: {time.perf_counter() - start_s:.0f} s including start-up", flush=True)
            logs[run] = [json.loads(line) for line in (folder / run).read_text().splitlines()]
    _report(logs)
    failures = list(missed(logs["undisturbed"], logs["static"], logs["adaptive"], steps=STEPS))
    for line in failures:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if failures else 0


def _trace() -> Iterator[str]:
    """The lines of a trace in which all links of both hosts lose bandwidth at DROP_S."""
    yield json.dumps({"schema": "shardwise.events", "version": 1, "nodes": 2, "source": "make demo"})
    for link in ("n0>s0g0", "s0g0>n0", "n1>s0g0", "s0g0>n1"):
        event = {"time_s": DROP_S, "kind": "link", "link": link, "bytes_per_s": SLOW_BYTES_PER_S}
        yield json.dumps(event)


def _run(*words: object) -> None:
    command = [sys.executable, "-m", "shardwise", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr, end="")
        raise SystemExit(done.returncode)


def _report(logs: Mapping[str, Log]) -> None:
    quiet, static, adaptive = logs["undisturbed"], logs["static"], logs["adaptive"]
    print("step   loss: undisturbed    static  adaptive   seconds: static  adaptive  adaptive strategy")
    for one, two, three in zip(quiet, static, adaptive, strict=False):
        print(
            f"{one['step']:4}   {one['loss']:17.4f} {two['loss']:9.4f} {three['loss']:9.4f}"
            f"   {two['step_time_s']:15.2f} {three['step_time_s']:9.2f}  {three['strategy']}"
        )
        if three["change"]:
            change, advice = three["change"], three["change"]["advice"]
            slowest = min(change["rates"].values())
            print(
                f"       {change['reason']}: slowest link {slowest / 1e6:.1f} MB/s, {advice['decision']};"
                f" measured in {change['measured_s']:.2f} s, moved {change['moved_bytes'] / 1e6:.1f} MB"
                f" in {change['moved_s']:.2f} s"
            )
    for name, log in (("static", static), ("adaptive", adaptive)):
        print(
            f"{name}: {seconds_of(log):.1f} s, losses differ by at most {largest_difference(log, quiet):.1e}"
        )


if __name__ == "__main__":
    sys.exit(main())
