"""Runs shardwise commands in this process, each once, and gives each as text for a shell."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shardwise.app.cli.commands import command
from shardwise.app.cli.output import Output
from shardwise.errors import Infeasible


@dataclass(frozen=True)
class File:
    """An input file of a command: its name without a suffix, and its document."""

    stem: str
    document: Mapping[str, Any]

    @property
    def text(self) -> str:
        return json.dumps(self.document)


@dataclass(frozen=True)
class Saved:
    """The plan file that a command writes with `--save`."""

    words: Words


@dataclass(frozen=True)
class SavedPoint:
    """The plan file of the fastest point, or of the `smallest`, that `frontier` writes with `--save`."""

    words: Words
    is_smallest: bool = False


Word = str | File | Saved | SavedPoint
Words = tuple[Word, ...]


@dataclass(frozen=True)
class Answer:
    """The `--json` answer to a command; `text` is the command. Without a document nothing fits."""

    text: str
    document: Mapping[str, Any]
    code: int = 0

    @property
    def fits(self) -> bool:
        return bool(self.document)

    @property
    def best(self) -> Mapping[str, Any]:
        """The result of `plan` or `evaluate`, or the fastest point of `frontier`."""
        if "points" in self.document:
            found = self.document["points"][0]
        else:
            found = self.document.get("best") or self.document["result"]
        return dict(found)

    @property
    def step_time_s(self) -> float:
        """Step time of the best plan; infinite where nothing fits."""
        if not self.fits:
            return float("inf")
        best = self.best
        return float(best["time_s"] if "time_s" in best else best["step_time_s"])

    @property
    def lower_bound_s(self) -> float:
        """Lower bound of all plans' step times, by the gap that the answer states."""
        return self.step_time_s * (1.0 - self.gap) if self.fits else float("inf")

    @property
    def gap(self) -> float:
        """The share by which another plan may be faster according to the answer; 1 where nothing is
        proven."""
        if "points" in self.document:
            return float(self.document["epsilon"])
        gap = self.document.get("certificate", {}).get("gap", 0.0)
        return 1.0 if gap is None else max(float(gap), float(self.document.get("uneven_gap") or 0.0))


class Commands:
    """Runs commands of shardwise one by one and remembers their answers. Files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers: dict[str, Answer] = {}
        self.runs = 0

    def answer(self, words: Words) -> Answer:
        """The answer to the command. Infeasible is an answer without a document; other errors are raised."""
        text = text_of(words)
        if text not in self._answers:
            self._answers[text] = self._run(words, text)
        return self._answers[text]

    def path_of(self, saved: Saved) -> str:
        """The plan file of an answer, written if it does not exist."""
        return self._argument(saved)

    def drop_answers(self) -> None:
        """Forgets all answers, before a question that has nothing in common with earlier ones."""
        self._answers.clear()

    def _run(self, words: Words, text: str) -> Answer:
        self.runs += 1
        try:
            output = _parser().main(args=self._arguments(words), standalone_mode=False)
        except Infeasible:
            return Answer(text=text, document={}, code=3)
        assert isinstance(output, Output) and output.document is not None
        document: Mapping[str, Any] = json.loads(json.dumps(output.document))
        return Answer(text=text, document=document, code=output.code)

    def _arguments(self, words: Words) -> list[str]:
        return [*(self._argument(word) for word in words), "--json"]

    def _argument(self, word: Word) -> str:
        if isinstance(word, str):
            return word
        if isinstance(word, File):
            path = self._path(f"{word.stem}-", word.text, ".json")
            if not path.exists():
                path.write_text(word.text)
            return str(path)
        if isinstance(word, Saved):
            path = self._path("plan-", text_of(word.words), ".json")
            if not path.exists():
                self.answer((*word.words, "--save", str(path)))
            return str(path)
        folder = self._path("plans-", text_of(word.words), "")
        if not folder.exists():
            self.answer((*word.words, "--save", str(folder)))
        names = json.loads((folder / "frontier.json").read_text())["plans"]
        return str(folder / names[-1 if word.is_smallest else 0])

    def _path(self, before: str, text: str, suffix: str) -> Path:
        """The path of the file with this text."""
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._folder / f"{before}{digest}{suffix}"


@cache
def _parser() -> Any:
    return command()


def text_of(words: Words) -> str:
    """The command for a shell, preceded by those that write its files."""
    before: list[str] = []
    shell_words: list[str] = ["shardwise"]
    for word in words:
        if isinstance(word, File):
            before.append(f"echo {shlex.quote(word.text)} > {word.stem}.json")
            shell_words.append(f"{word.stem}.json")
        elif isinstance(word, Saved):
            before.append(f"{text_of(word.words)} --save plan.json")
            shell_words.append("plan.json")
        elif isinstance(word, SavedPoint):
            before.append(f"{text_of(word.words)} --save plans")
            shell_words.append(f"$(ls plans/*.yaml | {'tail' if word.is_smallest else 'head'} -n 1)")
        else:
            shell_words.append(shlex.quote(word))
    return "; ".join((*before, " ".join(shell_words)))
