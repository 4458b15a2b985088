"""A layout evaluated from its names alone has the costs of the chain of all layouts: two independent programs
for one page of definitions.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.property.layout_instances import llama, mlp, random_graph, skip_graph
from tests.reference import one_layout
from tests.reference.one_layout import LayoutEstimate, estimate_layout
from tests.reference.one_layout.layout import StepLedger
from tests.reference.one_layout.rank import rank_of, value_shards
from tests.sampling import sample_of

from shardwise import cost
from shardwise.cluster import Mesh, load_cluster, mesh_of
from shardwise.cost.layouts.block import Structure, Tensor, _Builder, structure_of
from shardwise.cost.layouts.chain import FixedCosts, layout_chain
from shardwise.cost.layouts.context import CostColumns
from shardwise.cost.layouts.parameters import parameter_traffic
from shardwise.cost.layouts.redistribute import data_placements, redistribution_elements, value_placements
from shardwise.cost.training import Training
from shardwise.graph import (
    Mode,
    OpGraph,
    graph_names,
    layout_from_record,
    layout_record,
    load_graph,
    skip_tensors_of,
)
from shardwise.pareto import Chain, Segment, shared_sizes
from shardwise.search.pareto import pareto_search
from shardwise.search.pareto.solution import SegmentChoice, Solution, measure
from shardwise.strategy import PROFILES

SOFTWARE = (
    Training(dtype="bf16"),
    Training(dtype="bf16", profile=PROFILES["megatron-2026"], optimizer="muon"),
    Training(dtype="fp16", profile=PROFILES["megatron-2022"]),
    Training(dtype="bf16", profile=PROFILES["fsdp"], optimizer="sgd"),
    Training(dtype="fp8", profile=PROFILES["fsdp2"]),
    Training(dtype="fp32", profile=PROFILES["megatron-2021"], optimizer="adafactor"),
)
CLUSTERS = (
    ("8x8xH100-SXM", ((8, 8), (4,), (2, 4), (4, 16), (2, 2, 2), (3,), (1,))),
    ("4xA100-80G", ((2, 2),)),
)


def random_solution(random: np.random.Generator, chain: Chain) -> Solution:
    """A random choice of each variable; borders and shared variables agree."""
    chosen: list[SegmentChoice] = []
    shared = {name: int(random.integers(size)) for name, size in shared_sizes(chain).items()}
    links = [link for link in chain for _ in range(link.repeat)]
    border: int | None = None
    for link, following in zip(links, [*links[1:], None], strict=True):
        mode = int(random.integers(len(link.modes)))
        part = link.modes[mode][1]
        choices = [int(random.integers(size)) for size in part.sizes]
        for name, variable in part.shared:
            choices[variable] = shared[name]
        if part.entry is not None and border is not None:
            choices[part.entry] = border
        if part.exit is not None and following is not None:
            ends = {part.names[part.exit]} | {_entry_of(following)}
            for skip_outputs in ends & {name.removeprefix("tensor ") for name in shared}:
                choices[part.exit] = shared[f"tensor {skip_outputs}"]
        chosen.append(SegmentChoice(mode, tuple(choices)))
        border = None if part.exit is None else choices[part.exit]
    return tuple(chosen)


def _entry_of(link: Segment) -> str:
    """The name of a segment's entry."""
    _, part = link.modes[0]
    return "" if part.entry is None else part.names[part.entry]


Both = tuple[tuple[float, float], LayoutEstimate]
"""Seconds and bytes by the chain, and an estimate by the layout alone."""


def both(graph: OpGraph, cluster: str, ranks: tuple[int, ...], training: Training, seed: int) -> Both:
    """A random layout, evaluated by the chain and from its names."""
    (found,) = all_both(graph, cluster, ranks, training, [seed])
    return found


