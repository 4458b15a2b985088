"""Bytes that pairs of ranks exchange where pipelines cut the model differently, compared with the costs of
stages.

A weight is cut wherever any pipeline cuts it, over layers or over tensor ranks. The ranks that hold a part
pass it around a ring: each of d sends (d - 1) / d of it to the next. So every pair is computed part by part;
the cost of a stage knows only the number of pipelines. Here each pipeline has its own nodes. Where some share
nodes, rings cross fewer cards, which costs count by nodes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.property.software import PLAIN

from shardwise.cluster import load_cluster
from shardwise.cost import StageKinds, StageShape, bind, stage_costs, stage_kinds_of
from shardwise.model import Model, model_from_config
from shardwise.operators import Operator
from shardwise.strategy import RECOMPUTES, Job

CLUSTER = """
nodes: [{device: A100-80G, count: 8, devices: 4, nics: {count: 1, bandwidth: 200Gb/s}}]
tiers:
  - {name: NVLink, span: node, bandwidth: 300GB/s, latency: 1ns}
  - {name: network, bandwidth: 6.25GB/s, latency: 1ns, network: true}
"""
"""One card per node, which its devices share in any ring; almost no latency."""

WIDE: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32768, "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Tensor ranks divide the embedding table without padding."""

SIZES = (1, 2, 4)
HALF = 2.0
"""Bytes of a weight, and of a gradient."""

Share = tuple[Fraction, Fraction]
"""Start and end of a share of a tensor."""


@dataclass(frozen=True)
class Cut:
    """A stage: its ranks, as many as its tp, and its units from `first` to before `last` (0 is the embedding,
    the last one the head).
    """

    ranks: tuple[int, ...]
    first: int
    last: int

    def holds(self, unit: int) -> bool:
        return self.first <= unit < self.last

    def share(self, place: int) -> Share:
        return Fraction(place, len(self.ranks)), Fraction(place + 1, len(self.ranks))


Pipelines = list[list[Cut]]
Owners = Callable[[Pipelines, int, Share], list[int]]


def random_pipelines(rng: random.Random, layers: int, count: int) -> Pipelines:
    found, rank = [], 0
    for _ in range(count):
        cuts = sorted(rng.sample(range(1, layers), rng.randrange(4)))
        stages = []
        for low, high in zip([0, *cuts], [*cuts, layers], strict=True):
            tp = rng.choice(SIZES)
            first, last = (0 if low == 0 else low + 1), (layers + 2 if high == layers else high + 1)
            stages.append(Cut(tuple(range(rank, rank + tp)), first, last))
            rank += tp
        found.append(stages)
    return found


def owners(pipelines: Pipelines, unit: int, share: Share) -> list[int]:
    """All ranks with this share of a unit's divided weights."""
    found = []
    for stage in (stage for stages in pipelines for stage in stages if stage.holds(unit)):
        for place, rank in enumerate(stage.ranks):
            low, high = stage.share(place)
            if low <= share[0] and share[1] <= high:
                found.append(rank)
    return found


def exchanged(model: Model, pipelines: Pipelines, owning: Owners = owners) -> dict[tuple[int, int], float]:
    """Elements that each rank sends to each other one when weights (or gradients) pass around once."""
    sent: dict[tuple[int, int], float] = defaultdict(float)
    layers = [model.kinds[kind].operators for kind in model.pattern]
    for unit, operators in enumerate([model.embedding, *layers, model.head]):
        divided, whole = elements(operators)
        stages = [stage for stages in pipelines for stage in stages if stage.holds(unit)]
        borders = sorted(
            {border for one in stages for place in range(len(one.ranks)) for border in one.share(place)}
        )
        for low, high in pairwise(borders):
            around(sent, owning(pipelines, unit, (low, high)), divided * float(high - low))
        around(sent, [rank for stage in stages for rank in stage.ranks], whole)
    return sent


def around(sent: dict[tuple[int, int], float], ring: list[int], size: float) -> None:
    for place, rank in enumerate(ring):
        if len(ring) > 1:
            sent[rank, ring[(place + 1) % len(ring)]] += size * (len(ring) - 1) / len(ring)


def elements(operators: tuple[Operator, ...]) -> tuple[float, float]:
    """Number of weights that tensor ranks divide, and of those that every rank has whole."""
    divided, whole = 0, 0
    for weight in (weight for operator in operators for weight in operator.weights):
        if any(extent.role != "whole" for extent in weight.shape):
            divided += weight.parameters
        else:
            whole += weight.parameters
    return float(divided), float(whole)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, StageKinds]:
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    Path(path).write_text(CLUSTER)
    model = model_from_config(WIDE, name="wide")
    job = Job(
        seq_len=512,
        global_batch_size=64,
        dtype="bf16",
        profile=replace(PLAIN, state_overlap=0.0, reduce_in_fp32=False),
    )
    return model, stage_kinds_of(bind(model, load_cluster(str(path)), job), [(tp, 1) for tp in SIZES], 1)


