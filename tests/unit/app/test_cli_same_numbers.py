"""One plan has the same numbers wherever they are shown: on the card, in `explain`, by `--why-not` and
`--what-if`, and by `evaluate`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardwise.app.cli import words

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

QUESTION = ("gpt2-xl", "--cluster", "2x4xA100-40G", "--seq-len", "1024", "--global-batch-size", "32")


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> tuple[str, str]:
    """The file of a plan for Megatron-LM, and its card."""
    path = str(tmp_path / "plan.yaml")
    ran = run("plan", *QUESTION, "--target", "megatron-lm-0.19", "--save", path)
    assert ran.code == 0
    return path, ran.out


def answer(run: Run, *argv: str) -> Any:
    ran = run(*argv, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def row(card: str, label: str) -> str:
    (line,) = (line for line in card.splitlines() if line.startswith(f" {label:<14}"))
    return line[15:]


def table(text: str, title: str) -> dict[str, list[str]]:
    """The rows of a table, by their name: step time, slower, memory and likelihood."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f" {title}"))
    rows = (re.split(r"  +", re.sub(r"^ +(\d+)  ", r"\1 ", line).strip()) for line in lines[start + 1 :])
    return {name: figures for name, *figures in rows if len(figures) == 4}


def test_card_and_evaluate_and_explain_agree(run: Run, saved: tuple[str, str]) -> None:
    path, shown = saved
    command = shown.replace(" \\\n", " ").split("shardwise evaluate")[1].splitlines()[0]
    again = run("evaluate", *shlex.split(command))
    for label in ("step time", "throughput", "MFU", "peak memory", "host memory", "strategy"):
        assert row(again.out, label) == row(shown, label)
    explained = run("explain", path).out
    terms = shown.split("where the time goes")[1].split("\n\n")[0]
    assert explained.split("where the time goes")[1].split("\n\n")[0] == terms
    assert terms == again.out.split("where the time goes")[1].split("\n\n")[0]
    step = row(shown, "step time").split("  ")[0]
    assert f"step {step}" in explained


def test_every_row_of_explain_is_the_answer_of_why_not(run: Run, saved: tuple[str, str]) -> None:
    path, _ = saved
    found = answer(run, "explain", path)
    rows = table(run("explain", path).out, "the best plan with")
    by_label = {label: figures for name, figures in rows.items() for label in name.split(", ")}
    compared = 0
    for axis in found["axes"]:
        for one in axis["alternatives"]:
            text = {True: "yes", False: "no"}.get(one["value"], one["value"])
            if one["reason"] is not None:
                assert run("explain", path, "--why-not", f"{axis['field']}={text}").code in (2, 3)
                continue
            why_not = answer(run, "explain", path, "--why-not", f"{axis['field']}={json.dumps(one['value'])}"
                             if isinstance(one["value"], bool) else f"{axis['field']}={text}")  # fmt: skip
            result, best = why_not["result"], found["best"]
            slower = result["step_time_s"] / best["step_time_s"] - 1.0
            assert one["slower"] == pytest.approx(slower, abs=1e-12)
            assert one["device_bytes"] == result["peak_memory_bytes"]["device"]
            figures = by_label[f"{axis['field']} {text}"]
            memory = words.memory(result["peak_memory_bytes"]["device"])
            fits = f"{result['fits_probability']:.2f}"
            assert figures == [
                words.seconds(result["step_time_s"]), words.slower_text(slower), memory, fits
            ]  # fmt: skip
            compared += 1
    assert compared >= 5


def test_what_binds_is_the_answer_of_what_if(run: Run, saved: tuple[str, str]) -> None:
    """Without a tolerance the plan is the optimum, and so is that of the changed question."""
    path, _ = saved
    exact = str(Path(path).with_name("exact.yaml"))
    assert run(
        "plan", *QUESTION, "--target", "megatron-lm-0.19", "--tolerance", "0", "--save", exact
    ).code == 0  # fmt: skip
    found = answer(run, "explain", exact)
    names = {one["resource"] for one in found["relaxed"]}
    assert {"computation", "device memory", "links inside nodes", "links between nodes"} <= names
    for one in found["relaxed"]:
        changed = answer(run, "explain", exact, "--what-if", one["change"])
        assert one["step_time_s"] == changed["result"]["step_time_s"]
        rows = changed["job"]["global_batch_size"] / 32
        gain = 1.0 - changed["result"]["step_time_s"] / rows / found["best"]["step_time_s"]
        assert one["gain"] == pytest.approx(gain, abs=1e-9)


def test_the_report_has_the_numbers_of_the_card(run: Run, saved: tuple[str, str], tmp_path: Path) -> None:
    path, shown = saved
    page = tmp_path / "plan.html"
    assert run("report", path, "--out", str(page)).code == 0
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    assert found is not None
    (plan,) = json.loads(found[1])["plans"]
    explained = answer(run, "explain", path)
    best = plan["best"]
    for name in ("step_time_s", "strategy", "breakdown", "memory", "fits_probability"):
        assert best[name] == explained["best"][name]
    peak = best["peak_memory_bytes"]
    memory = f"{words.gib(peak['device'])} of {words.gib(peak['capacity'])} GiB"
    assert row(shown, "peak memory").startswith(memory)
    assert row(shown, "step time").startswith(words.seconds(best["step_time_s"]))
    assert row(shown, "how sure").split(" (")[0] in json.dumps(plan["texts"], ensure_ascii=False)


def test_alternatives_of_the_card_are_those_of_its_json(run: Run) -> None:
    argv = ("plan", *QUESTION, "--target", "megatron-lm-0.19")
    document = answer(run, *argv)
    shown = run(*argv, "--verbose").out
    rows = table(shown, "alternatives")
    assert rows
    for name, (time, slower, memory, _) in rows.items():
        one = document["runners_up"][int(name.split()[0]) - 2]
        over = one["step_time_s"] / document["best"]["step_time_s"] - 1.0
        assert (time, slower) == (words.seconds(one["step_time_s"]), words.slower_text(over))
        assert memory == words.memory(one["peak_memory_bytes"]["device"])
