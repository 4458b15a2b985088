"""The manifest of a checkpoint: written last, it is what makes a checkpoint one.

A checkpoint is a folder `step-00000020` with the files that PyTorch's distributed checkpoint wrote and a
`manifest.json` that lists them with sizes and hashes. A folder without a manifest was never finished. What
tells it from a folder of somebody else is a file that is there before all others: nothing else is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, graph_text
from shardwise.inputs import Fields, parse_mapping, read_mapping
from shardwise.plan import write_file
from shardwise.runtime.data import DataIdentity

SCHEMA = "shardwise.checkpoint"
VERSION = 3
"""The first one knew data by its name alone, the second one no graphs."""

MANIFEST = "manifest.json"
MARKER = ".shardwise"
"""Name of the file by which a folder is known as one of ours."""

MAX_CHECKPOINTS = 2
"""How many finished checkpoints stay."""

_FOLDER = re.compile(r"step-([0-9]{8})")
_MAX_FILES_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What was saved: after how many steps, of which run, in which files (size in bytes, SHA-256)."""

    step: int
    seed: int
    data: str
    """`synthetic`, or where the file lay."""
    content: DataIdentity | None
    """What the file was; None of synthetic data, and where the manifest is of version 1."""
    optimizer: str
    global_batch_size: int
    seq_len: int | None
    """None of a graph that has none."""
    model: str | None
    """Hash of the model's config; None of a graph."""
    graph: str | None = None
    """Hash of the operator graph; None of a model, and where the manifest is of version 1 or 2."""
    plan: str
    """Hash of the plan that it ran under."""
    files: Mapping[str, tuple[int, str]]


def folder_of(root: str, step: int) -> str:
    return os.path.join(root, f"step-{step:08d}")


def model_hash(config: Mapping[str, object]) -> str:
    """Of all that a model's config says but its name."""
    body = {key: value for key, value in config.items() if key not in ("name", "_name_or_path")}
    return "sha256:" + hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def graph_hash(graph: OpGraph) -> str:
    """Of what a graph computes, at whatever batch and sequence length: not of its name, nor of what its file
    says of costs and of what may be split."""
    document: Any = parse_mapping(graph_text(graph))
    for block in document["blocks"]:
        for operator in block["operators"]:
            for key in ("whole", "flop", "moved_bytes"):
                operator.pop(key, None)
    body = {key: document[key] for key in ("sizes", "inputs", "blocks")}
    return "sha256:" + hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def files_in(folder: str, names: Iterable[str] = ()) -> dict[str, tuple[int, str]]:
    """Every file of a checkpoint with its size and hash; `names` are some that are known to be there."""
    found = {name for name in os.listdir(folder) if name not in (MANIFEST, MARKER)}
    return {name: _measured(os.path.join(folder, name)) for name in sorted(found.union(names))}


def _measured(path: str) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return os.path.getsize(path), digest


