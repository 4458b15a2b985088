"""`plan` on mixed clusters: uneven answers, and why an answer is uniform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

SCHEMA = Path(__file__).parents[3] / "docs" / "schemas" / "plan-answer.json"
QUESTION = (
    "plan", "opt-350m", "--cluster", "1x2xA100-40G+1x2xV100-16G", "--seq-len", "2048",
    "--global-batch-size", "64",
)  # fmt: skip
PIPED = (
    "plan", "llama-2-13b", "--cluster", "1x4xA100-80G+1x4xV100-32G", "--seq-len", "1024",
    "--global-batch-size", "32",
)  # fmt: skip


def answer(run: Any, *argv: str) -> Any:
    ran = run(*argv, "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    return document


@pytest.mark.parametrize("question", [QUESTION, PIPED])
def test_an_uneven_answer_is_whole(run: Any, question: tuple[str, ...]) -> None:
    document = answer(run, *question)
    best = document["best"]
    assert best["strategy"] is None and document["is_proven"]
    pipelines = best["layout"]["pipelines"]
    layers = {"opt-350m": 24, "llama-2-13b": 40}[question[1]]
    taken: set[int] = set()
    for pipeline, again in zip(pipelines, best["uneven"]["recompute"], strict=True):
        stages = pipeline["stages"]
        assert sum(stage["layers"] for stage in stages) == layers and len(again) == len(stages)
        for stage in stages:
            first, _, last = stage["ranks"].partition("-")
            ranks = set(range(int(first), int(last or first) + 1))
            assert len(ranks) == stage["devices"] == stage["tp"] * stage["dp"]
            assert not ranks & taken
            taken |= ranks
    assert len(taken) == document["devices_used"]
    assert sum(pipeline["stages"][0]["share"] for pipeline in pipelines) == pytest.approx(1.0)
    uneven = best["uneven"]
    batch = int(question[-1])
    assert sum(uneven["microbatches"]) * uneven["micro_batch_size"] == batch
    assert best["step_time_s"] == max(uneven["pipeline_s"])
    assert sum(best["breakdown"].values()) == pytest.approx(best["step_time_s"])
    assert best["step_time_s"] < best["uniform_step_time_s"] <= best["fastest_class_step_time_s"]
    memory = {name: value for name, value in best["memory"].items() if name != "tightest_rank"}
    assert sum(memory.values()) == pytest.approx(best["peak_memory_bytes"]["device"])
    certificate = document["certificate"]
    assert certificate["enumerated"] == certificate["cut_by_bound"] + certificate["simulated"]


def test_the_card_draws_pipelines_and_tells_the_gain(run: Any) -> None:
    out = run(*QUESTION).out
    assert "uneven: 4 pipelines side by side" in out
    assert "[1 V100-16G, 24 layers" in out and "[1 A100-40G, 24 layers" in out
    assert "as fast as the best uniform strategy" in out and "as fast as A100-40G alone" in out
    assert "optimal among all uneven plans" in out


def test_devices_that_make_nothing_faster_are_left_idle_and_named(run: Any) -> None:
    out = run(
        "plan", "gpt2", "--cluster", "1x2xH100-SXM+1x2xT4", "--seq-len", "512", "--global-batch-size", "4"
    ).out
    assert "T4" in out and "left idle" in out


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--fix", "tp=1"), "a space or fields were chosen"),
        (("--space", "core"), "a space or fields were chosen"),
        (("--exhaustive", "--space", "core"), "a space or fields were chosen"),
    ],
)
def test_a_uniform_answer_says_why(run: Any, more: tuple[str, ...], why: str) -> None:
    document = answer(run, *QUESTION, *more)
    assert document["best"]["strategy"] is not None
    assert why in document["best"]["why"]
    assert document["best"]["uniform_step_time_s"] == document["best"]["step_time_s"]


def test_a_plan_file_holds_the_best_uniform_strategy_and_says_so(run: Any, tmp_path: Path) -> None:
    ran = run(*QUESTION, "--save", str(tmp_path / "plan.yaml"))
    assert ran.code == 0 and "a plan file holds uniform strategies" in ran.err
    assert "strategy" in ran.out
    assert run("check", str(tmp_path / "plan.yaml")).code == 0
