"""Cases by where the largest temporary lies: what is found is what enumeration finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from tests.property.tracking_instances import (
    chain_of,
    frontier_by_definition,
    hubbed_chain,
    starting_with,
)
from tests.sampling import sample_of

from shardwise.frontier import Chain
from shardwise.search import tracked
from shardwise.search.tracking import levels, look, track
from shardwise.search.tracking.labels import TooManyLabels
from shardwise.search.tracking.look import Losses
from shardwise.search.tracking.state import State

pytestmark = pytest.mark.usefixtures("by_lines")

CHUNKS = tuple(range(0, 300, 25))
"""Of which a run without `--full` takes the first."""

BETWEEN, LEVELS, BY_LEVELS = levels._between, levels._levels, levels.by_levels


@pytest.fixture(autouse=True)
def all_have_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """However closely solutions are matched, and wherever lines weigh the peak."""
    monkeypatch.setattr(State, "is_loose", True)
    monkeypatch.setattr(levels, "WEIGHED", -1.0)


def agrees(chains: Iterable[Chain]) -> bool:
    """Whether the frontiers of all of them are found."""
    for chain in chains:
        expected = frontier_by_definition(chain)
        points = tracked([chain]).points.tolist()
        if len(points) != len(expected) or not np.allclose(points, expected, rtol=1e-12, atol=0.0):
            return False
    return True


@pytest.mark.parametrize("first", sample_of(CHUNKS, CHUNKS[:1]))
def test_cases_by_levels_find_what_enumeration_finds(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Many of the chains fall into such cases."""
    counts = []

    def counted(state: State) -> list[State] | None:
        parts = BY_LEVELS(state)
        if parts is not None:
            counts.append(len(parts))
        return parts

    monkeypatch.setattr(track, "by_levels", counted)
    assert agrees(chain_of(seed) for seed in range(first, first + CHUNKS[1]))
    assert sum(count > 1 for count in counts) >= 3
    assert agrees(hubbed_chain(seed) for seed in range(first // 10, first // 10 + 5))


@pytest.mark.parametrize("epsilon", [0.02, 0.1, 0.4])
def test_an_epsilon_is_all_that_is_lost(epsilon: float, full: bool) -> None:
    for seed in range(60 if full else 15):
        expected = frontier_by_definition(chain_of(seed))
        found = tracked([chain_of(seed)], epsilon=epsilon)
        limit = (1.0 + found.epsilon) * (1.0 + 1e-12)
        assert found.epsilon <= epsilon * (1.0 + 1e-12)
        for time_s, memory in expected:
            assert any(a <= limit * time_s and b <= limit * memory for a, b in found.points.tolist())


@pytest.mark.parametrize("is_broken", [False, True])
def test_no_case_matches_more_closely_than_the_answer_does(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool, full: bool
) -> None:
    """Once one of them has to be looser the others are so from the start, and all that is told is proven. In
    the twin each begins with what was asked for."""
    if is_broken:
        monkeypatch.setattr(track, "_as_loose", lambda state, losses, others: losses)
    asked: list[float] = []

    def seen(state: State, line: int, limit: float, losses: Losses, *box: Any) -> None:
        if box:  # not at an end
            asked.append(losses.relative)
        if box and len(asked) == 1:
            raise TooManyLabels
        look.look(state, line, limit, losses, *box)

    monkeypatch.setattr(track, "look", seen)
    monkeypatch.setattr(track, "_fill", lambda state: None)  # a question of its own, with other losses
    alike: list[bool] = []
    looser = 0.015 / (1.002 / 1.0002 - 1.0)  # a tenth of the epsilon is for points that are left out
    for seed in range(60 if full else 15):
        asked.clear()
        found = tracked([chain_of(seed), chain_of(seed + 100)], epsilon=0.002)
        if len(asked) < 2:
            continue
        alike.append(all(each == pytest.approx(looser * asked[0]) for each in asked[1:]))
        points = found.points.tolist()
        for one in (seed, seed + 100):
            for time_s, memory in frontier_by_definition(chain_of(one)):
                limit = (1.0 + found.epsilon) * (1.0 + 1e-12)
                assert any(a <= limit * time_s and b <= limit * memory for a, b in points)
    assert len(alike) > 2 and all(alike) != is_broken


@pytest.mark.parametrize(
    ("module", "name", "broken", "seed"),
    [
        (levels, "_between", lambda part, low, high: BETWEEN(part, 1.5 * high, 1.5 * high), 9),
        (levels, "_levels", lambda part: LEVELS(part)[:-1], 12),
        (track, "by_levels", lambda state: (BY_LEVELS(state) or [])[1:] or None, 58),
    ],
)
def test_a_broken_rule_is_noticed(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Callable[..., Any], seed: int
) -> None:
    monkeypatch.setattr(module, name, broken)
    assert not agrees(chain_of(each) for each in starting_with(seed, range(120)))