def mark_folder(folder: str) -> None:
    """Make `folder` known as one of ours, before anything else is in it."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, MARKER), "ab"):
        pass


def commit(folder: str, manifest: Manifest) -> None:
    """Make the files in `folder` a checkpoint."""
    document = {"schema": SCHEMA, "version": VERSION, **asdict(manifest)}
    write_file(os.path.join(folder, MANIFEST), json.dumps(document, indent=1).encode())


def prune(root: str) -> None:
    """Remove all but the newest finished checkpoints."""
    for step in finished(root)[:-MAX_CHECKPOINTS]:
        folder = folder_of(root, step)
        if _is_ours(folder):
            mark_folder(folder)  # one of an earlier version has no mark yet
            os.unlink(os.path.join(folder, MANIFEST))  # first: what is left of it then is no checkpoint
            _remove(folder)


def _is_ours(folder: str) -> bool:
    """Whether a folder with a manifest is known as one of ours, by its mark or by what the manifest says."""
    if os.path.isfile(os.path.join(folder, MARKER)):
        return True
    try:
        read_manifest(os.path.join(folder, MANIFEST))
    except ConfigError:
        return False
    return True


def clear_unfinished(root: str) -> None:
    """Remove what runs that were ended here have left of checkpoints. ConfigError where there is a folder by
    such a name that is not known as one of ours."""
    check_unfinished(root)
    for folder in _unfinished(root):
        _remove(folder)


def check_unfinished(root: str) -> None:
    """ConfigError where `clear_unfinished` would meet a folder that is not known as one of ours."""
    for folder in _unfinished(root):
        if os.listdir(folder) and not os.path.isfile(os.path.join(folder, MARKER)):
            raise ConfigError(
                f"has the name of a checkpoint, but neither {MANIFEST} nor {MARKER} of one", file=folder,
                key="--checkpoint", found=", ".join(sorted(os.listdir(folder))[:3]),
                allowed="another folder, or remove it if it is of no use",
            )  # fmt: skip


def remove_unfinished(folder: str) -> None:
    """Remove a folder of ours that did not become a checkpoint, as far as the system lets it."""
    with contextlib.suppress(OSError):
        if os.path.isfile(os.path.join(folder, MARKER)) and not os.path.isfile(
            os.path.join(folder, MANIFEST)
        ):
            _remove(folder)


def _remove(folder: str) -> None:
    """Remove a folder of ours, which other ranks may do too: its mark last, so that what is left of it at any
    time is known as ours."""
    ignore_missing = contextlib.suppress(FileNotFoundError)
    with ignore_missing:
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            elif name != MARKER:
                with ignore_missing:
                    os.unlink(path)
        with ignore_missing:
            os.unlink(os.path.join(folder, MARKER))
        os.rmdir(folder)


def _unfinished(root: str) -> list[str]:
    """The folders in `root` that have the name of a checkpoint and are none."""
    folders = (folder_of(root, step) for step in _steps(root))
    return [one for one in folders if os.path.isdir(one) and not os.path.isfile(os.path.join(one, MANIFEST))]


def finished(root: str) -> list[int]:
    """The steps of all finished checkpoints in `root`, ascending."""
    return [step for step in _steps(root) if os.path.isfile(os.path.join(folder_of(root, step), MANIFEST))]


def _steps(root: str) -> list[int]:
    """The steps of all checkpoints in `root`, finished or not, ascending."""
    if not os.path.isdir(root):
        return []
    return sorted(int(match[1]) for name in os.listdir(root) if (match := _FOLDER.fullmatch(name)))


def newest(root: str) -> tuple[str, Manifest]:
    """The newest finished checkpoint in `root`, its files as they were written. ConfigError where there is
    none or a file was changed."""
    steps = finished(root)
    if not steps:
        raise ConfigError(
            "has no finished checkpoint", file=root, found="none", allowed="step-*/manifest.json"
        )
    folder = folder_of(root, steps[-1])
    manifest = read_manifest(os.path.join(folder, MANIFEST))
    found = files_in(folder)
    for name, measured in manifest.files.items():
        if found.get(name) != measured:
            raise ConfigError(
                "is not the file that the checkpoint was finished with",
                file=os.path.join(folder, name),
                found="nothing" if name not in found else f"{found[name][0]} bytes, another hash",
                allowed=f"{measured[0]} bytes as in {MANIFEST}",
            )
    return folder, manifest


def read_manifest(path: str) -> Manifest:
    """The manifest at `path`. ConfigError for another kind of file and for a newer version."""
    fields = Fields(read_mapping(path, max_bytes=_MAX_FILES_BYTES), file=path)
    fields.choice("schema", (SCHEMA,))
    version = fields.integer("version", low=1, high=10**9)
    if version > VERSION:
        raise fields.error(
            "version", "is newer than this shardwise reads", found=str(version), allowed=str(VERSION)
        )
    listed = fields.mapping("files")
    manifest = Manifest(
        step=fields.integer("step", low=0, high=10**9),
        seed=fields.integer("seed", low=0, high=10**9),
        data=fields.text("data", max_length=4096),
        content=_content(fields) if version > 1 else None,
        optimizer=fields.text("optimizer"),
        global_batch_size=fields.integer("global_batch_size", low=1, high=10**9),
        seq_len=fields.integer("seq_len", low=1, high=10**9) if fields.has("seq_len") else None,
        model=fields.text("model") if fields.has("model") else None,
        graph=fields.text("graph") if version > 2 and fields.has("graph") else None,
        plan=fields.text("plan"),
        files={name: _file_entry(listed, name) for name in listed.names},
    )
    fields.finish()
    if (manifest.model is None) is (manifest.graph is None):
        raise fields.error("model", "is there beside a graph, or neither is", allowed="one of them")
    return manifest


def _content(fields: Fields) -> DataIdentity | None:
    if fields.any("content", default=None) is None:
        return None
    inner = fields.mapping("content")
    content = DataIdentity(
        nbytes=inner.integer("nbytes", low=1, high=1 << 60),
        hash=inner.text("hash"),
        windows=inner.integer("windows", low=1, high=1 << 60),
        order=inner.integer("order", low=1, high=10**9),
    )
    inner.finish()
    return content


def _file_entry(fields: Fields, name: str) -> tuple[int, str]:
    if os.path.basename(name) != name or name in (".", ".."):
        raise fields.error(name, "is not the name of a file in the checkpoint", found=name)
    entry = fields.sequence(name, low=2, high=2)
    if len(entry) != 2 or not isinstance(entry[0], int) or not isinstance(entry[1], str):
        raise fields.error(name, "is not a size and a hash")
    return entry[0], entry[1]
