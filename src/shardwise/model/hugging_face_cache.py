"""Configs of the Hugging Face Hub in its local cache: `cached_config` finds that of an id such as
`meta-llama/Llama-3.1-8B`. Nothing is fetched."""

from __future__ import annotations

import os
import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
_FILES = (".json", ".yaml", ".yml")


def is_repository_id(text: str) -> bool:
    """Whether `text` has the form `ORG/NAME` of an id, and names neither a file nor a file's path."""
    return _ID.fullmatch(text) is not None and not text.lower().endswith(_FILES) and not os.path.exists(text)


def cached_config(text: str) -> Path | None:
    """The path of the config.json of this id in the local cache; None where it is not there."""
    folder = cache_folder() / f"models--{text.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text("ascii").strip()
    except (OSError, ValueError):
        revision = ""
    path = folder / "snapshots" / revision / "config.json"
    is_there = re.fullmatch(r"[0-9a-f]{7,64}", revision) is not None and path.is_file()
    return path if is_there else None


def cache_folder() -> Path:
    """The folder of the cache: HF_HUB_CACHE, else `hub` in HF_HOME, else in the user's cache."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home, "hub").expanduser()