def all_both(
    graph: OpGraph, cluster: str, ranks: tuple[int, ...], training: Training, seeds: Iterable[int]
) -> list[Both]:
    """The same for several layouts of one chain, as building the chain takes longer than evaluating
    a layout.
    """
    machines = load_cluster(cluster)
    mesh: Mesh = mesh_of(machines, ranks)
    laid = layout_chain(graph, machines, training, mesh)
    found = []
    for seed in seeds:
        solution = random_solution(np.random.default_rng(seed), laid.chain)
        # As in a plan file: names alone.
        record = json.loads(json.dumps(layout_record(laid.layout(solution))))
        layout = layout_from_record(record, graph, ranks)
        price = estimate_layout(graph, machines, training, mesh, layout)
        found.append((measure(laid.chain, solution), price))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", sample_of(range(60), range(30)))
def test_the_chain_and_the_walk_agree(seed: int) -> None:
    random = np.random.default_rng(seed)
    cluster, meshes = CLUSTERS[int(random.random() < 0.2)]
    ranks = meshes[int(random.integers(len(meshes)))]
    training = SOFTWARE[seed % len(SOFTWARE)]
    if cluster.endswith("A100-80G") and training.dtype == "fp8":
        training = SOFTWARE[0]
    (time_s, memory_bytes), price = both(random_graph(seed), cluster, ranks, training, seed)
    assert price.time_s == pytest.approx(time_s, rel=1e-9)
    assert price.memory_bytes == pytest.approx(memory_bytes, rel=1e-9)
    assert price.at_once_bytes <= price.memory_bytes * (1.0 + 1e-12)


@pytest.mark.parametrize("seed", sample_of(range(40), range(20)))
def test_chain_and_walk_agree_on_skip_tensors(seed: int) -> None:
    found = all_both(skip_graph(seed), "8x8xH100-SXM", (2, 4), SOFTWARE[seed % len(SOFTWARE)], range(3))
    for (time_s, memory_bytes), price in found:
        assert price.time_s == pytest.approx(time_s, rel=1e-9)
        assert price.memory_bytes == pytest.approx(memory_bytes, rel=1e-9)


def test_skip_tensors_are_entries_results_and_inner_tensors() -> None:
    """Kinds of skip tensors in the graphs of the test above, with a least number of each."""
    entries = results = inner = into_repeated = 0
    for graph in map(skip_graph, range(20)):
        skips = skip_tensors_of(graph)
        for block, skip_outputs, skip_inputs in zip(
            graph.blocks, skips.skip_outputs, skips.skip_inputs, strict=True
        ):
            entries += block.entry in skip_outputs
            results += block.operators[-1].name in skip_outputs
            inner += any(op.name in skip_outputs for op in block.operators[:-1])
            into_repeated += block.repeat > 1 and bool(skip_inputs)
    assert min(entries, results, inner, into_repeated) >= 3


SAVED_IN_PLACE = _Builder._is_saved_in_place


def _saved_by_nobody(builder: _Builder, tensor: Tensor, mode: Mode) -> bool:
    return not tensor.is_skip_output and SAVED_IN_PLACE(builder, tensor, mode)


def _saved_by_readers(builder: _Builder, tensor: Tensor, mode: Mode) -> bool:
    if tensor.is_skip_input:
        return builder.structure.is_saved(tensor)
    return SAVED_IN_PLACE(builder, tensor, mode)


def _saved_twice(builder: _Builder, tensor: Tensor, mode: Mode) -> bool:
    if tensor.is_entry:
        return builder.structure.is_saved(tensor) or mode == "recomputed"
    return SAVED_IN_PLACE(builder, tensor, mode)


def _without_gradients(*given: Any, skip_inputs: Mapping[str, bool], **named: Any) -> Structure:
    return structure_of(*given, skip_inputs=dict.fromkeys(skip_inputs, False), **named)


SKIP_MUTANTS = {
    "skip tensors that no block saves": ("block._Builder._is_saved_in_place", _saved_by_nobody),
    "skip tensors that readers save too": ("block._Builder._is_saved_in_place", _saved_by_readers),
    "skip tensors that the next block saves as its entry": (
        "block._Builder._is_saved_in_place",
        _saved_twice,
    ),
    "skip tensors without gradients": ("chain.structure_of", _without_gradients),
}


