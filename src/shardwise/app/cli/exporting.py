"""The command `export`: writes files of a target for a plan; the target's own code reads them back."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shardwise.app.cli.output import Output, row
from shardwise.app.cli.request import check_output_path, choice
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import read_plan, write_file
from shardwise.targets import EXPORTERS, WRITTEN_BY, Files, ReadBack, export_of

DIFFERS = 4
"""Exit code where the target reads other values than the plan has."""

_HEAD_BYTES = 4096


def exported_plan(path: str, *, to: str, out: str, is_validated: bool) -> Output:
    """Write the plan file at `path` for the target `to` into the folder `out`, which is created if missing.

    With `is_validated` the target's own code reads the files first; where it reads other values, nothing is
    written. ConfigError for a plan that the target cannot express.
    """
    target = export_of(to) or choice("--to", to, tuple(EXPORTERS))
    exporter = EXPORTERS[target]
    plan = read_plan(path)
    try:
        plan.require_kind("uniform")
        files = exporter.files(plan)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    _check_folder(out, files, path)
    found = exporter.read_back(plan, files) if is_validated else None
    if found is not None and found.differences:
        return _differing(target, found)
    _write(out, files)
    return _written(out, target, files, found)


def _check_folder(out: str, files: Mapping[str, str], path: str) -> None:
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
        check_output_path("--out", file, inputs=(path,))
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
    for name, text in files.items():
        write_file(os.path.join(out, name), text.encode())


def _differing(target: str, found: ReadBack) -> Output:
    lines = [
        f"shardwise: error: {target} reads {each.field} as {each.read}; the plan has {each.plan}"
        for each in found.differences
    ]
    return Output(notes=[*lines, "shardwise: nothing was written"], code=DIFFERS)


def _written(out: str, target: str, files: Files, found: ReadBack | None) -> Output:
    reader = EXPORTERS[target].reader
    lines = [row("target", (target, "value"))]
    lines += [row("wrote", (printable(os.path.join(out, name)), "code")) for name in files]
    if found is None:
        lines.append(row("read back", (f"no; --validate reads the files with {reader}", "dim")))
    else:
        lines.append(row("read back", (f"{found.values} values read back equal by {reader}", "good")))
    return Output(lines=lines)
