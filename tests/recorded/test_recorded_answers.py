"""Answers to the recorded questions are those that were recorded."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recorded.comparing import differences
from tests.recorded.files import KINDS, file_of, read_lines, rounded
from tests.recorded.product import answer_to

QUESTIONS: dict[str, dict[str, Any]] = {
    f"{kind}: {one['name']}": one for kind in KINDS for one in read_lines(file_of("questions", kind))
}

ANSWERS: dict[str, Any] = {
    f"{kind}: {name}": answer
    for kind in KINDS
    for name, answer in read_lines(file_of("answers", kind)).items()
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_what_was_recorded(name: str) -> None:
    assert list(differences(rounded(answer_to(QUESTIONS[name])), ANSWERS[name])) == []


def test_every_question_has_its_answer() -> None:
    assert list(QUESTIONS) == list(ANSWERS)
