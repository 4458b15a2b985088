"""The command `report`: one HTML page of a plan, which needs no network and no other file."""

from __future__ import annotations

import os

from shardwise.app.cli.activity import progress
from shardwise.app.cli.output import Output, row
from shardwise.app.web import page_suffix_checked, report_document, report_page
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import check_output_path, read_plan, write_file
from shardwise.questions import frontier_of_plan
from shardwise.units import format_bytes


def reported(
    path: str, *, out: str | None, has_frontier: bool, workers: int, budget_s: float | None, is_json: bool
) -> Output:
    """The answer of `report` for the plan file at `path`; writes the page at `out` unless it `is_json`.

    ConfigError for a file that is no plan, or that this version of shardwise estimates otherwise.
    """
    out = page_suffix_checked(out or f"{os.path.splitext(os.path.basename(path))[0]}.html")
    if not is_json:
        check_output_path("--out", out, inputs=(path,))
    plan = read_plan(path)
    try:
        frontier = None
        if has_frontier:
            with progress() as show:
                frontier = frontier_of_plan(plan, workers=workers, budget=budget_s, progress=show)
        if is_json:
            return Output(document=report_document([plan], [path], [frontier]))
        page = report_page([plan], [path], [frontier])
    except ConfigError as error:
        raise error.within(file=printable(path)) from None
    write_file(out, page)
    return Output(lines=[row("wrote", (printable(out), "code"), (f"   {format_bytes(len(page))}", "dim"))])
