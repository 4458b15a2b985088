"""Checkpoints of training jobs with torch.distributed.checkpoint: saved, loaded and resharded.

A checkpoint is a folder `step-00000020` with the files of PyTorch's distributed checkpoint and
`manifest.json`, which lists them with sizes and hashes. The manifest is written last: a folder without one is
an unfinished checkpoint. The first file is a marker (`.shardwise`). Only folders with a marker or a valid
manifest are ever removed.

`AsyncCheckpoint` saves while training continues; `load` restores a job under the same or another plan;
`export` writes the weights for other libraries; `resumable` finds the checkpoint that a run can resume from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint

from shardwise.errors import ConfigError
from shardwise.inputs import Fields, read_mapping
from shardwise.plans import Plan, plan_hash, write_file
from shardwise.runtime.collectives import all_gather_json
from shardwise.runtime.data import DataIdentity
from shardwise.runtime.distribute import network_of
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.private import ChunkLoadPlanner, ChunkSavePlanner
from shardwise.runtime.state_dict import MODEL, StateDict, state_name

# The manifest and the folders

SCHEMA = "shardwise.checkpoint"
VERSION = 4
"""Version of the manifest. Version 1 has only the name of the data; version 2 has no graphs; version 3 has no
hash of its own."""

MANIFEST = "manifest.json"
MARKER = ".shardwise"
"""Name of the marker file, which shows that shardwise created the folder."""

MAX_CHECKPOINTS = 2
"""Number of finished checkpoints that are retained."""

_FOLDER = re.compile(r"step-([0-9]{8})")
_MAX_FILES_BYTES = 8 << 20
"""Largest manifest in bytes that is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of a manifest: step, run and files (name -> size in bytes, SHA-256)."""

    step: int
    seed: int
    data: str
    """`synthetic`, or the path of the data."""
    content: DataIdentity | None
    """Identity of the data; None for synthetic data and in manifests of version 1."""
    optimizer: str
    global_batch_size: int
    seq_len: int | None
    """None for a graph without a sequence dim."""
    model: str | None
    """Hash of the model's config; None for a graph."""
    graph: str | None = None
    """Hash of the operator graph; None for a model and in manifests of versions 1 and 2."""
    plan: str
    """Hash of the plan that the run used."""
    files: Mapping[str, tuple[int, str]]


def folder_of(root: str, step: int) -> str:
    """The checkpoint folder of `step` in `root`."""
    return os.path.join(root, f"step-{step:08d}")


def files_in(folder: str, names: Iterable[str] = ()) -> dict[str, tuple[int, str]]:
    """Every file of a checkpoint with its size and hash; `names` are files known to exist."""
    found = {name for name in os.listdir(folder) if name not in (MANIFEST, MARKER)}
    return {name: _measured(os.path.join(folder, name)) for name in sorted(found.union(names))}


def _measured(path: str) -> tuple[int, str]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return os.path.getsize(path), digest