def sends_and_costs(
    given: tuple[Model, StageKinds], seed: int, owning: Owners
) -> Iterator[tuple[int, float, float]]:
    """For every rank: the number of pipelines, the bytes that it sends to all others, and the estimated
    seconds of its stage, for gathering weights; then the same for reducing gradients.
    """
    model, kinds = given
    rng = random.Random(seed)
    count = rng.choice((2, 3, 4))
    pipelines = random_pipelines(rng, model.layers, count)
    sends: dict[int, float] = defaultdict(float)
    for (rank, _), size in exchanged(model, pipelines, owning).items():
        sends[rank] += HALF * size
    for stages in pipelines:
        for place, stage in enumerate(stages):
            is_first, is_last = place == 0, place == len(stages) - 1
            shape = StageShape(
                layers=float(stage.last - stage.first - is_first - is_last), in_flight=len(stages) - place,
                is_first=float(is_first), is_last=float(is_last), replicas=[count], groups=count,
            )  # fmt: skip
            price = stage_costs(kinds, shape)
            kind = SIZES.index(len(stage.ranks))
            for rank in stage.ranks:
                yield count, sends[rank], price.gather_s[..., kind].item()
                yield count, sends[rank], price.reduce_s[RECOMPUTES.index("none")][..., kind].item()


def worst_difference(given: tuple[Model, StageKinds], seeds: range, owning: Owners = owners) -> float:
    """Largest relative difference between the estimates and a line through them: bytes at one rate plus the
    call overhead of a collective.
    """
    points: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for seed in seeds:
        for count, nbytes, seconds in sends_and_costs(given, seed, owning):
            points[count].append((nbytes, seconds))
    slopes, largest = [], 0.0
    for some in points.values():
        nbytes, seconds = np.array(some).T
        slope, before_s = np.polyfit(nbytes, seconds, 1, w=1.0 / seconds)
        slopes.append(slope)
        largest = max(largest, float(np.max(np.abs(slope * nbytes + before_s - seconds) / seconds)))
    return max(largest, float(max(slopes) / min(slopes)) - 1.0)


def test_the_cost_of_a_stage_follows_the_bytes_that_its_ranks_exchange(
    given: tuple[Model, StageKinds],
) -> None:
    """Whatever the cuts and tensor degrees of other pipelines, the estimate follows the bytes that a rank
    sends over all pairs. Norms, which all tensor ranks hold, pass around a larger ring than the cost model
    assumes: 2e-5 of a layer.
    """
    assert worst_difference(given, range(40)) < 1e-4


def first_cuts_alone(pipelines: Pipelines, unit: int, share: Share) -> list[int]:
    """The mutant in which only the first rank of each stage with a share meets the others."""
    return owners(pipelines, unit, share)[: len(pipelines)] if share[0] == 0 else []


def test_parts_that_no_rank_exchanges_are_noticed(given: tuple[Model, StageKinds]) -> None:
    assert worst_difference(given, range(10), first_cuts_alone) > 0.1


def test_ranks_without_common_parts_exchange_nothing(given: tuple[Model, StageKinds]) -> None:
    """By hand: 32 layers, two pipelines. One has tp 2 on ranks 0 and 1; the other has tp 4 on ranks 2 to 5
    for the embedding and 8 layers, then rank 6. Rank 0 has one half, of which ranks 2 and 3 have a quarter
    each.
    """
    model, _ = given
    pipelines = [[Cut((0, 1), 0, 34)], [Cut((2, 3, 4, 5), 0, 9), Cut((6,), 9, 34)]]
    sent = exchanged(model, pipelines)
    halves = {(low, high) for (low, high), size in sent.items() if size > 1e6}
    assert halves == {
        (0, 2),
        (2, 0),
        (0, 3),
        (3, 0),
        (1, 4),
        (4, 1),
        (1, 5),
        (5, 1),
        (0, 6),
        (6, 0),
        (1, 6),
        (6, 1),
    }
    table = 32_768 * 4_096
    divided, _ = elements(model.kinds[0].operators)
    # Each of the two owners of a part sends half of it. Rank 2: a quarter of the table and of 8 layers.
    assert sent[2, 0] == pytest.approx((table + 8 * divided) / 4 / 2, rel=1e-3)
    assert sent[0, 6] == pytest.approx((table + 24 * divided) / 2 / 2, rel=1e-3)
