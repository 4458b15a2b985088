"""Writes a plan as files of a target; the target's own code reads them back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise import search
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import Plan, check_output_path, plan_hash, write_file
from shardwise.questions.arguments import choice, flag, text
from shardwise.questions.request import require_options
from shardwise.strategy import ANY, newer_target, target_of
from shardwise.targets import EXPORTERS, WRITTEN_BY, Files, ReadBack, export_of, refuse_older, step_time_line

_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedPlan:
    """The files that were written for a target, as paths, and what the target read back.

    `read_back` is None where that was not asked for. Where the target reads other values than the plan has,
    its `differences` name them, and nothing was written. `reader` is what reads the files, in words.
    """

    target: str
    paths: tuple[str, ...]
    read_back: ReadBack | None
    reader: str

    @property
    def is_equal(self) -> bool:
        """Whether no value is known to differ."""
        return self.read_back is None or not self.read_back.differences


def exported(
    plan: Plan, to: object, out: object, *, validate: object = False, inputs: Sequence[str] = ()
) -> ExportedPlan:
    """Write `plan` for the target `to` into the folder `out`, which is created if missing.

    With `validate` the target's own code reads the files first; where it reads other values, nothing is
    written. Files of `inputs` are never replaced. Raises ConfigError for a plan that the target cannot
    express, for a folder that cannot be written, and where the target's code is not installed; Infeasible
    for a plan for other software that does not fit as this target runs it.
    """
    named, folder = text("--to", to), text("--out", out)
    older = newer_target(named)
    target = older or export_of(named) or choice("--to", named, tuple(EXPORTERS))
    exporter = EXPORTERS[target]
    priced, files = files_for(plan, target)
    if older is not None:
        refuse_older(named, target, files)
    _check_folder(folder, files, inputs)
    found = exporter.read_back(priced, files) if flag("--validate", validate) else None
    paths: tuple[str, ...] = ()
    if found is None or not found.differences:
        _write(folder, files)
        paths = tuple(os.path.join(folder, name) for name in files)
    return ExportedPlan(target=target, paths=paths, read_back=found, reader=exporter.reader)


def files_for(plan: Plan, target: str) -> tuple[Plan, dict[str, str]]:
    """`plan` with the prediction of this target, and the texts of its files by name. Raises ConfigError for a
    plan that the target cannot express, and Infeasible for one that does not fit as the target runs it."""
    plan.require_kind("uniform")
    priced = _priced_for(plan, target)
    return priced, _with_both_predictions(EXPORTERS[target].files(priced), plan, priced)


def _priced_for(plan: Plan, name: str) -> Plan:
    """The plan with the prediction and the software profile of this target; the plan itself where it is for
    it. Raises Infeasible where it does not fit as this software runs it."""
    if plan.target == name:
        return plan
    target, options = target_of(name), plan.question.options
    require_options(target, options, plan.job, plan.cluster)
    profile = target.profile_for(plan.job, plan.cluster.vendors.values())
    job = replace(plan.job, profile=target.with_options(profile, options))
    if job == plan.job:
        return plan
    return replace(plan, job=job, best=search.evaluate(plan.model, plan.cluster, job, plan.strategy))


def _with_both_predictions(files: Files, plan: Plan, priced: Plan) -> dict[str, str]:
    """Files of `priced` with the hash of `plan`, and its prediction next to their own."""
    if priced is plan:
        return dict(files)
    own, other = step_time_line(priced), plan.best.step_time_s
    both = f"{own} As in the plan, for {plan.target or ANY}: {other:.6g} s (profile {plan.job.profile.name})."
    hashes = plan_hash(priced), plan_hash(plan)
    return {name: text.replace(own, both).replace(*hashes) for name, text in files.items()}


def _check_folder(out: str, files: Mapping[str, str], inputs: Sequence[str]) -> None:
    """ConfigError where files cannot be written into the folder, or would replace other files. A file whose
    format has no comments (a CSV) belongs to the file next to it that says who wrote it."""
    if os.path.lexists(out) and not os.path.isdir(out):
        raise ConfigError("is not a folder", key="--out", found=printable(out), allowed="a folder")
    if not os.path.isdir(out):
        return
    marked = [os.path.join(out, name) for name, text in files.items() if WRITTEN_BY in text]
    is_own_folder = any(os.path.exists(file) and _is_own(file) for file in marked)
    for name in files:
        file = os.path.join(out, name)
        check_output_path("--out", file, inputs=inputs)
        if os.path.exists(file) and not (_is_own(file) if file in marked else is_own_folder):
            raise ConfigError(
                "was not written by shardwise export and would be overwritten",
                key="--out", found=printable(file), allowed="another folder",
            )  # fmt: skip


def _is_own(file: str) -> bool:
    try:
        with open(file, "rb") as opened:
            return WRITTEN_BY.encode() in opened.read(_HEAD_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {(error.strerror or str(error)).lower()}", key="--out", found=printable(file)
        ) from None


def _write(out: str, files: Mapping[str, str]) -> None:
    try:
        os.makedirs(out, exist_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot be created: {why.lower()}", key="--out", found=printable(out)) from None
    for name, content in files.items():
        write_file(os.path.join(out, name), content.encode())