def mark_folder(folder: str) -> None:
    """Create `folder` with its marker file, before any other file."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, MARKER), "ab"):
        pass


def commit(folder: str, manifest: Manifest) -> None:
    """Turn the files in `folder` into a finished checkpoint by writing the manifest."""
    document = {"schema": SCHEMA, "version": VERSION, **asdict(manifest)}
    document["hash"] = _document_hash(document)
    write_file(os.path.join(folder, MANIFEST), json.dumps(document, indent=1).encode())


def _document_hash(document: Mapping[str, Any]) -> str:
    """Hash of a manifest without its own `hash`."""
    body = {key: value for key, value in document.items() if key != "hash"}
    return "sha256:" + hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def prune(root: str) -> None:
    """Remove all but the newest finished checkpoints. A symbolic link is removed, never what it leads to."""
    for step in finished(root)[:-MAX_CHECKPOINTS]:
        folder = folder_of(root, step)
        if os.path.islink(folder):
            _remove(folder)
        elif _is_ours(folder):
            mark_folder(folder)  # checkpoints of earlier versions have no marker
            os.unlink(os.path.join(folder, MANIFEST))  # first, so that an interrupted removal shows
            _remove(folder)


def _is_ours(folder: str) -> bool:
    """Whether shardwise created a folder that has a manifest: by its marker, or by a valid manifest."""
    if os.path.isfile(os.path.join(folder, MARKER)):
        return True
    try:
        read_manifest(os.path.join(folder, MANIFEST))
    except ConfigError:
        return False
    return True


def clear_unfinished(root: str) -> None:
    """Remove unfinished checkpoints in `root`. ConfigError if a folder with such a name has no marker."""
    check_unfinished(root)
    for folder in _unfinished(root):
        _remove(folder)


def check_unfinished(root: str) -> None:
    """ConfigError if `clear_unfinished` would find a folder without a marker."""
    for folder in _unfinished(root):
        if os.listdir(folder) and not os.path.isfile(os.path.join(folder, MARKER)):
            raise ConfigError(
                f"has the name of a checkpoint, but contains neither {MANIFEST} nor {MARKER}", file=folder,
                key="--checkpoint", found=", ".join(sorted(os.listdir(folder))[:3]),
                allowed="another folder, or remove this one if it is not needed",
            )  # fmt: skip


def remove_unfinished(folder: str) -> None:
    """Remove `folder` if it is an unfinished checkpoint; errors of the system are ignored."""
    with contextlib.suppress(OSError):
        if os.path.isfile(os.path.join(folder, MARKER)) and not os.path.isfile(
            os.path.join(folder, MANIFEST)
        ):
            _remove(folder)


def _remove(folder: str) -> None:
    """Remove a checkpoint folder, which other ranks may be removing too. The marker goes last, so that an
    interrupted removal can be completed later. A link is removed, never what it leads to."""
    ignore_missing = contextlib.suppress(FileNotFoundError)
    with ignore_missing:
        if os.path.islink(folder):
            os.unlink(folder)
            return
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
    """Folders in `root` that are named like a checkpoint and have no manifest."""
    folders = (folder_of(root, step) for step in _steps(root))
    return [one for one in folders if os.path.isdir(one) and not os.path.isfile(os.path.join(one, MANIFEST))]


def finished(root: str) -> list[int]:
    """Steps of all finished checkpoints in `root`, ascending."""
    return [step for step in _steps(root) if os.path.isfile(os.path.join(folder_of(root, step), MANIFEST))]


def _steps(root: str) -> list[int]:
    """Steps of all checkpoints in `root`, finished or not, ascending."""
    if not os.path.isdir(root):
        return []
    return sorted(int(match[1]) for name in os.listdir(root) if (match := _FOLDER.fullmatch(name)))


def newest(root: str) -> tuple[str, Manifest]:
    """The newest finished checkpoint in `root`, with verified files. ConfigError if there is none, or if the
    manifest or a file was changed."""
    steps = finished(root)
    if not steps:
        raise ConfigError(
            "has no finished checkpoint", file=root, found="none", allowed="step-*/manifest.json"
        )
    folder = folder_of(root, steps[-1])
    manifest = read_manifest(os.path.join(folder, MANIFEST))
    if manifest.step != steps[-1]:
        raise ConfigError(
            "differs from the name of the folder", file=os.path.join(folder, MANIFEST), key="step",
            found=str(manifest.step), allowed=str(steps[-1]),
        )  # fmt: skip
    found = files_in(folder)
    for name, measured in manifest.files.items():
        if found.get(name) != measured:
            raise ConfigError(
                "differs from the file that was saved",
                file=os.path.join(folder, name),
                found="nothing" if name not in found else f"{found[name][0]} bytes, another hash",
                allowed=f"{measured[0]} bytes as in {MANIFEST}",
            )
    return folder, manifest


def read_manifest(path: str) -> Manifest:
    """Read the manifest at `path`. ConfigError if it is invalid, was changed or is of a newer version."""
    document = read_mapping(path, max_bytes=_MAX_FILES_BYTES)
    fields = Fields(document, file=path)
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
    own_hash = fields.text("hash") if version > 3 else None
    fields.finish()
    if (manifest.model is None) is (manifest.graph is None):
        raise fields.error("model", "and graph are both given, or neither", allowed="one of them")
    if own_hash is not None and own_hash != _document_hash(document):
        raise fields.error("hash", "does not fit the content, which was changed", found=own_hash)
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


# Saving


class AsyncCheckpoint:
    """A checkpoint that is written while training continues (as PyTorch's async_save).

    The constructor copies parameters and optimizer states to the host. Then a thread of each rank writes its
    part, and that of rank 0 commits the manifest when all parts are visible. Construct it on every rank, and
    call `wait` on every rank before the next one. `content` is the identity of the data, if `data` is a path.
    """

    def __init__(
        self,
        job: TrainingJob,
        root: str,
        *,
        step: int,
        seed: int = 0,
        data: str,
        content: DataIdentity | None = None,
    ) -> None:
        self._folder = folder_of(root, step)
        # The thread needs its own group: its collectives must not interleave with those of the steps.
        self._group = distributed.new_group(backend="gloo")
        manifest = Manifest(
            step=step,
            seed=seed,
            data=data,
            content=content,
            plan=plan_hash(job.plan),
            files={},
            **network_of(job.plan).identity,
        )
        executor = ThreadPoolExecutor(1)
        self._written = executor.submit(self._write, job.saved_state(), root, manifest)
        executor.shutdown(wait=False)

    def _write(self, state: StateDict, root: str, manifest: Manifest) -> None:
        hosts = all_gather_json(socket.gethostname(), self._group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about a single process and plain tensors
            checkpoint.save(
                state,
                storage_writer=_Writer(self._folder, root, manifest, hosts),
                planner=ChunkSavePlanner(),
                process_group=self._group,
            )

    def wait(self) -> None:
        """Wait until the checkpoint is committed. If it cannot be written, its files are removed and
        ConfigError is raised."""
        try:
            self._written.result()
        except checkpoint.CheckpointException as error:
            remove_unfinished(self._folder)
            raise _not_written(self._folder, _failure(error)[1]) from None
        except OSError as error:
            raise _not_written(self._folder, error) from None
        distributed.destroy_process_group(self._group)


class _Writer(checkpoint.FileSystemWriter):
    """Writes the shards of all ranks into a marked folder. Rank 0 commits it when it sees all their files.

    Errors are raised on all ranks.
    """

    def __init__(self, folder: str, root: str, manifest: Manifest, hosts: Sequence[str]) -> None:
        super().__init__(folder)
        self._folder, self._root, self._manifest, self._hosts = folder, root, manifest, hosts

    def prepare_local_plan(self, plan: Any) -> Any:
        mark_folder(self._folder)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # noqa: BLE001 - raised again, as the system's error if there is one
            raise _system_error(error) from None

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        written = [_sizes(of_rank) for of_rank in results]
        check_visible(self._folder, written, self._hosts)
        super().finish(metadata, results)
        files = files_in(self._folder, {name for sizes in written for name in sizes})
        commit(self._folder, replace(self._manifest, files=files))
        prune(self._root)


def _sizes(results: Sequence[Any]) -> dict[str, int]:
    """Files that a rank has written, each with its least size in bytes."""
    sizes: dict[str, int] = {}
    for result in results:
        place = result.storage_data
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


def check_visible(folder: str, written: Sequence[Mapping[str, int]], hosts: Sequence[str]) -> None:
    """ConfigError if `folder` on rank 0 lacks files that ranks have `written` on their hosts, because the
    folder is not shared."""
    for rank, (sizes, host) in enumerate(zip(written, hosts, strict=True)):
        for name, nbytes in sizes.items():
            found = _size(os.path.join(folder, name))
            if found is None or found < nbytes:
                raise ConfigError(
                    f"is not visible to rank 0 on {hosts[0]}, but was written by rank {rank} on {host}",
                    file=os.path.join(folder, name), key="--checkpoint",
                    found="nothing" if found is None else f"{found} bytes",
                    allowed="a folder that all hosts share",
                )  # fmt: skip


def _size(path: str) -> int | None:
    """Size in bytes of the file at `path`, None if it does not exist. Opens the file, since network file
    systems may cache an older size."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def _failure(error: checkpoint.CheckpointException) -> tuple[int, BaseException]:
    """The first rank that failed, and its error."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def _system_error(error: Exception) -> Exception:
    """The OSError that caused `error`, if there is one: PyTorch raises its own error of a truncated file on
    top of it."""
    under: BaseException | None = error
    while under is not None:
        if isinstance(under, OSError):
            return under
        under = under.__cause__ or under.__context__
    return error


def _why(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return str(text.splitlines()[0]).lower()


def _not_written(folder: str, error: BaseException) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    return ConfigError(f"cannot be written: {_why(error)}", file=folder, key="--checkpoint")


# Loading


def load(job: TrainingJob, folder: str) -> None:
    """Load the checkpoint in `folder` into `job`, resharding it as needed. Call it on every rank."""

    def read(state: StateDict) -> None:
        with _read_from(folder):
            checkpoint.load(dict(state), checkpoint_id=folder, planner=ChunkLoadPlanner())

    job.load(read)


@contextmanager
def _read_from(folder: str) -> Iterator[None]:
    """ConfigError on every rank if the checkpoint in `folder` cannot be read. PyTorch's error is not an
    Exception and would end the process like an interrupt."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except checkpoint.CheckpointException as error:
        rank, failure = _failure(error)
        path = getattr(failure, "filename", None)
        raise ConfigError(
            f"cannot be read: {_why(failure)}", file=str(path or folder), found=f"on rank {rank}",
            allowed="a complete checkpoint, in a folder that all hosts share",
        ) from None  # fmt: skip


def export(plan: Plan, root: str, folder: str) -> None:
    """Write the parameters of the newest checkpoint in `root` into `folder`, in one process that holds them
    all.

    Parameters of a model are written in the format of Hugging Face libraries, those of a graph by their
    names. ConfigError if the checkpoint does not fit the plan.
    """
    saved, _ = resumable(plan, root)
    with _read_from(saved):
        state = _whole_parameters(saved)
        checkpoint.load(state, checkpoint_id=saved, no_dist=True)
    prefix = state_name(MODEL, "")
    whole = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    network_of(plan).save(whole, folder)


def _whole_parameters(folder: str) -> dict[str, Tensor]:
    """An empty tensor for each parameter of the checkpoint in `folder`, by its name there."""
    stored = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in stored.items()
        if name.startswith(state_name(MODEL, ""))
    }


def resumable(plan: Plan, root: str) -> tuple[str, Manifest]:
    """The newest checkpoint in `root`. ConfigError if a run under `plan` cannot resume from it."""
    folder, manifest = newest(root)
    required = network_of(plan).identity
    is_of_graph = manifest.graph is not None
    if is_of_graph is not (required["graph"] is not None):
        kinds = ("a plan of a model", "the plan of an operator graph")
        raise ConfigError(
            "is a checkpoint of another kind of plan", file=folder, found=kinds[is_of_graph],
            allowed=kinds[not is_of_graph],
        )  # fmt: skip
    for key, value in required.items():
        if getattr(manifest, key) != value:
            raise ConfigError(
                "differs from the plan",
                file=folder,
                key=key,
                found=str(getattr(manifest, key)),
                allowed=str(value),
            )
    return folder, manifest
