"""The goals that `make bench` reports as met or missed."""

from __future__ import annotations

import subprocess

import pytest
from benchmarks import __main__ as bench
from benchmarks.goals import GOALS, goals_of


def test_every_goal_is_of_a_benchmark_that_is_run() -> None:
    assert set(GOALS) <= set(bench.BENCHMARKS)


def test_missed_goals_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """At most 6 CPU s and 0.1 % proven: one is met, one is missed. No goal limits the number of points."""
    missed = bench.report("graph vgg16_16", {"points": 3.0, "search_cpu_s": 6.0, "proven": 0.002})
    assert missed == ["graph vgg16_16: proven 0.002, goal at most 0.001"]
    points, seconds, proven = capsys.readouterr().err.splitlines()
    assert "goal" not in points
    assert seconds.endswith("goal: at most 6, met") and proven.endswith("goal: at most 0.001, NOT met")


def test_a_goal_with_a_share_must_be_reached() -> None:
    assert bench.report("workers deepseek_v3_2048", {"speedup": 1.7}) == []
    assert bench.report("workers deepseek_v3_2048", {"speedup": 1.69}) != []


def test_a_candidate_better_than_the_best_is_a_miss_of_any_search() -> None:
    assert bench.report("search llama8b_8", {"drawn_better": 1.0, "counted_apart": 0.0}) == [
        "search llama8b_8: drawn_better 1, goal at most 0"
    ]


def test_a_goal_without_its_figure_is_no_silent_pass() -> None:
    with pytest.raises(KeyError, match="measures no 'search_cpu_s'"):
        list(goals_of("search gpt3_64", {"seconds": 1.0}))


def test_one_miss_ends_the_run_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"cold start": {"wall_s": 0.5}, "fit": {"cpu_s": 301.0}}
    monkeypatch.setattr(bench, "BENCHMARKS", {name: dict for name in found})
    monkeypatch.setattr(bench, "measured_in_process", found.__getitem__)
    assert bench.main([]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "NOT met: fit: cpu_s 301, goal at most 300"
    found["fit"] = {"cpu_s": 300.0}
    assert bench.main([]) == 0


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (subprocess.TimeoutExpired("benchmarks", bench.TIMEOUT_S), "ended after 600 s without figures"),
        (subprocess.CalledProcessError(3, "benchmarks"), "ended with exit code 3"),
    ],
)
def test_a_benchmark_without_figures_is_a_miss_and_the_next_is_run(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(name: str) -> dict[str, float]:
        if name == "fit":
            return {"cpu_s": 300.0}
        raise error

    monkeypatch.setattr(bench, "BENCHMARKS", {"cold start": dict, "fit": dict})
    monkeypatch.setattr(bench, "measured_in_process", measured)
    assert bench.main([]) == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == f"NOT met: cold start: {why}"
    assert '"fit"' in captured.out and '"cold start"' not in captured.out
