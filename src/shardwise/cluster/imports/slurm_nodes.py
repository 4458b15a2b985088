"""Nodes of Slurm: `scontrol show nodes --json` and `sinfo --json`, of the data parsers 0.0.37 to 0.0.46."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from shardwise.cluster.imports.facts import FileFacts, NodeFacts, name_of
from shardwise.cluster.imports.hostlist import expanded
from shardwise.errors import ConfigError
from shardwise.inputs import Fields

_GPU = re.compile(r"gpu(?::(?P<type>[^:(]+))?:(?P<count>\d{1,6})(?:\(.*)?")
_SLICE = re.compile(r"\d+g\.\d+gb", re.IGNORECASE)
"""The name of a slice of a device (MIG)."""

ABSENT_STATES = frozenset({
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "FUTURE", "NOT_RESPONDING", "INVALID_REG",
    "ERROR",
})  # fmt: skip
"""States of nodes on which no job can start."""

MIB = float(2**20)


def is_slurm_nodes(document: Mapping[str, object]) -> bool:
    """Whether a JSON document has nodes of Slurm."""
    return "sinfo" in document or ("nodes" in document and isinstance(document.get("meta"), Mapping))


def read_slurm_nodes(document: Mapping[str, object], file: str) -> FileFacts:
    """The nodes with their generic resources, memory, switches and states."""
    fields = Fields(document, file=file)
    command = "sinfo --json" if fields.has("sinfo") else "scontrol show nodes --json"
    entries = _sinfo_nodes(fields) if fields.has("sinfo") else _nodes(fields)
    found: dict[str, NodeFacts] = {}
    for node in entries:
        found.setdefault(node.name, node)  # a node of several partitions is listed for each
    if not found:
        raise fields.error("sinfo" if fields.has("sinfo") else "nodes", "has no nodes", allowed="1 or more")
    version = _version(document)
    return FileFacts(
        file=file,
        kind=f"{command}{f' ({version})' if version else ''}",
        nodes=tuple(found.values()),
        lists_nodes=True,
    )


def _version(document: Mapping[str, Any]) -> str | None:
    """The data parser, which `meta.plugin` or `meta.plugins` names."""
    match = re.search(r"v0\.0\.\d{1,3}", str(document.get("meta", ""))[:10_000])
    return match.group() if match else None


def _nodes(fields: Fields) -> Iterator[NodeFacts]:
    for item in fields.mappings("nodes", high=100_000):
        device, devices, absent = _gpus(item, str(item.any("gres", default="") or ""), "gres")
        topology = str(item.any("topology", default="") or "")
        yield NodeFacts(
            name=name_of(item, "name"),
            device=device,
            devices=devices,
            host_memory_bytes=_memory(item, "real_memory"),
            switches=_switches(topology),
            absent=absent or _absent(_words(item.any("state", default=()))),
        )


def _sinfo_nodes(fields: Fields) -> Iterator[NodeFacts]:
    for item in fields.mappings("sinfo", high=100_000):
        listed = item.mapping("nodes").sequence("nodes", high=100_000)
        gres = str(item.mapping("gres", default={}).any("total", default="") or "")
        device, devices, absent = _gpus(item, gres, "gres.total")
        memory = item.mapping("memory", default={})
        host = _memory(memory, "minimum") if memory.has("minimum") else None
        state = _words(item.mapping("node", default={}).any("state", default=()))
        for text in listed:
            try:
                names = expanded(str(text))
            except ConfigError as error:
                raise item.error("nodes.nodes", error.message, found=error.found) from None
            for name in names:
                yield NodeFacts(
                    name=name, device=device, devices=devices, host_memory_bytes=host,
                    absent=absent or _absent(state),
                )  # fmt: skip


def _gpus(item: Fields, gres: str, key: str) -> tuple[str | None, int, str | None]:
    """The text that names the devices, their number, and why they cannot be used."""
    kinds: dict[str | None, int] = {}
    for entry in re.split(r",(?![^(]*\))", gres):
        if not re.match(r"gpu\b", entry.strip()):
            continue
        match = _GPU.fullmatch(entry.strip())
        if match is None:
            if entry.strip() in ("gpu", "gpu(null)"):
                continue
            raise item.error(key, "is not a list of resources", found=repr(entry[:60]), allowed="gpu:h100:8")
        kinds[match["type"]] = kinds.get(match["type"], 0) + int(match["count"])
    if len(kinds) > 1:
        return None, sum(kinds.values()), "devices of several kinds"
    for kind, count in kinds.items():
        return kind, count, "slices of devices (MIG)" if _SLICE.search(kind or "") else None
    return None, 0, None


def _memory(item: Fields, key: str) -> float | None:
    """Memory in bytes: MiB as a number, or as `{set, infinite, number}`; None where it is not set."""
    value = item.any(key, default=None)
    if isinstance(value, Mapping):
        number = item.mapping(key)
        value = number.any("number", default=None) if number.any("set", default=True) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1 < value < 1e10:
        return None  # 1 MiB is the default of nodes whose memory is not configured
    return value * MIB


def _switches(topology: str) -> tuple[str, ...]:
    """The switches of `topology-name:root:leaf`, the nearest first."""
    names = topology.split(",")[0].split(":")[1:]
    return tuple(reversed([name for name in names if name]))


def _words(state: object) -> list[str]:
    listed: Iterable[object] = [state] if isinstance(state, str) else state if isinstance(state, list) else ()
    return [word for item in listed for word in re.findall(r"[A-Z_]+", str(item).upper())]


def _absent(state: list[str]) -> str | None:
    return next((word for word in state if word in ABSENT_STATES), None)
