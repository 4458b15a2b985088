"""Goodput on the card and in JSON: when it is reported, the effect of its options, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

if TYPE_CHECKING:
    from tests.unit.app.conftest import Planner, Run

ROOT = Path(__file__).parents[3]
JOB = ("--seq-len", "4096", "--global-batch-size", "64")
SMALL = ("plan", "--target=any", "llama-3.1-8b", "--cluster", "2x8xA100-80G", *JOB)
LARGE = ("plan", "--target=any", "llama-3.1-8b", "--cluster", "128x8xA100-80G", *JOB[:-1], "1024")


def answer(text: str) -> Any:
    document = json.loads(text)
    schema = json.loads((ROOT / "docs" / "reference" / "schemas" / "plan-answer.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def test_goodput_is_shown_on_large_clusters_and_on_request(run: Run, planner: Planner) -> None:
    assert " goodput " in run(*LARGE).out
    assert " goodput " not in run(*SMALL).out
    for option, text in (
        ("--mtbf", "50000h"), ("--checkpoint-interval", "30min"), ("--checkpoint-stall", "5"),
        ("--restart", "2min"), ("--jitter", "0"),
    ):  # fmt: skip
        assert " goodput " in run(*SMALL, option, text).out


def test_the_card_shows_goodput_and_its_losses(run: Run, planner: Planner) -> None:
    options = ("--mtbf", "16000h", "--checkpoint-interval", "30min", "--checkpoint-stall", "18s")
    lines = run(*SMALL, *options, "--restart", "600", "--jitter", "0.01").out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(" goodput "))
    shown = [line[15:] for line in lines[start : lines.index("", start)]]
    # 16 devices: a failure every 1,000 h = 41.7 d, (1,800 + 18) / 2 + 600 = 1,509 s = 25.15 min each: 0.04 %.
    # 18 of each 1,818 s are 0.99 %. Two nodes: 1 % * sqrt(2 ln 2) = 1.18 % slower, of 98.97 %.
    # 0.99958 * 0.99010 / 1.01177 = 0.97817; 262,144 tokens / 12.5 s * 0.97817 = 20,513.7 a second.
    assert shown == [
        "97.8 %   of a long run is progress: 20,514 tokens/s in all",
        "failures take 0.0 %: 25.1 min every 41.7 d, a device fails every",
        "16,000 h",
        "checkpoints take 1.0 %: 18 s every 30 min",
        "jitter takes 1.2 %: 1.00 % a node, the slowest of 2 nodes",
    ]


def test_the_card_stays_within_its_columns(run: Run, planner: Planner) -> None:
    lines = run(*LARGE, "--mtbf", "99999999h", "--restart", "2591999.5s").out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(" goodput "))
    shown = lines[start : lines.index("", start)]
    assert max(map(len, shown)) <= 80
    assert " a device fails every 99,999,999 h " in " ".join(" ".join(shown).split())
    often = run(*LARGE, "--mtbf", "10.5h").out
    assert "0.0 %   of a long run is progress: 0 tokens/s in all" in often
    assert "a device fails every 10.5 h " in " ".join(often.split())


def test_the_document_has_the_inputs_and_the_parts(run: Run, planner: Planner) -> None:
    document = answer(run(*LARGE, "--json").out)
    goodput = document["goodput"]
    assert goodput["fraction"] + sum(goodput["lost"].values()) == pytest.approx(1.0, abs=1e-15)
    # 50,677 h over 1,024 devices.
    assert goodput["system_mtbf_s"] == pytest.approx(54 * 86400 / 419 * 16)
    assert goodput["inputs"]["checkpoint_interval_s"] is None
    given = answer(run(*LARGE, "--json", "--restart", "0s", "--jitter", "0.02").out)["goodput"]
    assert (given["inputs"]["restart_s"], given["inputs"]["jitter"]) == (0.0, 0.02)
    assert given["lost"]["jitter"] > goodput["lost"]["jitter"]
    assert given["lost"]["failures"] < goodput["lost"]["failures"]
    assert answer(run(*SMALL, "--json").out)["goodput"] is None


def test_goodput_options_change_neither_the_question_nor_the_plan(run: Run, planner: Planner) -> None:
    plain = answer(run(*LARGE, "--json").out)
    with_options = answer(run(*LARGE, "--json", "--mtbf", "10h", "--jitter", "0.5").out)
    first, second = planner.questions
    assert first == second
    assert {**plain, "goodput": None} == {**with_options, "goodput": None}


@pytest.mark.parametrize(
    ("option", "text", "found"),
    [
        ("--mtbf", "50000", "has no unit"),
        ("--mtbf", "1s", "is not a time in range"),
        ("--mtbf", "2e8h", "is not a time in range"),
        ("--mtbf", "often", "is not a number with a unit"),
        ("--checkpoint-interval", "30m", "has a unit that is not a time"),
        ("--checkpoint-interval", "0s", "is not a time in range"),
        ("--checkpoint-interval", "1800", "has no unit"),
        ("--checkpoint-stall", "0", "is not a time in range"),
        ("--checkpoint-stall", "6GB", "has a unit that is not a time"),
        ("--restart", "-1", "is not a time in range"),
        ("--restart", "31d", "is not a time in range"),
        ("--restart", "", "is not a number with a unit"),
        ("--jitter", "1.5", "is not a number in range"),
        ("--jitter", "5 %", "is not a number in range"),
        ("--jitter", "-0.1", "is not a number in range"),
    ],
)
def test_impossible_goodput_options_are_refused_in_one_line(
    run: Run, planner: Planner, option: str, text: str, found: str
) -> None:
    ran = run(*SMALL, f"{option}={text}")
    assert (ran.code, ran.out, planner.questions) == (2, "", [])
    assert ran.err.startswith(f"shardwise: error: {option}: ") and ran.err.count("\n") == 1
    assert "; allowed: " in ran.err and (found in ran.err or text == "-1")
