"""`explain`, the frontier, objectives and space files through the command, with the real planner."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from shardwise.app.cli.card import FRONTIER_LINES, spaced_indices
from shardwise.plans import read_plan
from shardwise.search import Fastest
from shardwise.search.bnb import solver
from shardwise.search.bnb.branch import SubtreeSearch

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"
QUESTION = ("gpt2", "--cluster", "2x2xA100-80G", "--seq-len", "1024", "--global-batch-size", "12")
CORE = (*QUESTION, "--space", "core")


def validated(text: str, name: str) -> Any:
    document = json.loads(text)
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> str:
    path = str(tmp_path / "plan.yaml")
    assert run("plan", "--target=any", *CORE, "--save", path).code == 0
    return path


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_explain_counts_every_candidate(run: Run, saved: str) -> None:
    ran = run("explain", saved)
    assert (ran.code, ran.err) == (0, "")
    assert fits(ran.out)
    document = validated(run("explain", saved, "--json").out, "explanation")
    count = json.loads(run("space", *CORE, "--json").out)["count"]
    assert document["candidates"] == sum(document["totals"].values()) == count
    assert sum(block["candidates"] for block in document["blocks"]) == count
    assert f"{count:,}" in ran.out
    assert document["agrees"] is True
    searched = [(axis["field"], one) for axis in document["axes"] for one in axis["alternatives"]]
    assert {"tp", "pp", "dp", "micro_batch_size", "recompute"} <= {name for name, _ in searched}
    assert all(
        f"{name} {one['value']}" in ran.out for name, one in searched if one["value"] not in (True, False)
    )
    binds = next(line for line in ran.out.splitlines() if line.startswith(" what binds "))
    assert document["relaxed"][0]["resource"] in binds and document["relaxed"][0]["change"] in ran.out
    everything = run("explain", saved, "--verbose")
    assert fits(everything.out) and "the best; " in everything.out
    assert "heads_tp" not in everything.out
    assert document["best"]["step_time_s"] == read_plan(saved).best.step_time_s


@pytest.mark.slow
def test_why_not_shows_the_difference_term_by_term(run: Run, saved: str) -> None:
    best = read_plan(saved).best.strategy.tp
    other = 2 if best == 1 else 1
    ran = run("explain", saved, "--why-not", f"tp={other}")
    assert ran.code == 0 and fits(ran.out)
    document = validated(run("explain", saved, "--why-not", f"tp={other}", "--json").out, "explanation")
    assert document["kind"] == "why_not"
    assert document["result"]["strategy"]["tp"] == other
    difference = document["difference"]
    assert difference["step_time_s"] == pytest.approx(
        document["result"]["step_time_s"] - document["best"]["step_time_s"]
    )
    assert sum(difference["breakdown"].values()) == pytest.approx(difference["step_time_s"])
    assert sum(difference["memory"].values()) == pytest.approx(difference["device_bytes"])
    assert f"tp {best} → {other}" in ran.out


def test_why_not_of_an_illegal_change_exits_3_with_its_reasons(run: Run, saved: str) -> None:
    """A pipeline of 4 ranks with 12 / 6 = 2 micro-batches has no interleaving."""
    ran = run("explain", saved, "--why-not", "pp=4,schedule=interleaved_1f1b,micro_batch_size=6")
    assert ran.code == 3
    reason = ran.err.splitlines()[1]
    assert reason.startswith("  rejected: ")
    assert "not met: interleaved_1f1b needs micro-batches divisible by pp" in reason


@pytest.mark.slow
def test_what_if_plans_again(run: Run, saved: str) -> None:
    ran = run("explain", saved, "--what-if", "nodes=2x")
    assert ran.code == 0 and fits(ran.out)
    document = validated(run("explain", saved, "--what-if", "nodes=2x", "--json").out, "explanation")
    assert document["cluster"]["devices"] == 8
    assert document["result"]["step_time_s"] < document["best"]["step_time_s"]
    refused = run("explain", saved, "--what-if", "nodes=2q")
    assert refused.code == 2 and refused.err.count("\n") == 1


def test_a_plan_file_has_the_question_and_the_checker_agrees(run: Run, tmp_path: Path) -> None:
    space = tmp_path / "space.yaml"
    space.write_text("base: core\naxes: {tp: [1, 2], schedule: [1f1b, gpipe]}\n")
    path = str(tmp_path / "plan.yaml")
    ran = run("plan", "--target=any", *QUESTION, "--space", str(space), "--fix", "dp=2", "--save", path)
    assert ran.code == 0
    assert "only tp 1 2 · schedule 1f1b gpipe · dp 2" in " ".join(ran.out.split())
    certificate = read_plan(path).proof
    modules = {"recompute_modules": ("", "mlp")}  # next to our own set
    assert (
        certificate.axes == {"tp": (1, 2), "schedule": ("1f1b", "gpipe"), **modules} and certificate.own_set
    )
    assert (certificate.space, certificate.fixed, certificate.unexplored) == ("core", {"dp": 2}, 0)
    checked = run("check", path)
    assert checked.code == 0, checked.out
    counted = json.loads(run("space", *QUESTION, "--space", str(space), "--fix", "dp=2", "--json").out)
    assert counted["count"] == certificate.enumerated
    assert counted["axes"]["tp"] == ["1", "2"] and counted["axes"]["schedule"] == ["1f1b", "gpipe"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "fix", "words"),
    [
        ("axes: {tp: [3]}", "", ("axes.tp", "leaves no candidate", "allowed: 1, 2, 4")),
        ("axes: {tp: [4], pp: [2, 4]}", "", ("axes.pp", "together with tp", "allowed: 1")),
        ("axes: {pp: [1], schedule: [gpipe]}", "", ("axes.schedule", "allowed: 1f1b")),
        ("axes: {tp: [4]}", "dp=2", ("axes.tp", "together with dp", "allowed: 1, 2")),
    ],
)
def test_values_that_exclude_each_other(
    run: Run, tmp_path: Path, text: str, fix: str, words: tuple[str, ...]
) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    for command in ("plan", "space"):
        ran = run(command, *QUESTION, "--space", str(path), *(("--fix", fix) if fix else ()))
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.count("\n") == 1 and str(path) in ran.err
        assert all(word in ran.err for word in words), ran.err


@pytest.mark.slow
def test_the_frontier_is_listed_and_shown_in_part(run: Run) -> None:
    ran = run("plan", "--target=any", *CORE, "--frontier")
    assert ran.code == 0 and fits(ran.out.split(" next ")[0])
    document = validated(run("plan", "--target=any", *CORE, "--frontier", "--json").out, "plan-answer")
    points = document["frontier"]
    times = [point["step_time_s"] for point in points]
    nbytes = [point["peak_memory_bytes"]["device"] for point in points]
    assert len(points) > 3
    assert times == sorted(times) and nbytes == sorted(nbytes, reverse=True)
    assert times[0] == document["best"]["step_time_s"]
    assert len(document["runners_up"]) == 8
    lines = ran.out.split("time against memory")[1].split("\n\n")[0].splitlines()
    assert len(lines) - 1 == min(len(points), FRONTIER_LINES)
    assert f"{len(points)} points" in lines[0]


def test_a_long_frontier_is_shown_at_selected_points() -> None:
    assert spaced_indices(5, 12) == [0, 1, 2, 3, 4]
    # 0 to 100 in eleven steps of 9.09.
    assert spaced_indices(101, 12) == [0, 9, 18, 27, 36, 45, 55, 64, 73, 82, 91, 100]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["memory", "devices", "cost"])
def test_objectives_are_saved_with_the_cluster_used(run: Run, tmp_path: Path, objective: str) -> None:
    path = str(tmp_path / "plan.yaml")
    document = validated(
        run("plan", "--target=any", *CORE, "--objective", objective, "--json", "--save", path).out,
        "plan-answer",
    )
    plan = read_plan(path)
    assert plan.objective == document["objective"] == objective
    assert plan.cluster.devices == document["devices_used"] == document["cluster"]["devices"]
    # gpt2 fits on one device.
    assert document["devices_used"] == {"memory": 4, "devices": 1}.get(objective, document["devices_used"])
    assert document["is_proven"] is True
    checked = run("check", path)
    assert checked.code == 0, checked.out


@pytest.mark.slow
def test_a_search_out_of_time_reports_its_gap(run: Run) -> None:
    question = (
        "llama-3.1-70b",
        "--cluster",
        "8x8xH100-SXM",
        "--seq-len",
        "8192",
        "--global-batch-size",
        "256",
    )
    ran = run("plan", "--target=any", *question, "--budget", "1ms")
    assert (ran.code, ran.err) == (0, "")
    assert "not proven: gap " in ran.out and " unexplored" in ran.out


def test_a_search_that_finds_nothing_in_time_is_a_one_line_error(run: Run) -> None:
    question = (
        "llama-3.1-405b",
        "--cluster",
        "8xH100-SXM",
        "--seq-len",
        "8192",
        "--global-batch-size",
        "256",
    )
    ran = run("plan", "--target=any", *question, "--budget", "1ms")
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.count("\n") == 1
    assert "nothing that fits was found within the budget of 1 ms" in ran.err


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """An interrupt in the next search, after its first incumbent or before it; the search runs its primal
    heuristics first, as in a large space.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    offer, subtree_run = Fastest.offer, SubtreeSearch.run

    def found(self: Fastest, *incumbents: Any) -> None:
        offer(self, *incumbents)
        if self.incumbents:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)

    def begun(self: SubtreeSearch) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)
        subtree_run(self)

    def interrupt_after(is_after: bool) -> None:
        monkeypatch.setattr(solver, "SMALL_SPACE", 0)
        if is_after:
            monkeypatch.setattr(Fastest, "offer", found)
        else:
            monkeypatch.setattr(SubtreeSearch, "run", begun)

    yield interrupt_after
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_an_interrupt_in_the_first_heuristic_prints_the_best_so_far(
    run: Run, interrupted: Callable[[bool], None], tmp_path: Path
) -> None:
    interrupted(True)
    ran = run("plan", "--target=any", *QUESTION)
    assert ran.code == 130
    assert ran.err == "shardwise: interrupted; this is the best so far\n"
    assert "step time" in ran.out and "not proven" in ran.out
    interrupted(True)
    path = str(tmp_path / "plan.yaml")
    ran = run("plan", "--target=any", *QUESTION, "--json", "--save", path)
    assert ran.code == 130
    document = validated(ran.out, "plan-answer")
    assert document["is_interrupted"] and not document["is_proven"]
    assert 0.0 < document["certificate"]["gap"] < 1.0
    assert run("check", path).code == 0


