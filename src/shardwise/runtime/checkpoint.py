"""Saves a job and loads it, under the same plan or another, by PyTorch's distributed checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint
from torch.distributed.tensor import DTensor

from shardwise.errors import ConfigError
from shardwise.plan import Plan, UnevenFile, document_hash, plan_document, uneven_plan_document
from shardwise.runtime.gradients import local
from shardwise.runtime.job import Job
from shardwise.runtime.manifest import Manifest, commit, files_in, folder_of, model_hash, newest, prune
from shardwise.runtime.modules import reference_module
from shardwise.runtime.private import Boxes, LoadsBoxes, SavesBoxes, chunk_of
from shardwise.runtime.state import make_states, named, state_of, whole_name
from shardwise.runtime.uneven import UnevenJob
from shardwise.runtime.uneven_state import copied_of, fill, wanted_of
from shardwise.runtime.weights import save_weights


class Saving:
    """A checkpoint that is being written beside the run: of the job as it was when this was made.

    Parameters and states are copied first; then a thread of each rank writes its part, and that of rank 0
    commits the manifest once all parts are there. Make it on every rank, and `wait` for it on every rank
    before the next one.
    """

    def __init__(self, job: Job | UnevenJob, root: str, *, step: int, seed: int, data: str) -> None:
        self._folder = folder_of(root, step)
        # Collectives of the thread must not come between those of the steps.
        self._group = distributed.new_group(backend="gloo")
        plan = job.plan
        manifest = Manifest(
            step=step,
            seed=seed,
            data=data,
            optimizer=plan.job.optimizer,
            global_batch_size=plan.job.global_batch_size,
            seq_len=plan.job.seq_len,
            model=model_hash(plan.model.config),
            plan=document_hash(
                uneven_plan_document(plan) if isinstance(plan, UnevenFile) else plan_document(plan)
            ),
            files={},
        )
        executor = ThreadPoolExecutor(1)
        self._written = executor.submit(self._write, copied(job), root, manifest)
        executor.shutdown(wait=False)

    def _write(self, state: dict[str, Tensor | Boxes], root: str, manifest: Manifest) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of being the only process, of plain tensors
            checkpoint.save(
                state, checkpoint_id=self._folder, planner=SavesBoxes(), process_group=self._group
            )
        if distributed.get_rank(self._group) == 0:  # has heard of every rank that it is done
            commit(self._folder, replace(manifest, files=files_in(self._folder)))
            prune(root)

    def wait(self) -> None:
        """Until this rank's part is written; on rank 0 until the checkpoint is committed. ConfigError where
        it cannot be written."""
        try:
            self._written.result()
        except checkpoint.CheckpointException as error:
            first = next(iter(error.failures.values()))[0]
            raise _not_written(self._folder, first) from None
        except OSError as error:
            raise _not_written(self._folder, error) from None
        distributed.destroy_process_group(self._group)


def copied(job: Job | UnevenJob) -> dict[str, Tensor | Boxes]:
    """What this rank saves of `job`, on the host, as no step changes it. Call it on every rank."""
    if isinstance(job, UnevenJob):
        return copied_of(job)
    return {name: _copied(tensor.detach()) for name, tensor in state_of(job).items()}


def _copied(tensor: Tensor) -> Tensor | Boxes:
    own = local(tensor).to("cpu", copy=True)
    if not isinstance(tensor, DTensor):
        return own
    start, _ = chunk_of(tensor)
    return Boxes(tensor.shape, {tuple(start): own} if own.numel() else {})


def _not_written(folder: str, error: BaseException) -> ConfigError:
    why = (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).splitlines()[0]
    return ConfigError(f"cannot be written: {why.lower()}", file=folder, key="--checkpoint")


def load(job: Job | UnevenJob, folder: str) -> None:
    """Put the checkpoint in `folder` into `job`, however it was divided when it was saved; on every rank."""
    if isinstance(job, UnevenJob):
        wanted, values = wanted_of(job)
        _load(wanted, folder)
        fill(job, wanted, values)
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


def _load(state: Mapping[str, Tensor | Boxes], folder: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(dict(state), checkpoint_id=folder, planner=LoadsBoxes())


def export(plan: Plan | UnevenFile, root: str, folder: str) -> None:
    """Write the parameters of the newest checkpoint in `root`, of a run of the plan's model, into `folder` as
    Hugging Face's libraries read them. In one process, which holds the whole model."""
    state = {f"model.{name}": p.data for name, p in reference_module(plan.model).named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=resumable(plan, root)[0], no_dist=True)
    whole = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    save_weights(plan.model, whole, folder)


def resumable(plan: Plan | UnevenFile, root: str) -> tuple[str, Manifest]:
    """The newest checkpoint in `root`, where a run under `plan` can go on from it. ConfigError where not."""
    folder, manifest = newest(root)
    job = plan.job
    wanted: dict[str, Any] = {
        "model": model_hash(plan.model.config),
        "optimizer": job.optimizer,
        "global_batch_size": job.global_batch_size,
        "seq_len": job.seq_len,
    }
    for key, value in wanted.items():
        if getattr(manifest, key) != value:
            raise ConfigError(
                "is not the plan's",
                file=folder,
                key=key,
                found=str(getattr(manifest, key)),
                allowed=str(value),
            )
    return folder, manifest
