"""Time of whole frontiers of shipped operator graphs.

`python -m benchmarks.graph_frontiers [--epsilon E] [NAME ...]` searches each frontier to epsilon E (0.001; 0
is exact) on the mesh of the cluster's tiers. The column `proven` has the epsilon that was proven. CPU seconds
include the building of the chain.
"""

from __future__ import annotations

import argparse

from shardwise.cluster import load_cluster
from shardwise.cost import Training
from shardwise.graph import load_graph, scaled
from shardwise.search import GraphCurves, best_dtype

QUESTIONS = {
    "llama_64": ("llama-3.1-8b", "8x8xH100-SXM", 256, 2048),
    "vgg16_8": ("vgg16", "1x8xV100-32G", 256, None),
    "vgg16_16": ("vgg16", "2x8xV100-32G", 256, None),
    "resnet50_8": ("resnet50", "1x8xV100-32G", 256, None),
    "resnet50_16": ("resnet50", "2x8xV100-32G", 256, None),
    "wideresnet26_8": ("wideresnet26-10", "1x8xV100-32G", 256, None),
    "wideresnet26_16": ("wideresnet26-10", "2x8xV100-32G", 256, None),
    "lstm_8": ("lstm-2x2048", "1x8xV100-32G", 256, None),
    "lstm_16": ("lstm-2x2048", "2x8xV100-32G", 256, None),
    "transformer_8": ("transformer-big", "1x8xV100-32G", 256, None),
    "transformer_16": ("transformer-big", "2x8xV100-32G", 256, None),
    "gpt2_16": ("gpt2-1.5b", "2x8xV100-32G", 64, 1024),
    "mlp_16": ("mlp", "2x8xV100-32G", 8192, None),
    "mlp_8": ("mlp", "1x8xV100-32G", 8192, None),
    "two_tower_8": ("two-tower", "1x8xV100-32G", 4096, None),
    "two_tower_16": ("two-tower", "2x8xV100-32G", 4096, None),
}
"""Graph, cluster, batch size and sequence length of each question."""


def figures(name: str, epsilon: float = 0.001) -> dict[str, float]:
    """Figures of one frontier: its points, the proven epsilon, labels and CPU seconds."""
    graph, cluster_text, batch, seq_len = QUESTIONS[name]
    cluster = load_cluster(cluster_text)
    training = Training(dtype=best_dtype(cluster))
    source = GraphCurves(scaled(load_graph(f"graph:{graph}"), batch, seq_len), cluster, training, 0.05)
    curve = source.curve(cluster, epsilon=epsilon)
    return {
        "points": float(len(curve.points)),
        "proven": curve.epsilon,
        "labels": float(sum(effort.labels for effort in curve.efforts)),
        "search_cpu_s": curve.search_cpu_s,
    }


def main() -> None:
    """Prints a line per question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*QUESTIONS, []])
    parser.add_argument("--epsilon", type=float, default=0.001)
    arguments = parser.parse_args()
    print(f"{'question':<18}{'points':>8}{'proven':>10}{'labels':>10}{'CPU s':>9}")
    for name in arguments.names or QUESTIONS:
        found = figures(name, arguments.epsilon)
        text = f"{found['points']:>8,.0f}{found['proven']:>10.2%}{found['labels']:>10,.0f}"
        print(f"{name:<18}{text}{found['search_cpu_s']:>9.2f}", flush=True)


if __name__ == "__main__":
    main()
