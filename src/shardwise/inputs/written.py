"""A mapping as the text of a file, in the format that the file's name says."""

from __future__ import annotations

import json
from collections.abc import Mapping

from shardwise.errors import InternalError
from shardwise.inputs.read import json_suffix
from shardwise.inputs.yaml_written import dumps_yaml


def dumps(document: Mapping[str, object], *, file: str) -> str:
    """`document` as text that `read_mapping` reads back from a file of the name `file`: JSON where that ends
    in `.json`, else YAML. Values are those of `dumps_yaml`."""
    if not json_suffix(file):
        return dumps_yaml(document)
    try:
        return json.dumps(document, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise InternalError(f"a file cannot hold this: {error}") from error
