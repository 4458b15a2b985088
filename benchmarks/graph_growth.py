"""How frontier tracking grows.

`python -m benchmarks.graph_growth chains|blocks [--operators N ...] [--epsilon E]`

`chains` are operators one after the other, no two alike, with drawn costs: layouts of an operator trade time
for memory, and bringing a tensor from one layout to another takes time. `blocks` is Llama 3.1 8B with more
and more layers, alike (one block, repeated) or unlike (each a block of its own). Tracked to E, as far as the
limits of `shardwise frontier` allow; CPU seconds of the tracking alone, in this process.

`per cell` are labels for each choice of each variable. Predicted are numbers in all tables, N K^2 of a chain
of N operators of K layouts, times weighted sums and labels per cell; `ns each` is what one took.
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
"""As in `shardwise frontier`."""

OPERATORS = (50, 150, 500, 1500, 5000)
LAYOUTS = (4, 8, 16, 32, 64)
MOST_NUMBERS = 150_000_000
"""Of all tables of a chain together, five columns each: beyond it a chain is not built (1.2 GB)."""

LAYER = 15
"""Operators of a layer of Llama; four more are outside of layers."""

MESHES = ((8,), (8, 8))

HEAD = (
    "", "operators", "layouts", "at most", "points", "proven", "weighted sums", "labels", "per cell",
    "predicted", "CPU s", "ns each",
)  # fmt: skip

Row = tuple[int, float, float]
"""Operators, layouts of an operator (the geometric mean), CPU seconds."""


def random_chain(operators: int, layouts: int, seed: int) -> Chain:
    """Operators of unequal size, their layouts from fast and large to slow and small, and conversions."""
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
    """A line for each size of a drawn chain."""
    for operators in counts:
        for layouts in LAYOUTS:
            if operators * layouts**2 * 5 > MOST_NUMBERS:
                continue
            chain = random_chain(operators, layouts, seed=0)
            yield line("", operators, [layouts], (chain,), epsilon)


def llama(layers: int, *, is_repeated: bool) -> OpGraph:
    """Llama 3.1 8B with so many layers, one block repeated, or each a block of its own."""
    graph = load_graph("graph:llama-3.1-8b")
    first, layer, head = graph.blocks
    if is_repeated:
        return replace(graph, blocks=(first, replace(layer, repeat=layers), head))
    return replace(graph, blocks=(first, *(own_block(layer, place) for place in range(layers)), head))


def own_block(layer: Block, place: int) -> Block:
    """The layer as a block with names of its own."""
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
    """A line for each mesh and for as many layers as have about so many operators."""
    cluster = load_cluster("8x8xH100-SXM")
    for is_repeated in (True, False):
        for ranks in MESHES:
            for operators in counts:
                graph = llama(operators // LAYER, is_repeated=is_repeated)
                laid = layout_chain(graph, cluster, Training(dtype="bf16"), mesh_of(cluster, ranks))
                name = f"{'x'.join(map(str, ranks))}, {'alike' if is_repeated else 'unlike'}"
                layouts = list(laid.layouts_per_operator.values())
                yield line(name, graph.operators, layouts, (laid.chain,), epsilon)


def line(
    name: str, operators: int, layouts: Sequence[int], problem_chains: Sequence[Chain], epsilon: float
) -> Row:
    """Tracks the chains and prints what it took."""
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
    """Numbers in the tables of the chains: of a chain of N operators of K layouts about N K^2, like blocks
    counted once."""
    parts = (part for chain in problem_chains for link in chain for _, part in link.modes)
    return sum(factor.costs[..., 0].size for part in parts for factor in part.factors)


def main() -> None:
    """Prints a table and the powers with which CPU seconds grow."""
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
