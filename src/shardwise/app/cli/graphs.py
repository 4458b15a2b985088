"""The list of shipped operator graphs."""

from __future__ import annotations

from shardwise.app.cli.output import Output
from shardwise.app.cli.tables import VERSION, table
from shardwise.graph import GRAPH_PREFIX, OpGraph, forward_flop, parameter_count, shipped_graphs, step_flop
from shardwise.units import format_count


def graphs(*, is_json: bool) -> Output:
    """The shipped graphs at the batch and sequence length of their files, that of fewest parameters first."""
    found = sorted(shipped_graphs().values(), key=lambda graph: (parameter_count(graph), graph.name))
    if is_json:
        rows = [_row(graph) for graph in found]
        return Output(document={"schema": "shardwise.graphs", "version": VERSION, "graphs": rows})
    header = ("graph", "operators", "blocks", "parameters", "batch", "seq", "FLOP per step")
    table_rows = [
        (
            GRAPH_PREFIX + graph.name,
            str(graph.operators),
            str(sum(block.repeat for block in graph.blocks)),
            format_count(parameter_count(graph)),
            f"{graph.batch:,}",
            "-" if graph.seq_len is None else f"{graph.seq_len:,}",
            f"{step_flop(graph):.3e}",
        )
        for graph in found
    ]
    return Output(lines=table(header, table_rows, left=1))


def _row(graph: OpGraph) -> dict[str, object]:
    return {
        "name": GRAPH_PREFIX + graph.name,
        "operators": graph.operators,
        "blocks": [
            {"name": block.name, "operators": len(block.operators), "repeat": block.repeat}
            for block in graph.blocks
        ],
        "parameters": parameter_count(graph),
        "batch": graph.batch,
        "seq_len": graph.seq_len,
        "forward_flop": forward_flop(graph),
        "step_flop": step_flop(graph),
        "source": graph.source,
    }
