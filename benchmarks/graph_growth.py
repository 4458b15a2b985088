"""Growth of the Pareto search with the size of the graph.

`python -m benchmarks.graph_growth chains|blocks [--operators N ...] [--epsilon E]`

`chains` are operators in a row, all different, with random costs: the layouts of an operator trade time for
memory, and redistribution between layouts takes time. `blocks` is Llama 3.1 8B with increasing numbers of
layers, `equal` (one repeated block) or `different` (a block each). The search goes to epsilon E, within the
limits of `shardwise frontier`. CPU seconds are those of the search alone.

`labels per cell` are labels per choice of a variable. `expected` is the number of table entries, N K^2 for a
chain of N operators with K layouts, times weighted sums plus labels per cell; `ns each` is the time of one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log
from time import process_time

import numpy as np

from shardwise.cluster import load_cluster, mesh_of
from shardwise.cost import Training, layout_chain
from shardwise.graph import Block, OpGraph, load_graph
from shardwise.pareto import Chain, Factor, FactorGraph, Segment
from shardwise.search.pareto import pareto_search

MOST_LABELS = 100_000
"""Most labels, as in `shardwise frontier`."""

OPERATORS = (50, 150, 500, 1500, 5000)
LAYOUTS = (4, 8, 16, 32, 64)
MOST_NUMBERS = 150_000_000
"""Most numbers in all tables of a chain, with five columns each (1.2 GB); larger chains are skipped."""

LAYER = 15
"""Operators of a layer of Llama; four more are outside of the layers."""

MESHES = ((8,), (8, 8))

HEAD = (
    "", "operators", "layouts", "at most", "points", "proven", "weighted sums", "labels", "labels per cell",
    "expected", "CPU s", "ns each",
)  # fmt: skip

Row = tuple[int, float, float]
"""Number of operators, layouts of an operator (geometric mean), CPU seconds."""


def random_chain(operators: int, layouts: int, seed: int) -> Chain:
    """A chain of random operators with layouts from fast and large to slow and small, and redistributions."""
    random = np.random.default_rng(seed)
    links = []
    for place in range(operators):
        time_s, nbytes = 1e-3 * np.exp(random.normal(size=2)) * (1.0, 1e9)
        small = np.sort(random.uniform(size=layouts))
        noise = np.exp(0.1 * random.normal(size=(2, layouts)))
        own = np.zeros((layouts, 5))
        own[:, 0] = own[:, 1] = time_s * (1.0 + small) * noise[0]
        own[:, 2] = nbytes * (1.0 - 0.875 * small) * noise[1]
        sizes, factors = [layouts], [Factor((0,), own)]
        if place:
            redistribution_s = 0.3 * time_s * random.uniform(size=(layouts, layouts))
            redistribution_s[np.arange(layouts), np.arange(layouts)] = 0.0
            between = np.zeros((layouts, layouts, 5))
            between[..., 0] = between[..., 1] = redistribution_s
            sizes.append(layouts)
            factors.append(Factor((1, 0), between))
        part = FactorGraph(
            names=tuple(f"v{variable}" for variable in range(len(sizes))),
            sizes=tuple(sizes),
            factors=tuple(factors),
            entry=1 if place else None,
            exit=0 if place + 1 < operators else None,
        )
        links.append(Segment(f"operator {place}", (("kept", part),)))
    return tuple(links)


def chains(counts: Sequence[int], epsilon: float) -> Iterator[Row]:
    """A row per size of a random chain."""
    for operators in counts:
        for layouts in LAYOUTS:
            if operators * layouts**2 * 5 > MOST_NUMBERS:
                continue
            chain = random_chain(operators, layouts, seed=0)
            yield line("", operators, [layouts], (chain,), epsilon)


def llama(layers: int, *, is_repeated: bool) -> OpGraph:
    """Llama 3.1 8B with `layers` layers: one repeated block, or a block per layer."""
    graph = load_graph("graph:llama-3.1-8b")
    first, layer, head = graph.blocks
    if is_repeated:
        return replace(graph, blocks=(first, replace(layer, repeat=layers), head))
    return replace(graph, blocks=(first, *(own_block(layer, place) for place in range(layers)), head))


def own_block(layer: Block, place: int) -> Block:
    """A copy of the layer as a block with different names."""
    names = {op.name for op in layer.operators}
    entry = f"x{place}"

    def renamed(name: str) -> str:
        return f"{name}{place}" if name in names else entry if name == layer.entry else name

    operators = tuple(
        replace(
            op,
            name=renamed(op.name),
            inputs=tuple(replace(operand, source=renamed(operand.source)) for operand in op.inputs),
            parameters=tuple(replace(each, name=each.name.format(place)) for each in op.parameters),
        )
        for op in layer.operators
    )
    return replace(layer, name=f"{layer.name}{place}", entry=entry, operators=operators, repeat=1)


def blocks(counts: Sequence[int], epsilon: float) -> Iterator[Row]:
    """A row per mesh and number of layers, with about `counts` operators."""
    cluster = load_cluster("8x8xH100-SXM")
    for is_repeated in (True, False):
        for ranks in MESHES:
            for operators in counts:
                graph = llama(operators // LAYER, is_repeated=is_repeated)
                laid = layout_chain(graph, cluster, Training(dtype="bf16"), mesh_of(cluster, ranks))
                name = f"{'x'.join(map(str, ranks))}, {'equal' if is_repeated else 'different'}"
                layouts = list(laid.layouts_per_operator.values())
                yield line(name, graph.operators, layouts, (laid.chain,), epsilon)


def line(
    name: str, operators: int, layouts: Sequence[int], problem_chains: Sequence[Chain], epsilon: float
) -> Row:
    """Searches the frontier of the chains and prints a row of the table."""
    start_s = process_time()
    found = pareto_search(problem_chains, epsilon=epsilon, most_labels=MOST_LABELS)
    cpu_s = process_time() - start_s
    labels, weights = (sum(getattr(each, what) for each in found.efforts) for what in ("labels", "weights"))
    per_cell = labels / sum(each.choices for each in found.efforts)
    predicted = pairs(problem_chains) * (weights + per_cell)
    mean = float(np.exp(np.mean(np.log(layouts))))
    cells = (
        name, f"{operators:,}", f"{mean:.3g}", f"{max(layouts)}", f"{len(found.points)}",
        f"{found.epsilon:.2%}", f"{weights:,}", f"{labels:,}", f"{per_cell:.2g}", f"{predicted:.2g}",
        f"{cpu_s:.2f}", f"{cpu_s / predicted * 1e9:.2g}",
    )  # fmt: skip
    print("| " + " | ".join(cells) + " |", flush=True)
    return operators, mean, cpu_s


def pairs(problem_chains: Sequence[Chain]) -> int:
    """Number of table entries of the chains, about N K^2 for N operators with K layouts; equal blocks count
    once."""
    parts = (part for chain in problem_chains for link in chain for _, part in link.modes)
    return sum(factor.costs[..., 0].size for part in parts for factor in part.factors)


def main() -> None:
    """Prints a table and the exponents of the growth of CPU seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["chains", "blocks"])
    parser.add_argument("--operators", type=int, nargs="*", default=OPERATORS)
    parser.add_argument("--epsilon", type=float, default=0.01)
    arguments = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n" + "|---" * len(HEAD) + "|")
    rows = list({"chains": chains, "blocks": blocks}[arguments.what](arguments.operators, arguments.epsilon))
    logs = np.array([[1.0, log(operators), log(layouts), log(cpu_s)] for operators, layouts, cpu_s in rows])
    (_, by_operators, by_layouts), *_ = np.linalg.lstsq(logs[:, :3], logs[:, 3])
    print(f"\nCPU seconds grow as operators^{by_operators:.2f} x layouts^{by_layouts:.2f}")


if __name__ == "__main__":
    main()
