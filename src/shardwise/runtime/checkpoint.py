"""Saves a job and loads it, under the same plan or another, by PyTorch's distributed checkpoint.

The manifest of a checkpoint: written last, it is what makes a checkpoint one.

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
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.graph import OpGraph, graph_text
from shardwise.inputs import Fields, parse_mapping, read_mapping
from shardwise.plans import AnyPlan, GraphPlan, plan_hash, write_file
from shardwise.runtime import state_dict
from shardwise.runtime.collectives import all_gather_json
from shardwise.runtime.data import DataIdentity
from shardwise.runtime.gradients import local
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.private import ChunkLoadPlanner, ChunkSavePlanner, TensorChunks, chunk_of
from shardwise.runtime.state_dict import make_states, named, state_of, whole_name
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.weights import save_graph_weights, save_weights

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


AnyJob = TrainingJob | UnevenTrainingJob | GraphTrainingJob

_PARAMETER = "model."
"""What the names of parameters begin with, beside those of optimizer states."""


class AsyncCheckpoint:
    """A checkpoint that is being written beside the run: of the job as it was when this was made.

    Parameters and states are copied first; then a thread of each rank writes its part, and that of rank 0
    commits the manifest once it sees all parts. Make it on every rank, and `wait` for it on every rank before
    the next one. `content` is what the file `data` is, where it is one.
    """

    def __init__(
        self,
        job: AnyJob,
        root: str,
        *,
        step: int,
        seed: int = 0,
        data: str,
        content: DataIdentity | None = None,
    ) -> None:
        self._folder = folder_of(root, step)
        # Collectives of the thread must not come between those of the steps.
        self._group = distributed.new_group(backend="gloo")
        manifest = Manifest(
            step=step,
            seed=seed,
            data=data,
            content=content,
            plan=plan_hash(job.plan),
            files={},
            **_trained(job.plan),
        )
        executor = ThreadPoolExecutor(1)
        self._written = executor.submit(self._write, copied(job), root, manifest)
        executor.shutdown(wait=False)

    def _write(self, state: dict[str, Tensor | TensorChunks], root: str, manifest: Manifest) -> None:
        hosts = all_gather_json(socket.gethostname(), self._group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of being the only process, of plain tensors
            checkpoint.save(
                state,
                storage_writer=_Writer(self._folder, root, manifest, hosts),
                planner=ChunkSavePlanner(),
                process_group=self._group,
            )

    def wait(self) -> None:
        """Until the checkpoint is committed. ConfigError where it cannot be written; what there was of it is
        removed then."""
        try:
            self._written.result()
        except checkpoint.CheckpointException as error:
            remove_unfinished(self._folder)
            raise _not_written(self._folder, _failure(error)[1]) from None
        except OSError as error:
            raise _not_written(self._folder, error) from None
        distributed.destroy_process_group(self._group)


class _Writer(checkpoint.FileSystemWriter):
    """Writes the parts of all ranks into a folder that is known as ours before anything is in it, and makes
    it a checkpoint where rank 0 sees what all of them have written. What fails here all ranks hear of."""

    def __init__(self, folder: str, root: str, manifest: Manifest, hosts: Sequence[str]) -> None:
        super().__init__(folder)
        self._folder, self._root, self._manifest, self._hosts = folder, root, manifest, hosts

    def prepare_local_plan(self, plan: Any) -> Any:
        mark_folder(self._folder)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # noqa: BLE001 - raised again: as what the system said, where it did
            raise _system_error(error) from None

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        written = [_sizes(of_rank) for of_rank in results]
        check_visible(self._folder, written, self._hosts)
        super().finish(metadata, results)
        files = files_in(self._folder, {name for sizes in written for name in sizes})
        commit(self._folder, replace(self._manifest, files=files))
        prune(self._root)


def _sizes(results: Sequence[Any]) -> dict[str, int]:
    """The files that a rank has written, and how long each is at least."""
    sizes: dict[str, int] = {}
    for result in results:
        place = result.storage_data
        sizes[place.relative_path] = max(sizes.get(place.relative_path, 0), place.offset + place.length)
    return sizes


def check_visible(folder: str, written: Sequence[Mapping[str, int]], hosts: Sequence[str]) -> None:
    """ConfigError where `folder` has not all that was `written` by the ranks, each on its host: another host
    has another folder by that name."""
    for rank, (sizes, host) in enumerate(zip(written, hosts, strict=True)):
        for name, nbytes in sizes.items():
            found = _size(os.path.join(folder, name))
            if found is None or found < nbytes:
                raise ConfigError(
                    f"is not where rank 0 on {hosts[0]} sees it, but was written by rank {rank} on {host}",
                    file=os.path.join(folder, name), key="--checkpoint",
                    found="nothing" if found is None else f"{found} bytes",
                    allowed="a folder that all hosts share",
                )  # fmt: skip


def _size(path: str) -> int | None:
    """Of the file at `path`, None where there is none; opened, as a network's filesystem may remember what
    was there before."""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def _trained(plan: AnyPlan) -> dict[str, Any]:
    """What of a plan a checkpoint and the run that goes on from it must have in common."""
    optimizer = plan.job.optimizer
    if isinstance(plan, GraphPlan):
        graph = plan.graph
        return {
            "model": None, "graph": graph_hash(graph), "optimizer": optimizer,
            "global_batch_size": graph.batch, "seq_len": graph.seq_len,
        }  # fmt: skip
    return {
        "model": model_hash(plan.model.config), "graph": None, "optimizer": optimizer,
        "global_batch_size": plan.job.global_batch_size, "seq_len": plan.job.seq_len,
    }  # fmt: skip


def copied(job: AnyJob) -> dict[str, Tensor | TensorChunks]:
    """What this rank saves of `job`, on the host, as no step changes it. Call it on every rank."""
    if isinstance(job, GraphTrainingJob):
        return state_dict.graph_state_copies(job)
    if isinstance(job, UnevenTrainingJob):
        return state_dict.uneven_state_copies(job)
    return {name: _copied(tensor.detach()) for name, tensor in state_of(job).items()}


def _copied(tensor: Tensor) -> Tensor | TensorChunks:
    own = local(tensor).to("cpu", copy=True)
    if not isinstance(tensor, DTensor):
        return own
    start, _ = chunk_of(tensor)
    return TensorChunks(tensor.shape, {tuple(start): own} if own.numel() else {})


def _failure(error: checkpoint.CheckpointException) -> tuple[int, BaseException]:
    """The first rank that failed, and how."""
    rank = min(error.failures)
    return rank, error.failures[rank][0]


def _system_error(error: Exception) -> Exception:
    """What the system said where a file could not be written: PyTorch's error of a file that ends too early
    comes above it."""
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


def load(job: AnyJob, folder: str) -> None:
    """Put the checkpoint in `folder` into `job`, however it was divided when it was saved; on every rank."""
    if isinstance(job, GraphTrainingJob):
        _load(state_dict.graph_load_targets(job), folder)
        job.sync_weights()
        return
    if isinstance(job, UnevenTrainingJob):
        required, values = state_dict.uneven_load_targets(job)
        _load(required, folder)
        state_dict.restore_uneven_state(job, required, values)
        return
    make_states(job)
    state = state_of(job)
    _load(state, folder)
    with torch.no_grad():  # of two copies on one rank, only the second has been filled
        for index, name, parameter in named(job):
            whole = whole_name(job, index, name)
            parameter.copy_(state[f"model.{whole}"])
            for key, value in job.optimizer.state[parameter].items():
                value.copy_(state[f"optimizer.{whole}.{key}"])
    job.sync_weights()


def _load(state: Mapping[str, Tensor | TensorChunks], folder: str) -> None:
    with _read_from(folder):
        checkpoint.load(dict(state), checkpoint_id=folder, planner=ChunkLoadPlanner())


@contextmanager
def _read_from(folder: str) -> Iterator[None]:
    """ConfigError where the checkpoint in `folder` cannot be read, on every rank: PyTorch's own is no
    Exception, and would end the process as if it had been interrupted."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except checkpoint.CheckpointException as error:
        rank, failure = _failure(error)
        path = getattr(failure, "filename", None)
        raise ConfigError(
            f"cannot be read: {_why(failure)}", file=str(path or folder), found=f"on rank {rank}",
            allowed="a whole checkpoint, in a folder that all hosts share",
        ) from None  # fmt: skip


