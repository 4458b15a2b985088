"""Lists: `models`, `devices`, `graphs`, and the axes of `space`. `table` aligns rows under a header."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.app.cli.output import Line, Output, TableRow, columns
from shardwise.app.cli.words import gib
from shardwise.cluster import Device
from shardwise.cluster import devices as known_devices
from shardwise.graph import GRAPH_PREFIX, OpGraph, forward_flop, parameter_count, shipped_graphs, step_flop
from shardwise.model import Model, active_parameters, catalogue, model_from_config, parameters
from shardwise.units import format_count, format_rate

if TYPE_CHECKING:
    from shardwise_verify import PipelineCount, SpaceCount  # slow to import


VERSION = 1


def models(*, is_json: bool) -> Output:
    """The answer of `models`: the catalogue, smallest model first."""
    entries = catalogue()
    built = (model_from_config(entry.config, name=name) for name, entry in entries.items())
    found = sorted(built, key=lambda model: (parameters(model), model.name))
    if is_json:
        model_rows = [{**_model_row(model), "source": entries[model.name].source} for model in found]
        return Output(document={"schema": "shardwise.models", "version": VERSION, "models": model_rows})
    header = ("model", "family", "parameters", "active", "layers", "hidden", "heads", "kv", "vocab")
    rows = [
        (
            model.name,
            model.family,
            format_count(parameters(model)),
            format_count(active_parameters(model)),
            str(model.layers),
            f"{model.hidden:,}",
            str(model.heads),
            str(model.kv_heads),
            f"{model.vocab:,}",
        )
        for model in found
    ]
    return Output(lines=table(header, rows, left=2, spare=("family",)))


def _model_row(model: Model) -> dict[str, object]:
    return {
        "name": model.name,
        "family": model.family,
        "parameters": parameters(model),
        "active_parameters": active_parameters(model),
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "vocab": model.vocab,
        "experts": None if model.experts is None else model.experts.experts,
        "max_seq_len": model.max_seq_len,
    }


def devices(*, is_json: bool) -> Output:
    """The answer of `devices`: all devices that a shorthand can name, in the order of the catalogue."""
    found = list(known_devices().values())
    if is_json:
        rows = [_device_row(device) for device in found]
        return Output(document={"schema": "shardwise.devices", "version": VERSION, "devices": rows})
    header = ("device", "vendor", "dense 16-bit", "memory", "bandwidth", "scale-up", "between", "per node")
    table_rows = [
        (
            device.name,
            device.vendor,
            format_rate(_sixteen_bit_peak(device), "FLOP/s"),
            f"{gib(device.memory_bytes)} GiB",
            format_rate(device.memory_bytes_per_s),
            f"{device.scale_up_domain} × {format_rate(device.scale_up_bytes_per_s)}",
            format_rate(device.scale_out_bytes_per_s),
            str(device.devices_per_node),
        )
        for device in found
    ]
    return Output(lines=table(header, table_rows, left=2, spare=("vendor",)))


def _sixteen_bit_peak(device: Device) -> float:
    """The dense matmul peak (FLOP/s) of the best 16-bit type, or of fp32."""
    peaks = device.peak_flop_per_s
    return next((peaks[dtype] for dtype in ("bf16", "fp16", "fp32") if dtype in peaks), 0.0)


def _device_row(device: Device) -> dict[str, object]:
    return {
        "name": device.name,
        "vendor": device.vendor,
        "peak_flop_per_s": dict(device.peak_flop_per_s),
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "devices_per_node": device.devices_per_node,
        "scale_up_name": device.scale_up_name,
        "scale_up_domain": device.scale_up_domain,
        "scale_up_bytes_per_s": device.scale_up_bytes_per_s,
        "scale_out_name": device.scale_out_name,
        "scale_out_bytes_per_s": device.scale_out_bytes_per_s,
        "host_link_bytes_per_s": device.host_link_bytes_per_s,
        "price_usd_per_hour": device.price_usd_per_hour,
        "sources": dict(device.sources),
    }


def space(name: str, size: SpaceCount, *, model: str, devices: int, batch: int) -> list[Line]:
    """Every axis of a space with its values, and the number of candidates."""
    lines: list[Line] = [
        ((f"the space '{name}' of {model} on {devices:,} devices, global batch {batch:,}", "title"),),
        (),
    ]
    for axis, values in size.axes.items():
        texts = textwrap.wrap(" ".join(values), columns() - 22, break_on_hyphens=False) or ["-"]
        lines += [
            ((f"{axis if index == 0 else '':<22}", "label"), (text, "")) for index, text in enumerate(texts)
        ]
        noted = textwrap.wrap(size.notes[axis], columns() - 22)
        lines += [((f"{'':<22}{text}", "dim"),) for text in noted]
    lines += [(), (("candidates, counted exactly  ", "label"), (f"{size.count:,}", "value"))]
    return lines


def pipelines(size: PipelineCount) -> list[Line]:
    """Every axis of uneven plans with its values, and the number of pipelines."""
    lines: list[Line] = [
        (),
        (("uneven plans, which `plan` searches too (docs/concepts/mixed-clusters.md)", "title"),),
        (),
    ]
    for axis, values in size.axes.items():
        for index, text in enumerate(textwrap.wrap(" ".join(values), columns() - 22, break_on_hyphens=False)):
            lines.append(((f"{axis if index == 0 else '':<22}", "label"), (text, "")))
    counted = (("pipelines, counted exactly  ", "label"), (f"{size.count:,}", "value"))
    note = "a plan is a set of pipelines that share the batch; sets are not counted"
    return [*lines, (), counted, ((note, "dim"),)]


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: int,
    spare: Sequence[str] = (),
    has_total: bool = False,
) -> list[Line]:
    """Rows under a header; the first `left` columns are aligned left, the others right. Where the terminal
    is too narrow, columns are left out and named: first those of `spare`, then from the right. If it
    `has_total`, the last row stands out."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    shown = list(range(len(header)))
    order = [*(header.index(name) for name in spare), *range(len(header) - 1, 0, -1)]
    while sum(widths[column] + 1 for column in shown) - 1 > columns():
        column = next(column for column in order if column in shown)
        shown.remove(column)

    def aligned(row: Sequence[str]) -> str:
        cells = (
            f"{row[column]:<{widths[column]}}" if column < left else f"{row[column]:>{widths[column]}}"
            for column in shown
        )
        return "  ".join(cells).rstrip()

    styles = [*([""] * (len(rows) - 1)), "value" if has_total else ""] if rows else []
    lines: list[Line] = [TableRow([(aligned(header), "label")])]
    lines += [TableRow([(aligned(row), style)]) for row, style in zip(rows, styles, strict=True)]
    left_out = [name.strip() for column, name in enumerate(header) if column not in shown]
    if left_out:
        lines.append(((f" not in {columns()} columns: {', '.join(left_out)}", "dim"),))
    return lines


def graphs(*, is_json: bool) -> Output:
    """The answer of `graphs`: the shipped graphs at the batch and sequence length of their files, smallest
    first."""
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
