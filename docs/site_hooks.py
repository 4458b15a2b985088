"""Hooks of the documentation site (mkdocs.yml): patterns in the navigation, and links that leave docs/.

Pages link to files of the repository by relative paths, such as `../../tests/unit/test_ties.py`, which work
where the repository is read. The site has no such files: there the text of the link stays. Where mkdocs.yml
names a `repo_url`, the link leads to the file in the repository. A file that does not exist fails the build.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\.?/[^)\s#]+)(#[^)\s]*)?\)")

_log = logging.getLogger("mkdocs.hooks.shardwise")


def on_config(config: Any) -> Any:
    """Replace each pattern of the navigation with the pages that match it and have no entry of their own."""
    listed = set(_listed(config.nav))
    config.nav = _expanded(config.nav, listed)
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace links to files outside docs/."""
    return outside_links_replaced(markdown, page.file.src_uri, config.repo_url)


def outside_links_replaced(markdown: str, source: str, repository: str | None) -> str:
    """The text of page `source` (a path in docs/), with links that its site can follow."""

    def replaced(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = os.path.normpath(DOCS / PurePosixPath(source).parent / target)
        if Path(path).is_relative_to(DOCS):
            return match[0]
        if not Path(path).exists():
            _log.warning(f"'{source}' links to '{target}', which is not in the repository")
        inside = Path(path).relative_to(ROOT).as_posix()
        return f"[{text}]({repository.rstrip('/')}/blob/main/{inside}{anchor})" if repository else text

    return LINK.sub(replaced, markdown)


def _listed(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [] if "*" in entries else [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [path for value in values for path in _listed(value)]


def _expanded(entries: list[Any], listed: set[str]) -> list[Any]:
    result: list[Any] = []
    for entry in entries:
        if isinstance(entry, str):
            result += _matching(entry, listed) if "*" in entry else [entry]
            continue
        for title, value in entry.items():
            if isinstance(value, str):
                pages = _matching(value, listed) if "*" in value else value
            else:
                pages = _expanded(value, listed)
            if pages:
                result.append({title: pages})
    return result


def _matching(pattern: str, listed: set[str]) -> list[str]:
    """Index pages first, then by name."""
    found = [path.relative_to(DOCS).as_posix() for path in DOCS.glob(pattern)]
    found = [path for path in found if path not in listed]
    return sorted(found, key=lambda path: (PurePosixPath(path).name != "index.md", path))