def export(plan: AnyPlan, root: str, folder: str) -> None:
    """Write the parameters of the newest checkpoint in `root`, of a run of what the plan trains, into
    `folder`: those of a model as Hugging Face's libraries read them, those of a graph by its names. In one
    process, which holds all of them."""
    saved, _ = resumable(plan, root)
    with _read_from(saved):
        state = _whole_parameters(saved)
        checkpoint.load(state, checkpoint_id=saved, no_dist=True)
    whole = {name.removeprefix(_PARAMETER): tensor for name, tensor in state.items()}
    if isinstance(plan, GraphPlan):
        save_graph_weights(whole, folder)
    else:
        save_weights(plan.model, whole, folder)


def _whole_parameters(folder: str) -> dict[str, Tensor]:
    """Room for each parameter of the checkpoint in `folder`, by its name there."""
    stored = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in stored.items()
        if name.startswith(_PARAMETER)
    }


def resumable(plan: AnyPlan, root: str) -> tuple[str, Manifest]:
    """The newest checkpoint in `root`, where a run under `plan` can go on from it. ConfigError where not."""
    folder, manifest = newest(root)
    required = _trained(plan)
    is_of_graph = manifest.graph is not None
    if is_of_graph is not isinstance(plan, GraphPlan):
        kinds = ("a plan of strategies", "the plan of an operator graph")
        raise ConfigError(
            "is a checkpoint of another kind of plan", file=folder, found=kinds[is_of_graph],
            allowed=kinds[not is_of_graph],
        )  # fmt: skip
    for key, value in required.items():
        if getattr(manifest, key) != value:
            raise ConfigError(
                "is not the plan's",
                file=folder,
                key=key,
                found=str(getattr(manifest, key)),
                allowed=str(value),
            )
    return folder, manifest
