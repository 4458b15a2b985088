"""`frontier --save DIR`: a plan file for each point, and an index of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import TypeVar

from shardwise.app.cli.frontier.document import FrontierAnswer, frontier_document
from shardwise.app.cli.frontier.subject import Subject
from shardwise.app.cli.request import check_output_path
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plan import GraphPlan, write_file, write_graph_plan, write_plan

INDEX = "frontier.json"

LayoutT = TypeVar("LayoutT")


def check_folder(folder: str) -> None:
    """Refuse, before any work is done, a folder that cannot be made or written into."""
    if os.path.isdir(folder):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError("cannot be written into", file=printable(folder), key="--save")
    elif os.path.exists(folder) or not os.path.isdir(os.path.dirname(os.path.abspath(folder))) or not folder:
        raise ConfigError(
            "is not a folder, nor a new name in one",
            key="--save",
            found=repr(folder) if not folder else printable(folder),
            allowed="a folder, for a plan file per point",
        )


def save(
    folder: str, subject: Subject[LayoutT], found: FrontierAnswer[LayoutT], *, inputs: Sequence[str]
) -> list[str]:
    """Writes a plan for each point that a plan file holds, then the answer with their names; each file is
    written whole or not at all, the index last. Returns what there is to say."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot be made: {why}", file=printable(folder), key="--save") from error
    names: list[str | None] = []
    digits = len(str(len(found.points)))
    for number, point in enumerate(found.points, start=1):
        curve = found.curve_of(point)
        name = f"devices-{point.devices}-point-{number:0{digits}}.yaml"
        try:
            plan = subject.plan(curve, curve.points.index(point))
        except ConfigError:
            names.append(None)
            continue
        path = os.path.join(folder, name)
        check_output_path("--save", path, inputs=inputs)
        if isinstance(plan, GraphPlan):
            write_graph_plan(path, plan)
        else:
            write_plan(path, plan)
        names.append(name)
    index = os.path.join(folder, INDEX)
    check_output_path("--save", index, inputs=inputs)
    document = frontier_document(subject, found)
    write_file(index, (json.dumps({**document, "plans": names}, indent=2) + "\n").encode("ascii"))
    plans_written = sum(name is not None for name in names)
    return [f"wrote {plans_written} plans of {len(names)} points and {INDEX} in {folder}"]