def test_an_interrupt_before_anything_was_found_is_one_line(
    run: Run, interrupted: Callable[[bool], None]
) -> None:
    interrupted(False)
    ran = run("plan", "--target=any", *QUESTION)
    line = "shardwise: error: interrupted before there was an answer\n"
    assert (ran.code, ran.out, ran.err) == (130, "", line)
    interrupted(False)
    ran = run("plan", "--target=any", *QUESTION, "--json")
    assert (ran.code, ran.err) == (130, line)
    assert validated(ran.out, "error")["error"]["kind"] == "interrupted"


@pytest.mark.slow
def test_an_interrupt_of_explain_prints_the_best_so_far(
    run: Run, saved: str, interrupted: Callable[[bool], None]
) -> None:
    line = "shardwise: interrupted; this is what was found so far\n"
    interrupted(True)
    ran = run("explain", saved)
    assert (ran.code, ran.err) == (130, line)
    interrupted(True)
    ran = run("explain", saved, "--json")
    assert (ran.code, ran.err) == (130, line)
    assert validated(ran.out, "explanation")["unexplored"] > 0
    interrupted(True)
    ran = run("explain", saved, "--why-not", "dp=4")
    assert (ran.code, ran.err) == (130, line)


def heed_interrupts() -> None:
    """Processes in the background ignore interrupts, and their children would ignore them too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_an_interrupt_from_the_keyboard_ends_all_processes() -> None:
    question = (
        "deepseek-v3",
        "--cluster",
        "256x8xH800",
        "--seq-len",
        "4096",
        "--global-batch-size",
        "15360",
    )
    workers = str(min(os.cpu_count() or 1, 2))
    with subprocess.Popen(
        [sys.executable, "-m", "shardwise", "plan", *question, "--frontier", "--workers", workers],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        preexec_fn=heed_interrupts,
    ) as process:  # fmt: skip
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=2.0)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=600)
    # A shell reports 130 for both. Python ends itself by the signal, whatever the exit code, if the interrupt
    # arrives while source text is executed (dataclasses do that while modules load).
    assert process.returncode in (130, -signal.SIGINT)
    assert b"Traceback" not in err and b"interrupted" in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
