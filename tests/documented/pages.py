"""Command lines, shown outputs and example files, as they are written in a page.

A command is a line of an indented block, or of a fenced block that is not an output, that starts with
`shardwise` or `python -m shardwise`. A ```text block that follows a block of commands shows what its last command
prints: whole sections (blank lines divide them), where a section "…" stands for sections left out, and a last
line "…" of a section for lines left out. A fenced block whose first line is the comment `# NAME` is the file NAME.
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

_FENCE = re.compile(r"^ {0,3}```(\S*)\s*$")
_PREFIX = re.compile(r"^(?:\$ )?(?:sudo )?(?:python -m )?(?=shardwise\s)")
_OPERATORS = frozenset({"|", ">", ">>", "2>", "2>&1", "<", "&", "&&", "||", ";"})
_PLACEHOLDER = re.compile(r"[A-Z_]+(\.[a-z]+)?|.*[|\\].*|.*(\.\.\.|…).*")
_INLINE = re.compile(r"`(?:python -m )?(shardwise [a-z][^`]*)`")
_FILE = re.compile(r"# ([\w-]+\.(?:py|yaml|csv|jsonl|txt))")


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
        """Arguments of `shardwise`, without what a shell does with its output."""
        return self._split()[0]

    @property
    def needs_shell(self) -> bool:
        """Whether it needs rights, or a shell that passes its output on."""
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
    """None where it is indented."""
    first: int
    lines: tuple[str, ...]

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
            yield Block(fence[1], at + 1, tuple(lines[at + 1 : end]))
            at = end + 1
        elif lines[at].startswith("    ") and lines[at].strip():
            end = next((n for n in range(at, len(lines)) if not lines[n].startswith("    ")), len(lines))
            yield Block(None, at, tuple(line[4:] for line in lines[at:end]))
            at = end
        else:
            at += 1


def commands(page: Path) -> list[Command]:
    """The commands of a page, in its order."""
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
    """Commands in running text; they may be without arguments."""
    lines = page.read_text("utf-8").split("\n")
    return [
        Command(page, number, match)
        for number, line in enumerate(lines, 1)
        if not line.startswith("    ")
        for match in _INLINE.findall(line)
    ]


def files(page: Path) -> dict[str, str]:
    """The example files of a page, by name."""
    result = {}
    for block in blocks(page.read_text("utf-8")):
        name = _FILE.fullmatch(block.lines[0]) if block.language and block.lines else None
        if name is not None:
            result[name[1]] = "\n".join(block.lines) + "\n"
    return result


def as_shown(printed: str, shown: str) -> str:
    """As much of what a command printed as the page shows of it."""
    sections = printed.strip("\n").split("\n\n")
    result: list[str] = []
    at, is_skipping = 0, False
    for section in shown.strip("\n").split("\n\n"):
        if section.strip() == ELLIPSIS:
            is_skipping = True
            result.append(section)
            continue
        if is_skipping:
            title = section.split()[0]
            at = next((n for n in range(at, len(sections)) if sections[n].split()[0] == title), len(sections))
        assert at < len(sections), f"no section as\n{section}\nin\n{printed}"
        result.append(_lines_as_shown(sections[at], section))
        at, is_skipping = at + 1, False
    return "\n\n".join(result) + "\n"


def _lines_as_shown(section: str, shown: str) -> str:
    lines = shown.split("\n")
    if lines[-1].strip() != ELLIPSIS:
        return section
    return "\n".join([*section.split("\n")[: len(lines) - 1], lines[-1]])
