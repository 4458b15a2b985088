"""The command `capture`: writes a user's PyTorch module as a graph file."""

from __future__ import annotations

import json

from shardwise.app.cli.output import Line, Output, print_notes
from shardwise.app.cli.tables import table
from shardwise.errors import ConfigError
from shardwise.graph import GRAPH_FILES, OpGraph, forward_flop, graph_text, parameter_count, step_flop
from shardwise.inputs import parse_mapping, printable, short_repr
from shardwise.plans import check_output_path, write_file
from shardwise.units import format_count


def captured(target: str, out: str, *, batch: int | None) -> Output:
    """Runs the function in `target` (`FILE.py:function`) and writes the operator graph of its module to
    `out`."""
    path, colon, function = target.rpartition(":")
    if not colon or not path or not function.isidentifier():
        raise ConfigError(
            "is not FILE.py:function",
            key="FILE.py:function",
            found=short_repr(target),
            allowed="train.py:build",
        )
    if not out.lower().endswith(GRAPH_FILES):
        raise ConfigError(
            "is not the name of a graph file",
            key="--out",
            found=short_repr(out),
            allowed=f"a name that ends in {', '.join(GRAPH_FILES)}",
        )
    check_output_path("--out", out, inputs=(path,))
    from shardwise.runtime import capture  # imports torch

    print_notes([f"shardwise: running your code in {printable(path)}"])
    graph = capture(path, function, batch=batch)
    text = graph_text(graph)
    document = parse_mapping(text, file=out if out.endswith(".yaml") else None)
    if out.lower().endswith(".json"):
        text = json.dumps(document, indent=1) + "\n"
    write_file(out, text.encode())
    return Output(lines=_lines(graph), notes=[f"wrote {printable(out)}"])


def _lines(graph: OpGraph) -> list[Line]:
    head = f" {graph.name}: {format_count(parameter_count(graph))} parameters, {graph.operators:,} operators"
    sizes = f" batch {graph.batch:,}" + (f", sequence {graph.seq_len:,}" if graph.seq_len else "")
    flop = f"forward {forward_flop(graph):.3e}, step {step_flop(graph):.3e} FLOP"
    rows = [(f" {block.name}", str(len(block.operators)), f"{block.repeat:,}") for block in graph.blocks]
    return [
        ((head, "title"),),
        ((f"{sizes} · {flop}", "dim"),),
        *table((" block", "operators", "times"), rows, left=1),
    ]
