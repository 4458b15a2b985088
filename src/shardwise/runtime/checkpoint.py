"""Saves a job and loads it, under the same plan or another, by PyTorch's distributed checkpoint."""

from __future__ import annotations

import os
import shutil
import warnings
from typing import Any

import torch
from torch import distributed
from torch.distributed import checkpoint

from shardwise.errors import ConfigError
from shardwise.plan import Plan, document_hash, plan_document
from shardwise.runtime.job import Job
from shardwise.runtime.manifest import Manifest, commit, files_in, folder_of, model_hash, newest, prune
from shardwise.runtime.modules import reference_module
from shardwise.runtime.state import make_states, named, state_of, whole_name
from shardwise.runtime.weights import save_weights


def save(job: Job, root: str, *, step: int, seed: int, data: str) -> None:
    """Save `job` after `step` steps into its own folder of `root`; call it on every rank.

    The files are written first; the manifest, once all are there, makes them a checkpoint.
    """
    folder = folder_of(root, step)
    if distributed.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)  # what a run that was ended here has left
        os.makedirs(folder)
    distributed.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of being the only process, of plain tensors
        checkpoint.save(state_of(job), checkpoint_id=folder)
    distributed.barrier()
    if distributed.get_rank() == 0:
        plan = job.plan
        commit(
            folder,
            Manifest(
                step=step,
                seed=seed,
                data=data,
                optimizer=plan.job.optimizer,
                global_batch_size=plan.job.global_batch_size,
                seq_len=plan.job.seq_len,
                model=model_hash(plan.model.config),
                plan=document_hash(plan_document(plan)),
                files=files_in(folder),
            ),
        )
        prune(root)
    distributed.barrier()


def load(job: Job, folder: str) -> None:
    """Put the checkpoint in `folder` into `job`, however it was divided when it was saved; on every rank."""
    make_states(job)
    state = state_of(job)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=folder)
    with torch.no_grad():  # of two copies on one rank, only the second has been filled
        for index, name, parameter in named(job):
            whole = whole_name(job, index, name)
            parameter.copy_(state[f"model.{whole}"])
            for key, value in job.optimizer.state[parameter].items():
                value.copy_(state[f"optimizer.{whole}.{key}"])


def export(plan: Plan, root: str, folder: str) -> None:
    """Write the parameters of the newest checkpoint in `root`, of a run of the plan's model, into `folder` as
    Hugging Face's libraries read them. In one process, which holds the whole model."""
    state = {f"model.{name}": p.data for name, p in reference_module(plan.model).named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=resumable(plan, root)[0], no_dist=True)
    whole = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    save_weights(plan.model, whole, folder)


def resumable(plan: Plan, root: str) -> tuple[str, Manifest]:
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
