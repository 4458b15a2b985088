"""Runs the commands of a page in a temporary folder, in the order of the page."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.documented.pages import ROOT, Command, as_shown, commands, files

from shardwise.app.cli.main import main

MACHINE_COMMANDS = frozenset({"calibrate", "emulate", "launch", "serve"})
"""Commands that measure this machine, serve from it or start programs on others: they are parsed, not run."""

PROCESS_COMMANDS = frozenset({"train"})
"""Commands that fork processes from this one: they run in a process of their own."""

WRITES = frozenset({"--save", "--out", "--log", "--trace", "--plot", "--checkpoint"})

VARYING = (
    (re.compile(r"found in .*$", re.MULTILINE), "found in"),
    (re.compile(r"· [\d,.]+ tokens/s.*$", re.MULTILINE), "· tokens/s"),
    (re.compile(r"[\d.,]+ m?s measured"), "measured"),
    (re.compile(r"loss +[\d.]+ to [\d.]+"), "loss"),
)
"""Patterns for output that depends on this machine (times; the last digits of a loss), with replacements."""


@contextlib.contextmanager
def example_folder() -> Iterator[Path]:
    """A temporary working folder with the examples, for the files that commands write."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        with contextlib.chdir(folder):
            yield Path(folder)


def run(words: list[str]) -> tuple[int, str]:
    """Exit code, and the printed answer, or the error if there is none."""
    os.environ["COLUMNS"] = "80"  # as where no terminal is written to
    if words[0] in PROCESS_COMMANDS:
        paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", *words],
            env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, encoding="utf-8",
        )  # fmt: skip
        return done.returncode, done.stdout.lstrip("\n") or done.stderr
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    notes = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(notes):
        code = main(words)
    out.seek(0)
    return code, out.read().lstrip("\n") or notes.getvalue()


def runs(command: Command, missing: set[str]) -> bool:
    """Whether the command is run: it has all values, needs no shell, and its files exist."""
    words = command.words
    if (
        command.has_placeholder
        or command.needs_shell
        or words[0] in MACHINE_COMMANDS
        or "--validate" in words
    ):
        return False
    return not missing.intersection(words)


def written_by(command: Command) -> set[str]:
    words = command.words
    return {value for option, value in pairwise(words) if option in WRITES}


def outputs(page: Path) -> Iterator[tuple[Command, str]]:
    """The commands of a page that show an output, each with the same part of its present output."""
    missing: set[str] = set()
    with example_folder() as folder:
        for name, text in files(page).items():
            (folder / name).write_text(text, "utf-8")
        for command in commands(page):
            if not runs(command, missing):
                missing |= written_by(command)
                continue
            code, printed = run(command.words)
            is_error = command.shown is not None and command.shown.startswith("shardwise: ")
            assert (code != 0) == is_error, f"{command}\nends with {code}\n{printed}"
            missing -= written_by(command)
            if command.shown is not None:
                yield command, as_shown(printed, command.shown)


def comparable(text: str) -> str:
    """The text without numbers that depend on the speed of this machine."""
    for pattern, replacement in VARYING:
        text = pattern.sub(replacement, text)
    return text


def is_run(page: Path) -> bool:
    """Whether the page's commands are run: README.md, and each page for users that shows an output."""
    where = page.relative_to(ROOT).as_posix()
    if where != "README.md" and where not in ("docs/index.md", "docs/get-started.md"):
        return where.startswith("docs/how-to/") and any(each.shown for each in commands(page))
    return True


def rewritten(page: Path) -> str:
    """The page with the present outputs of its commands."""
    text, at = page.read_text("utf-8"), 0
    for command, now in outputs(page):
        old, new = f"```text\n{command.shown}```", f"```text\n{now}```"
        start = text.index(old, at)
        text, at = text[:start] + new + text[start + len(old) :], start + len(new)
    return text
