"""From files of other software to a cluster: `imported_cluster`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise import accuracy
from shardwise.accuracy import NcclTable
from shardwise.cluster import (
    MAX_FILE_BYTES,
    Cluster,
    Device,
    FileFacts,
    NodeFacts,
    cluster_of_fields,
    facts_of_text,
    find_device,
    joined_cluster,
)
from shardwise.errors import ConfigError
from shardwise.inputs import Fields, dumps, printable, read_text, short_repr
from shardwise.questions.arguments import optional_text, text


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedCluster:
    """A cluster from files of other software. `document` is the content of its file."""

    cluster: Cluster
    document: Mapping[str, Any]

    @property
    def provenance(self) -> Mapping[str, Any]:
        """`files` that were read, what is `given` by which, the `defaults` taken, and what is `left_out`."""
        found: Mapping[str, Any] = self.document["provenance"]
        return found

    def written(self, file: str) -> str:
        """The text of a cluster file of this name: JSON where the name ends in `.json`, else YAML."""
        return dumps(self.document, file=file)


def imported_cluster(files: object, *, device: object = None, name: object = None) -> ImportedCluster:
    """The cluster that the files at some paths describe together.

    `device` names the devices of all nodes, `name` the cluster. Raises ConfigError for files that cannot be
    used, and where they do not say which devices the nodes have.
    """
    paths = _paths(files)
    tables: list[tuple[str, NcclTable]] = []
    facts: list[FileFacts] = []
    for path in paths:
        content = read_text(path, max_bytes=MAX_FILE_BYTES)
        if accuracy.is_nccl_tests(content):
            tables += [(path, table) for table in accuracy.nccl_tables(content, file=path)]
        else:
            facts.append(facts_of_text(content, path))
    document = joined_cluster(
        [*facts, *_facts_of_tables(facts, tables)],
        resolve=_resolved,
        device=optional_text("--device", device),
        name=optional_text("--name", name),
    )
    cluster = cluster_of_fields(Fields(document))
    if tables:
        _set_speeds(document, cluster, tables)
        document = {key: document[key] for key in _KEYS if key in document}
        cluster = cluster_of_fields(Fields(document))
    return ImportedCluster(cluster=cluster, document=document)


_KEYS = ("name", "classes", "nodes", "tiers", "provenance")
"""Keys of a cluster file in their order."""


def _paths(files: object) -> list[str]:
    if isinstance(files, str) or not isinstance(files, Sequence):
        return [text("FILE", files)]
    paths = [text("FILE", path) for path in files]
    if not paths:
        raise ConfigError("is missing", key="FILE", allowed="1 file or more")
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError("is given twice", key="FILE", found=short_repr(path), allowed="each file once")
    return paths


def _resolved(named: str) -> tuple[Device, Sequence[str]]:
    """The device that a text of a file names, and what is assumed of its variant."""
    try:
        return find_device(named), ()
    except ConfigError as error:
        if error.message == "is ambiguous":
            raise ConfigError(
                "may be several devices", key="device", found=short_repr(named),
                allowed=f"{error.allowed}, with --device",
            ) from None  # fmt: skip
        try:
            return accuracy.device_named(named)
        except ConfigError:
            raise error.within(key="device") from None


def _facts_of_tables(facts: Sequence[FileFacts], tables: Sequence[tuple[str, NcclTable]]) -> list[FileFacts]:
    """What output of nccl-tests says about nodes. Its counts matter only where no other file has them, since
    a run may use some devices of a node."""
    has_nodes = any(one.nodes for one in facts)
    has_inside = any(one.inside for one in facts)
    found = []
    for path, table in tables:
        nodes = [
            NodeFacts(name=host, device=table.device or None, devices=None if has_inside else ranks)
            for host, ranks in zip(table.hostnames, table.hosts, strict=True)
        ]
        ranks = sum(table.hosts) or table.ranks
        test = table.kind.replace("_", "-")
        kind = f"nccl-tests, {test} on {ranks} ranks" if ranks else f"nccl-tests, {test}"
        found.append(FileFacts(file=path, kind=kind, nodes=() if has_nodes else tuple(nodes)))
    return found


def _set_speeds(document: dict[str, Any], cluster: Cluster, tables: Sequence[tuple[str, NcclTable]]) -> None:
    """Write the links that were measured into the class of the cluster's only device."""
    if len(cluster.classes) != 1:
        raise ConfigError(
            "was measured on a cluster of one kind of devices", file=printable(tables[0][0]),
            found=", ".join(cluster.classes), allowed="files of the nodes that it ran on",
        )  # fmt: skip
    (device,) = cluster.classes.values()
    fitted, measured = accuracy.with_tables(device, cluster, tables)
    entry = accuracy.calibration_document(fitted, None, machine="", measured={})["classes"][device.name]
    classes: dict[str, Any] = document.get("classes", {})
    known: dict[str, Any] = classes.setdefault(device.name, {"device": device.name})
    for key, part in entry.items():
        known[key] = {**known.get(key, {}), **part} if isinstance(part, dict) else part
    files = ", ".join(dict.fromkeys(printable(path) for path, _ in tables))
    given: dict[str, str] = document["provenance"].setdefault("given", {})
    for links, errors in measured.items():
        given[links] = f"{files}: {_shown(errors)}"[:400]
    document["classes"] = classes


def _shown(errors: object) -> str:
    if not isinstance(errors, Mapping):
        return str(errors)
    return ", ".join(
        f"{key.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in errors.items()
    )
