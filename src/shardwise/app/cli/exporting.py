"""The command `export`: what was written for a target, and what the target's own code read back."""

from __future__ import annotations

from shardwise import api
from shardwise.app.cli.output import Output, row
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import read_plan
from shardwise.questions import ExportedPlan

DIFFERS = 4
"""Exit code where the target reads other values than the plan has."""


def exported_plan(path: str, *, to: str, out: str, is_validated: bool) -> Output:
    """The answer of `export` for the plan file at `path`."""
    read_plan(path)  # errors in the file name the file
    try:
        found = api.export(path, to=to, out=out, validate=is_validated)
    except ConfigError as error:
        is_of_file = error.key is not None and not error.key.startswith("--")
        raise (error.within(file=printable(path)) if is_of_file else error) from None
    return _written(found) if found.is_equal else _differing(found)


def _differing(found: ExportedPlan) -> Output:
    differences = () if found.read_back is None else found.read_back.differences
    lines = [
        f"shardwise: error: {found.target} reads {each.field} as {each.read}; the plan has {each.plan}"
        for each in differences
    ]
    return Output(notes=[*lines, "shardwise: nothing was written"], code=DIFFERS)


def _written(found: ExportedPlan) -> Output:
    lines = [row("target", (found.target, "value"))]
    lines += [row("wrote", (printable(path), "code")) for path in found.paths]
    if found.read_back is None:
        lines.append(row("read back", (f"no; --validate reads the files with {found.reader}", "dim")))
    else:
        text = f"{found.read_back.values} values read back equal by {found.reader}"
        lines.append(row("read back", (text, "good")))
    return Output(lines=lines)
