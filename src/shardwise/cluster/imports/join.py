"""Joins what several files say about one cluster: nodes, their devices, network cards and groups.

The result is the content of a cluster file. Its section `provenance` says which file each part is from, which
default was taken where no file says anything, and what is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import gcd
from typing import Any

from shardwise.cluster.catalogue import architecture_of, devices_like
from shardwise.cluster.device import Device
from shardwise.cluster.imports.facts import FileFacts, InsideFacts, NodeFacts
from shardwise.cluster.imports.hostlist import folded
from shardwise.cluster.load import default_node
from shardwise.cluster.tiers import scale_up_span
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.units import format_bytes, format_rate, format_seconds

Resolve = Callable[[str], tuple[Device, Sequence[str]]]
"""The device that a text names, and what was assumed. ConfigError where it names none."""

MAX_LINE = 400
"""Longest line of `provenance`, characters."""

LEVELS = ("leaf", "spine", "core")
"""Names of the tiers of network switches, the nearest first."""

NVLINK_BYTES_PER_S: Mapping[str, float] = {
    "volta": 25e9, "ampere": 25e9, "hopper": 25e9, "blackwell": 50e9, "blackwell-ultra": 50e9,
}  # fmt: skip
"""Bandwidth of one NVLink per direction, by architecture (NVIDIA data sheets: 300, 600, 900 and 1800 GB/s in
both directions over 6, 12, 18 and 18 links)."""

PCIE_BYTES_PER_S: Mapping[int, float] = {3: 12.5e9, 4: 25e9, 5: 53e9}
"""Bandwidth of pinned copies over PCIe of width 16 per direction, by generation, as in the catalogue."""

SAME_MEMORY = 0.04
"""Largest relative difference of the memory that nvidia-smi reports and that of the catalogue, which leaves
out what the driver keeps."""


@dataclass(slots=True, kw_only=True)
class Provenance:
    """What each part of a cluster is from, which defaults were taken, and what is left out."""

    given: dict[str, str] = field(default_factory=dict)
    defaults: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def record(self, files: Sequence[FileFacts]) -> dict[str, object]:
        read = [f"{printable(one.file)}: {one.kind}" for one in files]
        notes = [f"{printable(one.file)}: {note}" for one in files for note in one.notes]
        parts: dict[str, object] = {
            "files": _short(read),
            "given": {key: _short([text])[0] for key, text in self.given.items()},
            "defaults": _short(self.defaults),
            "left_out": _short([*self.left_out, *notes]),
        }
        return {key: part for key, part in parts.items() if part}


def _short(lines: Iterable[str]) -> list[str]:
    texts = [printable(line) if len(line) <= 200 or not line.isprintable() else line for line in lines]
    return [text if len(text) <= MAX_LINE else text[: MAX_LINE - 3] + "..." for text in texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """A node of the cluster with its device; `groups` are the groups of each level, the innermost first."""

    name: str
    device: Device
    devices: int
    host_memory_bytes: float | None
    switches: tuple[str, ...]
    domain: str | None
    inside: InsideFacts | None
    groups: tuple[str, ...] = ()


def joined_cluster(
    files: Sequence[FileFacts], *, resolve: Resolve, device: str | None = None, name: str | None = None
) -> dict[str, Any]:
    """The content of a cluster file with what `files` say.

    `device` names the devices of all nodes, whatever the files say. Raises ConfigError where files contradict
    each other, and where none names the devices.
    """
    known = Provenance()
    inside = _inside_facts(files, known)
    nodes = _merged_nodes(files, inside, known)
    placed = _with_devices(nodes, inside, resolve, device, known)
    placed, tiers = _grouped(placed, any(one.has_blocks for one in files), known)
    classes = _classes(placed, resolve, known)
    document: dict[str, Any] = {"name": printable(name or "imported cluster")}
    if classes:
        document["classes"] = classes
    document["nodes"] = _node_entries(placed, files, known)
    if tiers:
        document["tiers"] = tiers
    return {**document, "provenance": known.record(files)}


# Nodes
def _inside_facts(files: Sequence[FileFacts], known: Provenance) -> list[InsideFacts]:
    """The facts about the inside of nodes, one record per kind of device. Files that do not name the devices
    (topology) describe the nodes of the others."""
    named: dict[str, InsideFacts] = {}
    unnamed: list[tuple[str, InsideFacts]] = []
    for one in files:
        if one.inside is None:
            continue
        if one.inside.device is None:
            unnamed.append((one.file, one.inside))
        else:
            before = named.get(one.inside.device)
            named[one.inside.device] = _merged_inside(before, one.inside, one.file)
    if len(named) > 1 and unnamed:
        raise ConfigError(
            "does not say which devices it describes", file=printable(unnamed[0][0]),
            found=f"files of {', '.join(map(printable, named))}", allowed="files of one kind of node",
        )  # fmt: skip
    if not unnamed:
        return list(named.values())
    merged = next(iter(named.values()), None)
    for file, facts in unnamed:
        merged = _merged_inside(merged, facts, file)
    return [] if merged is None else [merged]


def _merged_inside(before: InsideFacts | None, facts: InsideFacts, file: str) -> InsideFacts:
    if before is None:
        return facts
    if before.devices != facts.devices:
        raise ConfigError(
            "has another number of devices than the other files", file=printable(file),
            found=str(facts.devices), allowed=str(before.devices),
        )  # fmt: skip
    values = {
        name: getattr(facts, name) if getattr(before, name) is None else getattr(before, name)
        for name in ("device", "memory_bytes", "power_w", "pcie", "nics", "nic_bytes_per_s", "nvlinks")
    }
    return replace(before, **values)


def _merged_nodes(
    files: Sequence[FileFacts], inside: Sequence[InsideFacts], known: Provenance
) -> list[NodeFacts]:
    """Each node once, with what all files say; the nodes of the file that lists them, where one does."""
    found: dict[str, NodeFacts] = {}
    listed: set[str] = set()
    for one in files:
        listed |= {node.name for node in one.nodes} if one.lists_nodes else set()
        for node in one.nodes:
            found[node.name] = _merged_node(found.get(node.name), node, one.file)
    _name_sources(files, known)
    if listed and (others := [name for name in found if name not in listed]):
        known.left_out.append(f"{_named(others)}: not in the list of nodes")
    absent: dict[str, list[str]] = {}
    usable: list[NodeFacts] = []
    for node in found.values():
        if listed and node.name not in listed:
            continue
        why = node.absent or ("no devices" if node.devices == 0 else None)
        if why is None:
            usable.append(node)
        else:
            absent.setdefault(why, []).append(node.name)
    known.left_out += [f"{_named(names)}: {why}" for why, names in absent.items()]
    if found and not usable:
        raise ConfigError("has no node that can be used", key="FILE", found="; ".join(known.left_out)[:200])
    if not found:
        if not inside:
            raise ConfigError("names no nodes and no devices", key="FILE", allowed="1 node or more")
        known.defaults.append("1 node: no file lists nodes")
        return [NodeFacts(name="node")]
    return usable


def _named(names: Sequence[str]) -> str:
    counted = f"{len(names)} node{'s' if len(names) > 1 else ''} "
    return counted + printable(folded(names))


def _name_sources(files: Sequence[FileFacts], known: Provenance) -> None:
    def of(has: Callable[[FileFacts], object]) -> str:
        return ", ".join(printable(one.file) for one in files if has(one))

    listing = of(lambda one: one.lists_nodes) or of(lambda one: one.nodes)
    devices = of(lambda one: (one.inside and one.inside.device) or any(node.device for node in one.nodes))
    for key, text in (
        ("nodes", listing),
        ("devices", devices),
        ("network cards", of(lambda one: one.inside and one.inside.nics)),
        ("links inside nodes", of(lambda one: one.inside and one.inside.nvlinks)),
        ("host memory", of(lambda one: any(node.host_memory_bytes for node in one.nodes))),
        ("switches", of(lambda one: any(node.switches for node in one.nodes))),
        ("scale-up domains", of(lambda one: any(node.domain for node in one.nodes))),
    ):
        if text:
            known.given[key] = text


def _merged_node(before: NodeFacts | None, node: NodeFacts, file: str) -> NodeFacts:
    if before is None:
        return node
    if None not in (before.devices, node.devices) and before.devices != node.devices:
        raise ConfigError(
            f"has another number of devices of node {printable(node.name)!r} than the other files",
            file=printable(file), found=str(node.devices), allowed=str(before.devices),
        )  # fmt: skip
    return NodeFacts(
        name=node.name,
        device=_longer(before.device, node.device),
        devices=before.devices if node.devices is None else node.devices,
        host_memory_bytes=before.host_memory_bytes or node.host_memory_bytes,
        switches=before.switches or node.switches,
        domain=before.domain or node.domain,
        absent=before.absent or node.absent,
    )


def _longer(one: str | None, other: str | None) -> str | None:
    """The text that says more: `NVIDIA H100 80GB HBM3` rather than `h100`."""
    return max(filter(None, (one, other)), key=len, default=None)


# Devices
def _with_devices(
    nodes: Sequence[NodeFacts],
    inside: Sequence[InsideFacts],
    resolve: Resolve,
    device: str | None,
    known: Provenance,
) -> list[_Placed]:
    resolved: dict[str, Device] = {}

    def device_of(text: str) -> Device:
        if text not in resolved:
            resolved[text], assumed = resolve(text)
            known.defaults += assumed
        return resolved[text]

    kinds = [(facts, device_of(text)) for facts in inside if (text := device or facts.device)]
    if device is not None:
        known.given["devices"] = "--device"
    placed = []
    for node in nodes:
        text = device or node.device
        facts, own = _kind_of(node, text, kinds, device_of)
        if own is None and len(inside) == 1 and inside[0].device is None and text is not None:
            facts, own = inside[0], device_of(text)
        if own is None:
            own = device_of(text or _no_device(node))
        count = node.devices or (facts.devices if facts else None)
        if count is None:
            count = own.devices_per_node
            _default(known, f"{count} {own.name} per node")
        placed.append(
            _Placed(
                name=node.name, device=own, devices=count, host_memory_bytes=node.host_memory_bytes,
                switches=node.switches, domain=node.domain,
                inside=facts if facts is not None and facts.devices == count else None,
            )
        )  # fmt: skip
    _check_used(inside, placed)
    return placed


def _kind_of(
    node: NodeFacts,
    text: str | None,
    kinds: Sequence[tuple[InsideFacts, Device]],
    device_of: Callable[[str], Device],
) -> tuple[InsideFacts | None, Device | None]:
    """The facts about the inside of nodes that hold for this one, and its device by them."""
    if text is None:
        if len(kinds) > 1:
            raise ConfigError(
                f"describes several kinds of nodes, and {printable(node.name)!r} may be each", key="FILE",
                found=", ".join(device.name for _, device in kinds), allowed="a file that names its devices",
            )  # fmt: skip
        return kinds[0] if kinds else (None, None)
    fitting = [kind for kind in kinds if kind[1].name in devices_like(text)]
    if not fitting and kinds and not devices_like(text):
        try:
            name = device_of(text).name
        except ConfigError:
            return kinds[0] if len(kinds) == 1 else (None, None)  # a name of the site, such as gpu:big:8
        fitting = [kind for kind in kinds if kind[1].name == name]
    return fitting[0] if fitting else (None, None)


def _no_device(node: NodeFacts) -> str:
    raise ConfigError(
        f"does not name the devices of node {printable(node.name)!r}", key="FILE",
        allowed="output of nvidia-smi -q -x of a node, or --device H100-SXM",
    )  # fmt: skip


def _check_used(inside: Sequence[InsideFacts], placed: Sequence[_Placed]) -> None:
    for facts in inside:
        if not any(node.inside is facts for node in placed):
            kinds = Counter(f"{node.devices} {node.device.name}" for node in placed)
            what = f"{facts.devices} {printable(facts.device or 'devices')}"
            raise ConfigError(
                "describes the inside of a node that no file lists", key="FILE", found=what,
                allowed=", ".join(kinds),
            )  # fmt: skip


def _default(known: Provenance, line: str) -> None:
    if line not in known.defaults:
        known.defaults.append(line)


# Groups
def _grouped(
    placed: Sequence[_Placed], has_blocks: bool, known: Provenance
) -> tuple[list[_Placed], list[dict[str, object]]]:
    """The nodes in the order of their groups, and the tiers, none where they are the default."""
    if has_blocks and any(node.device.scale_up_domain > node.device.devices_per_node for node in placed):
        placed = [
            replace(node, domain=node.domain or node.switches[0], switches=())
            if node.switches and node.device.scale_up_domain > node.device.devices_per_node
            else node
            for node in placed
        ]
        known.given["scale-up domains"] = known.given.pop("switches", "blocks of Slurm")
    has_domains = any(node.domain for node in placed)
    if not has_domains and not any(node.switches for node in placed):
        return list(placed), []
    placed = _trimmed(placed, known) if has_domains else list(placed)
    placed = _leveled(placed, has_domains, known)
    ranks: list[dict[str, int]] = []
    for level in range(len(placed[0].groups)):
        ranks.append({})
        for node in placed:
            ranks[-1].setdefault(node.groups[level], len(ranks[-1]))
    ordered = sorted(
        placed, key=lambda node: [ranks[level][node.groups[level]] for level in reversed(range(len(ranks)))]
    )
    return ordered, _tiers(ordered, has_domains, known)


def _trimmed(placed: Sequence[_Placed], known: Provenance) -> list[_Placed]:
    """The nodes of scale-up domains that all have the same number of nodes: the number that keeps most."""
    sizes = Counter(node.domain for node in placed if node.domain)
    size = max(sizes.values(), key=lambda each: (each * sum(n >= each for n in sizes.values()), each))
    used: Counter[str | None] = Counter()
    usable: list[_Placed] = []
    dropped: list[_Placed] = []
    for node in placed:
        used[node.domain] += 1
        is_used = node.domain is not None and sizes[node.domain] >= size and used[node.domain] <= size
        (usable if is_used else dropped).append(node)
    if dropped:
        names = _named([node.name for node in dropped])
        known.left_out.append(f"{names}: every scale-up domain is used with {size} nodes")
    return usable


def _leveled(placed: Sequence[_Placed], has_domains: bool, known: Provenance) -> list[_Placed]:
    """The nodes with their groups by level: the scale-up domain, then the switches from the nearest on."""
    depth = max(len(node.switches) for node in placed)
    missing = [node.name for node in placed if depth and not node.switches]
    if missing:
        _default(known, f"{_named(missing)}: a switch of their own, since no file says where they are")
    # A node nearer to the root has its switch at all levels below.
    paths = [
        (*[node.switches[0]] * (depth - len(node.switches)), *node.switches)
        if node.switches
        else ("no switch",) * depth
        for node in placed
    ]
    paths = [tuple("/".join(reversed(path[level:])) for level in range(depth)) for path in paths]
    if has_domains:
        first = 0
        while first < depth and _crosses(placed, [path[first] for path in paths]):
            first += 1
        if first:
            known.left_out.append(f"{first} levels of switches: they cross scale-up domains")
        paths = [(str(node.domain), *path[first:]) for node, path in zip(placed, paths, strict=True)]
    return [replace(node, groups=path) for node, path in zip(placed, paths, strict=True)]


def _crosses(placed: Sequence[_Placed], groups: Sequence[str]) -> bool:
    of: dict[str | None, str] = {}
    return any(of.setdefault(node.domain, group) != group for node, group in zip(placed, groups, strict=True))


def _tiers(ordered: Sequence[_Placed], has_domains: bool, known: Provenance) -> list[dict[str, object]]:
    """The tiers of a cluster file: inside nodes or domains, then one per level of equal groups."""
    devices = sum(node.devices for node in ordered)
    largest = max(node.devices for node in ordered)
    tiers = _inner_tiers(ordered, has_domains, known)
    latency = format_seconds(max(node.device.scale_out_latency_s for node in ordered)).replace(" ", "")
    span = _span_of(tiers, ordered)
    found, inner = 0, len(tiers)
    for level in range(1 if has_domains else 0, len(ordered[0].groups)):
        sizes = [
            sum(node.devices for node in run)
            for _, run in groupby(ordered, key=lambda node: node.groups[level])
        ]
        label = LEVELS[found] if found < len(LEVELS) else f"tier {found}"
        found += 1
        if len(sizes) == 1 or max(sizes) <= max(span, largest):
            continue
        if len(set(sizes[:-1])) > 1 or sizes[-1] > sizes[0] or sizes[0] % span:
            shown = ", ".join(map(str, sorted(set(sizes))))
            known.left_out.append(f"{label} switches: their groups of {shown[:60]} devices are not equal")
            continue
        tiers.append({"name": label, "span": sizes[0], "network": True, "latency": latency})
        span = sizes[0]
    if span < devices:
        tiers.append({"name": "network", "latency": latency})
    if len(tiers) - inner <= 1 and not has_domains:
        return []  # these are the defaults
    if len(tiers) > inner:
        _default(
            known,
            f"network tiers: {latency} latency and the bandwidth of the network cards; no switch is "
            "oversubscribed",
        )
    return tiers


def _inner_tiers(ordered: Sequence[_Placed], has_domains: bool, known: Provenance) -> list[dict[str, object]]:
    """The tier of the scale-up fabric, without figures: these are the defaults of the devices."""
    name = " / ".join(dict.fromkeys(node.device.scale_up_name for node in ordered))
    first = ordered[0]
    if has_domains:
        size = sum(node.devices for node in ordered if node.groups[0] == first.groups[0])
        return [{"name": name, "span": size, "network": False}]
    spans = {scale_up_span(node.device, node.devices) for node in ordered}
    span = gcd(*spans)
    tiers: list[dict[str, object]] = []
    if span > 1:
        tiers.append({"name": name, "span": span, "network": False})
    if span < min(node.devices for node in ordered):
        rate = min(node.device.host_link_bytes_per_s for node in ordered)
        host: dict[str, object] = {"name": "host links", "span": "node", "network": False}
        latency_s = max(node.device.scale_up_latency_s for node in ordered)
        tiers.append({**host, "bandwidth": f"{rate:.6g}B/s", "latency": f"{latency_s:.6g}s"})
    if max(span, 0) > max(node.devices for node in ordered):
        _default(known, f"{name}: {span} devices that follow each other, since no file names the domains")
    return tiers


def _span_of(tiers: Sequence[Mapping[str, object]], ordered: Sequence[_Placed]) -> int:
    span = tiers[-1]["span"] if tiers else 1
    if isinstance(span, int):
        return span
    starts = accumulate(node.devices for node in ordered)
    return gcd(*starts)


# The document
def _classes(placed: Sequence[_Placed], resolve: Resolve, known: Provenance) -> dict[str, dict[str, object]]:
    """The figures of devices that differ from the catalogue, by class."""
    classes: dict[str, dict[str, object]] = {}
    for node in placed:
        if node.inside is None or node.device.name in classes:
            continue
        changes: dict[str, object] = {}
        _set_memory(node.device, node.inside, changes, known)
        _set_power(node.device, node.inside, changes, resolve, known)
        _set_pcie(node.device, node.inside, changes, known)
        _set_links(node.device, node.inside, changes, known)
        if changes:
            classes[node.device.name] = {"device": node.device.name, **changes}
    return classes


def _set_memory(device: Device, facts: InsideFacts, changes: dict[str, object], known: Provenance) -> None:
    reported = facts.memory_bytes
    if reported is None or abs(reported / device.memory_bytes - 1.0) <= SAME_MEMORY:
        return
    changes["memory"] = f"{round(reported / 2**20)}MiB"
    known.given[f"memory of {device.name}"] = f"as the driver reports it, {format_bytes(reported)}"


def _set_power(
    device: Device, facts: InsideFacts, changes: dict[str, object], resolve: Resolve, known: Provenance
) -> None:
    if facts.power_w is None:
        return
    limited, assumed = resolve(f"{device.name} {facts.power_w:g}W")
    if limited.peak_flop_per_s != device.peak_flop_per_s:
        changes["peak"] = {dtype: f"{peak:.6g}FLOP/s" for dtype, peak in limited.peak_flop_per_s.items()}
    known.defaults += assumed


def _set_pcie(device: Device, facts: InsideFacts, changes: dict[str, object], known: Provenance) -> None:
    """The host link, where PCIe is slower than the catalogue has it."""
    # A device on NVLink-C2C has PCIe too, and does not use it for its host.
    if facts.pcie is None or device.host_link_bytes_per_s > max(PCIE_BYTES_PER_S.values()):
        return
    generation, width = facts.pcie
    rate = PCIE_BYTES_PER_S.get(generation, device.host_link_bytes_per_s) * width / 16
    if rate < device.host_link_bytes_per_s * 0.99:
        changes["host"] = {"link": f"{rate:.6g}B/s"}
        known.given[f"host link of {device.name}"] = f"PCIe {generation} of width {width}"


def _set_links(device: Device, facts: InsideFacts, changes: dict[str, object], known: Provenance) -> None:
    """The scale-up fabric, where the NVLinks are other ones than in the catalogue."""
    per_link = NVLINK_BYTES_PER_S.get(architecture_of(device) or "")
    if facts.nvlinks is None or per_link is None or device.scale_up_links or facts.devices == 1:
        return
    group, links = _clique(facts.nvlinks)
    if links == 0:
        if "NVLink" not in device.scale_up_name:
            return
        rate, name, domain = device.host_link_bytes_per_s, "PCIe", facts.devices
    else:
        rate, name, domain = links * per_link, f"{links} NVLinks", group
    known.given["links inside nodes"] += f": {name}, {format_rate(rate)} per direction"
    spans_node = domain == facts.devices and scale_up_span(device, facts.devices) >= facts.devices
    if abs(rate / device.scale_up_bytes_per_s - 1.0) < 0.01 and (
        spans_node or domain == scale_up_span(device, facts.devices)
    ):
        return
    # A domain as large as the default node is the node, whatever its size.
    size = device.devices_per_node if domain == facts.devices else domain
    changes["scale_up"] = {"name": name, "bandwidth": f"{rate:.6g}B/s", "domain": size}


def _clique(nvlinks: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The size of the groups of devices that are all linked to each other, and the fewest links of a pair;
    (1, 0) where there are no such equal groups."""
    groups = {
        tuple(other for other, count in enumerate(row) if count > 0 or other == at)
        for at, row in enumerate(nvlinks)
    }
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or sum(map(len, groups)) != len(nvlinks) or sizes == {1}:
        return 1, 0
    return sizes.pop(), min(nvlinks[a][b] for group in groups for a in group for b in group if a != b)


