"""What `fit` answers: the numbers that explain measured runs best, as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwise.accuracy import fit_document, fit_rows, read_rows
from shardwise.app.cli.output import Line, Output
from shardwise.app.cli.request import check_output_path
from shardwise.app.cli.tables import table
from shardwise.app.cli.words import counted, percent
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plan import write_file


def fitted_file(path: str, out: str, *, is_json: bool) -> Output:
    """Fits the rows at `path` and writes what was found to `out`. ConfigError where nothing can be fitted,
    before anything is written."""
    check_output_path("--out", out, inputs=(path,))
    rows, unread = read_rows(path)
    try:
        found = fit_rows(rows)
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    document: dict[str, Any] = fit_document(found)
    write_file(out, (json.dumps(document, indent=1) + "\n").encode())
    notes = [
        f"wrote {printable(out)}: {counted(document['fitted_numbers'], 'number')} from "
        f"{counted(document['runs'], 'run')}, {len(unread) + len(found.faults)} rows not used"
    ]
    if is_json:
        return Output(document=document, notes=notes)
    return Output(lines=_lines(document), notes=notes)


def _lines(document: Mapping[str, Any]) -> list[Line]:
    cells = [
        (f" {name}", f"{figures['runs']}", percent(figures["mape"], 1), percent(figures["bias"], 1))
        for name, figures in document["sources"].items()
    ]
    bands = [
        ((f" band, {name}: {low:g} to {high:g} of the predicted time", "dim"),)
        for name, (low, high) in document["bands"].items()
    ]
    return [*table((" source", "runs", "mean error", "bias"), cells, left=1), *bands]
