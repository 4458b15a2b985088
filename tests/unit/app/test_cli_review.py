"""The command `review`: its card, its JSON answer, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.app.conftest import Run
from tests.unit.app.test_cli_commands import validated
from tests.unit.test_review import DENSE, RECOMPUTED, TP_2

CLUSTER = ("--cluster", "2x8xH100-SXM")


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "run.args"
    file.write_text(text)
    return str(file)


def test_the_card(run: Run, tmp_path: Path) -> None:
    ran = run("review", written(tmp_path, f"{DENSE} {TP_2} {RECOMPUTED}"), *CLUSTER)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert all(len(line) <= 100 for line in lines)
    heads = (
        "verdict       fits", "best", "findings", "change 1", "best plan", "strategy", "where the time",
    )  # fmt: skip
    places = [
        next(place for place, line in enumerate(lines) if line.startswith(f" {head}")) for head in heads
    ]
    assert places == sorted(places)
    assert "warning  recompute_not_needed  --recompute-granularity" in ran.out
    assert "                 without --recompute-granularity\n" in ran.out


@pytest.mark.slow
def test_the_answer_has_its_schema(run: Run, tmp_path: Path) -> None:
    """A configuration that fits, one with a measured step, one too large, and one that is illegal."""
    file = written(tmp_path, f"{DENSE} {TP_2}")
    plain = validated(run("review", file, *CLUSTER, "--json").out, "review")
    assert plain["fits"] and plain["step_time_s"] == plain["predicted_s"] and plain["scale"] == 1.0
    measured = validated(run("review", file, *CLUSTER, "--measured", "8s", "--json").out, "review")
    assert measured["step_time_s"] == measured["measured_s"] == 8.0
    assert measured["best"]["gain_s"] == pytest.approx(8.0 - measured["best"]["step_time_s"])
    large = written(tmp_path, DENSE.replace("--micro-batch-size 1", "--micro-batch-size 4"))
    assert validated(run("review", large, *CLUSTER, "--json").out, "review")["fits"] is False
    illegal = written(tmp_path, f"{DENSE} {TP_2}".replace("-size 128 ", "-size 100 "))
    found = validated(run("review", illegal, *CLUSTER, "--json").out, "review")
    assert found["fits"] is found["step_time_s"] is found["strategy"] is None and found["changes"]
    assert "is not a legal configuration" in run("review", illegal, *CLUSTER).out


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--measured", "fast"), ("--measured",)),
        (("--model", "llama-9"), ("llama-9",)),
        (("--seq-len", "2048"), ("--seq-len: is 4096 in the file", "found 2048")),
        (("--fix", "tpp=8"), ("--fix", "tpp")),
    ],
)
def test_a_wrong_option_is_an_error_of_one_line(
    run: Run, tmp_path: Path, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    ran = run("review", written(tmp_path, DENSE), *CLUSTER, *options)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert all(part in ran.err for part in parts)


def test_a_file_of_nothing_known_is_an_error(run: Run, tmp_path: Path) -> None:
    ran = run("review", written(tmp_path, "hello"), *CLUSTER)
    assert ran.code == 2 and "is no configuration of known software" in ran.err and "DeepSpeed" in ran.err
