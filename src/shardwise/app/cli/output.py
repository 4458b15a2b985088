"""Output of commands: answers as plain text, styled text on a terminal or one JSON document; errors as one
line.

`Output` is an answer, `write_output` prints it. `Failure` is an error with its exit code: one line with
place, found and allowed values.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from shardwise.errors import ConfigError, Infeasible, InternalError

Span = tuple[str, str]
"""Text and its style, a key of STYLES."""

Line = Sequence[Span]

STYLES: Mapping[str, str] = {
    "": "",
    "title": "bold",
    "label": "dim",
    "value": "bold cyan",
    "good": "bold green",
    "warn": "bold yellow",
    "bad": "bold red",
    "dim": "dim",
    "time": "cyan",
    "memory": "magenta",
    "code": "green",
}

NARROWEST, USUAL, WIDEST = 60, 80, 120
"""Fewest columns of an answer, those where no terminal is written to, and most columns: longer lines are hard
to read."""


class TableRow(tuple[Span, ...]):
    """A line of a table: where the terminal is too narrow for the table, columns that are blank in all its
    rows are left out (`fitted`). A table ends at an empty line."""


LABEL = 15
"""Columns of the labels at the left of a card."""

_ASCII: dict[str, str | int | None] = {
    "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": "", "▎": "", "▏": "",
    "░": ".", "─": "-", "·": "-", "×": "x", "±": "+-", "│": "|", "…": "...", "≤": "<=", "≥": ">=",
    "→": "->",
}  # fmt: skip


def columns() -> int:
    """Columns of answers: those of the terminal, or COLUMNS; USUAL where stdout is no terminal."""
    return min(max(shutil.get_terminal_size((USUAL, 24)).columns, NARROWEST), WIDEST)


def row(label: str, *spans: Span) -> Line:
    """A line of a card."""
    return ((f" {label:<{LABEL - 1}}", "label"), *spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How an answer is written: as JSON, in one line, or with everything."""

    is_json: bool = False
    is_brief: bool = False
    is_verbose: bool = False

    @classmethod
    def of(cls, *, is_json: bool, is_brief: bool = False, is_verbose: bool = False) -> Form:
        """ConfigError where more than one of them is given."""
        given = (("--json", is_json), ("--brief", is_brief), ("--verbose", is_verbose))
        names = [name for name, is_given in given if is_given]
        if len(names) > 1:
            raise ConfigError(f"cannot be combined with {names[1]}", key=names[0], allowed="one of them")
        return cls(is_json=is_json, is_brief=is_brief, is_verbose=is_verbose)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The answer of a command: lines for people, or a JSON document; `notes` go to stderr; `code` is the exit
    code. Where it `is_verbatim`, the lines are a file or for programs, and are as long as they are."""

    lines: Sequence[Line] = ()
    is_verbatim: bool = False
    document: Mapping[str, object] | None = None
    notes: Sequence[str] = ()
    code: int = 0


def write_output(output: Output) -> None:
    """Write the answer to stdout and flush it, then the notes to stderr. OSError where stdout cannot be
    written."""
    stdout = _stdout()
    if output.document is not None:
        text = json.dumps(output.document, indent=2, ensure_ascii=True, allow_nan=False)
        stdout.write(text + "\n")
    else:
        lines: Iterable[Line] = _encodable(output.lines, stdout.encoding)
        lines = lines if output.is_verbatim else fitted(lines, columns())
        if is_styled(stdout):
            _write_styled(lines)
        else:
            stdout.write(plain_text(lines, stdout.encoding))
    stdout.flush()
    print_notes(output.notes)


def flush_stdout() -> None:
    """Flush stdout. OSError where it cannot be written."""
    _stdout().flush()


def print_notes(lines: Iterable[str]) -> None:
    """Write lines to stderr. An stderr that cannot be written is no error."""
    if sys.stderr is None:
        return
    from shardwise.app.cli.activity import clear_activity  # which needs this module

    clear_activity()
    try:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def silence(stream: TextIO | None) -> None:
    """Redirect `stream` to the null device, so that the interpreter's last flush does not fail."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _stdout() -> TextIO:
    """Standard output. OSError where the process was started without one."""
    stdout: TextIO | None = sys.stdout
    if stdout is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return stdout


