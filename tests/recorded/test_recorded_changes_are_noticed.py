"""Small changes of answers are noticed, and changes of shipped data change no answer."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.recorded import product, records
from tests.recorded.__main__ import answers, questions
from tests.recorded.comparing import differences, settled
from tests.recorded.files import CANDIDATES, FOLDER, PLANS, file_of, frozen, read_lines, rounded

import shardwise
from shardwise.strategy import NEWEST_MEGATRON_LM

QUESTIONS, ANSWERS = questions(), answers()

MIB = 1 << 20

Change = Callable[[dict[str, Any]], Any]


def noticed(change: Change, among: Callable[[dict[str, Any]], bool]) -> dict[str, bool]:
    """For each recorded answer of a kind, whether a change of it is noticed."""
    found = {}
    for name, answer in ANSWERS.items():
        if among(answer):
            changed = copy.deepcopy(answer)
            change(changed)
            found[name] = list(differences(changed, answer)) != []
    return found


def times(factor: float) -> Change:
    """Multiplies the step time of an answer, or of its first point."""

    def change(answer: dict[str, Any]) -> None:
        if "points" in answer:
            answer["points"][0][0] *= factor
        else:
            answer["best"]["step_time_s"] *= factor

    return change


def is_answered(answer: dict[str, Any]) -> bool:
    return "infeasible" not in answer


def test_a_changed_step_time_is_noticed() -> None:
    found = noticed(times(1.0 + 1e-6), is_answered)
    assert len(found) >= 56 and all(found.values())
    assert not any(noticed(times(1.0 + 1e-11), is_answered).values()), "rounding is no difference"


def test_another_strategy_is_noticed() -> None:
    def change(answer: dict[str, Any]) -> None:
        answer["best"]["strategy"]["micro_batch_size"] += 1

    found = noticed(change, lambda answer: "strategy" in answer.get("best", {}))
    assert len(found) >= 30 and all(found.values())


def test_another_uneven_plan_is_noticed() -> None:
    def change(answer: dict[str, Any]) -> None:
        answer["best"]["layout"][0][0]["layers"][0] += 1

    found = noticed(change, lambda answer: "pipeline_s" in answer.get("best", {}))
    assert len(found) >= 5 and all(found.values())


def test_a_missing_point_is_noticed() -> None:
    found = noticed(lambda answer: answer["points"].pop(), lambda answer: "points" in answer)
    assert len(found) >= 14 and all(found.values())


def test_a_layout_of_another_point_is_noticed_and_one_that_costs_the_same_is_not() -> None:
    recorded = ANSWERS["graph: lstm on two nodes"]
    tied = copy.deepcopy(recorded)
    tied["layouts"][0]["layout"]["stages"][0] += "x"
    assert list(differences(settled(tied, recorded), recorded)) == []
    other = copy.deepcopy(tied)
    other["layouts"][0]["costs_what_its_layout_does"] = False
    assert list(differences(settled(other, recorded), recorded))


def test_layouts_of_other_points_do_not_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that mixes up the layouts of a frontier's points."""
    record = records.frontier_record

    def mixed_up(*, points: Any, **others: Any) -> Any:
        layouts = [point.layout for point in reversed(points)]
        wrong = [replace(point, layout=layout) for point, layout in zip(points, layouts, strict=True)]
        return record(points=wrong, **others)

    monkeypatch.setattr(records, "frontier_record", mixed_up)
    answer = product.answer_to(QUESTIONS["graph: lstm"])
    assert not all(point["costs_what_its_layout_does"] for point in answer["layouts"])


def test_a_missing_runner_up_is_noticed() -> None:
    found = noticed(lambda answer: answer["runners_up"].pop(), lambda answer: bool(answer.get("runners_up")))
    assert len(found) >= 20 and all(found.values())


def test_a_part_of_a_sum_may_be_off_by_rounding_of_the_sum_alone() -> None:
    recorded = {"seconds": {"matmul": 30.0, "bubble": 0.0}, "gap": 0.0}
    assert list(differences({"seconds": {"matmul": 30.0, "bubble": 2e-11}, "gap": 0.0}, recorded)) == []
    assert list(differences({"seconds": {"matmul": 30.0, "bubble": 2e-10}, "gap": 0.0}, recorded))
    assert list(differences({"seconds": {"matmul": 30.0, "bubble": 0.0}, "gap": 2e-11}, recorded))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["uniform: four devices, core", "mixed: two pools", "graph: mlp", "graph: mlp in two stages"]
)
def test_slower_software_changes_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _slow_down(monkeypatch)
    assert list(differences(rounded(product.answer_to(QUESTIONS[name])), ANSWERS[name]))


