"""The strict reader of input files: YAML or JSON in, plain mappings out.

It is stricter than the formats. There are no anchors, aliases, tags, merge keys or duplicate keys; keys are
strings. A plain YAML scalar is null, true, false or a number exactly where JSON says so: `1e9` is a number;
`no`, `017`, `12:30:00` and `1_000` are text. Numbers are finite. Size, depth and the number of values are
limited before anything is built. Every problem becomes one ConfigError: where, what was found, what is
allowed.

`dumps` (JSON or YAML by the file's name), `dumps_yaml` and `dumps_flow_yaml` are the inverse: the reader
returns the values that they wrote. `record_of` fills a record of arguments.
"""

from shardwise.inputs.dump import dumps, dumps_flow_yaml, dumps_yaml
from shardwise.inputs.fields import Fields
from shardwise.inputs.messages import (
    install_text,
    join_key,
    listed,
    misspelt,
    nearest,
    printable,
    short_repr,
    unknown,
)
from shardwise.inputs.read import parse_list, parse_mapping, read_bytes, read_mapping, read_text
from shardwise.inputs.record import record_of

__all__ = [
    "Fields",
    "dumps",
    "dumps_flow_yaml",
    "dumps_yaml",
    "install_text",
    "join_key",
    "listed",
    "misspelt",
    "nearest",
    "parse_list",
    "parse_mapping",
    "printable",
    "read_bytes",
    "read_mapping",
    "read_text",
    "record_of",
    "short_repr",
    "unknown",
]
