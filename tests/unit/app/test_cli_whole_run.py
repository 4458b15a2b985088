"""The whole run on cards and in JSON: `--tokens`, `--steps`, `--days`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

if TYPE_CHECKING:
    from tests.unit.app.conftest import Planner, Run

ROOT = Path(__file__).parents[3]
QUESTION = ("llama-3.1-8b", "--cluster", "2x8xA100-80G", "--seq-len", "4096", "--global-batch-size", "64")
PLAN = ("plan", "--target=any", *QUESTION)
IDEAL = ("--mtbf", "1e8h", "--checkpoint-interval", "1h", "--checkpoint-stall", "1ms", "--jitter", "0")


def document(text: str, name: str) -> Any:
    found = json.loads(text)
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(found)
    return found


def whole_run(out: str) -> list[str]:
    lines = out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(" whole run "))
    return [line[15:] for line in lines[start:]]


def test_the_card_shows_days_device_hours_money_and_energy(run: Run, planner: Planner) -> None:
    """64 x 4,096 tokens in 12.5 s on 16 A100: 1T tokens are 3,814,698 steps = 551.9 days = 211,928 device
    hours. At $5 an hour $1.06 million; at 400 W 84.8 MWh.
    """
    out = run(*PLAN, "--tokens", "1T", "--price", "5", *IDEAL).out
    shown = whole_run(out)
    assert shown[:2] == [
        "552 days   80 % band 497 to 662 days",
        "for 1 trillion tokens in 3,814,698 steps",
    ]
    assert shown[3:6] == [
        "211,928 device hours   on 16 devices, goodput 100.0 %",
        "$1.06 million   at $80.0 an hour; price of A100-80G: $5 an hour",
        "                (given)",
    ]
    assert shown[6].startswith("84.8 MWh   power of A100-80G: 400 W, rated (NVIDIA A100")
    assert max(map(len, out.split("whole run")[1].split("\n\n")[0].splitlines())) <= 80
    assert " goodput " in out


def test_days_show_how_many_tokens_they_train(run: Run, planner: Planner) -> None:
    """30 days are 2,592,000 s: 207,360 steps of 12.5 s with 262,144 tokens: 54.4 billion."""
    shown = whole_run(run(*PLAN, "--days", "30.0001", *IDEAL).out)
    assert shown[1] == "for 54.4 billion tokens in 207,360 steps"


def test_documents_have_the_run_where_it_is_requested(run: Run, planner: Planner) -> None:
    found = document(run(*PLAN, "--steps", "500000", "--json").out, "plan-answer")
    own = found["whole_run"]
    assert own["steps"] == 500_000 and own["tokens"] == 500_000 * 64 * 4096
    assert own["computing_s"] == 500_000 * 12.5
    assert own["wall_s"] == pytest.approx(own["computing_s"] / found["goodput"]["fraction"], rel=1e-12)
    assert own["usd"] == pytest.approx(own["device_hours"] / 16 * own["usd_per_hour"], rel=1e-12)
    assert "list price" in own["prices"][0]
    assert "whole_run" not in document(run(*PLAN, "--json").out, "plan-answer")


def test_evaluate_shows_it_too(run: Run) -> None:
    evaluate = ("evaluate", *QUESTION, "--strategy", "tp=8,pp=2,zero_stage=1")
    found = document(run(*evaluate, "--tokens", "1T", "--json").out, "evaluation")
    step_s = found["result"]["step_time_s"]
    assert found["whole_run"]["computing_s"] == pytest.approx(3_814_698 * step_s, rel=1e-12)
    assert whole_run(run(*evaluate, "--tokens", "1T").out)[0].endswith(" days")
    assert "whole run" not in run(*evaluate).out


def test_frontier_shows_days_against_money_per_device_count(run: Run) -> None:
    small = ("gpt2", "--cluster", "1x2xV100-32G", "--global-batch-size", "8", "--seq-len", "512")
    frontier = ("frontier", *small, "--space", "core", "--target=any", "--tokens", "1B")
    found = document(run(*frontier, "--json").out, "frontier")
    assert found["mode"] == "profile" and found["uneven"] is None
    fastest = {entry["devices"]: entry["fastest"]["time_s"] for entry in found["profile"]}
    for one in found["whole_run"]:
        own = one["run"]
        assert one["time_s"] == own["step_time_s"] == fastest[own["devices"]]
        assert own["steps"] == 244_141  # 1e9 / 4,096
        assert own["wall_s"] * own["goodput"]["fraction"] == pytest.approx(244_141 * one["time_s"])
    assert [one["run"]["devices"] for one in found["whole_run"]] == [1, 2]
    assert " whole run     for 1 billion tokens in 244,141 steps" in run(*frontier).out
    chosen = document(run(*frontier, "--mode", "time", "--json").out, "frontier")
    assert [one["run"]["devices"] for one in chosen["whole_run"]] == [2] and chosen["chosen"] is not None


def test_uniform_frontiers_of_mixed_clusters_say_so(run: Run) -> None:
    mixed = ("gpt2", "--cluster", "1x2xV100-32G+1x2xA100-40G", "--global-batch-size", "8", "--seq-len", "512")
    frontier = ("frontier", *mixed, "--space", "core", "--target=any")
    assert document(run(*frontier, "--json").out, "frontier")["uneven"] == "not searched"
    out = run(*frontier).out
    assert "uniform strategies only; `plan` has uneven plans, maybe faster" in out
    assert "the fastest uniform strategy" in out


@pytest.mark.parametrize(
    ("command", "options", "text"),
    [
        ("plan", ("--tokens", "15Q"), "--tokens: is no number of tokens"),
        ("plan", ("--tokens", "15T", "--steps", "5"), "--steps: cannot be combined with --tokens"),
        ("plan", ("--days", "0"), "--days: is not a number in range"),
        ("plan", ("--power", "1kW"), "--power: requires the length of a run"),
        ("plan", ("--steps", "5", "--power", "1h"), "--power: has a unit that is not in W"),
        ("plan", ("--steps", "5", "--events", "lost n1"), "cannot be combined with --events"),
        ("evaluate", ("--strategy", "tp=8", "--mtbf", "9h"), "--tokens: is missing"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_one_line(
    run: Run, planner: Planner, command: str, options: tuple[str, ...], text: str
) -> None:
    ran = run(command, *QUESTION, *options)
    assert (ran.code, ran.out, planner.questions) == (2, "", [])
    assert text in ran.err and ran.err.count("\n") == 1
