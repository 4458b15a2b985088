"""Trade-off of time and memory in the shipped operator graphs, and its bend by the bandwidth between nodes.

`python -m benchmarks.graph_trade FILE.json [NAME ...]` searches frontiers at 0.25, 1 and 4 times the default
bandwidth. It takes the named graphs, or all graphs that are not in FILE. It saves the frontiers in FILE and
prints the tables of docs/concepts/frontier.md. `--draw PICTURE.svg` draws the frontiers of FILE.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.graph_trade_picture import draw

from shardwise.cluster import load_cluster
from shardwise.cost import Training
from shardwise.graph import load_graph, scaled
from shardwise.search import GraphCurves, best_dtype
from shardwise.ties import ROUNDING, first_largest

BANDWIDTHS = (0.25, 1.0, 4.0)
"""Bandwidths of network cards relative to the default."""

SLOWER = (0.01, 0.05, 0.10)

QUESTIONS = {
    "vgg16": ("8x1xV100-32G", 256, None),
    "resnet50": ("8x1xV100-32G", 256, None),
    "wideresnet26-10": ("8x1xV100-32G", 256, None),
    "lstm-2x2048": ("8x1xV100-32G", 256, None),
    "transformer-big": ("8x1xV100-32G", 256, None),
    "gpt2-1.5b": ("8x1xV100-32G", 32, 1024),
    "llama-3.1-8b": ("8x8xH100-SXM", 256, 2048),
    "mlp": ("8x1xV100-32G", 8192, None),
    "two-tower": ("8x1xV100-32G", 4096, None),
}
"""Cluster, batch size and sequence length of each graph. With nodes of one device, all communication goes
over the network between nodes, and the mesh has one axis."""

Curve = dict[str, Any]
"""`points` (seconds, bytes), `bend` (its index or None), proven `epsilon`, `cpu_s`, `references` by name."""


def bend_of(points: Sequence[tuple[float, float]]) -> int | None:
    """Index of the point farthest below the chord from the first to the last, as logarithms scaled so that
    these two are at (0, 1) and (1, 0); None where no point is below it."""
    if len(points) < 3:
        return None
    logs = np.log(np.asarray(points))
    below = 1.0 - ((logs - logs.min(axis=0)) / np.ptp(logs, axis=0)).sum(axis=1)
    place = int(first_largest(below))
    return place if below[place] > ROUNDING else None


def curve_of(name: str, bandwidth: float, epsilon: float) -> Curve:
    """The frontier of a question with `bandwidth` times the default bandwidth of network cards."""
    cluster_text, batch, seq_len = QUESTIONS[name]
    default_cluster = load_cluster(cluster_text)
    rate = default_cluster.nodes[0].nic_bytes_per_s * 8e-9 * bandwidth
    cluster = load_cluster(cluster_text, inter_node=f"{rate:.12g}Gb/s")
    training = Training(dtype=best_dtype(cluster))
    source = GraphCurves(scaled(load_graph(f"graph:{name}"), batch, seq_len), cluster, training, 0.05)
    curve = source.curve(cluster, epsilon=epsilon)
    points = [(point.time_s, point.memory_bytes) for point in curve.points]
    return {
        "points": points,
        "bend": bend_of(points),
        "epsilon": curve.epsilon,
        "cpu_s": curve.search_cpu_s,
        "gigabits": rate,
        "references": {
            reference.name: (reference.point.time_s, reference.point.memory_bytes, reference.fits)
            for reference in source.references(cluster)
        },
    }


def saved(curve: Curve, slower: float) -> float:
    """The largest share of the fastest point's memory that points save which are at most the share `slower`
    slower."""
    fastest_s, its_bytes = curve["points"][0]
    least = min(nbytes for time_s, nbytes in curve["points"] if time_s <= fastest_s * (1.0 + slower))
    return 1.0 - float(least / its_bytes)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table of a page."""
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")


def memory_row(name: str, curve: Curve) -> list[str]:
    """A row of the memory that slower points save at the default bandwidth."""
    (fastest_s, its_bytes), (smallest_s, least) = curve["points"][0], curve["points"][-1]
    reference_texts = ", ".join(
        f"{custom} {time_s / fastest_s:.3g} x the time, {nbytes / 2**30:.1f} GiB"
        + ("" if fits else " (does not fit)")
        for custom, (time_s, nbytes, fits) in curve["references"].items()
    )
    return [
        title(name), str(len(curve["points"])), f"{curve['epsilon']:.2%}", f"{fastest_s * 1e3:.4g} ms",
        f"{its_bytes / 2**30:.2f} GiB", *(f"{saved(curve, slower):.0%}" for slower in SLOWER),
        f"{1.0 - least / its_bytes:.0%} ({smallest_s / fastest_s - 1.0:+.0%})", reference_texts or "-",
    ]  # fmt: skip


def bend_row(name: str, curves: Mapping[str, Curve]) -> list[str]:
    """A row of the fastest point and the bend at each bandwidth."""
    cells = []
    for bandwidth in BANDWIDTHS:
        curve = curves[str(bandwidth)]
        (fastest_s, its_bytes) = curve["points"][0]
        cell = f"{fastest_s * 1e3:.4g} ms, {its_bytes / 2**30:.2f} GiB"
        if curve["bend"] is not None:
            time_s, nbytes = curve["points"][curve["bend"]]
            cell += f"; {time_s / fastest_s - 1.0:+.1%}, {nbytes / its_bytes - 1.0:+.0%}"
        cells.append(cell)
    return [title(name), *cells]


def title(name: str) -> str:
    """A short label of a question."""
    cluster, batch, seq_len = QUESTIONS[name]
    return f"{name}, {cluster}, batch {batch:,}{f' x {seq_len:,}' if seq_len else ''}"


def main() -> None:
    """Searches the requested frontiers, then prints those of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="*", choices=[*QUESTIONS, []])
    parser.add_argument("--epsilon", type=float, default=0.001)
    parser.add_argument("--draw", metavar="PICTURE")
    arguments = parser.parse_args()
    stored: dict[str, dict[str, Curve]] = (
        json.loads(arguments.file.read_text()) if arguments.file.exists() else {}
    )
    for name in arguments.names or [name for name in QUESTIONS if name not in stored]:
        stored[name] = {str(each): curve_of(name, each, arguments.epsilon) for each in BANDWIDTHS}
        arguments.file.write_text(json.dumps(stored))
    found = {name: stored[name] for name in QUESTIONS if name in stored}
    table(
        ("graph, devices", "points", "proven", "fastest", "its memory",
         *(f"{slower:.0%} slower" for slower in SLOWER),
         "smallest", "references relative to the fastest"),
        [memory_row(name, curves["1.0"]) for name, curves in found.items()],
    )  # fmt: skip
    print()
    table(
        ("graph, devices", *(f"bandwidth x {bandwidth:g}" for bandwidth in BANDWIDTHS)),
        [bend_row(name, curves) for name, curves in found.items()],
    )
    if arguments.draw:
        draw(arguments.draw, {title(name): curves for name, curves in found.items()})


if __name__ == "__main__":
    main()
