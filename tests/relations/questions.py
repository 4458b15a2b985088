"""Small random questions, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tests.relations.clusters import ClusterData, Nodes, Tier
from tests.relations.commands import File, Saved, Word, Words

DEVICES = (
    "A100-80G", "A100-40G", "H100-SXM", "V100-32G", "V100-16G", "T4", "L4", "A10G", "RTX4090", "RTX3090",
    "A30",
)  # fmt: skip

MOST_DEVICES = 16

LARGE, MOST_OF_LARGE = 40, 32
"""One question in LARGE is about a larger mixed cluster, whose answer may have a gap; and the most devices of
such a cluster."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question of `plan`, or of `frontier` where the model is an operator graph."""

    seed: int
    model: Word
    cluster: ClusterData
    seq_len: int
    batch: int
    options: Mapping[str, str] = field(default_factory=dict)
    is_graph: bool = False

    @property
    def space(self) -> str:
        return self.options.get("--space", "default")

    def rng(self, name: str) -> random.Random:
        """Random numbers for a relation of this name, the same every time."""
        return random.Random(f"{name} {self.seed}")

    def words(
        self, *, command: str | None = None, cluster: tuple[Word, ...] | None = None, **options: str | None
    ) -> Words:
        """The command that asks the question, with `options` as in `with_options`; of plans without a target,
        unless one is an option."""
        named = command or ("frontier" if self.is_graph else "plan")
        changed = self.with_options(options)
        has_target = named == "plan" or (named == "frontier" and not self.is_graph)
        if has_target and "--target" not in changed.options:
            changed = changed.with_options({"target": "any"})
        option_words: list[Word] = []
        for name, value in changed.options.items():
            option_words += [name, value] if value else [name]
        length: tuple[Word, ...] = () if self.is_graph else ("--seq-len", str(self.seq_len))
        return (
            named,
            self.model,
            *(self.cluster.words() if cluster is None else cluster),
            *length,
            "--global-batch-size",
            str(self.batch),
            *option_words,
        )

    def with_options(self, options: Mapping[str, str | None]) -> Question:
        """The question with further or other options (`memory_margin="0"`): None removes an option, an empty
        text is an option without a value."""
        changed = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        remaining = {name: value for name, value in {**self.options, **changed}.items() if value is not None}
        return replace(self, options=remaining)

    def on(self, cluster: ClusterData) -> Question:
        """The same question about another cluster."""
        return replace(self, cluster=cluster)

    def saved(self) -> Saved:
        """The plan file of the answer."""
        return Saved(self.words())


def question(seed: int) -> Question:
    """The question of a seed.

    Half of the clusters have two or three pools, a third of the questions use the default space, and a tenth
    of the models has experts. One question in ten is about an operator graph, one in forty about a larger
    cluster.
    """
    rng = random.Random(f"question {seed}")
    if seed % 10 == 9:
        return _graph_question(seed, rng)
    if seed % LARGE == 3:
        return _large_question(seed, rng)
    cluster = mixed_cluster(rng) if seed % 2 else uniform_cluster(rng)
    if rng.random() < 0.25:
        cluster = _with_little_memory(rng, cluster)
    options: dict[str, str] = {}
    if seed % 3:
        options["--space"] = "core"
    if rng.random() < 0.3:
        options["--memory-margin"] = rng.choice(("0.0", "0.1", "0.3"))
    if rng.random() < 0.2:
        options["--optimizer"] = rng.choice(("sgd", "adafactor", "muon"))
    if rng.random() < 0.2:
        options["--fix"] = rng.choice(
            ("tp=1", "pp=1", "zero_stage=1", "recompute=none", "schedule=1f1b", "micro_batch_size=1")
        )
    options["--top"] = rng.choice(("0", "0", "1", "3"))
    return Question(
        seed=seed,
        model=File("model", model_document(rng, has_experts=rng.random() < 0.1)),
        cluster=cluster,
        seq_len=rng.choice((128, 256, 512, 1024)),
        batch=rng.choice((4, 6, 8, 8, 12, 16, 16, 24, 32)),
        options=options,
    )


def _large_question(seed: int, rng: random.Random) -> Question:
    """A question about two pools of up to 32 devices, in the default space."""
    nodes: tuple[Nodes, ...] = ()
    while not MOST_DEVICES < sum(run.count * run.devices for run in nodes) <= MOST_OF_LARGE:
        nodes = tuple(
            Nodes(device=name, count=rng.randint(1, 4), devices=rng.choice((4, 8)))
            for name in rng.sample(DEVICES, 2)
        )
    return Question(
        seed=seed,
        model=File("model", model_document(rng, has_experts=False)),
        cluster=ClusterData(nodes=nodes, inter_node=f"{rng.choice((25, 100))}Gb/s"),
        seq_len=rng.choice((512, 1024)),
        batch=rng.choice((32, 48)),
        options={"--top": "0"},
    )


def _with_little_memory(rng: random.Random, cluster: ClusterData) -> ClusterData:
    """The cluster with devices that small models fill."""
    memory_bytes = rng.choice((2e9, 3e9, 4e9, 6e9))
    cluster = cluster.with_explicit_cards() if cluster.inter_node else cluster
    return cluster.changed(lambda run: replace(run, memory_bytes=memory_bytes))


