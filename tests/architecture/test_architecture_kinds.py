"""Few places ask of what kind a plan is: all others take every plan. Each of them has its reason here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "shardwise"

SWITCH = re.compile(
    r"\.kind (?:==|!=|in|not in) \(?\"(?:uniform|uneven|graph)\"|\[[\w.]*(?:plan|result|best)\.kind\]"
    r"|(?<!cluster)\.is_uniform\b|isinstance\([^)]*(?:TrainingJob|Arrangement|\.network)\b|\[type\(\w+\)\]"
)
"""Code that asks for the kind of a plan, of its result, of a job or of an arrangement."""

REASONS = {
    "app/cli/division.py": "a strategy, pipelines and operators are named in different words",
    "launch/capability.py": "the runtime has other limits for each class of jobs",
    "questions/explaining.py": "only candidates of one strategy have a space to count",
    "replanning/mixed_planner.py": "uniform and uneven arrangements have each their planner",
    "replanning/uneven.py": "replicas of a strategy move as a whole, stages of an uneven plan one by one",
    "runtime/distribute.py": "each kind has its class of jobs",
    "runtime/uniform.py": "only jobs of one strategy migrate",
    "search/plan_timeline.py": "each kind has its estimator",
}
"""Modules outside `plans` that ask, and why."""


def asking(folder: Path) -> dict[str, int]:
    """The modules outside `plans` that ask, with the number of lines that do."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        lines = [line for line in path.read_text().splitlines() if SWITCH.search(line)]
        if lines and not name.startswith("plans/"):
            found[name] = len(lines)
    return found


def test_only_places_with_a_reason_ask_for_the_kind_of_a_plan() -> None:
    assert set(asking(SRC)) == set(REASONS) and len(REASONS) <= 8
    # JOBS is read for a job and for what it trains, the estimators for stages and for the whole.
    assert sum(asking(SRC).values()) <= len(REASONS) + 2


@pytest.mark.parametrize(
    "line",
    [
        'if plan.kind == "graph":',
        'if one.kind in ("uniform", "uneven"):',
        "return TABLE[plan.kind]",
        "x = 1 if answer.best.is_uniform else 2",
        "if isinstance(job, GraphTrainingJob):",
        "if isinstance(arrangement, UnevenArrangement):",
        "if isinstance(arrangement, Arrangement):",
        "return self._sides[type(one)].step_s(one)",
    ],
)
def test_a_new_place_is_noticed(line: str, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(f"def f():\n    {line}\n        pass\n")
    assert asking(tmp_path) == {"new.py": 1}


def test_kinds_of_other_things_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text('if op.kind == "lstm" or cluster.is_uniform:\n    pass\n')
    assert asking(tmp_path) == {}
