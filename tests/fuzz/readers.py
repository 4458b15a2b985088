"""The readers of shardwise, with the valid texts from which mutations start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any

from tests.unit.cluster.test_import_kubernetes import NEW, listed, node
from tests.unit.cluster.test_import_nvidia import all_to_all, matrix, smi, topology
from tests.unit.cluster.test_import_slurm import BLOCKS, GPUS, TREE, nodes_of_scontrol
from tests.unit.targets.test_trainer_import import FSDP, WITH_ZERO

import shardwise as sw
from shardwise.accuracy import logged_times, read_rows
from shardwise.app.cli.calibration_sources import read_sources
from shardwise.cluster import convert_events, events_text, load_cluster, load_events
from shardwise.cluster.event_file import events_from_text
from shardwise.graph import graph_text, load_graph
from shardwise.model import catalogue_entry, catalogue_names, load_model, parameters
from shardwise.plans import plan_document, read_plan
from shardwise.plans.documents import document_hash
from shardwise.runtime.checkpoint import read_manifest
from shardwise.schedule import from_text, generate, to_text
from shardwise.search import read_space
from shardwise.sim import read_trace
from shardwise.strategy import parse_fields, read_calibration
from shardwise.targets import EXPORTERS
from shardwise.targets.imports import IMPORTERS, Supplied, imported_run

ROOT = Path(__file__).resolve().parents[2]
JOB: dict[str, Any] = {"seq_len": 512, "global_batch_size": 32}


@dataclass(frozen=True, slots=True)
class Reader:
    """One reader. `suffix` is that of its files; `read` takes the path of a file, or the text itself where
    `suffix` is empty. It gives a value or raises ConfigError or Infeasible."""

    name: str
    suffix: str
    seeds: Callable[[], tuple[str, ...]]
    read: Callable[[str], object]


def _texts(pattern: str) -> tuple[str, ...]:
    return tuple(path.read_text("utf-8") for path in sorted(ROOT.glob(pattern)))


@cache
def _plan(target: str = "any") -> sw.Plan:
    return sw.plan("llama-3.1-8b", cluster="1x8xH100-SXM", target=target, use_all=True, **JOB)


def _configs() -> tuple[str, ...]:
    found = [dict(catalogue_entry(name).config) for name in catalogue_names()]
    towers = [config for config in found if "vision_config" in config]
    images = {"count": 1, "height": 896, "width": 896}  # the size that Gemma 3 takes
    found += [{**config, "images": images, "freeze": ["vision"]} for config in towers]
    return tuple(map(json.dumps, found))


def _dimensions() -> tuple[str, ...]:
    return (
        *_texts("examples/tiny.yaml"),
        "layers: 8\nhidden: 512\nffn: 2048\nheads: 8\nvocab: 32000\nseq_len: 1024\n",
    )


def _graphs() -> tuple[str, ...]:
    return tuple(
        graph_text(load_graph(f"graph:{name}")) for name in ("mlp", "transformer-big", "lstm-2x2048")
    )


@cache
def _plan_texts() -> tuple[str, ...]:
    """Plans of one strategy for any software and for a target, an uneven one, and one of a graph."""
    uneven = sw.plan(
        "gpt2", cluster=str(ROOT / "examples/clusters/unequal.yaml"), target="any", tolerance=0, **JOB
    )
    of_graph = sw.frontier("graph:mlp", cluster="1x2xV100-32G", global_batch_size=64)
    plans = (_plan(), _plan("megatron-lm-0.19"), uneven, of_graph.plan(of_graph.points[0]))
    return tuple(json.dumps(plan_document(plan)) for plan in plans)


def _read_rehashed(path: str) -> sw.Plan:
    """The plan at `path` as a program would read it that wrote the hash of what it changed."""
    document = json.loads(Path(path).read_text("utf-8"))
    if isinstance(document, dict) and isinstance(document.get("hash"), str):
        document["hash"] = document_hash(document)
        Path(path).write_text(json.dumps(document), "utf-8")
    return read_plan(path)


def _rehashed(path: str) -> sw.Plan:
    try:
        return _read_rehashed(path)
    except (ValueError, UnicodeError):
        return read_plan(path)


def _checked(path: str) -> object:
    """The verdict of `check` on a changed plan: AssertionError where it accepts a change that it judges."""
    before = [json.loads(text) for text in _plan_texts()]
    plan = _rehashed(path)
    verdict = sw.check(plan, proof_budget=5)
    if not verdict.ok:
        return verdict
    unjudged = {one.key for one in (*verdict.verdict.not_judged, *verdict.verdict.not_re_derived)}
    read = json.loads(json.dumps(plan_document(plan)))
    after = dict(_leaves(read))
    changes: list[set[str]] = []
    for document in before:
        # `--top` has said how many runners-up there are: fewer of them are the answer to another --top.
        if "runners_up" in document:
            document["runners_up"] = document["runners_up"][: len(read.get("runners_up", ()))]
        if "epsilon" not in read:
            document.pop("epsilon", None)  # a plan without it claims nothing about other layouts
        leaves = dict(_leaves(document))
        keys = {key for key in {*leaves, *after} if not _is_same(leaves.get(key), after.get(key))} - {"hash"}
        changes.append({key for key in keys if not _is_below(re.sub(r"\[\d+\]", "", key), unjudged)})
    assert min(map(len, changes)) == 0, f"check accepts changes of {min(map(sorted, changes), key=len)}"
    return verdict


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{key}[{index}]")
    else:
        yield key, value


def _is_same(one: object, other: object) -> bool:
    """Equality as `check` has it: of numbers with a fraction to 1e-8."""
    if isinstance(one, float) and isinstance(other, float | int):
        return isclose(one, other, rel_tol=1e-8)
    return one == other


def _is_below(key: str, keys: Collection[str]) -> bool:
    """Whether `key` or one that holds it is in `keys`."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in keys for length in range(1, len(parts) + 1))


