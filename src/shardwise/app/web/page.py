"""A self-contained HTML page: the template with its styles, its scripts and one JSON document.

The page requests nothing: its content security policy allows the scripts of this package by their hash, and
no other source. The document is data in a script element that no browser runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template

from shardwise.app.web.document import report_document
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import Plan, StrategyFrontier

SCRIPTS = (
    "base.js", "answer.js", "bars.js", "pipeline.js", "layout.js", "frontier.js", "replay.js", "tables.js",
)  # fmt: skip
"""Scripts of every page in the order in which they run, each in `assets`."""

SERVER_SCRIPT, MAIN_SCRIPT = "serve.js", "main.js"
"""The script that asks the server, in its own page alone; and the last one, which shows the document."""

TEMPLATE, STYLES = "page.html", "page.css"


def page_of(title: str, document: Mapping[str, object], *, asks_server: bool = False) -> bytes:
    """The page of `document`, whose `schema` says which parts it shows, in UTF-8. A page that `asks_server`
    may send requests to the server that it is from."""
    names = (*SCRIPTS, *([SERVER_SCRIPT] if asks_server else []), MAIN_SCRIPT)
    script = "\n".join(map(_asset, names))
    script = f'"use strict";\n(() => {{\n{script}\n}})();\n'
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        Template(_asset(TEMPLATE))
        .substitute(
            title=escape(title),
            styles=_asset(STYLES),
            digest=digest,
            connect="'self'" if asks_server else "'none'",
            data=script_json(document),
            script=script,
        )
        .encode("utf-8")
    )


def report_page(
    plans: Sequence[Plan],
    names: Sequence[str] = (),
    frontiers: Sequence[StrategyFrontier | None] = (),
) -> bytes:
    """The report of one plan, or of two plans side by side; arguments and errors of `report_document`."""
    title = " and ".join(dict.fromkeys(f"{plan.name} on {plan.cluster.name}" for plan in plans))
    return page_of(title, report_document(plans, names, frontiers))


def page_suffix_checked(path: str, *, key: str = "--out") -> str:
    """The path of a page. Raises ConfigError unless it ends in .html."""
    if os.path.splitext(path)[1].lower() != ".html":
        raise ConfigError(
            "has no suffix of a page", key=key, found=printable(path) or "''", allowed="a name in .html"
        )
    return path


def script_json(value: object) -> str:
    """JSON for a script element: escaped so that it can neither end the element nor open a comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files(__package__).joinpath("assets", name).read_text("utf-8")
