"""Migration of a job's state in memory from one plan to another over an emulated link.

It needs root, Linux and PyTorch. Each of the two emulated hosts runs `python -m benchmarks.migration OUT
SIZE`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

LINK = "200Mb/s"
LINK_BYTES_PER_S = 25e6
HOSTS = f"nodes:\n- {{device: cpu, count: 2, devices: 1, nics: {{count: 1, bandwidth: {LINK}}}}}\n"
SHARE = 0.8
"""CPU share of each host, in cores."""

MODELS = {
    "": {"layers": 4, "hidden": 768, "ffn": 3072, "heads": 8, "vocab": 512, "seq_len": 64},
    "small_": {"layers": 4, "hidden": 384, "ffn": 1536, "heads": 8, "vocab": 512, "seq_len": 64},
}
"""Models of 29 and 7.5 million parameters. With the small one, new process groups and modules take a large
part of a migration."""

BATCH = 4
PLANS = ("dp=2,zero_stage=1", "pp=2,schedule=1f1b,micro_batch_size=2")
"""The job migrates from the first plan to the second and back."""

REPEATS = 3


def figures() -> dict[str, float]:
    """Figures of migrations.

    `seconds` is the time of a migration to the second plan, and `bytes` the most bytes in one direction of
    the link. `ratio` is the time over that of these bytes at the link's bandwidth. The prefix `back_` is for
    the way back, and `small_` for the small model."""
    return {f"{size}{name}": value for size in MODELS for name, value in _figures_of(size).items()}


def _figures_of(size: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        cluster, out = Path(folder) / "hosts.yaml", Path(folder) / "moved.json"
        cluster.write_text(HOSTS)
        command = [
            sys.executable,
            "-m",
            "shardwise",
            "emulate",
            "--cpu-share",
            str(SHARE),
            str(cluster),
            "--",
        ]
        command += [sys.executable, "-m", "benchmarks.migration", str(out), size]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, float] = json.loads(out.read_text())
    return found


def main(out: str, size: str) -> None:
    """On each host: migrates a model back and forth; rank 0 writes the medians."""
    import torch
    from torch import distributed

    from shardwise import search
    from shardwise.cluster import load_cluster
    from shardwise.model import model_from_config
    from shardwise.runtime import migrate, parallelize, reference_module
    from shardwise.runtime.data import Synthetic
    from shardwise.runtime.initialization import initialise
    from shardwise.strategy import Job, complete, parse_fields

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model, cluster = model_from_config(MODELS[size], name="moved"), load_cluster("2x1xcpu")
    job_fields = Job(
        seq_len=MODELS[size]["seq_len"], global_batch_size=BATCH, dtype="fp32", optimizer="adamw"
    )
    plans = []
    for text in PLANS:
        strategy = complete(
            {"dp": 1, **parse_fields(text)}, devices=2, layers=model.layers, experts=None,
            global_batch_size=BATCH,
        )  # fmt: skip
        plans.append(search.plan_of_strategy(model, cluster, job_fields, strategy))
    module = reference_module(model)
    initialise(module, seed=0, layers=model.layers)
    job = parallelize(module, plans[0])
    batches = Synthetic(vocab=model.vocab, global_batch_size=BATCH, seq_len=job_fields.seq_len, seed=0)
    times: tuple[list[float], list[float]] = ([], [])
    nbytes = [0, 0]
    for migration_index in range(2 * REPEATS):
        job.step(batches.batch(migration_index))
        distributed.barrier()
        start_s = time.perf_counter()
        job, moved = migrate(job, plans[(migration_index + 1) % 2])
        distributed.barrier()
        times[migration_index % 2].append(time.perf_counter() - start_s)
        nbytes[migration_index % 2] = max(moved[pair] for pair in ((0, 1), (1, 0)))
    if os.environ["RANK"] == "0":
        found = {}
        for direction, own, most in zip(("", "back_"), times, nbytes, strict=True):
            found[f"{direction}seconds"] = median(own)
            found[f"{direction}bytes"] = float(most)
            found[f"{direction}ratio"] = median(own) * LINK_BYTES_PER_S / most
        Path(out).write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