def is_styled(stream: TextIO) -> bool:
    """Whether `stream` is a terminal with colour: not with NO_COLOR or TERM=dumb."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def plain_text(lines: Iterable[Line], encoding: str | None = "utf-8") -> str:
    """The lines without styles, in characters of `encoding`."""
    shown = _encodable(list(lines), encoding)
    return "".join(_text(line).rstrip() + "\n" for line in shown)


def _encodable(lines: Sequence[Line], encoding: str | None) -> Sequence[Line]:
    """The lines in ASCII where `encoding` lacks one of their characters."""
    try:
        "".join(map(_text, lines)).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return [type(line)((_ascii(text), style) for text, style in line) for line in map(_tuple, lines)]
    return lines


def _tuple(line: Line) -> tuple[Span, ...]:
    return line if isinstance(line, tuple) else tuple(line)


def _ascii(text: str) -> str:
    return text.translate(str.maketrans(_ASCII)).encode("ascii", "backslashreplace").decode()


def _text(line: Line) -> str:
    return "".join(text for text, _ in line)


def fitted(lines: Iterable[Line], width: int) -> Iterator[Line]:
    """The lines with at most `width` columns each: tables without blank columns, then broken at spaces. A
    word that is longer gets its own line, so that paths can be copied. Commands stay as they are: a shell
    continues only a line that ends with a backslash."""
    table: list[Line] = []
    for line in lines:
        if _text(line).strip():
            table.append(line)
            continue
        yield from _fitted_table(table, width)
        yield line
        table = []
    yield from _fitted_table(table, width)


def _fitted_table(lines: Sequence[Line], width: int) -> Iterator[Line]:
    """Lines up to an empty one."""
    left_out = _columns_left_out([_text(line) for line in lines if isinstance(line, TableRow)], width)
    for line in lines:
        if any(style == "code" for _, style in line):
            yield line
        else:
            yield from _broken(_without(line, left_out) if isinstance(line, TableRow) else line, width)


def _columns_left_out(rows: Sequence[str], width: int) -> set[int]:
    """Blank columns of a table to leave out until its rows fit; between two columns of text one stays. Of
    the widest gaps first."""
    longest = max((len(row.rstrip()) for row in rows), default=0)
    gaps: list[list[int]] = []
    was_blank = False
    for column in range(longest):
        is_blank = all(row[column : column + 1] in ("", " ") for row in rows)
        if is_blank and was_blank:
            gaps[-1].append(column)
        elif is_blank:
            gaps.append([column])
        was_blank = is_blank
    left_out: set[int] = set()
    while longest - len(left_out) > width:
        widest = max(gaps, key=len, default=[])
        if len(widest) < 2:
            break
        left_out.add(widest.pop(0))
    return left_out


def _without(line: Line, left_out: set[int]) -> Line:
    spans: list[Span] = []
    start = 0
    for text, style in line:
        rest = [one for place, one in enumerate(text, start) if place not in left_out]
        spans.append(("".join(rest), style))
        start += len(text)
    return tuple(spans)


def _broken(line: Line, width: int) -> Iterator[Line]:
    """A line, continued on the next ones where it is too long: after its label, or a little to the right of
    its first word."""
    text = _text(line).rstrip()
    if len(text) <= width:
        yield line
        return
    blank = len(text) - len(text.lstrip())
    is_labelled = line[0][1] == "label" and len(line[0][0]) == LABEL
    indent = LABEL if is_labelled else min(blank + 2, width // 2)
    start, used, first = 0, 0, LABEL if is_labelled else blank
    if not text[:first].strip() and len(text[first:].partition(" ")[0]) > width - first:
        start, used = first, min(first, 2)
    while len(text) - start > width - used:
        room = start + width - used
        end = text.rfind(" ", max(start, first) + 1, room + 1)
        end = end if end > 0 else text.find(" ", room)
        if end < 0:
            break
        yield _part(line, start, end, used)
        start = end + len(text[end:]) - len(text[end:].lstrip())
        word = text[start:].partition(" ")[0]
        used = indent if len(word) <= width - indent else min(indent, 2)
    yield _part(line, start, len(text), used)


def _part(line: Line, start: int, end: int, indent: int) -> Line:
    """The characters of a line from `start` to before `end`, after `indent` blank columns."""
    spans: list[Span] = [(" " * indent, "")] if indent else []
    place = 0
    for text, style in line:
        spans.append((text[max(start - place, 0) : max(end - place, 0)], style))
        place += len(text)
    return tuple(spans)


def _write_styled(lines: Iterable[Line]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(Text.assemble(*((text, STYLES[style]) for text, style in line)))


# Errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error with its exit code. `kind` is one of usage, config, infeasible, internal, interrupted."""

    code: int
    kind: str
    message: str
    file: str | None = None
    key: str | None = None
    found: str | None = None
    allowed: str | None = None
    line: str | None = None
    """The error on one line; None stands for `message`."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    relaxations: tuple[str, ...] = ()
    point: Mapping[str, object] | None = None

    def lines(self) -> list[str]:
        """Lines for stderr: the error on one line; of an infeasible question also why candidates were
        rejected, and changes that fit."""
        head = "infeasible" if self.kind == "infeasible" else "error"
        lines = [f"shardwise: {head}: {one_line(self.line or self.message)}"]
        if self.reasons:
            from shardwise.app.cli.words import reason_text  # above this module

            counts = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
            lines.append(
                "  rejected: " + "; ".join(f"{count:,} {reason_text(code)}" for code, count in counts)
            )
        lines += [f"  would fit: {one_line(relaxation)}" for relaxation in self.relaxations]
        return lines

    def document(self) -> dict[str, object]:
        """The error as the JSON answer."""
        document: dict[str, object] = {
            "schema": "shardwise.error",
            "version": 1,
            "error": {
                "kind": self.kind,
                "message": self.message,
                "file": self.file,
                "key": self.key,
                "found": self.found,
                "allowed": self.allowed,
            },
        }
        if self.kind == "infeasible":
            document |= {"reasons": dict(self.reasons), "relaxations": list(self.relaxations)}
        if self.point is not None:
            document["point"] = self.point
        return document


def failure_of(error: Exception) -> Failure:
    """The failure that reports `error`."""
    if isinstance(error, ConfigError):
        return Failure(
            code=2,
            kind="config",
            message=error.message,
            file=error.file,
            key=error.key,
            found=error.found,
            allowed=error.allowed,
            line=str(error),
        )
    if isinstance(error, Infeasible):
        return Failure(
            code=3,
            kind="infeasible",
            message=error.message,
            reasons=error.reasons,
            relaxations=error.relaxations,
            point=error.point,
        )
    if _is_usage_error(error):
        message = one_line(error.format_message())  # type: ignore[attr-defined]
        return Failure(code=2, kind="usage", message=message, line=f"{message.rstrip('.')}; see --help")
    return Failure(code=1, kind="internal", message=_internal_message(error))


def one_line(text: str) -> str:
    """`text` with white space folded and everything unprintable escaped."""
    folded = " ".join(text.split())
    return folded if folded.isprintable() else "".join(map(_printable, folded))


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _is_usage_error(error: Exception) -> bool:
    """Whether the parser refused the arguments; the class of its exceptions depends on the version of
    typer."""
    return callable(getattr(error, "format_message", None)) and getattr(error, "exit_code", None) == 2


def _internal_message(error: Exception) -> str:
    name = "" if isinstance(error, InternalError) else f"{type(error).__name__}: "
    text = f"{name}{error}".rstrip(": ")
    extras = [
        f"{label} {value}"
        for label in ("seed", "plan_hash")
        if (value := getattr(error, label, None)) is not None
    ]
    context = f" ({', '.join(extras)})" if extras else ""
    return f"this is a bug in shardwise: {text}{context}; SHARDWISE_DEBUG=1 shows where"
