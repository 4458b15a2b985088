"""Topologies of Slurm: `topology.conf` and `topology.yaml`, trees and blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.cluster.imports.facts import FileFacts, NodeFacts
from shardwise.cluster.imports.hostlist import expanded
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, parse_list, printable, short_repr

TREE, BLOCK, FLAT = "tree", "block", "flat"

_KEY = re.compile(r"(\w+)=(\S+)")
_FIRST_KEYS = {"switchname": TREE, "blockname": BLOCK, "blocksizes": BLOCK}
_ALLOWED = (
    "lines such as SwitchName=leaf1 Nodes=n[0-3], SwitchName=core Switches=leaf[1-2] or BlockName=b1 Nodes="
)


@dataclass(frozen=True, slots=True)
class _Unit:
    """A switch with its nodes or child switches, or a block, and where the file defines it."""

    name: str
    nodes: tuple[str, ...]
    children: tuple[str, ...]
    key: str


def is_topology_conf(text: str) -> bool:
    """Whether the first line that is no comment defines something of a topology."""
    line = next((line for _, line in _lines(text)), "")
    match = _KEY.match(line)
    return match is not None and (
        match.group(1).lower() in _FIRST_KEYS or match.group(1).lower().endswith("name")
    )


def read_topology_conf(text: str, file: str) -> FileFacts:
    """The tree or the blocks of a `topology.conf`."""
    units: list[_Unit] = []
    kinds: set[str] = set()
    for number, line in _lines(text):
        key = f"line {number}"
        values = {name.lower(): value for name, value in _KEY.findall(line)}
        kind = _FIRST_KEYS.get(next(iter(values), ""))
        if kind is None or _KEY.sub("", line).strip():
            raise _wrong(file, key, "is no line of a tree or of blocks", line)
        kinds.add(kind)
        if "blocksizes" in values:
            continue
        names = {part: _expanded(values[part], file, key) for part in ("nodes", "switches") if part in values}
        if len(names) != 1:
            raise _wrong(file, key, "names neither nodes nor switches" if not names else "names both", line)
        name = values.get("switchname") or values["blockname"]
        units.append(_Unit(name, names.get("nodes", ()), names.get("switches", ()), key))
    if len(kinds) != 1 or not units:
        raise _wrong(
            file, None, "has no switches and no blocks" if not units else "mixes trees and blocks", ""
        )
    return _facts(units, kinds.pop(), file, "Slurm topology.conf", ())


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, without comments; a backslash continues a line."""
    whole, start = "", 0
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#")[0].rstrip()
        whole, start = whole + line.removesuffix("\\"), start or number
        if line.endswith("\\"):
            continue
        if whole.strip():
            yield start, whole.strip()
        whole, start = "", 0
    if whole.strip():
        yield start, whole.strip()


def _expanded(text: str, file: str, key: str) -> tuple[str, ...]:
    try:
        return tuple(expanded(text))
    except ConfigError as error:
        raise error.within(file=printable(file), key=key) from None


def _wrong(file: str, key: str | None, message: str, line: str) -> ConfigError:
    return ConfigError(
        message, file=printable(file), key=key, found=short_repr(line) if line else None, allowed=_ALLOWED
    )


# topology.yaml
_KINDS = (TREE, BLOCK, FLAT)


def is_topology_yaml(text: str) -> bool:
    """Whether a text begins as a list of topologies."""
    return re.search(r"^-\s+topology\s*:", text, re.MULTILINE) is not None


def read_topology_yaml(text: str, file: str) -> FileFacts:
    """The default topology of a `topology.yaml`, or its first tree or blocks."""
    entries = Fields({"topologies": parse_list(text, file=file)}, file=file).mappings("topologies", low=1)
    # Slurm takes the first default; True is text for strict YAML.
    defaults = [one for one in entries if str(one.any("cluster_default", default=False)).lower() == "true"]
    entry = (defaults or [one for one in entries if not one.has(FLAT)] or entries)[0]
    name = entry.text("topology")
    kind = next((kind for kind in _KINDS if entry.has(kind)), None)
    if kind is None:
        others = [key for key in entry.names if key not in ("topology", "cluster_default")]
        raise entry.error(
            "", "is of a kind that is not read", found=", ".join(map(printable, others)) or "no kind",
            allowed=", ".join(_KINDS),
        )  # fmt: skip
    notes = [f"topology {one.text('topology')!r} is not used" for one in entries if one is not entry]
    shown = f"Slurm topology.yaml, {kind} {name!r}"
    if kind == FLAT:
        return FileFacts(file=file, kind=shown, notes=tuple(notes))
    return _facts(list(_units(entry.mapping(kind), kind)), kind, file, shown, notes)


def _units(part: Fields, kind: str) -> Iterator[_Unit]:
    several, one = ("switches", "switch") if kind == TREE else ("blocks", "block")
    for item in part.mappings(several, low=1):
        lists = {key: _hosts(item, key) for key in ("nodes", "children") if item.has(key)}
        if len(lists) != 1:
            raise item.error("", "names neither nodes nor children" if not lists else "names both")
        yield _Unit(item.text(one), lists.get("nodes", ()), lists.get("children", ()), item.key)


def _hosts(item: Fields, key: str) -> tuple[str, ...]:
    try:
        return tuple(expanded(item.text(key, max_length=1_000_000)))
    except ConfigError as error:
        raise item.error(key, error.message, found=error.found, allowed=error.allowed) from None


# Both
def _facts(units: Sequence[_Unit], kind: str, file: str, shown: str, notes: Sequence[str]) -> FileFacts:
    by_name: dict[str, _Unit] = {}
    parents: dict[str, str] = {}
    above: dict[str, str] = {}
    for unit in units:
        if by_name.setdefault(unit.name, unit) is not unit:
            raise _twice(file, unit, unit.name, "is defined twice")
        for child in unit.children:
            if parents.setdefault(child, unit.name) != unit.name:
                raise _twice(file, unit, child, "is below two switches")
        for node in unit.nodes:
            if above.setdefault(node, unit.name) != unit.name:
                raise _twice(file, unit, node, "is below two switches")
    for child, parent in parents.items():
        if child not in by_name:
            raise _twice(file, by_name[parent], child, "is not defined")
    return FileFacts(
        file=file,
        kind=shown,
        nodes=tuple(
            NodeFacts(name=node, switches=_path(leaf, parents, by_name, file)) for node, leaf in above.items()
        ),
        has_blocks=kind == BLOCK,
        notes=tuple(notes),
    )


def _path(leaf: str, parents: Mapping[str, str], by_name: Mapping[str, _Unit], file: str) -> tuple[str, ...]:
    path = [leaf]
    while path[-1] in parents:
        path.append(parents[path[-1]])
        if path[-1] in path[:-1]:
            raise _twice(file, by_name[path[-1]], path[-1], "is above itself")
    return tuple(path)


def _twice(file: str, unit: _Unit, name: str, message: str) -> ConfigError:
    return ConfigError(message, file=printable(file), key=unit.key, found=short_repr(name), allowed="a tree")