def _node_entries(
    placed: Sequence[_Placed], files: Sequence[FileFacts], known: Provenance
) -> list[dict[str, object]]:
    """One entry per run of equal nodes, in their order."""
    memory: dict[tuple[str, int], float] = {}
    for node in placed:
        its = (node.device.name, node.devices)
        if node.host_memory_bytes:
            memory[its] = min(memory.get(its, node.host_memory_bytes), node.host_memory_bytes)
    entries = []
    for kind, run in groupby(placed, key=lambda node: (node.device.name, node.devices, id(node.inside))):
        nodes = list(run)
        entry: dict[str, object] = {
            "name": printable(folded(node.name for node in nodes)),
            "device": kind[0], "count": len(nodes), "devices": kind[1],
            "nics": _cards(nodes[0], known),
        }  # fmt: skip
        if (host := memory.get((kind[0], kind[1]))) is not None:
            entry["host"] = {"memory": f"{round(host / 2**20)}MiB"}
        else:
            default = format_bytes(default_node(nodes[0].device, kind[1]).host_memory_bytes)
            _default(known, f"host memory of a node of {kind[1]} {kind[0]}: {default}")
        entries.append(entry)
    return entries


def _cards(node: _Placed, known: Provenance) -> dict[str, object]:
    """The network cards of a node: those of a file, else the default ones of its devices."""
    default = default_node(node.device, node.devices)
    facts = node.inside
    count, rate = default.nics, default.nic_bytes_per_s
    what = f"network cards of a node of {node.devices} {node.device.name}"
    if facts is not None and facts.nics:
        count, rate = facts.nics, facts.nic_bytes_per_s or rate
        if facts.nic_bytes_per_s is None:
            _default(known, f"{what}: {_bits(rate)} each, since no file says their speed")
    else:
        _default(known, f"{what}: {count} x {_bits(rate)}")
    return {"count": count, "bandwidth": _bits(rate)}


def _bits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:g}Gb/s"
