"""Random questions as commands that save plans: of strategies, uneven, of operator graphs, for traces."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICES = ("A100-40G", "V100-16G", "V100-32G", "A10G", "T4", "RTX3090", "H100-SXM", "MI300X")
SMALL_GRAPHS = ("graph:mlp", "graph:lstm-2x2048")

Command = list[str]


def model_of(rng: random.Random, folder: Path, *, experts: bool) -> str:
    """The path of a file of a small model."""
    hidden = rng.choice((256, 512, 1024))
    config: dict[str, Any] = {
        "layers": rng.randint(2, 12), "hidden": hidden, "ffn": 4 * hidden, "heads": hidden // 64,
        "vocab": rng.choice((1000, 32000, 50257)), "seq_len": 2048, "tied": rng.random() < 0.5,
        "gated": rng.random() < 0.5,
    }  # fmt: skip
    if experts:
        config |= {"experts": rng.choice((4, 8)), "top_k": rng.choice((1, 2)), "expert_ffn": hidden}
    path = folder / "model.json"
    path.write_text(json.dumps(config))
    return str(path)


def job_of(rng: random.Random) -> Command:
    seq_len, batch = rng.choice(("128", "256", "512")), rng.choice(("4", "6", "8", "16"))
    return ["--seq-len", seq_len, "--global-batch-size", batch]


def equal_nodes(rng: random.Random) -> str:
    return f"{rng.choice((1, 2, 3, 4))}x{rng.choice((1, 2, 4))}x{rng.choice(DEVICES)}"


def pools(rng: random.Random, count: int) -> str:
    """Nodes of several pools; every third time, two pools of one class."""
    classes = rng.sample(DEVICES, count)
    if rng.randrange(3) == 0:
        classes[1] = classes[0]
    nodes = rng.sample((1, 2, 3, 4), count)
    return "+".join(
        f"{rng.choice((1, 1, 2))}x{size}x{name}" for size, name in zip(nodes, classes, strict=True)
    )


def uniform(rng: random.Random, folder: Path) -> Command:
    """Strategies on equal nodes, in the core space or in a part of the default one, by any objective."""
    model = model_of(rng, folder, experts=rng.random() < 0.4)
    command = ["plan", model, "--cluster", equal_nodes(rng), *job_of(rng)]
    command += ["--objective", rng.choice(("time", "time", "memory", "devices"))]
    command += ["--top", rng.choice(("0", "3", "6"))]
    if rng.random() < 0.6:
        return [*command, "--space", "core"]
    schedule = rng.choice(("1f1b", "gpipe", "zb_h1", "interleaved_1f1b"))
    return [*command, "--fix", f"cp=1,offload=none,param_shard=1,schedule={schedule}"]


def mixed(rng: random.Random, folder: Path) -> Command:
    """Uniform strategies on unions of pools."""
    model = model_of(rng, folder, experts=rng.random() < 0.3)
    return ["plan", model, "--cluster", pools(rng, 2), *job_of(rng), "--space", "core"]


def uneven(rng: random.Random, folder: Path) -> Command:
    """Uneven plans, where these are faster: most often for wide models on unlike devices."""
    hidden = rng.choice((1024, 2048))
    config = {
        "layers": rng.randint(6, 24), "hidden": hidden, "ffn": 4 * hidden, "heads": hidden // 64,
        "vocab": 50257, "seq_len": 2048, "tied": rng.random() < 0.5, "gated": rng.random() < 0.5,
    }  # fmt: skip
    path = folder / "model.json"
    path.write_text(json.dumps(config))
    command = ["plan", str(path), "--cluster", pools(rng, rng.choice((2, 2, 3))), "--inter-node", "400Gb/s"]
    seq_len, batch = rng.choice(("1024", "2048")), rng.choice(("24", "32", "48"))
    command += ["--seq-len", seq_len, "--global-batch-size", batch]
    return [
        *command,
        "--stage-dp",
        rng.choice(("1", "1", "2")),
        "--mixed-pool-stages",
        rng.choice(("1", "1", "2")),
    ]


def for_trace(rng: random.Random, folder: Path) -> Command:
    """The plan of a policy on two to four nodes, one of which is lost or slow."""
    nodes = rng.choice((2, 3, 4))
    cluster = f"{nodes}x{rng.choice((1, 2))}x{rng.choice(DEVICES)}"
    if rng.random() < 0.4:
        cluster = f"1x2x{rng.choice(DEVICES)}+{nodes - 1}x2xT4"
    event = rng.choice(("lost n1", "slow n0 0.8", "slow n1 0.5"))
    policy = rng.choice(("now", "expected", "worst"))
    model = model_of(rng, folder, experts=False)
    return ["plan", model, "--cluster", cluster, *job_of(rng), "--events", event, "--policy", policy]


def graph(rng: random.Random, folder: Path) -> Command:
    """Every point of the frontier of a graph, without pipeline stages or with them."""
    cluster = rng.choice(("1x2xA100-40G", "1x4xV100-32G", "2x2xV100-32G", "1x8xH100-SXM"))
    command = ["frontier", rng.choice(SMALL_GRAPHS), "--cluster", cluster]
    command += ["--global-batch-size", rng.choice(("64", "128", "256"))]
    return [*command, "--stages", "2"] if rng.random() < 0.3 else command


KINDS: dict[str, Callable[[random.Random, Path], Command]] = {
    "uniform": uniform,
    "mixed": mixed,
    "uneven": uneven,
    "for a trace": for_trace,
    "graph": graph,
}
