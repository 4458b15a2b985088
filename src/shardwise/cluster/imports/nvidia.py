"""The inside of one node: `nvidia-smi -q -x`, `nvidia-smi topo -m`, and topologies of NCCL."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from shardwise.cluster.imports.facts import FileFacts, InsideFacts
from shardwise.cluster.imports.xml_tree import Element, xml_root
from shardwise.errors import ConfigError
from shardwise.inputs import printable, short_repr

MIB = float(2**20)


def is_xml(text: str) -> bool:
    """Whether a text is XML."""
    return text.lstrip().startswith("<")


def read_xml(text: str, file: str) -> FileFacts:
    """A log of nvidia-smi or a topology of NCCL, by the root element."""
    root = xml_root(text, file)
    if root.name == "nvidia_smi_log":
        return _of_smi(root, file)
    if root.name == "system":
        return _of_nccl(root, file)
    raise ConfigError(
        "is XML of another kind", file=printable(file), found=f"<{printable(root.name)}>",
        allowed="<nvidia_smi_log> or <system>",
    )  # fmt: skip


# nvidia-smi -q -x
def _of_smi(root: Element, file: str) -> FileFacts:
    devices = [one for one in root.children if one.name == "gpu"]
    expected = root.value("attached_gpus")
    if not devices or (expected.isdecimal() and len(devices) != int(expected)):
        raise ConfigError(
            "has another number of devices than attached_gpus", file=printable(file),
            found=str(len(devices)), allowed=expected or "1 or more",
        )  # fmt: skip
    names = Counter(one.value("product_name") for one in devices)
    if len(names) > 1 or "" in names:
        found = ", ".join(f"{count} {printable(name) or 'without name'}" for name, count in names.items())
        raise ConfigError(
            "has devices of several kinds", file=printable(file), key="product_name", found=found,
            allowed="one kind per node",
        )  # fmt: skip
    if any(one.value("mig_mode/current_mig") == "Enabled" for one in devices):
        raise ConfigError(
            "has slices of devices (MIG)", file=printable(file), key="mig_mode", allowed="whole devices"
        )
    totals = [_number(one.value("fb_memory_usage/total"), "MiB") for one in devices]
    memory = min((total for total in totals if total is not None), default=None)
    version = root.value("driver_version")
    return FileFacts(
        file=file,
        kind=f"nvidia-smi -q -x{f', driver {printable(version)}' if version else ''}",
        inside=InsideFacts(
            devices=len(devices),
            device=next(iter(names)),
            memory_bytes=None if memory is None else memory * MIB,
            power_w=min((power for one in devices if (power := _power(one)) is not None), default=None),
            pcie=min((pcie for one in devices if (pcie := _pcie(one)) is not None), default=None),
        ),
    )


def _number(text: str, unit: str) -> float | None:
    match = re.fullmatch(rf"(\d{{1,12}}(?:\.\d{{1,6}})?) {unit}", text)
    return None if match is None else float(match[1])


def _power(one: Element) -> float | None:
    """The power limit in watts where it is below the default; its section changed names with the drivers."""
    for section in ("gpu_power_readings", "power_readings"):
        limits = [
            _number(one.value(f"{section}/{name}"), "W")
            for name in ("current_power_limit", "enforced_power_limit", "power_limit")
        ]
        limit = next((limit for limit in limits if limit is not None), None)
        default = _number(one.value(f"{section}/default_power_limit"), "W")
        if limit is not None and default is not None:
            return limit if limit < default else None
    return None


def _pcie(one: Element) -> tuple[int, int] | None:
    """Generation and width of PCIe that the device can use: an idle one uses less."""
    generation = one.value("pci/pci_gpu_link_info/pcie_gen/max_link_gen")
    width = one.value("pci/pci_gpu_link_info/link_widths/max_link_width").removesuffix("x")
    return (int(generation), int(width)) if generation.isdecimal() and width.isdecimal() else None


# A topology of NCCL
_NETWORK_CLASSES = ("0x0200", "0x0207")
"""Classes of PCI devices: Ethernet and InfiniBand."""

_SPEEDS = {8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Generation of PCIe by gigatransfers per second."""


def _of_nccl(root: Element, file: str) -> FileFacts:
    pci = [one for one in root.all("pci") if one.child("gpu") is not None]
    devices = pci or [one for one in root.all("pci") if one.attributes.get("class", "").startswith("0x0302")]
    if not devices:
        raise ConfigError("has no devices", file=printable(file), allowed='<gpu> or <pci class="0x030200">')
    if len({one.attributes.get("host_hash") for one in root.all("cpu")}) > 1:
        raise ConfigError("describes several nodes", file=printable(file), key="cpu", allowed="one node")
    cards = list(root.all("net"))
    speeds = {_whole(one.attributes.get("speed", "")) for one in cards}
    if len(speeds) > 1:
        raise ConfigError(
            "has network cards of several speeds", file=printable(file), key="net.speed",
            found=", ".join(map(str, speeds)), allowed="one",
        )  # fmt: skip
    megabits = next(iter(speeds), None)
    count = len(cards) or sum(
        one.attributes.get("class", "").startswith(_NETWORK_CLASSES) for one in root.all("pci")
    )
    return FileFacts(
        file=file,
        kind=f"topology of NCCL, version {printable(root.attributes.get('version', '1'))}",
        inside=InsideFacts(
            devices=len(devices),
            pcie=min((link for one in devices if (link := _link(one)) is not None), default=None),
            nics=count or None,
            nic_bytes_per_s=None if not megabits else megabits * 1e6 / 8,
            nvlinks=_nvlinks(devices),
        ),
    )


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else None