@pytest.mark.parametrize("mutant", SKIP_MUTANTS)
def test_a_wrong_cost_of_a_skip_tensor_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, replacement = SKIP_MUTANTS[mutant]
    monkeypatch.setattr(f"shardwise.cost.layouts.{target}", replacement)
    assert any(
        price.time_s != pytest.approx(time_s, rel=1e-9)
        or price.memory_bytes != pytest.approx(memory_bytes, rel=1e-9)
        for seed in range(20)
        for (time_s, memory_bytes), price in all_both(
            skip_graph(seed), "8x8xH100-SXM", (2, 4), SOFTWARE[0], range(2)
        )
    )


AT_ONCE = StepLedger.at_once_bytes


def by_definition(ledger: StepLedger) -> float:
    """For each instant, the bytes of all tensors that are live, computed from scratch."""
    saved = [each for each in ledger.saved_tensors if not each.is_recomputed]
    always = sum(ledger.resident.values()) - sum(each.nbytes for each in saved)
    moments = [
        need.nbytes
        + sum(each.nbytes for each in saved if each.order <= need.order)
        + sum(
            each.nbytes
            for each in ledger.saved_tensors
            if each.is_recomputed and each.block == need.block and each.order <= need.order
        )
        for need in ledger.needs
    ]
    return always + max(sum(each.nbytes for each in saved), *moments)


