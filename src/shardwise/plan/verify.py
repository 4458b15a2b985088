"""What is looked at first in a file of ours: what it is, which version, and whether it is as written."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.inputs import Fields, short_repr
from shardwise.plan.document import document_hash
from shardwise.plan.plan import SCHEMA

UNEVEN_PLAN_SCHEMA = "shardwise.uneven-plan"
GRAPH_PLAN_SCHEMA = "shardwise.graph-plan"

MAX_PLAN_BYTES = 8 << 20
"""A plan holds its schedule and its cluster, so it may be larger than other inputs."""

MAX_PLAN_NODES = 1_000_000

_KINDS = {
    SCHEMA: "a uniform strategy",
    UNEVEN_PLAN_SCHEMA: "an uneven plan",
    GRAPH_PLAN_SCHEMA: "an operator graph",
}
"""What plan files of each schema are of, for those that take one kind alone."""


def verify(document: Mapping[str, object], path: str, *, schema: str, version: int, what: str) -> None:
    """ConfigError where the document at `path` is not of this schema (`what` it is called), is newer than
    `version`, or does not have the content that it was written with."""
    fields = Fields(document, file=path)
    if document.get("schema") != schema:
        kind = _KINDS.get(str(document.get("schema")))
        raise fields.error(
            "schema",
            f"is not {what}" if kind is None else f"is that of {kind}, which is not for this",
            found=short_repr(document.get("schema")),
            allowed=schema,
        )
    found = fields.integer("version", low=1, high=10**9)
    if found > version:
        raise fields.error(
            "version",
            f"is a newer plan format than this shardwise reads ({schema} {found})",
            found=str(found),
            allowed=f"up to {version}",
        )
    stated = fields.any("hash")
    try:
        actual = document_hash(document)
    except ValueError as error:
        raise fields.error("hash", f"cannot be computed: {error}") from None
    if stated != actual:
        raise fields.error(
            "hash", "does not match the content: the file was changed", found=short_repr(stated)
        )
