"""The command `cluster import`: the file of a cluster, from files of other software."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from shardwise import api
from shardwise.app.cli.output import LABEL, Line, Output, columns, row
from shardwise.app.cli.words import counted
from shardwise.cluster import node_runs
from shardwise.inputs import printable
from shardwise.plans import check_output_path, write_file
from shardwise.questions import ImportedCluster
from shardwise.units import format_rate


def imported(
    files: Sequence[str], *, out: str | None, device: str | None, name: str | None, is_json: bool
) -> Output:
    """The answer of `cluster import`; the cluster goes to the file `out`, or to stdout where that is None."""
    if out is not None:
        check_output_path("--out", out, inputs=tuple(files))
    found = api.import_cluster(files, device=device, name=name)
    content = found.written(out or "cluster.yaml")
    if out is not None:
        write_file(out, content.encode())
    notes = [] if out is None else [f"wrote {printable(out)}"]
    if is_json:
        document = {
            "schema": "shardwise.cluster-import", "version": 1, "devices": found.cluster.devices,
            "cluster": found.document,
        }  # fmt: skip
        return Output(document=document, notes=notes)
    if out is None:
        return Output(lines=[((line, ""),) for line in content.splitlines()], is_verbatim=True)
    return Output(lines=list(_card(found)), notes=notes)


def _card(found: ImportedCluster) -> Iterator[Line]:
    cluster = found.cluster
    nodes = [f"{count} × {node.devices} {node.device_class}" for node, count in node_runs(cluster.nodes)]
    shown = ", ".join(nodes[:6]) + (", ..." if len(nodes) > 6 else "")
    yield row("cluster", (counted(cluster.devices, "device"), "value"), (f"   {shown}", ""))
    for place, tier in enumerate(cluster.tiers):
        rate = f"{format_rate(tier.bytes_per_s)} per device within {counted(tier.span, 'device')}"
        yield row("" if place else "tiers", (f"{printable(tier.name)}: {rate}", ""))
    for key, label in (("files", "read"), ("defaults", "defaults"), ("left_out", "left out")):
        lines = [
            part
            for line in found.provenance.get(key, ())
            for part in textwrap.wrap(printable(line), columns() - LABEL - 1, subsequent_indent="  ")
        ]
        for place, line in enumerate(lines):
            yield row("" if place else label, (line, "warn" if key == "defaults" else ""))
