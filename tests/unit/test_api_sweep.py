"""`sweep`: each question once, answers kept as lines, so that an interrupted sweep resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise import api

JOB: dict[str, Any] = {"seq_len": 1024, "global_batch_size": 8}
QUESTIONS: list[dict[str, Any]] = [
    {"model": "gpt2", "cluster": "1x2xA100-80G", **JOB},
    {"model": "gpt2", "cluster": "1x4xA100-80G", **JOB},
    {"model": "llama-3.1-70b", "cluster": "1xV100-16G", **JOB},
]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Counted:
    """Counts the questions that are asked; `ends_after` interrupts the sweep before the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ends_after: int = 99) -> None:
        self.asked: list[str] = []
        answer = api.answer_question

        def counted(question: Mapping[str, Any]) -> dict[str, Any]:
            if len(self.asked) == ends_after:
                raise KeyboardInterrupt
            self.asked.append(str(question["cluster"]))
            return answer(question)

        monkeypatch.setattr(api, "answer_question", counted)


def test_answers_are_those_of_plan_and_an_infeasible_question_has_its_reason(tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    found = sw.sweep(QUESTIONS, out=out)
    best = sw.plan(**QUESTIONS[0])
    assert found[0]["step_time_s"] == best.step_time_s and found[0]["plan_hash"] == best.to_dict()["hash"]
    assert found[0]["device_bytes"] == best.best.peak_memory.device and found[0]["is_proven"] is True
    assert found[0]["strategy"]["tp"] == best.strategy.tp
    assert "infeasible" in found[2] and found[2]["reasons"]["memory"] > 0
    assert [row["question"] for row in found] == QUESTIONS
    assert lines_of(out) == list(found)
    rows = found.rows()
    assert rows[1]["cluster"] == "1x4xA100-80G" and rows[1]["step_time_s"] == found[1]["step_time_s"]
    assert "infeasible" in rows[2] and "step_time_s" not in rows[2]


def test_an_interrupted_sweep_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sweep.jsonl"
    first = Counted(monkeypatch, ends_after=2)
    with pytest.raises(KeyboardInterrupt):
        sw.sweep(QUESTIONS, out=out)
    assert len(first.asked) == 2 == len(lines_of(out))
    monkeypatch.undo()
    second = Counted(monkeypatch)
    found = sw.sweep(QUESTIONS, out=out)
    assert second.asked == ["1xV100-16G"] and len(found) == 3 == len(lines_of(out))
    # Nothing is left to ask.
    third = sw.sweep(QUESTIONS, out=out)
    assert second.asked == ["1xV100-16G"] and list(third) == list(found)


def test_a_torn_last_line_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sweep.jsonl"
    whole = sw.sweep(QUESTIONS[:2], out=out)
    text = out.read_text()
    out.write_text(text[:-20])
    counted = Counted(monkeypatch)
    again = sw.sweep(QUESTIONS[:2], out=out)
    assert counted.asked == ["1x4xA100-80G"] and list(again) == list(whole) == lines_of(out)
    out.write_text("nonsense\n" + text)
    with pytest.raises(sw.ConfigError, match=r"sweep.jsonl: line 1: has a line that is no answer"):
        sw.sweep(QUESTIONS, out=out)
    assert out.read_text() == "nonsense\n" + text


def test_equal_questions_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of arguments, None, and the number of processes make no other question; a value does."""
    question = QUESTIONS[0]
    counted = Counted(monkeypatch)
    same = [question, dict(reversed(question.items())), {**question, "dtype": None}]
    same.append({**question, "workers": 1})
    found = sw.sweep([*same, {**question, "seq_len": 512}], out=None)
    assert len(counted.asked) == 2 and len({row["key"] for row in found}) == 2
    assert found[0] == found[3] and found[4]["step_time_s"] < found[0]["step_time_s"]


def test_another_version_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "sweep.jsonl"
    sw.sweep(QUESTIONS[:1], out=out)
    monkeypatch.setattr("shardwise.questions.sweeps.version", lambda _: "99")
    counted = Counted(monkeypatch)
    sw.sweep(QUESTIONS[:1], out=out)
    assert len(counted.asked) == 1 and len(lines_of(out)) == 2


class Reversed(Executor):
    """Answers when it is asked for a result, and later questions first."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - a future keeps any error
            future.set_exception(error)
        return future


@pytest.mark.parametrize("kind", ["processes", "threads", "own"])
def test_any_executor_gives_the_same_answers(kind: str, tmp_path: Path) -> None:
    executor: Executor
    if kind == "processes":
        executor = ProcessPoolExecutor(2, mp_context=get_context("spawn"))
    else:
        executor = ThreadPoolExecutor(2) if kind == "threads" else Reversed()
    with executor:
        found = sw.sweep(QUESTIONS, executor, out=tmp_path / "sweep.jsonl")
    alone = sw.sweep(QUESTIONS, out=None)
    assert [row["key"] for row in found] == [row["key"] for row in alone]
    assert [row.get("plan_hash") for row in found] == [row.get("plan_hash") for row in alone]
    assert sorted(row["key"] for row in lines_of(tmp_path / "sweep.jsonl")) == sorted(
        row["key"] for row in alone
    )


@pytest.mark.parametrize("executor", [None, Reversed()])
def test_a_question_that_cannot_be_used_is_named(executor: Executor | None, tmp_path: Path) -> None:
    out = tmp_path / "sweep.jsonl"
    for wrong, key in (
        ({**QUESTIONS[0], "seq_len": "x"}, "questions[1].seq_len"),
        ({**QUESTIONS[0], "batch": 8}, "questions[1].batch"),
        ({"model": "gpt2", "cluster": "1xA100-80G"}, "questions[1].global_batch_size"),
    ):
        with pytest.raises(sw.ConfigError) as caught:
            sw.sweep([QUESTIONS[0], wrong], executor, out=out)
        assert caught.value.key == key
    assert len(lines_of(out)) == 1  # the good question, once
    for questions in (3, "gpt2", {"model": "gpt2"}, [3], [{1: 2}]):
        with pytest.raises(sw.ConfigError, match=r"^questions"):
            sw.sweep(questions, out=None)  # type: ignore[arg-type]
    with pytest.raises(sw.ConfigError, match="out: cannot be used"):
        sw.sweep(QUESTIONS[:1], out=tmp_path)
