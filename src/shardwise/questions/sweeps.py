"""Many questions, each answered once: the rows of `sweep`, kept as JSON lines so that a sweep resumes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, wait
from dataclasses import dataclass
from importlib.metadata import version
from typing import IO, Any, overload

from shardwise.cluster import Cluster, cluster_record
from shardwise.errors import ConfigError, Infeasible
from shardwise.inputs import printable, short_repr
from shardwise.model import Model
from shardwise.notebook import panel, table
from shardwise.plans import Plan, plan_hash
from shardwise.strategy import strategy_record
from shardwise.units import format_bytes, format_seconds

Row = dict[str, Any]
"""The answer to a question as plain values; see `row_of`."""

IGNORED = frozenset({"workers", "progress"})
"""Arguments that do not change the answer."""

NESTED = ("question", "strategy", "reasons")
"""Keys of a row whose values are mappings."""

MOST_ROWS = 50
"""Most rows of a sweep that a table in a notebook shows."""


@dataclass(frozen=True, slots=True, repr=False)
class Sweep(Sequence[Row]):
    """The answers of a sweep, in the order of its questions. A row has `key`, `question` and the figures of
    the best plan, or `infeasible` with the reason."""

    answers: tuple[Row, ...]

    @overload
    def __getitem__(self, place: int) -> Row: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Row]: ...

    def __getitem__(self, place: int | slice) -> Row | Sequence[Row]:
        return self.answers[place]

    def __len__(self) -> int:
        return len(self.answers)

    def rows(self) -> list[Row]:
        """A flat row for a data frame for each question: its arguments, `step_time_s` and `device_bytes`, and
        the fields of the strategy; of an infeasible one the reason."""
        return [
            {
                **{name: value for name, value in row.items() if name not in NESTED},
                **row["question"],
                **(row.get("strategy") or {}),
            }
            for row in self.answers
        ]

    def to_dict(self) -> dict[str, object]:
        """The answers as plain values."""
        return {"answers": list(self.answers)}

    def __repr__(self) -> str:
        fit = [row["step_time_s"] for row in self.answers if "step_time_s" in row]
        fastest = f", the fastest takes {format_seconds(min(fit))} a step" if fit else ""
        return f"<Sweep of {len(self):,} questions, {len(fit):,} feasible{fastest}>"

    def _repr_html_(self) -> str:
        names = sorted({name for row in self.answers for name in row["question"]})
        found = [
            [
                *(_short(row["question"].get(name)) for name in names),
                format_seconds(row["step_time_s"]) if "step_time_s" in row else row["infeasible"],
                format_bytes(row["device_bytes"]) if "device_bytes" in row else None,
            ]
            for row in self.answers[:MOST_ROWS]
        ]
        return panel(repr(self)[1:-1], table((*names, "step time", "device memory"), found))


def _short(value: object) -> object:
    return short_repr(value) if isinstance(value, Mapping | list) else value


def swept(
    questions: Sequence[Mapping[str, Any]],
    answer: Callable[[Mapping[str, Any]], Row],
    *,
    executor: Executor | None,
    path: str | None,
) -> Sweep:
    """The answers to `questions`, each once: those in the file at `path` are read, the others appended.

    `answer` is called through the executor, so it and the questions must be picklable for processes. Raises
    ConfigError for a question that cannot be used, with its place; earlier answers stay in the file.
    """
    given = [_as_question(question, place) for place, question in enumerate(questions)]
    keys = [question_key(question) for question in given]
    known = {} if path is None else _known_rows(path)
    missing = {key: place for place, key in reversed(list(enumerate(keys))) if key not in known}
    if missing:
        with _Lines(path) as lines:
            for key, row in _answers(missing, questions, answer, executor):
                known[key] = {"key": key, "question": _recorded(given[missing[key]]), **row}
                lines.append(known[key])
    return Sweep(tuple(known[key] for key in keys))


def _answers(
    missing: Mapping[str, int],
    questions: Sequence[Mapping[str, Any]],
    answer: Callable[[Mapping[str, Any]], Row],
    executor: Executor | None,
) -> Iterator[tuple[str, Row]]:
    """The answers to the questions at the places of `missing`, in the order in which they arrive."""
    first_first = sorted(missing.items(), key=lambda item: item[1])
    if executor is None:
        for key, place in first_first:
            try:
                row = answer(questions[place])
            except ConfigError as error:
                raise error.within(key=f"questions[{place}]") from None
            yield key, row
        return
    running = {executor.submit(answer, questions[place]): (key, place) for key, place in first_first}
    try:
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                key, place = running.pop(one)
                try:
                    row = one.result()
                except ConfigError as error:
                    raise error.within(key=f"questions[{place}]") from None
                yield key, row
    finally:
        for one in running:
            one.cancel()


def row_of(ask: Callable[[], Plan]) -> Row:
    """The answer as plain values: seconds, bytes, tokens per second, the strategy (None if the stages are not
    alike), whether it is proven and its gap. An infeasible question has `infeasible`, the reason, and
    `reasons`, counts of rejected candidates."""
    try:
        plan = ask()
    except Infeasible as error:
        return {"infeasible": error.message, "reasons": dict(error.reasons)}
    certificate = plan.certificate
    return {
        "plan_hash": plan_hash(plan),
        "step_time_s": float(plan.step_time_s),
        "device_bytes": float(plan.best.peak_memory.device),
        "tokens_per_s_per_device": plan.best.tokens_per_s_per_device,
        "mfu": plan.best.mfu,
        "devices_used": plan.devices,
        "strategy": None if plan.best.fields is None else strategy_record(plan.best.fields),
        "is_proven": plan.answer is not None and plan.answer.is_proven,
        "gap": None if certificate is None else certificate.gap,
    }


# Questions as keys


def _as_question(question: object, place: int) -> dict[str, object]:
    """The arguments of a question as plain values. Raises ConfigError if it is no mapping of names."""
    if not isinstance(question, Mapping) or not all(isinstance(name, str) for name in question):
        raise ConfigError(
            "is not a mapping of arguments", key=f"questions[{place}]", found=short_repr(question),
            allowed="{'model': ..., 'cluster': ..., ...}",
        )  # fmt: skip
    return {name: _plain(value) for name, value in question.items() if name not in IGNORED}


def _plain(value: object) -> object:
    """An argument as JSON has it: models by their configs, clusters by their records, paths as texts."""
    if isinstance(value, Model):
        return {"config": _plain(value.config)}
    if isinstance(value, Cluster):
        return {"cluster": _plain(cluster_record(value))}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        return _plain(to_dict())
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def question_key(question: Mapping[str, object]) -> str:
    """The SHA-256 of a question in canonical form, without arguments that are None, and of the version of
    shardwise: another version is asked again."""
    named = {name: value for name, value in question.items() if value is not None}
    canonical = json.dumps([version("shardwise"), named], sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def _recorded(question: Mapping[str, object]) -> dict[str, object]:
    """The question as its row has it: a config or a record is named, not repeated."""
    return {name: _named(value) for name, value in question.items()}


def _named(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    inner = value.get("config", value.get("cluster", value))
    if isinstance(inner, Mapping):
        found = inner.get("_name_or_path") or inner.get("name") or inner.get("model_type")
        if isinstance(found, str) and found:
            return found
    return dict(value)


# The file


def _known_rows(path: str) -> dict[str, Row]:
    """The rows of the file at `path` by key; none if it does not exist. A torn last line is left out."""
    found: dict[str, Row] = {}
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return found
    except OSError as error:
        raise _unusable(path, error) from error
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
            found[row["key"]] = row
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                "has a line that is no answer of a sweep", file=printable(path), key=f"line {number}",
                found=short_repr(line.decode("utf-8", "replace")), allowed="lines that sweep wrote",
            ) from None  # fmt: skip
    return found


def _unusable(path: str, error: OSError) -> ConfigError:
    why = (error.strerror or str(error)).lower()
    return ConfigError(f"cannot be used: {why}", file=printable(path), key="out")


class _Lines:
    """Appends rows to a file, each as one line that is on disk when `append` returns; without a path, to
    nothing. A torn last line is cut off first."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> _Lines:
        if self._path is not None:
            try:
                self._file = open(self._path, "ab+")
                self._file.seek(0)
                whole = self._file.read()
                self._file.truncate(whole.rfind(b"\n") + 1)
            except OSError as error:
                raise _unusable(self._path, error) from error
        return self

    def append(self, row: Row) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
