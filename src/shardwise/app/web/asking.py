"""Questions of a page: what they may say (`question_of`), and a process that answers one (`ask`).

A question is a JSON object. It names no file: its model is one of the catalogue or the config in the question
itself, its cluster a shorthand or a shipped cluster. The answer is computed in a process of its own, so that
it can be ended; lines of JSON come back through a pipe.
"""

from __future__ import annotations

import contextlib
import json
import re
import resource
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from shardwise.app.cli.output import failure_of
from shardwise.app.web.document import report_document
from shardwise.cluster import cluster_names
from shardwise.errors import ConfigError
from shardwise.inputs import short_repr
from shardwise.model import catalogue_names
from shardwise.plans import Plan, plan_of

TEXTS = ("target", "dtype", "optimizer", "objective", "inter_node")
NUMBERS = ("seq_len", "global_batch_size", "mean_sample_len", "memory_margin", "tolerance")
KEYS = ("model", "config", "cluster", *TEXTS, *NUMBERS, "fix", "frontier", "changes")
"""Keys of a question; `config` is a Hugging Face config instead of the `model` of the catalogue, `changes`
are those of `explain --what-if`."""

LONGEST_TEXT = 200

MOST_BYTES = 16 << 30
"""Address space of the process of a question."""
_SHORTHAND = re.compile(r"[0-9]{1,7}x(?:[0-9]{1,5}x)?[A-Za-z0-9-]{1,60}")
"""A part of a shorthand without characters of paths."""


def question_of(given: object) -> dict[str, Any]:
    """The arguments of `plan` that a question has, with `changes`. Raises ConfigError for anything else."""
    if not isinstance(given, Mapping):
        raise ConfigError("is not an object", key="question", found=short_repr(given), allowed="an object")
    for key in given:
        if key not in KEYS:
            raise ConfigError("is not known", key=short_repr(key), allowed=", ".join(KEYS))
    found: dict[str, Any] = {"model": _model(given), "cluster": _cluster(given.get("cluster"))}
    for key in (*TEXTS, "fix", "changes"):
        value = given.get(key)
        if value in (None, ""):
            continue
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise ConfigError("is not a short text", key=key, found=short_repr(value), allowed="a text")
        found[key] = value
    for key in NUMBERS:
        value = given.get(key)
        if value in (None, ""):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError("is not a number", key=key, found=short_repr(value), allowed="a number")
        found[key] = value
    if given.get("frontier") is True:
        found["frontier"] = True
    return found


def _model(given: Mapping[str, Any]) -> object:
    config, name = given.get("config"), given.get("model")
    if config is not None:
        if not isinstance(config, Mapping):
            raise ConfigError("is not a config", key="config", found=short_repr(config), allowed="an object")
        return dict(config)
    if not isinstance(name, str) or name.casefold() not in catalogue_names():
        allowed = "a model of the catalogue, or a config"
        raise ConfigError(
            "is not a model of the catalogue", key="model", found=short_repr(name), allowed=allowed
        )
    return name.casefold()


def _cluster(text: object) -> str:
    """A shorthand or the name of a shipped cluster: never a path."""
    if isinstance(text, str) and len(text) <= LONGEST_TEXT:
        parts = [part.strip() for part in text.split("+")]
        if text in cluster_names() or all(_SHORTHAND.fullmatch(part) for part in parts):
            return text
    allowed = f"a shorthand such as 8x8xH100-SXM, or one of {', '.join(cluster_names())}"
    raise ConfigError("is not a cluster", key="cluster", found=short_repr(text), allowed=allowed)


def answer(question: Mapping[str, Any], *, budget_s: float, progress: Any = None) -> dict[str, object]:
    """The document of the report of a question; of two plans where it has changes. Raises as `plan` does."""
    from shardwise import api

    arguments = dict(question)
    changes = arguments.pop("changes", None)
    plan = api.plan(arguments.pop("model"), budget=budget_s, progress=progress, **arguments)
    if changes is None:
        return report_document([plan])
    found = api.what_if(plan, changes, budget=budget_s, progress=progress)
    other = plan_of(
        found.answer, model=found.question.model, cluster=found.question.cluster, job=found.question.job
    )
    return report_document([plan, _named(other, plan)], ["as requested", f"with {changes}"])


def _named(other: Plan, plan: Plan) -> Plan:
    """The changed plan for the target of the plan."""
    return replace(other, question=replace(other.question, target=plan.target))


def _child(connection: Connection, question: dict[str, Any], budget_s: float) -> None:
    """The process of a question: lines of progress, then `{"report": ...}` or `{"error": ...}`."""

    def send(record: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # nobody waits for the answer any more
            connection.send_bytes(json.dumps(record, allow_nan=False).encode("utf-8"))

    with contextlib.suppress(ValueError, OSError):  # where the limit cannot be lowered
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    try:
        found = answer(question, budget_s=budget_s, progress=lambda text: send({"progress": text}))
        send({"report": found})
    except Exception as error:  # noqa: BLE001 - every error is an answer
        send({"error": failure_of(error).document()["error"]})
    finally:
        connection.close()


def ask(question: dict[str, Any], *, budget_s: float) -> tuple[BaseProcess, Connection]:
    """Start the process of a question; whoever asked ends it. Its lines come through the connection."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, question, budget_s), daemon=True)
    process.start()
    sender.close()
    return process, receiver