@pytest.mark.slow
def test_peak_memory_is_the_maximum_over_all_instants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random graphs; in most of them the peak is less than the sum of all tensors."""
    fewer = []

    def noted(ledger: StepLedger) -> float:
        found = AT_ONCE(ledger)
        assert found == pytest.approx(by_definition(ledger), rel=1e-12)
        return found

    monkeypatch.setattr(StepLedger, "at_once_bytes", noted)
    for seed in range(40):
        _, price = both(random_graph(seed), "1x4xA100-80G", (4,), SOFTWARE[0], seed)
        fewer.append(price.at_once_bytes < price.memory_bytes * (1.0 - 1e-9))
    assert sum(fewer) > 10


@pytest.mark.parametrize("software", range(5))
@pytest.mark.parametrize("graph", [llama(layers=3, batch=16, seq_len=64), mlp(512, 64, 256, 40)])
def test_chain_and_walk_agree_on_transformers(graph: OpGraph, software: int) -> None:
    seeds = range(software, 20, 5)
    found = all_both(graph, "8x8xH100-SXM", (4, 8), SOFTWARE[software], seeds)
    for seed, ((time_s, memory_bytes), price) in zip(seeds, found, strict=True):
        assert price.time_s == pytest.approx(time_s, rel=1e-9), seed
        assert price.memory_bytes == pytest.approx(memory_bytes, rel=1e-9), seed


@pytest.mark.slow
def test_random_graphs_share_parameters_within_blocks_and_across() -> None:
    graphs = [random_graph(seed) for seed in range(60)]
    machine = load_cluster("8x8xH100-SXM")
    chains = [layout_chain(each, machine, SOFTWARE[0], mesh_of(machine, (4,))).chain for each in graphs]
    assert sum(bool(shared_sizes(chain)) for chain in chains) >= 5
    names = [
        [parameter.name for op in block.operators for parameter in op.parameters]
        for each in graphs
        for block in each.blocks
    ]
    assert sum(len(set(own)) < len(own) for own in names) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("name", graph_names())
def test_chain_and_walk_agree_on_shipped_graphs(name: str) -> None:
    graph = load_graph(f"graph:{name}")
    (time_s, memory_bytes), price = both(graph, "2x8xV100-32G", (2, 8), SOFTWARE[2], 7)
    assert price.time_s == pytest.approx(time_s, rel=1e-9)
    assert price.memory_bytes == pytest.approx(memory_bytes, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "points"),
    [
        (mlp(4096, 1024, 4096, 512), 3),
        (llama(layers=2, batch=64, seq_len=512), 20),
        (skip_graph(3), 2),
    ],
)
def test_every_point_of_a_frontier_has_the_cost_of_its_layout(
    graph: OpGraph, points: int, full: bool
) -> None:
    machines = load_cluster("8x8xH100-SXM")
    mesh, training = mesh_of(machines, (8,)), SOFTWARE[0]
    laid = layout_chain(graph, machines, training, mesh)
    found = pareto_search([laid.chain], epsilon=0.001 if full else 0.005)
    assert len(found.points) >= points
    for (_, solution), (time_s, memory_bytes) in zip(found.solutions, found.points, strict=True):
        price = estimate_layout(graph, machines, training, mesh, laid.layout(solution))
        assert price.time_s == pytest.approx(time_s, rel=1e-9)
        assert price.memory_bytes == pytest.approx(memory_bytes, rel=1e-9)


def parts_of(price: Any) -> dict[Any, float]:
    """All numbers of an estimate: totals, parts, and seconds by operator, purpose and pass."""
    found: dict[Any, float] = {name: getattr(price, name) for name in TOTALS}
    found |= {("seconds", name): seconds for name, seconds in price.seconds.items()}
    found |= {("bytes", name): nbytes for name, nbytes in price.nbytes.items()}
    for charge in price.charges:
        key = (charge.place, charge.what, charge.when)
        found[key] = found.get(key, 0.0) + charge.seconds
    return {key: value for key, value in found.items() if value}


TOTALS = ("time_s", "memory_bytes", "at_once_bytes", "forward_s", "backward_s", "end_s", "hidden_s")


def parts_differ(seed: int) -> bool:
    """Whether the estimate of a random layout and that of the reference have different parts."""
    graph = (random_graph, skip_graph)[seed % 2](seed)
    machines, training = load_cluster("8x8xH100-SXM"), SOFTWARE[seed % len(SOFTWARE)]
    meshes = CLUSTERS[0][1]
    mesh = mesh_of(machines, meshes[seed // 2 % len(meshes)])
    laid = layout_chain(graph, machines, training, mesh)
    layout = laid.layout(random_solution(np.random.default_rng(seed), laid.chain))
    found, expected = (
        parts_of(estimate(graph, machines, training, mesh, layout))
        for estimate in (cost.estimate_layout, estimate_layout)
    )
    return found != pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("seed", sample_of(range(60), range(28)))
def test_the_estimate_of_one_layout_has_the_parts_of_the_reference(seed: int) -> None:
    assert not parts_differ(seed)


def _from_the_start(columns: CostColumns, nbytes: Any, mode: Mode, since: int) -> None:
    SAVE(columns, nbytes, mode, -1)


def _at_its_end(columns: CostColumns, seconds: Any, what: str) -> None:
    CostColumns.once(columns, seconds, what)


SAVE = CostColumns.save

PART_MUTANTS = {
    "saved tensors that exist from the start": ("context.CostColumns.save", _from_the_start),
    "backward computation at the end of the step": ("context.CostColumns.computed_backward", _at_its_end),
    "copies of shared parameters at the first reader alone": (
        "block.copied_bytes",
        lambda context, moved: 0.0,
    ),
    "another purpose of the fixed costs": ("one.fixed_costs", lambda context: FixedCosts(0.0, 0.0, 0.0, 0.0)),
}


@pytest.mark.parametrize("mutant", PART_MUTANTS)
def test_a_wrong_part_of_one_layout_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, replacement = PART_MUTANTS[mutant]
    monkeypatch.setattr(f"shardwise.cost.layouts.{target}", replacement)
    assert any(map(parts_differ, range(28)))


@pytest.mark.slow
def test_parts_sum_to_the_whole() -> None:
    _, price = both(llama(layers=2, batch=16, seq_len=64), "8x8xH100-SXM", (4, 8), SOFTWARE[0], 0)
    assert sum(price.seconds.values()) == pytest.approx(price.time_s)
    assert sum(price.nbytes.values()) == pytest.approx(price.memory_bytes)


def test_the_walk_shares_no_code_with_the_chain() -> None:
    folder = Path(one_layout.__file__).parent
    taken = set()
    for module in folder.glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("shardwise"):
                taken.add(node.module)
    allowed = {
        "shardwise.cluster", "shardwise.equations", "shardwise.errors", "shardwise.graph",
        "shardwise.strategy", "shardwise.ties", "shardwise.cost.problem", "shardwise.cost.training",
    }  # fmt: skip
    assert taken and taken <= allowed


@pytest.mark.parametrize("ranks", [(8,), (2, 4), (3,), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(16, 24), (1, 24), (8, 6, 4), (7,), ()])
def test_chain_and_walk_count_the_same_during_a_redistribution(
    ranks: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    machines = load_cluster("8x8xH100-SXM")
    rank = rank_of(machines, SOFTWARE[0], mesh_of(machines, ranks))
    options = data_placements(shape, ranks)
    start, end = options.placements[:, None], options.placements[None, :]
    table = redistribution_elements(shape, ranks, start, end)
    for (a, one), (b, other) in product(enumerate(options.named), repeat=2):
        assert rank.peak_elements(shape, value_shards(one), value_shards(other)) == table[a, b], (one, other)


def _blocked(columns: CostColumns, seconds: object, overlap: object) -> None:
    columns.blocked(seconds, "gradients")


def _nothing(*given: object) -> None:
    pass


def _never(*given: object, **named: object) -> bool:
    return False


MUTANTS = {
    "gradients that never overlap": ("context.CostColumns.summed_gradients", _blocked),
    "backward computation without overlap": (
        "context.CostColumns.computed_backward",
        CostColumns.blocked,
    ),
    "nothing saved": ("context.CostColumns.save", _nothing),
    "redistribution left out of recomputation": ("block.Structure.is_needed_for_recompute", _never),
    "optimizer states that are never sharded": ("redistribute.REPLICATE_SHARD_STATES", 99),
    "gradients with the placements of the tensor": ("operators.gradient_placements", value_placements),
    "collectives of a single axis": ("operators.group_sizes", lambda mesh, is_in: mesh.axes[0].sizes),
    "parameters gathered one by one": (
        "block.parameter_traffic",
        lambda context, options, uses, _: parameter_traffic(context, options, uses, 1.0),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, replacement = MUTANTS[mutant]
    monkeypatch.setattr(f"shardwise.cost.layouts.{target}", replacement)
    graph = llama(layers=2, batch=16, seq_len=64)
    found = all_both(graph, "8x8xH100-SXM", (4, 8), SOFTWARE[0], range(4))
    assert any(
        price.time_s != pytest.approx(time_s, rel=1e-9)
        or price.memory_bytes != pytest.approx(memory_bytes, rel=1e-9)
        for (time_s, memory_bytes), price in found
    )


def test_a_recomputed_first_block_saves_the_data_that_it_reads() -> None:
    """All its results are recomputed; x and target stay saved."""
    graph, machines = mlp(512, 64, 256, 40), load_cluster("8x8xH100-SXM")
    mesh = mesh_of(machines, (1,))
    laid = layout_chain(graph, machines, SOFTWARE[0], mesh)
    (link,) = laid.chain
    assert [mode for mode, _ in link.modes] == ["kept", "recomputed"]
    (_, part), _ = link.modes
    saved, recomputed = (
        estimate_layout(
            graph, machines, SOFTWARE[0], mesh, laid.layout((SegmentChoice(mode, (0,) * len(part.sizes)),))
        )
        for mode in range(2)
    )
    assert recomputed.nbytes["activations"] == 2.0 * (512 * 64 + 512)
    assert recomputed.nbytes["activations"] < saved.nbytes["activations"]
    assert recomputed.time_s > saved.time_s and recomputed.seconds["recomputation"] > 0.0
