"""The commands `events generate` and `events convert`, and their options."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.app.cli.options import ClusterText, InterNode, IsJson
from shardwise.app.cli.output import Output

events_app = typer.Typer(
    help="Traces of what happens to a cluster over time (docs/reference/formats.md).", rich_markup_mode=None
)
OutFile = Annotated[
    str | None,
    typer.Option("--out", metavar="FILE", help="Write the trace there, not to stdout.", show_default=False),
]


@events_app.command("generate")
def events_generate(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="diurnal, bursty, flapping, preemption or slowdown.", show_default=False
        ),
    ],
    cluster: ClusterText,
    length: Annotated[str, typer.Option("--length", metavar="T", help="How long: 24h, 7d.")] = "24h",
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="The same seed, the same trace.")] = "0",
    out: OutFile = None,
    inter_node: InterNode = None,
    is_json: IsJson = False,
) -> Output:
    """Make a trace of events for a cluster, from a seed."""
    from shardwise.app.cli import eventing

    return eventing.generated(
        kind, cluster=cluster, inter_node=inter_node, length=length, seed=seed, out=out, is_json=is_json
    )


@events_app.command("convert")
def events_convert(
    file: Annotated[
        str,
        typer.Argument(
            metavar="CSV", help="Availability of devices, or links of regions.", show_default=False
        ),
    ],
    per_node: Annotated[
        str, typer.Option("--per-node", metavar="N", help="Devices of a node, where devices are counted.")
    ] = "1",
    out: OutFile = None,
    is_json: IsJson = False,
) -> Output:
    """Make a trace from a CSV of nodes that come and go, or of what lies between regions."""
    from shardwise.app.cli import eventing

    return eventing.converted(file, per_node=per_node, out=out, is_json=is_json)