NCCL = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1073741824 step: 8(factor)
# Rank  0 Group  0 Pid 1000 on node-0 device  0 [0x0] NVIDIA H100 80GB HBM3
# Rank  1 Group  0 Pid 1001 on node-0 device  1 [0x0] NVIDIA H100 80GB HBM3
# Collective test starting: all_reduce_perf
#     size      count   type redop root    time  algbw  busbw #wrong    time  algbw  busbw #wrong
#      (B) (elements)                      (us) (GB/s) (GB/s)           (us) (GB/s) (GB/s)
   1048576     262144  float   sum   -1   40.00  26.21  26.21      0   40.00  26.21  26.21      0
   8388608    2097152  float   sum   -1  120.00  69.91  69.91      0  120.00  69.91  69.91      0
 134217728   33554432  float   sum   -1  700.00 191.74 191.74      0  700.00 191.74 191.74      0
1073741824  268435456  float   sum   -1 4900.00 219.13 219.13      0 4900.00 219.13 219.13      0
# Out of bounds values : 0 OK
"""
STEPS = "".join(f'{{"step": {step}, "predicted_s": 0.5, "step_time_s": 0.6}}\n' for step in range(1, 9))
AVAILABILITY = (
    "0,add,a\n0,add,b\n4000,remove,a\n9000,add,a\n",
    "2024-01-01,00:00:00,8\n2024-01-01,00:10:00,16\n2024-01-01,00:30:00,8\n",
)
STRATEGIES = ("tp=4,pp=2,zero_stage=1,recompute=full", "recompute_modules=core_attn+mlp,vpp=2")
TRACE = json.dumps({
    "traceEvents": [
        {"name": "F 0", "ph": "X", "ts": 0, "dur": 10, "pid": 1, "tid": 1, "cat": "compute"},
        {"name": "B 0", "ph": "X", "ts": 20, "dur": 20, "pid": 1, "tid": 1, "cat": "compute"},
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "rank 0"}},
    ],
    "otherData": {"plan": "sha256:" + "0" * 64},
})  # fmt: skip
MANIFEST = json.dumps({
    "schema": "shardwise.checkpoint", "version": 3, "step": 20, "seed": 1, "data": "synthetic",
    "content": None,
    "optimizer": "adamw", "global_batch_size": 8, "seq_len": 64, "model": "sha256:" + "1" * 64,
    "plan": "sha256:" + "2" * 64, "files": {"__0_0.distcp": [100, "sha256:" + "3" * 64]},
})  # fmt: skip


def _traces() -> tuple[str, ...]:
    return (events_text(events_from_text("lost n0; slow n1 0.5; lost d9", 4)),)


def _events(text: str) -> object:
    return events_from_text(text, 4)


def _steps(path: str) -> object:
    return dict(logged_times(Path(path).read_text("utf-8"), file=path))


def _schedules() -> tuple[str, ...]:
    chunks = {"1f1b": 1, "interleaved_1f1b": 2, "zb_v": 2}
    return tuple(to_text(generate(name, pp=4, microbatches=8, vpp=vpp)) for name, vpp in chunks.items())


def _rows() -> tuple[str, ...]:
    lines = (ROOT / "src/shardwise/accuracy/data/measurements.csv").read_text("utf-8").split("\n")
    return ("\n".join(lines[:12]), "\n".join([lines[0], *lines[200:205], *lines[500:510]]))


def _exports(target: str) -> Callable[[], tuple[str, ...]]:
    return lambda: (next(iter(EXPORTERS[target].files(_plan(target)).values())),)


def _imported(path: str) -> object:
    supplied = Supplied(
        model=load_model("llama-3.1-8b"), fields={"recompute": "full", "micro_batch_size": 1}, **JOB
    )
    return imported_run(path, devices=8, supplied=supplied)


def _files_of_clusters() -> tuple[str, ...]:
    """Files of Slurm, Kubernetes and NVIDIA that describe a cluster."""
    nodes = (node(f"ip-{at}", **{NEW[0]: f"leaf-{at % 2}"}) for at in range(4))
    return (
        TREE, BLOCKS, nodes_of_scontrol(GPUS), listed(*nodes), matrix(all_to_all(4, "NV18"), range(4)), smi(),
        topology(), "gpu[001-004]\n",
    )  # fmt: skip


def _trainer(path: str) -> object:
    return imported_run(path, devices=8, supplied=Supplied(model=load_model("llama-3.1-8b")))


def _imported_cluster(path: str) -> object:
    return sw.import_cluster(path, device="H100-SXM")


def _parameters(path: str) -> int:
    return parameters(load_model(path))


def readers() -> Mapping[str, Reader]:
    """All readers by name."""
    clusters = ("examples/clusters/*.yaml", "src/shardwise/cluster/data/clusters/*.yaml")
    found = [
        Reader("config", ".json", _configs, _parameters),
        Reader("dimensions", ".yaml", _dimensions, _parameters),
        Reader("graph", ".yaml", _graphs, load_graph),
        Reader("cluster", ".yaml", lambda: (*_texts(clusters[0]), *_texts(clusters[1])), load_cluster),
        Reader("shorthand", "", lambda: ("8x8xH100-SXM", "1x4xcpu", "spot-mix"), load_cluster),
        Reader("events", ".jsonl", _traces, load_events),
        Reader("event words", "", lambda: ("lost n0; slow n1 0.5", "link n0>s1g0 5GB/s"), _events),
        Reader("availability", ".csv", lambda: AVAILABILITY, lambda path: convert_events(path, per_node=8)),
        Reader("plan", ".json", _plan_texts, read_plan),
        Reader("rehashed plan", ".json", _plan_texts, _rehashed),
        Reader("checked plan", ".json", _plan_texts, _checked),
        Reader("calibration", ".yaml", lambda: _texts("examples/calibrations/*.yaml"), read_calibration),
        Reader("measurements", ".txt", lambda: (NCCL,), lambda path: read_sources([path])),
        Reader("logs of train", ".jsonl", lambda: (STEPS,), _steps),
        Reader("rows", ".csv", _rows, read_rows),
        Reader("space", ".yaml", lambda: _texts("examples/spaces/*.yaml"), read_space),
        Reader("schedule", "", _schedules, from_text),
        Reader("trace", ".json", lambda: (TRACE,), read_trace),
        Reader("manifest", ".json", lambda: (MANIFEST,), read_manifest),
        Reader("strategy", "", lambda: STRATEGIES, parse_fields),
    ]
    found += [
        Reader("files of a cluster", ".txt", _files_of_clusters, _imported_cluster),
        Reader("trainer", ".json", lambda: (json.dumps(FSDP), json.dumps(WITH_ZERO)), _trainer),
    ]
    found += [Reader(target, ".txt", _exports(target), _imported) for target in IMPORTERS]
    return {reader.name: reader for reader in found}
