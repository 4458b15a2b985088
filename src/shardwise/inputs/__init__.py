"""The one strict reader of files that people write: YAML or JSON in, plain mappings out.

Stricter than the formats: no anchors, aliases, tags, merge keys or duplicate keys; keys are strings; a plain
YAML scalar is null, true, false or a number exactly where JSON says so (`1e9` is a number; `no`, `017`,
`12:30:00` and `1_000` are text); numbers are finite. Size, depth and the number of values are limited before
anything is built. Whatever is wrong becomes one ConfigError that says where, what was found, what is allowed.

`written` (JSON or YAML by the file's name), `written_yaml` and `flow_yaml` are the way back: what they write,
the reader reads as it was.
"""

from shardwise.inputs.fields import REQUIRED, Fields
from shardwise.inputs.limits import MAX_BYTES, MAX_DEPTH, MAX_NODES
from shardwise.inputs.read import parse_mapping, read_bytes, read_mapping, read_text
from shardwise.inputs.words import join_key, nearest, printable, shown
from shardwise.inputs.written import written
from shardwise.inputs.yaml_written import flow_yaml, written_yaml

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_NODES",
    "REQUIRED",
    "Fields",
    "flow_yaml",
    "join_key",
    "nearest",
    "parse_mapping",
    "printable",
    "read_bytes",
    "read_mapping",
    "read_text",
    "shown",
    "written",
    "written_yaml",
]
