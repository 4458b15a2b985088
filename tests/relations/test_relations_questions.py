"""The random questions: equal for equal seeds, of every kind, and with commands that run in a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.relations.clusters import ClusterData, Nodes
from tests.relations.commands import Answer, Commands, File, text_of
from tests.relations.questions import question
from tests.relations.registry import QUESTIONS, RELATIONS, questions_of
from tests.relations.relation import difference, require_not_slower, require_same, whole

SMALL = replace(
    question(0),
    cluster=ClusterData(nodes=(Nodes(device="T4", count=1, devices=2, memory_bytes=8e9),)),
    options={"--space": "core", "--top": "0"},
)


def test_a_seed_is_one_question() -> None:
    assert [question(seed) for seed in range(30)] == [question(seed) for seed in range(30)]
    assert len({text_of(question(seed).words()) for seed in range(QUESTIONS)}) == QUESTIONS


def test_questions_are_of_every_kind() -> None:
    chosen_questions = [question(seed) for seed in range(QUESTIONS)]
    models = [one.model.document for one in chosen_questions if isinstance(one.model, File)]
    kinds = {
        "alike": sum(not one.cluster.is_mixed for one in chosen_questions),
        "two pools": sum(len(one.cluster.kinds) == 2 for one in chosen_questions),
        "three pools": sum(len(one.cluster.kinds) == 3 for one in chosen_questions),
        "default space": sum(one.space == "default" for one in chosen_questions),
        "core space": sum(one.space == "core" for one in chosen_questions),
        "fixed": sum("--fix" in one.options for one in chosen_questions),
        "tiers": sum(bool(one.cluster.tiers) for one in chosen_questions),
        "little memory": sum(one.cluster.nodes[0].memory_bytes is not None for one in chosen_questions),
        "graphs": sum(one.is_graph for one in chosen_questions),
        "experts": sum("experts" in model for model in models),
    }
    assert min(kinds.values()) >= 5, kinds
    assert sum(one.cluster.devices == 16 for one in chosen_questions) > 0
    assert sum(one.cluster.devices > 16 for one in chosen_questions) == 3


@pytest.mark.parametrize("name", RELATIONS)
def test_every_relation_has_questions(name: str) -> None:
    assert len(questions_of(RELATIONS[name], 3)) == 3


@pytest.mark.slow
def test_the_text_of_a_command_gives_its_answer(shardwise: Commands, tmp_path: Path) -> None:
    answer = shardwise.answer(SMALL.words())
    on_path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", f"{answer.text} --json"], check=True, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PATH": on_path},
    )  # fmt: skip
    answer_in_shell = replace(answer, document=json.loads(done.stdout))
    require_same(answer, answer_in_shell, what="the text of a command", figures=whole)


def test_the_text_of_a_plan_file_is_the_command_that_saves_it() -> None:
    assert text_of(("check", SMALL.saved())).endswith(
        "--space core --top 0 --target any --save plan.json; shardwise check plan.json"
    )


def test_a_shorthand_is_for_plain_nodes_only() -> None:
    plain = Nodes(device="T4", count=2, devices=4)
    cluster = ClusterData(nodes=(plain,), inter_node="10Gb/s")
    assert cluster.words() == ("--cluster", "2x4xT4", "--inter-node", "10Gb/s")
    # 10 Gb/s are 10e9 / 8 bytes per second: 1.25 GB/s.
    nodes = [{"device": "T4", "count": 2, "devices": 4, "nics": {"bandwidth": "1.25GB/s"}}]
    assert cluster.document() == {"nodes": nodes}
    assert not ClusterData(nodes=(replace(plain, speed=0.5),)).has_shorthand


def _answer_with(step_s: float, gap: float = 0.0) -> Answer:
    document = {"best": {"step_time_s": step_s}, "certificate": {"gap": gap}}
    return Answer(text=f"takes {step_s}", document=document)


def test_not_slower_tolerates_no_more_than_the_gap() -> None:
    # 1.02 s with a gap of 2 %: no plan takes less than 0.9996 s; with a gap of 1 %, than 1.0098 s.
    require_not_slower(_answer_with(1.02, gap=0.02), _answer_with(1.0), what="with a gap")
    with pytest.raises(AssertionError, match=r"too much: .* \|\| takes 1.02 \|\| takes 1.0"):
        require_not_slower(_answer_with(1.02, gap=0.01), _answer_with(1.0), what="too much")


def test_nothing_that_fits_is_the_slowest_answer() -> None:
    nothing = Answer(text="nothing", document={}, code=3)
    require_not_slower(_answer_with(1.0), nothing, what="something over nothing")
    with pytest.raises(AssertionError):
        require_not_slower(nothing, _answer_with(1.0), what="nothing over something")


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ({"a": [1.0, {"b": 2}]}, {"a": [1.0 + 1e-12, {"b": 2}]}, None),
        ({"a": [1.0, {"b": 2}]}, {"a": [1.0, {"b": 3}]}, ".a[1].b is 2 and 3"),
        ({"a": [1.0]}, {"a": [1.0, 2.0]}, ".a has 1 and 2 entries"),
        ({"a": 1.0}, {"a": 1.0, "b": None}, ".b is in one alone"),
        ({"a": 1.0}, {"a": None}, ".a is 1.0 and None"),
    ],
)
def test_documents_differ_by_more_than_rounding(one: object, other: object, found: str | None) -> None:
    assert difference(one, other) == found