@pytest.mark.parametrize("kind", CANDIDATES)
def test_slower_software_changes_prices(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _slow_down(monkeypatch)
    cases, recorded = read_lines(file_of("cases", kind)), read_lines(file_of("candidates", kind))
    for one in recorded[:: len(recorded) // 5]:
        found = rounded(product.with_price(kind, cases[one["case"]], one))
        assert [line.partition(":")[0] for line in differences(found, one)] == ["step_time_s"]


def _slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes kernel dispatch and host work a thousandth slower."""
    software = product.software_of

    def slower(name: str) -> Any:
        profile = software(name)
        return replace(
            profile, dispatch_s=profile.dispatch_s * 1.001, host_step_s=profile.host_step_s * 1.001
        )

    monkeypatch.setattr(product, "software_of", slower)


OF_EACH_SORT = (
    "uniform: a node", "uniform: 64 devices for Megatron-LM", "uniform: small for our own runtime",
    "uniform: a frontier", "mixed: two pools", "mixed: two pools for our own runtime", "mixed: least cost",
    "graph: mlp", "graph: lstm",
)  # fmt: skip


@pytest.mark.slow
def test_shipped_data_changes_no_answer(tmp_path: Path) -> None:
    """The product gives the same answers with other devices, software and targets, and without models,
    clusters and graphs: the questions read frozen data only. Of the shipped targets a search for any target
    reads one: which modules the newest Megatron-LM names."""
    package = Path(shardwise.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(tmp_path.rglob("*.json")):
        path.write_text(json.dumps(_less(json.loads(path.read_text()))))
    for path in (
        *tmp_path.rglob("*.yaml"),
        *tmp_path.rglob("catalogue/*.json"),
        *tmp_path.rglob("targets/*.json"),
    ):
        if path.stem != NEWEST_MEGATRON_LM.name:
            path.unlink()
    asked = [word for name in OF_EACH_SORT for word in ("--only", name)]
    assert _ran(tmp_path, "-m", "tests.recorded", *asked) == 0
    # The shipped data now differs from the frozen data, so questions that read it would have other answers.
    same = "from tests.recorded import product; assert product.is_shipped('megatron-2024')"
    assert _ran(tmp_path, "-c", same) == 1


def _less(value: Any) -> Any:
    """Plain values with all fractions reduced by a tenth."""
    if isinstance(value, float):
        return value * 0.9
    if isinstance(value, dict):
        return {key: _less(item) for key, item in value.items()}
    return [_less(item) for item in value] if isinstance(value, list) else value


def _ran(source: Path, *words: str) -> int:
    """The exit code of Python with these arguments, with the product from a given folder."""
    path = os.pathsep.join((str(source), str(FOLDER.parents[1])))
    command = [sys.executable, *words]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, check=False, capture_output=True, env=environment).returncode


def test_every_frozen_input_is_used_by_a_question() -> None:
    asked = [*QUESTIONS.values()]
    asked += [case for kind in CANDIDATES for case in read_lines(file_of("cases", kind)).values()]
    kinds = {"clusters": "cluster", "models": "model", "graphs": "graph", "software": "software"}
    for kind, key in kinds.items():
        assert set(frozen(kind)) == {one[key] for one in asked if key in one}
    assert {*frozen("targets"), "any"} == {one["target"] for one in asked if "target" in one}
    used = {name for cluster in frozen("clusters").values() for name in cluster["classes"].values()}
    assert set(frozen("devices")) == used


def test_the_files_stay_small() -> None:
    sizes = {
        path.name: path.stat().st_size for path in FOLDER.rglob("*") if path.suffix in (".json", ".yaml")
    }
    assert len(sizes) > len(list(PLANS.iterdir()))
    assert max(sizes.values()) < MIB and sum(sizes.values()) < 4 * MIB
