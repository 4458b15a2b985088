"""The one strict reader of files that people write: YAML or JSON in, plain mappings out.

Stricter than the formats: no anchors, aliases, tags, merge keys or duplicate keys; keys are strings; a plain
YAML scalar is null, true, false or a number exactly where JSON says so (`1e9` is a number; `no`, `017`,
`12:30:00` and `1_000` are text); numbers are finite. Size, depth and the number of values are limited before
anything is built. Whatever is wrong becomes one ConfigError that says where, what was found, what is allowed.

`dumps` (JSON or YAML by the file's name), `dumps_yaml` and `dumps_flow_yaml` are the way back: what they
write, the reader reads as it was."""

from shardwise.inputs.dump import dumps, dumps_flow_yaml, dumps_yaml
from shardwise.inputs.fields import REQUIRED, Fields
from shardwise.inputs.messages import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_NODES,
    join_key,
    nearest,
    printable,
    short_repr,
)
from shardwise.inputs.read import parse_mapping, read_bytes, read_mapping, read_text

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_NODES",
    "REQUIRED",
    "Fields",
    "dumps",
    "dumps_flow_yaml",
    "dumps_yaml",
    "join_key",
    "nearest",
    "parse_mapping",
    "printable",
    "read_bytes",
    "read_mapping",
    "read_text",
    "short_repr",
]
