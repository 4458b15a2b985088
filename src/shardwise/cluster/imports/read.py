"""Reads a file of other software about a cluster (`facts_of_file`): its format follows from its content."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.cluster.imports.facts import FileFacts, NodeFacts
from shardwise.cluster.imports.hostlist import expanded
from shardwise.cluster.imports.kubernetes import (
    is_kubernetes,
    is_topograph,
    read_kubernetes,
    read_topograph,
)
from shardwise.cluster.imports.nvidia import is_topology_matrix, is_xml, read_topology_matrix, read_xml
from shardwise.cluster.imports.slurm_nodes import is_slurm_nodes, read_slurm_nodes
from shardwise.cluster.imports.slurm_topology import (
    is_topology_conf,
    is_topology_yaml,
    read_topology_conf,
    read_topology_yaml,
)
from shardwise.errors import ConfigError
from shardwise.inputs import parse_mapping, printable, short_repr

MAX_FILE_BYTES = 64 << 20
"""Largest file that is read."""

MAX_VALUES = 5_000_000
"""Most values of a JSON document: the nodes of a large Kubernetes cluster."""

_Documents = tuple[
    tuple[Callable[[Mapping[str, object]], bool], Callable[[Mapping[str, object], str], FileFacts]], ...
]
_DOCUMENTS: _Documents = (
    (is_slurm_nodes, read_slurm_nodes),
    (is_kubernetes, read_kubernetes),
    (is_topograph, read_topograph),
)
_TEXTS: tuple[tuple[Callable[[str], bool], Callable[[str, str], FileFacts]], ...] = (
    (is_xml, read_xml),
    (is_topology_matrix, read_topology_matrix),
    (is_topology_conf, read_topology_conf),
    (is_topology_yaml, read_topology_yaml),
)

KNOWN = (
    "topology.conf, topology.yaml, scontrol show nodes --json, sinfo --json, a hostlist, kubectl get nodes "
    "-o json, a graph of Topograph, nvidia-smi -q -x, nvidia-smi topo -m, a topology of NCCL, nccl-tests"
)
"""What can be read, for error messages."""


def facts_of_text(text: str, file: str) -> FileFacts:
    """What the content of `file` says about a cluster. ConfigError, with the place, where it is of no known
    format, is cut off or contradicts itself."""
    if not text.strip():
        raise ConfigError("is empty", file=printable(file), allowed=KNOWN)
    if text.lstrip().startswith("{"):
        return _of_document(text, file)
    for is_own, read in _TEXTS:
        if is_own(text):
            return read(text, file)
    if (facts := _of_hostlist(text, file)) is not None:
        return facts
    first = next(line for line in text.splitlines() if line.strip())
    raise ConfigError(
        "is of no known format", file=printable(file), found=short_repr(first.strip()), allowed=KNOWN
    )


def _of_document(text: str, file: str) -> FileFacts:
    # Its name says nothing: such output is often saved as .txt or .log.
    document = parse_mapping(text, file=file, max_bytes=MAX_FILE_BYTES, max_nodes=MAX_VALUES, is_json=True)
    for is_own, read in _DOCUMENTS:
        if is_own(document):
            return read(document, file)
    keys = ", ".join(printable(key) for key in list(document)[:5])
    raise ConfigError("is of no known format", file=printable(file), found=f"keys {keys}", allowed=KNOWN)


def _of_hostlist(text: str, file: str) -> FileFacts | None:
    """Nodes of a text with a hostlist on each line, or with a host and its slots; None for other texts."""
    names: list[str] = []
    devices: dict[str, int] = {}
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
        if len(words) > 1 + len(slots) or not _is_host(words[0]):
            return None
        try:
            found = expanded(words[0])
        except ConfigError:
            return None
        names += found
        if slots and slots[0].isdecimal() and len(slots[0]) < 6:
            devices |= dict.fromkeys(found, int(slots[0]))
    return FileFacts(
        file=file,
        kind="hostlist",
        nodes=tuple(NodeFacts(name=name, devices=devices.get(name)) for name in dict.fromkeys(names)),
        lists_nodes=True,
    )


def _is_host(word: str) -> bool:
    return all(character.isalnum() or character in "[],-._" for character in word)
