"""Reads command lines, shown outputs and example files from a page.

A command is a line that starts with `shardwise` or `python -m shardwise`, in an indented block or in a fenced
block that is not an output. A ```text block after a block of commands shows the output of the last one: its
first sections, which blank lines divide. A line "…" stands for omitted lines: the output continues at the
next line that begins with the same word as the line after it. A fenced block with `title="NAME"` is the file
NAME.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = ("", "sh", "bash", "shell", "console")
ELLIPSIS = "…"

_FENCE = re.compile(r"^ {0,3}```(\S*)(?: title=\"([\w.-]+)\")?\s*$")
_PREFIX = re.compile(r"^(?:\$ )?(?:sudo )?(?:python -m )?(?=shardwise\s)")
_OPERATORS = frozenset({"|", ">", ">>", "2>", "2>&1", "<", "&", "&&", "||", ";"})
_PLACEHOLDER = re.compile(r"[A-Z_]+(\.[a-z]+)?|.*[|\\].*|.*(\.\.\.|…).*")
_GAP = re.compile(r"((?:\A|\n+) *…(?=\n|\Z)\n*)")
_INLINE = re.compile(r"`(?:python -m )?(shardwise [a-z][^`]*)`")


@dataclass(frozen=True)
class Command:
    """One command line of a page."""

    page: Path
    line: int
    text: str
    shown: str | None = None
    """The output below it, if the page shows one."""

    @property
    def words(self) -> list[str]:
        """Arguments of `shardwise`, without shell redirections."""
        return self._split()[0]

    @property
    def needs_shell(self) -> bool:
        """Whether it needs root rights, or a shell for redirections."""
        return "sudo " in self.text or bool(self._split()[1])

    @property
    def has_placeholder(self) -> bool:
        return any(_PLACEHOLDER.fullmatch(word) for word in self.words)

    def _split(self) -> tuple[list[str], list[str]]:
        words = shlex.split(_PREFIX.sub("", self.text), comments=True)
        end = next((n for n, word in enumerate(words) if word in _OPERATORS), len(words))
        return words[1:end], words[end:]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Block:
    """A block of code: its lines, and the index of its first line in the page."""

    language: str | None
    """None for an indented block."""
    first: int
    lines: tuple[str, ...]
    title: str | None = None

    @property
    def after(self) -> int:
        """The index of the line after the block, closing fence included."""
        return self.first + len(self.lines) + (self.language is not None)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> Iterator[Block]:
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        fence = _FENCE.match(lines[at])
        if fence is not None:
            end = next((n for n in range(at + 1, len(lines)) if _FENCE.match(lines[n])), len(lines))
            yield Block(fence[1], at + 1, tuple(lines[at + 1 : end]), fence[2])
            at = end + 1
        elif lines[at].startswith("    ") and lines[at].strip():
            end = next((n for n in range(at, len(lines)) if not lines[n].startswith("    ")), len(lines))
            yield Block(None, at, tuple(line[4:] for line in lines[at:end]))
            at = end
        else:
            at += 1


def commands(page: Path) -> list[Command]:
    """The commands of a page, in order."""
    text = page.read_text("utf-8")
    found = list(blocks(text))
    result: list[Command] = []
    for block, following in zip_longest(found, found[1:]):
        if block.language is not None and block.language not in SHELLS:
            continue
        inside = list(_commands_of(page, block))
        if inside and following is not None and _shows(text, block, following):
            last = inside.pop()
            shown = "\n".join(following.lines) + "\n"
            inside.append(Command(last.page, last.line, last.text, shown))
        result += inside
    return result


def _commands_of(page: Path, block: Block) -> Iterator[Command]:
    at = 0
    while at < len(block.lines):
        first, text = at, block.lines[at].strip()
        while text.endswith("\\") and at + 1 < len(block.lines):
            at += 1
            text = f"{text[:-1].rstrip()} {block.lines[at].strip()}"
        if _is_command(text):
            yield Command(page, block.first + first + 1, text)
        at += 1


def _is_command(text: str) -> bool:
    return re.match(r"shardwise\s", _PREFIX.sub("", text)) is not None


def _shows(text: str, block: Block, following: Block) -> bool:
    between = text.split("\n")[block.after : following.first - 1]
    return following.language == "text" and not "".join(between).strip()


def inline_commands(page: Path) -> list[Command]:
    """Commands in running text, possibly without arguments."""
    lines = page.read_text("utf-8").split("\n")
    return [
        Command(page, number, match)
        for number, line in enumerate(lines, 1)
        if not line.startswith("    ")
        for match in _INLINE.findall(line)
    ]


def files(page: Path) -> dict[str, str]:
    """The example files of a page, by name."""
    found = blocks(page.read_text("utf-8"))
    return {block.title: "\n".join(block.lines) + "\n" for block in found if block.title is not None}


def as_shown(printed: str, shown: str) -> str:
    """The part of a command's output that the page shows."""
    lines = printed.strip("\n").split("\n")
    parts = _GAP.split(shown.strip("\n"))
    result, at = "", 0
    for place, part in enumerate(parts):
        if place % 2:
            result += part
            continue
        wanted = part.split("\n") if part else []
        if wanted and place:
            at = _found(lines, wanted[0], at)
        if place == len(parts) - 1:
            taken = "\n".join(lines[at:]).split("\n\n")[: len(part.split("\n\n"))] if part else []
            return result + "\n\n".join(taken) + "\n"
        result += "\n".join(lines[at : at + len(wanted)])
        at += len(wanted)
    return result


def _found(lines: list[str], like: str, start: int) -> int:
    title = like.split()[0]
    places = [at for at in range(start, len(lines)) if lines[at].split()[:1] == [title]]
    assert places, f"no line as\n{like}\nin\n" + "\n".join(lines)
    return places[0]
