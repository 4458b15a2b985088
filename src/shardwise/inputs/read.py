"""Files and texts as mappings: a regular UTF-8 file of limited size, JSON or YAML."""

from __future__ import annotations

import os
import re
import stat

from shardwise.errors import ConfigError
from shardwise.inputs.json_text import json_value
from shardwise.inputs.limits import MAX_BYTES, MAX_NODES, too_large
from shardwise.inputs.scalars import NOT_TEXT
from shardwise.inputs.words import printable, short_repr
from shardwise.inputs.yaml_text import yaml_value


def read_mapping(path: str, *, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES) -> dict[str, object]:
    """The mapping in the file at `path`: JSON or YAML by its suffix, else by its content."""
    text = read_text(path, max_bytes=max_bytes)
    return parse_mapping(text, file=path, max_bytes=max_bytes, max_nodes=max_nodes)


def read_text(path: str, *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a regular UTF-8 file of at most `max_bytes`; anything else is a ConfigError, at once."""
    data = read_bytes(path, max_bytes=max_bytes)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise ConfigError("is not UTF-8 text", file=printable(path), found=found, allowed="UTF-8") from None


def read_bytes(path: str, *, max_bytes: int = MAX_BYTES) -> bytes:
    """What a regular file of at most `max_bytes` holds; anything else is a ConfigError, at once."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(
                "cannot be read", file=printable(path), found=_kind_of(status.st_mode), allowed="a file"
            )
        if status.st_size > max_bytes:
            raise too_large(path, status.st_size, max_bytes)
        # The file may have become a pipe since; opening must not wait for a writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            data = file.read(max_bytes + 1) or b""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(
            "cannot be read", file=printable(path), found=why.lower(), allowed="a file"
        ) from None
    if len(data) > max_bytes:
        raise too_large(path, len(data), max_bytes)
    return data


def parse_mapping(
    text: str, *, file: str | None = None, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES
) -> dict[str, object]:
    """The mapping that `text` holds, as JSON or YAML; `file` is what errors name.

    Raises ConfigError for text that breaks a rule of this package, is empty, or holds no mapping.
    """
    where = printable(file) if file else None
    nbytes = len(text.encode("utf-8", "surrogatepass"))
    if nbytes > max_bytes:
        raise too_large(file, nbytes, max_bytes)
    if bad := NOT_TEXT.search(text):
        found = f"{bad.group()!r} at character {bad.start()}"
        raise ConfigError("is not text", file=where, found=found, allowed="UTF-8 without NUL")
    if not text.strip():
        raise ConfigError("is empty", file=where, allowed="a mapping of keys to values")
    value = json_value(text, where, max_nodes) if _is_json(text, file) else yaml_value(text, where, max_nodes)
    if not isinstance(value, dict):
        raise ConfigError("is not a mapping", file=where, found=short_repr(value), allowed="keys with values")
    return value


def _kind_of(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "something that is not a file")


def _is_json(text: str, file: str | None) -> bool:
    by_suffix = json_suffix(file or "")
    return by_suffix if by_suffix is not None else re.match(r'\s*\{\s*["}]', text) is not None


def json_suffix(file: str) -> bool | None:
    """Whether the name of a file says that it is JSON; None where it says neither that nor YAML."""
    return {".json": True, ".yaml": False, ".yml": False}.get(os.path.splitext(file)[1].lower())