def model_document(rng: random.Random, *, has_experts: bool) -> dict[str, Any]:
    """A decoder of few layers; one in four is so wide that it fills a small device."""
    heads = rng.choice((32, 40)) if rng.random() < 0.25 else rng.choice((6, 8, 12, 16))
    hidden = 64 * heads
    found: dict[str, Any] = {
        "name": "small",
        "layers": rng.choice((2, 3, 4, 4, 5, 6)),
        "hidden": hidden,
        "ffn": rng.choice((4, 3)) * hidden,
        "heads": heads,
        "vocab": rng.choice((8_000, 32_000)),
        "seq_len": 1024,
    }
    if rng.random() < 0.5:
        found |= {"tied": False, "gated": True}
    if has_experts:
        found |= {"experts": rng.choice((2, 4, 8)), "top_k": 2, "expert_ffn": hidden}
    return found


def uniform_cluster(rng: random.Random) -> ClusterData:
    """One to four equal nodes of one to eight devices; some with slow cards, some with explicit tiers."""
    devices = rng.choice((1, 1, 2, 4, 8))
    count = rng.randint(1, min(MOST_DEVICES // devices, 4))
    nodes = Nodes(device=rng.choice(DEVICES), count=count, devices=devices)
    draw = rng.random()
    if count == 1 or draw < 0.4:
        return ClusterData(nodes=(nodes,))
    if draw < 0.7:
        return ClusterData(nodes=(nodes,), inter_node=f"{rng.choice((10, 25, 100, 400))}Gb/s")
    rate = rng.choice((5e9, 25e9, 100e9))
    outer = Tier(
        name="network", span="cluster", latency_s=rng.choice((2e-6, 1e-5, 5e-5)), bytes_per_s=rate / 4.0,
        is_network=True,
    )  # fmt: skip
    inner = Tier(name="inside", span="node", latency_s=2e-6, bytes_per_s=rate, is_network=False)
    return ClusterData(nodes=(nodes,), tiers=(outer,) if devices == 1 else (inner, outer))


def mixed_cluster(rng: random.Random) -> ClusterData:
    """Two or three pools of one to three nodes, which differ in device, speed, cards or devices per node."""
    pools = rng.choice((2, 2, 2, 3))
    per_node = rng.choice((1, 2, 2, 4))
    names = rng.sample(DEVICES, pools)
    while True:
        nodes = tuple(
            Nodes(device=name, count=rng.randint(1, 3), devices=per_node if rng.random() < 0.8 else 1)
            for name in names
        )
        if sum(run.count * run.devices for run in nodes) <= MOST_DEVICES:
            break
    draw = rng.random()
    if draw < 0.3:  # one device at several speeds
        nodes = tuple(
            replace(run, device=names[0], devices=per_node, speed=speed)
            for run, speed in zip(nodes, (1.0, rng.choice((0.9, 0.5)), 0.7), strict=False)
        )
    elif draw < 0.5:
        nodes = tuple(replace(run, cards=1, card_bytes_per_s=rng.choice((1.25e9, 12.5e9))) for run in nodes)
    elif draw < 0.8:
        return ClusterData(nodes=nodes, inter_node=f"{rng.choice((10, 25, 100, 400))}Gb/s")
    return ClusterData(nodes=nodes)


def _graph_question(seed: int, rng: random.Random) -> Question:
    """The frontier of a small operator graph on up to eight devices."""
    per_node = rng.choice((1, 2, 4))
    if seed % 20 == 9:
        first, second = rng.sample(DEVICES, 2)
        nodes = tuple(Nodes(device=name, count=1, devices=min(per_node, 2)) for name in (first, second))
    else:
        nodes = (Nodes(device=rng.choice(DEVICES), count=rng.choice((1, 2)), devices=per_node),)
    width = rng.choice((256, 512, 1024))
    return Question(
        seed=seed,
        model=File("graph", graph_document(width, layers=rng.choice((1, 2)))),
        cluster=ClusterData(nodes=nodes),
        seq_len=0,
        batch=rng.choice((16, 64, 256)),
        is_graph=True,
    )


def graph_document(width: int, *, layers: int) -> dict[str, Any]:
    """A perceptron of `layers` repetitions of two linear layers, and a loss."""

    def product(name: str, source: str, dims: tuple[str, str], parameter: str) -> dict[str, Any]:
        return {
            "name": name, "kind": "linear", "inputs": [{"from": source, "dims": ["b", dims[0]]}],
            "parameters": [{"name": parameter, "dims": list(dims)}], "output": ["b", dims[1]],
        }  # fmt: skip

    layer = [product("up", "x", ("h", "f"), "{0}.up"), product("down", "up", ("f", "h"), "{0}.down")]
    loss = {
        "name": "loss", "kind": "cross_entropy", "output": [],
        "inputs": [{"from": "logits", "dims": ["b", "v"]}, {"from": "labels", "dims": ["b"]}],
    }  # fmt: skip
    return {
        "name": "perceptron",
        "batch": 64,
        "sizes": {"b": "batch", "d": width, "h": width, "f": 4 * width, "v": 1000},
        "inputs": {"samples": ["batch", width], "labels": ["batch"]},
        "blocks": [
            {"name": "first", "operators": [product("in", "samples", ("d", "h"), "in")]},
            {"name": "layer", "entry": "x", "repeat": layers, "operators": layer},
            {"name": "last", "entry": "y", "operators": [product("logits", "y", ("h", "v"), "out"), loss]},
        ],
    }
