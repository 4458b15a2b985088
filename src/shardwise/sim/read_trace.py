"""A trace file read back: the spans that `write_trace` wrote in Chrome's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike, fspath

from shardwise.errors import ConfigError
from shardwise.inputs import Fields, printable, read_bytes, read_mapping
from shardwise.sim.spans import Span, Trace

MAX_BYTES = 256 * 2**20
MAX_NODES = 20_000_000

_LOG = re.compile(rb'\s*\{\s*"step"\s*:')
"""How a log of steps begins, which people take for the trace."""

_MAX_US = 1e13
"""Of an instant or a length: a hundred days."""


def read_trace(path: str | PathLike[str]) -> Trace:
    """The spans of the trace at `path`, and the hash of its plan where it has one; its arrows, counters and
    names are left out.

    Raises ConfigError where it is no such file, or has no spans.
    """
    name = fspath(path)
    if name.endswith(".pftrace"):
        raise ConfigError(
            "is a trace for Perfetto alone, which is not read", file=printable(name),
            allowed="one in JSON, as --trace FILE.json writes",
        )  # fmt: skip
    if _LOG.match(read_bytes(name, max_bytes=MAX_BYTES)):
        raise ConfigError(
            "is a log of steps and no trace", file=printable(name),
            allowed="a trace in JSON, as `train --trace FILE.json` writes",
        )  # fmt: skip
    document = read_mapping(name, max_bytes=MAX_BYTES, max_nodes=MAX_NODES)
    fields = Fields(document, file=name)
    events = fields.mappings("traceEvents", low=1)
    spans = tuple(_span(event) for event in events if event.any("ph", default="") == "X")
    if not spans:
        raise ConfigError("has no spans", file=printable(name), key="traceEvents")
    return Trace(spans=spans, plan_hash=_plan_hash(fields))


def _plan_hash(fields: Fields) -> str | None:
    if not isinstance(fields.any("otherData", default=None), Mapping):
        return None
    other = fields.mapping("otherData")
    return other.text("plan_hash") if "plan_hash" in other.names else None


def _span(event: Fields) -> Span:
    start_us = event.number("ts", low=0.0, high=_MAX_US)
    length_us = event.number("dur", low=0.0, high=_MAX_US)
    return Span(
        rank=event.integer("pid", low=1, high=10**9) - 1,
        track=event.text("cat"),
        name=event.text("name"),
        start_s=start_us * 1e-6,
        finish_s=(start_us + length_us) * 1e-6,
    )
