"""Saves a job and loads it, under the same plan or another, by PyTorch's distributed checkpoint."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.plan import AnyPlan, GraphPlan, plan_hash
from shardwise.runtime import graph_state, uneven_state
from shardwise.runtime.data import DataIdentity
from shardwise.runtime.gradients import local
from shardwise.runtime.graphs import GraphTrainingJob
from shardwise.runtime.job import TrainingJob
from shardwise.runtime.manifest import (
    Manifest,
    commit,
    files_in,
    folder_of,
    graph_hash,
    mark_folder,
    model_hash,
    newest,
    prune,
    remove_unfinished,
)
from shardwise.runtime.private import ChunkLoadPlanner, ChunkSavePlanner, TensorChunks, chunk_of
from shardwise.runtime.state import make_states, named, state_of, whole_name
from shardwise.runtime.texts import all_gather_json
from shardwise.runtime.uneven import UnevenTrainingJob
from shardwise.runtime.weights import save_graph_weights, save_weights

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
        return graph_state.graph_state_copies(job)
    if isinstance(job, UnevenTrainingJob):
        return uneven_state.uneven_state_copies(job)
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
        _load(graph_state.graph_load_targets(job), folder)
        job.sync_weights()
        return
    if isinstance(job, UnevenTrainingJob):
        required, values = uneven_state.uneven_load_targets(job)
        _load(required, folder)
        uneven_state.restore_uneven_state(job, required, values)
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
