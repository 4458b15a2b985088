"""Candidates, evaluated one by one, have the recorded estimates."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recorded.comparing import differences
from tests.recorded.files import CANDIDATES, file_of, read_lines, rounded
from tests.recorded.product import with_price

CASES: dict[str, dict[str, Any]] = {kind: read_lines(file_of("cases", kind)) for kind in CANDIDATES}

PRICED: dict[str, list[dict[str, Any]]] = {
    kind: read_lines(file_of("candidates", kind)) for kind in CANDIDATES
}

COUNTS = {"uniform": 500, "uneven": 100, "graph": 60}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in CANDIDATES for name in CASES[kind]])
def test_candidates_have_the_recorded_cost(kind: str, name: str) -> None:
    recorded = [one for one in PRICED[kind] if one["case"] == name]
    found = [rounded(with_price(kind, CASES[kind][name], one)) for one in recorded]
    assert list(differences(found, recorded)) == []


def test_all_drawn_candidates_are_recorded() -> None:
    assert {kind: len(PRICED[kind]) for kind in CANDIDATES} == COUNTS
    for kind in CANDIDATES:
        assert {one["case"] for one in PRICED[kind]} == set(CASES[kind])
        assert len({str(one["candidate"]) + one["case"] for one in PRICED[kind]}) == COUNTS[kind]
