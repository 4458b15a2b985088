"""docs/reference/cli.md and docs/reference/api.md, generated from the code."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from tests.documented.pages import ROOT

import shardwise
from shardwise.app.cli.commands import command

CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
API_PAGE = ROOT / "docs" / "reference" / "api.md"
PLANNING = """\
They train under a plan on PyTorch (`pip install 'shardwise[torch]'`); [Running a plan](../how-to/train.md)
shows a program. Planning is available through the [command line](cli.md) today: `shardwise plan --save
plan.yaml` writes a plan file, and `--json` gives every answer to scripts ([formats](formats.md)). Modules
of the package that this page does not name may change."""
REMAKE = "This page is made from the code by `python -m tests.documented`."


def cli_page() -> str:
    """Every visible command with its arguments and options."""
    return "\n".join(_cli_lines()) + "\n"


def api_page() -> str:
    """Every public name of the package `shardwise`."""
    return "\n".join(_api_lines()) + "\n"


def _cli_lines() -> Iterator[str]:
    root = command()
    leaves = list(_leaves(root, "shardwise"))
    yield "# Command line"
    yield f"\nThe commands of `shardwise`, their arguments, options and defaults. {REMAKE}"
    yield "`shardwise COMMAND --help` prints the same in the terminal.\n"
    yield f"{root.epilog}\n"
    yield from ("| command | purpose |", "|---|---|")
    for name, node in leaves:
        yield f"| [`{name}`](#{name.replace(' ', '-')}) | {_cell(_summary(node))} |"
    for name, node in leaves:
        yield f"\n## {name}\n"
        yield from textwrap.wrap(_text(node.help), 118)
        yield f"\n    {_usage(name, node)}\n"
        parameters = [each for each in node.params if not getattr(each, "hidden", False)]
        if not parameters:
            yield "It has no options."
            continue
        yield from ("| argument or option | default | meaning |", "|---|---|---|")
        for each in parameters:
            yield f"| {_spelling(each)} | {_default(each)} | {_cell(_text(each.help))} |"


def _leaves(node: Any, name: str) -> Iterator[tuple[str, Any]]:
    for child_name, child in node.commands.items():
        if child.hidden:
            continue
        whole = f"{name} {child_name}"
        if hasattr(child, "commands"):
            yield from _leaves(child, whole)
        else:
            yield whole, child


def _usage(name: str, node: Any) -> str:
    arguments = [each.metavar for each in node.params if _is_argument(each)]
    needed = [
        f"{each.opts[0]} {each.metavar}" for each in node.params if each.required and not _is_argument(each)
    ]
    return " ".join([name, *arguments, *needed, "..."])


def _is_argument(parameter: Any) -> bool:
    return not parameter.opts[0].startswith("-")


def _spelling(parameter: Any) -> str:
    if _is_argument(parameter):
        return f"`{_bare(parameter.metavar)}`"
    value = "" if parameter.is_flag else f" {_bare(parameter.metavar)}"
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    return f"`{names}{value}`{', repeatable' if parameter.multiple else ''}"


def _bare(metavar: str) -> str:
    return metavar.replace("|", "\\|")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    is_shown = not parameter.is_flag if hasattr(parameter, "is_flag") else True
    return f"`{parameter.default}`" if is_shown and parameter.default not in (None, "", ()) else ""


def _summary(node: Any) -> str:
    return re.split(r"(?<=\.) ", _text(node.help))[0]


def _text(text: str | None) -> str:
    return " ".join((text or "").split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _api_lines() -> Iterator[str]:
    yield "# Python interface"
    yield f"\nThe public names of the package `shardwise`. {REMAKE}\n"
    yield PLANNING
    for name in sorted(shardwise.__all__):
        yield from _documented(name, getattr(shardwise, name), 2)


def _documented(name: str, value: Any, level: int) -> Iterator[str]:
    yield f"\n{'#' * level} {name}\n"
    yield "```python"
    yield f"{'class ' if inspect.isclass(value) else ''}{name}{_signature(value)}"
    yield "```\n"
    yield inspect.getdoc(value) or ""


def _signature(value: Any) -> str:
    text = str(inspect.signature(value)).replace("'", "")
    return (
        text
        if len(text) < 80
        else text.replace("(", "(\n    ", 1).replace(", *, ", ",\n    *,\n    ").replace(") ->", ",\n) ->")
    )