def _link(one: Element) -> tuple[int, int] | None:
    match = re.match(r"(\d{1,3}(?:\.\d)?) GT/s", one.attributes.get("link_speed", ""))
    width = _whole(one.attributes.get("link_width", ""))
    generation = _SPEEDS.get(float(match[1])) if match else None
    return None if generation is None or not width else (generation, width)


def _nvlinks(devices: Sequence[Element]) -> tuple[tuple[int, ...], ...] | None:
    """NVLinks between the devices: directly, or through switches that all of them are linked to."""
    places = {one.attributes.get("busid", "").lower(): at for at, one in enumerate(devices)}
    links = [[0] * len(devices) for _ in devices]
    switched = [0] * len(devices)
    for at, one in enumerate(devices):
        for link in one.all("nvlink"):
            count = _whole(link.attributes.get("count", "1")) or 0
            target = places.get(link.attributes.get("target", "").lower())
            if target is not None:
                links[at][target] += count
            elif link.attributes.get("tclass", "").startswith("0x0680"):
                switched[at] += count
    if not any(map(sum, links)) and not any(switched):
        return None  # files of clouds leave the NVLinks out
    return tuple(
        tuple(
            0 if at == other else max(links[at][other], min(switched[at], switched[other]))
            for other in range(len(devices))
        )
        for at in range(len(devices))
    )


# nvidia-smi topo -m
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_COLUMN = re.compile(r"GPU\d{1,3}|NIC\d{1,3}|mlx\w+|[a-z]+\w*_\d{1,3}")
_CELL = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|PSB|C2C|NV\d{1,2}")
_NEAR = ("PIX", "PXB")
"""Links of a device to a network card that serves it: over PCIe switches only."""


def is_topology_matrix(text: str) -> bool:
    """Whether a text has the header of `nvidia-smi topo -m`."""
    return any(_columns(line) for line in text.splitlines())


def _columns(line: str) -> list[str]:
    """The columns of the matrix, where the line is its header."""
    words = _ANSI.sub("", line).split()
    if len(words) < 2 or words[0] != "GPU0" or words[1] == "X":
        return []
    columns = []
    for word in words:
        if not _COLUMN.fullmatch(word):
            break
        columns.append(word)
    return columns


def read_topology_matrix(text: str, file: str) -> FileFacts:
    """NVLinks between the devices of a node, and the network cards near to them."""
    lines = _ANSI.sub("", text).splitlines()
    at = next(index for index, line in enumerate(lines) if _columns(line))
    columns = _columns(lines[at])
    devices = [name for name in columns if name.startswith("GPU")]
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines[at + 1 :], start=at + 2):
        words = line.split()
        if not words or words[0] not in columns or words[0] in rows:
            continue
        cells = words[1 : 1 + len(columns)]
        if len(cells) < len(columns) or not all(map(_CELL.fullmatch, cells)):
            raise ConfigError(
                "has not a link for every column", file=printable(file), key=f"line {number}",
                found=short_repr(line.strip()), allowed=f"{len(columns)} such as NV18, PIX or SYS",
            )  # fmt: skip
        rows[words[0]] = cells
    if missing := [name for name in devices if name not in rows]:
        raise ConfigError(
            "has no row of every device", file=printable(file), found=f"{len(rows)} rows",
            allowed=f"a row of {', '.join(missing)[:80]}",
        )  # fmt: skip
    nvlinks = tuple(tuple(_links(rows[name][columns.index(other)]) for other in devices) for name in devices)
    cards = [index for index, name in enumerate(columns) if not name.startswith("GPU")]
    near = [card for card in cards if any(rows[name][card] in _NEAR for name in devices)]
    notes = []
    if len(near) < len(cards):
        far = [columns[card] for card in cards if card not in near]
        notes.append(f"{_listed(far)}: no PCIe switch joins them to a device")
    return FileFacts(
        file=file,
        kind="nvidia-smi topo -m",
        inside=InsideFacts(devices=len(devices), nics=len(near) or None, nvlinks=nvlinks),
        notes=tuple(notes),
    )


def _links(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0


def _listed(names: Iterable[str]) -> str:
    return f"network cards {', '.join(names)}"
