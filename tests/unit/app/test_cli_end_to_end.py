"""The commands with the real planner, on questions small enough for every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from shardwise.plans import read_plan

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"
QUESTION = ("gpt2", "--cluster", "1x4xA100-80G", "--seq-len", "1024", "--global-batch-size", "12")
CORE = (*QUESTION, "--space", "core")


def validated(text: str, name: str) -> Any:
    document = json.loads(text)
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def test_a_plan_answers_in_full_and_its_ledger_has_the_whole_space(run: Run) -> None:
    ran = run("plan", "--target=any", *CORE, "--json")
    assert (ran.code, ran.err) == (0, "")
    document = validated(ran.out, "plan-answer")
    certificate = document["certificate"]
    counted = json.loads(run("space", *CORE, "--json").out)["count"]
    assert certificate["enumerated"] == counted
    outcomes = sum(certificate["rejected"].values()) + certificate["cut_by_bound"] + certificate["simulated"]
    assert outcomes == counted
    best = document["best"]
    assert sum(best["breakdown"].values()) == pytest.approx(best["step_time_s"], rel=1e-9)
    memory = {name: value for name, value in best["memory"].items() if name != "tightest_rank"}
    assert sum(memory.values()) == pytest.approx(best["peak_memory_bytes"]["device"], rel=1e-9)
    tokens_per_s = 1024 * 12 / best["step_time_s"]
    assert best["tokens_per_s_per_device"] == pytest.approx(tokens_per_s / 4, rel=1e-12)
    layers = [stage["layers"] for stage in best["layout"]["pipelines"][0]["stages"]]
    assert sum(layers) == 12


@pytest.mark.slow
def test_everything_evaluated_gives_the_same_plan_hash(run: Run) -> None:
    bounded = json.loads(run("plan", "--target=any", *CORE, "--json", "--use-all").out)
    exhaustive = json.loads(run("plan", "--target=any", *CORE, "--json", "--exhaustive").out)
    assert exhaustive["plan_hash"] == bounded["plan_hash"]
    assert exhaustive["certificate"]["simulated"] > bounded["certificate"]["simulated"]


def test_the_same_question_gives_the_same_bytes_but_for_timings(run: Run, tmp_path: Path) -> None:
    seen = set()
    for name in ("a.yaml", "b.yaml"):
        path = tmp_path / name
        document = json.loads(run("plan", "--target=any", *CORE, "--json", "--save", str(path)).out)
        lines = [
            line for line in path.read_text().splitlines() if "search_s" not in line and "cpu_s" not in line
        ]
        for timing in ("search_s", "search_cpu_s"):
            del document["certificate"][timing]
        seen.add((json.dumps(document), "\n".join(lines)))
    assert len(seen) == 1


def test_a_saved_plan_is_simulated_and_its_strategy_evaluates_to_the_same_time(
    run: Run, tmp_path: Path
) -> None:
    path = str(tmp_path / "plan.yaml")
    answer = json.loads(run("plan", "--target=any", *CORE, "--json", "--save", path, "--fix", "pp=2").out)
    plan = read_plan(path)
    assert plan.best.step_time_s == answer["best"]["step_time_s"]
    timeline = validated(run("simulate", path, "--json").out, "timeline")
    assert 0 < timeline["timeline_s"] <= timeline["step_time_s"]
    assert len(timeline["ranks"]) == 2
    fields = {name: value for name, value in answer["best"]["strategy"].items() if name != "options"}
    text = ",".join(f"{name}={str(value).lower()}" for name, value in fields.items())
    evaluated = validated(run("evaluate", *QUESTION, "--strategy", text, "--json").out, "evaluation")
    assert evaluated["result"]["step_time_s"] == pytest.approx(plan.best.step_time_s, rel=1e-12)


def test_runners_up_are_slower_and_as_many_as_requested(run: Run) -> None:
    document = json.loads(run("plan", "--target=any", *CORE, "--json", "--top", "5").out)
    times = [result["step_time_s"] for result in (document["best"], *document["runners_up"])]
    assert len(times) == 6
    assert times == sorted(times)
    assert json.loads(run("plan", "--target=any", *CORE, "--json", "--top", "0").out)["runners_up"] == []


def test_a_model_that_does_not_fit_exits_3_with_the_missing_bytes(run: Run) -> None:
    """7 billion parameters with AdamW need 16 bytes each, over 100 GiB: not on one RTX 4090 of 24 GB."""
    question = ("llama-2-7b", "--cluster", "1xRTX4090", "--seq-len", "2048", "--global-batch-size", "1")
    ran = run("plan", "--target=any", *question, "--space", "core", "--json")
    assert ran.code == 3
    lines = ran.err.splitlines()
    assert lines[0].startswith("shardwise: infeasible: ")
    assert "GiB" in lines[0] and "rank 0" in lines[0]
    assert lines[1].startswith("  rejected: ") and "memory" in lines[1]
    error = validated(ran.out, "error")
    assert error["reasons"]["memory"] > 0
    assert len(error["relaxations"]) == sum(line.startswith("  would fit: ") for line in lines)


def test_an_illegal_strategy_exits_3_with_its_reason(run: Run) -> None:
    """gpt2 has 12 heads, which 8 does not divide."""
    question = ("gpt2", "--cluster", "1x8xA100-80G", "--seq-len", "1024", "--global-batch-size", "8")
    ran = run("evaluate", *question, "--strategy", "tp=8", "--json")
    assert ran.code == 3
    assert validated(ran.out, "error")["reasons"] == {"heads_tp": 1}


def test_a_batch_that_the_requested_dp_does_not_divide_names_the_nearest(run: Run) -> None:
    ran = run("plan", "--target=any", *CORE[:-4], "--global-batch-size", "10", "--fix", "dp=4")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "8 and 12" in ran.err


def test_memory_of_the_host_is_in_the_answers(run: Run) -> None:
    """Llama-3.1-8B with tp 2: 65 norms of 4,096 parameters are whole on each rank, the others halved;
    (8,030,261,248 - 266,240) / 2 + 266,240 = 4,015,263,744 parameters of 16 bytes of optimizer state on the
    host, and 2 GiB of the process: 66,391,703,552 bytes of the 2 TiB / 2 of a node."""
    question = (
        "llama-3.1-8b", "--cluster", "1x2xA100-80G", "--seq-len", "4096", "--global-batch-size", "16",
    )  # fmt: skip
    expected = {"used": 66_391_703_552.0, "capacity": 2.0**40}
    ran = run("evaluate", *question, "--strategy", "tp=2,offload=optimizer", "--json")
    assert validated(ran.out, "evaluation")["result"]["host_memory_bytes"] == expected
    fixed = (*question, "--target", "megatron-lm", "--fix", "tp=2,offload=optimizer,recompute=none", "--json")
    points = validated(run("frontier", *fixed).out, "frontier")["points"]
    assert points and all(one["host_memory_bytes"]["capacity"] == expected["capacity"] for one in points)
    assert expected in [one["host_memory_bytes"] for one in points]
    card = run("evaluate", *question, "--strategy", "tp=2,offload=optimizer").out
    assert " host memory   61.8 of 1024.0 GiB per rank\n" in card  # 66,391,703,552 / 2^30
