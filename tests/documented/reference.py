"""docs/reference/cli.md and docs/reference/api.md, generated from the code."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from tests.documented.pages import ROOT

import shardwise
from shardwise.app.cli.commands import command
from shardwise.plans import WholeRun
from shardwise.questions import (
    CheckedPlan,
    FrontierAnswer,
    ImportedCluster,
    PlanExplanation,
    Replanned,
    Review,
    RunOnPart,
    Sweep,
)
from shardwise.search import PlanComparison

CLI_PAGE = ROOT / "docs" / "reference" / "cli.md"
API_PAGE = ROOT / "docs" / "reference" / "api.md"
PLANNING = """\
[Plan from Python](../how-to/python-api.md) shows how they go together. Times are seconds, sizes bytes, rates
per second. Planning needs no PyTorch; `graph_module`, `parallelize` and `reference_module` train under a plan
and need it (`pip install 'shardwise[torch]'`, [Running a plan](../how-to/train.md)). Names of the package
that this page does not have may change."""
RESULTS = (
    FrontierAnswer, RunOnPart, WholeRun, PlanExplanation, PlanComparison, CheckedPlan, Replanned, Review,
    ImportedCluster, Sweep,
)  # fmt: skip
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
        yield from _documented(name, getattr(shardwise, name))
    yield "\n## Results\n"
    yield "What the functions return, in addition to `Plan`."
    for kind in RESULTS:
        yield from _documented_class(kind.__name__, kind, "###")


def _documented(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value) and not issubclass(value, Exception):
        yield from _documented_class(name, value, "##")
        return
    yield f"\n## {name}\n"
    yield f"```python\n{'class ' if inspect.isclass(value) else ''}{name}{_signature(value)}\n```\n"
    yield inspect.getdoc(value) or ""


def _documented_class(name: str, kind: type, mark: str) -> Iterator[str]:
    """A record: its text, its attributes in a table, its methods."""
    yield f"\n{mark} {name}\n"
    yield inspect.getdoc(kind) or ""
    members = {key: member for key, member in inspect.getmembers_static(kind) if not key.startswith("_")}
    described = {key: _described(member) for key, member in members.items()}
    properties = {key: text for key, text in described.items() if text}
    if properties:
        yield from ("", "| attribute | meaning |", "|---|---|")
        yield from (f"| `{key}` | {_cell(text)} |" for key, text in properties.items())
    for key, member in members.items():
        if inspect.isfunction(member):
            yield f"\n```python\n{name}.{key}{_signature(member)}\n```\n"
            yield inspect.getdoc(member) or ""


def _described(member: object) -> str:
    """The text of a property; empty for other members, as fields, which the text of the class describes."""
    is_property = isinstance(member, property | cached_property)
    return " ".join((inspect.getdoc(member) or "").split()) if is_property else ""


def _signature(value: Any) -> str:
    """The signature, with an argument a line where it is long; names of types without their modules."""
    signature = inspect.signature(value)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    returned = "" if signature.return_annotation in (None, "None") else f" -> {signature.return_annotation}"
    texts: list[str] = []
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and "*" not in texts:
            texts.append("*")
        default = "" if one.default is one.empty else f" = {one.default!r}"
        stars = "**" if one.kind is one.VAR_KEYWORD else ""
        texts.append(f"{stars}{one.name}: {one.annotation}{default}")
    short = f"({', '.join(texts)}){returned}"
    return short if len(short) < 80 else "(\n" + "".join(f"    {text},\n" for text in texts) + f"){returned}"
